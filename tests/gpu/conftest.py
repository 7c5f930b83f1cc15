"""What tests of cards and kernels share: a card, or a reason to skip; engines that run kernels, and their launches."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import CudaDevice
from pykvstream.errors import KvStreamError
from tests.gpu.kernel_engine import CudaEngine, HostEngine
from tests.gpu.weight_rig import build_launches


@pytest.fixture(scope="session")
def card() -> str:
    """The name of a usable card. Skips where there is none, saying why."""
    try:
        CudaDevice().close()
    except KvStreamError as error:
        pytest.skip(str(error))
    return "cuda"


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_launches(tmp_path_factory.mktemp("launches"))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostEngine:
    return HostEngine(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def device() -> CudaEngine:
    return CudaEngine()
