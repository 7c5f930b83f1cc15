"""An interrupt between the C call that makes an object and the handle that owns it leaves nothing behind.

Order: one is raised before each operation of the interpreter in turn: a signal that comes in a C call strikes before
the next one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device
from pykvstream.core.fence import Fence
from pykvstream.core.handle import Handle
from pykvstream.core.host import Host
from pykvstream.core.kv import Cache, KvLayer
from pykvstream.core.pager import Pager
from pykvstream.core.phase import PhaseCoordinator
from pykvstream.core.share import Buffer
from pykvstream.core.tape import Tape
from pykvstream.core.weight import Weight, WeightLayout
from pykvstream.gguf import GgmlType
from pykvstream.runtime.whole_file import replacing
from tests.property.test_failed_pass import Interrupter

LAYER = KvLayer(1, 32, 32, GgmlType.Q8_0.id, GgmlType.Q8_0.id)
ROWS = np.zeros(32 * 4, np.uint8)
MAKERS: dict[str, Callable[[Device], Handle]] = {
    "arena": lambda device: Arena(device, 4096),
    "buffer": lambda device: Buffer(device, 4096),
    "cache": lambda device: Cache(device, [LAYER]),
    "fence": Fence,
    "host": lambda device: Host(device, 4096),
    "tape": lambda device: Tape(device, 1, 1),
    "weight": lambda device: Weight(device, GgmlType.F32.id, 32, 1, ROWS, WeightLayout.ROWS),
}
MOST = 2000
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class OperationInterrupter(Interrupter):
    """The same before the n-th operation of functions of the package."""

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> Any:
        if "pykvstream" not in frame.f_code.co_filename or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode":
            self.at -= 1
            if self.at == 0:
                raise KeyboardInterrupt
        return self


def strike(action: Callable[[], object], check: Callable[[], None]) -> int:
    """Interrupts at every operation; returns how many."""
    for at in range(1, MOST):
        if not OperationInterrupter(at).run(action):
            return at - 1
        check()
    raise AssertionError("an action of more operations than are looked at")


@pytest.mark.parametrize("kind", MAKERS)
def test_what_was_made_goes_with_the_interrupt(kind: str) -> None:
    with Device(1) as device:

        def make() -> None:
            with closing(MAKERS[kind](device)):
                pass

        def check() -> None:
            assert device.info.live_objects == 0

        assert strike(make, check) > 20


@pytest.mark.parametrize("kind", ["pager", "coordinator"])
def test_what_stands_on_another_object_does_too(kind: str) -> None:
    with Device(1) as device, Cache(device, [LAYER]) as cache, Arena(device, 4096) as arena:
        before = device.info.live_objects

        def make() -> None:
            with closing(Pager(device, cache) if kind == "pager" else PhaseCoordinator(arena)):
                pass

        def check() -> None:
            assert device.info.live_objects == before

        assert strike(make, check) > 20


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads")
def test_threads_of_a_device_end_with_the_interrupt() -> None:
    def n_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = n_threads()

    def make() -> None:
        with Device(2):
            pass

    def check() -> None:
        assert n_threads() == before

    assert strike(make, check) > 50


def test_a_file_that_was_begun_goes_with_the_interrupt(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "file") as file:
            file.write(b"new")

    (tmp_path / "file").write_bytes(b"old")

    def check() -> None:
        assert [each.name for each in tmp_path.iterdir()] == ["file"]

    assert strike(write, check) > 20
    assert (tmp_path / "file").read_bytes() == b"new"
