"""Messages to a prompt through the model's own jinja2 template, and on to ids without forged special tokens.

Holds: a special token is recognised only where the template (or the vocabulary, for its first and last
token) wrote every character of it; the same characters inside a message, a tool or a keyword stay text. The
role of a message is the template's where it is one of ``ROLES``, because templates build tokens out of it.
Source: spec/model.md 7.3; the sandbox settings are those with which the templates are published.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from pykvstream.errors import FormatError, InvalidArgument, KvStreamError
from pykvstream.text.budget import MAX_DEPTH, MAX_INT_BITS, Budget
from pykvstream.text.provenance import join, marks_of, trusted
from pykvstream.text.sandbox import PromptEnvironment
from pykvstream.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})

_KEY = "tokenizer.chat_template"
_COMPILE_ERRORS = (SyntaxError, RecursionError, ValueError, OverflowError, MemoryError)
_RENDER_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, NameError,
)  # fmt: skip


@dataclass(slots=True)
class _Inputs:
    """Plain copies of what the caller passed, and how much of it there is."""

    texts: list[str] = field(default_factory=list)
    n_chars: int = 0
    n_values: int = 0

    def copy(self, value: object, path: str, depth: int = 0) -> object:
        """Return ``value`` as dicts, lists, strings and numbers; refuse anything else by its path."""
        self.n_values += 1
        if depth > MAX_DEPTH // 2:
            raise InvalidArgument(f"{path}: nested more than {MAX_DEPTH // 2} deep")
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, str):
            return self._copy_text(value)
        if isinstance(value, int) and value.bit_length() < MAX_INT_BITS // 16:
            return int(value)
        if isinstance(value, Mapping):
            return {self._key(k, path): self.copy(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self.copy(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        raise InvalidArgument(f"{path}: need text, numbers, lists or mappings, have {type(value).__name__}")

    def messages(self, messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Copy ``messages`` and mark the roles that templates know."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise InvalidArgument(f"messages must be a sequence of mappings, have {type(messages).__name__}")
        copies = []
        for i, message in enumerate(messages):
            copy = self.copy(message, f"messages[{i}]", 1)
            if not isinstance(copy, dict) or not isinstance(copy.get("role"), str):
                raise InvalidArgument(f"messages[{i}] must be a mapping with a role")
            if copy["role"] in ROLES:
                copy["role"] = trusted(copy["role"])
            copies.append(copy)
        return copies

    def _copy_text(self, value: str) -> str:
        text = "".join(value) if type(value) is not str else value
        self.texts.append(text)
        self.n_chars += len(text)
        return text

    def _key(self, key: object, path: str) -> str:
        if not isinstance(key, str):
            raise InvalidArgument(f"{path}: need text as key, have {type(key).__name__}")
        return self._copy_text(key)


class ChatTemplate:
    """A compiled chat template; ``bos_token`` and ``eos_token`` are the texts that it may write.

    ``variables`` are the names that it reads from outside.

    Raises ``FormatError`` where the source does not compile. Rendering is bounded (see ``budget``) and raises
    ``InvalidArgument`` where a bound is passed, the template fails, or it refuses the messages itself.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        if not isinstance(source, str):
            raise InvalidArgument(f"a chat template is text, got {type(source).__name__}")
        self.source = source
        self._own = {"bos_token": trusted(bos_token), "eos_token": trusted(eos_token)}
        self._environment = PromptEnvironment()
        self._lock = threading.Lock()
        try:
            self._template = self._environment.from_string(source)
            self.variables = frozenset(find_undeclared_variables(self._environment.parse(source)))
        except KvStreamError:
            raise
        except TemplateSyntaxError as error:
            raise FormatError(f"the chat template: line {error.lineno}: {error.message}", key=_KEY) from None
        except _COMPILE_ERRORS as error:
            raise FormatError(f"the chat template cannot be compiled: {error}", key=_KEY) from None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Return the prompt; further keywords (``enable_thinking=...``) are variables of the template."""
        return self.render_marked(messages, tools, add_generation_prompt, kwargs).text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> Rendered:
        """Return the prompt, with what is needed to encode it."""
        inputs = _Inputs()
        if reserved := kwargs.keys() & self._own.keys():
            raise InvalidArgument(f"{sorted(reserved)[0]} comes from the vocabulary and cannot be passed")
        variables: dict[str, object] = {
            **{name: inputs.copy(value, name) for name, value in kwargs.items()},
            "messages": inputs.messages(messages),
            "tools": inputs.copy(tools, "tools"),
            "add_generation_prompt": bool(add_generation_prompt),
            **self._own,
        }
        with self._lock:
            self._environment.budget = Budget(inputs.n_chars, inputs.n_values)
            text = join("", self._pieces(variables))
        return Rendered("".join(text), marks_of(text), inputs.texts)

    def _pieces(self, variables: dict[str, object]) -> Iterator[str]:
        try:
            for piece in self._template.generate(variables):
                self._environment.budget.emit(len(piece))
                yield piece
        except KvStreamError:
            raise
        except RecursionError:
            raise InvalidArgument("the chat template calls itself too deep") from None
        except _RENDER_ERRORS as error:
            raise InvalidArgument(f"the chat template failed: {error}") from None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, one byte a character that is 1 where the template wrote it, and all inputs."""

    text: str
    marks: bytes
    inputs: Sequence[str]

    def from_index(self, at: int) -> Rendered:
        """What stands from a character on."""
        return Rendered(self.text[at:], self.marks[at:], self.inputs)

    def ends_with(self, ending: str) -> bool:
        """Whether the template wrote ``ending`` last, white space aside."""
        text = self.text.rstrip()
        return text.endswith(ending) and all(self.marks[len(text) - len(ending) : len(text)])

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids, special tokens only where the template wrote them.

        Where a special token's text is neither the template's alone nor inside a message (the template cut,
        changed or glued text in a way that cannot be followed), the prompt is refused with ``InvalidArgument``.
        """
        spans = tokenizer.special_spans(self.text, self.marks)
        unclear = {self.text[start:end] for start, end, _ in set(tokenizer.special_spans(self.text)) - set(spans)}
        for special in unclear:
            if not any(special in given for given in self.inputs):
                message = f"the chat template makes the special token {special!r} out of message content"
                raise InvalidArgument(f"{message}: template and message text cannot be told apart")
        return tokenizer.encode_spans(self.text, spans)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: object,
) -> list[int]:
    """Render ``messages`` and return the token ids, with the leading token where the file asks for one.

    Raises ``InvalidArgument`` as ``Rendered.encode`` does.
    """
    return with_bos(tokenizer, template.render_marked(messages, tools, add_generation_prompt, kwargs).encode(tokenizer))


def with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """``ids`` of a whole conversation, begun with the leading token where the file asks for one."""
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids
