"""Acceptance of a drafted token by its probability: min(1, p/q), else a draw from what the draft leaves of p.

Shapes: ``ids`` int64 and ``weights`` float64, parallel.
Units: probabilities; p is the distribution of the whole chain at a position, q what the draft was drawn from.
Source: Leviathan, Kalman and Matias 2023; Chen et al. 2023.
Holds: a token that is drawn from q, then accepted or drawn anew, has the distribution p. A draft that was not drawn has
q = 1, whatever its drafter thought of it. Sums that decide are ``np.cumsum``, as in ``truncation``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import InvalidArgument
from pykvstream.sampling.elementary import fixed_exp
from pykvstream.sampling.truncation import Candidates

# Below this a difference of probabilities is rounding, and its logarithm could not be taken.
SMALLEST = 1e-300


@dataclass(frozen=True, slots=True)
class Distribution:
    """Tokens, each once, with their probabilities."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float64]

    def of(self, token: int) -> float:
        """The probability of a token."""
        return float(self.weights[self.ids == token].sum())

    @classmethod
    def certain(cls, token: int) -> Distribution:
        """All probability on one token."""
        return cls(np.array([token], np.int64), np.ones(1))


def distribution_of(candidates: Candidates, temperature: float) -> Distribution:
    """The softmax of candidates at a temperature above 0."""
    with np.errstate(over="ignore"):
        weights = fixed_exp((candidates.logits - candidates.logits[0]) / temperature)
    return Distribution(candidates.ids, weights / np.cumsum(weights)[-1])


def is_accepted(p: Distribution, q: Distribution, token: int, uniform: float) -> bool:
    """Whether a token that was drawn from ``q`` stays. Raises ``InvalidArgument`` where q never draws it."""
    drawn = q.of(token)
    if not drawn > 0.0:
        raise InvalidArgument(f"a draft of token {token}, which has the probability {drawn} there")
    return uniform * drawn < p.of(token)


def overlap(p: Distribution, q: Distribution) -> float:
    """The sum of min(p, q): how often a draft out of q is accepted; a coupled choice agrees no more often."""
    _, at_p, at_q = np.intersect1d(p.ids, q.ids, assume_unique=True, return_indices=True)
    return float(np.minimum(p.weights[at_p], q.weights[at_q]).sum())


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), not normalised: what a token that is not accepted is drawn from.

    Where rounding leaves nothing of it, p itself: then the two are equal but for rounding.
    """
    shared, at_p, at_q = np.intersect1d(p.ids, q.ids, assume_unique=True, return_indices=True)
    left = p.weights.copy()
    left[at_p[: shared.size]] -= q.weights[at_q]
    stays = left > SMALLEST
    return Distribution(p.ids[stays], left[stays]) if stays.any() else p
