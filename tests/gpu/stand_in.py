"""Processes with a library that stands in for the driver's (``fake_cuda.c``), which the loader finds.

Holds: ``Driver``. ``MODEL`` is code that opens a small random model there, with images that nobody compiles; behind
``HOST_KERNELS`` images are kernels compiled for the host (``host_images.py``), which a process with
``FAKE_CUDA_KERNELS`` runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc")
LIMIT_S = 300

MODEL = """
import tempfile
from pathlib import Path
import numpy as np
from pykvstream.engine import Model
from pykvstream.errors import KvStreamError
from pykvstream.kernels import provider
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests.random_hybrid import HybridShape, write_random_hybrid
provider.load_compiler = lambda: None
provider.compile_image = lambda core, source, key: str(key).encode()
provider.default_folder = lambda: Path(tempfile.mkdtemp())
folder = tempfile.mkdtemp()
path = Path(folder) / "model.gguf"
write_random_hybrid(path, HybridShape(n_layers=4))
"""


HOST_KERNELS = "from tests.gpu.host_images import folder as host_folder\n"


@dataclass(frozen=True, slots=True)
class Driver:
    """A folder with the library."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> Driver:
        source = Path(__file__).with_name("fake_cuda.c")
        command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1"), str(source)]
        subprocess.run(command, check=True)
        return cls(folder)

    def environment(self, **variables: str) -> dict[str, str]:
        """Of a process that finds the library."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CUDA")}
        return others | {"LD_LIBRARY_PATH": str(self.folder)} | variables

    def run(self, code: str, **variables: str) -> str:
        """What a process with this library prints. One that hangs raises ``TimeoutExpired``."""
        command, environment = [sys.executable, "-c", code], self.environment(**variables)
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
