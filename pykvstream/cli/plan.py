"""``pykvstream plan``: how an arena would be divided, before it is reserved; of a model that is cut, both arenas.

Holds: ``run``. Without ``--arena-mib`` the recommended arena is shown. The smallest arena is printed as a number that
can be given back to ``--arena-mib``; one page less is refused.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from pykvstream.cli.options import ModelOptions, PlanOptions
from pykvstream.cli.render import MIB, console, printable
from pykvstream.errors import InvalidArgument
from pykvstream.gguf import GgufFile
from pykvstream.locate import find_model
from pykvstream.models import ModelConfig
from pykvstream.models.span import LayerSpan
from pykvstream.report import default_contexts, plan_report
from pykvstream.runtime.admission import HostMemory, check_context, host_memory_available
from pykvstream.runtime.catalogue import cache_type
from pykvstream.runtime.checkpoints import checkpoint_bytes_of
from pykvstream.runtime.layout import (
    HEAD_REGION,
    PAGE_TOKENS,
    POOL_REGION,
    WORKSPACE_REGION,
    ArenaPlan,
    PhasePlan,
    arena_bytes_of,
    recommended_arena_bytes,
    resident_contexts,
    with_mib,
)
from pykvstream.runtime.opening import Share, Wish, open_shares
from pykvstream.runtime.target import Blueprint, TargetOptions

_WIDEST = 100
_NARROWEST = 40
_REGIONS = {HEAD_REGION: "head", POOL_REGION: "pool", WORKSPACE_REGION: "workspace"}


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes beside the arena: weights on the device, and what the host must have for weights, arena and full
    history. ``state_bytes``: recurrent state of each session, log of ``log_rows`` rows included; ``checkpoint_bytes``:
    host memory for ``checkpoint_slots`` past states; ``stage_bytes``: what they pass through. ``layers`` counts the
    blocks of the file by what they are. ``n_threads`` compute threads have scratch of their own each, which
    lies inside the arena.
    """

    weight_bytes: int
    host_bytes: int
    state_bytes: int
    log_bytes: int
    log_rows: int
    checkpoint_slots: int
    checkpoint_bytes: int
    stage_bytes: int
    layers: dict[str, int]
    n_threads: int


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The arena of some layers on a device: one part, or the whole model."""

    device: str
    span: LayerSpan
    plan: ArenaPlan
    needs: Needs


def run(options: PlanOptions) -> int:
    """Print the plan. Raises ``KvStreamError``, ``NoSpace`` with the smallest arena among them."""
    parts = make_plan(options.model)
    n_most = parts[-1].plan.ctx_tokens
    contexts = options.contexts or default_contexts(n_most)
    for n_tokens in contexts:
        if n_tokens > n_most:
            raise InvalidArgument(f"--contexts {n_tokens}: the plan is for a context of {n_most} tokens")
    memory = host_memory_available()
    if options.json:
        print(json.dumps(as_json(options.model, parts, memory, contexts)))
    else:
        _print(options.model, parts, memory, contexts)
    return 0


def make_plan(options: ModelOptions) -> list[PartPlan]:
    """The plans that opening a model with these options would make, without their arenas."""
    with GgufFile.open(find_model(options.model)) as file:
        config = ModelConfig.from_gguf(file)
        ctx_tokens = config.n_ctx_train if options.ctx_size is None else options.ctx_size
        check_context(ctx_tokens, config.n_ctx_train)
        types = cache_type(options.cache_type_k), cache_type(options.cache_type_v)
        kept = None if options.checkpoint_mib is None else checkpoint_bytes_of(options.checkpoint_mib)
        target = TargetOptions(
            *types, options.ubatch_size, ctx_tokens, options.kv_rotation, checkpoint_bytes=kept
        )
        wish = Wish(
            options.device,
            options.threads,
            options.gpu_layers,
            options.arena_mib,
            options.cpu_arena_mib,
            options.kernels,
            wait_limit_s=options.wait_limit_s,
        )
        shares = open_shares(config, wish)
        try:
            return [_plan_of(share, file, config, target) for share in shares]
        finally:
            for share in shares:
                share.device.close()


def _plan_of(share: Share, file: GgufFile, config: ModelConfig, options: TargetOptions) -> PartPlan:
    blueprint = share.blueprint(file, config, options, None, declared=True)
    try:
        if share.arena_mib is None:
            arena_bytes = recommended_arena_bytes(blueprint.shape, options.ctx_tokens, blueprint.needs)
        else:
            arena_bytes = arena_bytes_of(share.arena_mib)
        needs = _needs(blueprint, arena_bytes, share.device.info.n_threads)
        return PartPlan(share.name, share.span, blueprint.plan(arena_bytes), needs)
    finally:
        blueprint.close()


def _needs(blueprint: Blueprint, arena_bytes: int, n_threads: int) -> Needs:
    return Needs(
        weight_bytes=blueprint.weights.device_bytes,
        host_bytes=blueprint.host_bytes(arena_bytes),
        state_bytes=blueprint.state_bytes,
        log_bytes=blueprint.log_bytes,
        log_rows=blueprint.log_rows if blueprint.deltas else 0,
        checkpoint_slots=blueprint.checkpoint_slots,
        checkpoint_bytes=blueprint.checkpoint_bytes,
        stage_bytes=blueprint.stage_bytes,
        layers=_layer_counts(blueprint),
        n_threads=n_threads,
    )


def _layer_counts(blueprint: Blueprint) -> dict[str, int]:
    """Blocks of the file by what they are, as far as they belong to this part."""
    span, counts = blueprint.span, blueprint.config.layer_counts
    n_attention = len(span.attention_layers(blueprint.config))
    n_mtp = counts["mtp"] if span.is_last else 0
    return {"full attention": n_attention, "recurrent": len(span.layers) - n_attention, "mtp": n_mtp}


def flag_mib(n_bytes: int) -> str:
    """The shortest number of MiB with four decimals at most that is no smaller than ``n_bytes``."""
    return f"{math.ceil(n_bytes * 10_000 / MIB) / 10_000:.4f}".rstrip("0").rstrip(".")


def as_json(
    options: ModelOptions, parts: Sequence[PartPlan], memory: HostMemory, contexts: tuple[int, ...]
) -> dict[str, object]:
    """The plan as one object, of a model that is cut that of the device; ``parts`` has all. Byte counts are exact."""
    limits = memory.limits(pinned=False)
    n_host = sum(part.needs.host_bytes for part in parts)
    return {
        "model": options.model,
        "ctx_size": parts[-1].plan.ctx_tokens,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
        "ubatch_size": options.ubatch_size,
        "page_tokens": PAGE_TOKENS,
        **_part_json(parts[-1], contexts),
        "host": {"need_bytes": n_host, "have_bytes": min(limits.values()), "limits": limits},
        "parts": [
            {"device": part.device, "first_layer": part.span.begin, "last_layer": part.span.end - 1,
             **_part_json(part, contexts)}
            for part in parts
        ],
    }  # fmt: skip


def _part_json(part: PartPlan, contexts: tuple[int, ...]) -> dict[str, object]:
    plan, needs = part.plan, part.needs
    return {
        "threads": needs.n_threads,
        "page_bytes": plan.shape.slot_bytes,
        "n_layers": plan.shape.n_layers,
        "arena_bytes": plan.arena_bytes,
        "smallest_arena_bytes": plan.smallest_bytes,
        "smallest_arena_mib": plan.smallest_bytes / MIB,
        "recommended_arena_bytes": plan.recommended_bytes,
        "recommended_arena_mib": plan.recommended_bytes / MIB,
        "weight_bytes": needs.weight_bytes,
        "state_bytes": needs.state_bytes,
        "log_bytes": needs.log_bytes,
        "log_rows": needs.log_rows,
        "checkpoint_slots": needs.checkpoint_slots,
        "checkpoint_bytes": needs.checkpoint_bytes,
        "stage_bytes": needs.stage_bytes,
        "layers": needs.layers,
        "history_bytes": plan.shape.history_bytes(plan.ctx_tokens),
        "phases": [_phase(phase) for phase in plan.phases],
        "contexts": _contexts(plan, contexts),
    }


def _phase(phase: PhasePlan) -> dict[str, object]:
    return {
        "name": phase.need.name,
        "max_rows": phase.max_rows,
        "workspace_bytes": phase.need.workspace_bytes,
        "page_slots": phase.pool.n_slots,
        "ring_slots": phase.placement.ring_slots,
        "resident_pages": list(phase.placement.resident_pages),
        "is_fully_resident": phase.is_fully_resident,
        "unused_bytes": phase.unused_bytes,
        "regions": [
            {
                "name": _REGIONS[region.id],
                "offset_bytes": region.offset_bytes,
                "size_bytes": region.size_bytes,
            }
            for region in phase.regions
        ],
    }


def _contexts(plan: ArenaPlan, contexts: tuple[int, ...]) -> list[dict[str, int]]:
    placement = plan.phase("decode").placement
    return [
        {
            "tokens": row.n_tokens,
            "history_bytes": row.history_bytes,
            "resident_pages": row.forecast.resident_pages,
            "streamed_pages": row.forecast.streamed_pages,
            "streamed_bytes_per_pass": row.forecast.streamed_bytes,
        }
        for row in resident_contexts(plan.shape, placement, contexts)
    ]


def _print(
    options: ModelOptions, parts: Sequence[PartPlan], memory: HostMemory, contexts: tuple[int, ...]
) -> None:
    out = console(sys.stdout)
    types = f"K {options.cache_type_k}, V {options.cache_type_v}"
    for part in parts:
        plan, needs = part.plan, part.needs
        layers = ", ".join(f"{count} {name}" for name, count in needs.layers.items() if count)
        where = f"{part.span} on {part.device}: {layers}" if len(parts) > 1 else f"layers: {layers}"
        out.print(f"{printable(options.model)}: {where}; {types}, ubatch {options.ubatch_size}")
        out.print(plan_report(plan, contexts, min(max(out.width - 2, _NARROWEST), _WIDEST)))
        smallest, recommended = flag_mib(plan.smallest_bytes), flag_mib(plan.recommended_bytes)
        threads = f"{needs.n_threads} compute thread{'s' if needs.n_threads > 1 else ''}"
        out.print(
            f"                   with {threads}: each has scratch of its own there, more threads need a larger arena"
        )
        flag = "--arena-mib" if part is parts[-1] else "--cpu-arena-mib"
        out.print(f"as flags           {flag} {smallest}  |  {flag} {recommended}")
        out.print(_needs_text(needs))
    out.print(_host_text(sum(part.needs.host_bytes for part in parts), memory))


def _needs_text(needs: Needs) -> Text:
    state = (
        f"\nrecurrent state    {with_mib(needs.state_bytes)} for each session,"
        f" {with_mib(needs.log_bytes)} of it a log of {needs.log_rows} rows\n"
        f"past states        {with_mib(needs.checkpoint_bytes)} of host memory for {needs.checkpoint_slots},"
        f" {with_mib(needs.stage_bytes)} of device memory to copy them"
        if needs.state_bytes
        else ""
    )
    return Text(f"weights            {with_mib(needs.weight_bytes)}{state}")


def _host_text(n_bytes: int, memory: HostMemory) -> Text:
    limits = memory.limits(pinned=False)
    name = min(limits, key=lambda limit: limits[limit])
    fits = "" if n_bytes <= limits[name] else ": does not fit, opening the model will be refused"
    return Text(
        f"host memory        need {with_mib(n_bytes)} for weights, arena and full history,\n"
        f"                   have {with_mib(limits[name])} by the {name}{fits}"
    )
