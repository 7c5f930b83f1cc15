"""Prompts that know how their answer begins: reasoning switched on or off, tools, template variables.

Holds: nothing is asked of a template that it does not know: a switch without its variable, tools without their form
are refused by name.
Source: spec/model.md 7.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pykvstream.errors import Unsupported
from pykvstream.text.chat import ChatTemplate, Rendered
from pykvstream.text.reasoning import END_OF_THINKING, THINK_CLOSE, THINK_OPEN, OutputParser, ReasoningBudget, Start
from pykvstream.text.schemas import ToolSchemas
from pykvstream.text.tokenizer import Tokenizer
from pykvstream.text.tools import FUNCTION_OPEN
from pykvstream.text.wishes import Reasoning

SWITCH = "enable_thinking"
KEEPER = "preserve_thinking"


def reasoning_variables(reasoning: Reasoning, template: ChatTemplate) -> dict[str, object]:
    """What the template is told. Raises ``Unsupported`` naming what it does not know."""
    thinks = knows_reasoning(template)
    asked = {
        "reasoning on": reasoning.enabled is True and not thinks,
        # A model without thinking has none to switch off, and stays within every budget of it.
        "reasoning off": reasoning.enabled is False and thinks and SWITCH not in template.variables,
        "reasoning preserve": reasoning.preserve is True and not thinks,
        "reasoning budget": reasoning.budget > 0 and not thinks,
    }
    for what, is_unknown in asked.items():
        if is_unknown:
            missing = f"the variable {SWITCH}" if what == "reasoning off" else f"{SWITCH} or {THINK_OPEN}"
            raise Unsupported(f"{what}: this chat template does not know {missing}")
    told: dict[str, object] = {}
    if reasoning.enabled is not None and SWITCH in template.variables:
        told[SWITCH] = reasoning.enabled
    if reasoning.preserve is not None and KEEPER in template.variables:
        told[KEEPER] = reasoning.preserve
    return told


def knows_reasoning(template: ChatTemplate) -> bool:
    """Whether the model thinks between tags."""
    return SWITCH in template.variables or THINK_OPEN in template.source or THINK_CLOSE in template.source


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """What holds for a whole conversation: its template, tools, reasoning, further variables of the template.

    Raises ``Unsupported`` for what the template does not know, ``InvalidArgument`` for tools without a name.
    """

    template: ChatTemplate
    tools: Sequence[Mapping[str, object]] | None
    reasoning: Reasoning
    variables: Mapping[str, object] | None

    def __post_init__(self) -> None:
        reasoning_variables(self.reasoning, self.template)
        if self.tools is not None:
            ToolSchemas(self.tools)
            if "tools" not in self.template.variables:
                raise Unsupported("tools: this chat template does not know the variable tools")
            if FUNCTION_OPEN not in self.template.source:
                raise Unsupported(f"tools: this chat template has calls of another form than {FUNCTION_OPEN}NAME>")

    @property
    def is_taken_apart(self) -> bool:
        """Whether answers have parts at all."""
        return self.tools is not None or knows_reasoning(self.template)

    def render(self, messages: Sequence[Mapping[str, object]], *, is_answered: bool = True) -> Rendered:
        """The conversation as text; ``is_answered`` leaves it where the answer begins."""
        told = {**reasoning_variables(self.reasoning, self.template), **(self.variables or {})}
        return self.template.render_marked(messages, self.tools, is_answered, told)

    def prompt(self, tokenizer: Tokenizer, rendered: Rendered, ids: Sequence[int]) -> ChatPrompt:
        """The prompt whose text ends as ``rendered`` does."""
        closing: tuple[int, ...] = ()
        if self.reasoning.is_limited:
            closing = (*tokenizer.encode(self.reasoning.message), *tokenizer.encode(END_OF_THINKING, specials=True))
        schemas = None if self.tools is None else ToolSchemas(self.tools)
        start = self._start(rendered) if self.is_taken_apart else None
        return ChatPrompt(tuple(ids), start, schemas, self.reasoning.budget, closing)

    def _start(self, rendered: Rendered) -> Start:
        if rendered.ends_with(THINK_OPEN):
            return Start.REASONING
        if rendered.ends_with(THINK_CLOSE) or not knows_reasoning(self.template):
            return Start.CONTENT
        return Start.EITHER


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Token ids up to where an answer begins, and how it is taken apart; ``start`` None: not at all."""

    ids: tuple[int, ...]
    start: Start | None
    schemas: ToolSchemas | None
    budget: int
    closing: tuple[int, ...]

    def parser(self) -> OutputParser | None:
        """A parser of the answer."""
        return None if self.start is None else OutputParser(self.start, self.schemas)

    def limit(self) -> ReasoningBudget | None:
        """What ends the thinking in time, None where nothing does."""
        if self.budget < 0 or self.start is None:
            return None
        return ReasoningBudget(self.budget, self.closing, OutputParser(self.start, self.schemas))
