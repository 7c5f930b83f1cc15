"""A loaded model at work: passes over sequences, whoever's turn it is.

A model is one part on one device, or is cut into parts that each have a device, an arena and a pager of their own:
hidden rows go from part to part in host memory.
Order: prompts run in chunks that end on multiples of ``ubatch_size`` in absolute positions. All parts begin a pass
before the first one computes, so that the copies of later ones are on their way meanwhile, and all have computed before
the first one commits.
Holds: ``Target``, ``Call``; ``Blueprint``, ``Phase`` and what else of ``blueprint`` is spoken of with a target.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.device import Device
from pykvstream.core.kv import KvLayer, RecordInfo
from pykvstream.core.pager import Forecast, PagerInfo, Traffic
from pykvstream.core.tape import CancelFlag
from pykvstream.errors import Busy, Closed, InvalidArgument, NotFound, Unsupported
from pykvstream.runtime.blueprint import (
    DECODE_ROWS,
    MAX_UBATCH,
    Blueprint,
    MemoryReport,
    Phase,
    Progress,
    TargetOptions,
    kv_layer,
)
from pykvstream.runtime.context import Checkpoint, Context, PartContext
from pykvstream.runtime.head import Head
from pykvstream.runtime.layout import ArenaPlan, Placement, require_int
from pykvstream.runtime.part import Part, Pass
from pykvstream.runtime.rows import RowReader
from pykvstream.runtime.timeline import NO_SPAN, Timeline
from pykvstream.sampling import front_words

__all__ = [
    "DECODE_ROWS",
    "MAX_UBATCH",
    "Blueprint",
    "Call",
    "MemoryReport",
    "Phase",
    "Progress",
    "Target",
    "TargetOptions",
    "as_tokens",
    "kv_layer",
    "require_token_ids",
]


class Call(NamedTuple):
    """A call that runs passes, in one thread, until ``cancel`` is raised. The interpreter knows whether it runs."""

    thread: int
    passes: Generator[None, None, None]
    cancel: CancelFlag

    @property
    def is_at_work(self) -> bool:
        return bool(self.passes.gi_running)  # type: ignore[attr-defined]


class Begun(NamedTuple):
    """A pass that the last part is at work on: what ``end`` is told. ``for_head``: what an MTP head starts from."""

    context: Context
    n_rows: int
    for_head: NDArray[np.float32] | None


class Target:
    """The runtime of one model. Sequences share the pool, and whoever runs or changes one holds ``turn`` meanwhile.

    ``call`` is the newest that ran passes. A target lives in the process that made it: the threads that copy and
    compute do not come along to a fork.
    ``before``: of a model that is cut, the part with the layers before those of ``blueprint``; the target closes it.
    """

    def __init__(
        self, device: Device, blueprint: Blueprint, arena_bytes: int, *, before: Part | None = None
    ) -> None:
        last = Part(device, blueprint, arena_bytes)
        self.parts = (last,) if before is None else (before, last)
        self._contexts: WeakSet[Context] = WeakSet()
        self._turn = threading.RLock()
        self._process = os.getpid()
        self._is_closed = False
        self._n_changes = 0  # of any sequence, as they begin
        self.call: Call | None = None
        self.timeline: Timeline | None = None
        self.blueprint = last.blueprint
        """Of the last part: file, configuration, options and the widths of passes are those of all."""
        self._front_words = 0 if last.blueprint.front is None else front_words(last.blueprint.front.n_best)
        self.n_vocab_rows = last.blueprint.config.n_vocab
        """Columns of a logits row."""
        self._n_sessions = 0

    @property
    def turn(self) -> threading.RLock:
        """What is held by whoever runs or changes a sequence. Raises ``Unsupported`` in a fork of the process."""
        if os.getpid() != self._process:
            self.require_own()
        return self._turn

    def require_own(self) -> None:
        """Raises ``Unsupported`` in a fork of the process."""
        if self.is_forked:
            raise Unsupported(
                f"the model was opened by process {self._process}, and process {os.getpid()} is a fork of it:"
                " open the model after the fork"
            )

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that made the target."""
        return os.getpid() != self._process

    def number_session(self) -> int:
        """1, 2, 3...: what a timeline calls a session."""
        self._n_sessions += 1
        return self._n_sessions

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """For ``with``: what the calling thread does, where a timeline is recorded."""
        return NO_SPAN if self.timeline is None else self.timeline.span(name, details)

    def record(self) -> Timeline:
        """Record a timeline from now on. Raises ``Busy`` where one is recorded."""
        self.require_open()
        if self.timeline is not None:
            raise Busy("a timeline of this model is being recorded")
        self.timeline = Timeline(*(part.device for part in self.parts))
        return self.timeline

    def stop_recording(self) -> None:
        """End the timeline, if there is one."""
        if self.timeline is not None:
            self.timeline.stop()
            self.timeline = None

    def require_open(self) -> None:
        """Raises ``Closed`` after ``close``."""
        if self._is_closed:
            raise Closed("the model is closed")

    # ---- what it is; of a model that is cut, the last part or all together ----

    @property
    def _last(self) -> Part:
        return self.parts[-1]

    def _each(self, context: Context) -> Iterator[tuple[Part, PartContext]]:
        return zip(self.parts, context.parts, strict=True)

    @property
    def plan(self) -> ArenaPlan:
        """Of the last part's arena."""
        return self._last.plan

    @property
    def head(self) -> Head | None:
        """The MTP head, which is with the last part."""
        return self._last.head

    @property
    def pager_info(self) -> PagerInfo:
        """Counters of all parts together."""
        return PagerInfo.total([part.pager.info for part in self.parts])

    @property
    def traffic(self) -> Traffic:
        """What all parts together have copied."""
        first, *others = self.parts
        return Traffic.total([part.pager.traffic for part in self.parts]) if others else first.pager.traffic

    @property
    def arena_bytes(self) -> int:
        """Of all parts."""
        return sum(part.plan.arena_bytes for part in self.parts)

    def history_bytes(self, n_tokens: int) -> int:
        """Host bytes of a history of ``n_tokens``, without that of a head."""
        return sum(part.plan.shape.history_bytes(n_tokens) for part in self.parts)

    @property
    def report(self) -> MemoryReport:
        """Of the last part's device."""
        return self._last.report

    @property
    def layers(self) -> tuple[KvLayer, ...]:
        """Every layer with keys and values."""
        return tuple(layer for part in self.parts for layer in part.blueprint.layers)

    @property
    def records(self) -> tuple[RecordInfo, ...]:
        """How the page records of each layer with keys and values lie."""
        return tuple(record for part in self.parts for record in part.cache.records)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have recurrent state."""
        return any(part.blueprint.deltas for part in self.parts)

    @property
    def keeps_states(self) -> bool:
        """Whether snapshots of recurrent states are kept."""
        return any(part.checkpoints is not None for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of a session, in all parts."""
        return sum(part.blueprint.state_bytes for part in self.parts)

    def publish_wait(self) -> None:
        """Wait until every committed row is in host history."""
        for part in self.parts:
            part.pager.publish_wait()

    def before_file(self) -> None:
        """Let the device's fault hook strike before a file is read or written."""
        self._last.device.before_file()

    def context(self, ctx_tokens: int) -> Context:
        """An empty sequence. Its history grows in host memory as it is written; a recurrent state is all there."""
        self.require_own()
        self.require_open()
        require_int("ctx_size", ctx_tokens)
        if ctx_tokens > self.plan.ctx_tokens:
            raise InvalidArgument(
                f"a context of {ctx_tokens} tokens; the arena was planned for 1 to {self.plan.ctx_tokens}"
            )
        with ExitStack() as stack:
            made: list[PartContext] = []
            for part in self.parts:
                made.append(part.context(ctx_tokens))
                stack.callback(made[-1].close)
            context = Context(tuple(made))
            stack.pop_all()
        self._contexts.add(context)
        return context

    # ---- phases and placement ----

    def enter(self, phase: Phase) -> None:
        """Give every arena the layout of a phase; costs nothing when it has it."""
        for part in self.parts:
            part.enter(phase)

    def place(self, phase: Phase, *placements: Placement) -> None:
        """Enter a phase and divide its pool anew, now and whenever the phase comes back: one placement for each part.

        The decode pool then stays as divided here: the policy no longer moves it.
        """
        if len(placements) != len(self.parts):
            raise InvalidArgument(f"{len(placements)} placements, the model has {len(self.parts)} parts")
        for part, placement in zip(self.parts, placements, strict=True):
            part.place(phase, placement)

    def placement_of(self, phase: Phase) -> Placement:
        """How the phase's pool is divided, in the last part."""
        return self._last.placement_of(phase)

    def forecast(self, context: Context, n_rows: int) -> Forecast:
        """What the next pass of a context will find in the active phase. Raises ``Busy`` before any was entered."""
        return Forecast.total([part.pager.forecast(own.seq, n_rows) for part, own in self._each(context)])

    def chunk_rows(self, phase: Phase, position: int, n_left: int) -> int:
        """Rows of the next pass: prompts end on the grid, other passes are as wide as the phase allows.

        ``n_left`` up to where a pass must end: on the chunks of recurrent layers that changes no bit.
        """
        width = self.blueprint.tape(phase).max_rows
        room = width - position % width if phase is Phase.PREFILL else width
        return min(room, n_left)

    # ---- passes ----

    def front_rows(self, phase: Phase, n_rows: int) -> NDArray[np.uint32] | None:
        """Room for the sampling fronts of ``n_rows`` output rows; None where passes of the phase have none."""
        has_front = self._front_words and phase is Phase.DECODE
        return np.empty((n_rows, self._front_words), np.uint32) if has_front else None

    @property
    def keeps_rows(self) -> bool:
        """Whether logits whose fronts are found can stay where they were computed."""
        return self._last.keeps_rows

    def kept_rows(self) -> RowReader:
        """What brings logits of the newest pass from the device, in its turn, until that begins another pass."""
        read = self._last.kept_rows()

        def read_in_turn(i: int, rows: NDArray[np.float32]) -> None:
            with self.turn:
                self.require_open()
                read(i, rows)

        return read_in_turn

    def run(
        self,
        context: Context,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        out: NDArray[np.float32] | None,
        cancel: CancelFlag,
        positions: NDArray[np.uint32] | None = None,
        fronts: NDArray[np.uint32] | None = None,
    ) -> None:
        """One pass in the active phase; its rows are committed.

        ``tokens`` ``[n]``, ``out_rows`` ``[m]`` rising, ``out`` ``[m, n_vocab_rows]``, None
        where they are kept (``keeps_rows``, ``kept_rows``); ``positions`` ``[n]`` or ``[3,
        n]``, by default the number of each row; ``fronts`` as ``front_rows`` made them, in a decode pass. After any
        error each part is as before, or has run the pass where the error came between two parts that commit:
        ``restore`` and ``recover`` bring them together.
        """
        self.end(self.begin(context, tokens, out_rows, out, cancel, positions, fronts))

    def begin(
        self,
        context: Context,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        out: NDArray[np.float32] | None,
        cancel: CancelFlag,
        positions: NDArray[np.uint32] | None = None,
        fronts: NDArray[np.uint32] | None = None,
    ) -> Begun:
        """``run`` up to where nothing but the last part's device is at work; ``end`` follows, or ``recover``."""
        given = Pass(tokens, out_rows, positions, cancel, fronts)
        n_rows = len(tokens)
        self._n_changes += 1
        for_head = None if context.head is None else np.empty((n_rows, self.blueprint.config.n_embd), np.float32)
        try:
            for part, own in zip(self.parts, context.parts, strict=True):
                part.begin(own, n_rows)
            hidden = None
            for part, own in zip(self.parts[:-1], context.parts, strict=False):
                hidden = part.hand_over(own, given, hidden)
            outputs = (out,) if for_head is None else (out, for_head)
            self.parts[-1].submit(context.parts[-1], given, hidden, outputs)
        except BaseException:
            # Not ``recover``: what ``restore`` brings back, it may have to give up where the parts are apart.
            self._settle(context)
            raise
        return Begun(context, n_rows, for_head)

    def end(self, begun: Begun) -> None:
        """Wait for the pass that was begun, and commit its rows; what ``out`` and ``fronts`` are to hold is there."""
        context, n_rows, for_head = begun
        try:
            self.parts[-1].finish()
            for part in self.parts:
                part.end(n_rows)
            for own in context.parts:
                own.accept(n_rows)
        except BaseException:
            self._settle(context)
            raise
        if context.head is not None and for_head is not None:
            context.head.hidden.append(context.n_tokens - n_rows, for_head)
        if self.timeline is not None:
            self.timeline.drain()
        for part in self.parts:
            part.observe()

    def note_settled(self, context: Context) -> None:
        """The newest call has done all it had to with this context: there is nothing for ``recover`` to look for."""
        context.settled_at = self._n_changes

    def recover(self, context: Context) -> None:
        """End a pass that an interrupt left open, and bring the context's parts back to one token.

        Where the call before ended well, with this context and noted so, nothing can be apart.
        """
        is_settled = context.settled_at == self._n_changes
        self._n_changes += 1  # whatever the call does that begins here
        if is_settled:
            return
        self._settle(context)
        if context.is_together:
            return
        n_tokens = context.n_tokens if context.can_keep(context.n_tokens) else 0
        for part, own in self._each(context):
            own.truncate(part.pager, n_tokens)

    def _settle(self, context: Context) -> None:
        """Bring each part back to one token, which may be another one than that of the others."""
        for part, own in self._each(context):
            part.abandon()
            own.settle(part.pager)

    # ---- the past of a sequence ----

    def truncate(self, context: Context, n_tokens: int) -> None:
        """Keep the first tokens. Raises ``NotFound``, and nothing has changed, where the recurrent state lacks them."""
        context.require_keep(n_tokens)
        for part, own in self._each(context):
            own.truncate(part.pager, n_tokens)

    def keep(self, context: Context) -> None:
        """Keep a snapshot of the recurrent state as it stands."""
        if not self.keeps_states:
            return
        for part, own in self._each(context):
            part.keep(own)
        if context.head is not None:
            context.head.keep(context.n_tokens)

    def newest_kept(self, context: Context, n_tokens: int) -> int | None:
        """The last position up to ``n_tokens`` that ``go_back`` reaches, which every part with a state has kept."""
        kept = [(part.checkpoints, own.kept) for part, own in self._each(context) if own.state is not None]
        at: int | None = n_tokens if kept else None
        while at is not None:
            found = [None if store is None else store.newest(states, at) for store, states in kept]
            least = min((-1 if each is None else each) for each in found)
            if all(each == least for each in found):
                return least
            at = least if least >= 0 else None
        return None

    def kept_images(self, context: Context, n_tokens: int) -> list[NDArray[np.uint8]]:
        """The image of the state that each part with recurrent layers has kept at a position. Raises ``NotFound``."""
        if not self.keeps_states:
            raise NotFound(f"no state is kept at {n_tokens} tokens")
        return [part.kept_image(own, n_tokens) for part, own in self._each(context) if own.state is not None]

    def go_back(self, context: Context, n_tokens: int) -> None:
        """Go back to a position of which a snapshot is kept, or to the beginning. After an error see ``recover``."""
        self.publish_wait()  # the likeliest to fail, before anything has changed
        for part, own in self._each(context):
            part.go_back(own, n_tokens)

    def forget(self, context: Context, beyond: int) -> None:
        """Let go of snapshots beyond a position: tokens there are others now."""
        for part, own in self._each(context):
            part.forget(own, beyond)

    def checkpoint(self, context: Context, phase: Phase, n_cached: int, n_tokens: int) -> tuple[Checkpoint, ...]:
        """What it takes to go back to ``n_cached`` tokens, where all parts are, after running ``n_tokens``: an image of
        each part's state where its log will not do."""
        if phase is Phase.DECODE and n_tokens <= self.blueprint.log_rows:
            return (Checkpoint(n_cached, None),) * len(self.parts)
        return tuple(own.checkpoint() for own in context.parts)

    def restore(self, context: Context, checkpoint: tuple[Checkpoint, ...]) -> None:
        """Go back, after any failure."""
        self._settle(context)
        for (part, own), taken in zip(self._each(context), checkpoint, strict=True):
            own.restore(part.pager, taken)

    def fork(self, context: Context) -> Context:
        """A context with the same history; pages are shared until one of the two writes."""
        with ExitStack() as stack:
            made: list[PartContext] = []
            for part, own in self._each(context):
                made.append(part.fork(own))
                stack.callback(part.release, made[-1])
            child = Context(tuple(made))
            stack.pop_all()
        self._contexts.add(child)
        return child

    def release(self, context: Context) -> None:
        """Close a context of this target, which may be closed already."""
        with ExitStack() as stack:
            for part, own in self._each(context):
                stack.callback(part.release, own)

    def check_integrity(self) -> None:
        """Recompute every invariant of arenas, coordinators, caches, pagers and recurrent states."""
        for part in self.parts:
            part.check_integrity()
        for context in self._contexts:
            context.check_integrity()

    def stop(self) -> None:
        """Refuse whoever comes from now on, and cancel the call that is at work. Any thread.

        Raises ``Busy`` inside a call, whose end it would wait for.
        """
        call = self.call
        if call is not None and call.thread == threading.get_ident() and call.is_at_work:
            raise Busy("a call of this model is at work in this thread: its on_progress cannot close the model")
        self._is_closed = True
        call = self.call
        if call is not None:
            call.cancel.set()

    def close(self) -> None:
        """Give everything back; the caller holds ``turn``. Sequences that still exist keep their history."""
        self.stop_recording()
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.close)


