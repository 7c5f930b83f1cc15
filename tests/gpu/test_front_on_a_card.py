"""The sampling front of a card from sealing to the words that come back, and rows that stay there.

Against the library that stands in for the driver's, which here runs kernels that were compiled for the host.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.errors import InvalidArgument, Unsupported
from tests.front_rig import FrontRig
from tests.gpu.stand_in import COMPILER, HOST_KERNELS, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


BEGIN = HOST_KERNELS + """
import ctypes
import numpy as np
from pykvstream.core.cuda import CudaDevice
from pykvstream.errors import KvStreamError
from tests.front_rig import FrontRig
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_copied.restype = ctypes.c_size_t
N_COLS, N_TOKENS, N_BEST, LEFT = 8192 + 400, 8192 + 321, 128, 0xABABABAB
rows = np.random.default_rng(5).standard_normal((6, N_COLS)).astype(np.float32)
rows[1] = np.round(rows[1])
rows[2, 8000] = np.nan
rows[3] = -np.inf
rows[4, 7:] = -np.inf
def told(act):
    try:
        act()
        return "done"
    except KvStreamError as error:
        return f"{type(error).__name__} {error}".split(" [KVS_")[0]
def copied(act):
    before = fake.fake_cuda_copied()
    act()
    return fake.fake_cuda_copied() - before
card = FrontRig(N_COLS, N_TOKENS, N_BEST, device=CudaDevice(), keeps_rows=True)
"""


def run(card: Driver, code: str, **variables: str) -> list[str]:
    return card.run(BEGIN + code, FAKE_CUDA_KERNELS="host", **variables).splitlines()


WORDS = """
with card, FrontRig(N_COLS, N_TOKENS, N_BEST) as cpu:
    for n in (6, 1, 3):
        out = np.empty((n, N_COLS), np.float32)
        print((card.run(rows[:n], out=out) == cpu.run(rows[:n])).all(), out.tobytes() == rows[:n].tobytes())
        print((card.run(rows[:n]) == cpu.run(rows[:n])).all())
    print((card.run(rows, has_front=False) == LEFT).all())
    out[:] = 0
    print((card.run(rows[:3], out=out, has_front=False) == LEFT).all(), out.tobytes() == rows[:3].tobytes())
"""


@pytest.mark.parametrize("arch", ["75", "90"])
def test_words_are_those_of_the_cpu_whether_rows_come_along_or_not(card: Driver, arch: str) -> None:
    assert run(card, WORDS, FAKE_CUDA_ARCH=arch) == ["True True", "True"] * 3 + ["True", "True True"]


RECORDED = """
with card, FrontRig(N_COLS, N_TOKENS, N_BEST) as cpu:
    for turn, has_front in enumerate((False,) * 3 + (True,) * 3 + (False, True)):
        given, out = np.roll(rows, turn, axis=0), np.empty_like(rows)
        expected = cpu.run(given) if has_front else LEFT
        print((card.run(given, out=out, has_front=has_front) == expected).all(), out.tobytes() == given.tobytes())
"""


def test_a_pass_that_was_recorded_without_its_front_is_not_one_with_it(card: Driver, tmp_path: Path) -> None:
    said = run(card, RECORDED, FAKE_CUDA_COUNT=str(tmp_path / "count"))
    assert said == ["True True"] * 8
    *_, made, launched, destroyed = map(int, (tmp_path / "count").read_text(encoding="ascii").split())
    assert (made, launched, destroyed) == (2, 6, 2)


COPIES = """
with card:
    out = np.empty_like(rows)
    card.run(rows)
    kept, handed = copied(lambda: card.run(rows)), copied(lambda: card.run(rows, out=out))
    nothing = copied(lambda: card.run(rows, has_front=False))
    print(handed - kept == rows.nbytes, kept - nothing == 6 * (2 * N_BEST + 4) * 4)
