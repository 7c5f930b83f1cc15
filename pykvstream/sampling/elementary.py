"""exp and log in float64 from +, -, *, / and bit operations only.

The platform's exp and log differ in the last bit between libraries and vector widths, and a last bit is
enough to move a top-p cut or a Gumbel maximum. IEEE 754 fixes the basic operations: the same input gives the same
bits everywhere.

Source: ``include/kvstream/noise.h``; ``tests/slow_noise.py`` has both written with numpy.
Holds: ``fixed_exp``, ``fixed_log``, ``fixed_log_of``: within 2 units in the last place (exp) and 3 (log) of the true
value; the tests measure it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pykvstream.core.noise import exact_exp as fixed_exp
from pykvstream.core.noise import exact_log as fixed_log

__all__ = ["fixed_exp", "fixed_log", "fixed_log_of"]


@lru_cache(maxsize=64)
def fixed_log_of(x: float) -> float:
    """Return ``fixed_log`` of one number."""
    return float(fixed_log(np.array([x], dtype=np.float64))[0])
