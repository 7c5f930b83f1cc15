"""Cases for each operation of a tape: how to record it, what it is in float64, and which bytes it declares.

Shapes: a pass has ``ROWS`` tokens out of a vocabulary of ``N_VOCAB``; inputs are rows of float32 tables
``[N_VOCAB, cols]`` that the tokens look up. ``record`` returns the work tensor that holds the result, ``[ROWS, cols]``.
Order: a case runs in one pass, or in several of one sequence, whose rows are all accepted.
Units: ``footprint_bytes`` is what a trace device counts for the operation: inputs, weights, scratch, pages and outputs.
Holds: ``OpCase``, ``CASES``, ``Bed``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pykvstream.core.device import Device
from pykvstream.core.kv import KvLayer, record_layout
from pykvstream.core.state import DeltaLayer
from pykvstream.core.tape import (
    FRONT_TAIL,
    NONE,
    DeltaMode,
    Op,
    OpCode,
    RowKind,
    Tape,
    TensorKind,
    Weight,
    WeightLayout,
)
from pykvstream.core.trace import TraceDevice, TraceWeight
from pykvstream.gguf import GgmlType
from pykvstream.gguf.codecs import decode, encode
from tests.delta_rig import Shape, Tables
from tests.oracle.delta64 import consume, recurrent, silu

N_VOCAB = 8
TOKENS = np.array([3, 1, 4, 1, 5], np.uint32)
ROWS = len(TOKENS)
COLS = 64
HEADS = 2
HEAD_DIM = COLS // HEADS
N_OUT = 48
EPS = 1e-5
ROPE_BASE = 10_000.0
SCALE = 0.25
NORM_EPS = 1e-6
SILU, SIGMOID = 0, 1
TURN_BLOCK = 16
F32_BYTES = 4
TENSOR_BYTES = ROWS * COLS * F32_BYTES
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def table(seed: int, rows: int = N_VOCAB, cols: int = COLS) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def looked_up(seed: int, cols: int = COLS) -> Doubles:
    """The rows that the tokens of the pass look up."""
    return table(seed, cols=cols)[TOKENS].astype(np.float64)


@dataclass
class Bed:
    """A tape in the making with the weights that it borrows and its recurrent layers, on a device of any kind."""

    device: Device
    tape: Tape
    weights: list[Weight] = field(default_factory=list)
    deltas: list[DeltaLayer] = field(default_factory=list)

    def make_weight(self, rows: npt.NDArray[np.uint8], kind: GgmlType, k: int, layout: WeightLayout) -> Weight:
        n = rows.size // kind.row_bytes(k)
        if isinstance(self.device, TraceDevice):
            made: Weight = TraceWeight(self.device, kind.id, k, n, layout)
        else:
            made = Weight(self.device, kind.id, k, n, rows, layout)
        self.weights.append(made)
        return made

    def make_floats(self, values: Floats) -> Weight:
        rows = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        return self.make_weight(rows, GgmlType.F32, values.shape[-1], WeightLayout.ROWS)

    def weight(self, rows: npt.NDArray[np.uint8], kind: GgmlType, k: int, layout: WeightLayout) -> int:
        return self.tape.add_weight(self.make_weight(rows, kind, k, layout))

    def floats(self, values: Floats) -> int:
        return self.tape.add_weight(self.make_floats(values))

    def input_of(self, values: Floats) -> int:
        """A work tensor with the rows of ``values`` that the tokens look up."""
        tensor = self.tape.add_tensor(values.shape[-1])
        self.tape.add_op(Op(OpCode.EMBED, (), (tensor,), (self.floats(values),)))
        return tensor

    def input(self, seed: int, cols: int = COLS) -> int:
        """A work tensor with the rows of ``looked_up(seed, cols)``."""
        return self.input_of(table(seed, cols=cols))

    def delta(self, tables: Tables) -> int:
        """A recurrent layer, the first one of ``tables``; its number on the tape."""
        shape = tables.shape
        weights = (self.make_floats(each[0]) for each in (tables.conv, tables.dt_bias, tables.decay))
        sizes = (shape.n_key_heads, shape.n_value_heads, shape.head_dim, shape.conv_width)
        self.deltas.append(DeltaLayer(*sizes, NORM_EPS, *weights))
        return self.tape.add_delta(self.deltas[-1])

    def close(self) -> None:
        for weight in self.weights:
            weight.close()


@dataclass(frozen=True)
class OpCase:
    """``tolerance``: the largest difference from the oracle, with its reason beside it. ``footprint_bytes``: of the
    last pass. ``twins``: the vectorised files that claim to give the bits of the plain reference. ``variant`` tells
    the cases of one operation apart. ``passes``: rows of each pass. ``is_output``: what it records is an output, which
    needs no gathering."""

    code: OpCode
    record: Callable[[Bed], int]
    oracle: Callable[[], Doubles]
    tolerance: float
    footprint_bytes: int
    twins: tuple[str, ...] = ()
    cols: int = COLS
    out_rows: tuple[int, ...] = tuple(range(ROWS))
    layer: KvLayer | None = None
    variant: str = ""
    passes: tuple[int, ...] = (ROWS,)
    is_output: bool = False

    @property
    def name(self) -> str:
        return f"{self.code.name} {self.variant}".rstrip()


def record_embed(bed: Bed) -> int:
    out = bed.tape.add_tensor(COLS)
    half = table(1).astype(np.float16).view(np.uint8).reshape(-1)
    rows = bed.weight(half, GgmlType.F16, COLS, WeightLayout.ROWS)
    bed.tape.add_op(Op(OpCode.EMBED, (), (out,), (rows,)))
    return out


def record_norm(bed: Bed) -> int:
    x, out = bed.input(2), bed.tape.add_tensor(COLS)
    bed.tape.add_op(Op(OpCode.NORM, (x,), (out,), (bed.floats(table(3, rows=1)),), f=(EPS,)))
    return out


def norm_oracle() -> Doubles:
    x = looked_up(2)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * table(3, rows=1)[0].astype(np.float64)


def normed(x: Doubles, group: int, seed: int) -> Doubles:
    """The norm of each group of ``group`` values, which share one weight."""
    groups = x.reshape(ROWS, -1, group)
    factor = 1 / np.sqrt(np.mean(groups * groups, axis=2, keepdims=True) + EPS)
    return np.asarray((groups * factor * table(seed, 1, group)[0].astype(np.float64)).reshape(x.shape))


MATRIX = encode(GgmlType.Q8_0, table(4, rows=N_OUT))
MATRIX_VALUES = decode(GgmlType.Q8_0, MATRIX.reshape(-1, GgmlType.Q8_0.block_bytes)).reshape(N_OUT, COLS)


def record_matmul(bed: Bed) -> int:
    x, out = bed.input(5), bed.tape.add_tensor(N_OUT)
    matrix = bed.weight(MATRIX.reshape(-1), GgmlType.Q8_0, COLS, WeightLayout.PANELS)
    bed.tape.add_op(Op(OpCode.MATMUL, (x,), (out,), (matrix,), u=(1,)))
    return out


def as_act(x: Doubles) -> Doubles:
    """What the activations of a matmul stand for: int8 with a scale per 32 values."""
    blocks = x.reshape(-1, 32)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    return np.asarray((np.round(blocks / step) * step).reshape(x.shape))


def matmul_oracle() -> Doubles:
    """The product of what activations stand for is taken in float64."""
    return np.asarray(as_act(looked_up(5)) @ MATRIX_VALUES.astype(np.float64).T)


def record_gated(bed: Bed, activation: int, group: int) -> int:
    """A matmul whose input is normed over groups, if there are any, and gated."""
    x, gate, out = bed.input(5), bed.input(16), bed.tape.add_tensor(N_OUT)
    matrix = bed.weight(MATRIX.reshape(-1), GgmlType.Q8_0, COLS, WeightLayout.PANELS)
    norm = (NONE, NONE, NONE, bed.floats(table(17, 1, group))) if group else ()
    bed.tape.add_op(Op(OpCode.MATMUL, (x, gate), (out,), (matrix, *norm), u=(1, 0, activation + 1, group), f=(EPS,)))
    return out


def gated_oracle(activation: int, group: int) -> Doubles:
    x, gate = looked_up(5), looked_up(16)
    if group:
        x = normed(x, group, 17)
    factor = silu(gate) if activation == SILU else 1 / (1 + np.exp(-gate))
    return np.asarray(as_act(np.asarray(factor * x)) @ MATRIX_VALUES.astype(np.float64).T)


def record_rope_table(bed: Bed) -> int:
    out = bed.tape.add_tensor(HEAD_DIM)
    bed.tape.add_op(Op(OpCode.ROPE_TABLE, (), (out,), u=(HEAD_DIM,), f=(1.0,), f64=ROPE_BASE))
    return out


def angles() -> Doubles:
    half = HEAD_DIM // 2
    return np.arange(ROWS)[:, None] * ROPE_BASE ** (-np.arange(half) / half)


def rope_table_oracle() -> Doubles:
    return np.stack((np.cos(angles()), np.sin(angles())), axis=-1).reshape(ROWS, HEAD_DIM)


def record_rope(bed: Bed) -> int:
    rotations, x = record_rope_table(bed), bed.input(6)
    bed.tape.add_op(Op(OpCode.ROPE, (rotations,), (x,), u=(HEAD_DIM, HEAD_DIM, 1)))
    return x


def rotated(x: Doubles) -> Doubles:
    a, b = np.split(x.reshape(ROWS, HEADS, HEAD_DIM), 2, axis=2)
    cos, sin = np.cos(angles())[:, None], np.sin(angles())[:, None]
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=2).reshape(ROWS, COLS)


def record_turn(bed: Bed) -> int:
    """A rope with the norm of heads before it and a Walsh-Hadamard rotation of blocks behind it."""
    rotations, x = record_rope_table(bed), bed.input(6)
    weight = bed.floats(table(18, 1, HEAD_DIM))
    u = (HEAD_DIM, HEAD_DIM, 1, TURN_BLOCK)
    bed.tape.add_op(Op(OpCode.ROPE, (rotations,), (x,), (weight,), u=u, f=(EPS,)))
    return x


def turn_oracle() -> Doubles:
    turned = rotated(normed(looked_up(6), HEAD_DIM, 18)).reshape(-1, TURN_BLOCK)
    return (turned @ hadamard_matrix(TURN_BLOCK) / np.sqrt(TURN_BLOCK)).reshape(ROWS, COLS)


def record_turns(bed: Bed, part: int) -> int:
    """The same of queries and keys, and a Walsh-Hadamard rotation of values; which of them is looked at."""
    rotations = record_rope_table(bed)
    rows = tuple(bed.input(seed) for seed in (6, 8, 9))
    norms = tuple(bed.floats(table(seed, 1, HEAD_DIM)) for seed in (18, 19))
    u = (HEAD_DIM, HEAD_DIM, 1, TURN_BLOCK)
    bed.tape.add_op(Op(OpCode.ROPE, (rotations,), rows, norms, u=u, f=(EPS,)))
    return rows[part]


def turns_oracle(part: int) -> Doubles:
    rows = looked_up(9) if part == 2 else rotated(normed(looked_up((6, 8)[part]), HEAD_DIM, (18, 19)[part]))
    turned = rows.reshape(-1, TURN_BLOCK) @ hadamard_matrix(TURN_BLOCK) / np.sqrt(TURN_BLOCK)
    return turned.reshape(ROWS, COLS)


def record_hadamard(bed: Bed) -> int:
    x = bed.input(7)
    bed.tape.add_op(Op(OpCode.HADAMARD, (), (x,), u=(COLS,)))
    return x


def hadamard_matrix(n: int) -> Doubles:
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def hadamard_oracle() -> Doubles:
    return looked_up(7) @ hadamard_matrix(COLS) / np.sqrt(COLS)


def record_attention(bed: Bed, layer: KvLayer, block: int = 0) -> int:
    bed.tape.add_layer(layer)
    k, v, q = (bed.input(seed) for seed in (8, 9, 10))
    out = bed.tape.add_tensor(COLS)
    bed.tape.add_op(Op(OpCode.KV_WRITE, (k, v), layer=0))
    bed.tape.add_op(Op(OpCode.ATTEND, (q,), (out,), layer=0, u=(HEADS, block), f=(SCALE,)))
    return out


def attention_oracle(layer: KvLayer) -> Doubles:
    """Causal attention over keys and values as the cache's types hold them."""

    def held(seed: int, kind: int) -> Doubles:
        type_ = next(each for each in (GgmlType.F32, GgmlType.F16, GgmlType.Q8_0) if each.id == kind)
        coded = encode(type_, looked_up(seed).astype(np.float32)).reshape(-1, type_.block_bytes)
        return decode(type_, coded).astype(np.float64).reshape(ROWS, HEADS, HEAD_DIM)

    q = looked_up(10).reshape(ROWS, HEADS, HEAD_DIM)
    scores = np.einsum("qhd,khd->hqk", q, held(8, layer.type_k)) * SCALE
    scores[:, np.triu_indices(ROWS, 1)[0], np.triu_indices(ROWS, 1)[1]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, held(9, layer.type_v)).reshape(ROWS, COLS)


