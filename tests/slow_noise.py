"""Random numbers, exp and log as ``native/base/noise.c`` has them, with numpy, each operation a loop of its own.

Source: Philox4x32-10 of Salmon, Moraes, Dror and Shaw (SC 2011); Taylor series.
Holds: ``philox``, ``philox_round_keys``, ``uniform``, ``slow_exp``, ``slow_log``, ``slow_gumbel``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_WORD_MASK = np.uint64(_WORD)
_WORD_BITS = np.uint64(32)
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# ln(2) in two parts: the first has 21 trailing zero bits, so that its product with any exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
_LOG_TERMS = tuple(1.0 / (2 * n + 1) for n in range(9, 0, -1))
# Below this the result would be subnormal, where some processors flush to zero and others do not.
_EXP_LOWEST = -708.0


def slow_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e**x for x <= 0 (minus infinity included); exactly 0 below -708."""
    bounded = np.maximum(x, _EXP_LOWEST)
    exponent = np.rint(bounded * _LOG2_E)
    rest = bounded - exponent * _LN2_HIGH
    rest -= exponent * _LN2_LOW
    result = rest * _EXP_TERMS[0]
    for term in _EXP_TERMS[1:-1]:
        result += term
        result *= rest
    result += _EXP_TERMS[-1]
    result *= ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)
    result[x < _EXP_LOWEST] = 0.0
    return result


def slow_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithm of positive, normal, finite values."""
    bits = x.view(np.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    fraction = (bits - (exponent << 52)).view(np.float64) - 1.0
    ratio = fraction / (fraction + 2.0)
    square = ratio * ratio
    series = square * _LOG_TERMS[0]
    for term in _LOG_TERMS[1:]:
        series += term
        series *= square
    power = exponent.astype(np.float64)
    ratio += ratio
    series *= ratio
    series += power * _LN2_LOW
    series += ratio
    series += power * _LN2_HIGH
    return series


def philox_round_keys(key: int) -> NDArray[np.uint64]:
    """Return the keys of the ten rounds, shape (10, 2, 1), second key word first."""
    low, high = key & _WORD, key >> 32
    keys = [((low + r * _WEYL[0]) & _WORD, (high + r * _WEYL[1]) & _WORD) for r in range(_ROUNDS)]
    return np.array(keys, dtype=np.uint64)[:, :, None]


def philox(counter: NDArray[np.uint64], round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the four output words of each counter; both have shape (4, n) and values below 2^32."""
    # Words 0 and 2 are multiplied, words 1 and 3 only mixed: as two rows each, a round is five array
    # operations.
    factors, mixed = counter[0::2], counter[1::2]
    for key in round_keys:
        product = _MULTIPLIERS * factors
        factors = (product >> _WORD_BITS)[::-1] ^ mixed
        factors ^= key
        product &= _WORD_MASK
        mixed = product[::-1]
    words: NDArray[np.uint64] = np.stack((factors[0], mixed[0], factors[1], mixed[1]))
    return words


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return (r + 1/2) / 2^52 for the 52-bit r made of the top 26 bits of the first two words."""
    bits = ((words[0] >> np.uint64(6)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    result: NDArray[np.float64] = bits.astype(np.float64)
    result += 0.5
    result *= 2.0**-52
    return result


def slow_gumbel(seed: int, number: int, stream: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    counter = np.empty((4, tokens.size), dtype=np.uint64)
    counter[0] = tokens
    counter[1:] = np.array([[number & _WORD], [number >> 32], [stream]], dtype=np.uint64)
    return -slow_log(-slow_log(uniform(philox(counter, philox_round_keys(seed)))))
