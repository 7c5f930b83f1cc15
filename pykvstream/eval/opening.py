"""Models opened so that a stated share of their history is resident.

Units: a share is in percent of the pages of the whole context, tail included; pages are those of one layer.
Order: of both phases the pool is divided alike, and stays so: what is resident is known before a pass, not chosen in
it.
Holds: ``Opening``, ``CachePair``, ``OpenedModel``. A share of 100 never streams, a lower one always does, or is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pykvstream.core.kv import KvFlag
from pykvstream.engine import Model
from pykvstream.errors import IntegrityError, InvalidArgument
from pykvstream.models import ModelConfig
from pykvstream.runtime.catalogue import cache_type
from pykvstream.runtime.layout import (
    PAGE_TOKENS,
    ArenaPlan,
    PhasePlan,
    Placement,
    forecast_pass,
    pages_of,
    resident_prefixes,
    round_up,
    tail_pages,
)
from pykvstream.runtime.target import DECODE_ROWS, Phase, TargetOptions, kv_layer

MIB = 1 << 20
RING_PAGES = 4
"""Of a measured model: two pages that are read while two arrive. A longer one would only be kinder to the clock."""


@dataclass(frozen=True, slots=True)
class CachePair:
    """Types of keys and values, by the names of the command line."""

    keys: str
    values: str

    @classmethod
    def parse(cls, text: str) -> CachePair:
        """``q8_0/q4_0`` or, for both alike, ``q8_0``. Raises ``InvalidArgument`` or ``Unsupported``."""
        keys, slash, values = text.partition("/")
        pair = cls(keys, values if slash else keys)
        return cls(cache_type(pair.keys).name.lower(), cache_type(pair.values).name.lower())

    def __str__(self) -> str:
        return f"{self.keys}/{self.values}"


F32_PAIR = CachePair("f32", "f32")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model and what of a full context is resident: pages of each layer, of the pages that the context has."""

    model: Model
    resident_pages: int
    ctx_pages: int

    @property
    def is_streamed(self) -> bool:
        """Whether a full context has pages that come through the ring."""
        return self.resident_pages < self.ctx_pages

    @property
    def resident_percent(self) -> float:
        """The share that is resident; where less than the tail was asked for, the tail's."""
        return 100 * self.resident_pages / self.ctx_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer."""
        return self.model.plan.shape.slot_bytes

    def placement(self, phase: Phase) -> Placement:
        """How the pool of a phase is divided."""
        plan = self.model.plan.phases[phase.value]
        return held_placement(plan, self.resident_pages) if self.is_streamed else plan.placement

    def streamed_bytes(self, phase: Phase, n_committed: int, n_rows: int) -> int:
        """What a pass has to bring through the ring."""
        return forecast_pass(self.model.plan.shape, self.placement(phase), n_committed, n_rows).streamed_bytes

    def streamed_pages(self, phase: Phase, n_committed: int, n_rows: int) -> range:
        """The pages that every layer streams in a pass."""
        first = max(resident_prefixes(self.placement(phase), n_committed, n_rows))
        return range(first, n_committed // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Opening:
    """How the models of a measurement are opened, whatever the cache."""

    model: str
    device: str = "cpu"
    ubatch_size: int = 256
    threads: int = 0

    def open(self, ctx_tokens: int, pair: CachePair, *, arena_mib: float | None = None, rotation: bool = True) -> Model:
        """The model with an arena as stated. Past states are not kept: nobody goes back."""
        return Model.open(
            self.model,
            device=self.device,
            arena_mib=arena_mib,
            ctx_size=ctx_tokens,
            cache_type_k=pair.keys,
            cache_type_v=pair.values,
            ubatch_size=self.ubatch_size,
            threads=self.threads,
            kv_rotation=rotation,
            checkpoint_mib=0,
        )

    @contextmanager
    def resident(self, ctx_tokens: int, pair: CachePair, *, rotation: bool = True) -> Iterator[OpenedModel]:
        """The model with all of its context resident. Raises ``HostMemoryError`` where that does not fit."""
        model = self.open(ctx_tokens, pair, rotation=rotation)
        try:
            if not all(phase.is_fully_resident for phase in model.plan.phases):
                arena_mib = model.plan.recommended_bytes / MIB
                model.close()
                model = self.open(ctx_tokens, pair, arena_mib=arena_mib, rotation=rotation)
            yield OpenedModel(model, pages_of(ctx_tokens), pages_of(ctx_tokens))
        finally:
            model.close()

    @contextmanager
    def streamed(self, resident: OpenedModel, pair: CachePair, percent: float) -> Iterator[OpenedModel]:
        """The model of which just a share of the context is resident, in the smallest arena that does it.

        ``resident`` is its twin, of which it has the shape. Raises ``InvalidArgument`` where nothing would stream.
        """
        plan = resident.model.plan
        n_pages = share_pages(plan.ctx_tokens, self.ubatch_size, percent)
        with self.open(plan.ctx_tokens, pair, arena_mib=_arena_bytes(plan, n_pages) / MIB) as model:
            opened = OpenedModel(model, n_pages, pages_of(plan.ctx_tokens))
            for phase in (Phase.DECODE, Phase.PREFILL):
                model.place(phase, opened.placement(phase))
            yield opened


def share_pages(ctx_tokens: int, ubatch_size: int, percent: float) -> int:
    """Pages of each layer that a share of the context has, but the tail of the widest pass at least.

    Raises ``InvalidArgument`` for a share below 100 with which nothing would stream.
    """
    if not 0 < percent < 100:
        raise InvalidArgument(f"a share of {percent:g} %: need one above 0 and below 100")
    n_all = pages_of(ctx_tokens)
    tail = tail_pages(min(max(ubatch_size, DECODE_ROWS), ctx_tokens))
    n_pages = max(tail, int(n_all * percent / 100))
    if n_pages >= n_all:
        raise InvalidArgument(
            f"a context of {ctx_tokens} tokens has {n_all} pages in each layer, and the tail alone has {tail}: nothing"
            f" would stream with {percent:g} % of it resident; take a longer context or a smaller ubatch"
        )
    return n_pages


def held_placement(plan: PhasePlan, n_pages: int) -> Placement:
    """So many pages of every layer, and a short ring; slots beyond stay empty."""
    pool = plan.pool
    ring = min(RING_PAGES, pool.n_layers * (pool.ctx_pages - n_pages))
    return Placement((n_pages,) * pool.n_layers, ring, plan.max_rows)


def _arena_bytes(plan: ArenaPlan, n_pages: int) -> int:
    """The smallest arena whose pools hold such a placement in every phase."""
    return max(
        round_up(held_placement(phase, n_pages).n_slots * plan.shape.slot_bytes) + round_up(phase.need.workspace_bytes)
        for phase in plan.phases
    )


def is_rotatable(config: ModelConfig, pair: CachePair) -> bool:
    """Whether keys or values of these types are stored rotated unless that is switched off."""
    options = TargetOptions(cache_type(pair.keys), cache_type(pair.values), ubatch_size=1, ctx_tokens=1)
    return kv_layer(config, options).flags != KvFlag.NONE


def require_streamed(n_bytes: int, expected: int, what: str) -> None:
    """Raise ``IntegrityError`` where a run that had to stream did not, or streamed something else than it had to."""
    if n_bytes != expected:
        raise IntegrityError(f"{what}: {n_bytes} bytes came through the ring, {expected} had to")
