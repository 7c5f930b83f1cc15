"""What happens before a weight is loaded: what cannot fit is refused, and a card gets its kernels. Then the loading.

A model is one share, all its layers on the named device, or two: the first layers on the CPU, the others on the device.
Holds: ``Wish``, ``Share``, ``open_shares``, ``admit``, ``provide``, ``open_target``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pykvstream.core.cuda import CPU, CudaDevice, open_device
from pykvstream.core.device import Device
from pykvstream.core.host import check_history
from pykvstream.errors import InvalidArgument
from pykvstream.gguf import GgufFile
from pykvstream.kernels import KernelProgress, PackPath, Provided, provide_kernels
from pykvstream.models import ModelConfig
from pykvstream.models.span import LayerSpan, cut
from pykvstream.runtime.admission import (
    CARD_RESERVE_BYTES,
    check_device_memory,
    check_host_memory,
    host_memory_available,
)
from pykvstream.runtime.blueprint import Blueprint, Progress, TargetOptions
from pykvstream.runtime.layout import ALIGNMENT_BYTES, arena_bytes_of, recommended_arena_bytes
from pykvstream.runtime.part import Part
from pykvstream.runtime.target import Target

_ARENA_SHARE = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """Where the layers go, and in what arenas: ``arena_mib`` is the named device's, ``cpu_arena_mib`` that of layers
    that stay on the CPU. None is by default. ``threads`` of a CPU. ``packs``: kernels for the device. ``wait_limit_s``:
    the longest wait for a card."""

    device: str
    threads: int = 0
    gpu_layers: int | str = "all"
    arena_mib: float | None = None
    cpu_arena_mib: float | None = None
    packs: tuple[PackPath, ...] = ()
    kernel_progress: KernelProgress | None = None
    wait_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Layers and the device that takes them."""

    span: LayerSpan
    device: Device
    name: str
    arena_mib: float | None

    def blueprint(
        self,
        file: GgufFile,
        config: ModelConfig,
        options: TargetOptions,
        head_file: GgufFile | None,
        progress: Progress | None = None,
        *,
        declared: bool = False,
    ) -> Blueprint:
        """Of these layers; a head goes with the last of all."""
        beside = head_file if self.span.is_last else None
        return Blueprint(
            file, config, self.device, options, progress, declared=declared, head_file=beside, span=self.span
        )


def open_shares(config: ModelConfig, wish: Wish) -> list[Share]:
    """Open the devices that the wish takes, and no other one. Raises as ``cut`` and ``open_device``."""
    on_cpu, on_device = cut(config, wish.gpu_layers)
    if on_cpu is None and wish.cpu_arena_mib is not None:
        raise InvalidArgument(
            f"cpu_arena_mib is for layers that stay on the CPU, and gpu_layers {wish.gpu_layers} leaves none there"
        )
    if on_device is None and wish.wait_limit_s is not None:
        raise InvalidArgument(f"wait_limit_s is for a card, and gpu_layers {wish.gpu_layers} leaves no layer to one")
    wanted: list[tuple[LayerSpan, str, float | None]] = []
    if on_cpu is not None:
        own = wish.arena_mib if on_device is None and wish.cpu_arena_mib is None else wish.cpu_arena_mib
        wanted.append((on_cpu, CPU, own))
    if on_device is not None:
        wanted.append((on_device, wish.device, wish.arena_mib))
    with ExitStack() as stack:
        shares: list[Share] = []
        for span, name, arena_mib in wanted:
            device = open_device(name, wish.threads, wish.wait_limit_s if span is on_device else None)
            stack.callback(device.close)
            shares.append(Share(span, device, name, arena_mib))
        if not any(isinstance(share.device, CudaDevice) for share in shares):
            _refuse_packs(wish.packs)
        stack.pop_all()
        return shares


def admit(
    file: GgufFile,
    config: ModelConfig,
    shares: Sequence[Share],
    options: TargetOptions,
    head_file: GgufFile | None,
) -> list[int]:
    """Refuse what cannot fit before a weight is loaded; returns the bytes of each share's arena.

    From then on the devices know which kernels they need.
    """
    sizes: list[int] = []
    histories: list[int] = []
    n_host = 0
    for share in shares:
        draft = share.blueprint(file, config, options, head_file, declared=True)
        try:
            card = _card_memory(share.device)
            sizes.append(_arena_bytes(draft, card, share.arena_mib))
            draft.plan(sizes[-1])
            if card is not None:
                check_device_memory(draft.device_bytes(sizes[-1]), card)
            n_host += draft.host_bytes(sizes[-1])
            histories.append(draft.shape.history_bytes(options.ctx_tokens))
        finally:
            draft.close()
    check_host_memory(n_host, host_memory_available(), pinned=False)
    for share, n_bytes in zip(shares, histories, strict=True):
        check_history(share.device, n_bytes)
    return sizes


def provide(device: Device, packs: Sequence[PackPath] = (), progress: KernelProgress | None = None) -> Provided:
    """Give a card every kernel that its tapes need: out of packs, from the disk, or compiled.

    Raises ``Unsupported`` for one that nobody has, by name, and ``FormatError`` for a pack that cannot be used.
    """
    if isinstance(device, CudaDevice):
        return provide_kernels(device, packs, progress=progress)
    _refuse_packs(packs)
    return Provided()


def packs_of(kernels: object) -> tuple[PackPath, ...]:
    """Paths of packs, where one or several are given. Raises ``InvalidArgument`` for anything else."""
    packs = (kernels,) if isinstance(kernels, str | os.PathLike) else kernels
    if not isinstance(packs, list | tuple) or not all(isinstance(pack, str | os.PathLike) for pack in packs):
        raise InvalidArgument(f"kernels must be a path or a list of paths, got {kernels!r:.200}")
    return tuple(packs)


def _refuse_packs(packs: Sequence[PackPath]) -> None:
    """Raise ``InvalidArgument`` where no card is there to read them."""
    if packs:
        raise InvalidArgument("packs of kernels are for cards; the CPU needs none")


def open_target(
    file: GgufFile,
    config: ModelConfig,
    options: TargetOptions,
    wish: Wish,
    head_file: GgufFile | None,
    progress: Progress | None,
) -> Target:
    """Refuse what cannot fit, then load the weights. The devices, which are those of the target's parts, are the
    caller's to close. After an error nothing is left."""
    with ExitStack() as stack:
        shares = open_shares(config, wish)
        for share in shares:
            stack.callback(share.device.close)
        sizes = admit(file, config, shares, options, head_file)
        blueprints: list[Blueprint] = []
        for share in shares:
            provide(share.device, wish.packs if share is shares[-1] else (), wish.kernel_progress)
            blueprints.append(share.blueprint(file, config, options, head_file, progress))
            stack.callback(blueprints[-1].close)
        before = None
        for share, blueprint, n_bytes in zip(shares[:-1], blueprints[:-1], sizes[:-1], strict=True):
            before = Part(share.device, blueprint, n_bytes)
            stack.callback(before.close)
        target = Target(shares[-1].device, blueprints[-1], sizes[-1], before=before)
        stack.pop_all()
        return target


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