def rotated_attention_oracle(layer: KvLayer) -> Doubles:
    turned = attention_oracle(layer).reshape(-1, TURN_BLOCK) @ hadamard_matrix(TURN_BLOCK) / np.sqrt(TURN_BLOCK)
    return turned.reshape(ROWS, COLS)


PLAIN = KvLayer(HEADS, HEAD_DIM, HEAD_DIM, GgmlType.F32.id, GgmlType.F32.id)
CODED = KvLayer(HEADS, HEAD_DIM, HEAD_DIM, GgmlType.Q8_0.id, GgmlType.F16.id)


def row_bytes(layer: KvLayer) -> int:
    """Bytes of one token in a page."""
    return HEADS * sum(record_layout(layer).plane_row_bytes)


def record_glu(bed: Bed, activation: int = SILU, gate_cols: int = COLS) -> int:
    gate, up, out = bed.input(11, gate_cols), bed.input(12), bed.tape.add_tensor(COLS)
    bed.tape.add_op(Op(OpCode.GLU, (gate, up), (out,), u=(activation,)))
    return out


def glu_oracle(activation: int = SILU, gate_cols: int = COLS) -> Doubles:
    gate = looked_up(11, gate_cols)
    return np.asarray((silu(gate) if activation == SILU else 1 / (1 + np.exp(-gate))) * looked_up(12))


