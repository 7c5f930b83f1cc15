"""An answer taken apart as it comes: reasoning, content, tool calls.

Reasoning goes up to the first ``</think>`` or, where there are tools, ``<tool_call>``; line breaks at both of its
ends are not part of it. The rest is content and calls; line breaks before the first of it and around calls are not
part of it either.
Source: spec/model.md 7.4.
Order: deltas depend on the characters alone: the same text in other pieces gives the same deltas, cut elsewhere.
Holds: kept back is only what is not decided: the beginning of a tag, line breaks that the next character decides
about, a call whose name is not whole, and a value that is no string.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from pykvstream.text.deltas import ContentDelta, Delta, ReasoningDelta, merged
from pykvstream.text.schemas import ToolSchemas
from pykvstream.text.tags import TagSet
from pykvstream.text.tools import CALL_OPEN, CallParser, Progress, Window

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
END_OF_THINKING = f"\n{THINK_CLOSE}\n\n"

_OPEN = TagSet([THINK_OPEN])
_SPACE = re.compile(r"\s*")


class Start(Enum):
    """Where an answer begins: inside the thinking that the prompt opened, behind it, or as the model pleases."""

    REASONING = auto()
    CONTENT = auto()
    EITHER = auto()


class _State(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class _Lines:
    """Text without the line breaks before it; those behind it wait for what follows."""

    __slots__ = ("_is_leading", "_n_held")

    def __init__(self) -> None:
        self._is_leading = True
        self._n_held = 0

    def push(self, text: str) -> str:
        if self._is_leading:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        n_before, n_behind = self._n_held, len(text) - len(body)
        if not body:
            self._n_held += n_behind
            return ""
        self._is_leading = False
        self._n_held = n_behind
        return "\n" * n_before + body

    def release(self) -> str:
        """The line breaks that were kept, where they turn out to be text."""
        n_held, self._n_held = self._n_held, 0
        return "\n" * n_held


class OutputParser:
    """Takes one answer apart. ``schemas`` None: no tools were given, and calls are text like any other."""

    __slots__ = ("_calls", "_content", "_content_tags", "_reasoning", "_reasoning_tags", "_skipped", "_state",
                 "_window")  # fmt: skip

    def __init__(self, start: Start, schemas: ToolSchemas | None = None) -> None:
        states = {Start.REASONING: _State.REASONING, Start.CONTENT: _State.CONTENT, Start.EITHER: _State.START}
        self._state = states[start]
        self._calls = CallParser(schemas) if schemas is not None else None
        call_tags = [CALL_OPEN] if schemas is not None else []
        self._reasoning_tags = TagSet([THINK_CLOSE, *call_tags])
        self._content_tags = TagSet(call_tags)
        self._window = Window()
        self._reasoning = _Lines()
        self._content = _Lines()
        self._skipped: list[str] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is still part of the thinking."""
        return self._state is _State.REASONING

    def push(self, text: str) -> list[Delta]:
        """What became certain with ``text``."""
        deltas: list[Delta] = []
        self._window.push(text)
        while self._step(deltas) is Progress.GOES_ON:
            pass
        return merged(deltas)

    def finish(self) -> list[Delta]:
        """What was kept back, once the answer is over."""
        deltas: list[Delta] = []
        if self._state is _State.CALL and self._calls is not None:
            self._calls.finish(self._window, deltas)
            self._end_call(self._calls, deltas)
        rest = "".join(self._skipped) + self._window.take(len(self._window.text))
        if self._state is _State.REASONING:
            self._add_reasoning(rest, deltas)
        else:
            self._add_content(rest, deltas)
            if held := self._content.release():
                deltas.append(ContentDelta(held))
        return merged(deltas)

    def _step(self, deltas: list[Delta]) -> Progress:
        match self._state:
            case _State.START:
                return self._start(deltas)
            case _State.REASONING:
                return self._read_reasoning(deltas)
            case _State.CONTENT:
                return self._read_content(deltas)
            case _State.CALL:
                return self._read_call(deltas)

    def _start(self, deltas: list[Delta]) -> Progress:
        window = self._window
        self._skipped.append(window.take_match(_SPACE))
        tag = _OPEN.match(window.text, window.at)
        if tag is None and _OPEN.may_begin(window.text, window.at):
            return Progress.WAITS
        skipped = "".join(self._skipped)
        self._skipped.clear()
        if tag is not None:
            window.at += len(tag)
            self._state = _State.REASONING
        else:
            self._add_content(skipped, deltas)
            self._state = _State.CONTENT
        return Progress.GOES_ON

    def _read_reasoning(self, deltas: list[Delta]) -> Progress:
        end, tag = self._reasoning_tags.find(self._window.text, self._window.at)
        self._add_reasoning(self._window.take(end), deltas)
        return self._pass_tag(tag)

    def _read_content(self, deltas: list[Delta]) -> Progress:
        end, tag = self._content_tags.find(self._window.text, self._window.at)
        self._add_content(self._window.take(end), deltas)
        return self._pass_tag(tag)

    def _pass_tag(self, tag: str | None) -> Progress:
        if tag is None:
            return Progress.WAITS
        self._window.at += len(tag)
        self._state = _State.CONTENT
        if tag == CALL_OPEN and self._calls is not None:
            self._calls.begin()
            self._state = _State.CALL
        return Progress.GOES_ON

    def _read_call(self, deltas: list[Delta]) -> Progress:
        if self._calls is None:
            return Progress.WAITS
        progress = self._calls.step(self._window, deltas)
        if progress is not Progress.ENDED:
            return progress
        self._end_call(self._calls, deltas)
        return Progress.GOES_ON

    def _end_call(self, calls: CallParser, deltas: list[Delta]) -> None:
        if calls.has_begun:
            # Line breaks before a call were there for its sake; so are those behind it.
            self._content = _Lines()
        self._add_content(calls.leftover, deltas)
        self._state = _State.CONTENT

    def _add_reasoning(self, text: str, deltas: list[Delta]) -> None:
        if certain := self._reasoning.push(text):
            deltas.append(ReasoningDelta(certain))

    def _add_content(self, text: str, deltas: list[Delta]) -> None:
        if certain := self._content.push(text):
            deltas.append(ContentDelta(certain))


class ReasoningBudget:
    """Ends the thinking after a number of tokens, by tokens that come in place of chosen ones.

    Order: ``forced`` before a token is chosen, ``spend`` after it was. ``</think>`` itself and what opens the
    thinking cost nothing. A character that is not whole at the end of the budget is finished first, which takes
    three tokens at most.
    """

    __slots__ = ("_closing", "_is_open", "_left", "_parser", "_queue")

    def __init__(self, n_tokens: int, closing: Sequence[int], parser: OutputParser) -> None:
        self._left = n_tokens
        self._closing = tuple(closing)
        self._parser = parser
        self._is_open = True
        self._queue: deque[int] = deque()
        self._close_if_spent(is_whole=True)

    def forced(self) -> int | None:
        """The token that must come next, None where the model may choose."""
        return self._queue.popleft() if self._queue else None

    def spend(self, text: str, *, is_whole: bool) -> None:
        """Count a token; ``text`` is what became readable with it, ``is_whole`` that no character is cut in it."""
        was_reasoning = self._parser.is_reasoning
        self._parser.push(text)
        if self._is_open:
            self._left -= was_reasoning
            self._close_if_spent(is_whole)

    def _close_if_spent(self, is_whole: bool) -> None:
        if self._left <= 0 and is_whole and self._parser.is_reasoning:
            self._queue.extend(self._closing)
            self._is_open = False
