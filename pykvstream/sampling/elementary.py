"""exp and log in float64 from +, -, *, / and bit operations only.

The platform's exp and log differ in the last bit between libraries and vector widths, and a last bit is
enough to move a top-p cut or a Gumbel maximum. IEEE 754 fixes the basic operations, and numpy runs each as
its own loop, so no compiler can fuse two of them: the same input gives the same bits everywhere.

Source: Taylor series. exp(r) for abs(r) <= ln(2)/2, where the first dropped term, r^14/14!, is below 2^-57;
and log(1 + f) = 2 atanh(f / (2 + f)), where the first dropped term, z^10/21 for z = s^2 <= 0.0295, is below
2^-55.
Holds: within 2 units in the last place (exp) and 3 (log) of the true value; the tests measure it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
# ln(2) in two parts: the first has 21 trailing zero bits, so that its product with any exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
_LOG_TERMS = tuple(1.0 / (2 * n + 1) for n in range(9, 0, -1))
# Below this the result would be subnormal, where some processors flush to zero and others do not.
_EXP_LOWEST = -708.0


def fixed_exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
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


def fixed_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
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


def fixed_log_of(x: float) -> float:
    """Return ``fixed_log`` of one number."""
    return float(fixed_log(np.array([x], dtype=np.float64))[0])
