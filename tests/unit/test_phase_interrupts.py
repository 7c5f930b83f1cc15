"""An interrupt of a move between phases reaches the caller, wherever in the move it struck."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device
from pykvstream.core.phase import CoordinatorState, PhaseCoordinator, PhaseRegion, PhaseStep
from pykvstream.errors import DeviceError


@dataclass
class Failing:
    """A consumer that fails at one step, and is interrupted while it undoes another."""

    fails: PhaseStep | None = None
    is_interrupted: PhaseStep | None = None

    def run(self, step: PhaseStep, phase: int) -> None:
        if step is self.fails:
            raise DeviceError("lost")

    def undo(self, step: PhaseStep, phase: int) -> None:
        if step is self.is_interrupted:
            raise KeyboardInterrupt


def test_an_interrupt_of_an_undo_is_raised_itself_and_the_arena_comes_back() -> None:
    consumer = Failing()
    with Device(1) as device, Arena(device, 1 << 16) as arena, PhaseCoordinator(arena) as coordinator:
        for size_bytes in (4096, 8192):
            coordinator.add_phase([PhaseRegion(1, size_bytes)])
        coordinator.add_consumer(consumer)
        coordinator.transition(0)
        consumer.fails, consumer.is_interrupted = PhaseStep.BIND, PhaseStep.DRAIN
        with pytest.raises(KeyboardInterrupt):
            coordinator.transition(1)
        assert coordinator.info.state is CoordinatorState.POISONED
        consumer.fails = consumer.is_interrupted = None
        coordinator.rebuild(1)
        coordinator.check_integrity()
        assert coordinator.info.phase == 1
