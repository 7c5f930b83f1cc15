"""``pykvstream plan``: how an arena would be divided, before it is reserved.

Holds: ``run``. Without ``--arena-mib`` the recommended arena is shown. The smallest arena is printed as a number that
can be given back to ``--arena-mib``; one page less is refused.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass

from rich.text import Text

from pykvstream.cli.options import ModelOptions, PlanOptions
from pykvstream.cli.render import MIB, console, printable
from pykvstream.core.cuda import open_device
from pykvstream.errors import InvalidArgument
from pykvstream.gguf import GgufFile
from pykvstream.locate import find_model
from pykvstream.models import ModelConfig
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


def run(options: PlanOptions) -> int:
    """Print the plan. Raises ``KvStreamError``, ``NoSpace`` with the smallest arena among them."""
    plan, needs = make_plan(options.model)
    contexts = options.contexts or default_contexts(plan.ctx_tokens)
    for n_tokens in contexts:
        if n_tokens > plan.ctx_tokens:
            raise InvalidArgument(f"--contexts {n_tokens}: the plan is for a context of {plan.ctx_tokens} tokens")
    memory = host_memory_available()
    if options.json:
        print(json.dumps(as_json(options.model, plan, needs, memory, contexts)))
    else:
        _print(options.model, plan, needs, memory, contexts)
    return 0


def make_plan(options: ModelOptions) -> tuple[ArenaPlan, Needs]:
    """The plan that opening a model with these options would make, without its arena."""
    with GgufFile.open(find_model(options.model)) as file, open_device(options.device, options.threads) as device:
        config = ModelConfig.from_gguf(file)
        ctx_tokens = config.n_ctx_train if options.ctx_size is None else options.ctx_size
        check_context(ctx_tokens, config.n_ctx_train)
        types = cache_type(options.cache_type_k), cache_type(options.cache_type_v)
        kept = None if options.checkpoint_mib is None else checkpoint_bytes_of(options.checkpoint_mib)
        target = TargetOptions(
            *types, options.ubatch_size, ctx_tokens, options.kv_rotation, checkpoint_bytes=kept
        )
        blueprint = Blueprint(file, config, device, target, declared=True)
        try:
            if options.arena_mib is None:
                arena_bytes = recommended_arena_bytes(blueprint.shape, ctx_tokens, blueprint.needs)
            else:
                arena_bytes = arena_bytes_of(options.arena_mib)
            plan = blueprint.plan(arena_bytes)
            return plan, _needs(blueprint, arena_bytes, device.info.n_threads)
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
        layers=blueprint.config.layer_counts,
        n_threads=n_threads,
    )


def flag_mib(n_bytes: int) -> str:
    """The shortest number of MiB with four decimals at most that is no smaller than ``n_bytes``."""
    return f"{math.ceil(n_bytes * 10_000 / MIB) / 10_000:.4f}".rstrip("0").rstrip(".")


def as_json(
    options: ModelOptions, plan: ArenaPlan, needs: Needs, memory: HostMemory, contexts: tuple[int, ...]
) -> dict[str, object]:
    """The plan as one object; byte counts are exact."""
    limits = memory.limits(pinned=False)
    return {
        "model": options.model,
        "ctx_size": plan.ctx_tokens,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
        "ubatch_size": options.ubatch_size,
        "threads": needs.n_threads,
        "page_tokens": PAGE_TOKENS,
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
        "host": {"need_bytes": needs.host_bytes, "have_bytes": min(limits.values()), "limits": limits},
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


def _print(options: ModelOptions, plan: ArenaPlan, needs: Needs, memory: HostMemory, contexts: tuple[int, ...]) -> None:
    out = console(sys.stdout)
    types = f"K {options.cache_type_k}, V {options.cache_type_v}"
    layers = ", ".join(f"{count} {name}" for name, count in needs.layers.items() if count)
    out.print(f"{printable(options.model)}: layers: {layers}; {types}, ubatch {options.ubatch_size}")
    out.print(plan_report(plan, contexts, min(max(out.width - 2, _NARROWEST), _WIDEST)))
    smallest, recommended = flag_mib(plan.smallest_bytes), flag_mib(plan.recommended_bytes)
    threads = f"{needs.n_threads} compute thread{'s' if needs.n_threads > 1 else ''}"
    out.print(f"                   with {threads}: each has scratch of its own there, more threads need a larger arena")
    out.print(f"as flags           --arena-mib {smallest}  |  --arena-mib {recommended}")
    out.print(_host_text(needs, memory))


def _host_text(needs: Needs, memory: HostMemory) -> Text:
    limits = memory.limits(pinned=False)
    name = min(limits, key=lambda limit: limits[limit])
    fits = "" if needs.host_bytes <= limits[name] else ": does not fit, opening the model will be refused"
    state = (
        f"recurrent state    {with_mib(needs.state_bytes)} for each session,"
        f" {with_mib(needs.log_bytes)} of it a log of {needs.log_rows} rows\n"
        f"past states        {with_mib(needs.checkpoint_bytes)} of host memory for {needs.checkpoint_slots},"
        f" {with_mib(needs.stage_bytes)} of device memory to copy them\n"
        if needs.state_bytes
        else ""
    )
    return Text(
        f"weights            {with_mib(needs.weight_bytes)}\n{state}"
        f"host memory        need {with_mib(needs.host_bytes)} for weights, arena and full history,\n"
        f"                   have {with_mib(limits[name])} by the {name}{fits}"
    )
