"""The examples run as their readers would run them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedding import ROOT, embedding_environment

EXAMPLES = ROOT / "examples"
needs_pkg_config = pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")


def run(command: list[str], prefix: Path) -> str:
    done = subprocess.run(command, env=embedding_environment(prefix), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def compile_with_pkg_config(source: Path, program: Path, prefix: Path, *flags: str) -> None:
    found = shlex.split(run(["pkg-config", "--cflags", "--libs", "kvstream"], prefix))
    run(["cc", *flags, str(source), *found, "-o", str(program)], prefix)


@needs_pkg_config
def test_c_program_attends_to_resident_and_streamed_pages(embed_prefix: Path, tmp_path: Path) -> None:
    program = tmp_path / "embed"
    compile_with_pkg_config(EXAMPLES / "embed.c", program, embed_prefix)
    lines = run([str(program)], embed_prefix).splitlines()
    assert lines[1].endswith(": right")
    assert "KVS_ECLOSED" in lines[2] and "the same bits" in lines[2]
    assert lines[3].endswith("in the wrong order: safe")


@needs_pkg_config
@pytest.mark.parametrize("standard", ["c11", "c99", "gnu17"])
def test_headers_compile_without_warnings(embed_prefix: Path, tmp_path: Path, standard: str) -> None:
    source = tmp_path / "umbrella.c"
    source.write_text("#include <kvstream.h>\nint main(void) { return kvs_abi_version() == 0; }\n")
    flags = (f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    compile_with_pkg_config(source, tmp_path / "umbrella", embed_prefix, *flags)
    run([str(tmp_path / "umbrella")], embed_prefix)


def test_ctypes_program_does_the_same_without_the_package(embed_prefix: Path, embed_library: Path) -> None:
    lines = run([sys.executable, "-I", str(EXAMPLES / "ctypes_embed.py"), str(embed_library)], embed_prefix)
    assert "2 of 5 pages streamed" in lines
    assert "KVS_ECLOSED" in lines


def test_readme_shows_the_quickstart(demo_path: Path) -> None:
    """The README's Python example is the body of the program, with its default argument."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("```python\n")[1].split("```")[0]
    body = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8").split("-> None:\n")[1].split("\n\n\n")[0]
    for line in body.replace("model_path", '"demo"').splitlines():
        assert line.removeprefix("    ") in shown


def test_quickstart_streams_and_answers(demo_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py"), str(demo_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "bytes of history" in done.stdout
    assert int(done.stdout.split(" bytes streamed")[0].split("\n")[-1]) > 0
