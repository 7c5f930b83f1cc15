"""A wait for a card that never ends is an error with numbers, and no hang: at every kind of wait, and in closing.

Run against the library that stands in for the driver's. There a stream stands still from one of its calls on, and
whoever then frees, unregisters or unloads ends the process: a driver would not come back. So does whoever looks for
ever. What was late happens at the end of each process: memory that it needs and that was freed would end it too.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.cli import main
from pykvstream.engine import Model
from pykvstream.errors import InvalidArgument
from tests.gpu.stand_in import COMPILER, MODEL, Driver
from tests.meta.tree import ROOT

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


# A stall strikes while a device works: what it says, that the next call is refused, that all of it works again when the
# card goes on, and that closing comes back when it does not.
DEVICE = """
import ctypes, os, time
import numpy as np
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.host import Host
from pykvstream.core.share import Buffer
from pykvstream.errors import DeviceError
fake = ctypes.CDLL("libcuda.so.1")
mib = 1 << 20
with CudaDevice(wait_limit_s=0.05) as device, Host(device, 40 * mib) as host:
    data = np.arange(24 * mib, dtype=np.uint8)
    buffer = Buffer.of(device, data)
    host.write(0, data[: 5 * mib])
    os.environ["FAKE_CUDA_" + os.environ["KIND"]] = os.environ["AT"]
    fake.fake_cuda_reset()
    for _ in range(2):
        try:
            {work}
        except DeviceError as error:
            print(error)
    print(device.info.is_lost)
    if {resumes}:
        fake.fake_cuda_resume()
        while True:
            try:
                other = Buffer.of(device, data)
                break
            except DeviceError:
                time.sleep(0.01)
        assert other.read(0, data.size).tobytes() == buffer.read(0, data.size).tobytes() == data.tobytes()
        other.close()
        host.write(0, data[: 5 * mib])
        assert host.read(0, 5 * mib).tobytes() == data[: 5 * mib].tobytes()
        assert not device.info.is_lost
    buffer.close()
    info = device.info
    print("left", info.n_left, info.left_bytes)
print("closed")
fake.fake_cuda_resume()
"""

WAITS = {
    "an upload": ("cuMemcpyAsync 1", "Buffer.of(device, data[: 9 * mib])", "for bytes to be written: 9437184"),
    "a full stage": ("cuMemcpyAsync 1", "Buffer.of(device, data[: 15 * mib])", "for bytes to be written: 15728640"),
    "a load": ("cuMemcpyAsync 2", "Buffer.of(device, data)", "for a pinned buffer of 2097152 bytes"),
    "a download": ("cuMemcpyAsync 1", "buffer.read(0, data.size)", "for 8388608 of 25165824 bytes from 0x"),
    "copies to history": ("cuMemcpyAsync 2", "host.write(0, data[:mib])", "for 1 copies of 1048576 bytes to history"),
    "copies from history": ("cuMemcpyAsync 1", "host.read(0, mib)", "for 1 copies of 1048576 bytes from history"),
}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_without_an_end_is_an_error(fake: Driver, name: str, resumes: bool) -> None:
    at, work, said = WAITS[name]
    text = fake.run(DEVICE.format(work=work, resumes=resumes), KIND="STALL", AT=at)
    first, second, is_lost, left, closed = text.splitlines()
    assert "card 0 is lost: waited 0." in first and "of 0.050 s at most" in first
    assert said in first and "unfinished: " in first
    assert "card 0 is lost for " in second and "nothing is begun before it has finished" in second and said in second
    assert is_lost == "True" and closed == "closed"
    _, n_left, left_bytes = left.split()
    assert resumes or (int(n_left) >= 1 and int(left_bytes) >= 24 << 20)


BLOCKS = {
    "memory of a copy": ("cuMemHostRegister_v2 1", "host.write(33 * mib, data[:mib])", "the copy thread"),
    "a copy": ("cuMemcpyAsync 1", "host.read(0, mib)", "the copy thread, which is in a call of the driver, with 1 b"),
    # Until a thread beside the first has a piece to load.
    "a load": ("cuMemcpyAsync 1", "while True: Buffer.of(device, data).close()", "1 threads that load, which are"),
}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_call_that_does_not_come_back_holds_up_nobody_else(fake: Driver, name: str, resumes: bool) -> None:
    """Threads of ours that are in the driver are waited for with an end, and what they use stays."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("with one processor no other thread loads")
    at, work, said = BLOCKS[name]
    text = fake.run(DEVICE.format(work=work, resumes=resumes), KIND="BLOCK", AT=at)
    first, second, is_lost, left, closed = text.splitlines()
    assert "card 0 is lost" in first and "waited 0.100 s" in first and said in first
    assert "nothing is begun" in second and said in second and is_lost == "True" and closed == "closed"
    assert resumes or int(left.split()[1]) >= 1


