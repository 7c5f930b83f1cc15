"""Every call that fails leaves a text of its own: what an earlier failure said is gone, for readers in C too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.status import last_error, make_struct
from tests.meta.tree import Function, functions

STALE = "a buffer of 0 bytes aligned to 63"
FALLIBLE = [each for each in functions() if each.returns == "kvs_status" and each.name != "kvs_device_last_error"]
HUGE = 1 << 62


@dataclass(slots=True)
class World:
    """One object of each kind, by the name of its type."""

    device: Any
    objects: dict[str, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def make(self, kind: str, function: str, *arguments: Any) -> Any:
        out = ffi.new(f"{kind} **")
        assert getattr(lib, function)(*arguments, out) == lib.KVS_OK, last_error(self.device)
        self.objects[kind] = out[0]
        return out[0]

    def fill(self) -> None:
        device = self.objects["kvs_device"] = self.device
        geometry = {"n_kv_heads": 1, "head_dim_k": 64, "head_dim_v": 64, "type_k": 8, "type_v": 8}
        layer = ffi.new("kvs_kv_layer *", geometry)
        record = make_struct("kvs_record_info")
        assert lib.kvs_record_layout(layer, record) == lib.KVS_OK
        self.kept += [layer]
        self.make("kvs_buffer", "kvs_buffer_create", device, 1 << 16, 64)
        self.make("kvs_host", "kvs_host_create", device, 1 << 16)
        self.make("kvs_fence", "kvs_fence_create", device)
        arena = self.make("kvs_arena", "kvs_arena_create", device, 16 * record.record_bytes, 64)
        region = make_struct("kvs_region", id=1, size_bytes=16 * record.record_bytes, alignment_bytes=64)
        assert lib.kvs_arena_begin(arena, 0) == lib.KVS_OK
        assert lib.kvs_arena_reserve(arena, region) == lib.KVS_OK
        assert lib.kvs_arena_commit(arena) == lib.KVS_OK
        lease = self.make("kvs_lease", "kvs_arena_acquire", arena, 1)
        cache = self.make("kvs_cache", "kvs_cache_create", device, layer, 1)
        self.make("kvs_seq", "kvs_seq_create", cache, 1024)
        self.make("kvs_pager", "kvs_pager_create", cache)
        ring = make_struct("kvs_ring_desc", n_slots=4, lease=lease, slot_bytes=record.record_bytes)
        self.make("kvs_ring", "kvs_ring_create", device, ring)
        self.make("kvs_tape", "kvs_tape_create", device, 4, 4)
        self.make("kvs_coordinator", "kvs_coordinator_create", arena)
        span = ffi.new("kvs_span *", {"n_tokens": 300, "lease": lease, "stride_bytes": record.record_bytes})
        spans = make_struct("kvs_span_desc", n_spans=1, layer=layer, spans=span, active_tokens=300, n_query_rows=2)
        self.kept += [span]
        self.make("kvs_span_plan", "kvs_span_plan_make", device, spans)
        self.make("kvs_weight", "kvs_weight_create", device, 0, 64, 8, ffi.new("float[512]"), 0)

    def fail_before(self) -> None:
        """Leave a text that is none of the next call's."""
        assert lib.kvs_buffer_create(self.device, 0, 63, ffi.new("kvs_buffer **")) == lib.KVS_EINVAL
        assert STALE in last_error(self.device)

    def close(self) -> None:
        for kind in reversed([each for each in self.objects if each != "kvs_device"]):
            getattr(lib, f"{kind}_release")(self.objects[kind])


@pytest.fixture
def world() -> Iterator[World]:
    with Device(1) as device:
        made = World(device.ptr)
        made.fill()
        yield made
        made.close()