def as_tokens(tokens: object, n_vocab: int) -> NDArray[np.uint32]:
    """Token ids as the core wants them. Raises ``InvalidArgument`` naming the first that is not in the vocabulary."""
    if isinstance(tokens, list | tuple):
        for token in tokens:
            if type(token) is not int or not 0 <= token < n_vocab:
                break
        else:
            return np.array(tokens, np.uint32)
    given = np.asarray(require_token_ids(tokens))
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iuO"):
        raise InvalidArgument(f"token ids must be integers in one dimension, got {given.dtype} {given.shape}")
    if given.dtype.kind == "O":
        # Integers beyond 64 bits, or something else among them.
        is_bad = [not isinstance(token, int) or not 0 <= token < n_vocab for token in given.tolist()]
    else:
        is_bad = ((given < 0) | (given >= n_vocab)).tolist()
    if True in is_bad:
        at = is_bad.index(True)
        raise InvalidArgument(f"token {given[at]} at index {at} is outside the vocabulary of {n_vocab}")
    return given.astype(np.uint32)


def require_token_ids(tokens: object) -> Sequence[int] | NDArray[np.uint32]:
    """``tokens`` if they are integers in an order. Raises ``InvalidArgument`` naming what they are."""
    is_text = isinstance(tokens, str | bytes | bytearray | memoryview)
    if is_text or not isinstance(tokens, np.ndarray | Sequence):
        raise InvalidArgument(f"token ids must be a sequence of integers, got {type(tokens).__name__}")
    if not isinstance(tokens, np.ndarray):
        for at, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidArgument(
                    f"token ids must be integers in one dimension, got {type(token).__name__} at index {at}"
                )
    return tokens
