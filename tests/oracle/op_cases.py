"""One case for each operation of a tape: how to record it, what it is in float64, and which bytes it declares.

Shapes: a pass has ``ROWS`` tokens out of a vocabulary of ``N_VOCAB``; inputs are rows of float32 tables
``[N_VOCAB, cols]`` that the tokens look up. ``record`` returns the work tensor that holds the result, ``[ROWS, cols]``.
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
from pykvstream.core.tape import Op, OpCode, Tape, Weight, WeightLayout
from pykvstream.core.trace import TraceDevice, TraceWeight
from pykvstream.gguf import GgmlType
from pykvstream.gguf.codecs import decode, encode

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
F32_BYTES = 4
TENSOR_BYTES = ROWS * COLS * F32_BYTES
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def table(seed: int, rows: int = N_VOCAB, cols: int = COLS) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def looked_up(seed: int) -> Doubles:
    """The rows that the tokens of the pass look up."""
    return table(seed)[TOKENS].astype(np.float64)


@dataclass
class Bed:
    """A tape in the making and the weights that it borrows, on a device of any kind."""

    device: Device
    tape: Tape
    weights: list[Weight] = field(default_factory=list)

    def weight(self, rows: npt.NDArray[np.uint8], kind: GgmlType, k: int, layout: WeightLayout) -> int:
        n = rows.size // kind.row_bytes(k)
        if isinstance(self.device, TraceDevice):
            made: Weight = TraceWeight(self.device, kind.id, k, n, layout)
        else:
            made = Weight(self.device, kind.id, k, n, rows, layout)
        self.weights.append(made)
        return self.tape.add_weight(made)

    def floats(self, values: Floats, layout: WeightLayout = WeightLayout.ROWS) -> int:
        return self.weight(values.view(np.uint8).reshape(-1), GgmlType.F32, values.shape[-1], layout)

    def input(self, seed: int) -> int:
        """A work tensor with the rows of ``looked_up(seed)``."""
        tensor = self.tape.add_tensor(COLS)
        self.tape.add_op(Op(OpCode.EMBED, (), (tensor,), (self.floats(table(seed)),)))
        return tensor

    def close(self) -> None:
        for weight in self.weights:
            weight.close()


@dataclass(frozen=True)
class OpCase:
    """``tolerance``: the largest difference from the oracle, with its reason beside it. ``twins``: the vectorised
    files that claim to give the bits of the plain reference."""

    code: OpCode
    record: Callable[[Bed], int]
    oracle: Callable[[], Doubles]
    tolerance: float
    footprint_bytes: int
    twins: tuple[str, ...] = ()
    out_rows: tuple[int, ...] = tuple(range(ROWS))
    layer: KvLayer | None = None


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


MATRIX = encode(GgmlType.Q8_0, table(4, rows=N_OUT))
MATRIX_VALUES = decode(GgmlType.Q8_0, MATRIX.reshape(-1, GgmlType.Q8_0.block_bytes)).reshape(N_OUT, COLS)


def record_matmul(bed: Bed) -> int:
    x, out = bed.input(5), bed.tape.add_tensor(N_OUT)
    matrix = bed.weight(MATRIX.reshape(-1), GgmlType.Q8_0, COLS, WeightLayout.PANELS)
    bed.tape.add_op(Op(OpCode.MATMUL, (x,), (out,), (matrix,), u=(1,)))
    return out


def matmul_oracle() -> Doubles:
    """Activations are int8 with a scale per 32 values; the product of what they stand for is taken in float64."""
    x = looked_up(5).reshape(ROWS, -1, 32)
    step = np.abs(x).max(axis=2, keepdims=True) / 127
    return (np.round(x / step) * step).reshape(ROWS, COLS) @ MATRIX_VALUES.astype(np.float64).T


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


def rope_oracle() -> Doubles:
    a, b = np.split(looked_up(6).reshape(ROWS, HEADS, HEAD_DIM), 2, axis=2)
    cos, sin = np.cos(angles())[:, None], np.sin(angles())[:, None]
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=2).reshape(ROWS, COLS)


def record_hadamard(bed: Bed) -> int:
    x = bed.input(7)
    bed.tape.add_op(Op(OpCode.HADAMARD, (), (x,), u=(COLS,)))
    return x


def hadamard_oracle() -> Doubles:
    matrix = np.ones((1, 1))
    while len(matrix) < COLS:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return looked_up(7) @ matrix / np.sqrt(COLS)


def record_attention(bed: Bed, layer: KvLayer) -> int:
    bed.tape.add_layer(layer)
    k, v, q = (bed.input(seed) for seed in (8, 9, 10))
    out = bed.tape.add_tensor(COLS)
    bed.tape.add_op(Op(OpCode.KV_WRITE, (k, v), layer=0))
    bed.tape.add_op(Op(OpCode.ATTEND, (q,), (out,), layer=0, u=(HEADS,), f=(SCALE,)))
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


PLAIN = KvLayer(HEADS, HEAD_DIM, HEAD_DIM, GgmlType.F32.id, GgmlType.F32.id)
CODED = KvLayer(HEADS, HEAD_DIM, HEAD_DIM, GgmlType.Q8_0.id, GgmlType.F16.id)


def row_bytes(layer: KvLayer) -> int:
    """Bytes of one token in a page."""
    return HEADS * sum(record_layout(layer).plane_row_bytes)


def record_swiglu(bed: Bed) -> int:
    gate, up, out = bed.input(11), bed.input(12), bed.tape.add_tensor(COLS)
    bed.tape.add_op(Op(OpCode.GLU, (gate, up), (out,)))
    return out


def swiglu_oracle() -> Doubles:
    gate = looked_up(11)
    return gate / (1 + np.exp(-gate)) * looked_up(12)


def record_add(bed: Bed) -> int:
    x, out = bed.input(13), bed.input(14)
    bed.tape.add_op(Op(OpCode.ADD, (x,), (out,)))
    return out


STATE_BYTES = ROWS * HEADS * (HEAD_DIM + 2) * F32_BYTES
ATTEND_BYTES = 2 * STATE_BYTES + TENSOR_BYTES + ROWS * row_bytes(PLAIN)
MATMUL_SCRATCH = ROWS * (COLS + COLS // 32 * F32_BYTES)
ROPE_TABLE_BYTES = ROWS * HEAD_DIM * F32_BYTES

_ALL = (
    # Half floats are float32 values: nothing is rounded.
    OpCase(OpCode.EMBED, record_embed, lambda: table(1).astype(np.float16)[TOKENS].astype(np.float64), 0.0,
           ROWS * COLS * 2 + TENSOR_BYTES),
    # Sums of 64 squares and two roundings of values below 16.
    OpCase(OpCode.NORM, record_norm, norm_oracle, 4e-6, 2 * TENSOR_BYTES + COLS * F32_BYTES, ("elementwise_avx2",)),
    # Two blocks of exact integer dots, each scaled and added in float32, of sums below 64; ties of the activations'
    # rounding may fall to either side by one step of at most 4/127 times a weight of at most 4.
    OpCase(OpCode.MATMUL, record_matmul, matmul_oracle, 2e-4,
           TENSOR_BYTES + N_OUT * COLS // 32 * 34 + MATMUL_SCRATCH + ROWS * N_OUT * F32_BYTES,
           ("act_avx2", "matmul_avx2", "matmul_avx512")),
    # Angles are reduced in float64 and rounded once.
    OpCase(OpCode.ROPE_TABLE, record_rope_table, rope_table_oracle, 2e-7, ROPE_TABLE_BYTES),
    # Two products of values below 8.
    OpCase(OpCode.ROPE, record_rope, rope_oracle, 2e-6, ROPE_TABLE_BYTES + 2 * TENSOR_BYTES, ("elementwise_avx2",)),
    # Six levels of sums below 64, then one scaling.
    OpCase(OpCode.HADAMARD, record_hadamard, hadamard_oracle, 4e-6, 2 * TENSOR_BYTES, ("hadamard_avx2",)),
    # What is stored is compared by attention over it: an error of a code would be a hundred times larger.
    OpCase(OpCode.KV_WRITE, lambda bed: record_attention(bed, CODED), lambda: attention_oracle(CODED), 4e-6,
           2 * TENSOR_BYTES + ROWS * row_bytes(CODED), ("encode_avx2",), layer=CODED),
    # Five weights below 1 on values below 4.
    OpCase(OpCode.ATTEND, lambda bed: record_attention(bed, PLAIN), lambda: attention_oracle(PLAIN), 4e-6, ATTEND_BYTES,
           ("attend_avx2", "attend_avx512"), layer=PLAIN),
    # An exponential within one unit, a quotient and a product of values below 16.
    OpCase(OpCode.GLU, record_swiglu, swiglu_oracle, 4e-6, 3 * TENSOR_BYTES, ("elementwise_avx2",)),
    # One rounding of a sum below 8.
    OpCase(OpCode.ADD, record_add, lambda: looked_up(13) + looked_up(14), 5e-7, 3 * TENSOR_BYTES,
           ("elementwise_avx2",)),
    # Rows are moved.
    OpCase(OpCode.GATHER, lambda bed: bed.input(15), lambda: looked_up(15)[[1, 3]], 0.0,
           TENSOR_BYTES + 2 * COLS * F32_BYTES, out_rows=(1, 3)),
)  # fmt: skip

CASES = {case.code: case for case in _ALL}
