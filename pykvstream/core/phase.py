"""The coordinator that moves an arena from the layout of one phase to that of another.

Order: steps visit consumers in the order of registration, undo in reverse; see ``PhaseStep``.
Source: ``include/kvstream/phase.h``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Protocol

from pykvstream._ffi import ffi, lib
from pykvstream.core.arena import Arena
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check, make_struct
from pykvstream.errors import KvStreamError

_NO_PHASE = 2**32 - 1


class PhaseStep(enum.IntEnum):
    """Steps of a transition; ``COMMIT`` is the coordinator's own."""

    PREPARE = lib.KVS_STEP_PREPARE
    STOP = lib.KVS_STEP_STOP
    DRAIN = lib.KVS_STEP_DRAIN
    INVALIDATE = lib.KVS_STEP_INVALIDATE
    RELEASE = lib.KVS_STEP_RELEASE
    COMMIT = lib.KVS_STEP_COMMIT
    BIND = lib.KVS_STEP_BIND
    ACTIVATE = lib.KVS_STEP_ACTIVATE


class CoordinatorState(enum.IntEnum):
    """What a coordinator is doing; see ``kvs_coordinator_state``."""

    IDLE = lib.KVS_COORDINATOR_IDLE
    EXECUTING = lib.KVS_COORDINATOR_EXECUTING
    MOVING = lib.KVS_COORDINATOR_MOVING
    POISONED = lib.KVS_COORDINATOR_POISONED


