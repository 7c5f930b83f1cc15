"""The controller's choices: by expected tokens per second, never far from the best fixed choice in hindsight.

Units: seconds. Recorded answers: see ``tests/bench/record_acceptance.py``.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import chain, pairwise
from pathlib import Path

import pytest

from pykvstream.speculation import Draft, GoesOn, SpeculationParams, chain_of
from pykvstream.speculation.chain import Chain
from pykvstream.speculation.controller import NOTHING, Controller
from tests.replay import FIXED, HEAD, NGRAM, Costs, Sequence, controlled, fixed, load

RECORDED = Path(__file__).parent / "recorded_acceptance.json"
COSTS, RECORDS = load(RECORDED)
STREAMED = Costs({n: 0.030 + 0.0004 * (n - 1) for n in COSTS.passes}, 0.001, 0.002)
"""A large model whose passes wait for the bus: rows are nearly free, a step of the head is a fifteenth of a pass."""


def timed(order: tuple[str, ...] = (NGRAM, HEAD), row: float = 0.1, step: float = 0.0) -> Controller:
    """One that knows what passes cost: 1 second and ``row`` for each row beyond the first."""
    made = Controller(order)
    for n in range(1, 20):
        made.observe_pass(n, 1.0 + row * (n - 1))
        for name in order:
            made.observe_draft(name, n, n * step)
    return made


def told_of_sureness(name: str, step: float = 0.0) -> Controller:
    """Tokens of which the drafter is sure are right, others wrong, wherever they stand."""
    made = timed((name,), step=step)
    for _ in range(40):
        made.observe(name, 3, 3, (0.95, 0.95, 0.95))
        made.observe(name, 1, 0, (0.2,))
        made.observe(name, 2, 1, (0.95, 0.2))
    return made


@pytest.mark.parametrize(
    ("sure", "depth"), [((0.95,) * 4, 4), ((0.95, 0.95, 0.2, 0.95), 2), ((0.2, 0.95, 0.95, 0.95), 0)]
)
def test_a_draft_goes_as_far_as_its_drafter_is_sure(sure: tuple[float, ...], depth: int) -> None:
    made = told_of_sureness(NGRAM)
    decisions = [made.decide({NGRAM: 4}, {NGRAM: sure}) for _ in range(5)]
    assert {each.depth for each in decisions if not each.is_probe} == {depth}


def test_a_step_is_taken_while_it_promises_more_than_it_costs() -> None:
    made = told_of_sureness(HEAD, step=0.1)
    assert made.decide({HEAD: 6}).drafter == HEAD
    assert made.goes_on(HEAD, (0.95,), 6) and made.goes_on(HEAD, (0.95, 0.95), 6)
    assert not made.goes_on(HEAD, (0.95, 0.2), 6)
    assert not made.goes_on(HEAD, (0.95,), 1)
    assert made.worth(HEAD, (0.95, 0.95, 0.95)) == 3
    assert made.worth(HEAD, (0.95, 0.2, 0.95)) == 1
    assert made.worth(HEAD, (0.2,)) == 1


def test_rounds_that_were_decided_on_the_way_count_as_they_went() -> None:
    """Every token was right, and yet a round took longer than its tokens are worth: drafting is off."""
    made = timed((HEAD,), step=0.9)
    for _ in range(60):
        made.observe(HEAD, 1, 1, (0.9,), n_made=6)
    decisions = [made.decide({HEAD: 6}) for _ in range(40)]
    assert {each.drafter for each in decisions if not each.is_probe} == {None}


def test_before_a_pass_was_timed_nothing_is_drafted() -> None:
    assert Controller((HEAD,)).decide({HEAD: 8}) == NOTHING


@pytest.mark.parametrize(("n_right", "depth"), [(0, 0), (2, 2), (8, 8)])
def test_depth_follows_what_was_right(n_right: int, depth: int) -> None:
    made = timed((HEAD,), row=0.4)
    for _ in range(60):
        made.observe(HEAD, 8, n_right)
    decisions = [made.decide({HEAD: 8}) for _ in range(5)]
    assert [each.depth for each in decisions if not each.is_probe] == [depth] * len(
        [each for each in decisions if not each.is_probe]
    )


def test_an_expensive_draft_is_not_made() -> None:
    """Right every time, and yet slower than two passes."""
    made = timed((HEAD,), step=1.2)
    for _ in range(60):
        made.observe(HEAD, 1, 1)
    decisions = [made.decide({HEAD: 1}) for _ in range(100)]
    assert {each.depth for each in decisions if not each.is_probe} == {0}


def test_of_two_the_one_that_brings_more_drafts() -> None:
    made = timed()
    for _ in range(60):
        made.observe(NGRAM, 4, 1)
        made.observe(HEAD, 4, 3)
    chosen = [made.decide({NGRAM: 4, HEAD: 4}).drafter for _ in range(8)]
    assert chosen.count(HEAD) >= 6
    assert made.decide({NGRAM: 4}).drafter in (NGRAM, None)


def test_what_did_not_pay_is_tried_again_ever_more_rarely_and_comes_back() -> None:
    made = timed((HEAD,), row=0.5)
    for _ in range(60):
        made.observe(HEAD, 4, 0)
    probes = []
    for i in range(700):
        if made.decide({HEAD: 4}).drafter is not None:
            probes.append(i)
            made.observe(HEAD, 4, 0)
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps == sorted(gaps) and gaps[-1] >= 8 * gaps[0]
    n_drafted = 0
    for _ in range(400):
        decision = made.decide({HEAD: 4})
        if decision.drafter is not None:
            n_drafted += 1
            made.observe(HEAD, decision.depth, decision.depth)
    assert n_drafted > 150


def test_one_slow_pass_does_not_decide() -> None:
    made = timed((HEAD,))
    for _ in range(40):
        made.observe(HEAD, 4, 4)
    before = made.decide({HEAD: 4})
    made.observe_pass(1 + before.depth, 1000.0)
    assert made.pass_seconds(1 + before.depth) < 2.0


def test_the_same_observations_give_the_same_choices() -> None:
    sequence = next(iter(RECORDS.values()))
    first, second = (controlled(sequence, COSTS, 0.1, seed=3) for _ in range(2))
    assert first[0] == second[0] and first[1].chosen == second[1].chosen


def test_a_fork_goes_on_alone() -> None:
    made = timed((HEAD,))
    made.observe(HEAD, 4, 4)
    child = made.fork()
    assert child.decide({HEAD: 4}) == made.decide({HEAD: 4})
    for _ in range(60):
        child.observe(HEAD, 4, 0)
    assert made.decide({HEAD: 4}).depth == 4 and sum(child.chosen.values()) == 1


class Fixed:
    """Drafts the same tokens whenever it is asked, and counts how often that is."""

    def __init__(self, name: str, *tokens: int) -> None:
        self.name, self.tokens, self.asked = name, tokens, 0

    def observe(self, tokens: object) -> None:
        pass

    def begin(self) -> None:
        pass

    def truncate(self, n_tokens: int) -> None:
        pass

    def fork(self) -> Fixed:
        return self

    def draft(self, n_max: int) -> Draft:
        self.asked += 1
        return Draft(self.tokens[:n_max])

    def judge(self, n_accepted: int) -> None:
        pass


def test_a_slow_drafter_is_asked_only_when_it_was_decided() -> None:
    slow = Fixed("slow", 1, 2, 3, 4)
    made = Chain([slow], controller=Controller(("slow",)), slow={"slow": 4})
    assert made.draft(8) is None and slow.asked == 0
    made.observe_pass(1, 1.0)
    window = made.draft(8)
    assert window is not None and slow.asked == 1 and len(window.draft.tokens) >= 1
    assert made.draft(0) is None and slow.asked == 1
    stats = made.stats
    assert stats.decided == {"slow": 1, "none": 2}


def test_a_draft_that_an_answer_s_end_cut_short_counts_as_far_as_it_was_judged() -> None:
    controller = Controller(("slow",))
    made = Chain([Fixed("slow", 1, 2, 3, 4)], controller=controller, slow={"slow": 4})
    made.observe_pass(1, 1.0)
    window = made.draft(4)
    assert window is not None and made.take(window, 1)
    made.close(window)
    assert controller._records["slow"].seen == [1.0] and controller._records["slow"].right == [1.0]


class Stepping(Fixed):
    """One that says how sure it is, and asks."""

    sure = (0.95, 0.95, 0.2, 0.95)

    def draft_while(self, n_max: int, goes_on: GoesOn) -> Draft:
        n = 1
        while n < n_max and goes_on(self.sure[:n]):
            n += 1
        return Draft(self.tokens[:n], sure=self.sure[:n])


def test_a_drafter_that_steps_is_asked_after_each_token() -> None:
    controller = told_of_sureness("slow", step=0.05)
    made = Chain([Stepping("slow", 1, 2, 3, 4)], controller=controller, slow={"slow": 4})
    windows = [made.draft(4) for _ in range(3)]
    # The third token is one of which it was not sure: it is made, and not verified.
    assert [(len(each.draft.tokens), each.n_made) for each in windows if each is not None] == [(2, 3)] * 3


def test_only_auto_has_a_controller() -> None:
    for n_max, expected in (("auto", {"ngram-simple": 0, "none": 0}), (None, None), (3, None)):
        params = SpeculationParams(types=("ngram-simple",), draft_n_max=n_max)  # type: ignore[arg-type]
        assert chain_of(params, 100).stats.decided == expected


def joined(i: int) -> Sequence:
    """Three answers one behind the other: a text that changes its kind midway, at least 500 rounds without drafts."""
    names = list(RECORDS)
    parts = [RECORDS[names[(i + step) % len(names)]] for step in (0, 5, 10)]
    return Sequence(*(tuple(chain(*(getattr(part, each.name) for part in parts))) for each in fields(Sequence)))


@pytest.mark.parametrize("i", range(len(RECORDS)))
def test_recorded_answers_take_no_longer_than_by_the_best_fixed_choice(i: int) -> None:
    """At the costs of this engine on a CPU, told with 10 per cent of noise. The best is known in hindsight only."""
    sequence = joined(i)
    assert len(sequence) > 3500
    seconds, _ = controlled(sequence, COSTS, noise=0.1)
    best = min(fixed(sequence, COSTS, kind, depth) for kind, depth in FIXED)
    assert seconds <= 1.05 * best
    assert seconds <= 1.03 * fixed(sequence, COSTS, None, 0)


@pytest.mark.parametrize("i", range(len(RECORDS)))
def test_the_same_answers_where_passes_wait_for_the_bus(i: int) -> None:
    """Not the costs of any machine: other drafters win there, and the choices follow."""
    sequence = joined(i)
    seconds, controller = controlled(sequence, STREAMED, noise=0.1)
    best = min(fixed(sequence, STREAMED, kind, depth) for kind, depth in FIXED)
    assert seconds <= 1.1 * best
    assert seconds <= 0.7 * fixed(sequence, STREAMED, None, 0)
    assert controller.chosen[HEAD] > controller.chosen["none"]


@pytest.mark.parametrize("name", RECORDS)
def test_no_recorded_answer_is_slower_than_without_drafts(name: str) -> None:
    sequence = RECORDS[name]
    assert controlled(sequence, COSTS, noise=0.1)[0] <= 1.03 * fixed(sequence, COSTS, None, 0)


def test_drafts_that_are_never_right_cost_next_to_nothing() -> None:
    wrong = Sequence((0,) * 2000, (4,) * 2000, (0,) * 2000)
    assert controlled(wrong, COSTS, noise=0.1)[0] <= 1.03 * fixed(wrong, COSTS, None, 0)


@pytest.mark.parametrize(("share_of_pass", "n_rest"), [(0.0, 0), (0.004, 0), (0.04, 8), (0.5, 31)])
def test_where_nothing_pays_asking_takes_little_of_the_time(share_of_pass: float, n_rest: int) -> None:
    made = Controller((NGRAM,))
    made.observe_pass(1, 1.0)
    asked = []
    for i in range(600):
        if made.is_asking():
            asked.append(i)
            made.observe_asking(share_of_pass)
            assert made.decide({}) == NOTHING
            made.observe_pass(1, 1.0)
    gaps = [b - a - 1 for a, b in pairwise(asked)]
    assert gaps[:4] == [0, 0, 0, min(1, n_rest)]
    assert gaps == sorted(gaps) and gaps[-1] == n_rest
    assert made.chosen == {NGRAM: 0, "none": 600}


def test_a_draft_that_was_right_ends_the_rest() -> None:
    made = timed((NGRAM,))
    for _ in range(200):
        if made.is_asking():
            made.observe_asking(0.5)
            made.decide({})
    while not made.is_asking():
        pass
    decision = made.decide({NGRAM: 4})
    assert decision.drafter == NGRAM
    made.observe(NGRAM, decision.depth, decision.depth)
    assert all(made.is_asking() for _ in range(4))


def test_trials_lose_a_few_rounds_and_little_of_the_time() -> None:
    """A head whose drafts take some passes each and are never right: tried whenever it is due, it would lose more."""
    for n, begin in ((300, 9), (1000, 2), (3000, 3), (3000, 9), (6000, 3)):
        costs = Costs(COSTS.passes, begin=begin * COSTS.of_pass(1), step=COSTS.of_pass(1))
        wrong = Sequence((0,) * n, (0,) * n, (0,) * n)
        plain = fixed(wrong, costs, None, 0)
        # The first trial is made before it is known what it costs.
        assert controlled(wrong, costs)[0] - plain <= 12 * COSTS.of_pass(1) + 0.006 * plain


def test_drafters_that_rest_are_told_afterwards() -> None:
    """Rounds of a rest take no time of drafters; the next one that asks tells them all that was said."""
    drafter = Fixed("quick")
    told: list[object] = []
    drafter.observe = told.append  # type: ignore[method-assign]
    made = Chain([drafter], controller=Controller(("quick",)))
    made.observe_pass(1, 1e-9)
    for token in range(300):
        if made.is_asking():
            assert made.draft(8) is None
        made.observe((token,))
    n_asked = drafter.asked
    assert 10 < n_asked < 60
    while not made.is_asking():
        pass
    made.draft(8)
    assert drafter.asked == n_asked + 1 and [t for tokens in told for t in tokens] == list(range(300))  # type: ignore[attr-defined]
    assert made.stats.depth_histogram[0] == sum(made.stats.decided.values())  # type: ignore[union-attr]


def test_catching_up_is_no_part_of_what_a_draft_takes() -> None:
    """Of the first draft it is the prompt's; of a later trial it counts as lost, but not as what drafts take."""
    made = Controller((HEAD,), frozenset((HEAD,)))
    made.observe_pass(1, 1.0)
    made.observe_pass(2, 1.9)
    lost = []
    for _ in range(2000):
        decision = made.decide({HEAD: 1})
        if decision.drafter is not None:
            before = made._lost
            made.observe_draft(HEAD, 1, 5.25, late_seconds=5.0)
            made.observe_pass(2, 1.9)
            made.observe(HEAD, 1, 0)
            assert made._records[HEAD].draft_seconds(1)[1] == pytest.approx(0.25)
            if decision.is_probe:
                lost.append(made._lost - before)
        else:
            made.observe_pass(1, 1.0)
    first, *others = lost
    assert first == pytest.approx(1.9 + 0.25 - 0.99, abs=0.02) and others
    assert others == pytest.approx([first + 5.0] * len(others))
