"""Two recurrent layers and one of attention over tables of token rows, without a model around them.

Shapes: layer 0 takes its convolution inputs, beta and alpha from the token; layer 1 its inputs from layer 0's output.
Outputs of a row: what both layers and attention give.
Holds: ``DeltaRig``, ``Lane``, ``Shape``, ``Tables``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device, DeviceFlag, Isa
from pykvstream.core.kv import Cache, KvLayer, Seq
from pykvstream.core.pager import Pager
from pykvstream.core.state import DeltaLayer, State
from pykvstream.core.tape import (
    Binding,
    CancelFlag,
    DeltaMode,
    Op,
    OpCode,
    Tape,
    TensorKind,
    Weight,
    WeightLayout,
)
from pykvstream.core.trace import TraceDevice

Floats = NDArray[np.float32]

N_VOCAB = 64
F32 = 0
KV = KvLayer(1, 16, 16, F32, F32)
POOL, WORKSPACES = 1, (2, 3)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of both recurrent layers."""

    n_key_heads: int = 1
    n_value_heads: int = 2
    head_dim: int = 16
    conv_width: int = 4

    @property
    def channels(self) -> int:
        return self.head_dim * (2 * self.n_key_heads + self.n_value_heads)

    @property
    def out_cols(self) -> int:
        return self.head_dim * self.n_value_heads


class Tables:
    """What tokens mean, and the weights: a function of shape and seed."""

    def __init__(self, shape: Shape, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)

        def normal(*sizes: int, scale: float = 1.0) -> Floats:
            return (rng.standard_normal(sizes) * scale).astype(np.float32)

        self.shape = shape
        heads = shape.n_value_heads
        self.inputs = normal(N_VOCAB, shape.channels)
        self.beta = normal(N_VOCAB, heads)
        self.alpha = normal(N_VOCAB, heads)
        self.kv = normal(N_VOCAB, KV.head_dim_k)
        self.mixing = normal(shape.channels, shape.out_cols, scale=shape.out_cols**-0.5)
        self.conv = [normal(shape.channels, shape.conv_width, scale=0.5) for _ in range(2)]
        self.dt_bias = [normal(1, heads) - 2 for _ in range(2)]
        self.decay = [-np.exp(normal(1, heads)) for _ in range(2)]


@dataclass
class Run:
    """Outputs of a pass: of layer 0, of layer 1, of attention, each ``[rows, cols]``."""

    outputs: tuple[Floats, ...]

    def row(self, row: int) -> tuple[bytes, ...]:
        return tuple(each[row].tobytes() for each in self.outputs)

    def rows(self) -> list[tuple[bytes, ...]]:
        return [self.row(i) for i in range(len(self.outputs[0]))]


@dataclass
class Placement:
    resident_pages: tuple[int, ...]
    ring_slots: int
    max_rows: int


