"""What is refused before a weight is loaded: an arena that is too small, host memory that is not there.

Holds: ``admit``.
"""

from __future__ import annotations

from pykvstream.core.device import Device
from pykvstream.gguf import GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.admission import check_host_memory, host_memory_available
from pykvstream.runtime.layout import ALIGNMENT_BYTES, arena_bytes_of, recommended_arena_bytes
from pykvstream.runtime.target import Blueprint, TargetOptions

_ARENA_SHARE = 4


def admit(
    file: GgufFile,
    config: ModelConfig,
    device: Device,
    options: TargetOptions,
    arena_mib: float | None,
    head_file: GgufFile | None,
) -> int:
    """Refuse what cannot fit before a weight is loaded; returns the arena's bytes."""
    draft = Blueprint(file, config, device, options, declared=True, head_file=head_file)
    try:
        arena_bytes = _arena_bytes(draft, arena_mib)
        draft.plan(arena_bytes)
        check_host_memory(draft.host_bytes(arena_bytes), host_memory_available(), pinned=False)
        return arena_bytes
    finally:
        draft.close()


def _arena_bytes(blueprint: Blueprint, arena_mib: float | None) -> int:
    if arena_mib is not None:
        return arena_bytes_of(arena_mib)
    wanted = recommended_arena_bytes(blueprint.shape, blueprint.options.ctx_tokens, blueprint.needs)
    free = host_memory_available().available
    return min(wanted, free // _ARENA_SHARE // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
