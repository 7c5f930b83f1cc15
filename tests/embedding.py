"""Builds and installs libkvstream the way an embedder does, below ``build/``; workers take turns.

Holds: ``install_embedding``, ``embedding_environment``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_BUILD = ROOT / "build" / "embed"
_PREFIX = ROOT / "build" / "prefix"
_SETUP = (f"--prefix={_PREFIX}", "--libdir=lib", "--buildtype=release", "-Dembed=true", "-Dpython=false")


def embedding_environment(prefix: Path) -> dict[str, str]:
    """Return the environment in which compilers, linkers and loaders find the installed library."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    library = prefix / "lib"
    return {
        **os.environ,
        "PATH": tools,
        "PKG_CONFIG_PATH": str(library / "pkgconfig"),
        "LD_LIBRARY_PATH": str(library),
    }


def install_embedding() -> Path:
    """Build what changed and install it; returns the prefix. Skips where there is no C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler named cc")
    environment = embedding_environment(_PREFIX)
    _BUILD.parent.mkdir(exist_ok=True)
    with (_BUILD.parent / "embed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_BUILD / "build.ninja").is_file():
            _run(["meson", "setup", str(_BUILD), str(ROOT), *_SETUP], environment)
        _run(["meson", "install", "-C", str(_BUILD), "--quiet"], environment)
    return _PREFIX


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
