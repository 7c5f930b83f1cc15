"""The sampling chain of one sequence.

Order: bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature, coupled choice.
Temperature is last, so truncation sees untempered probabilities. At ``temperature <= 0`` the first largest
logit after bias, penalties and DRY is the token, and no filter runs.
Source: the choice is the Gumbel-max trick: argmax of logit/T + Gumbel noise has the softmax distribution of
logit/T.
Holds: ``choose`` changes nothing and reads only the accepted tokens, so a draft and its verification agree on
a token whenever they agree on its logits; the token depends on no other row, object or platform.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import InvalidArgument, NumericError
from pykvstream.sampling.elementary import fixed_log
from pykvstream.sampling.front import Front, best_first, rows_needed_by
from pykvstream.sampling.logprobs import Choice, check_row, log_denominator
from pykvstream.sampling.noise import Noise, check_u64
from pykvstream.sampling.params import SamplingParams
from pykvstream.sampling.penalties import LogitAdjuster, TokenHistory
from pykvstream.sampling.rejection import SMALLEST, Distribution, distribution_of, is_accepted, residual
from pykvstream.sampling.truncation import Candidates, truncate, truncate_row


@dataclass(frozen=True, slots=True)
class SamplerState:
    """All that a sampler remembers: its seed and the tokens it accepted, prompt included."""

    seed: int
    tokens: tuple[int, ...]


class Sampler:
    """Chooses tokens for one sequence; not for use from two threads at once."""

    __slots__ = ("_adjuster", "_history", "_n_vocab", "_needs_rows", "_noise", "_params", "_takes_first")

    def __init__(self, params: SamplingParams, *, seed: int, n_vocab: int) -> None:
        if n_vocab < 1:
            raise InvalidArgument(f"n_vocab must be at least 1, got {n_vocab}")
        for name, ids in (("logit_bias", params.logit_bias), ("dry_breakers", params.dry_breakers)):
            if any(token >= n_vocab for token in ids):
                raise InvalidArgument(f"{name} names token {max(ids)}, the vocabulary has {n_vocab} tokens")
        self._params = params
        self._n_vocab = n_vocab
        self._noise = Noise(seed)
        self._adjuster = LogitAdjuster(params)
        self._history = TokenHistory()
        self._needs_rows = rows_needed_by(params)
        self._takes_first = params.is_greedy and not self._adjuster.lowers and self._needs_rows is None

    @property
    def params(self) -> SamplingParams:
        """The settings of the chain."""
        return self._params

    @property
    def seed(self) -> int:
        """The seed of the noise."""
        return self._noise.seed

    @property
    def n_accepted(self) -> int:
        """How many tokens were accepted and not truncated."""
        return self._history.n_tokens

    @property
    def rows_needed_by(self) -> str | None:
        """Why ``choose`` looks at whole rows whatever it is given, by name; None where a ``Front`` will do."""
        return self._needs_rows

    def choose(
        self, logits: NDArray[np.float32] | None, position: int, front: Front | None = None
    ) -> Choice:
        """Return the token at ``position``; changes nothing.

        ``front``: of the same row. Then the sum of the log probability, and where the settings allow the token, comes
        out of it; both are what they are without it, bit for bit. Where they allow it nobody looks at the row, which
        may be None.
        Raises ``NumericError`` for NaN, plus infinity or nothing but minus infinity, with the position and
        the index.
        """
        if front is not None and self._needs_rows is None:
            check_u64("position", position)
            if self._takes_first:
                return Choice(int(front.ids[0]), float(front.logits[0]) - front.log_sum_exp)
            candidates = self._candidates(front, position)
            token = int(candidates.ids[0]) if self._params.is_greedy else self._draw(candidates, position)
            return self.score(token, logits, position, front)
        row, best = self._check(logits, position)
        adjusted, best_adjusted = self._adjust(row, best, position)
        token = best_adjusted if self._params.is_greedy else self._draw(self._truncated(adjusted, position), position)
        return Choice(token, float(row[token]) - (log_denominator(row) if front is None else front.log_sum_exp))

    def pick(self, logits: NDArray[np.float32], position: int) -> tuple[int, Candidates | None]:
        """Return the token that ``choose`` would, and what it was drawn from; None without temperature.

        The log probability, which no draft needs, is left out. Changes nothing; raises as ``choose``.
        """
        row, best = check_row(logits, self._n_vocab, check_u64("position", position))
        adjusted, best_adjusted = self._adjust(row, best, position)
        if self._params.is_greedy:
            return best_adjusted, None
        candidates = self._truncated(adjusted, position)
        return self._draw(candidates, position), candidates

    def judge(
        self,
        logits: NDArray[np.float32] | None,
        position: int,
        drafted: int,
        drawn_from: Distribution | None = None,
        front: Front | None = None,
    ) -> Choice:
        """Return the token at ``position`` by rejection: the drafted one by its probability, else another.

        ``drawn_from`` is the distribution of the draft, by noise of its own; None for a draft that was not drawn.
        The result has the distribution that ``choose`` has, and is another function of the seed. Without temperature
        it is the same. Changes nothing; raises as ``choose``.
        """
        if self._params.is_greedy:
            return self.choose(logits, position, front)
        p = self.distribution(logits, position, front)
        q = Distribution.certain(drafted) if drawn_from is None else drawn_from
        return self.score(self.settle(p, q, drafted, position), logits, position, front)

    def settle(self, p: Distribution, q: Distribution, drafted: int, position: int) -> int:
        """Return the drafted token, drawn from ``q``, or another one, so that the result is drawn from ``p``."""
        if is_accepted(p, q, drafted, self._noise.accept_uniform(position)):
            return drafted
        left = residual(p, q)
        scores = fixed_log(left.weights) + self._noise.gumbel(position, left.ids)
        return int(left.ids[scores == scores.max()].min())

    def distribution(
        self, logits: NDArray[np.float32] | None, position: int, front: Front | None = None
    ) -> Distribution:
        """Return what ``choose`` draws from at ``position``; raises as it does."""
        if front is not None and self._needs_rows is None:
            candidates = self._candidates(front, check_u64("position", position))
            if self._params.is_greedy:
                return Distribution.certain(int(candidates.ids[0]))
            return distribution_of(candidates, self._params.temperature)
        row, best = self._check(logits, position)
        adjusted, best_adjusted = self._adjust(row, best, position)
        if self._params.is_greedy:
            return Distribution.certain(best_adjusted)
        return self._distribution(adjusted, position)

    def draw_draft(self, drawn_from: Distribution, position: int) -> int:
        """Draw a draft for ``judge``, by noise that neither ``choose`` nor ``judge`` uses; changes nothing."""
        ids, weights = drawn_from.ids, drawn_from.weights
        is_there = weights >= SMALLEST
        ids, weights = ids[is_there], weights[is_there]
        scores = fixed_log(weights) + self._noise.draft_gumbel(position, ids)
        return int(ids[scores == scores.max()].min())

    def score(
        self, token: int, logits: NDArray[np.float32] | None, position: int, front: Front | None = None
    ) -> Choice:
        """Return a token that stands at ``position`` whatever the settings would choose; raises as ``choose``.

        Of a token among the best of a ``front`` the row may be None.
        """
        if front is not None:
            logit = front.logit(token) if logits is None else float(logits[token])
            if logit is not None:
                return Choice(token, logit - front.log_sum_exp)
        row, _ = self._check(logits, position)
        return Choice(token, float(row[token]) - log_denominator(row))

    def _check(self, logits: NDArray[np.float32] | None, position: int) -> tuple[NDArray[np.float32], int]:
        """Return the row's tokens and the best of them."""
        if logits is None:
            raise InvalidArgument(f"position {position}: what is asked for needs the whole row of logits")
        return check_row(logits, self._n_vocab, check_u64("position", position))

    def _candidates(self, front: Front, position: int) -> Candidates:
        """Return what stays of the best tokens after bias, penalties and, with temperature, all filters."""
        logits = self._adjuster.adjust_some(front.ids, front.logits, self._history)
        n_wanted = 1 if self._params.is_greedy else self._params.top_k
        if logits is front.logits:
            ids, logits = front.ids[:n_wanted], logits[:n_wanted]
        else:
            order = best_first(front.ids, logits)[:n_wanted]
            if not order.size:
                raise NumericError(f"logits at position {position}: bias suppresses all that are finite")
            ids, logits = front.ids[order], logits[order]
        candidates = Candidates(ids, logits.astype(np.float64))
        return candidates if self._params.is_greedy else truncate(candidates, self._params, self._noise, position)

    def _adjust(self, row: NDArray[np.float32], best: int, position: int) -> tuple[NDArray[np.float32], int]:
        """Return the row after bias, penalties and DRY, and the first index of its maximum."""
        adjusted = self._adjuster.adjust(row, self._history)
        if adjusted is row:
            return row, best
        best_adjusted = int(adjusted.argmax())
        if adjusted[best_adjusted] == -np.inf:
            raise NumericError(f"logits at position {position}: bias suppresses all that are finite")
        return adjusted, best_adjusted

    def _distribution(self, row: NDArray[np.float32], position: int) -> Distribution:
        return distribution_of(self._truncated(row, position), self._params.temperature)

    def _truncated(self, row: NDArray[np.float32], position: int) -> Candidates:
        return truncate_row(row, self._params, self._noise, position)

    def _draw(self, candidates: Candidates, position: int) -> int:
        """Return the coupled choice among the candidates that passed the filters."""
        # Relative to the best, so that a temperature near zero overflows only what could never win.
        with np.errstate(over="ignore"):
            scores = (candidates.logits - candidates.logits[0]) / self._params.temperature
        scores += self._noise.gumbel(position, candidates.ids)
        return int(candidates.ids[scores == scores.max()].min())

    def accept(self, token: int) -> None:
        """Append a token, of the prompt or chosen, to the history that penalties and DRY read."""
        if not 0 <= token < self._n_vocab:
            raise InvalidArgument(f"token {token} is outside the vocabulary of {self._n_vocab}")
        self._history.append(token)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` accepted tokens."""
        if not 0 <= n_tokens <= self.n_accepted:
            raise InvalidArgument(f"cannot keep {n_tokens} tokens, {self.n_accepted} were accepted")
        self._history.truncate(n_tokens)

    def reset(self) -> None:
        """Forget every accepted token; the seed stays."""
        self._history.truncate(0)

    def fork(self, seed: int) -> Sampler:
        """Return an independent sampler with this history and another seed (see ``fork_seed``)."""
        child = Sampler(self._params, seed=seed, n_vocab=self._n_vocab)
        child._history = TokenHistory(self._history.last(-1))
        return child

    def state(self) -> SamplerState:
        """Return what ``restore`` needs."""
        return SamplerState(self.seed, tuple(self._history.last(-1).tolist()))

    def restore(self, state: SamplerState) -> None:
        """Take over a saved seed and history, or change nothing if a token is outside the vocabulary."""
        for token in state.tokens:
            if not 0 <= token < self._n_vocab:
                raise InvalidArgument(f"saved token {token} is outside the vocabulary of {self._n_vocab}")
        self._noise = Noise(state.seed)
        self._history = TokenHistory(state.tokens)