def record_add(bed: Bed) -> int:
    x, out = bed.input(13), bed.input(14)
    bed.tape.add_op(Op(OpCode.ADD, (x,), (out,)))
    return out


DELTA_TABLES = Tables(Shape(n_key_heads=1, n_value_heads=HEADS, head_dim=HEAD_DIM, conv_width=4), seed=16)
CHANNELS = DELTA_TABLES.shape.channels


def record_delta(bed: Bed, mode: DeltaMode) -> int:
    """Rows of a cache layer are written too: what a pass accepts must be in both."""
    bed.tape.add_layer(PLAIN)
    inputs, beta, alpha = (bed.input_of(each) for each in (DELTA_TABLES.inputs, DELTA_TABLES.beta, DELTA_TABLES.alpha))
    number = bed.delta(DELTA_TABLES)
    out = bed.tape.add_tensor(COLS)
    bed.tape.add_op(Op(OpCode.DELTA, (inputs, beta, alpha), (out,), layer=number, u=(mode,)))
    bed.tape.add_op(Op(OpCode.KV_WRITE, (out, out), layer=0))
    return out


def delta_oracle() -> Doubles:
    rows = (each[TOKENS].astype(np.float64) for each in (DELTA_TABLES.inputs, DELTA_TABLES.beta, DELTA_TABLES.alpha))
    return recurrent(*consume(DELTA_TABLES, 0, *rows)).reshape(ROWS, COLS)


