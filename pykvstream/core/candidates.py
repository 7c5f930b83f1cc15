"""The best of a row of logits, and the sum of its exponentials.

Source: ``include/kvstream/candidates.h``.
Holds: ``best_candidates``, ``sum_exps``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Isa
from pykvstream.core.status import check


def best_candidates(row: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Numbers and values of the ``k`` largest finite logits, best first, of equal ones the lower number first."""
    ids, logits, n_found = np.empty(k, np.int64), np.empty(k), ffi.new("uint64_t *")
    source = ffi.from_buffer("float[]", np.ascontiguousarray(row, np.float32))
    status = lib.kvs_best_candidates(
        source, row.size, k, ffi.from_buffer("int64_t[]", ids), ffi.from_buffer("double[]", logits), n_found
    )
    check(status)
    return ids[: n_found[0]], logits[: n_found[0]]


def sum_exps(row: NDArray[np.float32], isa: Isa = Isa.BEST) -> tuple[float, float]:
    """The largest logit, and the sum of ``exp(logit - largest)``: the same bits on every instruction set.

    Raises ``InvalidArgument`` where a logit is NaN or infinite upwards or none is finite, and for ``AVX512``, of which
    there is no version; ``Unsupported`` where the processor has not what is asked for.
    """
    largest, total = ffi.new("float *"), ffi.new("double *")
    source = ffi.from_buffer("float[]", np.ascontiguousarray(row, np.float32))
    check(lib.kvs_sum_exps(source, row.size, isa, largest, total))
    return float(largest[0]), float(total[0])
