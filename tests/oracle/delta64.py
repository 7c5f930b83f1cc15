"""A gated delta net layer in float64, row by row.

Shapes: rows of all heads come as ``[n, heads, dim]``; the matrix of a value head is ``[value, key]``.
Holds: ``consume``, ``recurrent``, ``silu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.delta_rig import Tables

Doubles = NDArray[np.float64]


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
