"""What a caller wants of a model's thinking.

Holds: nothing here needs a tokenizer or a template, so that a command line can be read without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvstream.errors import InvalidArgument

UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model thinks before it answers.

    ``enabled``: None leaves it to the template. ``preserve``: earlier thinking stays in the conversation; None does
    as the template does. ``budget``: thinking tokens of an answer at most, below 0 any number; then ``message`` and
    the end of the thinking are put in the model's mouth.
    """

    enabled: bool | None = None
    preserve: bool | None = None
    budget: int = UNLIMITED
    message: str = ""

    def __post_init__(self) -> None:
        for name, value, kinds in (
            ("enabled", self.enabled, bool | None), ("preserve", self.preserve, bool | None),
            ("message", self.message, str),
        ):  # fmt: skip
            if not isinstance(value, kinds):
                raise InvalidArgument(f"reasoning {name} cannot be {value!r}")
        if isinstance(self.budget, bool) or not isinstance(self.budget, int):
            raise InvalidArgument(f"the reasoning budget must be a number of tokens, got {self.budget!r}")

    @property
    def is_limited(self) -> bool:
        """Whether the budget ends the reasoning at some token."""
        return self.budget >= 0
