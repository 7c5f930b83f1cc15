"""The simulated 27B step stays near the limits of bus and memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "simulate_27b.py"
KI, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_27b", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("context", "arena_mib"), [(64, 1120), (128, 1120), (128, 2240), (192, 4480), (256, 2240), (256, 4480)]
)
def test_step_is_within_three_per_cent_of_the_bus(tool: ModuleType, context: int, arena_mib: int) -> None:
    with tool.simulation(context * KI, arena_mib * MIB) as sim:
        step = tool.settled(sim)
    assert step.bus_ns > step.memory_ns
    assert 0 <= step.over <= 0.03
    assert step.report.n_ops // tool.TIMED_STEPS <= 400


def test_resident_step_waits_for_no_page(tool: ModuleType) -> None:
    with tool.simulation(64 * KI, 2240 * MIB) as sim:
        step = tool.settled(sim)
    assert step.report.bytes_in == 0 and step.report.ring_wait_ns == 0
    assert step.over <= 0.12


def test_ring_of_the_policy_is_near_the_best(tool: ModuleType) -> None:
    with tool.simulation(128 * KI, 2240 * MIB) as sim:
        chosen = tool.settled(sim)
        best = min(sim.step(n).span_ns for n in (16, 32, 48, 64, 96, 128, 192))
    assert chosen.span_ns <= 1.01 * best
