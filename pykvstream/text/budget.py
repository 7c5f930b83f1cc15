"""What a chat template may spend: a template is part of an untrusted file.

Time is bounded by counting, not by a clock, so that the same template always gives the same result: every
loop round, call, filter, operator and output pays before it works, in proportion to what it is about to
touch.

Units: characters are Unicode code points; a step is about a microsecond or less.
"""

from __future__ import annotations

from pykvstream.errors import InvalidArgument

MAX_SOURCE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 20
MAX_BUILT_CHARS = 1 << 24
MAX_STEPS = 1 << 20
MAX_ITEMS = 1 << 17
MAX_INT_BITS = 4096
MAX_WIDTH = 1000
MAX_DEPTH = 100

_READ_PER_STEP = 128
_COPIED_PER_STEP = 1024
_STEPS_PER_CHAR = 0.5
"""What the caller's own characters add: an honest template walks a message a few times, each time for 1/128 of it."""


class Budget:
    """Counts one rendering down; grows with the characters and values that the caller put in."""

    __slots__ = ("_built", "_emitted", "_max_built", "_max_chars", "_max_items", "_max_steps", "_steps")

    def __init__(self, n_chars: int, n_values: int) -> None:
        self._max_chars = MAX_OUTPUT_CHARS + 8 * n_chars
        self._emitted = 0
        self._built = self._max_built = MAX_BUILT_CHARS + 128 * n_chars
        self._steps = self._max_steps = MAX_STEPS + 256 * n_values + int(_STEPS_PER_CHAR * n_chars)
        self._max_items = MAX_ITEMS + n_values + n_chars

    def step(self, n: int = 1) -> None:
        """Pay for ``n`` units of work."""
        self._steps -= n
        if self._steps < 0:
            raise InvalidArgument(f"the chat template runs too long (more than {self._max_steps} steps)")

    def touch(self, value: object) -> None:
        """Pay for reading ``value`` without following what it holds."""
        if isinstance(value, str):
            self.step(1 + len(value) // _READ_PER_STEP)
        elif isinstance(value, dict | list | tuple | range):
            self.step(1 + len(value))
        else:
            self.step()

    def walk(self, value: object) -> None:
        """Pay for ``value`` and all it holds, counting shared parts as often as they would be read.

        Refuses what is nested too deep for the recursion of hashing, comparing and printing.
        """
        level = [value]
        for _ in range(MAX_DEPTH):
            below: list[object] = []
            for here in level:
                self.touch(here)
                if isinstance(here, dict):
                    below += here.keys()
                    below += here.values()
                elif isinstance(here, list | tuple):
                    below += here
            if not below:
                return
            level = below
        raise InvalidArgument(f"the chat template nests values more than {MAX_DEPTH} deep")

    def chars(self, n: int) -> None:
        """Refuse to build a string of ``n`` characters where it or all strings together are too long."""
        self.step(1 + n // _COPIED_PER_STEP)
        if n > self._max_chars:
            message = f"a text of {n} characters, at most {self._max_chars} may be"
            raise InvalidArgument(f"the chat template builds too much text ({message})")
        self._built -= n
        if self._built < 0:
            message = f"more than {self._max_built} characters in all its steps together"
            raise InvalidArgument(f"the chat template builds too much text ({message})")

    def emit(self, n: int) -> None:
        """Refuse ``n`` more characters of prompt where the whole becomes too long."""
        self._emitted += n
        if self._emitted > self._max_chars:
            raise InvalidArgument(f"the chat template writes more than {self._max_chars} characters")

    def items(self, n: int) -> None:
        """Refuse to build a container of ``n`` items where it is too long."""
        self.step(1 + n)
        if n > self._max_items:
            raise InvalidArgument(f"the chat template builds {n} items, at most {self._max_items} may be")
