"""What was said in a conversation, and what its next turn does to the tokens.

A turn is appended behind the tokens that are there, so that what was said keeps the very tokens it had, unless the
template writes earlier turns in another way once a new one follows: Qwen templates drop the thinking of answers that
a new question makes old. Then the whole is rendered, and the conversation goes back to where the two part.
Holds: a turn counts once its prompt was run. Where the messages are not known (tokens came from elsewhere, or were
cut) a turn is appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pykvstream.errors import Unsupported
from pykvstream.text.chat import Rendered, with_bos
from pykvstream.text.deltas import Answer, AnswerBuilder, ContentDelta, Delta
from pykvstream.text.prompt import ChatPrompt, ChatSetting
from pykvstream.text.reasoning import END_OF_THINKING, OutputParser
from pykvstream.text.tokenizer import Tokenizer

Message = Mapping[str, object]

_PLACEHOLDER = "\ue000the answer\ue001"
_ASKED: Message = {"role": "user", "content": "."}


@dataclass(frozen=True, slots=True)
class Turn:
    """``n_kept`` tokens of the conversation stay; ``prompt`` comes behind them."""

    messages: tuple[Message, ...]
    n_kept: int
    prompt: ChatPrompt

    def marks(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Where the conversation may be gone back to: this turn's beginning, and its last two messages'.

        Templates open each message with the same special token.
        """
        ids = self.prompt.ids
        opening = next((token for token in ids if tokenizer.is_special(token)), None)
        messages = [self.n_kept + i for i, token in enumerate(ids) if token == opening]
        return (self.n_kept, *messages[-2:])


