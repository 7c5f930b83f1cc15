"""Which drafter drafts in a round, and how far: the choice with the most expected tokens per predicted second.

    tokens(n) = 1 + sum over i <= n of product over j <= i of a(j);  seconds(n) = pass(1 + n) + begin + n * step

``a(j)``: how often the token at index j of a drafter's drafts was right where those before it were, newer rounds
counting more; an index that was never seen is taken to be like the one before it. Where a drafter says how sure it is,
``a(j)`` is how often tokens of which it was about as sure were right, with the index's share as the first guess.
Of a drafter whose drafts take time, which can say so only token by token, it is decided beforehand whether it drafts,
by what its rounds have brought, and after each token whether it goes on: while what further tokens promise is more than
the rate of the round times what they cost. Of what was drafted, as much is verified as is best then.
Times are measured. Where nothing pays nothing is drafted. Once in a while a drafter that is not chosen is tried again,
rarer the longer it has not paid, and only while all that trials have lost, against rounds of the best choice, stays
below half a hundredth of the time that has passed and that of a few rounds. To ask drafters takes time too: where
nothing has paid for a while rounds go by in which nobody is asked, so many that it takes half a hundredth of the time.
Units: seconds; rows of a pass count the pending token, so that a draft of n tokens takes n + 1.
Source: the throughput model of spec/model.md, appendix A.
Holds: ``Controller``, which neither looks at a clock nor draws a number: the same observations give the same choices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

MOST_DEPTH = 64
_FORGET = 0.93
_PRIOR_WEIGHT = 1.0
_FIRST_GUESS = 0.7
_SLOPE_GUESS = 0.1
_GUESS_WEIGHT = 4.0
_DOWN, _UP = 0.5, 0.1
_OUTLIER = 2.0
_MARGIN = 1.01
_PROBE_DEPTH = 3
_SLOW_PROBE_DEPTH = 2
_SOON = 2
_STALE_SEEN = 4.0
_FADE = 0.8
_LEARN = 0.1
_FIRST_WAIT, _LONGEST_WAIT = 16, 384
_LOST_ROUNDS, _LOST_SHARE = 3.0, 0.005
_IDLE_PER_REST, _LONGEST_REST, _ASKING_SHARE = 4, 31, 0.005
_SURE = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97)
_SURE_FORGET = 0.97
_SURE_PRIOR = 3.0
_ROUND_PRIOR = 3.0


@dataclass(slots=True)
class _Mean:
    """What something usually takes. It follows shorter times at once and longer ones slowly: a machine that others use
    too makes single ones longer, many times, and none shorter."""

    value: float = 0.0
    is_known: bool = False

    def add(self, sample: float) -> None:
        if not self.is_known:
            self.value, self.is_known = sample, True
            return
        bounded = min(sample, _OUTLIER * self.value)
        self.value += (_DOWN if sample < self.value else _UP) * (bounded - self.value)


@dataclass(slots=True)
class _Record:
    """What a drafter has brought, by index and by how sure it was, and what a draft costs beside the pass. ``usual``:
    how often the first token was right, over a longer time. ``rounds``, with ``tokens`` and ``spent`` seconds in them:
    those whose length was decided token by token."""

    right: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    seconds: dict[int, _Mean] = field(default_factory=dict)
    usual: float = _FIRST_GUESS
    wait: int = _FIRST_WAIT
    until_probe: int = _SOON
    sure_right: list[float] = field(default_factory=lambda: [0.0] * (len(_SURE) + 1))
    sure_seen: list[float] = field(default_factory=lambda: [0.0] * (len(_SURE) + 1))
    rounds: float = 0.0
    tokens_in_rounds: float = 0.0
    spent: float = 0.0

    def observe(self, n_drafted: int, n_right: int, sure: Sequence[float]) -> None:
        if n_drafted > 0:
            self.usual += _LEARN * ((1.0 if n_right > 0 else 0.0) - self.usual)
        for i in range(min(n_right + 1, n_drafted)):
            if i == len(self.seen):
                self.seen.append(0.0)
                self.right.append(0.0)
            self.seen[i] = _FORGET * self.seen[i] + 1.0
            self.right[i] = _FORGET * self.right[i] + (1.0 if i < n_right else 0.0)
            if i < len(sure):
                at = bisect_right(_SURE, sure[i])
                self.sure_seen[at] = _SURE_FORGET * self.sure_seen[at] + 1.0
                self.sure_right[at] = _SURE_FORGET * self.sure_right[at] + (1.0 if i < n_right else 0.0)
        if n_right == n_drafted:
            # All was right: what once kept drafts from going further may be over.
            for i in range(n_drafted, len(self.seen)):
                self.seen[i] *= _FADE
                self.right[i] *= _FADE

    def observe_round(self, n_tokens: int, seconds: float) -> None:
        """A round whose length was decided token by token gave so many tokens."""
        self.rounds = _FORGET * self.rounds + 1.0
        self.tokens_in_rounds = _FORGET * self.tokens_in_rounds + n_tokens
        self.spent = _FORGET * self.spent + seconds

    def fade(self) -> None:
        """What was seen long ago says no more than a few rounds of now."""
        for i, seen in enumerate(self.seen):
            share = min(1.0, _STALE_SEEN / seen) if seen > 0.0 else 1.0
            self.seen[i] *= share
            self.right[i] *= share
        share = min(1.0, _STALE_SEEN / self.rounds) if self.rounds > 0.0 else 1.0
        self.rounds, self.tokens_in_rounds, self.spent = (
            share * each for each in (self.rounds, self.tokens_in_rounds, self.spent)
        )

    def tokens(self, depth: int, sure: Sequence[float] = ()) -> list[float]:
        """Expected tokens of a round by the length of its draft."""
        expected, likely, before = [1.0], 1.0, self.usual
        for i in range(depth):
            right, seen = (self.right[i], self.seen[i]) if i < len(self.seen) else (0.0, 0.0)
            before = (right + _PRIOR_WEIGHT * before) / (seen + _PRIOR_WEIGHT)
            likely *= self._likely(before, sure[i]) if i < len(sure) else before
            expected.append(expected[-1] + likely)
        return expected

    def _likely(self, usual: float, sure: float) -> float:
        """How often a token is right of which the drafter is so sure, at an index where ``usual`` of them are."""
        at = bisect_right(_SURE, sure)
        return (self.sure_right[at] + _SURE_PRIOR * usual) / (self.sure_seen[at] + _SURE_PRIOR)

    def rate(self, tokens: float, seconds: float) -> float:
        """Tokens per second of rounds that were decided token by token; by indices a round gives ``tokens`` in
        ``seconds``, which stands for a few rounds of them."""
        if self.rounds == 0.0:
            return tokens / seconds
        return (self.tokens_in_rounds + _ROUND_PRIOR * tokens) / (self.spent + _ROUND_PRIOR * seconds)

    def draft_seconds(self, most: int) -> list[float]:
        """Of making a draft by its length; in between and beyond what was measured along a line."""
        return [0.0, *_curve(self.seconds, most, 1.0)[1:]]


def _curve(known: Mapping[int, _Mean], most: int, slope_guess: float) -> list[float]:
    """Values at places from 0 to ``most``: measured, between their neighbours, or beyond them along the line that fits
    all, which begins as a guess relative to the lowest place. Two close places would say little of a slope."""
    if not known:
        return [0.0] * (most + 1)
    places = sorted(known)
    values = [known[place].value for place in places]
    lowest, base = places[0], values[0]
    weight, rise = _GUESS_WEIGHT, _GUESS_WEIGHT * slope_guess * base
    for place, value in zip(places, values, strict=True):
        weight += (place - lowest) ** 2
        rise += (place - lowest) * (value - base)
    slope = max(rise / weight, 0.0)
    curve, above = [], 0
    for at in range(most + 1):
        while above < len(places) and places[above] < at:
            above += 1
        if above < len(places) and (places[above] == at or above > 0):
            share = 1.0 if above == 0 else (at - places[above - 1]) / (places[above] - places[above - 1])
            before = values[above - 1] if above > 0 else 0.0
            curve.append(values[above] if share == 1.0 else (1.0 - share) * before + share * values[above])
        else:
            nearest = 0 if above == 0 else above - 1
            curve.append(max(values[nearest] + slope * (at - places[nearest]), 0.0))
    return curve


@dataclass(frozen=True, slots=True)
class Decision:
    """``drafter`` drafts ``depth`` tokens; None and 0: nobody does. ``is_probe``: to see whether it would pay again."""

    drafter: str | None = None
    depth: int = 0
    is_probe: bool = False


NOTHING = Decision()


class Controller:
    """Decides before each round, and is told what it brought. ``order``: who drafts first where two pay alike.

    ``slow``: drafters whose drafts take time; before any was measured they draft one token.
    """

    def __init__(self, order: tuple[str, ...], slow: frozenset[str] = frozenset()) -> None:
        self._slow = slow
        self._records = {name: _Record() for name in order}
        self._passes: dict[int, _Mean] = {}
        self._is_idle = False
        self._rate = 0.0  # that the newest round promised
        self._passed = 0.0  # seconds of all passes and drafts
        self._lost = 0.0  # of these, by trials, against rounds at the rate above
        self._tried: float | None = None  # seconds that the trial under way has taken so far
        self._asking = _Mean()
        self._n_idle = 0  # rounds since a draft was right, or was chosen as what pays
        self._n_rested = 0  # of these, since drafters were last asked
        self._is_settled = False  # no slow drafter pays, and nothing was seen since
        self.chosen: dict[str, int] = dict.fromkeys((*order, "none"), 0)

    def fork(self) -> Controller:
        """One that has observed the same and goes on alone, with counters of its own."""
        child = Controller(tuple(self._records), self._slow)
        child._records, child._passes = deepcopy(self._records), deepcopy(self._passes)
        child._passed, child._lost, child._asking = self._passed, self._lost, replace(self._asking)
        return child

    def knows(self, name: str) -> bool:
        """Whether a draft of this drafter has been timed."""
        return bool(self._records[name].seconds)

    def pass_seconds(self, n_rows: int) -> float:
        """What a pass of so many rows takes; 0 before any was measured."""
        known = self._passes.get(n_rows)
        return self._pass_curve(n_rows)[n_rows] if known is None else known.value

    def _pass_curve(self, most: int) -> list[float]:
        return _curve(self._passes, most, _SLOPE_GUESS)

    def is_asking(self) -> bool:
        """Whether drafters are to be asked in this round; where they are not, nobody drafts in it, and nobody need tell
        of its pass."""
        enough = self._asking.value / _ASKING_SHARE
        plain = self.pass_seconds(1)
        rest = min(self._n_idle // _IDLE_PER_REST, _LONGEST_REST, int(enough / plain) if plain > 0.0 else 0)
        if self._n_rested >= rest:
            return True
        self._n_rested += 1
        self._n_idle += 1
        self._passed += plain
        self.chosen["none"] += 1
        return False

    def decide(self, possible: Mapping[str, int], sure: Mapping[str, Sequence[float]] | None = None) -> Decision:
        """``possible``: how many tokens each drafter could draft in this round; ``sure``: how sure it is of each, where
        that is known beforehand."""
        decision = NOTHING if self._rests(possible) else self._decide(possible, sure or {})
        self.chosen[decision.drafter or "none"] += 1
        self._n_idle = self._n_idle + 1 if decision.drafter is None or decision.is_probe else 0
        self._n_rested = 0
        return decision

    def _rests(self, possible: Mapping[str, int]) -> bool:
        """Whether nothing can have changed since nothing paid, and nobody is to be tried yet."""
        if not self._is_settled or not self._slow.issuperset(possible):
            return False
        records = [record for name, n in possible.items() if n > 0 and (record := self._records[name])]
        n_rounds = 1 + self._n_rested
        if any(record.until_probe <= n_rounds for record in records):
            return False
        for record in records:
            record.until_probe -= n_rounds
        return True

    def goes_on(self, name: str, sure: Sequence[float], possible: int) -> bool:
        """Whether a draft whose tokens are so sure is worth another step, up to ``possible`` tokens in all."""
        n, record = len(sure), self._records[name]
        tokens, drafts = record.tokens(possible, sure), record.draft_seconds(possible)
        passes = self._pass_curve(1 + possible)
        before = passes[1 + n] + drafts[n]
        return any(
            tokens[m] - tokens[n] > self._rate * (passes[1 + m] + drafts[m] - before)
            for m in range(n + 1, possible + 1)
        )

    def worth(self, name: str, sure: Sequence[float]) -> int:
        """How many tokens of a draft are worth verifying, one at least."""
        tokens = self._records[name].tokens(len(sure), sure)
        passes = self._pass_curve(1 + len(sure))
        gains = [tokens[n] - self._rate * passes[1 + n] for n in range(1, len(sure) + 1)]
        return 1 + gains.index(max(gains))

    def _decide(self, possible: Mapping[str, int], sure: Mapping[str, Sequence[float]]) -> Decision:
        plain = self.pass_seconds(1)
        if plain <= 0.0:
            return NOTHING
        best, best_rate = NOTHING, _MARGIN / plain
        for name, record in self._records.items():
            depth = 0 if self._is_settled and name in self._slow else self._most(name, possible, MOST_DEPTH)
            if depth == 0:
                continue
            tokens, drafts = record.tokens(depth, sure.get(name, ())), record.draft_seconds(depth)
            passes = self._pass_curve(1 + depth)
            for n in range(1, depth + 1):
                rate = record.rate(tokens[n], passes[1 + n] + drafts[n])
                if rate > best_rate:
                    best, best_rate = Decision(name, n), rate
        self._is_idle, self._rate = best.drafter is None, best_rate
        self._is_settled = self._is_idle
        if best.drafter is not None:
            record = self._records[best.drafter]
            record.wait, record.until_probe = _FIRST_WAIT, _FIRST_WAIT
        probe = self._probe(possible, best)
        self._tried = None if probe is None else 0.0
        return probe or best

    def _most(self, name: str, possible: Mapping[str, int], most: int) -> int:
        is_unknown = name in self._slow and not self._records[name].seconds
        return min(possible.get(name, 0), 1 if is_unknown else most)

    def _probe(self, possible: Mapping[str, int], best: Decision) -> Decision | None:
        """Is it time to try one that seems not to pay, or to pay less?"""
        for name, record in self._records.items():
            depth = self._most(name, possible, _SLOW_PROBE_DEPTH if name in self._slow else _PROBE_DEPTH)
            if depth == 0 or name == best.drafter:
                continue
            record.until_probe -= 1 + self._n_rested
            if record.until_probe <= 0 and self._may_lose(record, depth):
                record.until_probe = record.wait
                record.wait = min(2 * record.wait, _LONGEST_WAIT)
                record.fade()
                return Decision(name, depth, is_probe=True)
        return None

    def _may_lose(self, record: _Record, depth: int) -> bool:
        """Whether a trial, were all of it wrong, would keep what trials have lost within bounds."""
        round_seconds = 1.0 / self._rate
        seconds = self.pass_seconds(1 + depth) + record.draft_seconds(depth)[depth]
        allowed = _LOST_ROUNDS * round_seconds + _LOST_SHARE * self._passed
        return self._lost + seconds - round_seconds <= allowed

    def observe(
        self, name: str, n_drafted: int, n_right: int, sure: Sequence[float] = (), n_made: int | None = None
    ) -> None:
        """A draft was judged, of whose tokens the drafter was so sure. Where nothing pays and a trial was right, the
        next round tries again. ``n_made``: tokens that were made, where that was decided token by token."""
        record = self._records[name]
        self._is_settled = False
        if n_right > 0:
            self._n_idle = 0
        if self._tried is not None:
            self._lost += self._tried - (1 + n_right) / self._rate
            self._tried = None
        record.observe(n_drafted, n_right, sure)
        if n_made is not None:
            record.observe_round(1 + n_right, self.pass_seconds(1 + n_drafted) + record.draft_seconds(n_made)[n_made])
        if self._is_idle and n_right == n_drafted > 0:
            record.wait, record.until_probe = _FIRST_WAIT, 0

    def observe_pass(self, n_rows: int, seconds: float) -> None:
        """A pass was run."""
        mean = self._passes.setdefault(n_rows, _Mean())
        mean.add(seconds)
        self._spend(mean.value)

    def observe_asking(self, seconds: float) -> None:
        """To ask drafters for proposals that cost nothing took so long."""
        self._asking.add(seconds)

    def observe_draft(self, name: str, n_drafted: int, seconds: float, late_seconds: float = 0.0) -> None:
        """A draft was made. ``late_seconds``: what of the time drafts in every round would have spread over all.

        Before the first draft that is the prompt's, and no trial's fault.
        """
        record = self._records[name]
        is_first = not record.seconds
        record.seconds.setdefault(n_drafted, _Mean()).add(seconds - late_seconds)
        self._spend(seconds, seconds - late_seconds if is_first else seconds)

    def _spend(self, seconds: float, tried: float | None = None) -> None:
        self._passed += seconds
        if self._tried is not None:
            self._tried += seconds if tried is None else tried
