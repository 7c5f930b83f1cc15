"""What is said where there is no driver, no usable card, or a driver whose calls fail.

Run against a library that stands in for the driver's and computes nothing. The loader finds it, so each case is a
process of its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, MODEL, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


OPEN = """
from pykvstream.core.cuda import CudaDevice
from pykvstream.errors import KvStreamError
try:
    with CudaDevice({ordinal}) as device:
        print("open", device.info.name, device.info.arch)
except KvStreamError as error:
    print(type(error).__name__, error)
"""

MOVE = """
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.host import Host
from pykvstream.errors import KvStreamError
with CudaDevice() as device, Host(device, 5 << 20) as host:
    try:
        data = bytes(range(256)) * (4096 * 3)
        host.write(4096, data)
        print(host.read(4096, len(data)).tobytes() == data)
        print(device.info.copied_bytes == 2 * len(data), device.info.host_touched_bytes >= len(data))
    except KvStreamError as error:
        print(type(error).__name__, error)
"""


def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    text = Driver(tmp_path).run(OPEN.format(ordinal=0))
    assert text.startswith("Unsupported no device cuda:0: no CUDA driver: ") and "libcuda.so.1" in text


def test_a_driver_without_a_function_is_named(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned int flags) { (void)flags; return 0; }\n", encoding="utf-8")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    text = Driver(tmp_path).run(OPEN.format(ordinal=0))
    assert "the CUDA driver is too old: libcuda.so.1 has no cuDriverGetVersion" in text


def test_a_card_is_described(fake: Driver) -> None:
    assert fake.run(OPEN.format(ordinal=0)) == "open Fake card 90"


def test_a_card_that_is_too_old_is_refused(fake: Driver) -> None:
    text = fake.run(OPEN.format(ordinal=0), FAKE_CUDA_ARCH="61")
    assert "the card is an sm_61, the oldest that is supported is sm_75" in text


def test_a_card_that_is_not_there_is_refused(fake: Driver) -> None:
    assert fake.run(OPEN.format(ordinal=3)).startswith("NotFound no device cuda:3: no CUDA device 3, the driver has 1")


FIRST_CALLS = ("cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuEventCreate")


@pytest.mark.parametrize("call", [*FIRST_CALLS, "cuMemHostAlloc"])
def test_a_failing_call_is_named(fake: Driver, call: str) -> None:
    text = fake.run(OPEN.format(ordinal=0), FAKE_CUDA_FAIL=f"{call} 1 999")
    assert f"{call}: CUDA_ERROR_FAKE (999), as was asked for" in text and "no device cuda:0" in text


@pytest.mark.parametrize(("call", "n_calls"), [("cuStreamCreate", 4), ("cuEventCreate", 23), ("cuMemHostAlloc", 2)])
def test_whatever_fails_in_opening_leaves_nothing_behind(fake: Driver, call: str, n_calls: int) -> None:
    for nth in range(1, n_calls + 1):
        text = fake.run(OPEN.format(ordinal=0), FAKE_CUDA_FAIL=f"{call} {nth} 2")
        assert text.startswith("HostMemoryError") and f"{call}: CUDA_ERROR_OUT_OF_MEMORY" in text
    assert fake.run(OPEN.format(ordinal=0), FAKE_CUDA_FAIL=f"{call} {n_calls + 1} 2").startswith("open")


def test_bytes_go_to_history_and_come_back(fake: Driver) -> None:
    assert fake.run(MOVE) == "True\nTrue True"


@pytest.mark.parametrize("call", ["cuMemHostRegister_v2 1", "cuMemcpyAsync 2", "cuEventRecord 2", "cuMemAlloc_v2 1"])
def test_a_failed_copy_is_an_error_and_no_hang(fake: Driver, call: str) -> None:
    text = fake.run(MOVE, FAKE_CUDA_FAIL=f"{call} 700")
    assert text.startswith("DeviceError")


PASSES = MODEL + """
steps = [("prompt", 1100, Phase.PREFILL), ("token", 1, Phase.DECODE), ("verify", 5, Phase.DECODE)]
with Model.open(path, device="cuda", ctx_size=4000) as model:
    for phase in Phase:
        layout = model.plan.phases[phase.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        model.place(phase, Placement(floors, 2, layout.max_rows))
    with model.session() as session:
        for name, width, phase in steps:
            tokens = [7 * i % 300 for i in range(width)]
            before = session.tokens
            try:
                session.forward(tokens, phase=phase)
            except KvStreamError as error:
                print(type(error).__name__, name, error)
                assert session.tokens == before
                model.check_integrity()
                session.forward(tokens, phase=phase)
            model.check_integrity()
        assert len(session.tokens) == 1106 and session.stats.streamed_bytes > 0
print("whole")
"""


def test_passes_run_without_a_failure(fake: Driver) -> None:
    assert fake.run(PASSES) == "whole"


@pytest.mark.parametrize("nth", [1, 40, 300])
def test_a_failed_launch_loses_nothing(fake: Driver, nth: int) -> None:
    first, last = fake.run(PASSES, FAKE_CUDA_FAIL=f"cuLaunchKernelEx {nth} 701").splitlines()
    assert first.startswith("DeviceError") and "cuLaunchKernelEx: CUDA_ERROR_FAKE (701)" in first and "kernel " in first
    assert last == "whole"


@pytest.mark.parametrize("call", ["cuMemcpy2DAsync_v2 3", "cuStreamQuery 100"])
def test_a_failed_call_in_a_conversation_loses_nothing(fake: Driver, call: str) -> None:
    """Some are repeated without a word, the others are errors; the conversation goes on behind either."""
    assert fake.run(PASSES, FAKE_CUDA_FAIL=f"{call} 719").splitlines()[-1] == "whole"


def test_devices_lists_what_is_there(fake: Driver) -> None:
    code = "from pykvstream.cli import main; raise SystemExit(main(['devices']))"
    lines = fake.run(code).splitlines()
    assert lines[0].startswith("cpu ") and lines[1].startswith("cuda:0  Fake card, sm_90, 7.0 of 8.0 GiB free")
    assert len(lines) == 2


def test_device_memory_stays_within_what_was_admitted(fake: Driver) -> None:
    code = MODEL + """
from pykvstream.runtime.admission import CARD_RESERVE_BYTES
with Model.open(path, device="cuda", ctx_size=4000) as model:
    with model.session() as session:
        session.forward(list(range(300)) * 6, logits="all")
        session.forward([1, 2, 3], phase=Phase.DECODE)
    report, info = model.report, model._target.parts[-1].device.info
    listed = report.arena_bytes + report.weight_bytes + report.stage_bytes + report.state_bytes
    beside = info.device_peak_bytes - listed
    print(beside, 0 < beside < CARD_RESERVE_BYTES // 16, info.memory_bytes == 8 << 30)
"""
    assert fake.run(code).split()[1:] == ["True", "True"]


def test_kernels_of_a_model_are_listed_and_compiled_once(fake: Driver) -> None:
    code = MODEL + """
from pykvstream.cli import main
provider.default_folder = lambda: Path(folder) / "images"
for _ in range(2):
    assert main(["kernels", "check", str(path), "-c", "1000"]) == 0
"""
    lines = fake.run(code).splitlines()
    n_kernels = len(lines) // 2 - 1
    assert n_kernels > 10 and lines[: n_kernels] == lines[n_kernels + 1 : -1]
    assert all(" for sm_90" in line for line in lines[:n_kernels])
    assert lines[n_kernels].startswith(f"{n_kernels} kernels: 0 were at hand, {n_kernels} compiled")
    assert lines[-1].startswith(f"{n_kernels} kernels: {n_kernels} were at hand, 0 compiled")


@pytest.mark.parametrize(("device", "arch", "is_early"), [
    ("cuda", "90", True), ("cuda:0,early=on", "90", True), ("cuda,early=off", "90", False), ("cuda", "89", False),
])  # fmt: skip
def test_kernels_begin_early_where_a_card_can_and_nobody_forbids_it(
    fake: Driver, tmp_path: Path, device: str, arch: str, is_early: bool
) -> None:
    code = MODEL + f"""
with Model.open(path, device={device!r}, ctx_size=600) as model, model.session() as session:
    session.forward([1] * 300)
    for _ in range(4):
        session.forward([3], phase=Phase.DECODE)
"""
    fake.run(code, FAKE_CUDA_COUNT=str(tmp_path / "count"), FAKE_CUDA_ARCH=arch)
    n_kernels, n_early, *_ = map(int, (tmp_path / "count").read_text(encoding="ascii").split())
    assert n_kernels > 100 and (n_early > n_kernels * 0.9 if is_early else n_early == 0)
