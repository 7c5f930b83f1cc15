"""What a model's answer is made of, as it comes and as a whole.

Order: an answer's deltas are its reasoning, then content and tool calls in the order in which they were written; a
call begins with its name, goes on with fragments of its arguments, and ends.
Holds: the fragments of a call that ended complete concatenate to one JSON object, whatever the pieces were. Of one
that did not they are a beginning of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Further text of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Further text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Tool call number ``index`` of the answer calls ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """Further JSON text of the arguments of call ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Nothing more comes for call ``index``; it is complete where the model wrote it to its end."""

    index: int
    is_complete: bool


Delta = ReasoningDelta | ContentDelta | CallStart | ArgumentsDelta | CallEnd


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas, neighbours that say more of the same made one."""
    out: list[Delta] = []
    for _, group in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "index", 0))):
        same = list(group)
        text = "".join(map(_text, same))
        match same[0]:
            case ReasoningDelta():
                out.append(ReasoningDelta(text))
            case ContentDelta():
                out.append(ContentDelta(text))
            case ArgumentsDelta(index):
                out.append(ArgumentsDelta(index, text))
            case _:
                out += same
    return out


def _text(delta: Delta) -> str:
    return delta.text if isinstance(delta, ReasoningDelta | ContentDelta | ArgumentsDelta) else ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` is JSON text, cut off where the call is not complete."""

    name: str
    arguments: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, taken apart."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]

    def as_message(self) -> dict[str, object]:
        """The message that chat templates take; a call that was cut off is left out, it was never made."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in self.tool_calls
            if call.is_complete
        ]
        if calls:
            message["tool_calls"] = calls
        return message


class AnswerBuilder:
    """Collects deltas into an ``Answer``."""

    __slots__ = ("_arguments", "_content", "_is_complete", "_names", "_reasoning")

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._is_complete: list[bool] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take in what came next."""
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case CallStart(_, name):
                    self._names.append(name)
                    self._arguments.append([])
                    self._is_complete.append(False)
                case ArgumentsDelta(index, text):
                    self._arguments[index].append(text)
                case CallEnd(index, is_complete):
                    self._is_complete[index] = is_complete

    def answer(self) -> Answer:
        """What has come so far."""
        calls = zip(self._names, self._arguments, self._is_complete, strict=True)
        return Answer(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tuple(ToolCall(name, "".join(texts), is_complete) for name, texts, is_complete in calls),
        )
