"""The environment is read in ``cli`` alone; importing has no effects."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.tree import PACKAGE, component, module_name, relative, sources, without_comments

COMPILER_OBJECTS = {"completed.0", "__dso_handle", "__TMC_END__"}
THREAD_COUNTER = "newest.0"  # numbers the process's threads: nothing else about a process is shared by devices
_READERS = {"environ", "environb", "getenv", "getenvb"}


def environment_reads(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in _READERS
        is_imported = isinstance(node, ast.ImportFrom) and any(alias.name in _READERS for alias in node.names)
        if is_attribute or is_imported:
            found.append(f"{relative(path)}:{node.lineno}")
    return found


def test_python_reads_the_environment_in_cli_alone() -> None:
    outside = [path for path in sources(PACKAGE, suffixes=(".py",)) if component(module_name(path)) != "cli"]
    assert len(outside) > 30
    assert [place for path in outside for place in environment_reads(path)] == []


def test_native_code_never_reads_the_environment() -> None:
    word = re.compile(r"\b(secure_getenv|getenv|environ)\b")
    files = sources("native", "include", suffixes=(".c", ".h"))
    assert [relative(p) for p in files if word.search(without_comments(p.read_text("utf-8")))] == []


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_native_code_has_no_mutable_globals(embed_library: Path) -> None:
    """Everything hangs off a device: no object of the library lies in writable data."""
    listing = subprocess.run(["objdump", "-t", str(embed_library)], check=True, capture_output=True, text=True).stdout
    symbols = [line.split() for line in listing.splitlines() if " O " in line]
    assert len(symbols) > 5
    writable = {fields[-1] for fields in symbols if {".bss", ".data", ".tbss", ".tdata"} & set(fields)}
    assert writable - COMPILER_OBJECTS == {THREAD_COUNTER}


@pytest.mark.parametrize("module", ["pykvstream", "pykvstream.engine"])
def test_importing_prints_nothing_and_starts_no_thread(module: str) -> None:
    code = f"import threading, {module}; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
