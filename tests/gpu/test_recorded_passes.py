"""When passes are recorded, launched again and let go; and what a failure of each new call of the driver leaves behind.

Against the library that stands in for the driver's, which counts and computes nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, MODEL, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


OPEN = MODEL + """
import pykvstream.runtime.opening as engine
from pykvstream.core.cuda import CardOptions, CudaDevice
from pykvstream.core.device import DeviceFlag

def opened(mode="counters", flags=DeviceFlag.NONE, **options):
    engine.open_device = lambda *_: CudaDevice(flags=flags, options=CardOptions(mode, **options))
    return Model.open(path, device="cuda", ctx_size=4000)

def stream(model, ring_slots=12):
    for phase in Phase:
        layout = model.plan.phases[phase.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        model.place(phase, Placement(floors, ring_slots, layout.max_rows))

def decode(session, n, width=1):
    for _ in range(n):
        session.forward([3] * width, phase=Phase.DECODE)
"""


def counted(fake: Driver, folder: Path, code: str, **variables: str) -> tuple[str, list[int]]:
    """What it prints; and recordings, launches of them, how many were let go, kernels that were recorded."""
    text = fake.run(OPEN + code, FAKE_CUDA_COUNT=str(folder / "count"), **variables)
    return text, [int(word) for word in (folder / "count").read_text(encoding="ascii").split()]


def test_a_shape_is_recorded_once_and_launched_from_then_on(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    stream(model)
    session.forward([1] * 1500)
    decode(session, 20)
    decode(session, 10, 3)
"""
    _, (made, launched, destroyed, captured) = counted(fake, tmp_path, code)
    # Of each width the first pass is launched singly.
    assert (made, launched, destroyed) == (2, 19 + 9, 2) and captured > 100


@pytest.mark.parametrize(
    ("opening", "variables"),
    [("flags=DeviceFlag.NO_GRAPHS", {}), ("'events'", {}), ("'auto'", {"FAKE_CUDA_WORDS": "0"})],
)
def test_nothing_is_recorded_where_readers_cannot_wait(
    fake: Driver, tmp_path: Path, opening: str, variables: dict[str, str]
) -> None:
    """Without graphs; and with events alone, where pages stream."""
    code = f"""
with opened({opening}) as model, model.session() as session:
    stream(model)
    session.forward([1] * 1500)
    decode(session, 8)
"""
    _, (made, launched, _, _) = counted(fake, tmp_path, code, **variables)
    assert (made, launched) == (0, 0)


def test_with_events_resident_passes_are_recorded(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened("events") as model, model.session() as session:
    session.forward([1] * 1500)
    decode(session, 8)
"""
    _, (made, launched, destroyed, _) = counted(fake, tmp_path, code)
    assert (made, launched, destroyed) == (1, 7, 1)


def test_moving_pages_records_nothing_and_a_phase_lets_go_of_everything(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 1500)
    for ring_slots in range(10, 14):
        stream(model, ring_slots) if ring_slots == 10 else None
        layout = model.plan.phases[Phase.DECODE.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        model.place(Phase.DECODE, Placement(floors, ring_slots, layout.max_rows))
        decode(session, 2)
    session.forward([1] * 600)
    decode(session, 4)
"""
    _, (made, launched, destroyed, _) = counted(fake, tmp_path, code)
    assert made == destroyed == 2 and launched == 7 + 3


def test_longer_histories_and_small_rings_have_recordings_of_their_own(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 2040)
    stream(model)
    session.forward([1] * 1)
    decode(session, 20)
    layout = model.plan.phases[Phase.DECODE.value]
    floors = (layout.pool.floor_pages,) * layout.pool.n_layers
    model.place(Phase.DECODE, Placement(floors, 4, layout.max_rows))
    decode(session, 4)
"""
    _, (made, launched, destroyed, _) = counted(fake, tmp_path, code)
    assert made == destroyed == 3 and launched == 20 + 4 - 3


def test_recordings_are_few_whatever_widths_come(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 300)
    for _ in range(2):
        for width in range(1, 41):
            decode(session, 2, width)
            session.truncate(300)
"""
    _, (made, launched, destroyed, _) = counted(fake, tmp_path, code)
    assert made == destroyed and 40 <= made <= 80 and launched >= 80


def test_a_stream_mode_that_the_driver_lacks_is_refused(fake: Driver) -> None:
    code = OPEN + """
for flags in (DeviceFlag.NONE, DeviceFlag.POISON_RELEASED):
    try:
        opened("counters", flags)
    except KvStreamError as error:
        print(type(error).__name__, error)
"""
    text = fake.run(code, FAKE_CUDA_WORDS="0").splitlines()
    assert len(text) == 2 and all(line.startswith("Unsupported") and "counters" in line for line in text)
    assert fake.run(code).splitlines()[0].count("released pages are to be filled") == 1


PASSES = OPEN + """
with opened() as model:
    stream(model)
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

CALLS = [
    "cuStreamBeginCapture_v2 1", "cuStreamEndCapture 1", "cuGraphInstantiateWithFlags 1",
    "cuGraphInstantiateWithFlags 2", "cuGraphUpload 1", "cuGraphLaunch 1", "cuGraphLaunch 3",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
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


@pytest.mark.parametrize("nth", [460, 520, 540, 660])
def test_a_failed_launch_while_recording_keeps_nothing_of_it(fake: Driver, nth: int) -> None:
    lines = fake.run(PASSES, FAKE_CUDA_FAIL=f"cuLaunchKernel {nth} 701").splitlines()
    assert len(lines) == 2 and "cuLaunchKernel" in lines[0] and lines[1] == "whole"


def test_memory_of_rings_stays_over_many_placements(fake: Driver) -> None:
    code = OPEN + """
with opened() as model:
    layout = model.plan.phases[Phase.DECODE.value]
    floors = (layout.pool.floor_pages,) * layout.pool.n_layers
    def turn(n):
        for step in range(n):
            model.place(Phase.DECODE, Placement(floors, 3 + step % 11, layout.max_rows))
        return model._target._device.info.device_bytes
    print(turn(40) == turn(4000))
"""
    assert fake.run(code) == "True"
