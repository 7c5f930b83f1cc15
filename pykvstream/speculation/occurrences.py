"""Where the n-grams of a text occur: an index that grows and shrinks with it, one step a token.

Order: the occurrences of an n-gram form a chain from the newest to the oldest.
Holds: ``Occurrences``. Answers are exact: a hash leads to a chain, and tokens are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_PRIME = (1 << 61) - 1
_BASE = 0x1F3D5B79A2C4E687 % _PRIME


class Occurrences:
    """A text, and the places of every ``n`` tokens in a row of it."""

    __slots__ = ("_hashes", "_latest", "_n", "_power", "_prefixes", "_previous", "tokens")

    def __init__(self, n: int) -> None:
        self.tokens: list[int] = []
        self._n = n
        self._power = pow(_BASE, n, _PRIME)
        self._prefixes = [0]
        self._hashes: list[int] = []  # of the n-gram at each place
        self._previous: list[int] = []  # the place before it in its chain, -1 at the end
        self._latest: dict[int, int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""
        self.tokens += tokens
        for token in tokens:
            self._prefixes.append((self._prefixes[-1] * _BASE + token + 1) % _PRIME)
            at = len(self._hashes)
            if at + self._n < len(self._prefixes):
                name = (self._prefixes[-1] - self._prefixes[at] * self._power) % _PRIME
                self._hashes.append(name)
                self._previous.append(self._latest.get(name, -1))
                self._latest[name] = at

    def truncate(self, n_tokens: int) -> None:
        """The text is its first tokens."""
        n_kept = max(n_tokens - self._n + 1, 0)
        while len(self._hashes) > n_kept:
            name, before = self._hashes.pop(), self._previous.pop()
            if before < 0:
                del self._latest[name]
            else:
                self._latest[name] = before
        del self.tokens[n_tokens:]
        del self._prefixes[n_tokens + 1 :]

    def fork(self) -> Occurrences:
        """A copy that goes on alone."""
        child = Occurrences(self._n)
        child.tokens = list(self.tokens)
        child._prefixes = list(self._prefixes)
        child._hashes = list(self._hashes)
        child._previous = list(self._previous)
        child._latest = dict(self._latest)
        return child

    def is_new(self, place: int) -> bool:
        """Whether the n-gram at ``place`` has no earlier place; True may be missed where two share a hash."""
        return self._previous[place] < 0

    def before(self, place: int) -> Iterator[int]:
        """The earlier places of the n-gram at ``place``, newest first."""
        wanted = self.tokens[place : place + self._n]
        at = self._previous[place]
        while at >= 0:
            if self.tokens[at : at + self._n] == wanted:
                yield at
            at = self._previous[at]
