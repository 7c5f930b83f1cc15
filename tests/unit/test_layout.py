"""Arena layouts: smallest and fully resident arena are exact, regions lie where first fit puts them."""

from __future__ import annotations

import pytest

from pykvstream.errors import InvalidArgument, NoSpace, NotFound, SizeOverflow
from pykvstream.runtime.layout import (
    POOL_REGION,
    WORKSPACE_REGION,
    CacheShape,
    PhaseNeed,
    Placement,
    forecast_pass,
    plan_arena,
    recommended_arena_bytes,
    resident_contexts,
    smallest_arena_bytes,
    tail_pages,
)

RECORD = 79_872
SHAPE = CacheShape(30, RECORD, 30 * RECORD)
NEEDS = (PhaseNeed("prefill", 512, 3_000_001), PhaseNeed("decode", 64, 500_000))


def test_tail_counts_a_pass_that_starts_inside_a_page() -> None:
    assert [tail_pages(rows) for rows in (1, 2, 256, 257, 512)] == [2, 2, 2, 3, 3]


def test_smallest_arena_is_the_formula_by_hand() -> None:
    prefill = 91 * RECORD + 3_000_064
    decode = 61 * RECORD + 500_032
    assert smallest_arena_bytes(SHAPE, 8192, NEEDS) == max(prefill, decode) == prefill
    wide = (PhaseNeed("prefill", 128, 64), PhaseNeed("decode", 64, 500_000))
    assert smallest_arena_bytes(SHAPE, 8192, wide) == decode


def test_smallest_arena_works_and_less_is_refused_with_both_numbers() -> None:
    smallest = smallest_arena_bytes(SHAPE, 8192, NEEDS)
    plan = plan_arena(SHAPE, smallest, 8192, NEEDS)
    assert plan.phase("prefill").placement == Placement((3,) * 30, 1, 512)
    assert plan.phase("decode").pool.n_slots > 61
    assert plan.phase("prefill").unused_bytes == 0
    for less in (1, 64, RECORD):
        with pytest.raises(NoSpace) as refused:
            plan_arena(SHAPE, smallest - less, 8192, NEEDS)
        message = str(refused.value)
        assert f"need 9.8 MiB ({smallest} bytes)" in message
        assert f"({smallest - less} bytes)" in message
        assert "prefill" in message


@pytest.mark.parametrize(
    ("ctx_tokens", "pages"), [(1, 1), (2, 1), (255, 1), (256, 1), (257, 2), (511, 2), (512, 2)]
)
def test_context_within_the_tail_never_streams_and_needs_no_ring(ctx_tokens: int, pages: int) -> None:
    needs = (PhaseNeed("decode", 64, 64),)
    smallest = smallest_arena_bytes(SHAPE, ctx_tokens, needs)
    assert smallest == recommended_arena_bytes(SHAPE, ctx_tokens, needs)
    assert smallest == 30 * pages * RECORD + 64
    placement = plan_arena(SHAPE, smallest, ctx_tokens, needs).phases[0].placement
    assert placement == Placement((pages,) * 30, 0, min(64, ctx_tokens))
    for committed in range(ctx_tokens):
        assert forecast_pass(SHAPE, placement, committed, 1).streamed_pages == 0


def test_first_context_beyond_the_tail_needs_a_ring() -> None:
    needs = (PhaseNeed("decode", 64, 64),)
    assert smallest_arena_bytes(SHAPE, 513, needs) == 61 * RECORD + 64
    assert recommended_arena_bytes(SHAPE, 513, needs) == 90 * RECORD + 64


def test_recommended_arena_streams_nothing_and_one_byte_less_does() -> None:
    recommended = recommended_arena_bytes(SHAPE, 8192, NEEDS)
    assert recommended == 30 * 32 * RECORD + 3_000_064
    full = plan_arena(SHAPE, recommended, 8192, NEEDS)
    assert all(phase.is_fully_resident and phase.placement.ring_slots == 0 for phase in full.phases)
    less = plan_arena(SHAPE, recommended - 1, 8192, NEEDS).phase("prefill")
    assert not less.is_fully_resident and less.placement.ring_slots >= 1
    assert full.recommended_bytes == recommended


def test_more_than_recommended_stays_unused() -> None:
    recommended = recommended_arena_bytes(SHAPE, 8192, NEEDS)
    more = plan_arena(SHAPE, recommended + 1000, 8192, NEEDS).phase("prefill")
    assert (more.pool.n_slots, more.unused_bytes) == (30 * 32, 1000)


def test_pass_is_no_wider_than_the_context() -> None:
    phase = plan_arena(SHAPE, 40_000_000, 100, NEEDS).phase("prefill")
    assert (phase.max_rows, phase.pool.tail_pages, phase.placement.resident_pages) == (100, 2, (1,) * 30)


