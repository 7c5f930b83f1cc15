"""Stop strings found across the pieces of a stream, whatever the pieces are.

Order: the stop that is complete first wins; of those complete at the same character, the longest. Text before
it is emitted, the stop itself and what follows are not. Because the rule looks only at characters, cutting
the same text into other pieces gives the same result.
Holds: the longest end of the text that may still grow into a stop is kept back; it is shorter than that stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykvstream.errors import InvalidArgument


def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix length, the longest proper prefix that is also its end (Knuth-Morris-Pratt)."""
    borders = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length]
        length += stop[length] == char
        borders.append(length)
    return tuple(borders)


class StopMatcher:
    """Watches a stream for any of ``stops``; linear in the text for each stop."""

    __slots__ = ("_borders", "_held", "_matched", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not isinstance(stops, Sequence):
            have = "one string" if isinstance(stops, str) else type(stops).__name__
            raise InvalidArgument(f"stops must be a sequence of strings, have {have}")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InvalidArgument("a stop string must be a string that is not empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the stream, None so far."""
        return self._matched

    def push(self, piece: str) -> tuple[str, bool]:
        """Add ``piece``; return the text that is now certain and whether a stop was found.

        Once stopped, nothing more is emitted.
        """
        if self._matched is not None:
            return "", True
        if not self._stops:
            return piece, False
        text = self._held + piece
        for at, char in enumerate(piece, len(self._held) + 1):
            found = self._advance(char)
            if found is not None:
                self._matched, self._held = found, ""
                return text[: at - len(found)], True
        keep = max(self._states)
        emit = text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        return emit, False

    def flush(self) -> str:
        """Return what was kept back when the stream ends without a stop, and start afresh."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        self._matched = None
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every stop; return the longest that it completes."""
        found: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state]
            state += stop[state] == char
            self._states[i] = state
            if state == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
        return found
