"""The numbers that decide tokens: random ones without state, exponentials and logarithms, the same bits everywhere.

Shapes: one dimension, contiguous; tokens int64, numbers float64.
Source: ``include/kvstream/noise.h``.
Holds: ``noise_words``, ``noise_uniform``, ``noise_gumbel``, ``exact_exp``, ``exact_log``,
``exact_log_of``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib

_PAIR = ffi.typeof("double[2]")


def _tokens(tokens: NDArray[np.int64]) -> Any:
    return ffi.from_buffer("int64_t[]", np.ascontiguousarray(tokens, np.int64))


def noise_words(seed: int, number: int, stream: int, tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The four output words for each token ``[n, 4]``."""
    words = np.empty((len(tokens), 4), np.uint32)
    lib.kvs_noise_words(seed, number, stream, _tokens(tokens), len(tokens), ffi.from_buffer("uint32_t[]", words))
    return words


def noise_uniform(seed: int, number: int, stream: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """A uniform number in (0, 1) for each token."""
    out = np.empty(len(tokens))
    lib.kvs_noise_uniform(seed, number, stream, _tokens(tokens), len(tokens), ffi.from_buffer("double[]", out))
    return out


def noise_gumbel(seed: int, number: int, stream: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """A standard Gumbel number for each token."""
    out = np.empty(len(tokens))
    lib.kvs_noise_gumbel(seed, number, stream, _tokens(tokens), len(tokens), ffi.from_buffer("double[]", out))
    return out


def exact_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """``e**x`` for ``x <= 0``; exactly 0 below -708."""
    out = np.empty(x.shape)
    source = ffi.from_buffer("double[]", np.ascontiguousarray(x, np.float64))
    lib.kvs_exact_exp(source, x.size, ffi.from_buffer("double[]", out))
    return out


def exact_log_of(x: float) -> float:
    """The same of one number as ``exact_log`` of many."""
    cells = ffi.new(_PAIR)
    cells[0] = x
    lib.kvs_exact_log(cells, 1, cells + 1)
    logarithm: float = cells[1]
    return logarithm


def exact_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithms of positive, normal, finite values."""
    out = np.empty(x.shape)
    source = ffi.from_buffer("double[]", np.ascontiguousarray(x, np.float64))
    lib.kvs_exact_log(source, x.size, ffi.from_buffer("double[]", out))
    return out
