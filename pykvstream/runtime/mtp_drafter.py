"""The drafter ``draft-mtp``: the MTP head's choices, each made of the one before.

Order: of several drafters it is asked last. It is told of no tokens: the session knows them.
Source: spec/model.md 3.3; acceptance of drawn drafts 4.6.
Holds: ``MtpDrafter``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pykvstream.runtime.session import TokenSession
from pykvstream.sampling import Distribution, Sampler
from pykvstream.speculation import HEAD_DRAFTER, NO_DRAFT, Draft, SpeculationParams
from pykvstream.speculation.drafter import Weights

DEFAULT_N_MAX = 3
_TOP = 10


class MtpDrafter:
    """Drafts for one session. ``use`` says how tokens are chosen there: drafts are chosen alike, by the same noise.

    With ``greedy`` the largest logit is taken. With ``probabilistic`` drafts are drawn by noise of their own, and come
    with the distributions that they were drawn from; without temperature they are certain.
    """

    name = HEAD_DRAFTER

    def __init__(self, core: TokenSession, params: SpeculationParams) -> None:
        self._core = core
        self._params = params
        self._sampler: Sampler | None = None

    def use(self, sampler: Sampler) -> None:
        """The next drafts are for this one's choices."""
        self._sampler = sampler

    def observe(self, tokens: object) -> None:
        """The session has them."""

    def begin(self) -> None:
        """Nothing is remembered beside the session."""

    def truncate(self, n_tokens: int) -> None:
        """The session knows."""

    def fork(self) -> MtpDrafter:
        """One for the same session."""
        return MtpDrafter(self._core, self._params)

    def draft(self, n_max: int) -> Draft:
        """Up to ``n_max`` tokens; fewer where the head is less sure of one than ``draft_p_min``."""
        tokens: list[int] = []
        weights: list[Weights] = []

        def choose(logits: NDArray[np.float32], position: int) -> int | None:
            token = self._choose(logits, position, weights)
            if self._params.draft_p_min > 0.0 and top_probability(logits, token) < self._params.draft_p_min:
                return None
            tokens.append(token)
            return token

        own = n_max if self._params.is_auto else self._params.most_drafted or DEFAULT_N_MAX
        self._core.draft(min(n_max, own), choose)
        if not tokens:
            return NO_DRAFT
        return Draft(tuple(tokens), tuple(weights[: len(tokens)]) if weights else None)

    def _choose(self, logits: NDArray[np.float32], position: int, weights: list[Weights]) -> int:
        sampler = self._sampler
        if sampler is None or self._params.draft_sampling == "greedy":
            return int(logits.argmax())
        if not self._params.is_probabilistic or sampler.params.is_greedy:
            return sampler.choose(logits, position).token
        drawn_from: Distribution = sampler.distribution(logits, position)
        weights.append((drawn_from.ids, drawn_from.weights))
        return sampler.draw_draft(drawn_from, position)

    def judge(self, n_accepted: int) -> None:
        """The session drops the others."""


def top_probability(logits: NDArray[np.float32], token: int) -> float:
    """The probability of a token among the ten largest logits; 0 where it is none of these."""
    n_top = min(_TOP, len(logits))
    top = np.argpartition(-logits, n_top - 1)[:n_top]
    weights = np.exp(logits[top].astype(np.float64) - float(logits[top].max()))
    return float(weights[top == token].sum() / weights.sum())