class Transcript:
    """The messages of one conversation, None where they are not known, and the answer in the making."""

    __slots__ = ("_answer", "_is_behind", "_is_thinking", "_messages", "_parser")

    def __init__(self) -> None:
        self._messages: tuple[Message, ...] | None = None
        self._answer: AnswerBuilder | None = None
        self._parser: OutputParser | None = None
        self._is_behind = False
        self._is_thinking = False

    @property
    def is_behind(self) -> bool:
        """Whether tokens were taken away for a turn that did not come to be."""
        return self._is_behind

    @property
    def answer(self) -> Answer | None:
        """The last answer, as far as it has come."""
        return None if self._answer is None else self._answer.answer()

    def forget(self) -> None:
        """The tokens changed without a turn."""
        self._messages = self._answer = self._parser = None
        self._is_behind = self._is_thinking = False

    def copy(self) -> Transcript:
        """The transcript of a conversation that goes on from here on its own."""
        child = Transcript()
        child._messages, child._is_behind = self._said(), self._is_behind
        child._is_thinking = self._is_thinking if self._parser is None else self._parser.is_reasoning
        return child

    def dump(self) -> dict[str, object]:
        """What ``of`` makes a copy from: values that JSON can hold where the messages are such."""
        child = self.copy()
        messages = None if child._messages is None else [dict(message) for message in child._messages]
        return {"messages": messages, "is_behind": child._is_behind, "is_thinking": child._is_thinking}

    @classmethod
    def of(cls, dumped: Mapping[str, object]) -> Transcript | None:
        """The transcript that ``dump`` described; None for what it cannot have written."""
        messages, is_behind, is_thinking = (dumped.get(key, ...) for key in ("messages", "is_behind", "is_thinking"))
        if not isinstance(is_behind, bool) or not isinstance(is_thinking, bool):
            return None
        made = cls()
        made._is_behind, made._is_thinking = is_behind, is_thinking
        if messages is None:
            return made
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return None
        made._messages = tuple(messages)
        return made

    def first(self, tokenizer: Tokenizer, messages: Sequence[Message], setting: ChatSetting) -> Turn:
        """The turn that begins a conversation."""
        self.forget()
        self._messages = ()
        rendered = setting.render(messages)
        ids = with_bos(tokenizer, rendered.encode(tokenizer))
        return Turn(tuple(messages), 0, setting.prompt(tokenizer, rendered, ids))

    def next(
        self, tokenizer: Tokenizer, tokens: Sequence[int], messages: Sequence[Message], setting: ChatSetting
    ) -> Turn:
        """The turn that follows behind ``tokens``."""
        self.finish()
        said = self._said()
        if said is not None and (self._is_behind or _is_rewritten(said, messages, setting)):
            rendered = setting.render([*said, *messages])
            ids = with_bos(tokenizer, rendered.encode(tokenizer))
            n_kept = _common(tokens, ids)
            prompt = setting.prompt(tokenizer, rendered, ids[n_kept:])
        else:
            n_kept = len(tokens)
            rendered, ids = self._appended(tokenizer, tokens, messages, setting)
            prompt = setting.prompt(tokenizer, rendered, ids)
        return Turn(tuple(messages), n_kept, prompt)

    def cut(self) -> None:
        """The tokens went back to what the next turn keeps."""
        self._is_behind = True

    def begin(self, turn: Turn) -> None:
        """The prompt of a turn was run; its answer comes now."""
        said = self._said()
        self._messages = None if said is None else (*said, *turn.messages)
        self._answer = AnswerBuilder()
        self._parser = turn.prompt.parser()
        self._is_behind = self._is_thinking = False

    def add(self, text: str) -> tuple[Delta, ...]:
        """Further text of the answer, taken apart."""
        if self._parser is not None:
            return self._collect(self._parser.push(text))
        return self._collect([ContentDelta(text)] if text else [])

    def finish(self) -> tuple[Delta, ...]:
        """The answer is over: what was kept back. A second call gives nothing."""
        parser, self._parser = self._parser, None
        if parser is None:
            return ()
        self._is_thinking = parser.is_reasoning
        return self._collect(parser.finish())

    def _collect(self, deltas: Sequence[Delta]) -> tuple[Delta, ...]:
        if self._answer is not None:
            self._answer.add(deltas)
        return tuple(deltas)

    def _said(self) -> tuple[Message, ...] | None:
        if self._messages is None or self._answer is None:
            return self._messages
        return (*self._messages, self._answer.answer().as_message())

    def _appended(
        self, tokenizer: Tokenizer, tokens: Sequence[int], messages: Sequence[Message], setting: ChatSetting
    ) -> tuple[Rendered, list[int]]:
        """What the template writes behind an answer, less the end that the model wrote itself."""
        said: list[Message] = [_ASKED, {"role": "assistant", "content": _PLACEHOLDER}]
        rendered = _behind_answer(setting.render([*said, *messages]))
        ids = rendered.encode(tokenizer)
        if tokens and tokens[-1] in tokenizer.eog_ids:
            alone = _behind_answer(setting.render(said, is_answered=False)).text
            ending = rendered.text[: _common(rendered.text, alone)]
            n_ending = len(tokenizer.encode(ending, specials=True))
            first = next((i for i, token in enumerate(ids[:n_ending]) if token in tokenizer.eog_ids), -1)
            return rendered, ids[first + 1 :]
        if self._is_thinking:
            return rendered, [*tokenizer.encode(END_OF_THINKING, specials=True), *ids]
        return rendered, ids


def _behind_answer(rendered: Rendered) -> Rendered:
    at = rendered.text.find(_PLACEHOLDER)
    if at < 0:
        raise Unsupported("this chat template changes what the assistant said; its conversations cannot go on")
    return rendered.from_index(at + len(_PLACEHOLDER))


def _is_rewritten(said: Sequence[Message], messages: Sequence[Message], setting: ChatSetting) -> bool:
    """Whether the template writes what was said in another way once the next turn follows."""
    if setting.reasoning.preserve or not setting.is_taken_apart:
        return False
    before = setting.render(said, is_answered=False).text
    return not setting.render([*said, *messages]).text.startswith(before)


def _common(left: Sequence[object], right: Sequence[object]) -> int:
    """How many items both begin with."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