@pytest.mark.parametrize("arena_bytes", [12 << 20, (12 << 20) + 1, 20 << 20, 64 << 20, 512 << 20])
def test_regions_are_aligned_adjacent_and_inside(arena_bytes: int) -> None:
    for phase in plan_arena(SHAPE, arena_bytes, 8192, NEEDS).phases:
        pool, workspace = phase.regions
        assert (pool.id, pool.offset_bytes, workspace.id) == (POOL_REGION, 0, WORKSPACE_REGION)
        assert workspace.offset_bytes == pool.size_bytes
        assert all(size % 64 == 0 for size in (pool.size_bytes, workspace.size_bytes))
        assert pool.size_bytes >= phase.placement.n_slots * RECORD
        assert workspace.size_bytes >= phase.need.workspace_bytes
        assert workspace.offset_bytes + workspace.size_bytes + phase.unused_bytes == arena_bytes
        assert phase.unused_bytes < RECORD + 64 or phase.is_fully_resident
        assert phase.placement.n_slots == phase.pool.n_slots


def test_records_that_are_no_multiple_of_the_alignment_still_fit() -> None:
    shape, needs = CacheShape(3, 1000, 3000), (PhaseNeed("decode", 1, 1),)
    smallest = smallest_arena_bytes(shape, 4096, needs)
    assert smallest == 7040 + 64
    assert plan_arena(shape, smallest, 4096, needs).phases[0].pool.n_slots == 7
    with pytest.raises(NoSpace):
        plan_arena(shape, smallest - 1, 4096, needs)


def test_forecast_by_hand() -> None:
    shape = CacheShape(2, 300, 500, (300, 200))
    placement = Placement((6, 4), 3, 64)
    within = forecast_pass(shape, placement, 4 * 256 - 1, 1)
    assert (within.active_pages, within.resident_pages, within.streamed_pages) == (4, 8, 0)
    split = forecast_pass(shape, placement, 5 * 256 - 1, 1)
    assert (split.active_pages, split.streamed_pages, split.streamed_bytes) == (5, 1, 200)
    assert split.resident_pages == 5 + 4
    both = forecast_pass(shape, placement, 9 * 256, 64)
    assert (both.active_pages, both.streamed_pages) == (10, (10 - 6) + (10 - 4))
    assert both.streamed_bytes == 4 * 300 + 6 * 200


def test_contexts_give_pages_of_the_pass_that_ends_them() -> None:
    placement = plan_arena(SHAPE, 20 << 20, 8192, NEEDS).phase("decode").placement
    rows = resident_contexts(SHAPE, placement, [1, 256, 257, 8192])
    assert [row.forecast.active_pages for row in rows] == [1, 1, 2, 32]
    assert rows[0].history_bytes == SHAPE.column_bytes
    last = rows[-1].forecast
    assert last.streamed_pages > 0
    assert last.resident_pages + last.streamed_pages == 30 * 32
    assert last.streamed_bytes == last.streamed_pages * RECORD


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((0, 64, 64), "n_layers"),
        ((2, 0, 128), "slot_bytes"),
        ((2, 64, 100), "column"),
        ((2, 64, 128, (64,)), "2 layers"),
        ((2, 64, 96, (32, 32)), "largest"),
    ],
)
def test_shape_refuses_records_that_do_not_agree(shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        CacheShape(*shape)  # type: ignore[arg-type]


def test_plan_refuses_bad_requests_by_name() -> None:
    with pytest.raises(InvalidArgument, match="ctx_tokens"):
        plan_arena(SHAPE, 1 << 30, 0, NEEDS)
    with pytest.raises(InvalidArgument, match="different names"):
        plan_arena(SHAPE, 1 << 30, 100, (NEEDS[0], NEEDS[0]))
    with pytest.raises(InvalidArgument, match="different names"):
        plan_arena(SHAPE, 1 << 30, 100, ())
    with pytest.raises(InvalidArgument, match="workspace_bytes of phase 'decode'"):
        PhaseNeed("decode", 1, 0)
    with pytest.raises(InvalidArgument, match="arena_bytes"):
        plan_arena(SHAPE, -1, 100, NEEDS)
    with pytest.raises(NoSpace, match=r"have 0\.0 MiB"):
        plan_arena(SHAPE, 0, 100, NEEDS)
    with pytest.raises(NotFound, match="vision"):
        plan_arena(SHAPE, 1 << 30, 100, NEEDS).phase("vision")
    with pytest.raises(InvalidArgument, match="wider"):
        forecast_pass(SHAPE, Placement((3,) * 30, 1, 8), 0, 9)
    with pytest.raises(InvalidArgument, match="2 pages does not fit"):
        forecast_pass(SHAPE, Placement((1,) * 30, 0, 8), 256, 1)


def test_sizes_beyond_64_bits_are_refused() -> None:
    with pytest.raises(SizeOverflow):
        recommended_arena_bytes(SHAPE, 2**62, NEEDS)
    with pytest.raises(SizeOverflow):
        smallest_arena_bytes(CacheShape(1, 2**63, 2**63), 8192, NEEDS)
