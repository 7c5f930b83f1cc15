"""Targets on a trace device: the product's own schedule, with nothing computed.

Units: ``residency`` 0 is the smallest arena that works, 1 the one in which nothing ever streams.
Holds: ``TraceRig``, ``open_trace_rig``, ``write_demo_shape``, ``SLOW_BUS``, ``H200``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pykvstream.core.trace import TraceCosts, TraceDevice
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.layout import ALIGNMENT_BYTES, recommended_arena_bytes, smallest_arena_bytes
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions
from tests.models import write_random_model

CTX_TOKENS = 2048
UBATCH = 128

H200 = TraceCosts(
    device_bytes_per_s=4_550_000_000_000,
    copy_in_bytes_per_s=55_000_000_000,
    copy_out_bytes_per_s=55_300_000_000,
    op_ns=500,
    copy_ns=2_600,
    pass_ns=20_000,
)
"""Measured figures of one host."""

SLOW_BUS = TraceCosts(
    device_bytes_per_s=900_000_000_000,
    copy_in_bytes_per_s=6_000_000_000,
    copy_out_bytes_per_s=6_000_000_000,
    op_ns=1_000,
    wave_ns=500,
    copy_ns=5_000,
    pass_ns=50_000,
)


def random_costs(seed: int) -> TraceCosts:
    """Any machine: every rate and time over several orders of magnitude."""
    rng = random.Random(seed)

    def rate() -> int:
        return int(10 ** rng.uniform(8, 13))

    def time_ns() -> int:
        return int(10 ** rng.uniform(1, 6)) if rng.random() < 0.8 else 0

    return TraceCosts(
        rate(), rate(), rate(), time_ns(), time_ns(), time_ns(), time_ns(), jitter_ns=time_ns(), seed=seed
    )


def write_demo_shape(path: str | os.PathLike[str], n_layers: int = 30) -> None:
    """A model whose cache has the shape of SmolLM2-135M's, 30 layers of 3 heads of 64 values; matrices are small."""
    write_random_model(path, n_layers=n_layers, n_embd=64, n_heads=9, n_kv_heads=3, head_dim=64, n_ff=64)


@dataclass(frozen=True, slots=True)
class TraceRig:
    """A target on a trace device, one session, and what has to be closed with them."""

    file: GgufFile
    device: TraceDevice
    target: Target
    session: TokenSession

    def prefill(self, n_tokens: int) -> None:
        self.session.forward([1] * n_tokens, logits="none")

    def decode(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.session.forward([1], phase=Phase.DECODE, logits="none")

    def close(self) -> None:
        self.target.close()
        self.device.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()
        self.close()


def open_trace_rig(
    path: str | os.PathLike[str],
    *,
    residency: float = 0.1,
    costs: TraceCosts = SLOW_BUS,
    ctx: int = CTX_TOKENS,
    mtp: bool = False,
) -> TraceRig:
    file = GgufFile.open(path)
    device = TraceDevice(costs)
    options = TargetOptions(GgmlType.Q8_0, GgmlType.Q8_0, UBATCH, ctx, mtp=mtp)
    blueprint = Blueprint(file, ModelConfig.from_gguf(file), device, options)
    smallest = smallest_arena_bytes(blueprint.shape, ctx, blueprint.needs)
    largest = recommended_arena_bytes(blueprint.shape, ctx, blueprint.needs)
    extra = int((largest - smallest) * residency) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    target = Target(device, blueprint, smallest + extra)
    return TraceRig(file, device, target, TokenSession(target, ctx))


def one_with(sentences: Sequence[str], *parts: str) -> str:
    """The first sentence that holds every part; fails with all of them when there is none."""
    for sentence in sentences:
        if all(part in sentence for part in parts):
            return sentence
    raise AssertionError(f"no sentence with {parts} among {len(sentences)}:\n" + "\n".join(sentences[:20]))
