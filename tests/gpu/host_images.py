"""Kernels compiled for the host as images, for a process beside the library that stands in for the driver's.

Importing it changes what the provider makes, in this process alone. It is a plugin of pytest too: ``-p
tests.gpu.host_images`` runs tests of a card that way.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from pykvstream.kernels import provider
from tests.gpu.kernel_engine import compile_for_host, kernels_of

folder = Path(tempfile.mkdtemp())


def compile_image(core: Any, source: str, key: provider.KernelKey) -> bytes:
    """The path of a library, as the stand-in loads it."""
    library = folder / (hashlib.sha256(str(key).encode()).hexdigest()[:32] + ".so")
    compile_for_host("c++", key.source, kernels_of(key.source), dict(key.macros), library)
    return str(library).encode() + bytes(1)


provider.load_compiler = lambda: None
provider.compile_image = compile_image  # type: ignore[assignment]
provider.default_folder = lambda: folder / "images"
