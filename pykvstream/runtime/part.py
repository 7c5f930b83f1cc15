"""Layers of a model at work on one device: their arena, pager, phases, placement and snapshots.

Shapes: hidden rows float32 ``[n, n_embd]``, logits ``[m, n_vocab]``.
Order: a pass is begun, computed and ended; whoever drives several parts does each step in all of them, in the order of
their layers. An error leaves what ``recover`` brings back to one token.
Holds: ``Part``, ``PartReport``, ``Pass``.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device
from pykvstream.core.kv import Cache
from pykvstream.core.pager import Pager
from pykvstream.core.phase import CoordinatorState, PhaseCoordinator, PhaseRegion
from pykvstream.core.state import State
from pykvstream.core.tape import CancelFlag
from pykvstream.errors import NotFound, Stale
from pykvstream.models.span import LayerSpan
from pykvstream.runtime.blueprint import Blueprint, MemoryReport, Phase
from pykvstream.runtime.checkpoints import CheckpointStore
from pykvstream.runtime.context import PartContext
from pykvstream.runtime.head import Head
from pykvstream.runtime.layout import ArenaPlan, Placement, pages_of
from pykvstream.runtime.phases import PhaseResources, PhaseTape
from pykvstream.runtime.placer import Placer
from pykvstream.runtime.rows import RowReader
from pykvstream.sampling import front_words


class Pass(NamedTuple):
    """What all parts are told of a pass: ``tokens`` ``[n]``, ``out_rows`` ``[m]`` rising, ``positions`` ``[n]`` or
    ``[3, n]``, by default the number of each row. ``fronts`` ``[m, words]``: where the sampling front of each
    output row goes, None where nobody asks for it."""

    tokens: NDArray[np.uint32]
    out_rows: NDArray[np.uint32]
    positions: NDArray[np.uint32] | None
    cancel: CancelFlag
    fronts: NDArray[np.uint32] | None = None

    @property
    def n_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PartReport:
    """Which layers are on which device, how its arena is divided, and its bytes by owner."""

    device: str
    span: LayerSpan
    plan: ArenaPlan
    report: MemoryReport


class Part:
    """Made of a blueprint, in an arena of its own. Raises ``NoSpace`` where that is too small."""

    def __init__(self, device: Device, blueprint: Blueprint, arena_bytes: int) -> None:
        self.blueprint = blueprint
        self.device = device
        self.plan = blueprint.plan(arena_bytes)
        with ExitStack() as stack:
            self._arena = stack.enter_context(Arena(device, arena_bytes))
            self.cache = stack.enter_context(Cache(device, blueprint.layers))
            self.pager = stack.enter_context(Pager(device, self.cache))
            self.head: Head | None = None
            placement = self.plan.phases[Phase.DECODE.value].head
            if blueprint.head is not None and placement is not None:
                self.head = Head(device, blueprint.head, placement, self.pager)
                stack.callback(self.head.close)
            self._coordinator = stack.enter_context(PhaseCoordinator(self._arena))
            self._resources = PhaseResources(
                device,
                self._arena,
                self.pager,
                [PhaseTape(blueprint.tape(phase), self.plan.phases[phase.value].placement) for phase in Phase],
                self.head,
            )
            for phase in Phase:
                self._coordinator.add_phase(
                    [
                        PhaseRegion(region.id, region.size_bytes, region.alignment_bytes)
                        for region in self.plan.phases[phase.value].regions
                    ]
                )
            self._coordinator.add_consumer(self._resources)
            self.checkpoints: CheckpointStore | None = None
            if blueprint.checkpoint_slots:
                self.checkpoints = CheckpointStore(device, blueprint.deltas, blueprint.checkpoint_slots)
                stack.callback(self.checkpoints.close)
            self._handles = stack.pop_all()
        decode = self.plan.phases[Phase.DECODE.value]
        self._placer: Placer | None = Placer(decode, self.plan.shape.run_pages, self._resources.place)
        self._phase: Phase | None = None
        n_handed = 0 if blueprint.span.is_last else max(blueprint.tape(phase).max_rows for phase in Phase)
        self._has_own_memory = device.info.has_own_memory
        self._handed_over = np.empty((n_handed, blueprint.config.n_embd), np.float32)
        # Where fronts go that nobody asks for.
        self._no_fronts: NDArray[np.uint32] | None = None
        if blueprint.front is not None:
            n_rows = blueprint.tape(Phase.DECODE).max_out_rows
            self._no_fronts = np.empty((n_rows, front_words(blueprint.front.n_best)), np.uint32)

    @property
    def report(self) -> MemoryReport:
        """Device bytes by owner."""
        return MemoryReport(
            self.plan.arena_bytes,
            self.blueprint.weights.device_bytes,
            self.blueprint.state_bytes,
            self.blueprint.stage_bytes,
        )

    @property
    def told(self) -> PartReport:
        """What there is to say of it."""
        info = self.device.info
        return PartReport(info.name if info.has_own_memory else "cpu", self.blueprint.span, self.plan, self.report)

    def context(self, ctx_tokens: int) -> PartContext:
        """What this part keeps of an empty sequence."""
        with ExitStack() as stack:
            seq = stack.enter_context(self.cache.sequence(ctx_tokens))
            state = None
            if self.blueprint.deltas:
                state = stack.enter_context(State(self.device, self.blueprint.deltas, self.blueprint.log_rows))
            head = None if self.head is None else self.head.context(ctx_tokens)
            context = PartContext(seq, state, head)
            stack.pop_all()
            return context

    # ---- phases and placement ----

    def enter(self, phase: Phase) -> None:
        """Give the arena the layout of a phase; costs nothing when it has it. After poison everything is taken anew."""
        if self._phase is phase:
            return
        self._phase = None  # what an interrupt leaves is taken up by whoever enters next
        if self._coordinator.state is CoordinatorState.POISONED:
            self._resources.release()
            self._coordinator.rebuild(phase.value)
        self._coordinator.transition(phase.value)
        self._resources.complete(phase.value)
        self._phase = phase

    def place(self, phase: Phase, placement: Placement) -> None:
        """Enter a phase and divide its pool anew; of the decode pool the policy then decides no more."""
        self.enter(phase)
        if phase is Phase.DECODE:
            self._placer = None
        self._resources.place(placement)

    def placement_of(self, phase: Phase) -> Placement:
        """How the phase's pool is divided."""
        return self._resources.placement_of(phase.value)

    # ---- passes ----

    def begin(self, context: PartContext, n_rows: int) -> None:
        """Open a pass in the active phase; the copies that it needs are on their way then."""
        placer = self._placer
        if placer is not None and self._phase is Phase.DECODE:
            placer.prepare(pages_of(context.seq.n_tokens + n_rows), n_rows)
        self.pager.begin(context.seq, n_rows)

    def hand_over(
        self, context: PartContext, given: Pass, hidden: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Compute the pass that is open; returns hidden rows for the next part, valid until the next pass.

        ``hidden``: those of the part before, None for the first.
        """
        rows = self._handed_over[: given.n_rows]
        self._submit(context, given, np.arange(given.n_rows, dtype=np.uint32), (rows,), hidden)
        self.finish()
        return rows

    def submit(
        self,
        context: PartContext,
        given: Pass,
        hidden: NDArray[np.float32] | None,
        outputs: tuple[NDArray[np.float32] | None, ...],
    ) -> None:
        """The same for the last part, whose device is then at work until ``finish``.

        ``outputs``: logits and, with an MTP head, what that starts from, written by ``finish``; None for what stays on
        a device with memory of its own: see ``kept_rows``.
        """
        if self._no_fronts is not None and self._phase is Phase.DECODE:
            fronts = self._no_fronts[: len(given.out_rows)] if given.fronts is None else given.fronts
            outputs = (*outputs, fronts.view(np.float32))
        self._submit(context, given, given.out_rows, outputs, hidden)

    def _submit(
        self,
        context: PartContext,
        given: Pass,
        out_rows: NDArray[np.uint32],
        outputs: tuple[NDArray[np.float32] | None, ...],
        hidden: NDArray[np.float32] | None,
    ) -> None:
        self._resources.binding.begin(
            given.tokens,
            out_rows,
            outputs,
            given.cancel,
            positions=given.positions,
            state=context.state,
            inputs=() if hidden is None else (hidden,),
            has_front=given.fronts is not None,
        )

    def finish(self) -> None:
        """Wait until the pass that is open has been computed."""
        self._resources.binding.end()

    @property
    def keeps_rows(self) -> bool:
        """Whether logits can stay on the device, since what is chosen from is found there."""
        return self.blueprint.front is not None and self._has_own_memory

    def kept_rows(self) -> RowReader:
        """What brings logits of the newest pass of the active phase from the device."""
        binding = self._resources.binding
        number = binding.newest_pass

        def read(i: int, rows: NDArray[np.float32]) -> None:
            if binding.closed:
                raise Stale("logits that stayed on the card: the model has left the phase that computed them")
            binding.read_output(number, 0, i, rows)

        return read

    def end(self, n_rows: int) -> None:
        """Commit the rows of the pass that is open."""
        self.pager.end(n_rows)

    def observe(self) -> None:
        """Let the policy learn from the pass that has ended."""
        placer = self._placer
        if placer is not None and self._phase is Phase.DECODE and placer.is_watching:
            placer.observe(self.device.load_ns, self.pager.info, time.perf_counter())

    def abandon(self) -> None:
        """Give up a pass, or a lease of the head, that an interrupt left."""
        self._resources.abort()
        if self.head is not None:
            self.head.recover()
        if self.pager.is_in_pass:
            self.pager.end(0)

    # ---- the past of a sequence ----

    def keep(self, context: PartContext) -> None:
        """Keep a snapshot of the recurrent state as it stands."""
        if self.checkpoints is not None and context.state is not None:
            self.checkpoints.capture(context.state, context.kept)

    def kept_image(self, context: PartContext, n_tokens: int) -> NDArray[np.uint8]:
        """The image of the state that is kept at a position. Raises ``NotFound``."""
        if self.checkpoints is None or context.state is None:
            raise NotFound(f"no state is kept at {n_tokens} tokens")
        with State(self.device, context.state.layers, self.blueprint.log_rows) as state:
            self.checkpoints.restore(context.kept, n_tokens, state)
            return state.save()

    def go_back(self, context: PartContext, n_tokens: int) -> None:
        """Go back to a position of which a snapshot is kept, or to the beginning. After an error see ``settle``."""
        if n_tokens == 0 or self.checkpoints is None:
            context.truncate(self.pager, n_tokens)
        else:
            context.go_back(self.pager, self.checkpoints, n_tokens)

    def forget(self, context: PartContext, beyond: int) -> None:
        """Let go of snapshots beyond a position."""
        if self.checkpoints is not None:
            self.checkpoints.release(context.kept, beyond)
        if context.head is not None:
            context.head.forget(beyond)

    def fork(self, context: PartContext) -> PartContext:
        """The same history; pages are shared until one of the two writes."""
        self.pager.publish_wait()
        child = context.fork(self.device)
        if self.head is not None and context.head is not None:
            child.head = self.head.fork(context.head)
        if self.checkpoints is not None:
            child.kept = self.checkpoints.share(context.kept)
        return child

    def release(self, context: PartContext) -> None:
        """Close what this part keeps of a sequence, which may be closed already."""
        try:
            if not (self.pager.closed or context.seq.closed):
                self.abandon()
                self.pager.drop(context.seq)
        finally:
            self.forget(context, -1)
            if self.head is not None and context.head is not None:
                self.head.release(context.head)
            context.close()

    def check_integrity(self) -> None:
        """Recompute every invariant of arena, coordinator, cache, pager, snapshots and head."""
        for part in (self._arena, self._coordinator, self.cache, self.pager):
            part.check_integrity()
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
        if self.head is not None:
            self.head.check_integrity()

    def close(self) -> None:
        """Give everything back. Sequences that still exist keep their history."""
        self._resources.close()
        self._handles.close()
        self.blueprint.close()
