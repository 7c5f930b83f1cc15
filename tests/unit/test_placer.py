"""The placer tells the policy what passes cost, and nothing that belongs to another placement."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pykvstream.runtime import placer as module
from pykvstream.runtime.layout import CacheShape, PhaseNeed, Placement, plan_arena
from pykvstream.runtime.placer import PASSES_PER_EVALUATION, Placer
from pykvstream.runtime.policy import Decision, Observation, PolicyConfig, PolicyState

SHAPE = CacheShape(n_layers=4, slot_bytes=1 << 16, column_bytes=4 << 16)
PLAN = plan_arena(SHAPE, 64 << 16, 64 * 256, [PhaseNeed("decode", 64, 1 << 16)]).phases[0]


class Policy:
    """Records what it is told, and moves when ``moves`` says so."""

    def __init__(self) -> None:
        self.moves = False
        self.told: list[Observation] = []

    def __call__(self, _config: PolicyConfig, state: PolicyState, observation: Observation) -> Decision:
        self.told.append(observation)
        return Decision(replace(state), state.resident_pages, state.ring_slots, self.moves, False, False)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    made = Policy()
    monkeypatch.setattr(module, "step", made)
    return made


class Bench:
    """A placer, and passes that each stream four pages in a millisecond."""

    def __init__(self) -> None:
        self.applied: list[Placement] = []
        self.placer = Placer(PLAN, SHAPE.run_pages, self.applied.append)
        self.n_passes = 0
        self.pages = 40

    def take_pass(self) -> None:
        self.n_passes += 1
        n: Any = self.n_passes
        pager: Any = SimpleNamespace(waves=n, stalls=0, peak_pages=2, streamed_pages=4 * n, gap_ns=1000)
        self.placer.observe(1_000_000 * n, pager, 0.01 * n)

    def prepare(self) -> None:
        """Before a pass that reaches one page more, so that the policy is asked."""
        self.pages += 1
        self.placer.prepare(self.pages, 1)


def test_policy_hears_what_a_pass_cost(policy: Policy) -> None:
    bench = Bench()
    bench.take_pass()
    bench.take_pass()
    bench.prepare()
    (told,) = policy.told
    assert told.feedback is not None and told.timing is not None
    assert (told.feedback.epoch, told.feedback.samples) == (0, 2)
    assert (told.timing.copied_pages, told.timing.copy_seconds) == (4, 0.001)
    assert bench.applied == []


def test_counters_before_a_move_teach_nothing_after_it(policy: Policy) -> None:
    bench = Bench()
    bench.take_pass()
    bench.take_pass()
    policy.moves = True
    bench.prepare()
    assert len(bench.applied) == 1
    policy.moves = False
    bench.take_pass()
    bench.prepare()
    assert policy.told[-1].feedback is None and policy.told[-1].timing is None
    bench.take_pass()
    bench.prepare()
    told = policy.told[-1]
    assert told.feedback is not None and told.feedback.epoch == 1


def test_policy_is_asked_once_in_some_passes_while_the_history_stays_within_its_pages(policy: Policy) -> None:
    bench = Bench()
    for _ in range(3 * PASSES_PER_EVALUATION):
        bench.take_pass()
        bench.placer.prepare(50, 1)
    assert len(policy.told) == 3


def test_passes_whose_pages_are_all_resident_are_not_watched(policy: Policy) -> None:
    bench = Bench()
    fits = bench.placer._state.lowest_resident
    assert fits > 0
    bench.placer.prepare(fits + 1, 1)
    assert bench.placer.is_watching
    bench.take_pass()
    bench.placer.prepare(fits, 1)
    assert not bench.placer.is_watching
    # What was seen before the pause is no measure of the pass behind it.
    bench.placer.prepare(fits + 1, 1)
    assert bench.placer.is_watching
    bench.take_pass()
    bench.prepare()
    assert policy.told[-1].feedback is None
