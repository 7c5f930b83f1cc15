"""Every operation alone: against float64, the plain reference against every vectorised twin to the bit, and its
declared bytes on a trace device. ``tests/meta/test_op_parts.py`` holds that no operation is without a case.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device, DeviceFlag, Isa
from pykvstream.core.kv import Cache
from pykvstream.core.pager import Pager
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, RowKind, Tape, TensorKind
from pykvstream.core.trace import TraceDevice
from pykvstream.errors import Unsupported
from pykvstream.runtime.layout import Placement
from tests.oracle.op_cases import CASES, COLS, N_OUT, ROWS, TOKENS, Bed, Floats, OpCase

POOL, WORKSPACE = 1, 2
N_SLOTS = 2
WIDTHS = {OpCode.MATMUL: N_OUT, OpCode.ROPE_TABLE: COLS // 2}


def run(case: OpCase, device: Device) -> Floats:
    """Record the case, its result gathered into an output, and replay it for one pass."""
    cols = WIDTHS.get(case.code, COLS)
    out = np.full((len(case.out_rows), cols), np.nan, np.float32)
    with ExitStack() as stack:
        tape = stack.enter_context(Tape(device, ROWS, ROWS))
        bed = Bed(device, tape)
        stack.callback(bed.close)
        result = case.record(bed)
        tensor = tape.add_tensor(cols, kind=TensorKind.OUTPUT, rows=RowKind.OUT)
        tape.add_op(Op(OpCode.GATHER, (result,), (tensor,)))
        workspace_bytes = tape.seal().workspace_bytes
        pool_bytes = 0
        if case.layer is not None:
            cache = stack.enter_context(Cache(device, (case.layer,)))
            pool_bytes = N_SLOTS * cache.info.max_record_bytes
        arena = stack.enter_context(Arena(device, pool_bytes + workspace_bytes + 4096, 64))
        arena.begin()
        arena.reserve(WORKSPACE, workspace_bytes)
        if case.layer is not None:
            arena.reserve(POOL, pool_bytes)
        arena.commit()
        workspace = stack.enter_context(arena.acquire(WORKSPACE))
        pager = None
        if case.layer is not None:
            seq = stack.enter_context(cache.sequence(256))
            pager = stack.enter_context(Pager(device, cache))
            pager.attach(stack.enter_context(arena.acquire(POOL)), Placement((N_SLOTS,), 0, ROWS))
            pager.begin(seq, ROWS)
        binding = stack.enter_context(Binding(device, tape, arena, workspace, pager))
        binding.run(TOKENS, np.array(case.out_rows, np.uint32), (out,), CancelFlag())
        if pager is not None:
            pager.end(ROWS)
            pager.publish_wait()
            pager.drop(seq)
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.code.name)
def test_reference_is_near_float64(case: OpCase) -> None:
    with Device(1, isa=Isa.REFERENCE) as device:
        found = run(case, device)
    np.testing.assert_allclose(found, case.oracle(), rtol=0, atol=case.tolerance)


@pytest.mark.parametrize("isa", [Isa.AVX2, Isa.AVX512])
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.code.name)
def test_every_instruction_set_gives_the_reference_bits(case: OpCase, isa: Isa) -> None:
    with Device(1, isa=Isa.REFERENCE) as device:
        expected = run(case, device)
    try:
        device = Device(2, isa=isa)
    except Unsupported:
        pytest.skip(f"this machine has no {isa.name}")
    with device:
        assert run(case, device).tobytes() == expected.tobytes()


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.code.name)
def test_trace_counts_the_bytes_that_the_operation_touches(case: OpCase) -> None:
    """What is missing from the writes would be found by the gather behind it, as bytes that nobody has written."""
    with TraceDevice(flags=DeviceFlag.POISON_RELEASED) as device:
        run(case, device)
        assert device.hazards() == []
        name = "attend wave" if case.code is OpCode.ATTEND else case.code.name.lower()
        events = [event for event in device.events() if event.name == name]
    assert events[-1].n_bytes == case.footprint_bytes
