"""Steps of one answer: each yields the logits for the next token, out of a pass of one row or of a draft's rows.

Order: ``begin`` behind the prompt; for each token ``choose`` and ``take``, and ``logits`` for the next one; ``end``.
Holds: ``Steps``. Whoever looks at the session between two steps finds what was emitted and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns, perf_counter

import numpy as np
from numpy.typing import NDArray

from pykvstream.runtime.mtp_drafter import MtpDrafter
from pykvstream.runtime.rows import LogitRows, Logits
from pykvstream.runtime.session import TokenSession
from pykvstream.sampling import Choice, Distribution, Front, Sampler, overlap
from pykvstream.speculation import Chain, Window


class Steps:
    """Without a chain nothing is drafted. ``by_probability``: drafts are accepted by it, not by being equal."""

    def __init__(self, core: TokenSession, chain: Chain | None, *, by_probability: bool = False) -> None:
        self._core = core
        self._chain = chain
        self._by_probability = by_probability
        self._window: Window | None = None
        self._rows: LogitRows | None = None
        self._round_ns: int | None = None
        self._n_taken = 0
        self._with_front = False
        self._may_keep = False

    def begin(self, sampler: Sampler, *, may_force: bool = False) -> None:
        """The prompt has been run; the sampler will choose what comes next.

        ``may_force``: or a token will be said that it did not choose, whose logit is then looked up in the row.
        """
        self._with_front = sampler.rows_needed_by is None
        self._may_keep = not may_force
        if self._chain is not None:
            self._chain.begin(self._core.tokens)
            for drafter in self._chain.drafters:
                if isinstance(drafter, MtpDrafter):
                    drafter.use(sampler)

    def logits(self, n_left: int) -> Logits:
        """The row behind the last token; ``n_left`` tokens at most will be emitted from now on."""
        if self._window is not None and self._rows is not None:
            self._core.obey_cancel()
            return self._rows.at(self._window.n_taken)
        self._begin_round()
        if self._chain is None or not self._chain.is_asking():
            return self._step().at(0)
        with self._core.span("draft"):
            window = self._chain.draft(min(self._core.draft_room, n_left - 1))
        started = perf_counter()
        rows = self._step(() if window is None else window.draft.tokens)
        self._chain.observe_pass(len(rows), perf_counter() - started)
        if window is not None:
            self._rows, self._window = rows, window
        return rows.at(0)

    def front(self, position: int) -> Front | None:
        """What was found of the row that ``logits`` gave, for the token at a position."""
        return self._core.front(0 if self._window is None else self._window.n_taken, position)

    def _step(self, draft: Sequence[int] = ()) -> LogitRows:
        return self._core.step(draft, with_front=self._with_front, may_keep=self._may_keep)

    def _begin_round(self) -> None:
        """The one before ends here: its tokens have been taken."""
        timeline = self._core.timeline
        if timeline is not None or self._round_ns is not None:
            self._end_round()
        self._n_taken = 0
        if timeline is not None:
            self._round_ns = monotonic_ns()

    def _end_round(self) -> None:
        if self._round_ns is not None and self._core.timeline is not None:
            self._core.timeline.round(self._core.number, self._round_ns, {"tokens": self._n_taken})
        self._round_ns, self._n_taken = None, 0

    def choose(self, sampler: Sampler, logits: Logits, position: int) -> Choice:
        """The token that comes next; only counters change."""
        if self._core.timeline is None:
            return self._choose(sampler, None if callable(logits) else logits, position)
        with self._core.span("choose"):
            return self._choose(sampler, None if callable(logits) else logits, position)

    def score(self, sampler: Sampler, token: int, logits: Logits, position: int) -> Choice:
        """A token that comes next whatever the sampler would choose."""
        row = logits() if callable(logits) else logits
        return sampler.score(token, row, position, self.front(position))

    def _choose(self, sampler: Sampler, logits: NDArray[np.float32] | None, position: int) -> Choice:
        expected = self._window.expected if self._window is not None else None
        if expected is None or self._window is None:
            return sampler.choose(logits, position, self.front(position))
        if not self._by_probability:
            if self._window.shared is not None and self._chain is not None:
                drafted_from = Distribution(*self._window.shared)
                own = sampler.distribution(logits, position, self.front(position))
                self._chain.observe_overlap(overlap(own, drafted_from))
            return sampler.choose(logits, position, self.front(position))
        weights = self._window.weights
        if weights is None:
            return sampler.judge(logits, position, expected, None, self.front(position))
        drawn_from = Distribution(*weights)
        if self._chain is not None:
            own = sampler.distribution(logits, position, self.front(position))
            self._chain.observe_overlap(overlap(own, drawn_from))
        return sampler.judge(logits, position, expected, drawn_from, self.front(position))

    def take(self, token: int) -> None:
        """The token was emitted."""
        self._n_taken += 1
        if self._chain is None:
            return
        if self._window is not None and not self._chain.take(self._window, token):
            self._close()
        self._chain.observe((token,))

    def end(self) -> None:
        """The answer ends, or somebody else goes on with the conversation."""
        self._close()
        self._end_round()

    def _close(self) -> None:
        """No more of the draft will be judged."""
        if self._chain is not None and self._window is not None:
            self._chain.close(self._window)
        self._window = self._rows = None
