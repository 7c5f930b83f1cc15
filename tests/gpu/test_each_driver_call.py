"""Every allocation, and a sample of every other kind of call, fails once: opening, a session and its passes.

A failure is an error that names the call, and numbers where something was not to be had. What was open goes on: the
session is as before, the same pass succeeds, and nothing is left behind. Run against the library that stands in for the
driver's.
"""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, MODEL, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


EACH = MODEL + """
import ctypes, os
fake = ctypes.CDLL("libcuda.so.1")
call, error, step = os.environ["CALL"].split()
provider.default_folder = lambda: Path(folder) / "images"

def attempt(nth):
    os.environ["FAKE_CUDA_FAIL"] = f"{call} {nth} {error}"
    fake.fake_cuda_reset()
    told = []
    try:
        model = Model.open(path, device="cuda", ctx_size=1000, arena_mib=40)
    except KvStreamError as refusal:
        assert call in str(refusal) or "pinned" in str(refusal), refusal
        told.append(("open", type(refusal).__name__, str(refusal)))
        model = Model.open(path, device="cuda", ctx_size=1000, arena_mib=40)
    with model:
        try:
            session = model.session()
        except KvStreamError as refusal:
            told.append(("session", type(refusal).__name__, str(refusal)))
            session = model.session()
        with session:
            for tokens, phase in ((list(range(300)), Phase.PREFILL), ([5], Phase.DECODE), ([1, 2, 3], Phase.DECODE)):
                before = session.tokens
                try:
                    session.forward(tokens, phase=phase)
                except KvStreamError as refusal:
                    told.append((phase.name, type(refusal).__name__, str(refusal)))
                    assert session.tokens == before
                    model.check_integrity()
                    session.forward(tokens, phase=phase)
            assert len(session.tokens) == 304
            model.check_integrity()
    return told, fake.fake_cuda_calls() >= nth

nth, seen = 1, []
while True:
    told, has_struck = attempt(nth)
    seen += told
    if not has_struck:
        break
    nth += 1 if step == "each" else 1 + nth // 3
print(nth, len(seen), sorted({stage for stage, _, _ in seen}), sorted({kind for _, kind, _ in seen}))
print(all(any(char.isdigit() for char in text) for _, _, text in seen))
"""


@pytest.mark.parametrize(("call", "error", "kind"), [
    ("cuMemAlloc_v2", 2, "HostMemoryError"), ("cuMemHostAlloc", 2, "HostMemoryError"),
    ("cuModuleLoadData", 200, "DeviceError"), ("cuMemHostRegister_v2", 304, "HostMemoryError"),
])  # fmt: skip
def test_each_of_what_is_had_once_may_be_missing(fake: Driver, call: str, error: int, kind: str) -> None:
    counts, has_numbers = fake.run(EACH, CALL=f"{call} {error} each").splitlines()
    n_tried, n_errors, *_ = counts.split()
    assert int(n_errors) >= int(n_tried) - 2 > 0 and f"'{kind}'" in counts and has_numbers == "True"


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuStreamQuery", "cuLaunchKernelEx",
                                  "cuModuleGetFunction", "cuEventQuery", "cuMemsetD8Async"])  # fmt: skip
def test_a_call_that_fails_once_loses_nothing(fake: Driver, call: str) -> None:
    counts, has_numbers = fake.run(EACH, CALL=f"{call} 719 some").splitlines()
    n_tried, n_errors, *_ = counts.split()
    assert int(n_tried) > 2 and int(n_errors) > 0 and "DeviceError" in counts and has_numbers == "True"


# Weights come in as many pieces as there are workers, one for each processor: two, wherever this runs.
OPENING = MODEL + """
import ctypes, os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
fake = ctypes.CDLL("libcuda.so.1")
provider.default_folder = lambda: Path(folder) / "images"
nth, silent = 1, []
while True:
    os.environ["FAKE_CUDA_FAIL"] = f"{os.environ['CALL']} {nth} 719"
    fake.fake_cuda_reset()
    try:
        Model.open(path, device="cuda", ctx_size=1000, arena_mib=40).close()
        if fake.fake_cuda_calls() < nth:
            break
        silent.append(nth)
    except KvStreamError as refusal:
        assert os.environ["CALL"] in str(refusal), refusal
    nth += 1
print(nth, silent)
"""


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord"])
def test_no_copy_of_a_weight_fails_unnoticed(fake: Driver, call: str) -> None:
    n_tried, silent = fake.run(OPENING, CALL=call).split(" ", 1)
    assert int(n_tried) > 10 and silent == "[]"
