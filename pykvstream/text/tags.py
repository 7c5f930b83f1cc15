"""Tags looked for in a text that comes in pieces.

Holds: what cannot be decided yet is the longest end of the text that begins a tag; it is shorter than the tag.
Looking is linear in the text, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class TagSet:
    """Some tags, none of which begins another."""

    __slots__ = ("_longest", "_pattern", "_tags")

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tuple(tags)
        self._pattern = re.compile("|".join(map(re.escape, tags))) if tags else None
        self._longest = max(map(len, tags), default=0)

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """Where the first tag from ``at`` on begins, and the tag; without one, where an unfinished one may begin."""
        found = self._pattern.search(text, at) if self._pattern is not None else None
        if found is not None:
            return found.start(), found[0]
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if self.may_begin(text, start):
                return start, None
        return len(text), None

    def match(self, text: str, at: int) -> str | None:
        """The tag that stands at ``at``."""
        found = self._pattern.match(text, at) if self._pattern is not None else None
        return None if found is None else found[0]

    def may_begin(self, text: str, at: int) -> bool:
        """Whether what stands from ``at`` to the end is the beginning of a tag; nothing at all may be one."""
        if len(text) - at >= self._longest:
            return False
        rest = text[at:]
        return any(tag.startswith(rest) for tag in self._tags)