def arguments(function: Function, world: World) -> list[Any]:
    """The objects that it wants, no place for a result and nothing to read, and 0 for every number."""
    kinds = ffi.typeof(getattr(lib, function.name)).args
    return [
        world.objects.get(kind.item.cname.removeprefix("struct "), ffi.NULL)
        if kind.kind == "pointer"
        else (ffi.NULL if kind.kind == "function" else 0)
        for kind in kinds
    ]


@pytest.mark.parametrize("function", FALLIBLE, ids=lambda each: each.name)
def test_a_call_with_objects_alone_leaves_no_older_text(function: Function, world: World) -> None:
    given = arguments(function, world)
    takes_object = any(kind in str(ffi.typeof(each)) for kind in world.objects for each in given if each not in (0,))
    world.fail_before()
    status = getattr(lib, function.name)(*given)
    assert status >= 0 or not takes_object or STALE not in last_error(world.device)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda world, out: lib.kvs_buffer_create(world.device, HUGE, 64, out), rf"need {HUGE} bytes"),
        (lambda world, out: lib.kvs_buffer_create(world.device, 2**64 - 1, 64, out), rf"need {2**64 - 1} bytes"),
        (lambda world, out: lib.kvs_arena_create(world.device, HUGE, 64, out), rf"need {HUGE} bytes"),
        (lambda world, out: lib.kvs_arena_create(world.device, 64, 1 << 63, out), r"aligned to 9223372036854775808"),
    ],
)
def test_memory_that_cannot_be_had_is_named_with_its_size(world: World, call: Any, wanted: str) -> None:
    world.fail_before()
    out = ffi.cast("void *", ffi.new("void **"))
    assert call(world, ffi.cast("kvs_arena **" if "arena" in call.__code__.co_names[1] else "kvs_buffer **", out)) < 0
    with pytest.raises(AssertionError, match=wanted):
        raise AssertionError(last_error(world.device))


def test_attention_over_more_heads_than_can_be_counted_says_so(world: World) -> None:
    world.fail_before()
    values = ffi.new("float[64]")
    plan = world.objects["kvs_span_plan"]
    wide = make_struct("kvs_attend_desc", n_query_heads=2**32 - 1, plan=plan, q=values, out=values, scale=1.0)
    assert lib.kvs_attend_run(world.device, wide) in (lib.KVS_EOVERFLOW, lib.KVS_ENOMEM)
    assert "attention" in last_error(world.device)


def test_a_fence_that_failed_says_with_what(world: World) -> None:
    fence = world.objects["kvs_fence"]
    assert lib.kvs_fence_signal(fence, lib.KVS_EIO) == lib.KVS_OK
    for call in (lambda: lib.kvs_fence_query(fence), lambda: lib.kvs_fence_wait(fence, 1)):
        world.fail_before()
        assert call() == lib.KVS_EIO
        assert "KVS_EIO" in last_error(world.device)


@pytest.mark.parametrize("n_rows", [0, 2 * 256 + 1, 2**32 - 1])
def test_a_placement_for_more_rows_than_its_pages_hold_is_refused(world: World, n_rows: int) -> None:
    pages = ffi.new("uint32_t[]", [2])
    placement = make_struct("kvs_placement", n_layers=1, resident_pages=pages, ring_slots=1, max_rows=n_rows)
    assert lib.kvs_pager_attach(world.objects["kvs_pager"], world.objects["kvs_lease"], placement) == lib.KVS_EINVAL
    assert "rows" in last_error(world.device)


CROWDED = """
import pathlib, resource, sys
from pykvstream.core.device import Device
from pykvstream.errors import DeviceError
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (4 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Device(64)
except DeviceError as error:
    sys.exit(str(error))
"""


def test_a_device_that_cannot_start_its_threads_says_how_many_and_what_lacks() -> None:
    """Sixty-four stacks need more address space than is left."""
    ended = subprocess.run(
        [sys.executable, "-c", CROWDED],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 1
    assert "64 compute threads" in ended.stderr and "starts no more threads" in ended.stderr
    assert "[KVS_EIO]" in ended.stderr
