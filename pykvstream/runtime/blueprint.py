"""What is known of a model on a device before an arena exists: graph, tapes, and what each phase needs.

Units: bytes; rows of a pass.
Holds: ``Blueprint``, ``TargetOptions``, ``Phase``, ``MemoryReport``. Of a model that is cut each part has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from enum import Enum

from pykvstream.core.bank import snapshot_bytes
from pykvstream.core.device import Device
from pykvstream.core.kv import KvFlag, KvLayer, record_layout
from pykvstream.core.state import CHUNK_TOKENS, state_bytes
from pykvstream.core.tape import DeltaMode, Tape
from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.graph import FrontSpec, Graph, delta_layers, lower
from pykvstream.models import ModelConfig
from pykvstream.models.architectures import build_graph
from pykvstream.models.mtp import check_head
from pykvstream.models.side_file import with_head_of
from pykvstream.models.span import LayerSpan
from pykvstream.models.tensors import check_head_tensors, check_tensors, head_selections, selections
from pykvstream.models.weights import FileWeights
from pykvstream.runtime.checkpoints import checkpoint_slots
from pykvstream.runtime.head import CATCH_UP_ROWS, HeadBlueprint
from pykvstream.runtime.layout import PAGE_TOKENS, ArenaPlan, CacheShape, PhaseNeed, plan_arena, require_int
from pykvstream.sampling import FRONT_BEST

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

    __hash__ = object.__hash__  # that of enumerations is a function in Python; members are single objects


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
    if not in the file of the model. ``span``: the layers of one part of a model that is cut; its head is with the last.
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
        span: LayerSpan | None = None,
    ) -> None:
        _check_widths(config, options)
        check_tensors(file, config)
        self.file = file
        self.config = config
        self.options = options
        self.span = span or LayerSpan.whole(config)
        has_head = options.mtp and self.span.is_last
        self.front = self._front() if self.span.is_last else None
        self._has_own_memory = device.info.has_own_memory
        layer = kv_layer(config, options)
        record = record_layout(layer)
        n_layers = len(self.span.attention_layers(config))
        self.layers = (layer,) * n_layers
        with_head = config if head_file is None else with_head_of(head_file, config)
        head_rows = CATCH_UP_ROWS if has_head else 0
        self.shape = CacheShape(
            n_layers, record.record_bytes, record.record_bytes * n_layers, head_rows=head_rows
        )
        parts = selections(file, config)
        block = f"blk.{check_head(with_head)}." if has_head else ""
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
            graph, decoding = (
                build_graph(
                    config, self.weights, self.layers, rotation, with_hidden=has_head, span=self.span, front=front
                )
                for front in (None, self.front)
            )
            if has_head:
                self.head = HeadBlueprint(with_head, self.weights, layer, device, options.ctx_tokens)
            self.deltas = delta_layers(graph, self.weights)
            for phase in Phase:
                self._tapes.append(self._lower(decoding if phase is Phase.DECODE else graph, device, phase))
            self.log_rows = self.tape(Phase.DECODE).max_rows
            self.state_bytes = state_bytes(device, self.deltas, self.log_rows) if self.deltas else 0
            self.slot_bytes = snapshot_bytes(device, self.deltas) if self.deltas else 0
            self.checkpoint_slots = self._checkpoint_slots() if self.deltas else 0
            self.stage_bytes = self._stage_bytes(device) if self.checkpoint_slots else 0
            self.log_bytes = self._log_bytes()
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

    def _front(self) -> FrontSpec:
        """Of decode passes."""
        tokens = self.file.metadata.get("tokenizer.ggml.tokens", ())
        n_tokens = len(tokens) if isinstance(tokens, Sized) else 0
        return FrontSpec(FRONT_BEST, min(n_tokens or self.config.n_vocab, self.config.n_vocab))

    def _log_bytes(self) -> int:
        """The log's part of a session's state, which holds everything twice."""
        hybrid = self.config.hybrid
        return 0 if hybrid is None else 2 * len(self.deltas) * self.log_rows * hybrid.delta.log_row_bytes

    def _checkpoint_slots(self) -> int:
        """As many in each part of a model that is cut: a budget is shared by what the parts have of a snapshot."""
        hybrid = self.config.hybrid
        n_recurrent = len(self.deltas) if hybrid is None else len(hybrid.recurrent_layers)
        return checkpoint_slots(self.slot_bytes * n_recurrent // len(self.deltas), self.options.checkpoint_bytes)

    def tape(self, phase: Phase) -> Tape:
        return self._tapes[phase.value]

    def plan(self, arena_bytes: int) -> ArenaPlan:
        """Divide an arena. Raises ``NoSpace`` with the smallest that works."""
        return plan_arena(self.shape, arena_bytes, self.options.ctx_tokens, self.needs)

    def _stage_bytes(self, device: Device) -> int:
        """Two places for the largest layer of a snapshot."""
        return 2 * max(snapshot_bytes(device, [layer]) for layer in self.deltas)

    @property
    def hand_over_bytes(self) -> int:
        """Host memory of the hidden rows that the part before hands over, 0 for the first."""
        rows = max(tape.max_rows for tape in self._tapes)
        return 0 if self.span.is_first else 4 * rows * self.config.n_embd

    @property
    def checkpoint_bytes(self) -> int:
        """Host memory of all snapshots."""
        return self.checkpoint_slots * self.slot_bytes

    def host_bytes(self, arena_bytes: int) -> int:
        """What opening takes of host memory: weights, arena, the full context of one session, its recurrent state, the
        image of that which a prompt can be undone by, and snapshots with what they pass through. Where the device has
        memory of its own, history, images and snapshots alone."""
        history = self.shape.history_bytes(self.options.ctx_tokens) + self.hand_over_bytes
        if self.head is not None:
            history += self.head.host_bytes(self.options.ctx_tokens, PAGE_TOKENS)
        if self._has_own_memory:
            return history + self.state_bytes + self.checkpoint_bytes
        states = 2 * self.state_bytes + self.checkpoint_bytes + self.stage_bytes
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
