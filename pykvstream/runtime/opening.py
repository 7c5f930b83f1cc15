"""What happens before a weight is loaded: what cannot fit is refused, and a card gets its kernels.

Holds: ``admit``, ``provide``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykvstream.core.cuda import CudaDevice
from pykvstream.core.device import Device
from pykvstream.core.host import check_history
from pykvstream.errors import InvalidArgument
from pykvstream.gguf import GgufFile
from pykvstream.kernels import KernelProgress, PackPath, Provided, provide_kernels
from pykvstream.models import ModelConfig
from pykvstream.runtime.admission import (
    CARD_RESERVE_BYTES,
    check_device_memory,
    check_host_memory,
    host_memory_available,
)
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
    """Refuse what cannot fit before a weight is loaded; returns the arena's bytes.

    From then on the device knows which kernels it needs.
    """
    draft = Blueprint(file, config, device, options, declared=True, head_file=head_file)
    try:
        card = _card_memory(device)
        arena_bytes = _arena_bytes(draft, card, arena_mib)
        draft.plan(arena_bytes)
        if card is not None:
            check_device_memory(draft.device_bytes(arena_bytes), card)
        check_host_memory(draft.host_bytes(arena_bytes), host_memory_available(), pinned=False)
        check_history(device, draft.shape.history_bytes(options.ctx_tokens))
        return arena_bytes
    finally:
        draft.close()


def provide(device: Device, packs: Sequence[PackPath] = (), progress: KernelProgress | None = None) -> Provided:
    """Give a card every kernel that its tapes need: out of packs, from the disk, or compiled.

    Raises ``Unsupported`` for one that nobody has, by name, and ``FormatError`` for a pack that cannot be used.
    """
    if isinstance(device, CudaDevice):
        return provide_kernels(device, packs, progress=progress)
    if packs:
        raise InvalidArgument("packs of kernels are for cards; the CPU needs none")
    return Provided()


def _card_memory(device: Device) -> int | None:
    """Bytes that are free on a card, None where the device uses the host's memory."""
    info = device.info
    return info.memory_free_bytes if info.has_own_memory else None


def _arena_bytes(blueprint: Blueprint, card: int | None, arena_mib: float | None) -> int:
    if arena_mib is not None:
        return arena_bytes_of(arena_mib)
    wanted = recommended_arena_bytes(blueprint.shape, blueprint.options.ctx_tokens, blueprint.needs)
    if card is None:
        most = host_memory_available().available // _ARENA_SHARE
    else:
        most = max(card - CARD_RESERVE_BYTES - blueprint.device_bytes(0), ALIGNMENT_BYTES)
    return min(wanted, most // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
