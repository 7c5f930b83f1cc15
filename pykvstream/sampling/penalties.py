"""The tokens accepted so far, and the logits that they lower: bias, repetition penalties, DRY.

Shapes: a row is float32 ``(n_vocab,)``; only the entries of a few ids are read and written.
Units: biases and penalties are in logits, windows in tokens.
Order: each step computes in float64 and stores float32, so a row means the same after every step.
Holds: a logit stays finite or minus infinity; everything is a function of the tokens, nothing is kept beside
them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pykvstream.sampling.params import SamplingParams

_LARGEST = float(np.finfo(np.float32).max)
# DRY grows exponentially, so a longer match could not be told from this one; the bound keeps a looping text
# linear.
DRY_LONGEST_MATCH = 256
# Above this many tokens counting into a table of the vocabulary is cheaper than sorting the window.
_SORT_AT_MOST = 2048


class TokenHistory:
    """A growing array of accepted token ids."""

    __slots__ = ("_tokens", "n_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = np.fromiter(tokens, dtype=np.int32)
        self.n_tokens = self._tokens.size

    def append(self, token: int) -> None:
        """Add one token; the room doubles, so that a long prompt costs linear time."""
        if self.n_tokens == self._tokens.size:
            room = np.empty(max(64, 2 * self.n_tokens), dtype=np.int32)
            room[: self.n_tokens] = self._tokens
            self._tokens = room
        self._tokens[self.n_tokens] = token
        self.n_tokens += 1

    def truncate(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens``, which the caller has checked."""
        self.n_tokens = n_tokens

    def last(self, n_tokens: int) -> NDArray[np.int32]:
        """View the last ``n_tokens``, all for -1, valid until the next change."""
        start = 0 if n_tokens < 0 else max(0, self.n_tokens - n_tokens)
        return self._tokens[start : self.n_tokens]


class LogitAdjuster:
    """Bias, penalties and DRY of one set of parameters."""

    __slots__ = ("_bias_ids", "_biases", "_breakers", "_dry_penalties", "_params", "lowers")

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._biases = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        self._breakers = np.array(params.dry_breakers, dtype=np.int32)
        self._dry_penalties = _dry_penalties(params)
        self.lowers = bool(self._bias_ids.size) or params.has_penalties
        """Whether bias or penalties are on."""

    def adjust(self, row: NDArray[np.float32], history: TokenHistory) -> NDArray[np.float32]:
        """Return the adjusted copy of ``row``, or ``row`` itself when no step is on."""
        params = self._params
        if not (self.lowers or params.has_dry):
            return row
        adjusted = row.copy()
        if self._bias_ids.size:
            _store(adjusted, self._bias_ids, adjusted[self._bias_ids] + self._biases)
        if params.has_penalties:
            self._apply_penalties(adjusted, *_count(history.last(params.penalty_last_n), row.size))
        if params.has_dry:
            self._apply_dry(adjusted, history.last(params.dry_last_n))
        return adjusted

    def adjust_some(
        self, ids: NDArray[np.int64], logits: NDArray[np.float32], history: TokenHistory
    ) -> NDArray[np.float32]:
        """Return the adjusted logits of some tokens, each named once, as ``adjust`` would have them; DRY is off."""
        params = self._params
        if not self.lowers:
            return logits
        adjusted, order = logits.copy(), np.argsort(ids)
        if self._bias_ids.size:
            at, found = _places(ids, order, self._bias_ids)
            _store(adjusted, at, adjusted[at] + self._biases[found])
        if params.has_penalties:
            touched, counts = np.unique(history.last(params.penalty_last_n), return_counts=True)
            at, found = _places(ids, order, touched.astype(np.int64))
            self._apply_penalties(adjusted, at, counts.astype(np.int64)[found])
        return adjusted

    def _apply_penalties(self, row: NDArray[np.float32], ids: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        logits = row[ids].astype(np.float64)
        repeat = self._params.repeat_penalty
        logits = np.where(logits > 0.0, logits / repeat, logits * repeat)
        logits -= counts * self._params.frequency_penalty + self._params.presence_penalty
        _store(row, ids, logits)

    def _apply_dry(self, row: NDArray[np.float32], window: NDArray[np.int32]) -> None:
        ids, lengths = longest_matches(window, self._breakers)
        is_long = lengths >= self._params.dry_allowed_length
        ids, lengths = ids[is_long], lengths[is_long]
        _store(row, ids, row[ids] - self._dry_penalties[lengths - self._params.dry_allowed_length])


def _places(
    ids: NDArray[np.int64], order: NDArray[np.intp], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where the wanted ids stand that are there, and which of the wanted ones these are. ``order`` sorts ids."""
    at = np.minimum(np.searchsorted(ids, wanted, sorter=order), ids.size - 1)
    places = order[at].astype(np.int64)
    found: NDArray[np.bool_] = ids[places] == wanted
    return places[found], found


def _store(row: NDArray[np.float32], ids: NDArray[np.int64], logits: NDArray[np.float64]) -> None:
    """Write logits back, saturated at the largest float32, while a suppressed token stays suppressed."""
    row[ids] = np.where(logits == -np.inf, logits, np.clip(logits, -_LARGEST, _LARGEST))


def _count(window: NDArray[np.int32], n_vocab: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct ids of the window and how often each occurs."""
    if window.size <= _SORT_AT_MOST:
        ids, counts = np.unique(window, return_counts=True)
        return ids.astype(np.int64), counts.astype(np.int64)
    table = np.bincount(window, minlength=n_vocab)
    present = np.flatnonzero(table)
    return present.astype(np.int64), table[present].astype(np.int64)


def _dry_penalties(params: SamplingParams) -> NDArray[np.float64]:
    """Return multiplier * base**n for n from 0, by repeated products: ``pow`` differs between platforms."""
    penalties = [params.dry_multiplier]
    for _ in range(DRY_LONGEST_MATCH):
        penalties.append(min(penalties[-1] * params.dry_base, _LARGEST))
    return np.array(penalties, dtype=np.float64)


def longest_matches(
    window: NDArray[np.int32], breakers: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each id that would continue a repetition, and the length of the longest that it continues.

    An earlier stretch of the window that equals its last L tokens, none of them a breaker, is a match of
    length L, and the token after the stretch continues it. Breakers are never returned. L is at most
    ``DRY_LONGEST_MATCH``.
    """
    n_tokens = window.size
    broken = np.flatnonzero(np.isin(window[-DRY_LONGEST_MATCH:][::-1], breakers))
    longest = int(broken[0]) if broken.size else min(n_tokens, DRY_LONGEST_MATCH)
    if longest == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    ends = np.flatnonzero(window[:-1] == window[-1])
    ends = ends[~np.isin(window[ends + 1], breakers)]
    lengths = np.ones(ends.size, dtype=np.int64)
    alive = np.arange(ends.size)
    for length in range(2, longest + 1):
        starts = ends[alive] - (length - 1)
        alive = alive[(starts >= 0) & (window[starts] == window[n_tokens - length])]
        if not alive.size:
            break
        lengths[alive] = length
    ids, which = np.unique(window[ends + 1], return_inverse=True)
    best = np.zeros(ids.size, dtype=np.int64)
    np.maximum.at(best, which, lengths)
    return ids.astype(np.int64), best
