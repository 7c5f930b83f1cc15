"""Memory that the driver does not pin is found out before a model is loaded, with the limits that stand against it."""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, MODEL, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")

CHECK = """
import resource
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.host import check_history
from pykvstream.errors import KvStreamError
soft, need = {soft}, {need}
if soft:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, soft))
with CudaDevice() as device:
    try:
        check_history(device, need)
        print("fits")
    except KvStreamError as error:
        print(type(error).__name__, error)
    check_history(device, 0)
"""
MIB = 1 << 20


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver.build(tmp_path_factory.mktemp("fake"))


def test_a_driver_that_does_not_count_is_believed(fake: Driver) -> None:
    assert fake.run(CHECK.format(soft=MIB, need=64 * MIB)) == "fits"


def test_a_lock_limit_that_counts_is_refused_with_both_numbers(fake: Driver) -> None:
    text = fake.run(CHECK.format(soft=MIB, need=64 * MIB), FAKE_CUDA_LOCK=str(MIB))
    need = f"host history needs {64 * MIB} bytes of pinned memory, and already {MIB + 4096}"
    assert text.startswith(f"HostMemoryError {need} cannot be pinned")
    assert f"ulimit -l is {MIB} bytes" in text and "cuMemHostRegister_v2" in text


def test_a_need_below_the_limit_is_not_refused(fake: Driver) -> None:
    assert fake.run(CHECK.format(soft=MIB, need=MIB), FAKE_CUDA_LOCK=str(MIB)) == "fits"


def test_where_nothing_can_be_pinned_a_card_is_not_usable(fake: Driver) -> None:
    code = "from pykvstream.cli import main; raise SystemExit(main(['devices']))"
    lines = fake.run(code, FAKE_CUDA_LOCK="0").splitlines()
    assert lines[1].startswith("cuda:0  not usable: host history needs") and "cannot be pinned" in lines[1]


def test_a_model_is_refused_before_a_weight_is_loaded(fake: Driver) -> None:
    code = MODEL + """
try:
    Model.open(path, device="cuda", ctx_size=1000, progress=lambda name, n_bytes: print("loaded"))
except KvStreamError as error:
    print(type(error).__name__)
"""
    assert fake.run(code, FAKE_CUDA_LOCK="0") == "HostMemoryError"


def test_a_chunk_that_meets_the_limit_is_an_error_and_the_session_goes_on(fake: Driver) -> None:
    code = MODEL + """
import os
with Model.open(path, device="cuda", ctx_size=1000) as model, model.session() as session:
    os.environ["FAKE_CUDA_LOCK"] = "1"
    try:
        session.forward(list(range(300)))
        session._core._target.publish_wait()
        print("no failure")
    except KvStreamError as error:
        print(type(error).__name__, error)
    del os.environ["FAKE_CUDA_LOCK"]
    session.forward([1, 2, 3])
    model.check_integrity()
"""
    text = fake.run(code)
    assert "cannot be pinned (" in text and "cuMemHostRegister_v2" in text
