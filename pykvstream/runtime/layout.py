"""Sizes: how one arena is divided in each phase, and which pages then lie in it.

Shapes: a phase's layout is two regions in address order: the page pool (equal slots of the largest page
    record; the first ``ring_slots`` are the ring, the others hold resident pages), behind it the workspace.
    With an MTP head its pool comes first, the same in all phases: one more layer, with a history of its own.
Units: ``_bytes``, ``_tokens``, ``_pages`` (256 positions of one layer), ``_slots``, ``_rows`` (of a pass).
Holds: a ``Pool`` that exists is large enough; ``Pool.deal`` uses every slot; a layout ends inside its arena.

The pools start at the same offset in every phase, so that a slot keeps its address when the workspace behind it
grows or shrinks, and pages in slots that both phases have stay where they are.

Resident pages are dealt evenly. Giving some layers everything and letting a few stream the rest moves no
fewer pages per pass, but then ring slots come free only while those few
layers attend, and the ring has to hold all that the bus brings in between. Where copies run in demand order
across layers and passes, limited by free slots alone, equal layers keep the bus busy with the smallest ring,
and ring slots are what residency is paid with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pykvstream.errors import InvalidArgument, NoSpace, NotFound, SizeOverflow

PAGE_TOKENS = 256
ALIGNMENT_BYTES = 64
POOL_REGION = 1
WORKSPACE_REGION = 2
HEAD_REGION = 3
RUN_BYTES = 16 << 20
"""The longest copy that still gains speed on a bus; two of them keep it busy (one read while one arrives)."""

_RING_SHARE = 8
_LARGEST_SLOTS = 2**32 - 1
_LARGEST_BYTES = 2**64 - 1


def with_mib(n_bytes: int) -> str:
    """Return bytes as people and as machines read them: ``12.0 MiB (12582912 bytes)``."""
    return f"{n_bytes / 2**20:.1f} MiB ({n_bytes} bytes)"


def round_up(n_bytes: int) -> int:
    """Return the next multiple of the arena's alignment."""
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def arena_bytes_of(mib: float) -> int:
    """Return an arena size given in MiB as whole aligned bytes. Raises ``InvalidArgument`` out of range."""
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < 2**40:
        raise InvalidArgument(f"an arena of {mib!r} MiB")
    return int(mib * 2**20) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def pages_of(n_tokens: int) -> int:
    """Return the pages per layer that cover ``n_tokens`` positions."""
    return -(-n_tokens // PAGE_TOKENS)


def tail_pages(max_rows: int) -> int:
    """Return the pages per layer that a pass may write; it may start inside one, hence one more."""
    return pages_of(max_rows) + 1


def require_int(name: str, value: int, least: int | None = 1) -> None:
    """Raise ``InvalidArgument`` for what is no integer, or below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise InvalidArgument(f"{name} must be an integer{bound}, got {value!r}")


def require_callable(name: str, value: object) -> None:
    """Raise ``InvalidArgument`` for what is neither callable nor None."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name} must be callable, got {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The page records of a cache: the largest (a slot), and one page of every layer (a column).

    ``record_bytes`` names each layer's record where they differ; empty means that all are ``slot_bytes``.
    ``head_rows``: widest pass of an MTP head, whose layer has records of ``slot_bytes`` beside these; 0: no head.
    """

    n_layers: int
    slot_bytes: int
    column_bytes: int
    record_bytes: tuple[int, ...] = ()
    head_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("n_layers", "slot_bytes", "column_bytes"):
            require_int(name, getattr(self, name))
        records = self.layer_record_bytes
        if len(records) != self.n_layers or max(records) != self.slot_bytes or min(records) < 1:
            raise InvalidArgument(
                f"record_bytes must name {self.n_layers} layers, the largest of {self.slot_bytes} bytes,"
                f" got {records!r}"
            )
        if sum(records) != self.column_bytes:
            raise InvalidArgument(f"records of {sum(records)} bytes, column of {self.column_bytes}")

    @property
    def layer_record_bytes(self) -> tuple[int, ...]:
        return self.record_bytes or (self.slot_bytes,) * self.n_layers

    @property
    def run_pages(self) -> int:
        """Pages of one copy of ``RUN_BYTES``."""
        return max(1, RUN_BYTES // self.slot_bytes)

    def history_bytes(self, n_tokens: int) -> int:
        """Return the host bytes of a history of ``n_tokens``, without that of a head."""
        return pages_of(n_tokens) * self.column_bytes

    def head_bounds(self, ctx_tokens: int) -> tuple[int, int]:
        """Return the fewest slots with which the head's layer works, and those with which it never streams."""
        if self.head_rows == 0:
            return 0, 0
        most = pages_of(ctx_tokens)
        return min(tail_pages(min(self.head_rows, ctx_tokens)) + 1, most), most


@dataclass(frozen=True, slots=True)
class PhaseNeed:
    """What a phase asks of the arena: its widest pass, and the scratch memory of that pass."""

    name: str
    max_rows: int
    workspace_bytes: int

    def __post_init__(self) -> None:
        require_int(f"max_rows of phase {self.name!r}", self.max_rows)
        require_int(f"workspace_bytes of phase {self.name!r}", self.workspace_bytes)


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots to divide among the layers of one sequence.

    Each layer keeps at least ``floor_pages`` (its tail: what a pass writes lies on the device) and at most
    ``ctx_pages`` (no sequence has more). A layer below that streams sooner or later, which takes a ring.
    """

    n_layers: int
    n_slots: int
    tail_pages: int
    ctx_pages: int

    def __post_init__(self) -> None:
        for name, least in (("n_layers", 1), ("n_slots", 1), ("tail_pages", 2), ("ctx_pages", 1)):
            require_int(name, getattr(self, name), least)
        if self.n_slots < self.smallest_slots:
            raise NoSpace(
                f"page pool: need {self.smallest_slots} slots ({self.n_layers} layers with"
                f" {self.floor_pages} tail pages each, and a ring), have {self.n_slots}"
            )

    @property
    def floor_pages(self) -> int:
        return min(self.tail_pages, self.ctx_pages)

    @property
    def largest_slots(self) -> int:
        """Slots with which nothing ever streams; more serve nobody."""
        return self.n_layers * self.ctx_pages

    @property
    def smallest_slots(self) -> int:
        return min(self.n_layers * self.floor_pages + 1, self.largest_slots)

    @property
    def ring_floor(self) -> int:
        """The smallest ring: one slot where a layer can stream, else the slots that no layer can use."""
        return 1 if self.n_slots < self.largest_slots else self.n_slots - self.largest_slots

    @property
    def ring_cap(self) -> int:
        """The largest ring: what the tails leave."""
        if self.n_slots >= self.largest_slots:
            return self.ring_floor
        return self.n_slots - self.n_layers * self.floor_pages

    def run_of(self, run_pages: int) -> int:
        """Return the run length this pool can afford: two take at most an eighth of what tails leave."""
        return max(1, min(run_pages, self.ring_cap // (2 * _RING_SHARE)))

    def unmeasured_ring(self, run_pages: int) -> int:
        """Return the ring before anything is measured: two runs, one being read while the other arrives."""
        return max(self.ring_floor, min(2 * self.run_of(run_pages), self.ring_cap))

    def deal(self, ring_slots: int) -> tuple[int, ...]:
        """Return resident pages per layer: what the ring leaves, dealt one page to each layer in turn.

        No slot is idle: their sum and the ring make the pool. The first layers get the odd pages.
        """
        if not self.ring_floor <= ring_slots <= self.ring_cap:
            raise InvalidArgument(
                f"a ring of {ring_slots} slots is outside [{self.ring_floor}, {self.ring_cap}] of this pool"
            )
        even, odd = divmod(self.n_slots - ring_slots, self.n_layers)
        return (even + 1,) * odd + (even,) * (self.n_layers - odd)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which layer keeps how many pages, tail included, beside how large a ring (``kvs_placement``)."""

    resident_pages: tuple[int, ...]
    ring_slots: int
    max_rows: int

    @property
    def n_slots(self) -> int:
        return sum(self.resident_pages) + self.ring_slots


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a layout (``kvs_phase_region`` with the offset that first fit gives it)."""

    id: int
    offset_bytes: int
    size_bytes: int
    alignment_bytes: int = ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """One phase's layout. ``max_rows`` is the need's, but no pass is wider than the context.

    ``regions`` in address order; ``head``: how the head's pool is divided.
    """

    need: PhaseNeed
    max_rows: int
    pool: Pool
    placement: Placement
    regions: tuple[Region, ...]
    unused_bytes: int
    head: Placement | None = None

    @property
    def pool_region(self) -> Region:
        return self.regions[-2]

    @property
    def workspace_region(self) -> Region:
        return self.regions[-1]

    @property
    def head_bytes(self) -> int:
        """Of the head's pool."""
        return self.pool_region.offset_bytes

    @property
    def is_fully_resident(self) -> bool:
        return self.pool.n_slots >= self.pool.largest_slots


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The layouts of one arena for all its phases."""

    shape: CacheShape
    arena_bytes: int
    ctx_tokens: int
    phases: tuple[PhasePlan, ...]
    smallest_bytes: int = field(compare=False)
    recommended_bytes: int = field(compare=False)

    def phase(self, name: str) -> PhasePlan:
        """Return a phase's plan by name."""
        for plan in self.phases:
            if plan.need.name == name:
                return plan
        names = ", ".join(plan.need.name for plan in self.phases)
        raise NotFound(f"no phase {name!r} in this plan; it has {names}")


@dataclass(frozen=True, slots=True)
class PassForecast:
    """What a pass finds (``kvs_pass_forecast``): active pages per layer, the others summed over layers."""

    active_pages: int
    resident_pages: int
    streamed_pages: int
    streamed_bytes: int


@dataclass(frozen=True, slots=True)
class ContextForecast:
    """A single-row pass whose row is the last of a context of ``n_tokens``."""

    n_tokens: int
    history_bytes: int
    forecast: PassForecast


def _rows_of(need: PhaseNeed, ctx_tokens: int) -> int:
    return min(need.max_rows, ctx_tokens)


def _bounds(shape: CacheShape, need: PhaseNeed, ctx_tokens: int) -> tuple[int, int]:
    """Return the fewest slots with which a phase works and the most that it can use."""
    tail, most = tail_pages(_rows_of(need, ctx_tokens)), shape.n_layers * pages_of(ctx_tokens)
    return min(shape.n_layers * tail + 1, most), most


def _checked_size(what: str, n_bytes: int) -> int:
    if n_bytes > _LARGEST_BYTES:
        raise SizeOverflow(f"{what} of {n_bytes} bytes does not fit 64 bits")
    return n_bytes


def _phase_bytes(shape: CacheShape, need: PhaseNeed, n_slots: int, head_slots: int) -> int:
    n_bytes = round_up(n_slots * shape.slot_bytes) + round_up(need.workspace_bytes)
    return round_up(head_slots * shape.slot_bytes) + n_bytes


def _check_needs(ctx_tokens: int, needs: Sequence[PhaseNeed]) -> None:
    require_int("ctx_tokens", ctx_tokens)
    names = [need.name for need in needs]
    if not names or len(set(names)) != len(names):
        raise InvalidArgument(f"a plan takes phases of different names, got {names!r}")


def smallest_arena_bytes(shape: CacheShape, ctx_tokens: int, needs: Sequence[PhaseNeed]) -> int:
    """Return the smallest arena that works. Exact: one byte less is refused.

    With ``round64(x) = ceil(x / 64) * 64``, ``rows = min(max_rows, ctx_tokens)``,
    ``tail = ceil(rows / 256) + 1`` and ``ctx_pages = ceil(ctx_tokens / 256)``::

        slots(phase) = min(n_layers * tail + 1, n_layers * ctx_pages)
        smallest     = max over phases of round64(slots * slot_bytes) + round64(workspace_bytes)

    The one slot is the smallest ring. A context that the tail covers never streams and needs none. A head adds the
    same for its one layer, ``round64(slots * slot_bytes)``.
    """
    _check_needs(ctx_tokens, needs)
    head = shape.head_bounds(ctx_tokens)[0]
    sizes = (_phase_bytes(shape, need, _bounds(shape, need, ctx_tokens)[0], head) for need in needs)
    return _checked_size("the smallest arena", max(sizes))


def recommended_arena_bytes(shape: CacheShape, ctx_tokens: int, needs: Sequence[PhaseNeed]) -> int:
    """Return the smallest arena that keeps the whole context resident in every phase.

    As ``smallest_arena_bytes`` with ``slots(phase) = n_layers * ctx_pages``.
    """
    _check_needs(ctx_tokens, needs)
    head = shape.head_bounds(ctx_tokens)[1]
    sizes = (_phase_bytes(shape, need, _bounds(shape, need, ctx_tokens)[1], head) for need in needs)
    return _checked_size("the fully resident arena", max(sizes))


def _head_slots(shape: CacheShape, arena_bytes: int, ctx_tokens: int, needs: Sequence[PhaseNeed]) -> int:
    """Return slots of the head's layer: as many as each layer has in the phase with the smallest pool."""
    floor, most = shape.head_bounds(ctx_tokens)
    workspace = max(round_up(need.workspace_bytes) for need in needs)
    even = (arena_bytes - workspace) // shape.slot_bytes // (shape.n_layers + 1)
    spare = min(
        arena_bytes - _phase_bytes(shape, need, _bounds(shape, need, ctx_tokens)[0], 0) - ALIGNMENT_BYTES
        for need in needs
    )
    return min(max(floor, min(even, spare // shape.slot_bytes)), most)


def _place_head(shape: CacheShape, ctx_tokens: int, n_slots: int) -> Placement | None:
    if n_slots == 0:
        return None
    rows = min(shape.head_rows, ctx_tokens)
    ring = 0
    if n_slots < shape.head_bounds(ctx_tokens)[1]:
        ring = min(2 * max(1, n_slots // (2 * _RING_SHARE)), n_slots - tail_pages(rows))
    return Placement((n_slots - ring,), ring, rows)


def _plan_phase(
    shape: CacheShape, arena_bytes: int, ctx_tokens: int, need: PhaseNeed, head: Placement | None
) -> PhasePlan:
    rows = _rows_of(need, ctx_tokens)
    head_bytes = 0 if head is None else round_up(head.n_slots * shape.slot_bytes)
    room = (arena_bytes - head_bytes - round_up(need.workspace_bytes)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    n_slots = min(room // shape.slot_bytes, _bounds(shape, need, ctx_tokens)[1], _LARGEST_SLOTS)
    pool = Pool(shape.n_layers, n_slots, tail_pages(rows), pages_of(ctx_tokens))
    ring = pool.unmeasured_ring(shape.run_pages)
    pool_bytes = round_up(n_slots * shape.slot_bytes)
    workspace_bytes = round_up(need.workspace_bytes)
    head_region = () if head is None else (Region(HEAD_REGION, 0, head_bytes),)
    return PhasePlan(
        need=need,
        max_rows=rows,
        pool=pool,
        placement=Placement(pool.deal(ring), ring, rows),
        regions=(
            *head_region,
            Region(POOL_REGION, head_bytes, pool_bytes),
            Region(WORKSPACE_REGION, head_bytes + pool_bytes, workspace_bytes),
        ),
        unused_bytes=arena_bytes - head_bytes - pool_bytes - workspace_bytes,
        head=head,
    )


def plan_arena(shape: CacheShape, arena_bytes: int, ctx_tokens: int, needs: Sequence[PhaseNeed]) -> ArenaPlan:
    """Divide an arena for each phase; refuse one that is too small with both numbers (``NoSpace``)."""
    smallest = smallest_arena_bytes(shape, ctx_tokens, needs)
    require_int("arena_bytes", arena_bytes, 0)
    _checked_size("the arena", arena_bytes)
    if arena_bytes < smallest:
        widest = max(needs, key=lambda need: _phase_bytes(shape, need, _bounds(shape, need, ctx_tokens)[0], 0))
        raise NoSpace(
            f"arena too small: need {with_mib(smallest)}, have {with_mib(arena_bytes)}"
            f" (phase {widest.name}: {_bounds(shape, widest, ctx_tokens)[0]} page slots of {shape.slot_bytes}"
            f" bytes, workspace of {with_mib(widest.workspace_bytes)})"
        )
    head = _place_head(shape, ctx_tokens, _head_slots(shape, arena_bytes, ctx_tokens, needs))
    return ArenaPlan(
        shape=shape,
        arena_bytes=arena_bytes,
        ctx_tokens=ctx_tokens,
        phases=tuple(_plan_phase(shape, arena_bytes, ctx_tokens, need, head) for need in needs),
        smallest_bytes=smallest,
        recommended_bytes=recommended_arena_bytes(shape, ctx_tokens, needs),
    )


def resident_prefixes(placement: Placement, committed_tokens: int, n_rows: int) -> list[int]:
    """Return for each layer how many pages from the first on stay resident in a pass, by the rule of ``pager.h``.

    The pages from there to ``committed_tokens // PAGE_TOKENS``, where the tail begins, stream.
    """
    active, first_tail = pages_of(committed_tokens + n_rows), committed_tokens // PAGE_TOKENS
    return [
        first_tail if active <= pages else min(first_tail, pages - (active - first_tail))
        for pages in placement.resident_pages
    ]


def forecast_pass(
    shape: CacheShape, placement: Placement, committed_tokens: int, n_rows: int
) -> PassForecast:
    """Return what a pass of ``n_rows`` behind ``committed_tokens`` finds, by the rule of ``pager.h``."""
    require_int("committed_tokens", committed_tokens, 0)
    require_int("n_rows", n_rows)
    if n_rows > placement.max_rows:
        raise InvalidArgument(f"a pass of {n_rows} rows is wider than the placement's {placement.max_rows}")
    active = pages_of(committed_tokens + n_rows)
    first_tail = committed_tokens // PAGE_TOKENS
    tail = tail_pages(placement.max_rows)
    lowest = min(placement.resident_pages)
    if lowest < min(tail, active):
        raise InvalidArgument(f"a pass over {active} pages does not fit a placement of {lowest} per layer")
    prefixes = resident_prefixes(placement, committed_tokens, n_rows)
    streamed = [first_tail - prefix for prefix in prefixes]
    return PassForecast(
        active_pages=active,
        resident_pages=sum(prefixes) + len(prefixes) * (active - first_tail),
        streamed_pages=sum(streamed),
        streamed_bytes=sum(n * size for n, size in zip(streamed, shape.layer_record_bytes, strict=True)),
    )


def resident_contexts(
    shape: CacheShape, placement: Placement, contexts: Iterable[int]
) -> tuple[ContextForecast, ...]:
    """Return for each context length what a single-row pass at its end finds."""
    lengths = tuple(contexts)
    for n_tokens in lengths:
        require_int("a context length", n_tokens)
    return tuple(
        ContextForecast(n, shape.history_bytes(n), forecast_pass(shape, placement, n - 1, 1)) for n in lengths
    )
