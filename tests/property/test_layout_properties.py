"""Layouts of any model fit any arena that is not refused, and the forecast agrees with the pager's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream.errors import NoSpace
from pykvstream.runtime.layout import (
    PAGE_TOKENS,
    CacheShape,
    PassForecast,
    PhaseNeed,
    Placement,
    forecast_pass,
    pages_of,
    plan_arena,
    recommended_arena_bytes,
    smallest_arena_bytes,
    tail_pages,
)
from tests.examples import examples


@st.composite
def requests(draw: st.DrawFn) -> tuple[CacheShape, int, tuple[PhaseNeed, ...]]:
    layers, slot = draw(st.integers(1, 6)), draw(st.integers(1, 40)) * draw(st.sampled_from([1, 64]))
    rows, workspaces = st.integers(1, 700), st.integers(1, 5000)
    needs = tuple(PhaseNeed(name, draw(rows), draw(workspaces)) for name in ("prefill", "decode"))
    return CacheShape(layers, slot, layers * slot), draw(st.integers(1, 4000)), needs


@given(requests(), st.integers(0, 3000))
@settings(max_examples=examples(200), deadline=None)
def test_smallest_is_the_boundary_between_refused_and_served(
    request: tuple[CacheShape, int, tuple[PhaseNeed, ...]], more: int
) -> None:
    shape, ctx_tokens, needs = request
    smallest = smallest_arena_bytes(shape, ctx_tokens, needs)
    with pytest.raises(NoSpace):
        plan_arena(shape, smallest - 1, ctx_tokens, needs)
    plan = plan_arena(shape, smallest + more, ctx_tokens, needs)
    for phase in plan.phases:
        assert sum(region.size_bytes for region in phase.regions) + phase.unused_bytes == plan.arena_bytes
        assert phase.placement.n_slots == phase.pool.n_slots
        assert phase.pool.n_slots * shape.slot_bytes <= phase.pool_region.size_bytes
        assert min(phase.placement.resident_pages) >= min(tail_pages(phase.max_rows), pages_of(ctx_tokens))
        if phase.placement.ring_slots == 0:
            assert phase.is_fully_resident


@given(requests())
@settings(max_examples=examples(60), deadline=None)
def test_recommended_is_the_boundary_between_streaming_and_not(
    request: tuple[CacheShape, int, tuple[PhaseNeed, ...]],
) -> None:
    shape, ctx_tokens, needs = request
    recommended = recommended_arena_bytes(shape, ctx_tokens, needs)

    def streams(arena_bytes: int) -> bool:
        plan = plan_arena(shape, arena_bytes, ctx_tokens, needs)
        return any(
            forecast_pass(shape, phase.placement, ctx_tokens - 1, 1).streamed_pages for phase in plan.phases
        )

    assert not streams(recommended)
    fewest_bytes_less = 64 * (1 + shape.slot_bytes // 64)
    if recommended - fewest_bytes_less >= smallest_arena_bytes(shape, ctx_tokens, needs):
        assert streams(recommended - fewest_bytes_less)


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_pass_holds_every_page_once_and_fits_the_placement(data: st.DataObject) -> None:
    layers, max_rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 600))
    tail = tail_pages(max_rows)
    resident = tuple(data.draw(st.integers(tail, tail + 8)) for _ in range(layers))
    shape, placement = CacheShape(layers, 64, 64 * layers), Placement(resident, 1, max_rows)
    committed, rows = data.draw(st.integers(0, 5000)), data.draw(st.integers(1, max_rows))
    forecast = forecast_pass(shape, placement, committed, rows)
    assert forecast.active_pages == pages_of(committed + rows)
    assert forecast.resident_pages + forecast.streamed_pages == layers * forecast.active_pages
    assert forecast.resident_pages <= sum(resident)
    if all(forecast.active_pages <= pages for pages in resident):
        assert forecast.streamed_pages == 0


class Pager:
    """A pager with a sequence, at the C interface: only metadata moves."""

    def __init__(self, native: ModuleType, placement: Placement, committed_tokens: int) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.owned: list[tuple[Any, Any]] = []
        n_layers = len(placement.resident_pages)
        device = self.made("kvs_device", "create", self.struct("kvs_device_desc", n_threads=1))
        layer = {"n_kv_heads": 1, "head_dim_k": 32, "head_dim_v": 32, "type_k": 2, "type_v": 2}
        layers = self.ffi.new("kvs_kv_layer[]", [layer] * n_layers)
        cache = self.made("kvs_cache", "create", device, layers, n_layers)
        info = self.struct("kvs_cache_info")
        self.check(self.lib.kvs_cache_get_info(cache, info))
        self.shape = CacheShape(n_layers, info.max_record_bytes, info.column_bytes)
        pool_bytes = placement.n_slots * self.shape.slot_bytes
        arena = self.made("kvs_arena", "create", device, pool_bytes, 64)
        self.check(self.lib.kvs_arena_begin(arena, 0))
        self.check(self.lib.kvs_arena_reserve(arena, self.struct("kvs_region", id=1, size_bytes=pool_bytes)))
        self.check(self.lib.kvs_arena_commit(arena))
        lease = self.made("kvs_lease", "acquire", arena, 1, maker="kvs_arena_acquire")
        self.seq = self.made("kvs_seq", "create", cache, committed_tokens + placement.max_rows)
        if committed_tokens:
            self.check(self.lib.kvs_seq_append(self.seq, committed_tokens))
            self.check(self.lib.kvs_seq_commit(self.seq, committed_tokens))
        self.pager = self.made("kvs_pager", "create", cache)
        self.resident = self.ffi.new("uint32_t[]", placement.resident_pages)
        desc = self.struct(
            "kvs_placement",
            n_layers=n_layers,
            resident_pages=self.resident,
            ring_slots=placement.ring_slots,
            max_rows=placement.max_rows,
        )
        self.check(self.lib.kvs_pager_attach(self.pager, lease, desc))

    def check(self, status: int) -> None:
        assert status == 0, self.ffi.string(self.lib.kvs_status_name(status))

    def struct(self, kind: str, **fields: Any) -> Any:
        return self.ffi.new(f"{kind} *", {"struct_size": self.ffi.sizeof(kind), **fields})

    def made(self, kind: str, verb: str, *arguments: Any, maker: str = "") -> Any:
        out = self.ffi.new(f"{kind} **")
        self.check(getattr(self.lib, maker or f"{kind}_{verb}")(*arguments, out))
        self.owned.append((getattr(self.lib, f"{kind}_release"), out[0]))
        return out[0]

    def forecast(self, n_rows: int) -> PassForecast:
        out = self.struct("kvs_pass_forecast")
        self.check(self.lib.kvs_pager_forecast(self.pager, self.seq, n_rows, out))
        return PassForecast(out.active_pages, out.resident_pages, out.streamed_pages, out.streamed_bytes)

    def close(self) -> None:
        for release, pointer in reversed(self.owned):
            release(pointer)


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_forecast_agrees_with_the_pagers(data: st.DataObject) -> None:
    native = pytest.importorskip("pykvstream._ffi", exc_type=ImportError, reason="native module not built")
    max_rows = data.draw(st.sampled_from([1, 64, 256, 300]))
    tail = tail_pages(max_rows)
    resident = tuple(data.draw(st.lists(st.integers(tail, tail + 5), min_size=1, max_size=4)))
    placement = Placement(resident, data.draw(st.integers(1, 3)), max_rows)
    committed, rows = data.draw(st.integers(0, 3000)), data.draw(st.integers(1, max_rows))
    pager = Pager(native, placement, committed)
    try:
        assert pager.forecast(rows) == forecast_pass(pager.shape, placement, committed, rows)
    finally:
        pager.close()


@given(requests())
@settings(max_examples=examples(60), deadline=None)
def test_the_pager_takes_the_smallest_placement_and_no_smaller(
    request: tuple[CacheShape, int, tuple[PhaseNeed, ...]],
) -> None:
    native = pytest.importorskip("pykvstream._ffi", exc_type=ImportError, reason="native module not built")
    ffi, lib = native.ffi, native.lib
    shape, ctx_tokens, needs = request
    plan = plan_arena(shape, smallest_arena_bytes(shape, ctx_tokens, needs), ctx_tokens, needs)

    def slots_of(resident: tuple[int, ...], ring: int, rows: int) -> int | None:
        pages, out = ffi.new("uint32_t[]", resident), ffi.new("uint64_t *")
        fields = {"n_layers": len(resident), "resident_pages": pages, "ring_slots": ring, "max_rows": rows}
        desc = ffi.new("kvs_placement *", {"struct_size": ffi.sizeof("kvs_placement"), **fields})
        return out[0] if lib.kvs_placement_slots(desc, ctx_tokens, out) == 0 else None

    for phase in plan.phases:
        placement = phase.placement
        assert slots_of(placement.resident_pages, placement.ring_slots, phase.max_rows) == placement.n_slots
        low = (phase.pool.floor_pages,) * shape.n_layers
        ring = phase.pool.smallest_slots - sum(low)
        assert slots_of(low, ring, phase.max_rows) == phase.pool.smallest_slots
        assert slots_of((*low[:-1], low[-1] - 1), ring, phase.max_rows) is None
        if ring:
            assert slots_of(low, ring - 1, phase.max_rows) is None


def test_page_size_equals_the_cores() -> None:
    native = pytest.importorskip("pykvstream._ffi", exc_type=ImportError, reason="native module not built")
    assert native.lib.KVS_PAGE_TOKENS == PAGE_TOKENS
