"""What the rules of the tree look at: source files, modules, headers.

Holds: paths are relative to ``ROOT``; only files of the product, never what a build or a tool left behind.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "pykvstream"

_FENCE = re.compile(r"/\* cffi:begin \*/(.*?)/\* cffi:end \*/", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def sources(*folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files below some folders that have one of the suffixes, without caches."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if "__pycache__" not in path.parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module by another, both as dotted names."""

    importer: str
    imported: str
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import in a file, those inside functions and type-checking blocks too."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(name, f"{base}.{alias.name}" if base == PACKAGE else base, node.lineno)


def component(module: str) -> str:
    """Return the part of the package that a module belongs to: ``core`` of ``pykvstream.core.arena``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def without_comments(text: str) -> str:
    return _COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)


@cache
def headers() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "include" / "kvstream").glob("*.h")))


def fenced(path: Path) -> str:
    """Return the region of a public header that cffi reads."""
    (region,) = _FENCE.findall(path.read_text(encoding="utf-8"))
    return str(region)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a header declares, with the comment above it (or above the group it stands in)."""

    header: str
    name: str
    returns: str
    parameters: str
    comment: str


def functions() -> list[Function]:
    return [function for path in headers() for function in _functions_of(path)]


_DECLARATION = re.compile(
    r"^(?P<returns>(?:const\s+)?\w+[\s*]+)(?P<name>kvs_\w+)\((?P<parameters>[^;{}]*)\);", re.MULTILINE
)


def _functions_of(path: Path) -> Iterator[Function]:
    """A comment belongs to all declarations that follow it without an empty line between."""
    for block in re.split(r"\n\s*\n", fenced(path)):
        comments = " ".join(_COMMENT.findall(block)) if block.lstrip().startswith("/*") else ""
        last = ""
        position = 0
        for match in _DECLARATION.finditer(block):
            above = _COMMENT.findall(block[position : match.start()])
            last = above[-1] if above else last
            position = match.end()
            yield Function(
                relative(path),
                match["name"],
                match["returns"].strip(),
                match["parameters"],
                last if comments else "",
            )


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct that a header defines, with the first member's declaration."""

    header: str
    name: str
    first_member: str


_STRUCT = re.compile(r"typedef struct (kvs_\w+) \{\s*([^;]*);", re.MULTILINE)


def structs() -> list[Struct]:
    return [
        Struct(relative(path), name, " ".join(first.split()))
        for path in headers()
        for name, first in _STRUCT.findall(without_comments(fenced(path)))
    ]
