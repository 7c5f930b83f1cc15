"""What every drafter does, and what a draft is.

Holds: ``Draft``, ``Drafter``, ``Weights``, ``NO_DRAFT``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Weights = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Token ids, each once, and the probability of each under the draft."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow. ``weights``: for each the distribution that it was drawn from, by noise of its own;
    None for tokens that follow from the text with certainty."""

    tokens: tuple[int, ...] = ()
    weights: tuple[Weights, ...] | None = None

    def cut(self, n_tokens: int) -> Draft:
        """The first tokens of it."""
        weights = self.weights
        return Draft(self.tokens[:n_tokens], None if weights is None else weights[:n_tokens])


NO_DRAFT = Draft()


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
