"""A loaded model on a device: weights, arena, pager and one tape per phase; and passes over sequences.

Units: ``arena_bytes`` bounds everything but the weights, which ``report`` lists.
Order: prompts run in chunks that end on multiples of ``ubatch_size`` in absolute positions.
Holds: ``Target``, ``TargetOptions``, ``MemoryReport``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from inspect import GEN_RUNNING, getgeneratorstate
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.arena import Arena
from pykvstream.core.bank import snapshot_bytes
from pykvstream.core.device import Device
from pykvstream.core.kv import Cache, KvFlag, KvLayer, RecordInfo, record_layout
from pykvstream.core.pager import Forecast, Pager, PagerInfo
from pykvstream.core.phase import CoordinatorState, PhaseCoordinator, PhaseRegion
from pykvstream.core.state import CHUNK_TOKENS, State, state_bytes
from pykvstream.core.tape import CancelFlag, DeltaMode, Tape
from pykvstream.errors import Busy, Closed, InvalidArgument, NotFound, Unsupported
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.graph import Graph, delta_layers, lower
from pykvstream.models import ModelConfig
from pykvstream.models.architectures import build_graph
from pykvstream.models.hybrid_config import HybridConfig
from pykvstream.models.mtp import check_head
from pykvstream.models.side_file import with_head_of
from pykvstream.models.tensors import check_head_tensors, check_tensors, head_selections, selections
from pykvstream.models.weights import FileWeights
from pykvstream.runtime.checkpoints import CheckpointStore, checkpoint_slots
from pykvstream.runtime.context import Checkpoint, Context
from pykvstream.runtime.head import CATCH_UP_ROWS, Head, HeadBlueprint
from pykvstream.runtime.layout import (
    PAGE_TOKENS,
    ArenaPlan,
    CacheShape,
    PhaseNeed,
    Placement,
    pages_of,
    plan_arena,
    require_int,
)
from pykvstream.runtime.phases import PhaseResources, PhaseTape
from pykvstream.runtime.placer import Placer
from pykvstream.runtime.timeline import NO_SPAN, Timeline

MAX_UBATCH = 2048
"""Widest prompt pass."""
DECODE_ROWS = 64
"""Widest decode or verify pass."""
_ROTATED_MULTIPLE = 64
_UNROTATED = frozenset({"F32", "F16", "BF16"})

Progress = Callable[[str, int], None]


class Phase(Enum):
    """What a pass is for; stated by the caller, never inferred from its width."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Cache types are GGUF type names such as ``Q8_0``; ``ubatch_size`` is the widest prefill pass.

    ``log_rows``: of models with recurrent layers, the widest decode or verify pass, whose rows the log of every
    session must hold; at most ``DECODE_ROWS``. ``checkpoint_bytes``: of these, host memory for snapshots of the past;
    0 keeps none, None chooses. ``mtp``: with the MTP head of the file, which then takes part of the arena.
    """

    cache_type_k: GgmlType
    cache_type_v: GgmlType
    ubatch_size: int
    ctx_tokens: int
    kv_rotation: bool = True
    fused: bool = True
    log_rows: int = DECODE_ROWS
    checkpoint_bytes: int | None = None
    mtp: bool = False


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Device bytes by owner: there is nothing beside the arena, the weights, the recurrent state of each session, and
    what snapshots of such states pass through on their way to host memory."""

    arena_bytes: int
    weight_bytes: int
    state_bytes: int = 0
    stage_bytes: int = 0


def kv_layer(config: ModelConfig, options: TargetOptions) -> KvLayer:
    """The cache geometry of layers with keys and values. A quantized side is rotated where the head size allows it.

    Raises ``Unsupported`` for a type whose blocks do not divide the head size.
    """
    for side, kind, size in (
        ("keys", options.cache_type_k, config.head_dim_k),
        ("values", options.cache_type_v, config.head_dim_v),
    ):
        if size % kind.block_values != 0:
            raise Unsupported(
                f"cache type {kind.name.lower()} holds {side} of head sizes that are multiples of"
                f" {kind.block_values}, this model's is {size}"
            )
    flags = KvFlag.NONE
    if options.kv_rotation:
        if options.cache_type_k.name not in _UNROTATED and config.head_dim_k % _ROTATED_MULTIPLE == 0:
            flags |= KvFlag.ROTATE_K
        if options.cache_type_v.name not in _UNROTATED and config.head_dim_v % _ROTATED_MULTIPLE == 0:
            flags |= KvFlag.ROTATE_V
    return KvLayer(
        n_kv_heads=config.n_kv_heads,
        head_dim_k=config.head_dim_k,
        head_dim_v=config.head_dim_v,
        type_k=options.cache_type_k.id,
        type_v=options.cache_type_v.id,
        flags=flags,
    )