def delta_bytes(n_rows: int, n_pending: int, n_logged: int) -> int:
    """A matrix as scratch, both sides of matrices and convolution inputs, rows of both logs, tensors, weights."""
    matrix, taps = HEAD_DIM * HEAD_DIM, DELTA_TABLES.shape.conv_width
    log_row = tensor_row = CHANNELS + 2 * HEADS
    state = 2 * (HEADS * matrix + CHANNELS * (taps - 1)) + (n_pending + n_logged) * log_row
    weights = CHANNELS * taps + 2 * HEADS
    return (matrix + state + weights + n_rows * (tensor_row + COLS)) * F32_BYTES


N_EXPERTS, N_CHOSEN, N_FF, EXPERTS_FACTOR = 4, 2, 32, 1.5
EXPERT_SHAPES = ((N_EXPERTS * N_FF, COLS), (N_EXPERTS * N_FF, COLS), (N_EXPERTS * COLS, N_FF))
EXPERTS = [encode(GgmlType.Q8_0, 0.2 * table(17 + i, *shape)) for i, shape in enumerate(EXPERT_SHAPES)]
EXPERT_FACTORS = [1 + 0.25 * table(20 + i, 1, N_EXPERTS) for i in range(3)]


def record_experts(bed: Bed, has_factors: bool) -> int:
    x, router, out = bed.input(23), bed.input(24, N_EXPERTS), bed.tape.add_tensor(COLS)
    panels = WeightLayout.PANELS
    weights = [
        bed.weight(rows.reshape(-1), GgmlType.Q8_0, k, panels)
        for rows, (_, k) in zip(EXPERTS, EXPERT_SHAPES, strict=True)
    ]
    weights += [bed.floats(each) for each in EXPERT_FACTORS if has_factors]
    sizes = (N_EXPERTS, N_CHOSEN)
    bed.tape.add_op(Op(OpCode.EXPERTS, (x, router), (out,), tuple(weights), u=sizes, f=(EXPERTS_FACTOR,)))
    return out