ADOPTED = """
import ctypes, os, weakref
import numpy as np
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.share import Buffer
from pykvstream.errors import DeviceError
fake = ctypes.CDLL("libcuda.so.1")
class Owner:
    pass
with CudaDevice(wait_limit_s=0.05) as device:
    memory, owners = np.zeros(1 << 20, dtype=np.uint8), []
    for _ in range(2):
        owner = Owner()
        owners.append(weakref.ref(owner))
        with Buffer.at(device, -(-memory.ctypes.data // 256) * 256, 1 << 19, owner) as buffer:
            del owner
            try:
                buffer.write(0, bytes(1000))
            except DeviceError as error:
                print(error)
        os.environ["FAKE_CUDA_STALL"] = "cuMemcpyAsync 1"
        fake.fake_cuda_reset()
    print([each() is None for each in owners], device.info.n_left, device.info.left_bytes)
"""


def test_adopted_memory_stays_with_a_card_that_may_use_it(fake: Driver) -> None:
    first, last = fake.run(ADOPTED).splitlines()
    assert "for bytes to be written: 1000" in first and last == "[True, False] 1 524288"


def test_limits_are_checked(fake: Driver) -> None:
    code = """
from pykvstream.core.cuda import open_device
from pykvstream.errors import InvalidArgument
for limit in (0, -1, float("nan"), 1e9, True, "60"):
    try:
        open_device("cuda", wait_limit_s=limit).close()
    except InvalidArgument as error:
        print(error)
open_device("cuda", wait_limit_s=1).close()
"""
    lines = fake.run(code).splitlines()
    assert len(lines) == 6 and all("0.001 to 86400 seconds, got " in line for line in lines)


def test_a_limit_without_a_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for device, n_layers, said in (("cpu", "all", "the CPU has none"), ("cuda", 0, "gpu_layers 0 leaves no layer")):
        with pytest.raises(InvalidArgument, match=said):
            Model.open("demo-hybrid", device=device, gpu_layers=n_layers, wait_limit_s=1.0)
    for command in ("plan", "generate", "kernels check"):
        flags = ["-p", "x", "--raw"] if command == "generate" else []
        assert main([*command.split(), "demo-hybrid", "--device", "cpu", "--wait-limit", "5", *flags]) != 0
        assert "the CPU has none" in capsys.readouterr().err


# A stall strikes in a conversation that streams. The pass is undone and the next call refused at once. When the card
# goes on, so does the session, where its context lives; when it does not, closing comes back, and another model can be
# opened.
SESSION = MODEL + """
import ctypes, os
fake = ctypes.CDLL("libcuda.so.1")
resumes = os.environ["RESUMES"] == "yes"
steps = [(1100, Phase.PREFILL), (1, Phase.DECODE), (5, Phase.DECODE), (1, Phase.DECODE)]
model = Model.open(path, device="cuda", ctx_size=4000, wait_limit_s=0.05)
for phase in Phase:
    layout = model.plan.phases[phase.value]
    floors = (layout.pool.floor_pages,) * layout.pool.n_layers
    model.place(phase, Placement(floors, 2, layout.max_rows))
device = model._target.parts[-1].device
session = model.session()
session.forward(list(range(300)))
os.environ["FAKE_CUDA_STALL"] = os.environ["AT"]
fake.fake_cuda_reset()
for width, phase in steps:
    tokens = [7 * i % 300 for i in range(width)]
    before = session.tokens
    try:
        session.forward(tokens, phase=phase)
    except KvStreamError as error:
        print(type(error).__name__, error)
        assert session.tokens == before and device.info.is_lost
        try:
            session.forward(tokens, phase=phase)
        except KvStreamError as refusal:
            print(type(refusal).__name__, refusal)
        assert session.tokens == before
        if not resumes:
            break
        fake.fake_cuda_resume()
        session.forward(tokens, phase=phase)
        model.check_integrity()
if resumes:
    assert len(session.tokens) == 1407 and session.stats.streamed_bytes > 0
    assert not device.info.is_lost and device.info.n_left == 0
for each in (session, model):
    try:
        each.close()
    except KvStreamError as error:
        assert "could not be written to history" in str(error) and not resumes
print("closed")
if not resumes:
    fake.fake_cuda_resume()
with Model.open(path, device="cuda", ctx_size=4000) as model, model.session() as session:
    session.forward(list(range(300)))
print("reopened")
"""

