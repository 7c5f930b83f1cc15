"""Recurrent passes on the trace device: nothing out of order, every byte of the state counted."""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.tape import DeltaMode
from pykvstream.core.trace import TraceCosts, TraceDevice
from tests.delta_rig import DeltaRig, Shape


@pytest.fixture
def rig() -> DeltaRig:
    return DeltaRig(Shape(2, 4, 32), traced=True)


def device_of(rig: DeltaRig) -> TraceDevice:
    assert isinstance(rig.device, TraceDevice)
    return rig.device


def test_passes_folding_copies_and_images_are_in_order(rig: DeltaRig) -> None:
    lane, spare = rig.lane(), rig.state()
    lane.take([1] * 100, DeltaMode.CHUNKED)
    for accepted in (3, 0, 5, 1):
        lane.take([2] * 5, accept=accepted)
    lane.image(spare)
    lane.state.fold()
    spare.load(lane.state.save())
    lane.take([3] * 70, DeltaMode.CHUNKED)
    names = {each.name for each in device_of(rig).events()}
    assert names >= {"delta", "caller"}
    assert device_of(rig).hazards() == []
    spare.close()
    lane.close()
    rig.close()


def test_a_pass_reads_and_writes_the_state_once(rig: DeltaRig) -> None:
    shape = rig.tables.shape
    lane = rig.lane()
    lane.take([1, 2, 3], accept=2)
    device = device_of(rig)
    device.reset()
    device.set_costs(TraceCosts(device_bytes_per_s=10**9))
    lane.take([4, 5, 6, 7])
    events = [each for each in device.events() if each.name == "delta"]
    assert [each.layer for each in events] == [0, 1]
    values = shape.n_value_heads * shape.head_dim**2 + shape.channels * (shape.conv_width - 1)
    row = shape.channels + 2 * shape.n_value_heads
    weights = shape.channels * shape.conv_width + 2 * shape.n_value_heads
    operands = 4 * (row + shape.out_cols)
    scratch = shape.head_dim**2
    state = 2 * values + (2 + 4) * row
    for event in events:
        assert event.n_bytes == 4 * (state + weights + operands + scratch)
        assert event.end_ns - event.begin_ns == pytest.approx(event.n_bytes, abs=4)
    lane.close()
    rig.close()
