"""Gated delta net layers on the CPU against float64, row by row and in chunks (P-DN).

Order: float32 sums differ from float64 by rounding alone; both forms stay within 1e-5 of the largest value, and of
each other.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.tape import DeltaMode
from tests.delta_rig import N_VOCAB, DeltaRig, Shape, Tables, open_rig

Doubles = NDArray[np.float64]
N_TOKENS = 150
SHAPES = (Shape(), Shape(2, 6, 32), Shape(2, 2, 64, 2), Shape(1, 3, 128, 8))


def silu(x: Doubles) -> Doubles:
    return x / (1 + np.exp(-x))


def unit(x: Doubles) -> Doubles:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def consume(tables: Tables, layer: int, inputs: Doubles, beta: Doubles, alpha: Doubles) -> tuple[Doubles, ...]:
    """q, k, v ``[n, value heads, dim]``, beta and the logarithm of the decay ``[n, value heads]``."""
    shape = tables.shape
    taps, n = shape.conv_width, len(inputs)
    padded = np.vstack([np.zeros((taps - 1, shape.channels)), inputs])
    conv = tables.conv[layer].astype(np.float64)
    c = silu(sum(padded[i : i + n] * conv[:, i] for i in range(taps)))
    keys = shape.n_key_heads * shape.head_dim
    q = unit(c[:, :keys].reshape(n, -1, shape.head_dim)) / np.sqrt(shape.head_dim)
    k = unit(c[:, keys : 2 * keys].reshape(n, -1, shape.head_dim))
    v = c[:, 2 * keys :].reshape(n, -1, shape.head_dim)
    of_head = np.arange(shape.n_value_heads) % shape.n_key_heads
    glog = tables.decay[layer] * np.logaddexp(0, alpha + tables.dt_bias[layer])
    return q[:, of_head], k[:, of_head], v, 1 / (1 + np.exp(-beta)), glog.astype(np.float64)


def recurrent(q: Doubles, k: Doubles, v: Doubles, beta: Doubles, glog: Doubles) -> Doubles:
    out = np.empty_like(v)
    state = np.zeros((v.shape[1], v.shape[2], k.shape[2]))
    for t in range(len(v)):
        state *= np.exp(glog[t])[:, None, None]
        d = beta[t][:, None] * (v[t] - np.einsum("hji,hi->hj", state, k[t]))
        state += np.einsum("hj,hi->hji", d, k[t])
        out[t] = np.einsum("hji,hi->hj", state, q[t])
    return out


def truth(tables: Tables, tokens: NDArray[np.uint32]) -> tuple[Doubles, Doubles]:
    """Outputs of both layers ``[n, cols]``."""
    beta = tables.beta[tokens].astype(np.float64)
    alpha = tables.alpha[tokens].astype(np.float64)
    first = recurrent(*consume(tables, 0, tables.inputs[tokens].astype(np.float64), beta, alpha))
    first = first.reshape(len(tokens), -1)
    second = recurrent(*consume(tables, 1, first @ tables.mixing.T.astype(np.float64), beta, alpha))
    return first, second.reshape(len(tokens), -1)


def decode(rig: DeltaRig, tokens: NDArray[np.uint32], widths: list[int], mode: DeltaMode) -> list[NDArray[np.float32]]:
    lane = rig.lane()
    parts = []
    at = 0
    for width in widths:
        parts.append(lane.take(tokens[at : at + width].tolist(), mode).outputs[:2])
        at += width
    assert at == len(tokens) == lane.position
    lane.close()
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def cut(width: int) -> list[int]:
    """Passes of at most ``width`` rows over all tokens."""
    return [min(width, N_TOKENS - at) for at in range(0, N_TOKENS, width)]


def distance(found: NDArray[np.float32], expected: NDArray[np.float32] | Doubles) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_are_near_float64_and_each_other(shape: Shape) -> None:
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, N_TOKENS).astype(np.uint32)
    with open_rig(shape, log_rows=160) as rig:
        expected = truth(rig.tables, tokens)
        found = {
            (mode, width): decode(rig, tokens, cut(width), mode)
            for mode in DeltaMode
            for width in (1, 3, 63, 64, 65, 150)
        }
    for outputs in found.values():
        assert distance(outputs[0], expected[0]) < 1e-5
        assert distance(outputs[1], expected[1]) < 1e-5
    for width in (1, 3, 63, 64, 65, 150):
        logged, chunked = found[DeltaMode.LOGGED, width], found[DeltaMode.CHUNKED, width]
        assert max(map(distance, chunked, logged)) < 1e-5
        np.testing.assert_array_equal(logged[0], found[DeltaMode.LOGGED, 1][0])
        np.testing.assert_array_equal(logged[1], found[DeltaMode.LOGGED, 1][1])
    np.testing.assert_array_equal(found[DeltaMode.CHUNKED, 64][1], found[DeltaMode.CHUNKED, 150][1])
