"""What every drafter does, and what a draft is.

Holds: ``Draft``, ``Drafter``, ``StepDrafter``, ``GoesOn``, ``Weights``, ``NO_DRAFT``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Weights = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids, each once, and the probability of each under the draft."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow. ``weights``: for each the distribution that it was drawn from, by noise of its own;
    None for tokens that follow from the text with certainty.

    ``shared``: for each the distribution of a choice by the noise that the target's choice is made by too, where it is
    known. ``sure``: how sure the drafter is of each, from 0 to 1, where it says so; only the order of these matters.
    ``late_seconds``: of the time that it took, what rounds without drafts had left undone.
    """

    tokens: tuple[int, ...] = ()
    weights: tuple[Weights, ...] | None = None
    shared: tuple[Weights, ...] | None = None
    sure: tuple[float, ...] | None = None
    late_seconds: float = 0.0

    def cut(self, n_tokens: int) -> Draft:
        """The first tokens of it."""
        if n_tokens >= len(self.tokens):
            return self
        weights, shared, sure = self.weights, self.shared, self.sure
        return Draft(
            self.tokens[:n_tokens],
            None if weights is None else weights[:n_tokens],
            None if shared is None else shared[:n_tokens],
            None if sure is None else sure[:n_tokens],
        )


NO_DRAFT = Draft()

GoesOn = Callable[[Sequence[float]], bool]
"""``goes_on(sure)``: whether a draft whose tokens are so sure is worth one more token."""


class Drafter(Protocol):
    """Guesses how a text goes on, from its tokens alone. The newest token is part of the text already."""

    @property
    def name(self) -> str:
        """What ``--spec-type`` calls it."""

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""

    def begin(self) -> None:
        """An answer to the text as it stands begins."""

    def truncate(self, n_tokens: int) -> None:
        """The text is its first ``n_tokens`` tokens."""

    def fork(self) -> Drafter:
        """One that knows the same and goes on alone."""

    def draft(self, n_max: int) -> Draft:
        """Up to ``n_max`` tokens, or none."""

    def judge(self, n_accepted: int) -> None:
        """So many tokens of its last draft were right."""


@runtime_checkable
class StepDrafter(Drafter, Protocol):
    """One whose drafts take time, token by token."""

    def draft_while(self, n_max: int, goes_on: GoesOn) -> Draft:
        """As ``draft``, but after each token it is asked whether another one is wanted."""
