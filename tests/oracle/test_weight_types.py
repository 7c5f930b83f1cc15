"""Every weight type on the CPU against the numpy reference of the file formats.

Shapes: tables ``[N, K]``; a pass of ROWS tokens looks rows up and multiplies them with a weight.
Order: an embedded value is one float32 rounding of the stored numbers, so it equals the reference to the bit. A product
quantizes activations to 8 bits per 32 values; the oracle does the same and sums in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device, Isa
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, Tape, TensorKind, Weight, WeightLayout
from pykvstream.errors import InvalidArgument
from pykvstream.gguf.codecs import DECODABLE, decode
from pykvstream.gguf.types import GgmlType
from tests.blocks import FLOORS_AT, put_halves, put_scales

K, N, ROWS = 512, 40, 9
WORKSPACE = 1
FLOAT_TYPES = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
BLOCK_TYPES = tuple(sorted((kind for kind in DECODABLE if kind not in FLOAT_TYPES), key=lambda kind: kind.id))
TYPES = FLOAT_TYPES + BLOCK_TYPES


def random_table(kind: GgmlType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of ``kind`` with random codes and small scales, as a file holds them."""
    n_blocks = N * K // kind.block_values
    if kind is GgmlType.F32:
        return rng.standard_normal(n_blocks, np.float32).view(np.uint8)
    if kind is GgmlType.F16:
        return rng.standard_normal(n_blocks, np.float32).astype("<f2").view(np.uint8)
    if kind is GgmlType.BF16:
        return (rng.standard_normal(n_blocks, np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), np.uint8)
    put_scales(kind, blocks, rng.normal(0, 0.01, n_blocks))
    if kind in FLOORS_AT:
        put_halves(blocks, FLOORS_AT[kind], rng.normal(0, 0.01, n_blocks))
    return blocks.reshape(-1)


def replay(device: Device, tape: Tape, tokens: NDArray[np.uint32], cols: int) -> NDArray[np.float32]:
    """Run a tape without attention and return its one output, a row per token."""
    info = tape.seal()
    out = np.full((len(tokens), cols), np.nan, np.float32)
    with Arena(device, info.workspace_bytes + 4096, 64) as arena:
        arena.begin()
        arena.reserve(WORKSPACE, max(info.workspace_bytes, 64))
        arena.commit()
        with arena.acquire(WORKSPACE) as lease, Binding(device, tape, arena, lease, None) as binding:
            binding.run(tokens, np.arange(len(tokens), dtype=np.uint32), (out,), CancelFlag())
    return out


def embed(isa: Isa, kind: GgmlType, table: NDArray[np.uint8], tokens: NDArray[np.uint32]) -> NDArray[np.float32]:
    with (
        Device(2, isa=isa) as device,
        Tape(device, ROWS, ROWS) as tape,
        Weight(device, kind.id, K, N, table, WeightLayout.ROWS) as weight,
    ):
        out = tape.add_tensor(K, kind=TensorKind.OUTPUT)
        tape.add_op(Op(OpCode.EMBED, (), (out,), (tape.add_weight(weight),)))
        return replay(device, tape, tokens, K)


def multiply(
    isa: Isa,
    kind: GgmlType,
    table: NDArray[np.uint8],
    x: NDArray[np.float32],
    tokens: NDArray[np.uint32],
    scales: tuple[float, ...] = (),
) -> NDArray[np.float32]:
    """Rows ``tokens`` of ``x`` times the transposed weight."""
    rows = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
    with (
        Device(2, isa=isa) as device,
        Tape(device, ROWS, ROWS) as tape,
        Weight(device, GgmlType.F32.id, K, len(x), rows, WeightLayout.ROWS) as source,
        Weight(device, kind.id, K, N, table, WeightLayout.PANELS, scales) as weight,
    ):
        looked_up = tape.add_tensor(K)
        out = tape.add_tensor(N, kind=TensorKind.OUTPUT)
        tape.add_op(Op(OpCode.EMBED, (), (looked_up,), (tape.add_weight(source),)))
        tape.add_op(Op(OpCode.MATMUL, (looked_up,), (out,), (tape.add_weight(weight),), u=(1,)))
        return replay(device, tape, tokens, N)


def quantized(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Activations as the kernels see them: 127 steps of the largest magnitude of 32 values."""
    groups = x.reshape(-1, 32)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / largest))
    values: NDArray[np.float64] = (largest / np.float32(127)).astype(np.float64) * codes
    return values.reshape(x.shape)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_embedded_rows_equal_the_file_decoder(kind: GgmlType) -> None:
    rng = np.random.default_rng(kind.id)
    table = random_table(kind, rng)
    tokens = rng.integers(0, N, ROWS, np.uint32)
    expected = decode(kind, table).reshape(N, K)[tokens]
    got = embed(Isa.BEST, kind, table, tokens)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_matmul_is_near_float64_and_the_same_on_every_isa(kind: GgmlType) -> None:
    rng = np.random.default_rng(100 + kind.id)
    table = random_table(kind, rng)
    x = rng.standard_normal((ROWS, K), np.float32)
    tokens = np.arange(ROWS, dtype=np.uint32)
    got = multiply(Isa.BEST, kind, table, x, tokens)
    weights = decode(kind, table).reshape(N, K).astype(np.float64)
    seen = x.astype(np.float64) if kind in FLOAT_TYPES else quantized(x)
    # Sequential float32 sums of K terms: well inside K * 2^-24 of the sum of magnitudes.
    bound = np.abs(seen) @ np.abs(weights).T * 4e-6
    assert (np.abs(got - seen @ weights.T) <= bound).all()
    reference = multiply(Isa.REFERENCE, kind, table, x, tokens)
    np.testing.assert_array_equal(got.view(np.uint32), reference.view(np.uint32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_matmul_row_does_not_depend_on_the_pass(kind: GgmlType) -> None:
    rng = np.random.default_rng(200 + kind.id)
    table = random_table(kind, rng)
    x = rng.standard_normal((ROWS, K), np.float32)
    together = multiply(Isa.BEST, kind, table, x, np.arange(ROWS, dtype=np.uint32))
    for row in (0, 4, ROWS - 1):
        alone = multiply(Isa.BEST, kind, table, x, np.array([row], np.uint32))
        np.testing.assert_array_equal(alone[0].view(np.uint32), together[row].view(np.uint32))


@pytest.mark.parametrize("n_scales", [1, 4])
def test_scales_of_a_weight_multiply_equal_runs_of_outputs(n_scales: int) -> None:
    rng = np.random.default_rng(300)
    table = random_table(GgmlType.NVFP4, rng)
    x = rng.standard_normal((ROWS, K), np.float32)
    tokens = np.arange(ROWS, dtype=np.uint32)
    scales = rng.standard_normal(n_scales, np.float32)
    plain = multiply(Isa.BEST, GgmlType.NVFP4, table, x, tokens)
    scaled = multiply(Isa.BEST, GgmlType.NVFP4, table, x, tokens, tuple(map(float, scales)))
    np.testing.assert_array_equal(scaled, plain * np.repeat(scales, N // n_scales))


def test_scales_that_do_not_fit_a_weight_are_refused() -> None:
    table = random_table(GgmlType.F32, np.random.default_rng(301))
    with Device(1) as device:
        for layout, scales in (
            (WeightLayout.PANELS, (1.0, 2.0, 3.0)),
            (WeightLayout.PANELS, (float("inf"),)),
            (WeightLayout.ROWS, (1.0,)),
        ):
            with pytest.raises(InvalidArgument, match="scale"):
                Weight(device, GgmlType.F32.id, K, N, table, layout, scales)
