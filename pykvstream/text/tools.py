"""Tool calls out of a text that comes in pieces.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value ends at the first ``</parameter>`` that stands alone on its line; the line breaks around it are not the
value's. Text that must be a string goes out as it comes; a value of another kind is known at its end alone.
Source: spec/model.md 7.4.
Holds: what is no call after all is given back as text as long as nothing of it was emitted, which begins with the
name. Every character is looked at a fixed number of times.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from pykvstream.text.deltas import ArgumentsDelta, CallEnd, CallStart, Delta
from pykvstream.text.schemas import ANY, STRING, Kinds, ToolSchemas, json_text
from pykvstream.text.tags import TagSet

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
FUNCTION_OPEN = "<function="
_FUNCTION_CLOSE = "</function>"
_PARAMETER_OPEN = "<parameter="
_VALUE_CLOSE = "\n</parameter>\n"

_FUNCTION = TagSet([FUNCTION_OPEN])
_BODY = TagSet([_PARAMETER_OPEN, _FUNCTION_CLOSE, CALL_CLOSE])
_AFTER = TagSet([CALL_CLOSE, FUNCTION_OPEN])
_VALUE_END = TagSet([_VALUE_CLOSE])
_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[^<>\n]*")


class Window:
    """The text that has come and is not decided yet, from ``at`` on."""

    __slots__ = ("at", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0

    @property
    def is_empty(self) -> bool:
        return self.at == len(self.text)

    def push(self, text: str) -> None:
        """Add what came next and let go of what is decided."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def take(self, end: int) -> str:
        """The text up to ``end``, which is decided."""
        taken = self.text[self.at : end]
        self.at = end
        return taken

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """What a pattern that matches anywhere takes from here."""
        found = pattern.match(self.text, self.at)
        return "" if found is None else self.take(found.end())


class Progress(Enum):
    """What became of a step: it needs more text, can go on, or the call is over."""

    WAITS = auto()
    GOES_ON = auto()
    ENDED = auto()


class _State(Enum):
    HEAD = auto()
    FUNCTION = auto()
    BODY = auto()
    PARAMETER = auto()
    VALUE_START = auto()
    VALUE = auto()
    AFTER = auto()