def _log_bytes(hybrid: HybridConfig, log_rows: int) -> int:
    """The log's part of a session's state, which holds everything twice."""
    return 2 * len(hybrid.recurrent_layers) * log_rows * hybrid.delta.log_row_bytes


def _check_widths(config: ModelConfig, options: TargetOptions) -> None:
    require_int("ubatch_size", options.ubatch_size)
    require_int("log_rows", options.log_rows)
    if options.ubatch_size > MAX_UBATCH:
        raise InvalidArgument(f"ubatch_size {options.ubatch_size} is more than the {MAX_UBATCH} rows of a pass")
    if options.log_rows > DECODE_ROWS:
        raise InvalidArgument(f"log_rows {options.log_rows} is more than the {DECODE_ROWS} rows of a decode pass")
    if config.hybrid is not None and options.ubatch_size % CHUNK_TOKENS != 0:
        raise InvalidArgument(
            f"ubatch_size {options.ubatch_size} is no multiple of the {CHUNK_TOKENS} tokens that recurrent layers"
            " take at once"
        )


class Blueprint:
    """What is known before an arena exists: the graph, its tapes, and what each phase needs.

    ``declared``: without loading a weight; good for plans, not for a ``Target``. ``head_file``: where the MTP head is,
    if not in the file of the model.
    """

    def __init__(
        self,
        file: GgufFile,
        config: ModelConfig,
        device: Device,
        options: TargetOptions,
        progress: Progress | None = None,
        *,
        declared: bool = False,
        head_file: GgufFile | None = None,
    ) -> None:
        _check_widths(config, options)
        check_tensors(file, config)
        self.file = file
        self.config = config
        self.options = options
        self._has_own_memory = device.info.has_own_memory
        layer = kv_layer(config, options)
        record = record_layout(layer)
        n_layers = len(config.attention_layers)
        self.layers = (layer,) * n_layers
        with_head = config if head_file is None else with_head_of(head_file, config)
        head_rows = CATCH_UP_ROWS if options.mtp else 0
        self.shape = CacheShape(
            n_layers, record.record_bytes, record.record_bytes * n_layers, head_rows=head_rows
        )
        parts = selections(file, config)
        block = f"blk.{check_head(with_head)}." if options.mtp else ""
        if head_file is not None:
            check_head_tensors(head_file, with_head, check_head(with_head))
            parts |= head_selections(head_file, with_head, check_head(with_head))
        self.weights = FileWeights(
            file, device, progress, declared=declared, selections=parts, beside=head_file, block=block
        )
        self._tapes: list[Tape] = []
        self.head: HeadBlueprint | None = None
        try:
            rotation = record.rotation_k, record.rotation_v
            graph = build_graph(config, self.weights, self.layers, rotation, with_hidden=options.mtp)
            if options.mtp:
                self.head = HeadBlueprint(with_head, self.weights, layer, device, options.ctx_tokens)
            self.deltas = delta_layers(graph, self.weights)
            for phase in Phase:
                self._tapes.append(self._lower(graph, device, phase))
            self.log_rows = self.tape(Phase.DECODE).max_rows
            self.state_bytes = state_bytes(device, self.deltas, self.log_rows) if self.deltas else 0
            self.slot_bytes = snapshot_bytes(device, self.deltas) if self.deltas else 0
            self.checkpoint_slots = checkpoint_slots(self.slot_bytes, options.checkpoint_bytes) if self.deltas else 0
            self.stage_bytes = self._stage_bytes(device) if self.checkpoint_slots else 0
            self.log_bytes = 0 if config.hybrid is None else _log_bytes(config.hybrid, self.log_rows)
        except BaseException:
            self.close()
            raise
        of_head = 0 if self.head is None else self.head.workspace_bytes
        self.needs = tuple(
            PhaseNeed(phase.name.lower(), tape.max_rows, max(tape.info.workspace_bytes, of_head))
            for phase, tape in zip(Phase, self._tapes, strict=True)
        )

    def _lower(self, graph: Graph, device: Device, phase: Phase) -> Tape:
        options = self.options
        widest = DECODE_ROWS if self.config.hybrid is None else options.log_rows
        n_rows = min(options.ubatch_size if phase is Phase.PREFILL else widest, options.ctx_tokens)
        mode = DeltaMode.CHUNKED if phase is Phase.PREFILL else DeltaMode.LOGGED
        return lower(
            graph,
            self.weights,
            device,
            max_rows=n_rows,
            max_out_rows=n_rows,
            fused=options.fused,
            delta_mode=mode,
        )

    def tape(self, phase: Phase) -> Tape:
        return self._tapes[phase.value]

    def plan(self, arena_bytes: int) -> ArenaPlan:
        """Divide an arena. Raises ``NoSpace`` with the smallest that works."""
        return plan_arena(self.shape, arena_bytes, self.options.ctx_tokens, self.needs)

    def _stage_bytes(self, device: Device) -> int:
        """Two places for the largest layer of a snapshot."""
        return 2 * max(snapshot_bytes(device, [layer]) for layer in self.deltas)

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory of all snapshots."""
        return self.checkpoint_slots * self.slot_bytes

    def host_bytes(self, arena_bytes: int) -> int:
        """What opening takes of host memory: weights, arena, the full context of one session, its recurrent state, the
        image of that which a prompt can be undone by, and snapshots with what they pass through. Where the device has
        memory of its own, history, images and snapshots alone."""
        history = self.shape.history_bytes(self.options.ctx_tokens)
        if self._has_own_memory:
            return history + self.state_bytes + self.checkpoint_bytes
        states = 2 * self.state_bytes + self.checkpoint_bytes + self.stage_bytes
        if self.head is not None:
            history += self.head.host_bytes(self.options.ctx_tokens, PAGE_TOKENS)
        return history + arena_bytes + self.weights.device_bytes + states

    def device_bytes(self, arena_bytes: int) -> int:
        """What opening, and one session, take of device memory."""
        return arena_bytes + self.weights.device_bytes + 2 * self.state_bytes + self.stage_bytes

    def close(self) -> None:
        if self.head is not None:
            self.head.close()
        for tape in self._tapes:
            tape.close()
        self.weights.close()


@dataclass(frozen=True, slots=True)
class Call:
    """A call that runs passes, in one thread, until ``cancel`` is raised. The interpreter knows whether it runs."""

    thread: int
    passes: Generator[None, None, None]
    cancel: CancelFlag

    @property
    def is_at_work(self) -> bool:
        return getgeneratorstate(self.passes) == GEN_RUNNING


class Target:
    """The runtime of one model. Sequences share the pool, and whoever runs or changes one holds ``turn`` meanwhile.

    ``call`` is the newest that ran passes. A target lives in the process that made it: the threads that copy and
    compute do not come along to a fork.
    """

    def __init__(self, device: Device, blueprint: Blueprint, arena_bytes: int) -> None:
        self.blueprint = blueprint
        self.plan = blueprint.plan(arena_bytes)
        self._device = device
        with ExitStack() as stack:
            self._arena = stack.enter_context(Arena(device, arena_bytes))
            self._cache = stack.enter_context(Cache(device, blueprint.layers))
            self._pager = stack.enter_context(Pager(device, self._cache))
            self.head: Head | None = None
            placement = self.plan.phases[Phase.DECODE.value].head
            if blueprint.head is not None and placement is not None:
                self.head = Head(device, blueprint.head, placement)
                stack.callback(self.head.close)
            self._coordinator = stack.enter_context(PhaseCoordinator(self._arena))
            self._resources = PhaseResources(
                device,
                self._arena,
                self._pager,
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
        self._contexts: WeakSet[Context] = WeakSet()
        self._turn = threading.RLock()
        self._process = os.getpid()
        self._is_closed = False
        self.call: Call | None = None
        self.timeline: Timeline | None = None
        self._n_sessions = 0

    @property
    def turn(self) -> threading.RLock:
        """What is held by whoever runs or changes a sequence. Raises ``Unsupported`` in a fork of the process."""
        if self.is_forked:
            raise Unsupported(
                f"the model was opened by process {self._process}, and process {os.getpid()} is a fork of it:"
                " open the model after the fork"
            )
        return self._turn

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
        self.timeline = Timeline(self._device)
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

    @property
    def n_vocab_rows(self) -> int:
        """Columns of a logits row."""
        return self.blueprint.config.n_vocab

    @property
    def pager_info(self) -> PagerInfo:
        return self._pager.info

    @property
    def report(self) -> MemoryReport:
        return MemoryReport(
            self.plan.arena_bytes,
            self.blueprint.weights.device_bytes,
            self.blueprint.state_bytes,
            self.blueprint.stage_bytes,
        )

    @property
    def records(self) -> tuple[RecordInfo, ...]:
        """How the page records of each layer with keys and values lie."""
        return self._cache.records

    def publish_wait(self) -> None:
        """Wait until every committed row is in host history."""
        self._pager.publish_wait()

    def before_file(self) -> None:
        """Let the device's fault hook strike before a file is read or written."""
        self._device.before_file()

    def context(self, ctx_tokens: int) -> Context:
        """An empty sequence. Its history grows in host memory as it is written; a recurrent state is all there."""
        self.require_open()
        require_int("ctx_size", ctx_tokens)
        if ctx_tokens > self.plan.ctx_tokens:
            raise InvalidArgument(
                f"a context of {ctx_tokens} tokens; the arena was planned for 1 to {self.plan.ctx_tokens}"
            )
        with ExitStack() as stack:
            seq = stack.enter_context(self._cache.sequence(ctx_tokens))
            state = None
            if self.blueprint.deltas:
                state = stack.enter_context(State(self._device, self.blueprint.deltas, self.blueprint.log_rows))
            head = None if self.head is None else self.head.context(ctx_tokens)
            context = Context(seq, state, head)
            stack.pop_all()
        self._contexts.add(context)
        return context

    def enter(self, phase: Phase) -> None:
        """Give the arena the layout of a phase; costs nothing when it has it. After poison everything is taken anew."""
        if self._coordinator.info.state is CoordinatorState.POISONED:
            self._resources.release()
            self._coordinator.rebuild(phase.value)
        self._coordinator.transition(phase.value)
        self._resources.complete(phase.value)
        self._phase = phase

    def place(self, phase: Phase, placement: Placement) -> None:
        """Enter a phase and divide its pool anew, now and whenever the phase comes back.

        The decode pool then stays as divided here: the policy no longer moves it.
        """
        self.enter(phase)
        if phase is Phase.DECODE:
            self._placer = None
        self._resources.place(placement)

    def placement_of(self, phase: Phase) -> Placement:
        """How the phase's pool is divided."""
        return self._resources.placement_of(phase.value)

    def forecast(self, context: Context, n_rows: int) -> Forecast:
        """What the next pass of a context will find in the active phase. Raises ``Busy`` before any was entered."""
        return self._pager.forecast(context.seq, n_rows)

    def chunk_rows(self, phase: Phase, position: int, n_left: int) -> int:
        """Rows of the next pass: prompts end on the grid, other passes are as wide as the phase allows.

        ``n_left`` up to where a pass must end: on the chunks of recurrent layers that changes no bit.
        """
        width = self.blueprint.tape(phase).max_rows
        room = width - position % width if phase is Phase.PREFILL else width
        return min(room, n_left)

    def run(
        self,
        context: Context,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        out: NDArray[np.float32],
        cancel: CancelFlag,
        positions: NDArray[np.uint32] | None = None,
    ) -> None:
        """One pass in the active phase; its rows are committed.

        ``tokens`` ``[n]``, ``out_rows`` ``[m]`` rising, ``out`` ``[m, n_vocab_rows]``; ``positions`` ``[n]`` or ``[3,
        n]``, by default the number of each row. After any error the context is as before.
        """
        head = context.head
        hidden = None if head is None else np.empty((len(tokens), self.blueprint.config.n_embd), np.float32)
        placer = self._placer if self._phase is Phase.DECODE else None
        if placer is not None:
            placer.prepare(pages_of(context.n_tokens + len(tokens)), len(tokens))
        self._pager.begin(context.seq, len(tokens))
        try:
            self._resources.binding.run(
                tokens,
                out_rows,
                (out,) if hidden is None else (out, hidden),
                cancel,
                positions=positions,
                state=context.state,
            )
            self._pager.end(len(tokens))
            context.accept(len(tokens))
        except BaseException:
            self.recover(context)
            raise
        if head is not None and hidden is not None:
            head.hidden.append(context.n_tokens - len(tokens), hidden)
        if self.timeline is not None:
            self.timeline.drain()
        if placer is not None:
            placer.observe(self._device.info, self._pager.info, time.perf_counter())

    def recover(self, context: Context) -> None:
        """End a pass that an interrupt left open, and bring the context's parts back to one token."""
        if self._pager.info.is_in_pass:
            self._pager.end(0)
        context.settle(self._pager)

    def truncate(self, context: Context, n_tokens: int) -> None:
        """Keep the first tokens. Raises ``NotFound``, and nothing has changed, where the recurrent state lacks them."""
        context.truncate(self._pager, n_tokens)

    def keep(self, context: Context) -> None:
        """Keep a snapshot of the recurrent state as it stands."""
        if self.checkpoints is not None and context.state is not None:
            self.checkpoints.capture(context.state, context.kept)
            if context.head is not None:
                context.head.keep(context.n_tokens)

    def newest_kept(self, context: Context, n_tokens: int) -> int | None:
        """The last position up to ``n_tokens`` that ``go_back`` reaches."""
        return None if self.checkpoints is None else self.checkpoints.newest(context.kept, n_tokens)

    def kept_image(self, context: Context, n_tokens: int) -> NDArray[np.uint8]:
        """The image of the state that is kept at a position. Raises ``NotFound``."""
        if self.checkpoints is None or context.state is None:
            raise NotFound(f"no state is kept at {n_tokens} tokens")
        with State(self._device, context.state.layers, self.blueprint.log_rows) as state:
            self.checkpoints.restore(context.kept, n_tokens, state)
            return state.save()

    def go_back(self, context: Context, n_tokens: int) -> None:
        """Go back to a position of which a snapshot is kept, or to the beginning. After an error see ``recover``."""
        if n_tokens == 0 or self.checkpoints is None:
            context.truncate(self._pager, n_tokens)
        else:
            context.go_back(self._pager, self.checkpoints, n_tokens)

    def forget(self, context: Context, beyond: int) -> None:
        """Let go of snapshots beyond a position: tokens there are others now."""
        if self.checkpoints is not None:
            self.checkpoints.release(context.kept, beyond)
        if context.head is not None:
            context.head.forget(beyond)

    def checkpoint(self, context: Context, phase: Phase, n_tokens: int) -> Checkpoint:
        """What it takes to go back after running ``n_tokens``: an image of the state where its log will not do."""
        is_logged = phase is Phase.DECODE and n_tokens <= self.blueprint.log_rows
        return Checkpoint(context.n_tokens, None) if is_logged else context.checkpoint()

    def restore(self, context: Context, checkpoint: Checkpoint) -> None:
        """Go back, after any failure."""
        self.recover(context)
        context.restore(self._pager, checkpoint)

    def fork(self, context: Context) -> Context:
        """A context with the same history; pages are shared until one of the two writes."""
        self._pager.publish_wait()
        child = context.fork(self._device)
        if self.head is not None and context.head is not None:
            child.head = self.head.fork(context.head)
        if self.checkpoints is not None:
            child.kept = self.checkpoints.share(context.kept)
        self._contexts.add(child)
        return child

    def release(self, context: Context) -> None:
        """Close a context of this target, which may be closed already."""
        try:
            if not self._pager.closed:
                if self._pager.info.is_in_pass:
                    self._pager.end(0)
                self._pager.drop(context.seq)
        finally:
            self.forget(context, -1)
            if self.head is not None and context.head is not None:
                self.head.release(context.head)
            context.close()

    def check_integrity(self) -> None:
        """Recompute every invariant of arena, coordinator, cache, pager and recurrent states."""
        for part in (self._arena, self._coordinator, self._cache, self._pager):
            part.check_integrity()
        for context in self._contexts:
            context.check_integrity()
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
        if self.head is not None:
            self.head.check_integrity()

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
        self._resources.close()
        self._handles.close()
        self.blueprint.close()


def as_tokens(tokens: object, n_vocab: int) -> NDArray[np.uint32]:
    """Token ids as the core wants them. Raises ``InvalidArgument`` naming the first that is not in the vocabulary."""
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
