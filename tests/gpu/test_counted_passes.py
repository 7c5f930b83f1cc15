"""Passes that stream, in order with their copies by counters: recorded, launched again, refused; and failed calls.

Against the library that stands in for the driver's: it writes words at once, never waits for one, and computes nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, Driver
from tests.gpu.test_recorded_passes import OPEN, counted

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


def test_passes_that_stream_are_recorded_once(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened(",counters=on") as model, model.session() as session:
    place(model, 12)
    session.forward([1] * 1500)
    decode(session, 20)
    decode(session, 10, 3)
    assert session.stats.streamed_bytes > 0
    model.check_integrity()
"""
    count = counted(fake, tmp_path, code)
    assert (count.made, count.launched, count.destroyed) == (2, 19 + 9, 2)
    assert count.recorded_early == count.recorded - count.made > 60
    singly = counted(fake, tmp_path, code.replace(",counters=on", ",counters=on,graphs=off"))
    assert (singly.made, singly.launched) == (0, 0)


def test_counters_move_the_bytes_that_events_move(fake: Driver) -> None:
    code = (
        OPEN
        + """
moved = []
for settings in ("", ",counters=on", ",counters=on,graphs=off"):
    with opened(settings) as model, model.session() as session:
        place(model, 12)
        session.forward([1] * 1500)
        for width in (1, 1, 1, 6, 6, 1, 3):
            decode(session, 1, width)
        model.check_integrity()
        moved.append(session.stats.streamed_bytes)
print(len(set(moved)), moved[0] > 0)
"""
    )
    assert fake.run(code) == "1 True"


def test_resident_and_streamed_passes_and_small_rings_have_recordings_of_their_own(
    fake: Driver, tmp_path: Path
) -> None:
    """A block may hold a run of pages only in a ring with room for it beside the copy that brings the next."""
    code = """
with opened(",counters=on") as model, model.session() as session:
    session.forward([1] * 2040)
    decode(session, 4)
    for ring_slots in (12, 13, 4, 3):
        place(model, ring_slots, (Phase.DECODE,))
        decode(session, 4)
"""
    count = counted(fake, tmp_path, code)
    assert count.made == count.destroyed == 3 and count.launched == 20 - 3


def test_counters_that_cannot_be_had_are_refused(fake: Driver) -> None:
    code = (
        OPEN
        + """
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.device import DeviceFlag
for flags in (DeviceFlag.COUNTERS, DeviceFlag.COUNTERS | DeviceFlag.POISON_RELEASED):
    try:
        CudaDevice(flags=flags).close()
        print("opened")
    except KvStreamError as error:
        print(type(error).__name__, error)
"""
    )
    without = fake.run(code, FAKE_CUDA_WORDS="0").splitlines()
    assert len(without) == 2 and all(line.startswith("Unsupported") and "counters" in line for line in without)
    having = fake.run(code).splitlines()
    assert having[0] == "opened" and "released pages are to be filled" in having[1]


PASSES = (
    OPEN
    + """
with opened(",counters=on") as model:
    place(model, 12)
    with model.session() as session:
        session.forward([1] * 1100)
        for width in (1, 1, 1, 1, 3, 3, 3):
            before = session.tokens
            try:
                session.forward([7] * width, phase=Phase.DECODE)
            except KvStreamError as error:
                print(type(error).__name__, error)
                assert session.tokens == before
                model.check_integrity()
                session.forward([7] * width, phase=Phase.DECODE)
            model.check_integrity()
        assert len(session.tokens) == 1113 and session.stats.streamed_bytes > 0
print("whole")
"""
)


@pytest.mark.parametrize("call", ["cuStreamBeginCapture_v2 1", "cuGraphInstantiateWithFlags 2", "cuGraphLaunch 1"])
def test_a_failed_call_of_a_recording_is_named_and_loses_nothing(fake: Driver, call: str) -> None:
    lines = fake.run(PASSES, FAKE_CUDA_FAIL=f"{call} 901").splitlines()
    assert len(lines) == 2 and lines[0].startswith("DeviceError") and call.split()[0] in lines[0]
    assert lines[1] == "whole"


@pytest.mark.parametrize(
    "call", ["cuStreamWaitValue64_v2 2", "cuStreamWriteValue64_v2 3", "cuStreamWriteValue64_v2 40"]
)
def test_a_counter_that_cannot_be_reached_is_a_failed_copy(fake: Driver, call: str) -> None:
    lines = fake.run(PASSES, FAKE_CUDA_FAIL=f"{call} 700").splitlines()
    assert lines[-1] == "whole" and all(line.startswith("DeviceError") for line in lines[:-1])


def test_memory_of_rings_stays_over_many_placements(fake: Driver) -> None:
    code = (
        OPEN
        + """
with opened(",counters=on") as model, model.session() as session:
    session.forward([1] * 1100)
    kept = []
    for turn in range(400):
        place(model, 3 + turn % 11, (Phase.DECODE,))
        if turn % 20 == 0:
            decode(session, 3)
        kept.append(model._target.parts[0].device.info.device_bytes)
    assert max(kept) == max(kept[:40]), (kept[0], max(kept[:40]), max(kept))
print("flat")
"""
    )
    assert fake.run(code) == "flat"
