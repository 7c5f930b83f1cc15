"""Small models on devices with test flags and fault hooks, as ``Model.open`` would make them.

Holds: ``open_stack``, ``Stack``, ``Fault``, ``smallest_arena``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pykvstream.core.device import Device, DeviceFlag, HookPoint
from pykvstream.engine import Model
from pykvstream.errors import DeviceError, HostMemoryError
from pykvstream.gguf import TYPES_BY_ID, GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.target import Blueprint, Target, TargetOptions

HARD_FLAGS = DeviceFlag.POISON_RELEASED | DeviceFlag.STRICT_HISTORY


def cache_type(name: str) -> GgmlType:
    return next(kind for kind in TYPES_BY_ID.values() if kind.name == name)


@dataclass
class Fault:
    """A hook that fails the calls ``first``, ``first + 1``, ... at one point, ``count`` of them, and counts all."""

    point: HookPoint
    first: int
    count: int = 1
    seen: int = 0
    fired: int = 0
    action: Callable[[], None] | None = field(default=None, repr=False)

    def __call__(self, point: HookPoint, index: int) -> int:
        if point is not self.point:
            return 0
        here, self.seen = self.seen, self.seen + 1
        if not self.first <= here < self.first + self.count:
            return 0
        self.fired += 1
        if self.action is not None:
            self.action()
            return 0
        return HostMemoryError.status if point is HookPoint.ALLOC else DeviceError.status

    @property
    def error(self) -> type[Exception]:
        return HostMemoryError if self.point is HookPoint.ALLOC else DeviceError


@dataclass(frozen=True)
class Stack:
    """A model and the parts of it that tests reach into."""

    model: Model
    device: Device
    target: Target

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[Fault]:
        self.device.set_hook(fault)
        try:
            yield fault
        finally:
            self.device.set_hook(None)


@contextmanager
def open_stack(
    path: Path,
    *,
    extra_slots: int = 0,
    ubatch_size: int = 128,
    ctx_size: int = 2048,
    cache_types: tuple[str, str] = ("Q8_0", "Q4_0"),
    flags: DeviceFlag = HARD_FLAGS,
    n_threads: int = 1,
    checks_leaks: bool = True,
    mtp: bool = False,
) -> Iterator[Stack]:
    """A model in the smallest arena that works, and ``extra_slots`` page slots more. Nothing may be left at the end."""
    file = GgufFile.open(path)
    device = Device(n_threads, flags=flags)
    config = ModelConfig.from_gguf(file)
    k, v = (cache_type(name) for name in cache_types)
    blueprint = Blueprint(file, config, device, TargetOptions(k, v, ubatch_size, ctx_size, mtp=mtp))
    n_bytes = smallest_arena(blueprint) + extra_slots * blueprint.shape.slot_bytes
    target = Target(device, blueprint, n_bytes)
    with Model(path, file, target) as model:
        yield Stack(model, device, target)
        assert_idle(target)
        target.close()
        if checks_leaks:
            assert device.info.live_objects == 0


def assert_idle(target: Target) -> None:
    target.check_integrity()
    assert not target.pager_info.is_in_pass


def smallest_arena(blueprint: Blueprint) -> int:
    return blueprint.plan(1 << 40).smallest_bytes
