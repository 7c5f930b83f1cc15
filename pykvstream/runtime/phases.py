"""What the runtime does at each step of a phase transition.

Order: steps come from the coordinator of the core (``include/kvstream/phase.h``); undo visits the same steps backwards.
Holds: ``PhaseResources``, the one consumer of the pool and workspace regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import Device
from pykvstream.core.pager import Pager
from pykvstream.core.phase import PhaseStep
from pykvstream.core.tape import Binding, Tape
from pykvstream.errors import Busy
from pykvstream.runtime.layout import POOL_REGION, WORKSPACE_REGION, Placement


@dataclass(frozen=True, slots=True)
class PhaseTape:
    """A phase's tape and the placement of its pool."""

    tape: Tape
    placement: Placement


class PhaseResources:
    """Pool, workspace and binding of the active phase; gives them up and takes them as the coordinator says."""

    def __init__(self, device: Device, arena: Arena, pager: Pager, phases: Sequence[PhaseTape]) -> None:
        self._device = device
        self._arena = arena
        self._pager = pager
        self._phases = list(phases)
        self._workspace: Lease | None = None
        self._binding: Binding | None = None
        self._active: int | None = None

    @property
    def binding(self) -> Binding:
        """The bound tape of the active phase."""
        if self._binding is None:
            raise Busy("no phase is active")
        return self._binding

    def placement_of(self, phase: int) -> Placement:
        return self._phases[phase].placement

    def place(self, placement: Placement) -> None:
        """Divide the active phase's pool anew, now and whenever the phase comes back."""
        if self._active is None:
            raise Busy("no phase is active")
        self._pager.place(placement)
        self._phases[self._active] = PhaseTape(self._phases[self._active].tape, placement)

    def run(self, step: PhaseStep, phase: int) -> None:
        """Take one step towards ``phase``."""
        if step is PhaseStep.STOP and self._pager.info.is_in_pass:
            raise Busy("a pass is open")
        if step is PhaseStep.DRAIN:
            self._pager.publish_wait()
        elif step is PhaseStep.INVALIDATE:
            self._unbind()
        elif step is PhaseStep.RELEASE:
            self._release()
        elif step is PhaseStep.BIND:
            self._take(phase)
            self._bind(phase)
        elif step is PhaseStep.ACTIVATE:
            self._active = phase

    def undo(self, step: PhaseStep, phase: int) -> None:
        """Take one step back to the phase that was active."""
        if step is PhaseStep.BIND:
            self._unbind()
            self._release()
        elif self._active is not None and step is PhaseStep.RELEASE:
            self._take(self._active)
        elif self._active is not None and step is PhaseStep.INVALIDATE:
            self._bind(self._active)

    def close(self) -> None:
        """Give everything up; no phase is active afterwards."""
        self._unbind()
        self._release()
        self._active = None

    def _take(self, phase: int) -> None:
        with self._arena.acquire(POOL_REGION) as pool:
            self._pager.attach(pool, self._phases[phase].placement)
        self._workspace = self._arena.acquire(WORKSPACE_REGION)

    def _release(self) -> None:
        self._pager.detach()
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None

    def _bind(self, phase: int) -> None:
        if self._workspace is None:
            raise Busy("no workspace is held")
        self._binding = Binding(self._device, self._phases[phase].tape, self._arena, self._workspace, self._pager)

    def _unbind(self) -> None:
        if self._binding is not None:
            self._binding.close()
            self._binding = None
