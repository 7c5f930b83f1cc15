"""When passes are recorded, launched again and let go; and what a failure of each new call of the driver leaves behind.

Against the library that stands in for the driver's, which counts and computes nothing, and refuses what would disturb a
recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, MODEL, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


OPEN = MODEL + """
def opened(settings="", **options):
    return Model.open(path, device="cuda" + settings, **({"ctx_size": 4000} | options))

def place(model, ring_slots, phases=tuple(Phase)):
    for phase in phases:
        layout = model.plan.phases[phase.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        model.place(phase, Placement(floors, ring_slots, layout.max_rows))

def decode(session, n, width=1, **options):
    for _ in range(n):
        session.forward([3] * width, phase=Phase.DECODE, **options)
"""


@dataclass(frozen=True, slots=True)
class Count:
    """What the driver was asked for: kernels, early ones, those of recordings, early ones of these; recordings."""

    kernels: int
    early: int
    recorded: int
    recorded_early: int
    made: int
    launched: int
    destroyed: int


def counted(fake: Driver, folder: Path, code: str, **variables: str) -> Count:
    fake.run(OPEN + code, FAKE_CUDA_COUNT=str(folder / "count"), **variables)
    return Count(*map(int, (folder / "count").read_text(encoding="ascii").split()))


def test_a_shape_is_recorded_once_and_launched_from_then_on(fake: Driver, tmp_path: Path) -> None:
    """Of each width the first pass is launched by itself, and one graph does each later one."""
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 1500)
    decode(session, 20)
    decode(session, 10, 3)
"""
    count = counted(fake, tmp_path, code)
    assert (count.made, count.launched, count.destroyed) == (2, 19 + 9, 2)
    singly = counted(fake, tmp_path, code.replace("opened()", 'opened(",graphs=off")'))
    assert (singly.made, singly.launched) == (0, 0)
    # Two passes of each width have launched their kernels: the first, and the one that was recorded.
    of_pass = (singly.kernels - count.kernels) / (18 + 8)
    assert of_pass == count.recorded / 2 and count.recorded > 60


def test_a_recorded_kernel_begins_early_where_the_driver_can_record_that(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 300)
    decode(session, 3)
"""
    count = counted(fake, tmp_path, code)
    assert 0 < count.recorded_early == count.recorded - 1  # nothing comes before the first one
    older = counted(fake, tmp_path, code, FAKE_CUDA_VERSION="12020")
    assert (older.recorded, older.recorded_early, older.made) == (count.recorded, 0, 1)
    assert older.early == count.early - count.recorded_early > 0
    forbidden = counted(fake, tmp_path, code.replace("opened()", 'opened(",early=off")'))
    assert (forbidden.early, forbidden.made) == (0, 1)


def test_passes_that_stream_are_not_recorded(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    place(model, 12)
    session.forward([1] * 1500)
    decode(session, 8)
    assert session.stats.streamed_bytes > 0
"""
    count = counted(fake, tmp_path, code)
    assert (count.made, count.launched) == (0, 0)


def test_prompts_are_not_recorded_however_narrow_they_are(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model:
    for _ in range(6):
        with model.session() as session:
            session.forward([1] * 40)
"""
    count = counted(fake, tmp_path, code)
    assert (count.made, count.launched) == (0, 0)


def test_a_recording_ends_with_its_phase(fake: Driver, tmp_path: Path) -> None:
    """Placing pages anew records nothing new; what the arena's next layout moves is recorded anew."""
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 1000)
    decode(session, 4)
    layout = model.plan.phases[Phase.DECODE.value]
    for _ in range(6):
        model.place(Phase.DECODE, layout.placement)
        decode(session, 2)
    session.forward([1] * 600)
    decode(session, 4)
"""
    count = counted(fake, tmp_path, code)
    assert count.made == count.destroyed == 2 and count.launched == 3 + 12 + 3


def test_longer_tables_and_other_rows_have_recordings_of_their_own(fake: Driver, tmp_path: Path) -> None:
    """Tables grow by 64 pages of 256 tokens."""
    code = """
write_random_hybrid(path, HybridShape(n_layers=4, ctx=32768))
with opened(ctx_size=17000) as model, model.session() as session:
    session.forward([1] * 16370)
    decode(session, 30)
    decode(session, 4, 3)
    decode(session, 4, 3, logits="all")
"""
    count = counted(fake, tmp_path, code)
    assert count.made == count.destroyed == 4 and count.launched == 13 + 15 + 3 + 3


def test_recordings_are_few_whatever_widths_come(fake: Driver, tmp_path: Path) -> None:
    code = """
with opened() as model, model.session() as session:
    session.forward([1] * 300)
    for _ in range(2):
        for width in range(1, 41):
            decode(session, 2, width)
            session.truncate(300)
"""
    count = counted(fake, tmp_path, code)
    assert count.made == count.destroyed and 40 <= count.made <= 80 and count.launched >= 80


def test_memory_stays_over_many_phases(fake: Driver) -> None:
    """What the device counts; and what the process keeps, since the library's memory is the process's."""
    code = OPEN + """
import resource
with opened() as model, model.session() as session:
    session.forward([1] * 300)
    peaks = []
    for turn in range(220):
        session.truncate(300)
        session.forward([1, 2])
        decode(session, 2)
        kept = model._target.parts[0].device.info.device_bytes
        peaks.append((kept, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    assert peaks[-1][0] == peaks[20][0] > 0 and peaks[-1][1] - peaks[20][1] < 4096, (peaks[20], peaks[-1])
print("flat")
"""
    assert fake.run(code) == "flat"


PASSES = OPEN + """
with opened() as model, model.session() as session:
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
    assert len(session.tokens) == 1113
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


def test_a_failed_launch_while_recording_keeps_nothing_of_it(fake: Driver, tmp_path: Path) -> None:
    count = counted(fake, tmp_path, PASSES[len(OPEN):])
    n_prompt = count.kernels - 2 * count.recorded
    for nth in (n_prompt + count.recorded // 2 + 2, n_prompt + count.recorded // 2 + 30, n_prompt + count.recorded):
        variables = {"FAKE_CUDA_FAIL": f"cuLaunchKernelEx {nth} 701", "FAKE_CUDA_COUNT": str(tmp_path / "count")}
        lines = fake.run(PASSES, **variables).splitlines()
        assert len(lines) == 2 and "cuLaunchKernelEx" in lines[0] and lines[1] == "whole"
        failed = Count(*map(int, (tmp_path / "count").read_text(encoding="ascii").split()))
        assert failed.recorded > count.recorded and failed.made == count.made == failed.destroyed


def test_a_pass_that_is_cancelled_while_it_is_recorded_or_launched_again_can_be_run_again(
    fake: Driver, tmp_path: Path
) -> None:
    code = """
from pykvstream.core.device import HookPoint
with opened() as model, model.session() as session:
    session.forward([1] * 500)
    device = model._target.parts[0].device
    for nth in range(6):
        ops = iter(range(1000))
        device.set_hook(lambda point, index: -5 if point is HookPoint.OP and next(ops) == 20 else 0)
        try:
            decode(session, 1)
            raise SystemExit("did not fail")
        except KvStreamError as error:
            pass
        device.set_hook(None)
        model.check_integrity()
        decode(session, 1)
    assert len(session.tokens) == 506
"""
    count = counted(fake, tmp_path, code)
    assert count.made == count.destroyed == 1 and 4 <= count.launched <= 6


@pytest.mark.parametrize("stall", ["cuGraphLaunch 1", "cuGraphLaunch 3", "cuGraphUpload 1"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_recorded_pass_that_never_ends_is_undone(fake: Driver, tmp_path: Path, stall: str, resumes: bool) -> None:
    """When the card goes on, so does the session; when it does not, closing comes back."""
    code = OPEN + f"""
import ctypes, os
fake = ctypes.CDLL("libcuda.so.1")
with opened(wait_limit_s=0.05) as model, model.session() as session:
    session.forward([1] * 500)
    device = model._target.parts[-1].device
    os.environ["FAKE_CUDA_STALL"] = {stall!r}
    fake.fake_cuda_reset()
    for _ in range(6):
        before = session.tokens
        try:
            decode(session, 1)
        except KvStreamError as error:
            print(type(error).__name__, error)
            assert session.tokens == before and device.info.is_lost
            if not {resumes}:
                break
            fake.fake_cuda_resume()
            decode(session, 1)
            model.check_integrity()
    if {resumes}:
        assert len(session.tokens) == 506 and not device.info.is_lost
print("closed")
"""
    lines = fake.run(code).splitlines()
    assert len(lines) == 2 and lines[0].startswith("DeviceError") and "the end of a pass of 1 rows" in lines[0]
    assert lines[1] == "closed"


def test_an_interrupt_between_launch_and_end_gives_the_pass_up(fake: Driver) -> None:
    """Wherever it strikes: the card is waited for, nothing is under way, and the conversation goes on."""
    code = OPEN + """
from tests.property.test_failed_pass import Interrupter
with opened() as model, model.session() as session:
    session.forward([1] * 100)
    decode(session, 3)
    before = session.tokens
    part = model._target.parts[-1]
    counter = Interrupter(-1)
    counter.run(lambda: decode(session, 1))
    session.truncate(len(before))
    behind = Interrupter(-1)
    behind.run(lambda: decode(session, 1))
    abort, aborted = part._resources.abort, []
    def noted():
        aborted.append(bool(part._resources.binding._held))
        abort()
    part._resources.abort = noted
    struck = 0
    for at in range(1, counter.n_lines + behind.n_lines + 1):
        session.truncate(len(before))
        if at > behind.n_lines:  # behind a step that ended well there is less to look for
            at -= behind.n_lines
            decode(session, 1)
        struck += Interrupter(at).run(lambda: decode(session, 1))
        assert session.tokens[: len(before)] == before
        session.truncate(len(before))
        decode(session, 1)
        assert not part.pager.is_in_pass and not part._resources.binding._held
        model.check_integrity()
    print(struck > counter.n_lines, sum(aborted) > 10)
"""
    assert fake.run(code) == "True True"


def test_rows_go_to_history_once_the_next_pass_is_under_way(fake: Driver) -> None:
    """The driver then gets the pass before so many short copies; whoever waits for rows has them, pass or none."""
    code = OPEN + """
with opened() as model, model.session() as session:
    session.forward([1] * 100)
    decode(session, 2)
    pager = model._target.parts[-1].pager
    pager.publish_wait()
    before = pager.info.published_bytes
    decode(session, 1)
    print(pager.info.published_bytes == before)
    decode(session, 1)
    of_row = pager.info.published_bytes - before
    pager.publish_wait()
    print(of_row > 0, pager.info.published_bytes == before + 2 * of_row)
    decode(session, 1)
    with session.fork() as child:
        print(pager.info.published_bytes == before + 3 * of_row)
    # The page is full in between: the pass that begins another one waits for its rows.
    decode(session, 200)
    pager.publish_wait()
    print(pager.info.published_bytes == before + 203 * of_row)
    model.check_integrity()
"""
    said = fake.run(code, FAKE_CUDA_MAPS="0").splitlines()
    assert said == ["True", "True True", "True", "True"]


def test_a_card_has_one_pass_under_way(fake: Driver) -> None:
    code = OPEN + """
import numpy as np
with opened() as model, model.session() as session:
    session.forward([1] * 10)
    decode(session, 1)
    target, context, cancel = model._target, session._core._context, session._core._cancel
    out, row = np.empty((1, target.n_vocab_rows), np.float32), np.zeros(1, np.uint32)
    begun = target.begin(context, row + 3, row, out, cancel)
    binding = target.parts[-1]._resources.binding
    for call in (binding.begin, binding.run):
        try:
            call(row, row, (out, None), cancel)
        except KvStreamError as error:
            print(type(error).__name__)
    target.end(begun)
    print(context.n_tokens)
    try:
        binding.end()
    except KvStreamError as error:
        print(error)
    binding.abort()
"""
    lines = fake.run(code).splitlines()
    assert lines == ["Busy", "Busy", "12", "no pass has been begun [KVS_EBUSY]"]
