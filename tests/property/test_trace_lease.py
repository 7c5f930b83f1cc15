"""A head that drafts under a layer lease has no hazard beside lookahead, and has one where that touches held slots.

Files are outlines: the tensors of the model and no values, since nothing is computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena
from pykvstream.core.kv import Cache, KvLayer
from pykvstream.core.pager import Pager
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, Tape, TensorKind, WeightLayout
from pykvstream.core.trace import TraceDevice, TraceFault, TraceStream, TraceWeight
from pykvstream.gguf import GgmlType
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests.tracing import SLOW_BUS, TraceRig, one_with, open_trace_rig, random_costs
from tools.hybrid_outline import OUTLINE_27B, write_outline

SMALL = replace(OUTLINE_27B, name="small", n_embd=256, n_layers=8, n_heads=4, n_kv_heads=2, n_ff=512, n_value_heads=16,
                n_vocab=512, ctx=4096)  # fmt: skip
TRUNK_RING, HEAD_PAGES, HELD = 8, 2, 3
PROMPT = 1_100
"""Five pages with the tokens behind it: with two of its own the head misses three."""


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outline") / "small.gguf"
    write_outline(path, SMALL)
    return path


@pytest.fixture
def rig(outline: Path) -> Iterator[TraceRig]:
    """Most pages of the trunk stream, and the head borrows slots of its ring."""
    with open_trace_rig(outline, residency=0.4, costs=SLOW_BUS, mtp=True) as made:
        head = made.target.head
        assert head is not None
        made.prefill(PROMPT)
        n_layers = made.target.plan.shape.n_layers
        made.target.place(Phase.DECODE, Placement((2,) * n_layers, TRUNK_RING, 64))
        head.placement = Placement((HEAD_PAGES,), 1, head.placement.max_rows)
        head.pager.place(head.placement)
        made.decode(3)
        yield made


def draft(rig: TraceRig, depth: int) -> None:
    rig.session.push(1)
    rig.session.draft(depth, lambda logits, position: 1)


def round_of(rig: TraceRig, depth: int, n_right: int) -> None:
    """Draft, verify, keep a part: what speculation does."""
    draft(rig, depth)
    rig.session.verify([1] * depth)
    for _ in range(n_right):
        rig.session.push(1)


@pytest.mark.parametrize("seed", range(6))
def test_rounds_under_leases_have_no_hazard(rig: TraceRig, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        rig.device.set_costs(random_costs(rng.randrange(1 << 30)))
        depth = rng.randint(1, 8)
        round_of(rig, depth, rng.randint(0, depth))
        assert rig.device.hazards() == []
    stats = rig.session.stats.head
    assert stats is not None and stats.leases == 12 and stats.most_held_slots == HELD
    assert rig.target.pager_info.streamed_pages > 0


def test_rounds_in_waves_have_no_hazard(rig: TraceRig) -> None:
    rig.target.place(Phase.DECODE, Placement((2,) * rig.target.plan.shape.n_layers, HELD, 64))
    for depth in (1, 4, 8, 2):
        round_of(rig, depth, depth // 2)
        assert rig.device.hazards() == []
    stats = rig.session.stats.head
    assert stats is not None and stats.leases == 0 and stats.rounds_in_waves == 4


def test_rounds_of_a_resident_layer_have_no_hazard_and_bring_nothing(outline: Path) -> None:
    with open_trace_rig(outline, residency=1.0, mtp=True) as rig:
        rig.prefill(PROMPT)
        rig.device.reset()
        for depth in (1, 4, 8, 2):
            round_of(rig, depth, depth // 2)
            assert rig.device.hazards() == []
        stats = rig.session.stats.head
        assert stats is not None and stats.leases == 4 and stats.most_held_slots == 0
        assert rig.device.report.copies_in == 0


def copies_of_lookahead(rig: TraceRig) -> int:
    """Copies behind gates that begin while a draft is made: the trunk's, beside the lease."""
    rig.device.reset()
    draft(rig, 3)
    rig.session.truncate(rig.session.n_tokens - 1)
    return sum(event.stream is TraceStream.RING for event in rig.device.events())


def test_lookahead_that_lands_in_a_held_slot_is_found(rig: TraceRig) -> None:
    """The last copy of the lookahead ends where the held slots begin; a slot further lies the head's."""
    round_of(rig, 2, 1)
    n_copies = copies_of_lookahead(rig)
    assert rig.device.hazards() == [] and n_copies > 0
    rig.device.plant(TraceFault.MISPLACE_COPY, n_copies - 1)
    draft(rig, 3)
    slot = f"in ring slot {TRUNK_RING - HELD}"
    sentence = one_with(rig.device.hazards(), "copy in", slot, "nothing orders the two", "missing fence")
    assert "page" in sentence


class Side:
    """A cache of one layer, its pager over a region that others use too, and a tape that writes and attends."""

    def __init__(self, device: TraceDevice, arena: Arena, stack: ExitStack) -> None:
        layer = KvLayer(1, 64, 64, GgmlType.Q8_0.id, GgmlType.Q8_0.id)
        self.cache = stack.enter_context(Cache(device, (layer,)))
        tape = stack.enter_context(Tape(device, 256, 1))
        tape.add_layer(layer)
        rows = []
        for _ in range(3):
            table = stack.enter_context(TraceWeight(device, GgmlType.F32.id, 64, 16, WeightLayout.ROWS))
            rows.append(tape.add_tensor(64))
            tape.add_op(Op(OpCode.EMBED, (), (rows[-1],), (tape.add_weight(table),)))
        out = tape.add_tensor(64, kind=TensorKind.OUTPUT)
        tape.add_op(Op(OpCode.KV_WRITE, (rows[0], rows[1]), layer=0))
        tape.add_op(Op(OpCode.ATTEND, (rows[2],), (out,), layer=0, u=(1,), f=(1.0,)))
        tape.seal()
        self.pager = stack.enter_context(Pager(device, self.cache))
        pool, workspace = (stack.enter_context(arena.acquire(region)) for region in (1, 2))
        self.pager.attach(pool, Placement((3,), 0, 256))
        self.binding = stack.enter_context(Binding(device, tape, arena, workspace, self.pager))
        self.seq = stack.enter_context(self.cache.sequence(512))

    def take_pass(self, n_rows: int) -> None:
        self.pager.begin(self.seq, n_rows)
        out = np.empty((n_rows, 64), np.float32)
        self.binding.run(np.ones(n_rows, np.uint32), np.empty(0, np.uint32), (out,), CancelFlag())
        self.pager.end(n_rows)
        self.pager.publish_wait()


def test_a_page_of_the_same_number_in_another_cache_is_another_page() -> None:
    """Two pagers that know nothing of each other share slots: everything is in order, and the bytes are the other's."""
    with ExitStack() as stack:
        device = stack.enter_context(TraceDevice(SLOW_BUS))
        arena = stack.enter_context(Arena(device, 4 << 20))
        arena.begin()
        arena.reserve(1, 1 << 20)
        arena.reserve(2, 2 << 20)
        arena.commit()
        first, second = Side(device, arena, stack), Side(device, arena, stack)
        first.take_pass(256)
        first.take_pass(1)
        assert device.hazards() == []
        second.take_pass(256)
        first.take_pass(1)
        found = "as page 0 of layer 0, but they are page 0 of layer 0 of another cache since kv_write"
        one_with(device.hazards(), found)
