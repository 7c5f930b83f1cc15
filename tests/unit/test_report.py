"""The plan as a picture: bars to scale and of exact width, tables with the plan's own numbers."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from pykvstream.errors import InvalidArgument, NotFound
from pykvstream.report import (
    arena_map,
    column_widths,
    contexts_table,
    default_contexts,
    plan_report,
    sizes_text,
)
from pykvstream.runtime.layout import CacheShape, PhaseNeed, plan_arena, recommended_arena_bytes

MIB = 1 << 20
RECORD = 79_872
SHAPE = CacheShape(30, RECORD, 30 * RECORD)
NEEDS = (PhaseNeed("prefill", 128, 4 * MIB), PhaseNeed("decode", 64, MIB))
PLAN = plan_arena(SHAPE, 12 * MIB, 8192, NEEDS)
BAR = set("▒█▓·")


def shown(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, record=True)
    console.print(renderable)
    return console.export_text()


def bars(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 2 and set(line) <= BAR]


@pytest.mark.parametrize("width", [8, 40, 72])
def test_every_phase_has_a_bar_of_the_asked_width(width: int) -> None:
    found = bars(shown(arena_map(PLAN, width)))
    assert [len(bar) for bar in found] == [width, width]
    assert all(glyph in bar for bar in found for glyph in "▒█▓")


def test_bars_are_to_scale() -> None:
    prefill, decode = bars(shown(arena_map(PLAN, 96)))
    assert prefill.count("▓") == pytest.approx(4 * 8, abs=2)
    assert decode.count("▓") == pytest.approx(8, abs=2)
    ring = PLAN.phase("decode").placement.ring_slots
    assert decode.count("▒") == pytest.approx(96 * ring * RECORD / (12 * MIB), abs=2)


def test_map_names_sizes_and_rows() -> None:
    text = shown(arena_map(PLAN))
    assert f"arena of 12.0 MiB ({12 * MIB} bytes), context of 8192 tokens" in text
    assert "prefill: up to 128 rows per pass" in text
    assert f"ring of {PLAN.phase('decode').placement.ring_slots}" in text
    assert "workspace" in text and "4.0 MiB" in text


def test_resident_plan_says_that_nothing_streams_and_draws_no_ring() -> None:
    size = recommended_arena_bytes(SHAPE, 8192, NEEDS)
    text = shown(arena_map(plan_arena(SHAPE, size, 8192, NEEDS)))
    assert text.count("nothing streams") == 2
    assert "▒" not in text


def test_contexts_table_has_the_plans_numbers() -> None:
    lines = shown(contexts_table(PLAN, [256, 8192])).splitlines()
    short = next(line for line in lines if " 256 " in line)
    assert [cell.strip() for cell in short.split("│")[1:-1]] == ["256", "2.3 MiB", "30", "30", "0", "0.0 MiB"]
    whole = next(line for line in lines if " 8,192 " in line)
    pages, resident, streamed = (int(cell) for cell in whole.split("│")[3:6])
    assert pages == 30 * 32 == resident + streamed and streamed > 0
    assert f"{streamed * RECORD / MIB:,.1f} MiB" in whole


def test_contexts_table_refuses_unknown_phase() -> None:
    with pytest.raises(NotFound, match="vision"):
        contexts_table(PLAN, [1], "vision")


def test_sizes_are_exact_to_the_byte() -> None:
    text = shown(sizes_text(PLAN))
    assert f"({PLAN.smallest_bytes} bytes)" in text and f"({PLAN.recommended_bytes} bytes)" in text


def test_report_holds_map_table_and_sizes() -> None:
    text = shown(plan_report(PLAN))
    assert len(bars(text)) == 2
    assert all(f" {n:,} " in text for n in (1024, 2048, 4096, 8192))
    assert "smallest arena" in text and "recommended arena" in text


def test_default_contexts_end_with_the_whole() -> None:
    assert default_contexts(8192) == (1024, 2048, 4096, 8192)
    assert default_contexts(5000) == (1024, 2048, 4096, 5000)
    assert default_contexts(1024) == (1024,)
    assert default_contexts(1) == (1,)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=6), st.integers(6, 200))
def test_columns_sum_to_the_width_and_keep_the_order_of_sizes(sizes: list[int], width: int) -> None:
    columns = column_widths(sizes, width)
    assert sum(columns) == width
    assert min(columns) >= 1
    for (a, a_columns), (b, b_columns) in pairwise(sorted(zip(sizes, columns, strict=True))):
        assert a <= b and a_columns <= b_columns + 1


def test_narrow_maps_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="8 columns"):
        arena_map(PLAN, 7)
    with pytest.raises(InvalidArgument, match="columns"):
        column_widths([1, 1, 1], 2)
