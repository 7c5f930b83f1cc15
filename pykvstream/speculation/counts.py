"""How often which token followed which n-gram, and the bytes of a file of it.

Layout of the file, little endian: for each n-gram four int32 tokens, -1 behind a shorter one; the number of tokens that
followed it; for each its id and its count.
Holds: ``NgramCounts``. Equal counts have equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from pykvstream.errors import FormatError

LONGEST = 4
_PAD = -1
_HEAD = struct.Struct("<4ii")
_PAIR = struct.Struct("<ii")
_LARGEST = 2**31 - 1
_NOTHING: Mapping[int, int] = MappingProxyType({})


class NgramCounts:
    """Counts by n-gram of 1 to 4 tokens and the token behind it.

    Most n-grams are followed by one token once; then the token stands in place of a table.
    """

    __slots__ = ("_followers",)

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], int | dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._followers)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._followers)

    def of(self, ngram: tuple[int, ...]) -> Mapping[int, int]:
        """The tokens that followed, with their counts."""
        found = self._followers.get(ngram)
        if found is None:
            return _NOTHING
        return {found: 1} if isinstance(found, int) else found

    def add(self, ngram: tuple[int, ...], token: int, count: int = 1) -> None:
        """Count a token behind an n-gram; a count ends at what the file can hold."""
        found = self._followers.get(ngram)
        if found is None and count == 1:
            self._followers[ngram] = token
            return
        if found is None or isinstance(found, int):
            found = self._followers[ngram] = {} if found is None else {found: 1}
        found[token] = min(found.get(token, 0) + count, _LARGEST)

    def remove(self, ngram: tuple[int, ...], token: int) -> None:
        """Take back what ``add`` counted once."""
        found = self._followers[ngram]
        if isinstance(found, int) or found == {token: 1}:
            del self._followers[ngram]
        elif found[token] == 1:
            del found[token]
        else:
            found[token] -= 1

    def observe(self, tokens: Sequence[int], first: int) -> None:
        """Count the tokens of a text from the place ``first`` on behind the n-grams before them."""
        for at in range(first, len(tokens)):
            for n in range(1, min(LONGEST, at) + 1):
                self.add(tuple(tokens[at - n : at]), tokens[at])

    def forget(self, tokens: Sequence[int], first: int) -> None:
        """Take back what ``observe`` counted."""
        for at in range(first, len(tokens)):
            for n in range(1, min(LONGEST, at) + 1):
                self.remove(tuple(tokens[at - n : at]), tokens[at])

    def copy(self) -> NgramCounts:
        """The same counts, to go on alone."""
        made = NgramCounts()
        made._followers = {
            ngram: found if isinstance(found, int) else dict(found) for ngram, found in self._followers.items()
        }
        return made

    def merge(self, other: NgramCounts) -> None:
        """Add all counts of another."""
        for ngram in other:
            for token, count in other.of(ngram).items():
                self.add(ngram, token, count)

    def largest_token(self) -> int:
        """The largest id of any token in it; -1 where it is empty."""
        return max((max(*ngram, *self.of(ngram)) for ngram in self), default=-1)

    def to_bytes(self) -> bytes:
        """The bytes of the file."""
        return b"".join(_record(ngram, self.of(ngram)) for ngram in sorted(self))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> NgramCounts:
        """Take the bytes of a file. Raises ``FormatError`` with ``name`` and the offset of what is wrong."""
        made = cls()
        at = 0
        while at < len(data):
            at = made._read(data, at, f"{name}: offset {at}")
        return made

    def _read(self, data: bytes, at: int, where: str) -> int:
        """Take in the record at an offset; returns where the next one begins."""
        if at + _HEAD.size > len(data):
            raise FormatError(f"{where}: {len(data) - at} bytes are left, an n-gram has {_HEAD.size}")
        *padded, n_followers = _HEAD.unpack_from(data, at)
        ngram = tuple(token for token in padded if token != _PAD)
        if not ngram or min(ngram) < 0 or padded != [*ngram, *[_PAD] * (LONGEST - len(ngram))]:
            raise FormatError(f"{where}: {padded} is no n-gram")
        if ngram in self._followers:
            raise FormatError(f"{where}: the n-gram {list(ngram)} stands there twice")
        begin = at + _HEAD.size
        end = begin + _PAIR.size * n_followers
        if n_followers < 1 or end > len(data):
            raise FormatError(f"{where}: {n_followers} tokens follow, {len(data) - begin} bytes are left")
        seen: set[int] = set()
        for token, count in _PAIR.iter_unpack(data[begin:end]):
            if token < 0 or count < 1 or token in seen:
                raise FormatError(f"{where}: token {token} with count {count}" + " again" * (token in seen))
            seen.add(token)
            self.add(ngram, token, count)
        return int(end)


def _record(ngram: tuple[int, ...], followers: Mapping[int, int]) -> bytes:
    padded = (*ngram, *[_PAD] * (LONGEST - len(ngram)))
    pairs = b"".join(_PAIR.pack(token, count) for token, count in sorted(followers.items()))
    return _HEAD.pack(*padded, len(followers)) + pairs
