"""The policy's laws (P-PO1 to P-PO10 of the specification, for page records) against slow references.

P-PO9 (reserving a whole layer for a draft head) has no counterpart while no draft head shares the pool.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream.errors import InvalidArgument, NoSpace
from pykvstream.runtime.layout import CacheShape, Placement, Pool, forecast_pass
from pykvstream.runtime.policy import (
    Costs,
    Decision,
    Feedback,
    Observation,
    PolicyConfig,
    PolicyState,
    Timing,
    enough_slots,
    grow,
    initialize,
    overlap_target,
    restore,
    ring_target,
    shrink,
    step,
)
from tests.examples import examples

CONFIG = PolicyConfig(run_pages=4)
RATIOS = (0.5, 1.0, 1.1, 2.0, 8.0, 1e300)
CALM = Feedback(epoch=1, samples=0, misses=0, copy_busy=0.2, peak_slots=0)


@st.composite
def pools(draw: st.DrawFn, most_layers: int = 8, most_pages: int = 24) -> Pool:
    layers = draw(st.integers(1, most_layers))
    tail = draw(st.integers(2, 4))
    ctx = draw(st.integers(1, most_pages))
    slots = draw(st.integers(min(layers * tail + 1, layers * ctx), layers * ctx + 3))
    return Pool(layers, slots, tail, ctx)


seconds = st.sampled_from([0.0, 1e-6, 1e-4, 0.01, 1.0])
costs = st.builds(Costs, st.none() | seconds, st.none() | seconds)
feedbacks = st.none() | st.builds(
    Feedback,
    epoch=st.integers(1, 2),
    samples=st.integers(0, 40),
    misses=st.integers(0, 40),
    copy_busy=st.sampled_from([0.0, 0.3, 0.7, 0.899, 0.9, 1.0, math.inf, math.nan, -0.1]),
    peak_slots=st.integers(0, 40),
    layer_samples=st.integers(0, 40),
    layer_misses=st.integers(0, 40),
)
timings = st.none() | st.builds(Timing, st.integers(0, 9), seconds, seconds)


@st.composite
def observations(draw: st.DrawFn, pool: Pool) -> Observation:
    return Observation(
        active_pages=draw(st.integers(0, pool.ctx_pages)),
        query_rows=draw(st.sampled_from([1, 64, 256])),
        is_decode=draw(st.booleans()),
        feedback=draw(feedbacks),
        timing=draw(timings),
    )


def check_placement(decision: Decision) -> None:
    pool, resident = decision.next.pool, decision.resident_pages
    assert sum(resident) + decision.ring_slots == pool.n_slots
    assert pool.ring_floor <= decision.ring_slots <= pool.ring_cap
    assert len(resident) == pool.n_layers
    assert all(pool.floor_pages <= pages <= pool.ctx_pages for pages in resident)
    assert resident == tuple(sorted(resident, reverse=True))
    assert resident[0] - resident[-1] <= 1
    assert decision.next.lowest_resident == resident[-1]
    if decision.ring_slots == 0:
        assert min(resident) >= pool.ctx_pages


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_every_slot_is_used_and_every_bound_holds_over_any_history(data: st.DataObject) -> None:
    pool = data.draw(pools())
    config = replace(CONFIG, cooldown_evaluations=2, shrink_evaluations=2, grow_evaluations=1)
    state = initialize(config, pool)
    for _ in range(data.draw(st.integers(1, 12))):
        before = state
        decision = step(config, state, data.draw(observations(pool)))
        assert state == before
        check_placement(decision)
        assert decision.partition_changed == (decision.ring_slots != state.ring_slots)
        state = decision.next


@given(pools(), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_overlap_target_equals_a_descending_scan(pool: Pool, data: st.DataObject) -> None:
    active = data.draw(st.integers(pool.floor_pages, 40))
    ratio = data.draw(st.sampled_from(RATIOS))
    enough = data.draw(st.integers(2, pool.n_slots + 2))
    expected = pool.floor_pages
    top = min(active, (pool.n_slots - pool.ring_floor) // pool.n_layers)
    for resident in range(top, pool.floor_pages, -1):
        needed = min(Fraction(ratio) * (active - resident), Fraction(enough))
        if resident == active or pool.n_slots - resident * pool.n_layers >= needed:
            expected = resident
            break
    assert overlap_target(pool, active, ratio, enough) == expected


@given(pools(), costs, st.data())
@settings(max_examples=examples(200), deadline=None)
def test_ring_target_is_the_smallest_sufficient_ring(pool: Pool, known: Costs, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, pool.ctx_pages))
    shape, ratio = CacheShape(pool.n_layers, 64, 64 * pool.n_layers), Fraction(CONFIG.overlap_ratio)
    max_rows = (pool.tail_pages - 1) * 256
    enough = enough_slots(CONFIG, pool, known)

    def is_sufficient(ring: int) -> bool:
        placement = Placement(pool.deal(ring), ring, max_rows)
        per_layer = Placement((placement.resident_pages[-1],), 0, max_rows)
        one = CacheShape(1, 64, 64)
        streamed = forecast_pass(one, per_layer, active * 256 - 1, 1).streamed_pages
        assert forecast_pass(shape, placement, active * 256 - 1, 1).streamed_pages <= streamed * pool.n_layers
        return ring >= min(ratio * streamed, Fraction(enough))

    def is_resident(ring: int) -> bool:
        return pool.deal(ring)[-1] >= active

    rings = range(pool.ring_floor, pool.ring_cap + 1)
    target = ring_target(CONFIG, pool, known, active)
    if any(is_resident(ring) for ring in rings):
        assert target == max(ring for ring in rings if is_resident(ring))
    else:
        assert target == next((ring for ring in rings if is_sufficient(ring)), pool.ring_cap)


@given(pools(), st.data())
def test_deal_equals_dealing_one_page_at_a_time(pool: Pool, data: st.DataObject) -> None:
    ring = data.draw(st.integers(pool.ring_floor, pool.ring_cap))
    hands = [0] * pool.n_layers
    for layer in islice(cycle(range(pool.n_layers)), pool.n_slots - ring):
        hands[layer] += 1
    assert pool.deal(ring) == tuple(hands)


def test_deal_refuses_a_ring_outside_the_pool() -> None:
    pool = Pool(4, 20, 2, 100)
    for ring in (0, 13, -1):
        with pytest.raises(InvalidArgument):
            pool.deal(ring)


@pytest.mark.parametrize("active", [1, 2**20, 2**32 - 1])
def test_no_time_proportional_to_pages(active: int) -> None:
    pool = Pool(16, 2**32 - 1, 2, 2**32)
    known = Costs(1e-5, 1e-3)
    decision = step(CONFIG, initialize(CONFIG, pool, known), Observation(active))
    check_placement(decision)


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap_ratio": math.nan},
        {"overlap_ratio": math.inf},
        {"overlap_ratio": 0.0},
        {"grow_evaluations": 0},
        {"shrink_evaluations": 0},
        {"cooldown_evaluations": 0},
        {"run_pages": 0},
        {"copy_saturated": 1.5},
        {"smoothing": math.nan},
    ],
)
def test_config_refuses_bad_constants(changes: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(changes))):
        PolicyConfig(**{"run_pages": 4, **changes})  # type: ignore[arg-type]


def test_fixed_ring_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(NoSpace, match="need 13 slots, have 1 to 12"):
        initialize(replace(CONFIG, fixed_ring_slots=13), Pool(4, 20, 2, 100))


def test_fixed_ring_never_moves() -> None:
    config = replace(CONFIG, fixed_ring_slots=3, grow_evaluations=1)
    state = replace(initialize(config, Pool(4, 40, 2, 100)), baseline=CALM)
    missing = replace(CALM, samples=10, misses=10)
    assert step(config, state, Observation(90, feedback=missing)).ring_slots == 3


@pytest.mark.parametrize("pool", [(0, 9, 2, 9), (4, 0, 2, 9), (4, 9, 1, 9), (4, 9, 2, 0)])
def test_pool_refuses_zero_dimensions(pool: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        Pool(*pool)


def test_pool_refuses_one_slot_less_than_the_smallest() -> None:
    assert Pool(4, 9, 2, 100).ring_cap == 1
    with pytest.raises(NoSpace, match=r"need 9 slots .* have 8"):
        Pool(4, 8, 2, 100)


def test_state_of_another_pool_is_refused() -> None:
    state = initialize(CONFIG, Pool(4, 100, 2, 200))
    with pytest.raises(InvalidArgument, match="ring_slots"):
        replace(state, pool=Pool(4, 9, 2, 200))
    with pytest.raises(InvalidArgument, match="starved"):
        replace(state, starved=-1)


BAD_FEEDBACK: dict[str, dict[str, Any]] = {
    "epoch changed": {"epoch": 2, "samples": 90},
    "samples went back": {"samples": 49},
    "misses went back": {"samples": 90, "misses": 4},
    "layer samples went back": {"samples": 90, "layer_samples": 9},
    "more misses than samples": {"misses": 51},
    "more new misses than new samples": {"samples": 51, "misses": 9},
    "more layer misses than samples": {"layer_samples": 11, "layer_misses": 12},
    "infinite busy": {"samples": 90, "copy_busy": math.inf},
    "busy is not a number": {"samples": 90, "copy_busy": math.nan},
    "busy above one": {"samples": 90, "copy_busy": 1.01},
}


@pytest.mark.parametrize("name", BAD_FEEDBACK)
def test_feedback_that_does_not_follow_resets_and_does_not_train(name: str) -> None:
    baseline = Feedback(1, 50, 5, 0.2, 1, layer_samples=10, layer_misses=1)
    pool = Pool(4, 100, 2, 200)
    state = PolicyState(pool, 60, pressed_pages=150, starved=2, overprovisioned=7, baseline=baseline)
    decision = step(CONFIG, state, Observation(150, feedback=replace(baseline, **BAD_FEEDBACK[name])))
    assert decision.feedback_reset and not decision.feedback_used
    assert (decision.next.starved, decision.next.overprovisioned) == (0, 0)
    assert not decision.partition_changed
    assert decision.next.evaluations == state.evaluations


def test_first_feedback_is_a_baseline_and_the_same_again_does_not_train() -> None:
    state = replace(initialize(CONFIG, Pool(4, 100, 2, 200)), pressed_pages=150, evaluations=5)
    snapshot = Feedback(1, 50, 50, 0.2, 1)
    first = step(CONFIG, state, Observation(150, feedback=snapshot))
    again = step(CONFIG, first.next, Observation(150, feedback=snapshot))
    assert first.feedback_reset and not first.feedback_used
    assert not again.feedback_reset and not again.feedback_used
    assert again.next == first.next
    assert again.next.evaluations == 5


def test_counters_saturate() -> None:
    most = 2**32 - 1
    config = replace(CONFIG, grow_evaluations=most, cooldown_evaluations=most)
    state = replace(
        initialize(config, Pool(4, 12, 2, 200)), ring_slots=4, pressed_pages=150, starved=most, baseline=CALM
    )
    decision = step(config, state, Observation(150, feedback=replace(CALM, samples=9, misses=9)))
    assert (decision.next.starved, decision.next.evaluations) == (most, most)


@pytest.mark.parametrize("query_rows", [1, 32, 33, 64])
def test_phase_is_stated_intent_not_a_row_count(query_rows: int) -> None:
    known = Costs(0.0, 1.0)
    state = initialize(CONFIG, Pool(4, 400, 2, 400), known)
    decode = step(CONFIG, state, Observation(300, query_rows))
    prefill = step(CONFIG, state, Observation(300, query_rows, is_decode=False))
    assert decode.partition_changed and decode.next.pressed_pages == 300
    assert not prefill.partition_changed and prefill.next.pressed_pages == 0


@pytest.mark.parametrize(
    ("active", "rows"),
    [(401, 1), (-1, 1), (1, 0), (1, 257)],
    ids=["beyond ctx", "negative", "no row", "too wide"],
)
def test_step_refuses_a_pass_the_pool_cannot_have(active: int, rows: int) -> None:
    state = initialize(CONFIG, Pool(4, 400, 2, 400))
    with pytest.raises(InvalidArgument):
        step(CONFIG, state, Observation(active, rows))


@given(st.integers(3, 200), st.integers(0, 100))
def test_a_shorter_history_keeps_the_placement_and_streams_no_more(active: int, fewer: int) -> None:
    pool = Pool(4, 300, 2, 200)
    state = step(CONFIG, initialize(CONFIG, pool, Costs(0.0, 1.0)), Observation(active)).next
    shorter = max(1, active - fewer)
    back = step(CONFIG, state, Observation(shorter))
    assert back.resident_pages == state.resident_pages
    shape, placement = CacheShape(4, 64, 256), Placement(state.resident_pages, state.ring_slots, 1)
    streamed = [forecast_pass(shape, placement, n * 256 - 1, 1).streamed_pages for n in (shorter, active)]
    assert streamed[0] <= streamed[1]


@given(pools(), pools(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_grow_and_shrink_refuse_the_wrong_direction_and_change_nothing(
    first: Pool, second: Pool, data: st.DataObject
) -> None:
    state = initialize(CONFIG, first, Costs(0.001, 0.01))
    observation = Observation(data.draw(st.integers(0, second.ctx_pages)))
    allowed = {
        grow: second.n_slots > first.n_slots,
        shrink: second.n_slots < first.n_slots,
    }
    for move, is_allowed in allowed.items():
        if not is_allowed:
            with pytest.raises(InvalidArgument):
                move(CONFIG, state, second, observation)
            continue
        decision = move(CONFIG, state, second, observation)
        check_placement(decision)
        assert decision == restore(CONFIG, second, observation, state.costs)
    assert state == initialize(CONFIG, first, Costs(0.001, 0.01))


def test_unmeasured_ring_is_two_runs_and_at_most_an_eighth_of_the_spare_slots() -> None:
    assert initialize(CONFIG, Pool(4, 400, 2, 400)).ring_slots == 8
    assert initialize(CONFIG, Pool(4, 8 + 40, 2, 400)).ring_slots == 4
    assert initialize(CONFIG, Pool(4, 9, 2, 400)).ring_slots == 1
    assert initialize(CONFIG, Pool(4, 1600, 2, 400)).ring_slots == 0


def test_ring_follows_the_gap_while_the_bus_is_the_bottleneck() -> None:
    pool = Pool(16, 5000, 2, 4000)
    rings = [ring_target(CONFIG, pool, Costs(1e-5, gap), 2000) for gap in (0.0, 1e-4, 1e-3, 1e-2)]
    assert rings == [8, 16, 104, 1004]


def test_ring_is_one_layer_of_streamed_pages_where_the_bus_is_fast() -> None:
    pool = Pool(16, 1600, 2, 400)
    ring = ring_target(CONFIG, pool, Costs(1e-6, 1.0), 110)
    low = (pool.n_slots - ring) // pool.n_layers
    assert math.ceil(1.1 * (110 - low)) == ring == 13


def test_saturated_bus_gives_back_a_ring_larger_than_measured_need() -> None:
    config = replace(CONFIG, shrink_evaluations=2, cooldown_evaluations=2)
    state = PolicyState(Pool(4, 400, 2, 400), 100, Costs(1e-5, 1e-4), pressed_pages=300, baseline=CALM)
    rings = []
    for n in range(1, 80):
        feedback = replace(CALM, samples=10 * n, misses=10 * n, copy_busy=1.0, peak_slots=100)
        state = step(config, state, Observation(300, feedback=feedback)).next
        rings.append(state.ring_slots)
    assert rings[0] == 100 and rings[1] == 96
    assert rings[-1] == ring_target(config, state.pool, state.costs, 300) == 16
    assert rings == sorted(rings, reverse=True)


def test_misses_that_a_smaller_ring_would_end_never_grow_it() -> None:
    config = replace(CONFIG, grow_evaluations=1, shrink_evaluations=2, cooldown_evaluations=1)
    state = PolicyState(Pool(4, 100, 2, 200), 30, pressed_pages=20, baseline=CALM)
    rings = []
    for n in range(1, 7):
        feedback = replace(CALM, samples=10 * n, misses=10 * n, copy_busy=0.7, peak_slots=30)
        state = step(config, state, Observation(20, feedback=feedback)).next
        rings.append(state.ring_slots)
    assert rings == [30, 26, 26, 22, 22, 20]
    assert state.lowest_resident == 20


def test_costs_average_passes_and_ignore_copies_of_none() -> None:
    first = Costs().updated(Timing(10, 1.0, 0.5), 0.25)
    assert first == Costs(0.1, 0.5)
    assert first.updated(Timing(0, 0.0, 0.1), 0.25) == Costs(0.1, 0.4)
    assert first.updated(Timing(10, 3.0, 0.5), 0.5).copy_page_seconds == pytest.approx(0.2)
    for copied, copy, gap in ((-1, 0.0, 0.0), (1, math.nan, 0.0), (1, 0.0, -1.0), (1, math.inf, 0.0)):
        with pytest.raises(InvalidArgument):
            Timing(copied, copy, gap)
