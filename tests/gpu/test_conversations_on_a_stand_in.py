"""The conversations of ``test_cuda_conversations.py`` on a card that is not there: all pass, none is skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, ROOT, Driver

LIMIT_S = 3600


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs cc")
def test_conversations_hold_on_a_stand_in(tmp_path: Path) -> None:
    environment = Driver.build(tmp_path).environment(FAKE_CUDA_KERNELS="host", FAKE_CUDA_ARCH="90")
    options = ("-q", "-x", "-p", "tests.gpu.host_images", "-p", "no:cacheprovider", "-p", "no:xdist")
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_cuda_conversations.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^16 passed in", done.stdout, re.MULTILINE), done.stdout[-400:]
