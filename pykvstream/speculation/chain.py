"""Several drafters over one text: the first that drafts is taken, or the one that a controller decides for.

Source: model.md 4.1.
Holds: ``Chain``, ``Window``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from pykvstream.speculation.cached import NgramCache
from pykvstream.speculation.controller import Controller, Decision
from pykvstream.speculation.counts import NgramCounts
from pykvstream.speculation.drafter import NO_DRAFT, Draft, Drafter, StepDrafter, Weights
from pykvstream.speculation.stats import DraftCounter, DraftStats, stats_of


@dataclass(slots=True)
class Window:
    """A draft that is being judged, token by token. ``drafter`` made it; ``n_taken`` of it were right so far, and the
    next one was not where it ``is_refuted``. ``n_made``: tokens that it had before it was cut, where its length was
    decided token by token."""

    drafter: Drafter
    draft: Draft
    n_taken: int = 0
    is_refuted: bool = False
    n_made: int | None = None

    @property
    def expected(self) -> int | None:
        """The token that would have to come next; None behind the last one."""
        return self.draft.tokens[self.n_taken] if self.n_taken < len(self.draft.tokens) else None

    @property
    def weights(self) -> Weights | None:
        """What the expected token was drawn from; None where it was not drawn."""
        return None if self.draft.weights is None else self.draft.weights[self.n_taken]

    @property
    def shared(self) -> Weights | None:
        """What the expected token was chosen among by the target's noise, where that is known."""
        shared = self.draft.shared
        return None if shared is None or self.n_taken == len(shared) else shared[self.n_taken]


