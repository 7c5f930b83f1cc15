"""Pictures of a plan for the terminal: what lies where in the arena, and what would stream.

Units: columns of the terminal stand for bytes of the arena, to scale; every region has at least one column.
Holds: nothing here prints, reads a clock or moves a byte; functions return ``rich`` renderables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pykvstream.errors import InvalidArgument
from pykvstream.runtime.layout import ArenaPlan, PhasePlan, resident_contexts, with_mib

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    n_bytes: int
    glyph: str
    style: str


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.1f} MiB"


def _parts(plan: ArenaPlan, phase: PhasePlan) -> list[_Part]:
    slot, placement = plan.shape.slot_bytes, phase.placement
    ring = placement.ring_slots * slot
    parts = [
        _Part("MTP head", phase.head_bytes, "◆", "magenta"),
        _Part("ring", ring, "▒", "cyan"),
        _Part("resident pages", phase.pool_region.size_bytes - ring, "█", "green"),
        _Part("workspace", phase.workspace_region.size_bytes, "▓", "yellow"),
        _Part("unused", phase.unused_bytes, "·", "dim"),
    ]
    return [part for part in parts if part.n_bytes > 0]


def column_widths(sizes: Sequence[int], width: int) -> list[int]:
    """Return columns for sizes to scale: they sum to ``width``, each at least one, by largest remainder."""
    if width < len(sizes) or not sizes or min(sizes) < 1:
        raise InvalidArgument(f"{len(sizes)} regions of positive size need as many columns, got {width}")
    total, free = sum(sizes), width - len(sizes)
    columns = [1 + size * free // total for size in sizes]
    remainders = sorted(range(len(sizes)), key=lambda i: (-(sizes[i] * free % total), i))
    for i in remainders[: width - sum(columns)]:
        columns[i] += 1
    return columns


def _describe(phase: PhasePlan) -> str:
    placement = phase.placement
    low, high = min(placement.resident_pages), max(placement.resident_pages)
    pages = f"{low}" if low == high else f"{low} to {high}"
    streams = "nothing streams" if phase.is_fully_resident else f"ring of {placement.ring_slots}"
    return (
        f"{phase.need.name}: up to {phase.max_rows} rows per pass\n"
        f"{phase.pool.n_slots} page slots: {pages} per layer, {streams}"
    )


def _phase_map(plan: ArenaPlan, phase: PhasePlan, width: int) -> Text:
    parts = _parts(plan, phase)
    text = Text(_describe(phase) + "\n")
    for part, columns in zip(parts, column_widths([part.n_bytes for part in parts], width), strict=True):
        text.append(part.glyph * columns, style=part.style)
    for part in parts:
        text.append("\n")
        text.append(part.glyph, style=part.style)
        text.append(f" {part.name:<15}{_mib(part.n_bytes):>14}{100 * part.n_bytes / plan.arena_bytes:7.1f} %")
    return text


def arena_map(plan: ArenaPlan, width: int = 72) -> RenderableType:
    """Return each phase's regions as a bar of ``width`` columns, with the sizes below it."""
    if width < 8:
        raise InvalidArgument(f"an arena map takes at least 8 columns, got {width}")
    title = Text(f"arena of {with_mib(plan.arena_bytes)}, context of {plan.ctx_tokens} tokens", style="bold")
    blocks: list[RenderableType] = [title]
    for phase in plan.phases:
        blocks += [Text(), _phase_map(plan, phase, width)]
    return Group(*blocks)


def contexts_table(plan: ArenaPlan, contexts: Iterable[int], phase_name: str = "decode") -> Table:
    """Return what a single-row pass finds at each context length, all layers together."""
    phase = plan.phase(phase_name)
    table = Table(title=f"a {phase_name} pass at the end of a context", title_justify="left")
    for heading in ("tokens", "history", "pages", "resident", "streamed", "streamed per pass"):
        table.add_column(heading, justify="right")
    for row in resident_contexts(plan.shape, phase.placement, contexts):
        found = row.forecast
        table.add_row(
            f"{row.n_tokens:,}",
            _mib(row.history_bytes),
            f"{found.resident_pages + found.streamed_pages:,}",
            f"{found.resident_pages:,}",
            f"{found.streamed_pages:,}",
            _mib(found.streamed_bytes),
        )
    return table


def sizes_text(plan: ArenaPlan) -> Text:
    """Return the smallest arena that works and the smallest with which nothing streams."""
    return Text(
        f"smallest arena     {with_mib(plan.smallest_bytes)}\n"
        f"recommended arena  {with_mib(plan.recommended_bytes)}: the whole context stays resident"
    )


def default_contexts(ctx_tokens: int) -> tuple[int, ...]:
    """Return context lengths worth showing: powers of two from 1,024 below the whole, and the whole."""
    shorter = (1 << power for power in range(10, ctx_tokens.bit_length()))
    return (*(n for n in shorter if n < ctx_tokens), ctx_tokens)


def plan_report(plan: ArenaPlan, contexts: Iterable[int] | None = None, width: int = 72) -> RenderableType:
    """Return map, contexts and sizes of a plan."""
    lengths = default_contexts(plan.ctx_tokens) if contexts is None else contexts
    return Group(
        arena_map(plan, width), Text(), contexts_table(plan, lengths), Text(), sizes_text(plan)
    )