def experts_oracle(has_factors: bool) -> Doubles:
    """Every expert of every row; what was not chosen has no share."""
    logits = looked_up(24, N_EXPERTS)
    share = np.exp(logits)
    share[logits < np.sort(logits, axis=1)[:, -N_CHOSEN, None]] = 0
    share *= EXPERTS_FACTOR / share.sum(axis=1, keepdims=True)
    gates, ups, downs = (
        decode(GgmlType.Q8_0, rows.reshape(-1, GgmlType.Q8_0.block_bytes)).astype(np.float64).reshape(N_EXPERTS, -1, k)
        for rows, (_, k) in zip(EXPERTS, EXPERT_SHAPES, strict=True)
    )
    factors = np.concatenate(EXPERT_FACTORS) if has_factors else np.ones((3, N_EXPERTS))
    x, out = as_act(looked_up(23)), np.zeros((ROWS, COLS))
    for e in range(N_EXPERTS):
        hidden = silu(x @ gates[e].T * factors[0, e]) * (x @ ups[e].T * factors[1, e])
        out += share[:, e, None] * (as_act(hidden) @ downs[e].T) * factors[2, e]
    return out


STATE_BYTES = ROWS * HEADS * (HEAD_DIM + 2) * F32_BYTES
ATTEND_BYTES = 2 * STATE_BYTES + TENSOR_BYTES + ROWS * row_bytes(PLAIN)
MATMUL_SCRATCH = ROWS * (COLS + COLS // 32 * F32_BYTES)
ROPE_TABLE_BYTES = ROWS * HEAD_DIM * F32_BYTES

MATMUL_TWINS = ("act_avx2", "matmul_avx2", "matmul_avx512")
DELTA_TWINS = ("delta_avx2", "delta_avx512")


FRONT_BEST, FRONT_TOKENS = 4, 60
FRONT_COLS = 2 * FRONT_BEST + FRONT_TAIL


def front_logits() -> Floats:
    """Rows whose exponentials are 1 or 0, so that float64 has the very sum; the columns behind the tokens are large."""
    levels = np.array([3.0, -300.0, -400.5], np.float32)
    values = np.random.default_rng(40).choice(levels, (N_VOCAB, COLS), p=(0.03, 0.5, 0.47))
    values[:, FRONT_TOKENS:] = 1e9
    values[4, 10:] = -np.inf
    values[5, 7] = np.inf
    return np.asarray(values, np.float32)


def record_front(bed: Bed) -> int:
    rows = bed.input_of(front_logits())
    gathered = bed.tape.add_tensor(COLS, rows=RowKind.OUT)
    bed.tape.add_op(Op(OpCode.GATHER, (rows,), (gathered,)))
    words = bed.tape.add_tensor(FRONT_COLS, kind=TensorKind.OUTPUT, rows=RowKind.OUT)
    bed.tape.add_op(Op(OpCode.FRONT, (gathered,), (words,), u=(FRONT_BEST, FRONT_TOKENS)))
    return words


def front_oracle() -> Doubles:
    """Words as the numbers that they are as float32."""
    return np.stack([_front_words(row) for row in front_logits()[TOKENS]]).view(np.float32).astype(np.float64)


def _front_words(row: Floats) -> npt.NDArray[np.uint32]:
    words = np.zeros(FRONT_COLS, np.uint32)
    values, tail = words[FRONT_BEST : 2 * FRONT_BEST].view(np.float32), words[2 * FRONT_BEST :]
    tail[1] = 0xFFFFFFFF
    if not (row < np.inf).all():
        tail[1] = int((~(row < np.inf)).argmax())
        values[0] = row[tail[1]]
        return words
    tokens = row[:FRONT_TOKENS]
    best = sorted(np.flatnonzero(tokens > -np.inf).tolist(), key=lambda i: (-float(tokens[i]), i))[:FRONT_BEST]
    words[: len(best)], values[: len(best)] = best, tokens[best]
    tail[0] = len(best)
    tail[2:] = np.array([np.exp(tokens.astype(np.float64) - float(tokens.max())).sum()]).view(np.uint32)
    return words


CASES = (
    # Half floats are float32 values: nothing is rounded.
    OpCase(OpCode.EMBED, record_embed, lambda: table(1).astype(np.float16)[TOKENS].astype(np.float64), 0.0,
           ROWS * COLS * 2 + TENSOR_BYTES),
    # Sums of 64 squares and two roundings of values below 16.
    OpCase(OpCode.NORM, record_norm, norm_oracle, 4e-6, 2 * TENSOR_BYTES + COLS * F32_BYTES, ("elementwise_avx2",)),
    # Two blocks of exact integer dots, each scaled and added in float32, of sums below 64; ties of the activations'
    # rounding may fall to either side by one step of at most 4/127 times a weight of at most 4.
    OpCase(OpCode.MATMUL, record_matmul, matmul_oracle, 2e-4,
           TENSOR_BYTES + N_OUT * COLS // 32 * 34 + MATMUL_SCRATCH + ROWS * N_OUT * F32_BYTES,
           MATMUL_TWINS, cols=N_OUT),
    # The same behind a gate; no gated value lies at a tie of the activations' rounding.
    *(OpCase(OpCode.MATMUL, lambda bed, kind=kind, group=group: record_gated(bed, kind, group),
             lambda kind=kind, group=group: gated_oracle(kind, group), 2e-4,
             2 * TENSOR_BYTES + group * F32_BYTES + N_OUT * COLS // 32 * 34 + MATMUL_SCRATCH + ROWS * N_OUT * F32_BYTES,
             (*MATMUL_TWINS, "elementwise_avx2"), cols=N_OUT, variant=variant)
      for kind, group, variant in ((SILU, 32, "of gated and normed groups"), (SILU, 0, "gated"),
                                   (SIGMOID, 0, "gated by sigmoid"))),
    # Angles are reduced in float64 and rounded once.
    OpCase(OpCode.ROPE_TABLE, record_rope_table, rope_table_oracle, 2e-7, ROPE_TABLE_BYTES,
           cols=HEAD_DIM),
    # Two products of values below 8.
    OpCase(OpCode.ROPE, record_rope, lambda: rotated(looked_up(6)), 2e-6, ROPE_TABLE_BYTES + 2 * TENSOR_BYTES,
           ("elementwise_avx2",)),
    # The same of normed values below 8, then four levels of sums below 64 and one scaling.
    OpCase(OpCode.ROPE, record_turn, turn_oracle, 6e-6, ROPE_TABLE_BYTES + 2 * TENSOR_BYTES + HEAD_DIM * F32_BYTES,
           ("elementwise_avx2", "hadamard_avx2"), variant="of normed heads, turned"),
    *(OpCase(OpCode.ROPE, lambda bed, part=part: record_turns(bed, part), lambda part=part: turns_oracle(part), 6e-6,
             ROPE_TABLE_BYTES + 6 * TENSOR_BYTES + 2 * HEAD_DIM * F32_BYTES, ("elementwise_avx2", "hadamard_avx2"),
             variant=f"{name} of three") for part, name in enumerate(("queries", "keys", "values"))),
    # Six levels of sums below 64, then one scaling.
    OpCase(OpCode.HADAMARD, record_hadamard, hadamard_oracle, 4e-6, 2 * TENSOR_BYTES, ("hadamard_avx2",)),
    # What is stored is compared by attention over it: an error of a code would be a hundred times larger.
    OpCase(OpCode.KV_WRITE, lambda bed: record_attention(bed, CODED), lambda: attention_oracle(CODED), 4e-6,
           2 * TENSOR_BYTES + ROWS * row_bytes(CODED), ("encode_avx2",), layer=CODED),
    # Five weights below 1 on values below 4.
    OpCase(OpCode.ATTEND, lambda bed: record_attention(bed, PLAIN), lambda: attention_oracle(PLAIN), 4e-6, ATTEND_BYTES,
           ("attend_avx2", "attend_avx512"), layer=PLAIN),
    # Then four levels of sums below 64, and one scaling.
    OpCase(OpCode.ATTEND, lambda bed: record_attention(bed, PLAIN, TURN_BLOCK), lambda: rotated_attention_oracle(PLAIN),
           6e-6, ATTEND_BYTES, ("attend_avx2", "attend_avx512", "hadamard_avx2"), layer=PLAIN, variant="turned"),
    # An exponential within one unit, a quotient and a product of values below 16.
    OpCase(OpCode.GLU, record_glu, glu_oracle, 4e-6, 3 * TENSOR_BYTES, ("elementwise_avx2",)),
    OpCase(OpCode.GLU, lambda bed: record_glu(bed, SIGMOID), lambda: glu_oracle(SIGMOID), 4e-6, 3 * TENSOR_BYTES,
           ("elementwise_avx2",), variant="sigmoid"),
    OpCase(OpCode.GLU, lambda bed: record_glu(bed, SILU, 1), lambda: glu_oracle(SILU, 1), 4e-6,
           2 * TENSOR_BYTES + ROWS * F32_BYTES, ("elementwise_avx2",), variant="one column"),
    OpCase(OpCode.GLU, lambda bed: record_glu(bed, SIGMOID, 1), lambda: glu_oracle(SIGMOID, 1), 4e-6,
           2 * TENSOR_BYTES + ROWS * F32_BYTES, ("elementwise_avx2",), variant="one column sigmoid"),
    # One rounding of a sum below 8.
    OpCase(OpCode.ADD, record_add, lambda: looked_up(13) + looked_up(14), 5e-7, 3 * TENSOR_BYTES,
           ("elementwise_avx2",)),
    # Rows are moved.
    OpCase(OpCode.GATHER, lambda bed: bed.input(15), lambda: looked_up(15)[[1, 3]], 0.0,
           TENSOR_BYTES + 2 * COLS * F32_BYTES, out_rows=(1, 3)),
    # Values below 1/16: sums over 32 products of what at most five rows have left, with unit queries and keys.
    OpCase(OpCode.DELTA, lambda bed: record_delta(bed, DeltaMode.LOGGED), delta_oracle, 1e-7,
           delta_bytes(ROWS, 0, ROWS), DELTA_TWINS, layer=PLAIN, variant="logged"),
    OpCase(OpCode.DELTA, lambda bed: record_delta(bed, DeltaMode.LOGGED), delta_oracle, 1e-7,
           delta_bytes(2, 3, 2), DELTA_TWINS, layer=PLAIN, variant="logged behind pending rows", passes=(3, 2)),
    OpCase(OpCode.DELTA, lambda bed: record_delta(bed, DeltaMode.CHUNKED), delta_oracle, 1e-7,
           delta_bytes(ROWS, 0, 0), DELTA_TWINS, layer=PLAIN, variant="chunked"),
    OpCase(OpCode.DELTA, lambda bed: record_delta(bed, DeltaMode.CHUNKED), delta_oracle, 1e-7,
           delta_bytes(1, 0, 0), DELTA_TWINS, layer=PLAIN, variant="chunked in the middle of a chunk", passes=(4, 1)),
    # As for a matmul, twice; no value of the hidden rows lies at a tie of the activations' rounding.
    *(OpCase(OpCode.EXPERTS, lambda bed, has=has: record_experts(bed, has), lambda has=has: experts_oracle(has), 2e-4,
             2 * TENSOR_BYTES + ROWS * N_EXPERTS * F32_BYTES + 3 * N_EXPERTS * N_FF * COLS // 32 * 34
             + 3 * N_EXPERTS * F32_BYTES * has, MATMUL_TWINS, variant="with factors" if has else "")
      for has in (False, True)),
    # Exponentials are 1 or 0, and sums of them exact.
    OpCase(OpCode.FRONT, record_front, front_oracle, 0.0, TENSOR_BYTES + ROWS * FRONT_COLS * F32_BYTES, ("front_avx2",),
           cols=FRONT_COLS, is_output=True),
)  # fmt: skip
