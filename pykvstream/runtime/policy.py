"""How the slots of a pool are divided between resident pages and the ring, decided from what passes measured.

Units: ``_slots`` and ``_pages`` (of one layer), seconds, ``_evaluations`` (passes with fresh feedback).
Order: every function is pure, in exact arithmetic, and takes time in the number of layers, never of pages.
Source: spec of the adaptive ring, restated for page records: resident pages count the tail, a ring of any
    size, every layer alike.
Holds: ``sum(resident_pages) + ring_slots == n_slots`` and ``ring_floor <= ring_slots <= ring_cap``, always.

The model. A layer streams ``s`` pages per pass at ``c`` seconds each; between two layers' attention nothing
is consumed for ``g`` seconds. Copies run in demand order and stop when the ring is full, so of a layer's
pages at most ``R`` arrive ahead and the rest are waited for: a layer takes ``max(s * c, g + max(0, s - R) *
c)``. That falls with ``R`` up to ``min(s, g / c)`` and not beyond, while every slot given to the ring is a
page that streams in every pass. So the ring wants ``min(overlap_ratio * s, whole runs of g / c + the run that
is being read)``: with a fast bus one layer's pages, with a slow bus what arrives in the gap.

The counters keep it still: it grows at once when decoding meets a longer history, else after
``grow_evaluations`` bad passes, and shrinks one page per layer at a time after ``shrink_evaluations`` good
ones and ``cooldown_evaluations`` since the last change. Misses that more ring cannot cure (a saturated bus)
change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

from pykvstream.errors import InvalidArgument, NoSpace
from pykvstream.runtime.layout import PAGE_TOKENS, Pool

_LARGEST_COUNT = 2**32 - 1


def _require_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidArgument(f"{name} must be finite and not negative, got {value!r}")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Constants of the policy; the defaults are those of the system it starts from.

    ``run_pages`` is the copy length that keeps the bus busy (``CacheShape.run_pages``); a pool shortens it.
    ``fixed_ring_slots`` switches adaptation off. ``smoothing`` is the weight of the newest pass in an
    average.
    """

    run_pages: int
    overlap_ratio: float = 1.10
    grow_evaluations: int = 3
    shrink_evaluations: int = 8
    cooldown_evaluations: int = 64
    fixed_ring_slots: int | None = None
    miss_threshold: float = 0.01
    copy_saturated: float = 0.90
    copy_light: float = 0.50
    ring_light: float = 0.50
    smoothing: float = 0.125

    def __post_init__(self) -> None:
        for name in ("run_pages", "grow_evaluations", "shrink_evaluations", "cooldown_evaluations"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if not (math.isfinite(self.overlap_ratio) and self.overlap_ratio > 0):
            raise InvalidArgument(f"overlap_ratio must be finite and positive, got {self.overlap_ratio!r}")
        for name in ("miss_threshold", "copy_saturated", "copy_light", "ring_light", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgument(f"{name} must be from 0 to 1, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Feedback:
    """Counters since the epoch began, as the runtime reads them; they are judged, never trusted.

    A sample is a wait for a page, a miss one that found its page not there yet; layer counters sample the
    first wait of a layer, before anything was waited for, and count instead of the others where they exist.
    """

    epoch: int
    samples: int
    misses: int
    copy_busy: float
    peak_slots: int
    layer_samples: int = 0
    layer_misses: int = 0

    @property
    def is_sound(self) -> bool:
        return (
            0 <= self.misses <= self.samples
            and 0 <= self.layer_misses <= self.layer_samples
            and math.isfinite(self.copy_busy)
            and 0 <= self.copy_busy <= 1
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """One pass: what the copy engine moved, its time for it, the longest stretch without consumption."""

    copied_pages: int
    copy_seconds: float
    gap_seconds: float

    def __post_init__(self) -> None:
        _require_seconds("copy_seconds", self.copy_seconds)
        _require_seconds("gap_seconds", self.gap_seconds)
        if self.copied_pages < 0:
            raise InvalidArgument(f"copied_pages must not be negative, got {self.copied_pages!r}")


@dataclass(frozen=True, slots=True)
class Costs:
    """Two moving averages; None until measured."""

    copy_page_seconds: float | None = None
    gap_seconds: float | None = None

    def updated(self, timing: Timing, smoothing: float) -> Costs:
        """Return the averages with one more pass; a pass that copied nothing says nothing about copies."""
        copy = self.copy_page_seconds
        if timing.copied_pages > 0:
            copy = _averaged(copy, timing.copy_seconds / timing.copied_pages, smoothing)
        return Costs(copy, _averaged(self.gap_seconds, timing.gap_seconds, smoothing))


def _averaged(average: float | None, newest: float, smoothing: float) -> float:
    return newest if average is None else average + smoothing * (newest - average)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Where the policy stands. The placement is ``pool`` and ``ring_slots``; the rest is memory of feedback.

    ``pressed_pages`` is the history length for which decoding last found too little room, 0 for none.
    """

    pool: Pool
    ring_slots: int
    costs: Costs = field(default_factory=Costs)
    pressed_pages: int = 0
    starved: int = 0
    overprovisioned: int = 0
    evaluations: int = _LARGEST_COUNT
    baseline: Feedback | None = None

    def __post_init__(self) -> None:
        if not self.pool.ring_floor <= self.ring_slots <= self.pool.ring_cap:
            raise InvalidArgument(
                f"ring_slots must be from {self.pool.ring_floor} to {self.pool.ring_cap},"
                f" got {self.ring_slots}"
            )
        for name in ("pressed_pages", "starved", "overprovisioned", "evaluations"):
            count = getattr(self, name)
            if not 0 <= count <= _LARGEST_COUNT:
                raise InvalidArgument(f"{name} must be from 0 to {_LARGEST_COUNT}, got {count!r}")

    @property
    def resident_pages(self) -> tuple[int, ...]:
        return self.pool.deal(self.ring_slots)

    @property
    def lowest_resident(self) -> int:
        """Pages of the layer that keeps fewest: the first to stream."""
        return (self.pool.n_slots - self.ring_slots) // self.pool.n_layers


@dataclass(frozen=True, slots=True)
class Observation:
    """A pass about to run: pages it reaches, its rows, the stated intent, and what was measured before."""

    active_pages: int
    query_rows: int = 1
    is_decode: bool = True
    feedback: Feedback | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The next state and, for the pager, the placement it stands for."""

    next: PolicyState
    resident_pages: tuple[int, ...]
    ring_slots: int
    partition_changed: bool
    feedback_used: bool
    feedback_reset: bool


@dataclass(frozen=True, slots=True)
class _Fresh:
    """What is new in a feedback since the baseline."""

    is_used: bool = False
    is_reset: bool = False
    is_layer: bool = False
    miss_ratio: float = 0.0
    copy_busy: float = 0.0
    peak_slots: int = 0


def initialize(config: PolicyConfig, pool: Pool, costs: Costs | None = None) -> PolicyState:
    """Return the state of a fresh pool; ``NoSpace`` when a fixed ring does not fit it."""
    ring = pool.unmeasured_ring(config.run_pages)
    fixed = config.fixed_ring_slots
    if fixed is not None and pool.ring_floor < pool.ring_cap:
        if not pool.ring_floor <= fixed <= pool.ring_cap:
            raise NoSpace(f"fixed ring: need {fixed} slots, have {pool.ring_floor} to {pool.ring_cap}")
        ring = fixed
    return PolicyState(pool, ring, costs or Costs())


def enough_slots(config: PolicyConfig, pool: Pool, costs: Costs) -> int:
    """Return the ring beyond which a bus that is the bottleneck gains nothing.

    Whole runs, so that the noise of two averages does not move the boundary from pass to pass.
    """
    run = pool.run_of(config.run_pages)
    copy, gap = costs.copy_page_seconds, costs.gap_seconds
    if copy is None or gap is None:
        return 2 * run
    if gap >= pool.n_slots * copy:
        return pool.n_slots
    arriving = max(1, math.ceil(gap / copy / run)) * run
    return min(arriving + run, pool.n_slots)


def overlap_target(pool: Pool, active_pages: int, ratio: float, enough: int) -> int:
    """Return the most pages ``r`` a layer may keep with a ring that still suffices.

    The largest ``r`` from the tail up to ``active_pages`` and what leaves the smallest ring, with ``r ==
    active_pages`` or ``n_slots - r * n_layers >= min(ratio * (active_pages - r), enough)``; the tail where
    there is none. ``active_pages - r`` is what one layer streams. Each side of the ``min`` is
    linear in ``r``, so the answer is a division, not a search.
    """
    slots, layers, exact = pool.n_slots, pool.n_layers, Fraction(ratio)
    top = min(active_pages, (slots - pool.ring_floor) // layers)
    if top == active_pages or slots - top * layers >= exact * (active_pages - top):
        return top
    best = (slots - enough) // layers
    if exact < layers:
        best = max(best, math.floor((slots - exact * active_pages) / (layers - exact)))
    return max(pool.floor_pages, min(best, top))


def ring_target(
    config: PolicyConfig, pool: Pool, costs: Costs, active_pages: int, query_rows: int = 1
) -> int:
    """Return the smallest ring that serves passes of ``query_rows`` at ``active_pages``.

    Where everything fits, the largest ring that leaves it so.
    """
    enough = enough_slots(config, pool, costs)
    resident = overlap_target(pool, active_pages, config.overlap_ratio, enough)
    largest = min(pool.n_slots - resident * pool.n_layers, pool.ring_cap)
    if resident >= active_pages:
        return max(pool.ring_floor, largest)
    wanted = min(math.ceil(Fraction(config.overlap_ratio) * (active_pages - resident)), enough)
    smallest = max(pool.ring_floor, largest - pool.n_layers + 1)
    return min(max(wanted, smallest), largest)


def _ingest(baseline: Feedback | None, feedback: Feedback | None) -> tuple[Feedback | None, _Fresh]:
    if feedback is None:
        return baseline, _Fresh()
    if not feedback.is_sound:
        return None, _Fresh(is_reset=True)
    if baseline is None or baseline.epoch != feedback.epoch:
        return feedback, _Fresh(is_reset=True)
    samples, misses = feedback.samples - baseline.samples, feedback.misses - baseline.misses
    layer_samples = feedback.layer_samples - baseline.layer_samples
    layer_misses = feedback.layer_misses - baseline.layer_misses
    if not (0 <= misses <= samples and 0 <= layer_misses <= layer_samples):
        return feedback, _Fresh(is_reset=True)
    is_layer = feedback.layer_samples > 0
    if is_layer:
        samples, misses = layer_samples, layer_misses
    if samples == 0:
        return feedback, _Fresh()
    return feedback, _Fresh(True, False, is_layer, misses / samples, feedback.copy_busy, feedback.peak_slots)


def _check(pool: Pool, observation: Observation) -> None:
    if not 0 <= observation.active_pages <= pool.ctx_pages:
        raise InvalidArgument(
            f"active_pages must be from 0 to {pool.ctx_pages}, got {observation.active_pages}"
        )
    most_rows = (pool.tail_pages - 1) * PAGE_TOKENS
    if not 1 <= observation.query_rows <= most_rows:
        raise InvalidArgument(f"query_rows must be from 1 to {most_rows}, got {observation.query_rows}")


def _raised(counter: int, condition: bool) -> int:
    return min(counter + 1, _LARGEST_COUNT) if condition else 0


def _adapt(
    config: PolicyConfig, state: PolicyState, observation: Observation, fresh: _Fresh, entering: bool
) -> PolicyState:
    """Under pressure: count what the feedback says, then move the ring by the first rule that holds."""
    pool, ring = state.pool, state.ring_slots
    target = ring_target(config, pool, state.costs, observation.active_pages, observation.query_rows)
    is_below = ring < target
    # Where a smaller ring leaves nothing to stream, a larger one is no cure.
    may_fit = pool.n_slots - target >= pool.n_layers * observation.active_pages
    is_missing = fresh.miss_ratio > config.miss_threshold
    is_saturated = fresh.copy_busy >= config.copy_saturated
    is_starving = fresh.is_used and is_missing and not is_saturated and not may_fit
    is_light = (
        fresh.copy_busy < config.copy_light and fresh.peak_slots < config.ring_light * ring and not is_missing
    )
    # Only a measured target says that a saturated bus would do as well with less ring.
    is_measured = state.costs.copy_page_seconds is not None and state.costs.gap_seconds is not None
    is_surplus = ring > target and (is_light or may_fit or (is_saturated and is_measured))
    if fresh.is_used:
        state = replace(
            state,
            evaluations=min(state.evaluations + 1, _LARGEST_COUNT),
            starved=_raised(state.starved, is_below or is_starving),
            overprovisioned=_raised(state.overprovisioned, is_surplus),
        )
    is_cool = state.evaluations >= config.cooldown_evaluations
    may_grow = (is_cool or (fresh.is_layer and is_starving)) and (is_below or is_starving)
    if is_below and entering:
        ring = target
    elif fresh.is_used and may_grow and state.starved >= config.grow_evaluations:
        ring = target if is_below else min(ring + pool.n_layers, pool.ring_cap)
    elif fresh.is_used and is_cool and is_surplus and state.overprovisioned >= config.shrink_evaluations:
        ring = max(target, ring - pool.n_layers)
    return replace(state, ring_slots=ring)


def step(config: PolicyConfig, state: PolicyState, observation: Observation) -> Decision:
    """Decide the placement of the next pass. Only applying the decision moves pages."""
    _check(state.pool, observation)
    baseline, fresh = _ingest(state.baseline, observation.feedback)
    costs = state.costs
    if observation.timing is not None:
        costs = costs.updated(observation.timing, config.smoothing)
    following = replace(state, baseline=baseline, costs=costs)
    if fresh.is_reset:
        following = replace(following, starved=0, overprovisioned=0)
    active = observation.active_pages
    has_pressure = active > state.lowest_resident
    entering = observation.is_decode and has_pressure and active != state.pressed_pages
    if not has_pressure:
        following = replace(following, starved=0, overprovisioned=0)
    elif config.fixed_ring_slots is None and (entering or fresh.is_used):
        following = _adapt(config, following, observation, fresh, entering)
    has_changed = following.ring_slots != state.ring_slots
    if has_changed:
        following = replace(following, starved=0, overprovisioned=0, evaluations=0)
    is_pressed = observation.is_decode and active > following.lowest_resident
    following = replace(following, pressed_pages=active if is_pressed else 0)
    return Decision(
        next=following,
        resident_pages=following.resident_pages,
        ring_slots=following.ring_slots,
        partition_changed=has_changed,
        feedback_used=fresh.is_used,
        feedback_reset=fresh.is_reset,
    )


def restore(
    config: PolicyConfig, pool: Pool, observation: Observation, costs: Costs | None = None
) -> Decision:
    """Decide for a pool taken anew (a phase change): a fresh state with known averages, and one step."""
    return step(config, initialize(config, pool, costs), observation)


def grow(config: PolicyConfig, state: PolicyState, pool: Pool, observation: Observation) -> Decision:
    """``restore`` for a pool that must be larger than the present one."""
    if pool.n_slots <= state.pool.n_slots:
        raise InvalidArgument(f"a pool of {pool.n_slots} slots does not grow one of {state.pool.n_slots}")
    return restore(config, pool, observation, state.costs)


def shrink(config: PolicyConfig, state: PolicyState, pool: Pool, observation: Observation) -> Decision:
    """``restore`` for a pool that must be smaller than the present one."""
    if pool.n_slots >= state.pool.n_slots:
        raise InvalidArgument(f"a pool of {pool.n_slots} slots does not shrink one of {state.pool.n_slots}")
    return restore(config, pool, observation, state.costs)
