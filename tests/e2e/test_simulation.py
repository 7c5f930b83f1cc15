"""The simulated 27B step, of the real tape, stays near the limits of bus and memory; nothing in it is out of order."""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tools import simulate_27b as tool

KI, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("context", "arena_mib"), [(64, 1120), (128, 1120), (128, 2240), (192, 4480), (256, 2240), (256, 4480)]
)
def test_step_is_within_three_per_cent_of_the_bus(context: int, arena_mib: int) -> None:
    with tool.simulation(context * KI, arena_mib * MIB) as sim:
        step = tool.settled(sim)
    assert step.bus_ns > step.memory_ns
    assert 0 <= step.over <= 0.03


def test_resident_step_waits_for_no_page() -> None:
    with tool.simulation(64 * KI, 2240 * MIB) as sim:
        step = tool.settled(sim)
    assert step.report.bytes_in == 0 and step.report.ring_wait_ns == 0
    assert step.over <= 0.12


def test_ring_of_the_policy_is_near_the_best() -> None:
    with tool.simulation(128 * KI, 2240 * MIB) as sim:
        chosen = tool.settled(sim)
        best = min(sim.step(n).span_ns for n in (16, 32, 48, 64, 96, 128, 192))
    assert chosen.span_ns <= 1.01 * best