"""


def test_rows_that_stay_are_not_copied(card: Driver) -> None:
    assert run(card, COPIES) == ["True True"]


READS = """
with card:
    one, two = np.zeros((1, N_COLS), np.float32), np.zeros((2, N_COLS), np.float32)
    print(told(lambda: card.binding.read_output(0, 0, 0, one)))
    words = card.run(rows)
    first = card.binding.newest_pass
    print(told(lambda: card.binding.read_output(first, 0, 1, two)), two.tobytes() == rows[1:3].tobytes())
    again = np.empty_like(words[:1])
    card.binding.read_output(first, 1, 4, again.view(np.float32))
    print((again == words[4]).all())
    for output, row in ((0, 5), (0, 6), (2, 0)):
        print(told(lambda: card.binding.read_output(first, output, row, two)))
    card.run(rows[:1], has_front=False)
    second = card.binding.newest_pass
    print(told(lambda: card.binding.read_output(first, 0, 0, one)))
    print(told(lambda: card.binding.read_output(second, 0, 0, one)), one.tobytes() == rows[:1].tobytes())
    print(told(lambda: card.binding.read_output(second, 1, 0, again.view(np.float32))))
"""


def test_rows_are_read_until_the_next_pass(card: Driver) -> None:
    lines = run(card, READS)
    assert lines == [
        "Stale outputs of pass 0, the newest one of this binding is 0",
        "done True",
        "True",
        "InvalidArgument 2 rows from row 5 on of an output of 6 rows",
        "InvalidArgument 2 rows from row 6 on of an output of 6 rows",
        "InvalidArgument output 2 of 2",
        "Stale outputs of pass 1, the newest one of this binding is 2",
        "done True",
        "InvalidArgument 1 rows from row 0 on of an output of 0 rows",
    ]


TWO = """
with card:
    device = card.binding._device
    with FrontRig(N_COLS, N_TOKENS, N_BEST, device=device, keeps_rows=True) as other:
        one = np.zeros((1, N_COLS), np.float32)
        card.run(rows)
        first = card.binding.newest_pass
        other.run(rows[4:5])
        second = other.binding.newest_pass
        print(told(lambda: card.binding.read_output(first, 0, 0, one)))
        print(told(lambda: card.binding.read_output(second, 0, 0, one)))
        print(told(lambda: other.binding.read_output(second, 0, 0, one)), one.tobytes() == rows[4:5].tobytes())
"""


def test_a_pass_of_another_tape_overwrites_what_was_left(card: Driver) -> None:
    assert run(card, TWO) == [
        "Stale outputs of pass 1 of the device: pass 2 has overwritten them",
        "Stale outputs of pass 2, the newest one of this binding is 1",
        "done True",
    ]


FAILS = """
import os
with card:
    one = np.zeros((1, N_COLS), np.float32)
    card.run(rows)
    first = card.binding.newest_pass
    for call in ("cuLaunchKernelEx 2 719", "cuStreamQuery 1 719"):
        os.environ["FAKE_CUDA_FAIL"] = call
        fake.fake_cuda_reset()
        print(told(lambda: card.run(rows)).split(":")[0], card.binding.newest_pass)
        os.environ["FAKE_CUDA_FAIL"] = ""
        print(told(lambda: card.binding.read_output(first, 0, 0, one)).split(",")[0])
    card.run(rows)
    os.environ["FAKE_CUDA_FAIL"] = "cuMemcpyAsync 1 719"
    fake.fake_cuda_reset()
    number = card.binding.newest_pass
    print(told(lambda: card.binding.read_output(number, 0, 0, one)).split(":")[0])
    os.environ["FAKE_CUDA_FAIL"] = ""
    print(told(lambda: card.binding.read_output(number, 0, 0, one)), one.tobytes() == rows[:1].tobytes())
"""


def test_a_pass_that_failed_has_left_nothing(card: Driver) -> None:
    assert run(card, FAILS) == [
        "DeviceError kernel front_chunk, grid 2 x 6 x 1, block 256 x 1 x 1, 0 bytes of shared memory 0",
        "Stale outputs of pass 1",
        "DeviceError cuStreamQuery 0",
        "Stale outputs of pass 1",
        "DeviceError cuMemcpyAsync",
        "done True",
    ]


def test_the_cpu_has_no_rows_that_stay() -> None:
    with FrontRig(100, 100, 4, keeps_rows=True) as cpu:
        rows = np.arange(100, dtype=np.float32)[None]
        with pytest.raises(InvalidArgument, match="output 0 has no memory"):
            cpu.run(rows)
        out = np.empty_like(rows)
        assert cpu.run(rows, out=out)[0, :4].tolist() == [99, 98, 97, 96] and cpu.binding.newest_pass == 0
        with pytest.raises(Unsupported, match="the caller has all of them"):
            cpu.binding.read_output(1, 0, 0, out)