class Consumer(Protocol):
    """Holds leases. ``run`` takes a step, whole or not at all; ``undo`` takes it back after a failure."""

    def run(self, step: PhaseStep, phase: int) -> None: ...
    def undo(self, step: PhaseStep, phase: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PhaseRegion:
    """One region of a phase's layout, placed first fit in the order given."""

    id: int
    size_bytes: int
    alignment_bytes: int = 0
    persistent: bool = False


@dataclass(frozen=True, slots=True)
class PhaseFailure:
    """Where the newest failed transition stopped; ``consumer`` is None for the coordinator itself."""

    step: PhaseStep
    consumer: int | None
    status: int


@dataclass(frozen=True, slots=True)
class CoordinatorInfo:
    """State and counts; ``phase`` is None before the first transition and while poisoned."""

    state: CoordinatorState
    phase: int | None
    n_phases: int
    n_consumers: int
    failure: PhaseFailure | None
    transitions: int


@dataclass(slots=True)
class _Callback:
    """What C hands back to Python: a consumer, and where its exceptions wait until the C call returns."""

    consumer: Consumer
    raised: list[BaseException] = field(repr=False)


class PhaseCoordinator(Handle):
    """Moves ``arena`` between phases. Consumers must not call it from ``run`` or ``undo`` (``Busy``)."""

    __slots__ = ("_callbacks", "_device", "_raised")

    def __init__(self, arena: Arena) -> None:
        cell = new_cell("coordinator")
        check(lib.kvs_coordinator_create(arena.ptr, cell), arena.device_ptr)
        self._device = arena.device_ptr
        self._raised: list[BaseException] = []
        self._callbacks: list[Any] = []
        super().__init__(cell)

    def add_phase(self, regions: Sequence[PhaseRegion]) -> int:
        """Register a phase; returns its number, from 0. Raises ``NoSpace`` when it cannot fit the arena."""
        items = ffi.new("kvs_phase_region[]", len(regions))
        for item, region in zip(items, regions, strict=True):
            item.id = region.id
            item.size_bytes = region.size_bytes
            item.alignment_bytes = region.alignment_bytes
            item.flags = lib.KVS_REGION_PERSISTENT if region.persistent else 0
        phase = ffi.new("uint32_t *")
        check(lib.kvs_coordinator_add_phase(self.ptr, items, len(regions), phase), self._device)
        number: int = phase[0]
        return number

    def add_consumer(self, consumer: Consumer) -> None:
        """Register a consumer; it lives as long as the coordinator."""
        handle = ffi.new_handle(_Callback(consumer, self._raised))
        record = make_struct(
            "kvs_consumer", user=handle, run=lib.kvs_py_phase_run, undo=lib.kvs_py_phase_undo
        )
        check(lib.kvs_coordinator_add_consumer(self.ptr, record), self._device)
        self._callbacks.append(handle)

    def transition(self, phase: int) -> None:
        """Move to a phase; to the active one, that is calling nobody.

        On failure the old layout is restored and the error of the step raised, from the consumer's exception.
        Raises ``Poisoned`` when that did not work; then ``rebuild``.
        """
        self._call(lib.kvs_coordinator_transition, phase)

    def rebuild(self, phase: int) -> None:
        """After poison: a fresh layout, bind and activate. Raises ``Busy`` while leases survive."""
        self._call(lib.kvs_coordinator_rebuild, phase)

    def cancel(self) -> None:
        """Ask a running transition, from any thread, to stop before its next callback and undo."""
        check(lib.kvs_coordinator_cancel(self.ptr), self._device)

    def admit(self) -> int:
        """Admit one unit of work; returns its ticket."""
        ticket = ffi.new("uint64_t *")
        check(lib.kvs_coordinator_admit(self.ptr, ticket), self._device)
        number: int = ticket[0]
        return number

    def finish(self, ticket: int) -> None:
        """End the admitted unit of work. Raises ``Stale`` for another ticket."""
        check(lib.kvs_coordinator_finish(self.ptr, ticket), self._device)

    @property
    def state(self) -> CoordinatorState:
        """What ``info`` says of it, at less cost."""
        info = make_struct("kvs_coordinator_info")
        check(lib.kvs_coordinator_get_info(self.ptr, info), self._device)
        return CoordinatorState(info.state)

    @property
    def info(self) -> CoordinatorInfo:
        info = make_struct("kvs_coordinator_info")
        check(lib.kvs_coordinator_get_info(self.ptr, info), self._device)
        failure = None
        if info.failed_step >= 0:
            consumer = info.failed_consumer if info.failed_consumer >= 0 else None
            failure = PhaseFailure(PhaseStep(info.failed_step), consumer, info.failed_status)
        return CoordinatorInfo(
            state=CoordinatorState(info.state),
            phase=None if info.phase == _NO_PHASE else info.phase,
            n_phases=info.n_phases,
            n_consumers=info.n_consumers,
            failure=failure,
            transitions=info.transitions,
        )

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        check(lib.kvs_coordinator_check_integrity(self.ptr), self._device)

    def _call(self, function: Any, phase: int) -> None:
        outer, self._raised[:] = self._raised.copy(), []
        try:
            check(function(self.ptr, phase), self._device)
        except KvStreamError as error:
            if self._raised:
                _raise_from(error, self._raised.copy())
            raise
        finally:
            self._raised[:] = outer


def _raise_from(error: KvStreamError, raised: list[BaseException]) -> NoReturn:
    """Raise what a move ended with, from the first exception of a consumer; later ones become notes.

    An interrupt is raised itself, even one that struck while a failure was undone: whoever pressed Ctrl-C waits for it.
    """
    first, *later = raised
    for exception in raised:
        if not isinstance(exception, Exception):
            raise exception
    chained = type(error)(f"{error}: {first}")
    for exception in later:
        chained.add_note(f"while undoing: {exception!r}")
    raise chained from first


def _visit(user: Any, step: int, phase: int, *, is_undo: bool) -> int:
    callback: _Callback = ffi.from_handle(user)
    visit = callback.consumer.undo if is_undo else callback.consumer.run
    try:
        visit(PhaseStep(step), phase)
    except BaseException as error:  # no exception can cross the C frames; it waits and is raised behind them
        callback.raised.append(error)
        status: int = error.status if isinstance(error, KvStreamError) and error.status < 0 else lib.KVS_EIO
        return status
    return 0


def _keep(_kind: type[BaseException], error: BaseException, trace: TracebackType) -> int:
    """An interrupt that struck before ``_visit`` could catch it waits with the others."""
    callback: _Callback = ffi.from_handle(trace.tb_frame.f_locals["user"])
    callback.raised.append(error)
    status: int = lib.KVS_EIO
    return status


@ffi.def_extern(name="kvs_py_phase_run", error=lib.KVS_EIO, onerror=_keep)  # type: ignore[untyped-decorator]
def _run_step(user: Any, step: int, phase: int) -> int:
    return _visit(user, step, phase, is_undo=False)


@ffi.def_extern(name="kvs_py_phase_undo", error=lib.KVS_EIO, onerror=_keep)  # type: ignore[untyped-decorator]
def _undo_step(user: Any, step: int, phase: int) -> int:
    return _visit(user, step, phase, is_undo=True)
