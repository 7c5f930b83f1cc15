"""``ngram-map-k`` and ``ngram-map-k4v``: keys of n tokens in a hash table, and how their drafts have done.

Source: model.md 4.3. N counts the tokens before the newest one; only places below N - n - m - 1 are matched, so that a
whole value of m tokens stands behind each. The table has one entry for each hash, written once, newest first in each
extension; a text that becomes shorter takes back what lies from ``n + m`` tokens before its end on.
Order: a draft looks into the table, then at what is not in it yet, then extends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pykvstream.speculation.drafter import NO_DRAFT, Draft
from pykvstream.speculation.occurrences import Occurrences

TABLE_SIZE = 262144
MULTIPLIER = 2654435761
MOST_VALUES = 4
_WORD = (1 << 32) - 1


@dataclass(slots=True)
class _Value:
    """Tokens that followed a key: where they stand, how often they were counted, how many were right last time."""

    place: int
    n_counted: int
    n_accepted: int


@dataclass(slots=True)
class _Key:
    """``counted_to``: the last place that was counted, once more when it is the first of the next count."""

    place: int
    n_hits: int = 0
    n_accepted: int = 0
    counted_to: int = 0
    values: list[_Value] = field(default_factory=list)


class NgramMap:
    """Copies up to ``size_m`` tokens from behind an earlier place of the last ``size_n`` tokens, but no more than were
    right the last time.

    ``min_hits``: None makes it ``ngram-map-k``; else it is ``ngram-map-k4v``, which wants a key to be met so often, and
    of what followed it, four values at most, one that was seen twice as often as all others together.
    """

    def __init__(
        self, size_n: int, size_m: int, min_hits: int | None = None, *, table_size: int = TABLE_SIZE
    ) -> None:
        self.name = "ngram-map-k" if min_hits is None else "ngram-map-k4v"
        self._n = size_n
        self._m = size_m
        self._min_hits = min_hits
        self._text = Occurrences(size_n)
        self._power = pow(MULTIPLIER, size_n, 1 << 32)
        self._prefixes = [0]
        self._table: NDArray[np.uint32] = np.zeros(table_size, dtype=np.uint32)
        self._n_indexed = 1  # places from 1 to here are in the table; 0 says that an entry is empty
        self._keys: dict[tuple[int, ...], _Key] = {}
        self._last: tuple[_Key, int] | None = None

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""
        self._text.extend(tokens)
        for token in tokens:
            self._prefixes.append((self._prefixes[-1] * MULTIPLIER + token) & _WORD)

    def begin(self) -> None:
        """Nothing is prepared for an answer."""

    def truncate(self, n_tokens: int) -> None:
        """The text is its first tokens; what was learnt near its new end, or beyond, is forgotten."""
        if n_tokens >= len(self._text.tokens):
            return
        self._text.truncate(n_tokens)
        del self._prefixes[n_tokens + 1 :]
        first_lost = max(n_tokens - self._n - self._m, 0)
        self._table[self._table >= first_lost] = 0
        self._n_indexed = max(min(self._n_indexed, first_lost), 1)
        self._last = None
        for tokens, key in list(self._keys.items()):
            key.values = [value for value in key.values if value.place < first_lost]
            key.counted_to = min(key.counted_to, first_lost)
            if key.place >= first_lost or not (key.values or self._min_hits is None):
                del self._keys[tokens]

    def fork(self) -> NgramMap:
        """One that goes on alone."""
        child = NgramMap(self._n, self._m, self._min_hits, table_size=self._table.size)
        child._text = self._text.fork()
        child._prefixes = list(self._prefixes)
        child._table = self._table.copy()
        child._n_indexed = self._n_indexed
        child._keys = {
            tokens: replace(key, values=[replace(value) for value in key.values]) for tokens, key in self._keys.items()
        }
        return child

    def draft(self, n_max: int) -> Draft:
        """What followed at the place that the table knows."""
        self._last = None
        tokens = self._text.tokens
        n_before = len(tokens) - 1
        if n_before < 2 * self._n + self._m:
            return NO_DRAFT
        place = self._match(n_before - self._n - self._m - 1)
        if place == 0:
            return NO_DRAFT
        wanted = tuple(tokens[-self._n :])
        key = self._keys.get(wanted)
        if key is None:
            key = self._keys[wanted] = _Key(place, n_accepted=self._m)
        key.n_hits += 1
        if self._min_hits is None:
            n_copied, self._last = key.n_accepted, (key, 0)
        else:
            n_copied = self._best_value(key, place)
        begin = place + self._n
        return Draft(tuple(tokens[begin : begin + min(self._m, n_copied, n_max)]))

    def judge(self, n_accepted: int) -> None:
        """The next draft of this key, or of this value of it, is that long."""
        if self._last is None:
            return
        key, which = self._last
        if self._min_hits is None:
            key.n_accepted = n_accepted
        else:
            key.values[which].n_accepted = n_accepted

    def _slot(self, place: int) -> int:
        """Where the table keeps the n-gram at a place."""
        end = place + self._n
        return ((self._prefixes[end] - self._prefixes[place] * self._power) & _WORD) % self._table.size

    def _match(self, end: int) -> int:
        """An earlier place of the last tokens, below ``end``; 0 for none. What lies below is in the table then."""
        tokens, n = self._text.tokens, self._n
        last = len(tokens) - n
        found = int(self._table[self._slot(last)])
        if not (0 < found < end and tokens[found : found + n] == tokens[last:]):
            found = next((at for at in self._text.before(last) if at < end), 0)
            found = found if found >= self._n_indexed else 0
        for at in range(end - 1, self._n_indexed - 1, -1):
            slot = self._slot(at)
            if self._table[slot] == 0:
                self._table[slot] = at
        self._n_indexed = max(self._n_indexed, end)
        return found

    def _best_value(self, key: _Key, place: int) -> int:
        """How many tokens to copy: none where the key was met too rarely or was followed by this and that."""
        assert self._min_hits is not None
        if key.n_hits < self._min_hits:
            return 0
        self._count(key, place)
        counts = [value.n_counted for value in key.values]
        most = max(counts)
        others = sum(counts) - most
        if others > 0 and most < 2 * others:
            return 0
        which = counts.index(most)
        self._last = key, which
        return key.values[which].n_accepted

    def _count(self, key: _Key, place: int) -> None:
        """Count what followed the key at each of its places up to this one."""
        places = [place]
        for at in self._text.before(place):
            if at < key.counted_to:
                break
            places.append(at)
        for at in reversed(places):
            self._count_value(key, at + self._n)
        key.counted_to = place

    def _count_value(self, key: _Key, place: int) -> None:
        """Count the value at a place; a fifth one is not counted."""
        tokens, m = self._text.tokens, self._m
        wanted = tokens[place : place + m]
        for value in key.values:
            if tokens[value.place : value.place + m] == wanted:
                value.n_counted += 1
                return
        if len(key.values) < MOST_VALUES:
            key.values.append(_Value(place, 1, m))
