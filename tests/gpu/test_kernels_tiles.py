"""Matmuls of a prompt's rows: against float64 of the same rounded numbers, and a row against itself in other company.

Weights and activations are rounded to bfloat16, once each; products of such are exact and what is left is the order of
float32 sums, which tensor cores cut off rather than round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from pykvstream.gguf import GgmlType
from tests.gpu.test_kernels_weights import TYPES, is_small
from tests.gpu.weight_rig import STORE_ADD, SWIGLU, Doubles, Floats, Weight, WeightRig, silu

T = GgmlType
FLOATS = (T.F32, T.F16, T.BF16)
QUANTIZED = tuple(kind for kind in TYPES if kind not in FLOATS)
# Of the sum of magnitudes: some hundred sums, each cut off at 2^-23 of the largest of its terms or less.
SUM_TOLERANCE = 1e-5


@pytest.fixture(params=["host", "cuda"])
def rig(request: pytest.FixtureRequest, launches: ctypes.CDLL) -> Iterator[WeightRig]:
    if request.param == "host":
        yield WeightRig(request.getfixturevalue("host"), launches)
        return
    cuda = request.getfixturevalue("device")
    if cuda.arch < 80:
        pytest.skip("no products of bfloat16 here")
    yield WeightRig(cuda, launches)
    cuda.release()


def rounded(x: Doubles | Floats) -> Doubles:
    """To bfloat16, to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def product(weight: Weight, x: Doubles | Floats) -> tuple[Doubles, Doubles]:
    """What a prompt's rows come to, and the sums of magnitudes."""
    values, seen = rounded(weight.values), rounded(x)
    return seen @ values.T, np.abs(seen) @ np.abs(values).T


def assert_near(out: Floats, weight: Weight, x: Floats) -> None:
    expected, size = product(weight, x)
    assert (np.abs(out - expected) <= SUM_TOLERANCE * size + 1e-30).all()


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_rows_of_a_prompt_are_near_float64_and_do_not_depend_on_their_company(rig: WeightRig, kind: GgmlType) -> None:
    rng = np.random.default_rng(kind.id)
    k, n, counts = (256, 21, (1, 9)) if is_small(rig.engine) else (2048 + 256, 200, (1, 3, 64, 65, 129, 300, 512, 600))
    k += kind.block_values if kind.block_values in (32, 64) else 0
    weight = rig.weight(kind, k, n, rng)
    x = rng.standard_normal((max(counts), k), np.float32)
    x[1] *= 1e4
    x[2, :40] = 0
    (widest,) = rig.matmul([weight], x, is_prompt=True)
    assert_near(widest, weight, x)
    rig.set_multiprocessors(1)  # blocks are cut as for matrices that fill a card
    for n_rows in counts:
        (out,) = rig.matmul([weight], x[:n_rows], is_prompt=True)
        assert out.tobytes() == widest[:n_rows].tobytes(), n_rows
    for row in (3, len(x) - 1):
        (alone,) = rig.matmul([weight], x[row : row + 1], is_prompt=True)
        assert alone.tobytes() == widest[row : row + 1].tobytes(), row


@pytest.mark.parametrize("n_rows", [70, 300])
def test_parts_scales_and_epilogues_of_a_prompt(rig: WeightRig, n_rows: int) -> None:
    if is_small(rig.engine) and n_rows > 100:
        pytest.skip("too many rows for kernels on the host")
    rng = np.random.default_rng(n_rows)
    k = 256 if is_small(rig.engine) else 1536
    scales = np.array([0.25, -3.0], np.float32)
    x = rng.standard_normal((n_rows, k), np.float32)
    parts = [rig.weight(T.Q4_K, k, 150, rng), rig.weight(T.Q5_1, k, 7, rng), rig.weight(T.F32, k, 5, rng)]
    outs = rig.matmul(parts, x, is_prompt=True)
    for out, part in zip(outs[:2], parts[:2], strict=True):
        assert_near(out, part, x)
    assert np.allclose(outs[2], x.astype(np.float64) @ parts[2].values.T, rtol=0, atol=2e-3)
    pair = [rig.weight(T.IQ4_XS, k, 66, rng, scales), rig.weight(T.Q6_K, k, 66, rng)]
    (gated,) = rig.matmul(pair, x, epilogue=SWIGLU, is_prompt=True)
    gate, up = (product(part, x)[0] for part in pair)
    gate = gate * np.repeat(scales, 33)
    assert np.allclose(gated, silu(gate) * up, rtol=1e-3, atol=1e-3 * np.abs(gated).max())
    residual = rng.standard_normal((n_rows, 66), np.float32)
    (plain,) = rig.matmul(pair[:1], x, is_prompt=True)
    (added,) = rig.matmul(pair[:1], x, epilogue=STORE_ADD, residual=residual, is_prompt=True)
    assert added.tobytes() == (residual + plain).tobytes()


def test_norms_come_before_rounding(rig: WeightRig) -> None:
    rng = np.random.default_rng(11)
    k = 512
    weight = rig.weight(T.Q4_K, k, 32, rng)
    x, norm = rng.standard_normal((3, k), np.float32), rng.standard_normal(k, np.float32)
    (out,) = rig.matmul([weight], x, norm=norm, is_prompt=True)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * norm
    expected, size = product(weight, normed)
    # A value at an edge of rounding may go to the other side, a step of 2^-8 of it.
    assert (
        np.abs(out - expected) <= SUM_TOLERANCE * size + 2**-8 * np.abs(weight.values).max() * np.abs(normed).max()
    ).all()


def test_a_row_that_is_no_number_stays_alone(rig: WeightRig) -> None:
    rng = np.random.default_rng(19)
    weight = rig.weight(T.Q4_1, 256, 20, rng)
    x = rng.standard_normal((3, 256), np.float32)
    (clean,) = rig.matmul([weight], x, is_prompt=True)
    x[1, 100] = np.nan
    (out,) = rig.matmul([weight], x, is_prompt=True)
    assert not np.isfinite(out[1]).any()
    assert out[::2].tobytes() == clean[::2].tobytes()