class DeltaRig:
    """A device with both tapes, logged and chunked, bound to one pager."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        log_rows: int = 9,
        max_rows: int = 160,
        threads: int = 1,
        isa: Isa = Isa.BEST,
        traced: bool = False,
        max_tokens: int = 1024,
    ) -> None:
        self.tables = Tables(shape or Shape())
        flags = DeviceFlag.POISON_RELEASED | DeviceFlag.STRICT_HISTORY
        self.device: Device = TraceDevice() if traced else Device(threads, flags=flags, isa=isa)
        self.log_rows = log_rows
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.weights: list[Weight] = []
        self.layers = [self._delta_layer(i) for i in range(2)]
        self.tapes = tuple(self._record(mode) for mode in DeltaMode)
        self.cache = Cache(self.device, [KV])
        # Two resident pages less than the context: some of it streams.
        pages = max(3, max_tokens // 256 - 1)
        pool_bytes = (pages + 2) * self.cache.info.max_record_bytes
        spaces = [tape.info.workspace_bytes for tape in self.tapes]
        self.arena = Arena(self.device, pool_bytes + sum(spaces) + 8192, 64)
        self.arena.begin()
        self.arena.reserve(POOL, pool_bytes)
        for region, n_bytes in zip(WORKSPACES, spaces, strict=True):
            self.arena.reserve(region, n_bytes)
        self.arena.commit()
        self.leases = [self.arena.acquire(region) for region in (POOL, *WORKSPACES)]
        self.pager = Pager(self.device, self.cache)
        self.pager.attach(self.leases[0], Placement((pages,), 2, max_rows))
        self.bindings = [
            Binding(self.device, tape, self.arena, lease, self.pager)
            for tape, lease in zip(self.tapes, self.leases[1:], strict=True)
        ]

    def weight(self, values: Floats, layout: WeightLayout) -> Weight:
        rows = np.ascontiguousarray(values, np.float32)
        data = rows.view(np.uint8).reshape(-1)
        self.weights.append(Weight(self.device, F32, rows.shape[1], rows.shape[0], data, layout))
        return self.weights[-1]

    def _delta_layer(self, index: int) -> DeltaLayer:
        shape = self.tables.shape
        return DeltaLayer(
            n_key_heads=shape.n_key_heads,
            n_value_heads=shape.n_value_heads,
            head_dim=shape.head_dim,
            conv_width=shape.conv_width,
            norm_eps=1e-6,
            conv=self.weight(self.tables.conv[index], WeightLayout.ROWS),
            dt_bias=self.weight(self.tables.dt_bias[index], WeightLayout.ROWS),
            decay=self.weight(self.tables.decay[index], WeightLayout.ROWS),
        )

    def _record(self, mode: DeltaMode) -> Tape:
        tape = Tape(self.device, self.max_rows, 1)
        tables = self.tables
        tape.add_layer(KV)

        def embed(rows: Floats) -> int:
            tensor = tape.add_tensor(rows.shape[1])
            table = tape.add_weight(self.weight(rows, WeightLayout.ROWS))
            tape.add_op(Op(OpCode.EMBED, (), (tensor,), (table,)))
            return tensor

        beta, alpha, inputs = embed(tables.beta), embed(tables.alpha), embed(tables.inputs)
        for index, layer in enumerate(self.layers):
            number = tape.add_delta(layer)
            out = tape.add_tensor(tables.shape.out_cols, kind=TensorKind.OUTPUT)
            tape.add_op(Op(OpCode.DELTA, (inputs, beta, alpha), (out,), layer=number, u=(int(mode),)))
            if index == 0:
                inputs = tape.add_tensor(tables.shape.channels)
                mixing = tape.add_weight(self.weight(tables.mixing, WeightLayout.PANELS))
                tape.add_op(Op(OpCode.MATMUL, (out,), (inputs,), (mixing,), u=(1, 0)))
        rows = embed(tables.kv)
        attended = tape.add_tensor(KV.head_dim_v, kind=TensorKind.OUTPUT)
        tape.add_op(Op(OpCode.KV_WRITE, (rows, rows), layer=0))
        tape.add_op(Op(OpCode.ATTEND, (rows,), (attended,), layer=0, u=(1,), f=(0.25,)))
        tape.seal()
        return tape

    def state(self) -> State:
        return State(self.device, self.layers, self.log_rows)

    def lane(self) -> Lane:
        lane = Lane(self, self.cache.sequence(self.max_tokens), self.state())
        lane.state.attach(lane.seq)
        return lane

    def close(self) -> None:
        for each in (*self.bindings, self.pager, *self.leases, self.arena, self.cache, *self.tapes, *self.weights):
            each.close()
        assert self.device.info.live_objects == 0
        self.device.close()


class Lane:
    """A sequence and its state."""

    def __init__(self, rig: DeltaRig, seq: Seq, state: State) -> None:
        self.rig = rig
        self.seq = seq
        self.state = state

    @property
    def position(self) -> int:
        return self.state.info.position

    def run(self, tokens: Sequence[int], mode: DeltaMode = DeltaMode.LOGGED, *, cancels: bool = False) -> Run:
        """Begin a pass and replay its tape; the pass stays open."""
        shape = self.rig.tables.shape
        columns = (shape.out_cols, shape.out_cols, KV.head_dim_v)
        outputs = tuple(np.full((len(tokens), cols), np.nan, np.float32) for cols in columns)
        cancel = CancelFlag()
        if cancels:
            cancel.set()
        self.rig.pager.begin(self.seq, len(tokens))
        self.rig.bindings[int(mode)].run(
            np.array(tokens, np.uint32), np.empty(0, np.uint32), outputs, cancel, state=self.state
        )
        return Run(outputs)

    def end(self, n_rows: int) -> None:
        self.rig.pager.end(n_rows)
        self.state.accept(self.seq, n_rows)

    def take(self, tokens: Sequence[int], mode: DeltaMode = DeltaMode.LOGGED, accept: int | None = None) -> Run:
        """A whole pass."""
        run = self.run(tokens, mode)
        self.end(len(tokens) if accept is None else accept)
        return run

    def image(self, spare: State) -> bytes:
        """The folded state, without folding it."""
        self.state.copy_to(spare)
        spare.fold()
        return spare.save().tobytes()

    def restart(self) -> None:
        """Back to position 0."""
        self.rig.pager.truncate(self.seq, 0)
        self.state.clear()
        self.state.attach(self.seq)

    def close(self) -> None:
        self.rig.pager.drop(self.seq)
        self.state.close()
        self.seq.close()


@contextmanager
def open_rig(shape: Shape | None = None, **options: int) -> Iterator[DeltaRig]:
    rig = DeltaRig(shape, **options)  # type: ignore[arg-type]
    yield rig
    rig.close()
