"""The phase coordinator against a plain model (P-TR): faults, undo, poison, rebuild, foreign parties.

Each consumer leases one region of its own that changes size between phases; a persistent one never does.
The model predicts the trace of callbacks, the layout that holds then, and where the failure is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pykvstream.core.arena import Arena, ArenaState, Lease
from pykvstream.core.device import Device
from pykvstream.core.phase import (
    CoordinatorState,
    PhaseCoordinator,
    PhaseFailure,
    PhaseRegion,
    PhaseStep,
)
from pykvstream.errors import (
    Busy,
    Cancelled,
    DeviceError,
    InvalidArgument,
    KvStreamError,
    NoSpace,
    NotFound,
    NumericError,
    Poisoned,
    Stale,
)
from tests.alphabet import ScriptedMachine, u16
from tests.examples import examples

CAPACITY = 1 << 16
SHARED = 100
CALLBACKS = [step for step in PhaseStep if step is not PhaseStep.COMMIT]

Event = tuple[str, PhaseStep, int]


@dataclass(eq=False)
class Member:
    """A consumer that leases region ``index``. ``at`` says at which callbacks something happens."""

    index: int
    arena: Arena
    trace: list[Event]
    at: dict[Event, Callable[[], None]]
    has_phase: Callable[[], bool]
    own: Lease | None = None

    def _visit(self, kind: str, step: PhaseStep) -> None:
        self.trace.append((kind, step, self.index))
        action = self.at.get((kind, step, self.index))
        if action is not None:
            action()

    def run(self, step: PhaseStep, phase: int) -> None:
        self._visit("run", step)
        if step is PhaseStep.RELEASE:
            self.drop()
        elif step is PhaseStep.BIND:
            self.take()

    def undo(self, step: PhaseStep, phase: int) -> None:
        self._visit("undo", step)
        if step is PhaseStep.BIND:
            self.drop()
        elif step is PhaseStep.RELEASE and self.has_phase():
            self.take()

    def take(self) -> None:
        assert self.own is None
        self.own = self.arena.acquire(self.index)

    def drop(self) -> None:
        if self.own is not None:
            self.own.close()
            self.own = None


def raiser(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


class PhaseMachine(ScriptedMachine):
    target = "phase"

    @initialize(n_members=st.integers(0, 3), data=st.data())
    def set_up(self, n_members: int, data: st.DataObject) -> None:
        self.act("CREATE", n_members)
        self.device = Device(1)
        self.arena = Arena(self.device, CAPACITY)
        self.coordinator = PhaseCoordinator(self.arena)
        self.trace: list[Event] = []
        self.at: dict[Event, Callable[[], None]] = {}
        self.phase: int | None = None
        self.poisoned = False
        self.failure: PhaseFailure | None = None
        self.transitions = 0
        self.ticket: int | None = None
        self.newest_ticket = 0
        self.foreign: list[Lease] = []
        self.members = [
            Member(index, self.arena, self.trace, self.at, lambda: self.phase is not None)
            for index in range(n_members)
        ]
        for member in self.members:
            self.coordinator.add_consumer(member)
        shared = PhaseRegion(SHARED, 512, persistent=True)
        self.layouts: list[list[PhaseRegion]] = []
        for number in range(3):
            sizes = data.draw(st.lists(st.integers(1, 8000), min_size=n_members, max_size=n_members))
            self.act("BEGIN")
            for index, size in enumerate(sizes):
                self.act("RESERVE", index, *u16(size))
            self.act("COMMIT")
            own = [PhaseRegion(index, size) for index, size in enumerate(sizes)]
            self.layouts.append([shared, *own])
            assert self.coordinator.add_phase(self.layouts[-1]) == number

    def sizes_of(self, phase: int | None) -> dict[int, int]:
        return {} if phase is None else {region.id: region.size_bytes for region in self.layouts[phase]}

    def committed_sizes(self) -> dict[int, int]:
        return {region.id: region.size_bytes for region in self.arena.regions}

    def forward(self) -> list[Event]:
        return [("run", step, member.index) for step in CALLBACKS for member in self.members]

    def undone(self, done: list[Event]) -> list[Event]:
        return [("undo", step, index) for _, step, index in reversed(done)]

    def has_old_leases(self) -> bool:
        """A foreign lease on a region that is not persistent keeps every layout from changing."""
        return any(lease.info.region_id != SHARED for lease in self.foreign)

    def succeed(self, phase: int) -> None:
        self.transitions += self.sizes_of(phase) != self.sizes_of(self.phase)
        self.phase = phase

    @precondition(lambda self: self.foreign)
    @rule(data=st.data())
    def foreign_release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.foreign))
        self.act("RELEASE", self.foreign.index(lease))
        self.foreign.remove(lease)
        lease.close()

    @precondition(lambda self: self.phase is not None)
    @rule(data=st.data())
    def foreign_acquire(self, data: st.DataObject) -> None:
        region_ids = sorted(self.sizes_of(self.phase))
        region_id = data.draw(st.sampled_from(region_ids))
        self.act("ACQUIRE", region_ids.index(region_id))
        self.foreign.append(self.arena.acquire(region_id))

    def refusal(self, phase: int) -> type[KvStreamError] | None:
        if self.poisoned:
            return Poisoned
        if self.ticket is not None:
            return Busy
        return NotFound if phase >= len(self.layouts) else None

    @rule(phase=st.integers(0, 3))
    def move(self, phase: int) -> None:
        self.act("PHASE", phase)
        refusal = self.refusal(phase)
        self.trace.clear()
        if refusal is not None:
            with pytest.raises(refusal):
                self.coordinator.transition(phase)
            assert self.trace == []
            return
        if phase == self.phase:
            self.coordinator.transition(phase)
            assert self.trace == []
            return
        events = self.forward()
        if self.has_old_leases():
            with pytest.raises(Busy, match="leases"):
                self.coordinator.transition(phase)
            done = [event for event in events if event[1] < PhaseStep.COMMIT]
            assert self.trace == done + self.undone(done)
            self.failure = PhaseFailure(PhaseStep.COMMIT, None, Busy.status)
            return
        self.coordinator.transition(phase)
        assert self.trace == events
        self.succeed(phase)

    def can_move(self) -> bool:
        return bool(self.members) and not self.poisoned and self.ticket is None and not self.has_old_leases()

    def other_phase(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([p for p in range(len(self.layouts)) if p != self.phase]))

    @precondition(can_move)
    @rule(data=st.data(), error=st.sampled_from([NoSpace("need 9, have 8"), ValueError("of no status")]))
    def move_with_fault(self, data: st.DataObject, error: Exception) -> None:
        phase = self.other_phase(data)
        events = self.forward()
        place = data.draw(st.integers(0, len(events) - 1))
        self.act("FAIL", 0, place)
        self.act("PHASE", phase)
        self.at[events[place]] = raiser(error)
        self.trace.clear()
        expected = NoSpace if isinstance(error, NoSpace) else DeviceError
        with pytest.raises(expected, match=str(error)) as caught:
            self.coordinator.transition(phase)
        self.at.clear()
        assert type(caught.value) is expected
        assert caught.value.__cause__ is error
        assert self.trace == events[: place + 1] + self.undone(events[:place])
        _, step, index = events[place]
        self.failure = PhaseFailure(step, index, expected.status)

    @precondition(can_move)
    @rule(data=st.data())
    def move_cancelled(self, data: st.DataObject) -> None:
        phase = self.other_phase(data)
        events = self.forward()
        place = data.draw(st.integers(0, len(events) - 2))
        self.act("CANCEL", place)
        self.act("PHASE", phase)
        self.at[events[place]] = self.coordinator.cancel
        self.trace.clear()
        with pytest.raises(Cancelled):
            self.coordinator.transition(phase)
        self.at.clear()
        done = events[: place + 1]
        assert self.trace == done + self.undone(done)
        _, step, index = events[place + 1]
        if done[-1][1] < PhaseStep.COMMIT < step:
            self.failure = PhaseFailure(PhaseStep.COMMIT, None, Cancelled.status)
        else:
            self.failure = PhaseFailure(step, index, Cancelled.status)

    @precondition(can_move)
    @rule(data=st.data())
    def move_with_fault_and_failing_undo(self, data: st.DataObject) -> None:
        phase = self.other_phase(data)
        events = self.forward()
        place = data.draw(st.integers(1, len(events) - 1))
        bad = data.draw(st.integers(0, place - 1))
        first, second = NumericError("the first"), DeviceError("the second")
        undo_events = self.undone(events[:place])
        stop = place - 1 - bad
        self.act("FAIL", 1, place, stop)
        self.act("PHASE", phase)
        self.at[events[place]] = raiser(first)
        self.at[undo_events[stop]] = raiser(second)
        self.trace.clear()
        with pytest.raises(Poisoned, match="the first") as caught:
            self.coordinator.transition(phase)
        self.at.clear()
        assert caught.value.__cause__ is first
        assert any("the second" in note for note in caught.value.__notes__)
        assert self.trace == events[: place + 1] + undo_events[: stop + 1]
        _, step, index = events[place]
        self.failure = PhaseFailure(step, index, NumericError.status)
        self.poisoned = True
        self.phase = None

    @precondition(lambda self: self.poisoned)
    @rule(data=st.data(), fails=st.booleans())
    def rebuild(self, data: st.DataObject, fails: bool) -> None:
        phase = data.draw(st.integers(0, len(self.layouts) - 1))
        held = [member for member in self.members if member.own is not None]
        if held or self.foreign:
            self.act("BIND", phase)
            self.trace.clear()
            with pytest.raises(Busy, match="leases survive"):
                self.coordinator.rebuild(phase)
            assert self.trace == []
            for member in held:
                member.drop()
            return
        events = [event for event in self.forward() if event[1] > PhaseStep.COMMIT]
        self.trace.clear()
        if fails:
            place = data.draw(st.integers(0, len(events) - 1))
            self.act("FAIL", 0, place)
            self.act("BIND", phase)
            self.at[events[place]] = raiser(NumericError("again"))
            with pytest.raises(NumericError, match="again"):
                self.coordinator.rebuild(phase)
            self.at.clear()
            assert self.trace == events[: place + 1] + self.undone(events[:place])
            return
        self.act("BIND", phase)
        self.coordinator.rebuild(phase)
        assert self.trace == events
        self.poisoned = False
        self.phase = phase

    @precondition(can_move)
    @rule(data=st.data())
    def callbacks_cannot_reenter(self, data: st.DataObject) -> None:
        phase = self.other_phase(data)
        seen: list[type[BaseException]] = []

        def reenter() -> None:
            for call in (
                lambda: self.coordinator.transition(phase),
                lambda: self.coordinator.rebuild(phase),
                self.coordinator.admit,
                lambda: self.coordinator.finish(1),
                lambda: self.coordinator.add_phase(self.layouts[0]),
            ):
                with pytest.raises(Busy) as caught:
                    call()
                seen.append(caught.type)

        self.act("PHASE", phase)
        events = self.forward()
        for event in events:
            self.at[event] = reenter
        self.coordinator.transition(phase)
        self.at.clear()
        assert len(seen) == 5 * len(events)
        self.succeed(phase)

    @rule()
    def cancel_outside_a_move_does_nothing(self) -> None:
        self.coordinator.cancel()

    @rule()
    def admit(self) -> None:
        self.act("ADMIT")
        error: type[KvStreamError] | None = None
        if self.poisoned:
            error = Poisoned
        elif self.ticket is not None:
            error = Busy
        elif self.phase is None:
            error = InvalidArgument
        if error is not None:
            with pytest.raises(error):
                self.coordinator.admit()
            return
        self.ticket = self.coordinator.admit()
        assert self.ticket > self.newest_ticket
        self.newest_ticket = self.ticket

    @rule(stale=st.booleans())
    def finish(self, stale: bool) -> None:
        self.act("FINISH", stale)
        if stale or self.ticket is None:
            wrong = self.newest_ticket + 1 if self.ticket is not None else self.newest_ticket
            with pytest.raises(Stale):
                self.coordinator.finish(wrong)
            return
        self.coordinator.finish(self.ticket)
        self.ticket = None

    @rule(n_bytes=st.integers(CAPACITY + 1, CAPACITY * 2))
    def layout_that_cannot_fit_is_refused(self, n_bytes: int) -> None:
        busy = self.poisoned or self.ticket is not None
        text = "not idle" if busy else f"need {n_bytes} bytes, have {CAPACITY}"
        with pytest.raises(Busy if busy else NoSpace, match=text):
            self.coordinator.add_phase([PhaseRegion(1, n_bytes)])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.coordinator.check_integrity()
        self.arena.check_integrity()
        info = self.coordinator.info
        expected = CoordinatorState.IDLE
        if self.poisoned:
            expected = CoordinatorState.POISONED
        elif self.ticket is not None:
            expected = CoordinatorState.EXECUTING
        assert info.state is expected
        assert info.phase == self.phase
        assert info.failure == self.failure
        assert info.transitions == self.transitions
        assert (info.n_phases, info.n_consumers) == (len(self.layouts), len(self.members))

    @invariant()
    def layout_and_leases_are_those_of_the_phase(self) -> None:
        if self.poisoned:
            assert self.arena.info.state in (ArenaState.DRAINING, ArenaState.QUIESCENT)
            return
        assert self.arena.info.state is ArenaState.OPEN
        assert self.committed_sizes() == self.sizes_of(self.phase)
        for member in self.members:
            assert (member.own is not None) == (self.phase is not None)

    def teardown(self) -> None:
        self.report_script()
        if not hasattr(self, "device"):
            return
        for lease in self.foreign:
            lease.close()
        self.coordinator.close()
        for member in self.members:
            member.drop()
        self.arena.close()
        assert self.device.info.live_objects == 0
        self.device.close()


TestPhaseMachine = PhaseMachine.TestCase
TestPhaseMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
