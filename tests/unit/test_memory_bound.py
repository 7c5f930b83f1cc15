"""The bound is a bound: device bytes never exceed the arena and the weights that the report lists (promise 6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.device import Device
from pykvstream.errors import NoSpace
from pykvstream.gguf import GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions
from tests.models import write_random_model
from tests.stack import Stack, cache_type, open_stack, smallest_arena


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("bound") / "model.gguf"
    write_random_model(where, n_layers=3, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, ctx=2048, seed=2)
    return where


@pytest.fixture(scope="module", params=[0, 5, 40], ids=lambda n: f"{n} slots more")
def stack(path: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with open_stack(path, extra_slots=request.param) as made:
        yield made


def test_a_whole_life_stays_within_arena_and_weights(stack: Stack) -> None:
    report = stack.model.report
    bound = report.arena_bytes + report.weight_bytes
    assert stack.device.info.device_bytes == bound
    with stack.model.session() as session:
        session.forward([i % 300 for i in range(1500)])
        for _ in range(3):
            session.forward([1], phase=Phase.DECODE)
        with session.fork() as child:
            child.forward([2] * 40, logits="all", phase=Phase.DECODE)
            session.forward([3], phase=Phase.DECODE)
            child.truncate(700)
            child.forward([4] * 600)
        session.truncate(10)
        session.forward([5] * 1300)
        assert stack.device.info.device_bytes == bound
    assert stack.device.info.device_peak_bytes == bound


def test_host_history_is_what_the_contexts_need_and_is_touched_as_it_grows(stack: Stack) -> None:
    shape = stack.model.plan.shape
    before = stack.device.info
    with stack.model.session(ctx_size=2048) as session:
        reserved = stack.device.info.host_bytes - before.host_bytes
        assert reserved == shape.history_bytes(2048)
        session.forward([1] * 300, logits="none")
        session.fork().close()  # every row is in history then
        touched = stack.device.info.host_touched_bytes - before.host_touched_bytes
        assert 0 < touched <= shape.history_bytes(300) + 4096 * 2 * shape.n_layers
    assert stack.device.info.host_bytes == before.host_bytes


def test_what_is_resident_fits_the_pool(stack: Stack) -> None:
    with stack.model.session() as session:
        session.forward([1] * 1900, logits="none")
        for phase in Phase:
            session.forward([1], phase=phase)
            slots = stack.model.plan.phases[phase.value].pool.n_slots
            assert session.stats.resident_pages + session.stats.ring_slots <= slots


@pytest.mark.parametrize("ctx", [100, 256, 700, 2048])
@pytest.mark.parametrize("ubatch", [1, 64, 300])
@pytest.mark.parametrize("types", [("F16", "F16"), ("Q8_0", "Q4_0")])
def test_the_smallest_arena_works_and_one_page_less_is_refused(
    path: Path, ctx: int, ubatch: int, types: tuple[str, str]
) -> None:
    k, v = (cache_type(name) for name in types)
    with GgufFile.open(path) as file, Device(1) as device:
        blueprint = Blueprint(file, ModelConfig.from_gguf(file), device, TargetOptions(k, v, ubatch, ctx))
        smallest = smallest_arena(blueprint)
        for less in (64, blueprint.shape.slot_bytes):
            with pytest.raises(NoSpace, match=str(smallest)):
                Target(device, blueprint, smallest - less)
        blueprint.close()
    with open_stack(path, ubatch_size=ubatch, ctx_size=ctx, cache_types=types) as stack:
        assert stack.model.report.arena_bytes == smallest
        with stack.model.session() as session:
            session.forward([i % 300 for i in range(ctx - 2)], logits="none")
            session.forward([1], phase=Phase.DECODE)
            session.forward([1], phase=Phase.PREFILL)
