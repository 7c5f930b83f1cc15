"""What the runtime does at each step of a phase transition.

Order: steps come from the coordinator of the core (``include/kvstream/phase.h``); undo visits the same steps backwards.
Holds: ``PhaseResources``, the one consumer of the pools and the workspace region.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import Device
from pykvstream.core.pager import Pager
from pykvstream.core.phase import PhaseStep
from pykvstream.core.tape import Binding, Tape
from pykvstream.errors import Busy, KvStreamError
from pykvstream.runtime.head import Head
from pykvstream.runtime.layout import HEAD_REGION, POOL_REGION, WORKSPACE_REGION, Placement


@dataclass(frozen=True, slots=True)
class PhaseTape:
    """A phase's tape and the placement of its pool."""

    tape: Tape
    placement: Placement


class PhaseResources:
    """Pool, workspace and binding of the active phase; gives them up and takes them as the coordinator says.

    An MTP head has its pool and its tapes in every phase, beside the others.
    """

    def __init__(
        self, device: Device, arena: Arena, pager: Pager, phases: Sequence[PhaseTape], head: Head | None = None
    ) -> None:
        self._device = device
        self._arena = arena
        self._pager = pager
        self._phases = list(phases)
        self._head = head
        self._workspace: Lease | None = None
        self._binding: Binding | None = None
        self._active: int | None = None
        self._previous: int | None = None

    @property
    def binding(self) -> Binding:
        """The bound tape of the active phase."""
        if self._binding is None:
            raise Busy("no phase is active")
        return self._binding

    def abort(self) -> None:
        """Wait for a pass that was begun and will not be ended, if there is one."""
        if self._binding is not None:
            self._binding.abort()

    @property
    def _pagers(self) -> tuple[Pager, ...]:
        return (self._pager,) if self._head is None else (self._pager, self._head.pager)

    def placement_of(self, phase: int) -> Placement:
        return self._phases[phase].placement

    def place(self, placement: Placement) -> None:
        """Divide the active phase's pool anew, now and whenever the phase comes back."""
        if self._active is None:
            raise Busy("no phase is active")
        self._pager.place(placement)
        self._phases[self._active] = PhaseTape(self._phases[self._active].tape, placement)

    def run(self, step: PhaseStep, phase: int) -> None:
        """Take one step towards ``phase``, whole or not at all.

        Of a release, which cannot be taken back while the arena gives no leases, the undo of the step before it
        takes back what was done.
        """
        try:
            self._run(step, phase)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # a lease that a frame of the failure holds would stay live
            if step is not PhaseStep.RELEASE:
                self._undo_half(step, phase, error)
            raise

    def _undo_half(self, step: PhaseStep, phase: int, error: BaseException) -> None:
        """Whoever interrupts hears of the interrupt; what also fails is told beside it, and shows at the next step."""
        try:
            self.undo(step, phase)
        except KvStreamError as second:
            error.add_note(f"while undoing: {second!r}")

    def _run(self, step: PhaseStep, phase: int) -> None:
        if step is PhaseStep.STOP and any(pager.is_in_pass for pager in self._pagers):
            raise Busy("a pass is open")
        if step is PhaseStep.DRAIN:
            for pager in self._pagers:
                pager.publish_wait()
        elif step is PhaseStep.INVALIDATE:
            self._unbind()
        elif step is PhaseStep.RELEASE:
            self.release()
        elif step is PhaseStep.BIND:
            self._take(phase)
            self._bind(phase)
        elif step is PhaseStep.ACTIVATE:
            self._previous, self._active = self._active, phase

    def undo(self, step: PhaseStep, phase: int) -> None:
        """Take one step back to the phase that was active."""
        try:
            self._undo(step, phase)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise

    def _undo(self, step: PhaseStep, phase: int) -> None:
        if step is PhaseStep.ACTIVATE and self._active == phase:
            self._active = self._previous
        elif step is PhaseStep.BIND:
            self.release()
        elif self._active is not None and step is PhaseStep.RELEASE:
            self._take(self._active)
        elif self._active is not None and step is PhaseStep.INVALIDATE:
            self._take(self._active)
            self._bind(self._active)

    def complete(self, phase: int) -> None:
        """Take what an interrupt has kept the active phase from holding."""
        self._active = phase
        self._take(phase)
        self._bind(phase)

    def release(self) -> None:
        """Give up binding and leases. Raises ``DeviceError`` while the last rows cannot be written to history."""
        self._unbind()
        for pager in self._pagers:
            pager.detach()
        self._leave_workspace()

    def close(self) -> None:
        """Give everything up but the pager's pool, which goes with the pager."""
        self._unbind()
        self._leave_workspace()

    # Taking what is held already changes nothing, so that an undo may meet a step that was half done.

    def _take(self, phase: int) -> None:
        if not self._pager.is_attached:
            with self._arena.acquire(POOL_REGION) as pool:
                self._pager.attach(pool, self._phases[phase].placement)
        if self._head is not None and not self._head.pager.is_attached:
            with self._arena.acquire(HEAD_REGION) as pool:
                self._head.pager.attach(pool, self._head.placement)
        if self._workspace is None:
            self._workspace = self._arena.acquire(WORKSPACE_REGION)

    def _bind(self, phase: int) -> None:
        if self._workspace is None:
            raise Busy("no workspace is held")
        if self._binding is None:
            self._binding = Binding(
                self._device, self._phases[phase].tape, self._arena, self._workspace, self._pager
            )
        if self._head is not None and not self._head.bindings:
            self._head.bindings = tuple(
                Binding(self._device, tape, self._arena, self._workspace, self._head.pager)
                for tape in self._head.blueprint.tapes
            )

    # Forgotten first, closed then: an interrupt between the two leaves it to the collector.

    def _leave_workspace(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            workspace.close()

    def _unbind(self) -> None:
        binding, self._binding = self._binding, None
        if binding is not None:
            binding.close()
        if self._head is not None:
            bindings, self._head.bindings = self._head.bindings, ()
            for each in bindings:
                each.close()