class CallParser:
    """Reads what stands behind ``<tool_call>``, call after call of one answer.

    ``leftover``, once a step says ``ENDED``: text that turned out to be no part of a call. ``has_begun``: whether
    anything since ``begin`` was a call.
    """

    __slots__ = ("_index", "_is_first", "_kinds", "_name", "_raw", "_schemas", "_state", "_tool", "_value", "has_begun",
                 "leftover")  # fmt: skip

    def __init__(self, schemas: ToolSchemas) -> None:
        self._schemas = schemas
        self._index = -1
        self._tool = ""
        self._kinds: Kinds = ANY
        self._value: list[str] = []
        self._is_first = True
        self.begin()

    def begin(self) -> None:
        """``<tool_call>`` was read."""
        self._state = _State.HEAD
        self._raw = [CALL_OPEN]
        self._name: list[str] = []
        self.has_begun = False
        self.leftover = ""

    def step(self, window: Window, deltas: list[Delta]) -> Progress:
        """Read as far as one tag."""
        match self._state:
            case _State.HEAD:
                return self._head(window)
            case _State.FUNCTION:
                return self._function(window, deltas)
            case _State.BODY:
                return self._body(window, deltas)
            case _State.PARAMETER:
                return self._parameter(window, deltas)
            case _State.VALUE_START:
                return self._value_start(window)
            case _State.VALUE:
                return self._value_text(window, deltas)
            case _State.AFTER:
                return self._after(window)

    def finish(self, window: Window, deltas: list[Delta]) -> None:
        """The text is over; a call that is not is cut off here."""
        rest = window.take(len(window.text))
        if self._state in (_State.HEAD, _State.FUNCTION):
            self.leftover = "".join((*self._raw, *self._name, rest))
        elif self._state is not _State.AFTER:
            if self._state is _State.VALUE:
                self._add_value(rest, deltas)
                self._emit_typed(deltas)
            deltas.append(CallEnd(self._index, False))

    def _head(self, window: Window) -> Progress:
        self._raw.append(window.take_match(_SPACE))
        if _FUNCTION.match(window.text, window.at) is not None:
            return self._open(window, FUNCTION_OPEN, _State.FUNCTION)
        return self._wait_or_end(_FUNCTION, window)

    def _function(self, window: Window, deltas: list[Delta]) -> Progress:
        progress = self._read_name(window)
        if progress is Progress.GOES_ON:
            self.has_begun = True
            self._index += 1
            self._tool = "".join(self._name)
            self._is_first = True
            self._state = _State.BODY
            deltas.append(CallStart(self._index, self._tool))
        return progress

    def _body(self, window: Window, deltas: list[Delta]) -> Progress:
        window.take_match(_SPACE)
        tag = _BODY.match(window.text, window.at)
        if tag == _PARAMETER_OPEN:
            self._raw = []
            return self._open(window, tag, _State.PARAMETER)
        if tag is not None:
            window.take(window.at + len(tag))
            deltas += [ArgumentsDelta(self._index, "{}" if self._is_first else "}"), CallEnd(self._index, True)]
            self._state = _State.AFTER
            return Progress.ENDED if tag == CALL_CLOSE else Progress.GOES_ON
        self._raw, self._name = [], []
        return self._wait_or_end(_BODY, window, deltas)

    def _parameter(self, window: Window, deltas: list[Delta]) -> Progress:
        progress = self._read_name(window, deltas)
        if progress is Progress.GOES_ON:
            key = "".join(self._name)
            self._kinds = self._schemas.kinds(self._tool, key)
            self._value = []
            quote = '"' if self._kinds == STRING else ""
            opening = "{" if self._is_first else ", "
            self._is_first = False
            self._state = _State.VALUE_START
            deltas.append(ArgumentsDelta(self._index, f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}"))
        return progress

    def _value_start(self, window: Window) -> Progress:
        if window.is_empty:
            return Progress.WAITS
        if window.text[window.at] == "\n":
            window.at += 1
        self._state = _State.VALUE
        return Progress.GOES_ON

    def _value_text(self, window: Window, deltas: list[Delta]) -> Progress:
        end, tag = _VALUE_END.find(window.text, window.at)
        self._add_value(window.take(end), deltas)
        if tag is None:
            return Progress.WAITS
        window.at += len(tag)
        if self._kinds == STRING:
            deltas.append(ArgumentsDelta(self._index, '"'))
        self._emit_typed(deltas)
        self._state = _State.BODY
        return Progress.GOES_ON

    def _after(self, window: Window) -> Progress:
        window.take_match(_SPACE)
        tag = _AFTER.match(window.text, window.at)
        if tag == FUNCTION_OPEN:
            self._raw = []
            return self._open(window, tag, _State.FUNCTION)
        if tag == CALL_CLOSE:
            window.take(window.at + len(tag))
            return Progress.ENDED
        self._raw, self._name = [], []
        return self._wait_or_end(_AFTER, window)

    def _open(self, window: Window, tag: str, state: _State) -> Progress:
        """A tag was read that a name follows; until the name is whole it may turn out to be text."""
        self._raw.append(window.take(window.at + len(tag)))
        self._name = []
        self._state = state
        return Progress.GOES_ON

    def _read_name(self, window: Window, deltas: list[Delta] | None = None) -> Progress:
        self._name.append(window.take_match(_NAME))
        if window.is_empty:
            return Progress.WAITS
        if window.text[window.at] == ">" and any(self._name):
            window.at += 1
            return Progress.GOES_ON
        return self._end(deltas)

    def _wait_or_end(self, tags: TagSet, window: Window, deltas: list[Delta] | None = None) -> Progress:
        return Progress.WAITS if tags.may_begin(window.text, window.at) else self._end(deltas)

    def _end(self, deltas: list[Delta] | None) -> Progress:
        """What stands here belongs to no call; with ``deltas`` the call that is open is cut off."""
        if deltas is not None:
            deltas.append(CallEnd(self._index, False))
        self.leftover = "".join((*self._raw, *self._name))
        return Progress.ENDED

    def _add_value(self, text: str, deltas: list[Delta]) -> None:
        if self._kinds != STRING:
            self._value.append(text)
        elif text:
            deltas.append(ArgumentsDelta(self._index, json.dumps(text, ensure_ascii=False)[1:-1]))

    def _emit_typed(self, deltas: list[Delta]) -> None:
        if self._kinds != STRING:
            deltas.append(ArgumentsDelta(self._index, json_text("".join(self._value), self._kinds)))
