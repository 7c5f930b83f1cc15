"""Targets without an engine around them, with the device flags that make a cheat visible.

Units: ``residency`` 0 is the smallest arena that works, 1 the one in which nothing ever streams.
Holds: ``Rig``, ``open_rig``, ``random_placement``, ``tight_placement``, ``StreamForecast``, ``tokens_of``.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from pykvstream.core.device import Device, DeviceFlag, Isa
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.layout import (
    ALIGNMENT_BYTES,
    ArenaPlan,
    Placement,
    forecast_pass,
    recommended_arena_bytes,
    smallest_arena_bytes,
)
from pykvstream.runtime.opening import provide
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions

HONEST = DeviceFlag.POISON_RELEASED | DeviceFlag.STRICT_HISTORY
"""Released pages become NaN, and history cannot be read but by a copy."""

KV_TYPES = (
    GgmlType.F32,
    GgmlType.F16,
    GgmlType.BF16,
    GgmlType.Q8_0,
    GgmlType.Q4_0,
    GgmlType.Q4_1,
    GgmlType.Q5_0,
    GgmlType.Q5_1,
    GgmlType.IQ4_NL,
)


@dataclass(frozen=True, slots=True)
class Rig:
    """A target, and what has to be closed with it."""

    file: GgufFile
    device: Device
    target: Target

    @property
    def plan(self) -> ArenaPlan:
        return self.target.plan

    @property
    def streamed_bytes(self) -> int:
        return self.target.pager_info.streamed_bytes

    def session(self) -> TokenSession:
        return TokenSession(self.target, self.plan.ctx_tokens)

    def close(self) -> None:
        self.target.close()
        self.device.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_rig(
    path: str | os.PathLike[str],
    *,
    residency: float = 1.0,
    type_k: GgmlType = GgmlType.Q8_0,
    type_v: GgmlType = GgmlType.Q8_0,
    ubatch: int = 512,
    ctx: int = 2048,
    rotation: bool = True,
    fused: bool = True,
    threads: int = 1,
    flags: DeviceFlag = HONEST,
    isa: Isa = Isa.BEST,
    schedule_seed: int = 0,
    checkpoint_bytes: int | None = None,
    mtp: bool = False,
    card: Device | None = None,
) -> Rig:
    """On a CPU device of its own, or on a card that it closes."""
    file = GgufFile.open(path)
    device = Device(threads, flags=flags, isa=isa, schedule_seed=schedule_seed) if card is None else card
    options = TargetOptions(type_k, type_v, ubatch, ctx, rotation, fused, checkpoint_bytes=checkpoint_bytes, mtp=mtp)
    blueprint = Blueprint(file, ModelConfig.from_gguf(file), device, options)
    provide(device)
    smallest = smallest_arena_bytes(blueprint.shape, ctx, blueprint.needs)
    largest = recommended_arena_bytes(blueprint.shape, ctx, blueprint.needs)
    extra = int((largest - smallest) * residency) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return Rig(file, device, Target(device, blueprint, smallest + extra))


def random_placement(plan: ArenaPlan, phase: Phase, rng: random.Random) -> Placement:
    """Any legal division of a phase's pool: a ring of any size, pages dealt unevenly, slots left over."""
    layout = plan.phases[phase.value]
    pool = layout.pool
    pages = [pool.floor_pages] * pool.n_layers
    room = pool.n_slots - sum(pages)
    if room == 0:
        return layout.placement
    ring = rng.choice((1, rng.randint(1, room), room))
    for _ in range(rng.choice((0, (room - ring) // 2, room - ring))):
        pages[rng.randrange(pool.n_layers)] += 1
    return Placement(tuple(pages), ring, layout.max_rows)


def tight_placement(plan: ArenaPlan, phase: Phase) -> Placement:
    """One page more per layer than the tail where there is room, and two ring slots: nearly all streams."""
    layout = plan.phases[phase.value]
    pool = layout.pool
    room = pool.n_slots - pool.n_layers * pool.floor_pages
    ring = min(2, room)
    extra = (room - ring) // pool.n_layers
    return Placement((pool.floor_pages + min(1, extra),) * pool.n_layers, ring, layout.max_rows)


@dataclass(slots=True)
class StreamForecast:
    """Adds up the bytes that must pass the ring, pass by pass, under the placement that each pass had.

    An instance is the ``on_progress`` of a forward call that begins behind ``position`` committed tokens.
    """

    target: Target
    phase: Phase
    position: int
    n_done: int = 0
    streamed_bytes: int = 0

    def __call__(self, n_done: int, n_total: int) -> None:
        n_rows = n_done - self.n_done
        placement = self.target.placement_of(self.phase)
        forecast = forecast_pass(self.target.plan.shape, placement, self.position, n_rows)
        self.streamed_bytes += forecast.streamed_bytes
        self.position += n_rows
        self.n_done = n_done


def tokens_of(seed: int, n_tokens: int, n_vocab: int = 259) -> npt.NDArray[np.uint32]:
    """A random text."""
    return np.random.default_rng(seed).integers(0, n_vocab, n_tokens, dtype=np.uint32)
