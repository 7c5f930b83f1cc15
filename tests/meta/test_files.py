"""Files are short, finished and the same on every machine."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

from tests.meta.tree import ROOT, relative, sources, without_comments

LONGEST = 500
CODE = (".py", ".c", ".h")
PRODUCT = ("pykvstream", "native", "include", "tools", "examples", "fuzz")
EVERYTHING = (*PRODUCT, "tests", "docs")
TEXT = (*CODE, ".md", ".sh", ".build", ".txt", ".toml")

# Spelled apart, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")
MACHINE = re.compile(
    r"(?<![\w.])/(?:" + "|".join(("ho" + "me", "ro" + "ot", "wo" + "rk", "us" + "ers", "op" + "t")) + r")/\w", re.I
)

FILES = [relative(path) for path in sources(*PRODUCT, "tests", suffixes=CODE)]


def python_code_lines(path: Path) -> int:
    """Lines that hold code: no comments, no docstrings, no blanks."""
    lines: set[int] = set()
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENCODING, tokenize.ENDMARKER}
    starts_statement = True
    for token in tokens:
        if token.type in skipped:
            starts_statement = starts_statement or token.type == tokenize.NEWLINE
            continue
        if not (starts_statement and token.type == tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
        starts_statement = False
    return len(lines)


def code_lines(path: Path) -> int:
    if path.suffix == ".py":
        return python_code_lines(path)
    return sum(bool(line.strip()) for line in without_comments(path.read_text("utf-8")).splitlines())


def test_sources_are_found() -> None:
    assert len(FILES) > 100


@pytest.mark.parametrize("name", FILES)
def test_file_has_at_most_500_lines_of_code(name: str) -> None:
    assert code_lines(ROOT / name) <= LONGEST


def everything() -> list[Path]:
    top = [path for path in ROOT.iterdir() if path.is_file() and (path.suffix in TEXT or path.name == "Makefile")]
    return sources(*EVERYTHING, suffixes=TEXT) + sorted(top)


@pytest.mark.parametrize(("pattern", "what"), [(UNFINISHED, "unfinished work"), (MACHINE, "paths of a machine")])
def test_no_file_mentions(pattern: re.Pattern[str], what: str) -> None:
    found = [
        f"{relative(path)}:{number}: {what}: {line.strip()[:80]}"
        for path in everything()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_files_end_with_one_newline_and_have_no_trailing_blanks() -> None:
    wrong = []
    for path in everything():
        text = path.read_text(encoding="utf-8")
        if text and (not text.endswith("\n") or text.endswith("\n\n") or re.search(r"[ \t]+$", text, re.M)):
            wrong.append(relative(path))
    assert wrong == []


def listed(build_file: str) -> set[str]:
    return set(re.findall(r"'(\w+/[\w/]+\.c)'", (ROOT / build_file).read_text(encoding="utf-8")))


def test_every_native_source_is_built() -> None:
    there = {relative(path).removeprefix("native/") for path in sources("native", suffixes=(".c",))}
    assert listed("native/meson.build") == there


def test_every_kernel_and_what_it_includes_is_in_the_build() -> None:
    there = {path.name for path in (ROOT / "native/kernels").iterdir() if path.suffix in (".cu", ".cuh", ".h")}
    built = set(re.findall(r"'kernels/([\w.]+)'", (ROOT / "native/meson.build").read_text(encoding="utf-8")))
    assert built - {"amalgamate.py"} == there


def test_every_native_test_is_built() -> None:
    built = set(re.findall(r"'(test_\w+)'", (ROOT / "tests/native/meson.build").read_text(encoding="utf-8")))
    assert built == {path.stem for path in (ROOT / "tests/native").glob("test_*.c")}
