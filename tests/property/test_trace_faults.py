"""Faults of order, planted one at a time: each is found at once, by a sentence that names both sides and the fence.

The first half takes one fence out of the product's own schedule; the second drives ring, span and tape as a wrong
caller would. Nothing in the library is edited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvstream._ffi import ffi, lib
from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import SKIP_COPY, HookPoint
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.host import Host
from pykvstream.core.kv import KvLayer, record_layout
from pykvstream.core.ring import Demand, Ring
from pykvstream.core.span import Span, SpanPlan
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, Tape, WeightLayout
from pykvstream.core.trace import TraceDevice, TraceFault, TraceWeight
from pykvstream.errors import Busy
from pykvstream.gguf import GgmlType
from pykvstream.runtime.target import Phase
from tests.rigs import tight_placement
from tests.tracing import SLOW_BUS, TraceRig, one_with, open_trace_rig, write_demo_shape

PROMPT = 1_500
PAGE = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "six.gguf"
    write_demo_shape(path, n_layers=6)
    return path


@pytest.fixture
def streaming(model: Path) -> Iterator[TraceRig]:
    """Nearly everything streams through a ring of a few slots."""
    with open_trace_rig(model, residency=0.0) as rig:
        rig.prefill(PROMPT)
        rig.target.place(Phase.DECODE, tight_placement(rig.target.plan, Phase.DECODE))
        rig.decode(2)
        assert rig.device.hazards() == []
        yield rig


@pytest.fixture
def resident(model: Path) -> Iterator[TraceRig]:
    """Nothing streams: the only copies of a decode pass are those out to history."""
    with open_trace_rig(model, residency=1.0) as rig:
        rig.prefill(PROMPT)
        rig.decode(2)
        assert rig.device.hazards() == []
        yield rig


# ---- one fence less in a schedule that is right ----


def test_copy_that_ignores_its_gate_meets_the_last_reader(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.DROP_GATE)
    streaming.decode(3)
    one_with(
        streaming.device.hazards(),
        "copy in",
        "overwrites 104448 bytes",
        "in ring slot",
        "which are read by attend",
        "(layer 5, page",
        "missing fence: the copy in must not begin before `consumed`",
    )


def test_gate_one_page_too_early_meets_the_last_reader(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.EARLY_GATE)
    streaming.decode(3)
    one_with(streaming.device.hazards(), "copy in", "which are read by attend", "must not begin before `consumed`")


def test_wave_that_does_not_wait_reads_a_page_that_has_not_arrived(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.DROP_WAIT, 1)
    streaming.decode(3)
    one_with(
        streaming.device.hazards(),
        "attend",
        "reads 104448 bytes",
        "in ring slot",
        " of layer 0, which copy in",
        "missing fence: a wait for the copy in (`ready`",
        "before its bytes are read",
    )


def test_wave_that_does_not_look_at_ready_is_found_though_the_page_is_there(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.DROP_LOOK)
    streaming.decode(3)
    sentences = streaming.device.hazards()
    one_with(sentences, "attend", "as page", "of layer 0", "missing fence: a wait for the copy in (`ready`")


def test_copy_that_says_done_when_it_begins_is_read_too_early(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.EARLY_DONE, 1)
    streaming.decode(3)
    one_with(streaming.device.hazards(), "attend", " of layer 0, which copy in", "before its bytes are read")


def test_gate_that_rises_unheard_stops_all_progress(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.DROP_ADVANCE)
    with pytest.raises(Busy, match="no copy that can run"):
        streaming.decode(3)
    one_with(
        streaming.device.hazards(),
        "no progress",
        "waits until a counter reaches",
        "at the head of its queue waits for",
        "nobody told the copy stream that its gate has risen",
    )


def test_wave_that_reads_behind_its_release_finds_another_page_in_the_slot(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.LATE_READ, 1)
    streaming.decode(3)
    sentences = streaming.device.hazards()
    one_with(sentences, "of layer 0, which", "`consumed` must follow the last reader")


def test_copy_one_slot_off_is_found_by_what_the_slot_holds(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.MISPLACE_COPY, 1)
    streaming.decode(3)
    one_with(streaming.device.hazards(), "attend", " of layer", "but they are page", " since copy in")


def test_copy_that_a_hook_swallows_leaves_nothing_to_read(streaming: TraceRig) -> None:
    n_copies = 0

    def swallow(point: HookPoint, _index: int) -> int:
        nonlocal n_copies
        n_copies += point is HookPoint.COPY
        return SKIP_COPY if point is HookPoint.COPY and 25 <= n_copies < 30 else 0

    streaming.device.set_hook(swallow)
    streaming.decode(3)
    streaming.device.set_hook(None)
    one_with(streaming.device.hazards(), "attend", ", which have been released", "must be brought again")


def test_copy_out_ahead_of_its_producer_is_found(resident: TraceRig) -> None:
    resident.device.plant(TraceFault.EARLY_COPY)
    resident.decode(3)
    one_with(
        resident.device.hazards(),
        "copy out",
        "which kv_write",
        "(layer 0, page 5,",
        "missing fence: the copy out must be queued behind the writer of its source",
    )


def test_page_that_streams_before_it_is_published_is_found(streaming: TraceRig) -> None:
    streaming.decode(6 * PAGE - PROMPT - 2)
    assert streaming.device.hazards() == []
    streaming.device.plant(TraceFault.DROP_WAIT)
    streaming.decode(2)
    one_with(
        streaming.device.hazards(),
        "copy in",
        "which copy out",
        "(layer 0, page 5,",
        "missing fence: a wait for the copy out to history",
        "before its bytes are used",
    )


def test_page_that_is_evicted_while_it_is_written_to_history_is_found(streaming: TraceRig) -> None:
    streaming.device.plant(TraceFault.DROP_WAIT)
    streaming.target.parts[-1].pager.forget()
    streaming.decode(1)
    one_with(
        streaming.device.hazards(),
        "copy in",
        "overwrites",
        "which are read by copy out",
        "missing fence: a wait for the copy out to history",
        "before its source is overwritten",
    )


def test_tail_that_is_written_while_it_is_brought_back_is_found(streaming: TraceRig) -> None:
    streaming.target.parts[-1].pager.forget()
    streaming.device.plant(TraceFault.DROP_WAIT)
    streaming.decode(1)
    one_with(
        streaming.device.hazards(),
        "kv_write",
        "overwrites",
        "which copy in",
        "(layer 0, page 5,",
        "missing fence: a wait for the copy in (done",
        "before its bytes are overwritten",
    )


# ---- primitives in wrong hands ----


@dataclass(slots=True)
class RingRig:
    """A ring of four slots, sixteen pages of one layer in history, eight of them written."""

    device: TraceDevice
    lease: Lease
    host: Host
    ring: Ring
    layer: KvLayer
    record_bytes: int

    def submit(self, first: int, n_pages: int) -> int:
        return self.ring.submit([Demand(self.host, first * self.record_bytes, self.record_bytes, n_pages)])

    def attend(self, *slots: int) -> None:
        """Read whole pages where they lie."""
        spans = [
            Span(i * PAGE, PAGE, self.lease, slot * self.record_bytes, self.record_bytes)
            for i, slot in enumerate(slots)
        ]
        with SpanPlan(self.device, self.layer, spans, len(slots) * PAGE, 1) as plan:
            plan.attend(np.zeros((1, 64), np.float32), 1, 1.0)


@pytest.fixture
def rig() -> Iterator[RingRig]:
    layer = KvLayer(1, 64, 64, GgmlType.Q8_0.id, GgmlType.Q8_0.id)
    n_bytes = record_layout(layer).record_bytes
    with ExitStack() as stack:
        device = stack.enter_context(TraceDevice(SLOW_BUS))
        arena = stack.enter_context(Arena(device, 4 * n_bytes))
        arena.begin()
        arena.reserve(1, 4 * n_bytes)
        arena.commit()
        lease = stack.enter_context(arena.acquire(1))
        host = stack.enter_context(Host(device, 16 * n_bytes))
        device.mark_history(host, 0, 8 * n_bytes)
        ring = stack.enter_context(Ring(device, lease, 4, n_bytes, run_limit_slots=2))
        yield RingRig(device, lease, host, ring, layer, n_bytes)
        assert device.info.live_objects > 0


def test_ring_in_right_hands_has_no_hazard(rig: RingRig) -> None:
    rig.submit(0, 8)
    for end in (2, 4, 6, 8):
        rig.ring.acquire(end)
        rig.attend((end - 2) % 4, (end - 1) % 4)
        rig.ring.consume(end)
    assert rig.device.hazards() == []


def test_read_before_acquire_is_found(rig: RingRig) -> None:
    rig.submit(0, 4)
    rig.attend(0, 1)
    one_with(rig.device.hazards(), "attend", "in ring slot 0", "missing fence: a wait for the copy in (`ready` 2)")


def test_read_of_a_page_whose_copy_has_not_begun_is_found(rig: RingRig) -> None:
    rig.submit(0, 4)
    rig.ring.acquire(2)
    rig.attend(0, 1, 2, 3)
    one_with(rig.device.hazards(), "attend", "in ring slot 2", "missing fence: a wait for the copy in (`ready` 4)")


def test_consume_before_read_is_found(rig: RingRig) -> None:
    rig.submit(0, 8)
    rig.ring.acquire(4)
    rig.ring.consume(2)
    rig.attend(0, 1, 2, 3)
    one_with(rig.device.hazards(), "attend", "in ring slot 0, which copy in", "(`ready` 6)")


def test_prefetch_of_an_unpublished_page_is_found_when_it_is_read(rig: RingRig) -> None:
    rig.submit(7, 2)
    rig.ring.acquire(2)
    assert rig.device.hazards() == []
    rig.attend(0, 1)
    one_with(
        rig.device.hazards(),
        "brought by copy in",
        "from history that nobody has written",
        "missing fence: the page must be published before it is prefetched",
    )


def test_two_rings_over_the_same_slots_are_found(rig: RingRig) -> None:
    rig.submit(0, 4)
    rig.ring.acquire(4)
    with Ring(rig.device, rig.lease, 4, rig.record_bytes) as second:
        second.submit([Demand(rig.host, 4 * rig.record_bytes, rig.record_bytes, 4)])
        rig.attend(0)
        one_with(rig.device.hazards(), "attend", "in ring slot 0, which copy in", "a wait for the copy in")


def test_slot_released_while_it_is_filled_is_found(rig: RingRig) -> None:
    rig.submit(0, 2)
    rig.device.plant(TraceFault.DROP_WAIT)
    rig.ring.acquire(2)
    rig.ring.consume(2)
    one_with(rig.device.hazards(), "release", "overwrites", "which copy in", "before its bytes are overwritten")


def arena_over(device: TraceDevice, buffer: Any, n_bytes: int) -> Arena:
    """One region over memory that another arena divides too: what a forgotten epoch comes down to."""
    cell = new_cell("arena")
    assert lib.kvs_arena_create_over(buffer, 64, cell) == 0
    arena = Arena.__new__(Arena)
    arena._device = device.ptr
    Handle.__init__(arena, cell)
    arena.begin()
    arena.reserve(1, n_bytes)
    arena.commit()
    return arena


def short_tape(device: TraceDevice, stack: ExitStack) -> Tape:
    table = stack.enter_context(TraceWeight(device, GgmlType.F32.id, 64, 16, WeightLayout.ROWS))
    scale = stack.enter_context(TraceWeight(device, GgmlType.F32.id, 64, 1, WeightLayout.ROWS))
    tape = stack.enter_context(Tape(device, 1, 1))
    x, y = tape.add_tensor(64), tape.add_tensor(64)
    tape.add_op(Op(OpCode.EMBED, (), (x,), (tape.add_weight(table),)))
    tape.add_op(Op(OpCode.NORM, (x,), (y,), (tape.add_weight(scale),), f=(1e-5,)))
    tape.seal()
    return tape


def test_tape_bound_to_an_old_layout_is_found_by_what_it_overwrites(rig: RingRig) -> None:
    n_bytes = 4 * rig.record_bytes
    with ExitStack() as stack:
        out = ffi.new("kvs_buffer **")
        assert lib.kvs_buffer_create(rig.device.ptr, n_bytes, 64, out) == 0
        stack.callback(lib.kvs_buffer_release, out[0])
        old = stack.enter_context(arena_over(rig.device, out[0], n_bytes))
        new = stack.enter_context(arena_over(rig.device, out[0], n_bytes))
        tape = short_tape(rig.device, stack)
        workspace = stack.enter_context(old.acquire(1))
        binding = stack.enter_context(Binding(rig.device, tape, old, workspace, None))
        rig.lease = stack.enter_context(new.acquire(1))
        ring = stack.enter_context(Ring(rig.device, rig.lease, 4, rig.record_bytes))
        ring.submit([Demand(rig.host, 0, rig.record_bytes, 2)])
        ring.acquire(2)
        binding.run(np.array([3], np.uint32), np.array([], np.uint32), (), CancelFlag())
        rig.attend(0, 1)
        one_with(
            rig.device.hazards(),
            "attend",
            "in ring slot 0 as a page, but they are values of an operation since norm",
            "the address is of another layout",
        )


def test_read_of_memory_that_nobody_wrote_is_found(rig: RingRig) -> None:
    n_bytes = 2 * rig.record_bytes
    out = ffi.new("kvs_buffer **")
    assert lib.kvs_buffer_create(rig.device.ptr, n_bytes, 64, out) == 0
    with ExitStack() as stack:
        arena = stack.enter_context(arena_over(rig.device, out[0], n_bytes))
        rig.lease = stack.enter_context(arena.acquire(1))
        rig.attend(0)
        one_with(rig.device.hazards(), "attend", "which nobody has written", "a wait for the copy in that brings them")
    lib.kvs_buffer_release(out[0])
