"""Which candidates stay: top-n-sigma, top-k, typical, top-p, min-p, XTC.

Shapes: candidates are ids and float64 logits, parallel, sorted by (logit descending, id ascending).
Order: that sort fixes the order of every sum. Sums that decide are ``np.cumsum``: each partial sum is an
output, so the additions run one after the other; ``np.sum`` may split them over vector lanes, differently on
each processor.
Source: top-n-sigma, Tang et al. 2024; typical, Meister et al. 2022; top-p, Holtzman et al. 2020; min-p,
Nguyen et al. 2024; XTC ("exclude top choices"), p-e-w 2024.
Holds: at least one candidate stays; no filter changes a logit or the order of the candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.candidates import best_candidates
from pykvstream.sampling.elementary import fixed_exp, fixed_log_of
from pykvstream.sampling.noise import Noise
from pykvstream.sampling.params import SamplingParams

_LOWEST = np.finfo(np.float32).min
_GROUP = 64
# Above this many candidates sorting all that reach a bound is faster than a heap.
_HEAP_AT_MOST = 256


@dataclass(frozen=True, slots=True)
class Candidates:
    """Token ids and their logits, best first."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]

    def take(self, chosen: slice | NDArray[np.intp]) -> Candidates:
        """Return those at the given ranks, which ascend."""
        return Candidates(self.ids[chosen], self.logits[chosen])


def truncate_row(row: NDArray[np.float32], params: SamplingParams, noise: Noise, position: int) -> Candidates:
    """Return the candidates of an adjusted row that pass every filter, in the order of the chain.

    ``row`` holds no NaN and no plus infinity, and at least one finite logit.
    """
    floor = sigma_floor(row, params.top_n_sigma) if params.top_n_sigma > 0.0 else None
    return truncate(top_candidates(row, params.top_k, floor), params, noise, position)


def truncate(candidates: Candidates, params: SamplingParams, noise: Noise, position: int) -> Candidates:
    """Return those of the candidates of top-n-sigma and top-k that pass the other filters."""
    if params.typical_p < 1.0:
        candidates = keep_typical(candidates, params.typical_p)
    if params.top_p < 1.0:
        candidates = keep_top_p(candidates, params.top_p)
    if params.min_p > 0.0:
        candidates = keep_min_p(candidates, params.min_p)
    if params.xtc_probability > 0.0 and noise.xtc_uniform(position) < params.xtc_probability:
        candidates = drop_top_choices(candidates, params.xtc_threshold)
    return candidates


def sigma_floor(row: NDArray[np.float32], n_sigma: float) -> float:
    """Return max - n * (population standard deviation) of the logits that are not minus infinity."""
    logits = row[row >= _LOWEST].astype(np.float64)
    deviations = logits - float(np.cumsum(logits)[-1]) / logits.size
    variance = float(np.cumsum(deviations * deviations)[-1]) / logits.size
    return float(row.max()) - n_sigma * math.sqrt(variance)


def top_candidates(row: NDArray[np.float32], k: int, floor: float | None = None) -> Candidates:
    """Return the ``k`` best finite logits (all for ``k <= 0``) that are not below ``floor``.

    Cutting by value and cutting by rank commute, so the floor of top-n-sigma, which comes first in the chain,
    may be applied to the few that top-k leaves.
    """
    if floor is None and 0 < k <= min(row.size, _HEAP_AT_MOST):
        return Candidates(*best_candidates(row, k))
    bound = _LOWEST
    if 0 < k < row.size:
        bound = max(bound, _kth_bound(row, k))
    if floor is not None:
        # One float32 below the floor: coarse here, exact in float64 below.
        bound = max(bound, np.nextafter(np.float32(floor), np.float32(-np.inf)))
    ids = np.flatnonzero(row >= bound)
    ids = ids[_best_first(row[ids])]
    if k > 0:
        ids = ids[:k]
    candidates = Candidates(ids, row[ids].astype(np.float64))
    return candidates if floor is None else _keep_from(candidates, floor)


def _kth_bound(row: NDArray[np.float32], k: int) -> np.float32:
    """Return a value that at least ``k`` logits reach and few exceed.

    The k-th largest of the maxima of disjoint groups is one, and needs no selection over the whole
    vocabulary.
    """
    n_groups = row.size // _GROUP
    is_small = n_groups < 4 * k
    maxima = row if is_small else row[: n_groups * _GROUP].reshape(_GROUP, n_groups).max(axis=0)
    bound: np.float32 = np.partition(maxima, maxima.size - k)[maxima.size - k]
    return bound


def _best_first(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the ranks that sort finite logits by (logit descending, index ascending).

    Logit and index share one integer key. Keys are unique, so the order does not depend on the sort
    algorithm, and numpy sorts integers several times faster than it does a stable indirect sort of a whole
    vocabulary.
    """
    # Adding zero turns -0.0 into +0.0: they are equal and must tie.
    bits = (logits + np.float32(0.0)).view(np.int32)
    # Negative floats order backwards as integers until their magnitude bits are flipped.
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~ascending).astype(np.int64) << 32
    keys |= np.arange(logits.size)
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


def _keep_from(candidates: Candidates, floor: float) -> Candidates:
    """Keep logits >= floor, which are a prefix; the best stays whatever rounding did to the floor."""
    n_kept = int(np.count_nonzero(candidates.logits >= floor))
    return candidates.take(slice(0, max(1, n_kept)))


def _weights(candidates: Candidates) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return exp(logit - max) and its running sums; the last running sum is the softmax denominator."""
    weights = fixed_exp(candidates.logits - candidates.logits[0])
    return weights, np.cumsum(weights)


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the shortest prefix whose probability is at least ``p``."""
    _, sums = _weights(candidates)
    return candidates.take(slice(0, int(np.searchsorted(sums, p * sums[-1])) + 1))


def keep_min_p(candidates: Candidates, min_p: float) -> Candidates:
    """Keep those at least ``min_p`` times as probable as the best: logit >= max + ln(min_p)."""
    return _keep_from(candidates, float(candidates.logits[0]) + fixed_log_of(max(min_p, 1e-300)))


def keep_typical(candidates: Candidates, p: float) -> Candidates:
    """Keep the fewest, nearest to the entropy in surprise, whose probability is at least ``p``."""
    weights, sums = _weights(candidates)
    total = float(sums[-1])
    log_probabilities = (candidates.logits - candidates.logits[0]) - fixed_log_of(total)
    probabilities = weights / total
    entropy = -float(np.cumsum(probabilities * log_probabilities)[-1])
    order = np.argsort(np.abs(log_probabilities + entropy), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1
    return candidates.take(np.sort(order[:n_kept]))


def drop_top_choices(candidates: Candidates, threshold: float) -> Candidates:
    """Drop every candidate of probability >= threshold but the least probable of them."""
    weights, sums = _weights(candidates)
    n_above = int(np.count_nonzero(weights / sums[-1] >= threshold))
    return candidates.take(slice(max(0, n_above - 1), None))