class Chain:
    """A text, and drafters that know it. ``n_max`` cuts drafts; shorter ones than ``n_min`` are none.

    With a ``controller`` each round it is decided who drafts and how far. ``slow``: drafters that draft only when it
    was decided, up to so many tokens; what the others propose costs nothing.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        n_max: int | None = None,
        n_min: int = 0,
        controller: Controller | None = None,
        slow: Mapping[str, int] | None = None,
        make: Callable[[], Sequence[Drafter]] | None = None,
    ) -> None:
        self._make = make
        self._n_max = n_max
        self._n_min = n_min
        self._controller = controller
        names = {drafter.name for drafter in drafters}
        self._slow = {name: most for name, most in (slow or {}).items() if name in names}
        self._use(drafters)
        self._tokens: list[int] = []
        self._n_told = 0  # of these, tokens that the drafters know
        self._is_torn = False  # while they learn of a change, and behind an interrupt of that
        self._counters = {drafter.name: DraftCounter() for drafter in drafters}
        self._n_without = 0
        self._n_judged = 0
        self._overlap = 0.0

    def _use(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self._quick = tuple(drafter for drafter in drafters if drafter.name not in self._slow)
        self._stepping = {drafter.name: drafter for drafter in drafters if isinstance(drafter, StepDrafter)}

    def _mend(self) -> None:
        """After an interrupt nobody knows which drafters know what: new ones begin anew."""
        if self._is_torn and self._make is not None:
            self._use(self._make())
            self._n_told = 0
            self._is_torn = False

    def begin(self, tokens: Sequence[int]) -> None:
        """An answer to this text begins: what is known of another text is kept as far as both are one."""
        self._mend()
        n_kept = _common_length(self._tokens, tokens)
        if n_kept < len(self._tokens):
            if n_kept < self._n_told:
                self._is_torn = True
                for drafter in self.drafters:
                    drafter.truncate(n_kept)
                self._n_told = n_kept
                self._is_torn = False
            del self._tokens[n_kept:]
        self.observe(tokens[n_kept:])
        self._tell()
        for drafter in self.drafters:
            drafter.begin()

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""
        self._tokens += tokens

    def _tell(self) -> None:
        """Drafters learn of the text when they are asked: several tokens at once take little longer than one."""
        self._mend()
        if self._n_told < len(self._tokens):
            tokens = self._tokens[self._n_told :]
            self._is_torn = True
            for drafter in self.drafters:
                drafter.observe(tokens)
            self._n_told += len(tokens)
            self._is_torn = False

    def fork(self, others: Mapping[str, Drafter] | None = None) -> Chain:
        """One that knows the same and goes on alone, with counters of its own; ``others`` take the place of drafters
        that belong to this text."""
        self._tell()
        known = {} if others is None else others
        drafters = [known[drafter.name] if drafter.name in known else drafter.fork() for drafter in self.drafters]
        controller = None if self._controller is None else self._controller.fork()
        make = self._make
        again = None if make is None else lambda: [known.get(drafter.name, drafter) for drafter in make()]
        child = Chain(drafters, self._n_max, self._n_min, controller, self._slow, again)
        child._tokens, child._n_told = list(self._tokens), self._n_told
        return child

    def is_asking(self) -> bool:
        """Whether there is to be a draft in the round that begins, if anybody has one: to ask takes time too."""
        if self._controller is None or self._controller.is_asking():
            return True
        self._n_without += 1
        return False

    def draft(self, room: int) -> Window | None:
        """A draft of up to ``room`` tokens to be verified, None where nobody has one."""
        n_max = room if self._n_max is None else min(room, self._n_max)
        if self._controller is not None:
            return self._decided(self._controller, n_max)
        self._tell()
        for drafter in self.drafters if n_max > 0 else ():
            draft = drafter.draft(n_max).cut(n_max)
            if len(draft.tokens) >= max(self._n_min, 1):
                self._counters[drafter.name].propose(len(draft.tokens))
                return Window(drafter, draft)
        self._n_without += 1
        return None

    def _decided(self, controller: Controller, n_max: int) -> Window | None:
        """What the controller decides for among the first proposal and the slow drafters."""
        possible = {name: min(n_max, most) for name, most in self._slow.items()} if n_max > 0 else {}
        started = perf_counter()
        self._tell()
        drafter, proposal = self._first_proposal(n_max)
        controller.observe_asking(perf_counter() - started)
        sure = None
        if drafter is not None:
            possible[drafter.name] = len(proposal.tokens)
            sure = {drafter.name: proposal.sure or ()}
        decision = controller.decide(possible, sure)
        n_made = None
        if decision.drafter in self._slow:
            drafter = next(each for each in self.drafters if each.name == decision.drafter)
            proposal, n_made = self._slow_draft(controller, drafter, decision, possible[drafter.name])
        elif decision.drafter is None:
            proposal = NO_DRAFT
        made = proposal.cut(decision.depth)
        if drafter is None or len(made.tokens) < max(self._n_min, 1):
            self._n_without += 1
            return None
        self._counters[drafter.name].propose(len(made.tokens))
        return Window(drafter, made, n_made=n_made)

    def _first_proposal(self, n_max: int) -> tuple[Drafter | None, Draft]:
        """Of those whose drafts cost nothing, the first that has one."""
        for drafter in self._quick if n_max > 0 else ():
            draft = drafter.draft(n_max)
            if draft.tokens:
                return drafter, draft.cut(n_max)
        return None, NO_DRAFT

    def _slow_draft(
        self, controller: Controller, drafter: Drafter, decision: Decision, possible: int
    ) -> tuple[Draft, int | None]:
        """A draft that took time, and how many tokens were made of it where that was decided on the way."""
        name = drafter.name
        started = perf_counter()
        stepping = None if decision.is_probe or not controller.knows(name) else self._stepping.get(name)
        if stepping is None:
            made = drafter.draft(decision.depth)
            controller.observe_draft(name, decision.depth, perf_counter() - started, made.late_seconds)
            return made, None
        made = stepping.draft_while(possible, lambda sure: controller.goes_on(name, sure, possible))
        n_made = len(made.tokens)
        if n_made == 0 or made.sure is None:
            return made, None
        controller.observe_draft(name, n_made, perf_counter() - started, made.late_seconds)
        return made.cut(controller.worth(name, made.sure)), n_made

    def observe_pass(self, n_rows: int, seconds: float) -> None:
        """A pass that verified, or gave one token, took so long."""
        if self._controller is not None:
            self._controller.observe_pass(n_rows, seconds)

    def observe_overlap(self, shared: float) -> None:
        """A token was judged whose distribution is known; ``shared``: sum(min(p, q)) there."""
        self._n_judged += 1
        self._overlap += shared

    def take(self, window: Window, token: int) -> bool:
        """The token came; whether it is the expected one. A window that is not gone on with must be closed."""
        if token != window.expected:
            window.is_refuted = window.expected is not None
            return False
        self._counters[window.drafter.name].accept(window.n_taken)
        window.n_taken += 1
        return True

    def close(self, window: Window) -> None:
        """No more of the draft will be judged."""
        window.drafter.judge(window.n_taken)
        if self._controller is not None:
            # Of a draft that an answer's end cut short only what was judged counts.
            n_judged = len(window.draft.tokens) if window.is_refuted else window.n_taken
            n_made = window.n_made if n_judged == len(window.draft.tokens) else None
            self._controller.observe(window.drafter.name, n_judged, window.n_taken, window.draft.sure or (), n_made)

    @property
    def ngram_counts(self) -> NgramCounts | None:
        """What ``ngram-cache`` counted in this text; None where it does not draft."""
        self._tell()
        return next((each.context for each in self.drafters if isinstance(each, NgramCache)), None)

    @property
    def stats(self) -> DraftStats:
        """Counters since the chain was made."""
        decided = None if self._controller is None else dict(self._controller.chosen)
        bound = self._overlap / self._n_judged if self._n_judged else None
        return stats_of(self._counters, self._n_without, decided, bound)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
