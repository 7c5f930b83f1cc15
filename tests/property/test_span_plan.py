"""Span plans (P-SP): made exactly when the spans partition the active tokens and lie in their regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena, ArenaState, Lease
from pykvstream.core.device import Device
from pykvstream.core.kv import PAGE_TOKENS, KvLayer, record_layout
from pykvstream.core.span import Executor, Span, SpanPlan
from pykvstream.errors import Closed, InvalidArgument, NoSpace, SizeOverflow, Unsupported
from tests.examples import examples

LAYER = KvLayer(1, 32, 32, 8, 8)
RECORD = record_layout(LAYER).record_bytes
REGION_PAGES = (6, 9)


class Bench:
    """Two leased regions of a few records each."""

    def __init__(self) -> None:
        self.device = Device(1)
        self.arena = Arena(self.device, sum(REGION_PAGES) * RECORD)
        self.arena.begin()
        for number, n_pages in enumerate(REGION_PAGES):
            self.arena.reserve(number, n_pages * RECORD)
        self.arena.commit()
        self.leases = tuple(self.arena.acquire(number) for number in range(len(REGION_PAGES)))

    def close(self) -> None:
        for lease in self.leases:
            lease.close()
        self.arena.close()
        assert self.device.info.live_objects == 0
        self.device.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


Placement = tuple[list[tuple[int, int, int, int]], int]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Spans as (region, first record, record step, pages), and the tokens in the last page."""
    spans = []
    for _ in range(draw(st.integers(1, 6))):
        region = draw(st.integers(0, 1))
        step = draw(st.integers(1, 3))
        n_pages = draw(st.integers(1, (REGION_PAGES[region] - 1) // step + 1))
        first = draw(st.integers(0, REGION_PAGES[region] - 1 - (n_pages - 1) * step))
        spans.append((region, first, step, n_pages))
    return spans, draw(st.integers(1, PAGE_TOKENS))


def build(leases: tuple[Lease, ...], placement: Placement) -> tuple[list[Span], int]:
    spans, last_tokens = placement
    made: list[Span] = []
    begin = 0
    for number, (region, first, step, n_pages) in enumerate(spans):
        is_last = number == len(spans) - 1
        tokens = n_pages * PAGE_TOKENS - (PAGE_TOKENS - last_tokens if is_last else 0)
        made.append(Span(begin, tokens, leases[region], first * RECORD, step * RECORD))
        begin += tokens
    return made, begin


@given(placement=placements(), data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_partition_gives_addresses_in_logical_order(
    bench: Bench, placement: Placement, data: st.DataObject
) -> None:
    spans, active = build(bench.leases, placement)
    rows = data.draw(st.integers(1, min(active, 2**32 - 1)))
    with SpanPlan(bench.device, LAYER, spans, active, rows) as plan:
        expected = [
            span.lease.info.address + span.offset_bytes + page * span.stride_bytes
            for span in spans
            for page in range(-(-span.n_tokens // PAGE_TOKENS))
        ]
        assert plan.page_table().tolist() == expected
        info = plan.info
        assert (info.n_spans, info.active_tokens, info.n_query_rows) == (len(spans), active, rows)
        assert (info.n_pages, info.live_bytes) == (len(expected), len(expected) * RECORD)


Flaw = tuple[list[Span], int, type[Exception]]


def mutations(spans: list[Span], active: int, i: int, delta: int) -> dict[str, Flaw]:
    """What spoils a good plan at span ``i``, each with the error that names it."""

    def changed(**fields: object) -> list[Span]:
        return [*spans[:i], replace(spans[i], **fields), *spans[i + 1 :]]  # type: ignore[arg-type]

    span = spans[i]
    return {
        "shifted": (changed(token_begin=span.token_begin + delta), active, InvalidArgument),
        "longer": (changed(n_tokens=span.n_tokens + delta), active, InvalidArgument),
        "empty": (changed(n_tokens=0), active, InvalidArgument),
        "dropped": ([*spans[:i], *spans[i + 1 :]], active, InvalidArgument),
        "doubled": ([*spans[: i + 1], *spans[i:]], active, InvalidArgument),
        "more active": (spans, active + delta, InvalidArgument),
        "host": (changed(executor=Executor.HOST), active, Unsupported),
        "unknown executor": (changed(executor=7), active, Unsupported),
        "offset": (changed(offset_bytes=span.offset_bytes + 32), active, InvalidArgument),
        "stride": (changed(stride_bytes=RECORD - 64), active, InvalidArgument),
        "outside": (changed(offset_bytes=max(REGION_PAGES) * RECORD), active, NoSpace),
        "beyond 64 bits": (changed(offset_bytes=2**64 - 64), active, SizeOverflow),
    }


@given(placement=placements(), data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_flaw_is_refused_by_its_name(bench: Bench, placement: Placement, data: st.DataObject) -> None:
    spans, active = build(bench.leases, placement)
    i = data.draw(st.integers(0, len(spans) - 1))
    choices = mutations(spans, active, i, data.draw(st.integers(1, 600)))
    name = data.draw(st.sampled_from(sorted(choices)))
    spoiled, tokens, expected = choices[name]
    before = bench.device.info.live_objects
    with pytest.raises(expected):
        SpanPlan(bench.device, LAYER, spoiled, tokens, 1)
    assert bench.device.info.live_objects == before


@given(placement=placements(), rows=st.sampled_from([0, 1]))
@settings(max_examples=examples(30), deadline=None)
def test_query_rows_lie_within_active_tokens(bench: Bench, placement: Placement, rows: int) -> None:
    spans, active = build(bench.leases, placement)
    with pytest.raises(InvalidArgument):
        SpanPlan(bench.device, LAYER, spans, active, 0 if rows == 0 else active + 1)


@given(order=st.permutations(["lease", "arena", "plan", "device"]))
@settings(max_examples=examples(24), deadline=None)
def test_release_order_is_free(order: list[str]) -> None:
    """A plan keeps what it needs: whatever goes first, its table stays right until it is closed."""
    device = Device(1)
    arena = Arena(device, RECORD)
    arena.begin()
    arena.reserve(1, RECORD)
    arena.commit()
    lease = arena.acquire(1)
    address = lease.info.address
    plan = SpanPlan(device, LAYER, [Span(0, 5, lease, 0, RECORD)], 5, 1)
    handles = {"lease": lease, "arena": arena, "plan": plan, "device": device}
    for name in order:
        if not plan.closed:
            assert plan.page_table().tolist() == [address]
        handles[name].close()
    with pytest.raises(Closed):
        plan.page_table()


def test_plan_holds_its_region_until_closed() -> None:
    with Device(1) as device, Arena(device, RECORD) as arena:
        arena.begin()
        arena.reserve(1, RECORD)
        arena.commit()
        lease = arena.acquire(1)
        plan = SpanPlan(device, LAYER, [Span(0, 256, lease, 0, RECORD)], 256, 1)
        lease.close()
        arena.quiesce()
        assert arena.info.state == ArenaState.DRAINING
        plan.close()
        assert arena.info.state == ArenaState.QUIESCENT
