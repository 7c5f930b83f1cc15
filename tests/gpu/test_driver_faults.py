"""What is said where there is no driver, no usable card, or a driver whose calls fail.

Run against a library that stands in for the driver's and computes nothing. The loader finds it, so each case is a
process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library that stands in for the driver's."""
    folder = tmp_path_factory.mktemp("fake")
    source = Path(__file__).with_name("fake_cuda.c")
    command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)
    return folder


def run(code: str, library: Path | None, **variables: str) -> str:
    """What a process with this library prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CUDA")}
    environment |= variables
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
    text = run(OPEN.format(ordinal=0), tmp_path)
    assert text.startswith("Unsupported no device cuda:0: no CUDA driver: ") and "libcuda.so.1" in text


def test_a_driver_without_a_function_is_named(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned int flags) { (void)flags; return 0; }\n", encoding="utf-8")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    assert "the CUDA driver is too old: libcuda.so.1 has no cuDriverGetVersion" in run(OPEN.format(ordinal=0), tmp_path)


def test_a_card_is_described(fake: Path) -> None:
    assert run(OPEN.format(ordinal=0), fake) == "open Fake card 90"


def test_a_card_that_is_too_old_is_refused(fake: Path) -> None:
    text = run(OPEN.format(ordinal=0), fake, FAKE_CUDA_ARCH="61")
    assert "the card is an sm_61, the oldest that is supported is sm_75" in text


def test_a_card_that_is_not_there_is_refused(fake: Path) -> None:
    assert run(OPEN.format(ordinal=3), fake).startswith("NotFound no device cuda:3: no CUDA device 3, the driver has 1")


FIRST_CALLS = ("cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuEventCreate")


@pytest.mark.parametrize("call", [*FIRST_CALLS, "cuMemHostAlloc"])
def test_a_failing_call_is_named(fake: Path, call: str) -> None:
    text = run(OPEN.format(ordinal=0), fake, FAKE_CUDA_FAIL=f"{call} 1 999")
    assert f"{call}: CUDA_ERROR_FAKE (999), as was asked for" in text and "no device cuda:0" in text


@pytest.mark.parametrize(("call", "n_calls"), [("cuStreamCreate", 3), ("cuEventCreate", 11), ("cuMemHostAlloc", 2)])
def test_whatever_fails_in_opening_leaves_nothing_behind(fake: Path, call: str, n_calls: int) -> None:
    for nth in range(1, n_calls + 1):
        text = run(OPEN.format(ordinal=0), fake, FAKE_CUDA_FAIL=f"{call} {nth} 2")
        assert text.startswith("HostMemoryError") and f"{call}: CUDA_ERROR_OUT_OF_MEMORY" in text
    assert run(OPEN.format(ordinal=0), fake, FAKE_CUDA_FAIL=f"{call} {n_calls + 1} 2").startswith("open")


def test_bytes_go_to_history_and_come_back(fake: Path) -> None:
    assert run(MOVE, fake) == "True\nTrue True"


@pytest.mark.parametrize("call", ["cuMemHostRegister_v2 1", "cuMemcpyAsync 2", "cuEventRecord 2", "cuMemAlloc_v2 1"])
def test_a_failed_copy_is_an_error_and_no_hang(fake: Path, call: str) -> None:
    text = run(MOVE, fake, FAKE_CUDA_FAIL=f"{call} 700")
    assert text.startswith("DeviceError")


def test_devices_lists_what_is_there(fake: Path) -> None:
    code = "from pykvstream.cli import main; raise SystemExit(main(['devices']))"
    lines = run(code, fake).splitlines()
    assert lines[0].startswith("cpu ") and lines[1].startswith("cuda:0  Fake card, sm_90, 7.0 of 8.0 GiB free")
    assert len(lines) == 2
