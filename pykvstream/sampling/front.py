"""The best logits of a row and the sum of its exponentials, found where the row was computed, in place of the row.

Shapes: ``ids`` int64 and ``logits`` float32, parallel, by (logit falling, id rising); no minus infinity among them.
Units: ``log_sum_exp`` natural logarithm over all tokens of the raw row.
Source: ``KVS_OP_FRONT`` of ``include/kvstream/tape.h``.
Holds: ``Front``, ``rows_needed_by``. Where that names no reason, the chain takes the same token out of a ``Front`` as
out of the whole row: bias and penalties lower logits alone, and of so few tokens that among the ``FRONT_BEST`` best at
least ``top_k`` are as they were; each of these stays before every token that is not among the best.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import InvalidArgument, NumericError
from pykvstream.sampling.logprobs import log_sum_exp
from pykvstream.sampling.params import SamplingParams

FRONT_BEST = 128
"""Best logits of a row that are found."""
_TAIL = 4
_TAIL_WORDS = struct.Struct("=IId")
"""Count, the first bad column, the sum."""
_NONE = 0xFFFFFFFF


def front_words(n_best: int) -> int:
    """Words of 32 bits of one row."""
    return 2 * n_best + _TAIL


@dataclass(frozen=True, slots=True)
class Front:
    """``is_whole``: every token that is not minus infinity is among them."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    log_sum_exp: float
    is_whole: bool

    @classmethod
    def of(cls, words: NDArray[np.uint32], position: int) -> Front:
        """Out of the words of one row. Raises ``NumericError`` for a row that no token can be chosen from."""
        n_best = (len(words) - _TAIL) // 2
        values = words[n_best : 2 * n_best].view(np.float32)
        n, bad, total = _TAIL_WORDS.unpack_from(words.data, 8 * n_best)
        if bad != _NONE:
            raise NumericError(f"logits at position {position}: index {bad} is {values[0]}")
        if n == 0:
            raise NumericError(f"logits at position {position}: all of them are -inf, from index 0 on")
        ids = words[:n].astype(np.int64)
        return cls(ids, values[:n].copy(), log_sum_exp(float(values[0]), total), n < n_best)

    def logit(self, token: int) -> float | None:
        """The raw logit of a token, None where it is not among the best."""
        if self.ids[0] == token:
            return float(self.logits[0])
        found = np.flatnonzero(self.ids == token)
        return float(self.logits[found[0]]) if found.size else None


def rows_needed_by(params: SamplingParams) -> str | None:
    """Why these settings need whole rows of logits, by name; None where the best of them will do."""
    if params.top_n_sigma > 0.0 and not params.is_greedy:
        return "top_n_sigma looks at the spread of all logits"
    if params.top_k <= 0 and not params.is_greedy:
        return "top_k is off"
    if params.has_dry:
        return "dry lowers as many tokens as there are repetitions"
    if any(bias > 0.0 for bias in params.logit_bias.values()):
        return "logit_bias raises a token"
    n_touched = len(params.logit_bias)
    if params.has_penalties:
        raised = {
            "repeat_penalty": params.repeat_penalty < 1.0,
            "frequency_penalty": params.frequency_penalty < 0.0,
            "presence_penalty": params.presence_penalty < 0.0,
        }
        for name, is_raised in raised.items():
            if is_raised:
                return f"{name} raises tokens"
        if params.penalty_last_n < 0:
            return "penalty_last_n is the whole history"
        n_touched += params.penalty_last_n
    n_wanted = 1 if params.is_greedy else params.top_k
    if n_wanted + n_touched > FRONT_BEST:
        return f"{n_wanted} candidates and {n_touched} lowered tokens are more than the {FRONT_BEST} best"
    return None


def best_first(ids: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.intp]:
    """Ranks by (logit falling, id rising), those that are minus infinity left out."""
    if len(ids) != len(logits):
        raise InvalidArgument(f"{len(ids)} ids and {len(logits)} logits")
    order: NDArray[np.intp] = np.lexsort((ids, -logits.astype(np.float64)))
    return order[logits[order] > -np.inf]
