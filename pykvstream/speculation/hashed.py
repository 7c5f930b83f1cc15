"""``ngram-mod``: one large table from the hash of n tokens to the token that followed them.

Source: model.md 4.4. Windows are not compared, so that two may share an entry: a wrong draft then, never a wrong text.
The table outlives the text that it was filled from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pykvstream.speculation.drafter import NO_DRAFT, Draft

TABLE_SIZE = 4 << 20
MULTIPLIER = 6364136223846793005
NEW_TOKENS = 32
_EMPTY = -1
_WORD = (1 << 64) - 1
_FULLEST = 0.25
_LOW_SHARE = 0.25
_LOW_ROUNDS = 5


class NgramMod:
    """Follows the table from the last ``n_match`` tokens, ``n_max`` times at most; fewer than ``n_min`` are none."""

    name = "ngram-mod"

    def __init__(self, n_match: int, n_min: int, n_max: int, *, table_size: int = TABLE_SIZE) -> None:
        self._n = n_match
        self._drop = pow(MULTIPLIER, n_match, 1 << 64)
        self._n_min = n_min
        self._n_max = n_max
        self._tokens: list[int] = []
        self._table: NDArray[np.int32] = np.full(table_size, _EMPTY, dtype=np.int32)
        self._n_added = 0  # windows from the first one on that are in the table
        self._n_low = 0
        self._n_drafted = 0

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""
        self._tokens += tokens

    def begin(self) -> None:
        """Add the whole text anew: other texts may have taken its entries."""
        self._add(0, len(self._tokens) - self._n)
        if np.count_nonzero(self._table != _EMPTY) > _FULLEST * self._table.size:
            self._table.fill(_EMPTY)

    def truncate(self, n_tokens: int) -> None:
        """The text is its first tokens. Windows that ended beyond are added again when they are whole again."""
        del self._tokens[n_tokens:]
        self._n_added = min(self._n_added, max(n_tokens - self._n, 0))

    def fork(self) -> NgramMod:
        """One that goes on alone."""
        child = NgramMod.__new__(NgramMod)
        child._n, child._n_min, child._n_max, child._drop = self._n, self._n_min, self._n_max, self._drop
        child._tokens = list(self._tokens)
        child._table = self._table.copy()
        child._n_added, child._n_low, child._n_drafted = self._n_added, self._n_low, 0
        return child

    def draft(self, n_max: int) -> Draft:
        """Follow the table from the end of the text."""
        self._n_drafted = 0
        if len(self._tokens) - 1 < self._n:
            return NO_DRAFT
        n_windows = len(self._tokens) - 1 - self._n
        if n_windows - self._n_added >= NEW_TOKENS:
            self._add(self._n_added, n_windows)
        window = self._tokens[-self._n :]
        name = 0
        for token in window:
            name = (name * MULTIPLIER + token) & _WORD
        table, size, drop = self._table, self._table.size, self._drop
        for i in range(self._n_max):
            token = int(table[name % size])
            if token == _EMPTY:
                break
            name = (name * MULTIPLIER + token - window[i] * drop) & _WORD
            window.append(token)
        found = window[self._n :]
        if len(found) < self._n_min:
            return NO_DRAFT
        self._n_drafted = min(len(found), n_max)
        return Draft(tuple(found[:n_max]))

    def judge(self, n_accepted: int) -> None:
        """Begin a table anew that was wrong five times in a row."""
        if self._n_drafted == 0:
            return
        is_low = n_accepted < _LOW_SHARE * self._n_drafted
        self._n_low = self._n_low + 1 if is_low else 0
        if self._n_low == _LOW_ROUNDS:
            self._table.fill(_EMPTY)
            self._n_low = 0

    def _add(self, first: int, end: int) -> None:
        """Add the windows from ``first`` to ``end``, later ones over earlier ones; a token follows each."""
        if end > first:
            tokens = np.array(self._tokens[first : end + self._n], dtype=np.int64)
            names = np.zeros(end - first, dtype=np.uint64)
            for i in range(self._n):
                names *= np.uint64(MULTIPLIER)
                names += tokens[i : i + names.size].astype(np.uint64)
            # Of equal indices the last one is what stays.
            self._table[(names % np.uint64(self._table.size)).astype(np.int64)] = tokens[self._n :]
            self._n_added = end
