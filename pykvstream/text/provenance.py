"""Strings that know which of their characters the chat template wrote.

A ``Marked`` string carries one byte for each character: 1 where the template (or the vocabulary) wrote it, 0
where it came with the messages. The operations that templates put prompts together with keep the marks; an
operation that is not listed here returns a plain string, which counts as written by nobody: losing a mark
never makes message content trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex


def marks_of(text: str) -> bytes:
    """Return one byte a character, 1 where the template wrote it."""
    return text._marks if isinstance(text, Marked) else bytes(len(text))


def trusted(text: str) -> Marked:
    """Return ``text`` with every character marked as the template's."""
    return Marked(text, b"\1" * len(text))


def join(separator: str, parts: Iterable[str]) -> str:
    """``separator.join(parts)`` that keeps the marks of both."""
    pieces = list(parts)
    text = str.join(separator, pieces)
    if isinstance(separator, Marked) or any(isinstance(p, Marked) for p in pieces):
        return Marked(text, marks_of(separator).join(marks_of(p) for p in pieces))
    return text


class Marked(str):
    """A string with marks; equal to, and hashed as, the plain string."""

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, text: str, marks: bytes | None = None) -> Marked:
        self = super().__new__(cls, text)
        self._marks = bytes(len(text)) if marks is None else marks
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Marked(str.__add__(self, other), self._marks + marks_of(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Marked(str.__add__(other, self), marks_of(other) + self._marks)

    def __mul__(self, times: SupportsIndex) -> str:
        return Marked(str.__mul__(self, times), self._marks * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        marks = self._marks[key] if isinstance(key, slice) else bytes([self._marks[key]])
        return Marked(str.__getitem__(self, key), marks)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._cut(str.splitlines(self, keepends=True), "")
        lengths = map(len, str.splitlines(self, keepends))
        return [line[:length] for line, length in zip(lines, lengths, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._cut(str.partition(self, sep), "")
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._cut(str.rpartition(self, sep), "")
        return head, middle, tail

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def title(self) -> str:
        return self._same_length(str.title(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))

    def join(self, parts: Iterable[str], /) -> str:
        return join(self, parts)

    def _same_length(self, text: str) -> str:
        # Beyond ASCII a character may change into several, and no mark could be told from its neighbour's.
        return Marked(text, self._marks) if self.isascii() else text

    def _cut(self, pieces: Iterable[str], separator: str | None) -> list[str]:
        """Give marks to the pieces that splitting this string left, in order.

        Between two pieces stands ``separator``, or white space where it is None: then a piece starts at its
        first occurrence, because none but the first starts with white space.
        """
        cut: list[str] = []
        at = 0
        for piece in pieces:
            if separator is None:
                at = str.find(self, piece, at)
            cut.append(self[at : at + len(piece)])
            at += len(piece) + len(separator or "")
        return cut
