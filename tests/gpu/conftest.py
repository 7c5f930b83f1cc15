"""What tests on a card share: a card, or a reason to skip."""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import CudaDevice
from pykvstream.errors import KvStreamError


@pytest.fixture(scope="session")
def card() -> str:
    """The name of a usable card. Skips where there is none, saying why."""
    try:
        CudaDevice().close()
    except KvStreamError as error:
        pytest.skip(str(error))
    return "cuda"
