"""Recorded passes and counters on a card: each way of running a pass gives the bits of all others, and none hangs."""

from __future__ import annotations

import itertools
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.core.cuda import CudaDevice
from pykvstream.core.device import DeviceFlag, HookPoint
from pykvstream.errors import DeviceError
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase, Target
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.rigs import Rig, open_rig

CTX = 6000
SHAPE = HybridShape(n_layers=8, ctx=8192)
MODES = tuple(itertools.product(("counters", "events"), (DeviceFlag.NONE, DeviceFlag.NO_GRAPHS, DeviceFlag.NO_EARLY)))
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("card") / "hybrid.gguf"
    write_random_hybrid(where, SHAPE, 5)
    return where


def place(target: Target, ring_slots: int) -> None:
    """Of each layer all but the pages that a pass needs at least go through a ring of so many slots."""
    for phase in Phase:
        layout = target.plan.phases[phase.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        target.place(phase, Placement(floors, ring_slots, layout.max_rows))


def run(rig: Rig, n_prompt: int, n_steps: int, widths: tuple[int, ...] = (1,)) -> bytes:
    """Logits of passes behind a prompt, of these widths in turn; all bits of them."""
    n_vocab = rig.target.n_vocab_rows
    rng = np.random.default_rng(11)
    told = b""
    with closing(rig.session()) as session:
        session.forward(rng.integers(0, n_vocab, n_prompt).tolist())
        for step in range(n_steps):
            tokens = rng.integers(0, n_vocab, widths[step % len(widths)]).tolist()
            told += session.forward(tokens, phase=Phase.DECODE, logits="all").tobytes()
    return told


def card_of(mode: str, flag: DeviceFlag, **options: Any) -> CudaDevice:
    return CudaDevice(flags=flag | (DeviceFlag.COUNTERS if mode == "counters" else DeviceFlag.NONE), **options)


@pytest.fixture(scope="module")
def expected(card: str, path: Path) -> bytes:
    with open_rig(path, ctx=CTX, card=card_of("events", DeviceFlag.NO_GRAPHS)) as rig:
        return run(rig, 4300, 40, (1, 3, 6, 1))


@pytest.mark.parametrize("ring_slots", [1, 2, 5, 12, 40])
@pytest.mark.parametrize(("mode", "flag"), MODES)
def test_every_mode_gives_the_same_bits(
    expected: bytes, path: Path, mode: str, flag: DeviceFlag, ring_slots: int
) -> None:
    with open_rig(path, ctx=CTX, card=card_of(mode, flag)) as rig:
        assert run(rig, 4300, 40, (1, 3, 6, 1)) == expected
        place(rig.target, ring_slots)
        assert run(rig, 4300, 40, (1, 3, 6, 1)) == expected
        assert rig.streamed_bytes > 0
        rig.target.check_integrity()


def test_a_pass_that_grows_over_lengths_keeps_its_bits(card: str, path: Path) -> None:
    """Pages fill up, tables get longer, and what was recorded for shorter ones is left behind."""
    found = set()
    for mode, flag in MODES:
        with open_rig(path, ctx=CTX, card=card_of(mode, flag)) as rig:
            place(rig.target, 12)
            found.add(run(rig, 1900, 120, (6, 1, 6)))
    assert len(found) == 1


@pytest.mark.parametrize("mode", ["counters", "events"])
def test_placing_anew_between_passes_changes_no_bit(card: str, path: Path, mode: str) -> None:
    with open_rig(path, ctx=CTX, card=card_of(mode, DeviceFlag.NONE)) as rig:
        told = run(rig, 4300, 40)
    with open_rig(path, ctx=CTX, card=card_of(mode, DeviceFlag.NONE)) as rig, closing(rig.session()) as session:
        n_vocab = rig.target.n_vocab_rows
        rng = np.random.default_rng(11)
        session.forward(rng.integers(0, n_vocab, 4300).tolist())
        again = b""
        for step in range(40):
            rig.target.enter(Phase.DECODE)
            layout = rig.target.plan.phases[Phase.DECODE.value]
            floor = layout.pool.floor_pages
            pages = tuple(floor + (step + layer) % 3 for layer in range(layout.pool.n_layers))
            rig.target.place(Phase.DECODE, Placement(pages, 3 + step % 17, layout.max_rows))
            again += session.forward(rng.integers(0, n_vocab, 1).tolist(), phase=Phase.DECODE, logits="all").tobytes()
        assert again == told


def steps_with(rig: Rig, n_steps: int) -> TokenSession:
    session = rig.session()
    session.forward(list(range(1, 200)) * 21)
    for _ in range(n_steps):
        session.forward([5], phase=Phase.DECODE)
    return session


@pytest.mark.parametrize("width", [1, 6])
def test_readers_and_writers_that_come_late_change_nothing(card: str, path: Path, width: int) -> None:
    with open_rig(path, ctx=CTX, card=card_of("events", DeviceFlag.NO_GRAPHS)) as rig:
        expected = run(rig, 4300, 60, (width,))
    for ring_slots in (2, 12):
        with open_rig(path, ctx=CTX, card=card_of("counters", DeviceFlag.NONE, delay_us=200)) as rig:
            place(rig.target, ring_slots)
            assert run(rig, 4300, 60, (width,)) == expected


@pytest.mark.parametrize("nth", [1, 7, 40])
def test_a_copy_that_fails_ends_the_pass_and_no_more(card: str, path: Path, nth: int) -> None:
    with open_rig(path, ctx=CTX, card=card_of("counters", DeviceFlag.NONE)) as rig:
        place(rig.target, 5)
        with closing(steps_with(rig, 4)) as session:
            before = session.tokens
            copies = itertools.count(1)
            rig.device.set_hook(lambda point, index: -5 if point is HookPoint.COPY and next(copies) == nth else 0)
            told = []
            for _ in range(6):
                with suppress(DeviceError):
                    told.append(session.forward([5], phase=Phase.DECODE).tobytes())
            rig.device.set_hook(None)
            rig.target.check_integrity()
            assert session.tokens[: len(before)] == before and len(told) >= 4
            more = [session.forward([5], phase=Phase.DECODE).tobytes() for _ in range(6 - len(told))]
        with closing(steps_with(rig, 4)) as session:
            assert [session.forward([5], phase=Phase.DECODE).tobytes() for _ in range(6)] == told + more


def test_a_wait_that_never_ends_is_given_up(card: str, path: Path) -> None:
    """A copy that is held back longer than a kernel waits for it, which is a third of the limit."""
    with open_rig(path, ctx=CTX, card=card_of("counters", DeviceFlag.NONE, wait_limit_s=1.5)) as rig:
        place(rig.target, 5)
        with closing(steps_with(rig, 4)) as session:
            expected = session.forward([5], phase=Phase.DECODE).tobytes()
            is_held = iter([False] * 9 + [True])

            def hold(point: HookPoint, index: int) -> int:
                if point is HookPoint.COPY and next(is_held, False):
                    time.sleep(1.0)
                return 0

            rig.device.set_hook(hold)
            with pytest.raises(DeviceError, match="gave up"):
                for _ in range(3):
                    session.forward([5], phase=Phase.DECODE)
            rig.device.set_hook(None)
            rig.target.check_integrity()
        with closing(steps_with(rig, 4)) as session:
            assert session.forward([5], phase=Phase.DECODE).tobytes() == expected


def test_memory_is_flat_over_placements(card: str, path: Path) -> None:
    with open_rig(path, ctx=CTX, card=card_of("counters", DeviceFlag.NONE)) as rig:
        place(rig.target, 5)
        with closing(steps_with(rig, 4)) as session:
            layout = rig.target.plan.phases[Phase.DECODE.value]
            floors = (layout.pool.floor_pages,) * layout.pool.n_layers

            def turn(n_times: int) -> int:
                for step in range(n_times):
                    rig.target.place(Phase.DECODE, Placement(floors, 3 + step % 30, layout.max_rows))
                    if step % 50 == 0:
                        session.forward([5], phase=Phase.DECODE)
                return rig.device.info.memory_free_bytes

            first = turn(300)
            assert turn(3000) >= first - (2 << 20)
