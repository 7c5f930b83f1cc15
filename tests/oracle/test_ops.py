"""Every operation alone: against float64, the plain reference against every vectorised twin to the bit, and its
declared bytes on a trace device. ``tests/meta/test_op_parts.py`` holds that no operation is without a case.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import Device, DeviceFlag, Isa
from pykvstream.core.kv import Cache, Seq
from pykvstream.core.pager import Pager
from pykvstream.core.state import State
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, RowKind, Tape, TensorKind
from pykvstream.core.trace import TraceDevice
from pykvstream.errors import Unsupported
from pykvstream.runtime.layout import Placement
from tests.oracle.op_cases import CASES, ROWS, TOKENS, Bed, Floats, OpCase

POOL, WORKSPACE = 1, 2
N_SLOTS = 2
CTX = 256


@dataclass
class Lane:
    """A sequence that cases with pages run in, and its recurrent state where the tape has any."""

    pager: Pager
    seq: Seq
    state: State | None

    def end(self, n_rows: int) -> None:
        self.pager.end(n_rows)
        if self.state is not None:
            self.state.accept(self.seq, n_rows)
        self.pager.publish_wait()


def record(case: OpCase, device: Device, stack: ExitStack) -> Bed:
    """A sealed tape whose output is the gathered result of the case."""
    bed = Bed(device, stack.enter_context(Tape(device, ROWS, ROWS)))
    stack.callback(bed.close)
    result = case.record(bed)
    if case.is_output:
        bed.tape.seal()
        return bed
    tensor = bed.tape.add_tensor(case.cols, kind=TensorKind.OUTPUT, rows=RowKind.OUT)
    bed.tape.add_op(Op(OpCode.GATHER, (result,), (tensor,)))
    bed.tape.seal()
    return bed


def open_lane(bed: Bed, cache: Cache, pool: Lease, stack: ExitStack) -> Lane:
    seq = stack.enter_context(cache.sequence(CTX))
    pager = stack.enter_context(Pager(bed.device, cache))
    pager.attach(pool, Placement((N_SLOTS,), 0, ROWS))
    stack.callback(pager.drop, seq)
    state = None
    if bed.deltas:
        state = stack.enter_context(State(bed.device, bed.deltas, ROWS))
        state.attach(seq)
    return Lane(pager, seq, state)


def run_passes(case: OpCase, binding: Binding, lane: Lane | None) -> Floats:
    """The gathered rows of every pass, one below the other."""
    out = np.full((len(case.out_rows), case.cols), np.nan, np.float32)
    begin = at = 0
    for n_rows in case.passes:
        rows = np.array([row - begin for row in case.out_rows if begin <= row < begin + n_rows], np.uint32)
        state = None
        if lane is not None:
            lane.pager.begin(lane.seq, n_rows)
            state = lane.state
        tokens = TOKENS[begin : begin + n_rows]
        binding.run(tokens, rows, (out[at : at + len(rows)],), CancelFlag(), state=state, has_front=True)
        if lane is not None:
            lane.end(n_rows)
        begin, at = begin + n_rows, at + len(rows)
    return out


def run(case: OpCase, device: Device) -> Floats:
    """Record the case and replay it for its passes."""
    with ExitStack() as stack:
        bed = record(case, device, stack)
        cache = None if case.layer is None else stack.enter_context(Cache(device, (case.layer,)))
        regions = {WORKSPACE: bed.tape.info.workspace_bytes}
        if cache is not None:
            regions[POOL] = N_SLOTS * cache.info.max_record_bytes
        arena = stack.enter_context(Arena(device, sum(regions.values()) + 4096, 64))
        arena.begin()
        for region, n_bytes in regions.items():
            arena.reserve(region, n_bytes)
        arena.commit()
        workspace, *pools = (stack.enter_context(arena.acquire(region)) for region in regions)
        lane = None if cache is None else open_lane(bed, cache, pools[0], stack)
        pager = None if lane is None else lane.pager
        binding = stack.enter_context(Binding(device, bed.tape, arena, workspace, pager))
        return run_passes(case, binding, lane)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_is_near_float64(case: OpCase) -> None:
    with Device(1, isa=Isa.REFERENCE) as device:
        found = run(case, device)
    assert found.shape == case.oracle().shape
    np.testing.assert_allclose(found, case.oracle(), rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("isa", [Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_instruction_set_gives_the_reference_bits(case: OpCase, isa: Isa) -> None:
    with Device(1, isa=Isa.REFERENCE) as device:
        expected = run(case, device)
    try:
        device = Device(2, isa=isa)
    except Unsupported:
        pytest.skip(f"this machine has no {isa.name}")
    with device:
        assert run(case, device).tobytes() == expected.tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trace_counts_the_bytes_that_the_operation_touches(case: OpCase) -> None:
    """What is missing from the writes would be found by the gather behind it, as bytes that nobody has written."""
    with TraceDevice(flags=DeviceFlag.POISON_RELEASED) as device:
        run(case, device)
        assert device.hazards() == []
        name = "attend wave" if case.code is OpCode.ATTEND else case.code.name.lower()
        events = [event for event in device.events() if event.name == name]
    assert events[-1].n_bytes == case.footprint_bytes
