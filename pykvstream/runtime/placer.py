"""Keeps the decode pool divided as the policy says, from what the passes before have measured.

Order: ``observe`` reads counters after a pass, ``prepare`` applies a decision before the next one. Only decode
passes teach: a prompt pass computes so long that its layout hardly matters.
Units: seconds, pages.
Holds: ``Placer``.
"""

from __future__ import annotations

from collections.abc import Callable

from pykvstream.core.pager import PagerInfo
from pykvstream.runtime.layout import PhasePlan, Placement
from pykvstream.runtime.policy import Feedback, Observation, PolicyConfig, Timing, initialize, step

PASSES_PER_EVALUATION = 8
"""A decision takes a tenth of a millisecond; passes in between only count."""


class Placer:
    """The policy of one phase's pool; ``apply(placement)`` moves the pages.

    The policy is asked when the history reaches another page, and else once in ``PASSES_PER_EVALUATION`` passes.
    """

    def __init__(self, plan: PhasePlan, run_pages: int, apply: Callable[[Placement], None]) -> None:
        self._config = PolicyConfig(run_pages=run_pages)
        self._state = initialize(self._config, plan.pool)
        self._lowest_resident = self._state.lowest_resident
        self._max_rows = plan.max_rows
        self._apply = apply
        self._epoch = 0
        self._reached = 0
        self._passes = 0
        self._feedback: Feedback | None = None
        self._timing: Timing | None = None
        self._seen: tuple[int, PagerInfo, float] | None = None
        self.is_watching = True  # the newest pass may have streamed something that the policy learns from

    def prepare(self, active_pages: int, n_rows: int) -> None:
        """Before a decode pass that reaches ``active_pages``: place anew where the policy says so."""
        self.is_watching = active_pages > self._lowest_resident or self._feedback is not None
        if not self.is_watching:
            self._seen = None
            return
        self._passes += 1
        if active_pages == self._reached and self._passes < PASSES_PER_EVALUATION:
            return
        self._reached, self._passes = active_pages, 0
        observation = Observation(active_pages, n_rows, True, self._feedback, self._timing)
        decision = step(self._config, self._state, observation)
        self._feedback = self._timing = None
        if decision.partition_changed:
            self._apply(Placement(decision.resident_pages, decision.ring_slots, self._max_rows))
            self._epoch += 1
            self._seen = None
        self._state = decision.next
        self._lowest_resident = self._state.lowest_resident

    def observe(self, load_ns: int, pager: PagerInfo, now: float) -> None:
        """After a decode pass that was to be watched: nanoseconds of copies to the device, the pager's counters, and
        the clock (seconds)."""
        if self._seen is not None and pager.waves > self._seen[1].waves:
            before_ns, before_pager, before = self._seen
            copy_seconds = (load_ns - before_ns) / 1e9
            busy = copy_seconds / (now - before) if now > before else 0.0
            self._feedback = Feedback(self._epoch, pager.waves, pager.stalls, min(1.0, busy), pager.peak_pages)
            copied_pages = pager.streamed_pages - before_pager.streamed_pages
            self._timing = Timing(copied_pages, copy_seconds, pager.gap_ns / 1e9)
        self._seen = (load_ns, pager, now)
