"""Models cut at a layer boundary, each part on a CPU device with flags of its own.

Units: ``residency`` of each part as in ``rigs``.
Holds: ``open_cut``, ``CutRig``, ``cuts_of``.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pykvstream.core.device import Device, DeviceFlag
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.models.span import LayerSpan, cut
from pykvstream.runtime.layout import ALIGNMENT_BYTES, recommended_arena_bytes, smallest_arena_bytes
from pykvstream.runtime.part import Part
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions
from tests.rigs import HONEST


@dataclass(frozen=True, slots=True)
class CutRig:
    """A target of two parts, and what has to be closed with it."""

    file: GgufFile
    devices: tuple[Device, ...]
    target: Target

    @property
    def streamed_bytes(self) -> tuple[int, ...]:
        """Of each part."""
        return tuple(part.pager.info.streamed_bytes for part in self.target.parts)

    def session(self) -> TokenSession:
        return TokenSession(self.target, self.target.plan.ctx_tokens)

    def close(self) -> None:
        self.target.close()
        for device in self.devices:
            device.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def cuts_of(path: str | os.PathLike[str]) -> list[int]:
    """Every number of layers that leaves keys and values on both sides, and 0, which does not cut."""
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
    attends = config.attention_layers
    return [0, *range(config.n_layers - attends[-1], config.n_layers - attends[0])]


def open_cut(
    path: str | os.PathLike[str],
    gpu_layers: int,
    *,
    residency: tuple[float, float] = (1.0, 1.0),
    type_k: GgmlType = GgmlType.Q8_0,
    type_v: GgmlType = GgmlType.Q4_0,
    ubatch: int = 128,
    ctx: int = 2048,
    threads: tuple[int, int] = (1, 1),
    flags: DeviceFlag = HONEST,
    checkpoint_bytes: int | None = None,
    mtp: bool = False,
) -> CutRig:
    """The last ``gpu_layers`` layers in an arena of their own; 0: all of them in one, the second ``residency``."""
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(path))
        config = ModelConfig.from_gguf(file)
        options = TargetOptions(type_k, type_v, ubatch, ctx, checkpoint_bytes=checkpoint_bytes, mtp=mtp)
        spans = [span for span in cut(config, gpu_layers) if span is not None]
        devices = [stack.enter_context(Device(n, flags=flags)) for n in threads[-len(spans) :]]
        before: Part | None = None
        for span, device, share in zip(spans[:-1], devices[:-1], residency[: len(spans) - 1], strict=True):
            before = Part(device, *_sized(file, config, device, options, span, share))
        last = _sized(file, config, devices[-1], options, spans[-1], residency[-1])
        target = Target(devices[-1], *last, before=before)
        stack.pop_all()
        return CutRig(file, tuple(devices), target)


def _sized(
    file: GgufFile, config: ModelConfig, device: Device, options: TargetOptions, span: LayerSpan, residency: float
) -> tuple[Blueprint, int]:
    blueprint = Blueprint(file, config, device, options, span=span)
    smallest = smallest_arena_bytes(blueprint.shape, options.ctx_tokens, blueprint.needs)
    largest = recommended_arena_bytes(blueprint.shape, options.ctx_tokens, blueprint.needs)
    return blueprint, smallest + int((largest - smallest) * residency) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def decoded(session: TokenSession, tokens: list[int]) -> bytes:
    """Logits of tokens that are run one by one."""
    return b"".join(session.forward([token], phase=Phase.DECODE).tobytes() for token in tokens)
