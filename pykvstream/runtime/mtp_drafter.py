"""The drafter ``draft-mtp``: the MTP head's choices, each made of the one before.

Order: of several drafters it is asked last. It is told of no tokens: the session knows them.
Source: spec/model.md 3.3; acceptance of drawn drafts 4.6.
Holds: ``MtpDrafter``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pykvstream.runtime.session import TokenSession
from pykvstream.sampling import Candidates, Distribution, Sampler, distribution_of, top_candidates
from pykvstream.speculation import HEAD_DRAFTER, Draft, GoesOn, SpeculationParams
from pykvstream.speculation.drafter import Weights

DEFAULT_N_MAX = 3
SHARED_EVERY = 8
"""Of so many drafts by the target's noise one comes with its distributions: they take time, and only measure."""
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
        self._n_drafts = 0

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
        return self._draft(n_max, None)

    def draft_while(self, n_max: int, goes_on: GoesOn) -> Draft:
        """As ``draft``, but after each token it is asked whether another one is wanted."""
        return self._draft(n_max, goes_on)

    def _draft(self, n_max: int, goes_on: GoesOn | None) -> Draft:
        made = _Made(with_shared=self._n_drafts % SHARED_EVERY == 0)
        self._n_drafts += 1
        p_min = self._params.draft_p_min
        own = n_max if self._params.is_auto else self._params.most_drafted or DEFAULT_N_MAX
        most = min(n_max, own)

        def choose(logits: NDArray[np.float32], position: int) -> int | None:
            token, candidates = self._choose(logits, position, made)
            if p_min > 0.0 and top_probability(logits, token) < p_min:
                return None
            made.tokens.append(token)
            if goes_on is None:
                return token
            made.sure.append(sureness(logits, token, candidates))
            return token if len(made.tokens) < most and goes_on(made.sure) else None

        late_seconds = self._core.draft(most, choose)
        return made.draft(late_seconds)

    def _choose(self, logits: NDArray[np.float32], position: int, made: _Made) -> tuple[int, Candidates | None]:
        sampler = self._sampler
        if sampler is None or self._params.draft_sampling == "greedy":
            return int(logits.argmax()), None
        if not self._params.is_probabilistic or sampler.params.is_greedy:
            token, candidates = sampler.pick(logits, position)
            if candidates is not None and made.with_shared:
                drawn = distribution_of(candidates, sampler.params.temperature)
                made.shared.append((drawn.ids, drawn.weights))
            return token, candidates
        drawn_from: Distribution = sampler.distribution(logits, position)
        made.weights.append((drawn_from.ids, drawn_from.weights))
        return sampler.draw_draft(drawn_from, position), None

    def judge(self, n_accepted: int) -> None:
        """The session drops the others."""


class _Made:
    """A draft in the making. A token that is left out may have left its distribution behind."""

    def __init__(self, *, with_shared: bool) -> None:
        self.with_shared = with_shared
        self.tokens: list[int] = []
        self.weights: list[Weights] = []
        self.shared: list[Weights] = []
        self.sure: list[float] = []

    def draft(self, late_seconds: float) -> Draft:
        n = len(self.tokens)
        if n == 0:
            return Draft(late_seconds=late_seconds)
        return Draft(
            tuple(self.tokens),
            tuple(self.weights[:n]) if self.weights else None,
            tuple(self.shared[:n]) if self.shared else None,
            tuple(self.sure) if self.sure else None,
            late_seconds,
        )


def top_probability(logits: NDArray[np.float32], token: int) -> float:
    """The probability of a token among the ten largest logits; 0 where it is none of these."""
    n_top = min(_TOP, len(logits))
    top = np.argpartition(-logits, n_top - 1)[:n_top]
    weights = np.exp(logits[top].astype(np.float64) - float(logits[top].max()))
    return float(weights[top == token].sum() / weights.sum())


def sureness(logits: NDArray[np.float32], token: int, candidates: Candidates | None) -> float:
    """The probability of a token among the best ten of the candidates, or of all where there are none."""
    best = top_candidates(logits, _TOP) if candidates is None else candidates
    weights = np.exp(best.logits[:_TOP] - best.logits[0])
    return float(weights[best.ids[:_TOP] == token].sum() / weights.sum())