# How many copies go together, and which of two threads ends its wait first, is a matter of time.
STALLS = {
    "operations": ("cuLaunchKernelEx 40", "unfinished: operations"),
    "operations and copies": ("cuLaunchKernelEx 400", "unfinished: operations"),
    "any copy": ("cuMemcpyAsync 30", "unfinished: "),
    "rows to history": ("cuMemcpy2DAsync_v2 3", "bytes to history; unfinished: copies to history"),
    "pages from history": ("cuStreamWaitEvent 9", "bytes from history; unfinished: copies through rings"),
}


@pytest.mark.parametrize("resumes", ["no", "yes"])
@pytest.mark.parametrize("name", STALLS)
def test_a_session_goes_on_where_its_context_lives(fake: Driver, name: str, resumes: str) -> None:
    at, said = STALLS[name]
    lines = fake.run(SESSION, AT=at, RESUMES=resumes).splitlines()
    assert len(lines) == 4 and all(line.startswith("DeviceError ") and said in line for line in lines[:2]), lines
    assert all("card 0 is lost" in line and "of 0.050 s at most" in line for line in lines[:2])
    assert lines[2:] == ["closed", "reopened"]


# Every kind of call stalls a stream, at one place after another.
EACH = MODEL + """
import ctypes, os
fake = ctypes.CDLL("libcuda.so.1")
call = os.environ["CALL"]
provider.default_folder = lambda: Path(folder) / "images"

def attempt(nth):
    os.environ["FAKE_CUDA_STALL"] = f"{call} {nth}"
    fake.fake_cuda_reset()
    told = []
    try:
        model = Model.open(path, device="cuda", ctx_size=1000, arena_mib=40, wait_limit_s=0.01)
        session = model.session()
        for tokens, phase in ((list(range(300)), Phase.PREFILL), ([5], Phase.DECODE), ([1, 2, 3], Phase.DECODE)):
            before = session.tokens
            try:
                session.forward(tokens, phase=phase)
            except KvStreamError as error:
                told.append((phase.name, str(error)))
                assert session.tokens == before
                fake.fake_cuda_resume()
                session.forward(tokens, phase=phase)
            model.check_integrity()
        model.close()
    except KvStreamError as error:
        told.append(("open or close", str(error)))
    fake.fake_cuda_resume()
    return told, fake.fake_cuda_stalls() >= nth

nth, seen = 1, []
while True:
    told, has_struck = attempt(nth)
    seen += told
    if not has_struck:
        break
    nth += 1 + nth // 2
print(nth, len(seen), sorted({stage for stage, _ in seen}))
print([text for _, text in seen if "card 0 is lost" not in text])
"""


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuLaunchKernelEx", "cuMemsetD8Async"])
def test_wherever_a_stream_stands_still_the_error_says_so(fake: Driver, call: str) -> None:
    counts, silent = fake.run(EACH, CALL=call).splitlines()
    n_tried, n_errors, *_ = counts.split()
    assert int(n_tried) > 2 and int(n_errors) > 0 and silent == "[]"


# So many launches that the queue of a stream would be full before the pass has ended.
DEEP = MODEL.replace("n_layers=4", "n_layers=96") + """
import ctypes, os
fake = ctypes.CDLL("libcuda.so.1")
with Model.open(path, device="cuda", ctx_size=1000, wait_limit_s=0.05) as model, model.session() as session:
    session.forward([1, 2, 3])
    os.environ["FAKE_CUDA_STALL"] = "cuLaunchKernelEx 1"
    fake.fake_cuda_reset()
    try:
        session.forward([5], phase=Phase.DECODE)
    except KvStreamError as error:
        print(error)
    print(fake.fake_cuda_stalls())
    fake.fake_cuda_resume()
    fake.fake_cuda_reset()
    os.environ["FAKE_CUDA_STALL"] = "cuLaunchKernelEx 1000000"
    session.forward([5], phase=Phase.DECODE)
    print(fake.fake_cuda_stalls())
"""


def test_launches_do_not_fill_a_queue(fake: Driver) -> None:
    error, n_stalled, n_launches = fake.run(DEEP).splitlines()
    assert "for launch " in error and "before launch " in error
    assert int(n_stalled) < 500 < 1000 < int(n_launches)


def test_the_backend_has_no_call_that_waits_without_an_end() -> None:
    """None is declared, so that none can be made."""
    text = (ROOT / "native/backends/cuda/api.h").read_text(encoding="utf-8")
    assert "cuStreamQuery" in text and "Synchronize" not in text
