"""Public Python names carry documentation; modules say what they are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.meta.tree import PACKAGE, component, module_name, relative, sources


def modules() -> list[Path]:
    return sources(PACKAGE, suffixes=(".py",))


@cache
def public_definitions() -> dict[str, bool]:
    """Map each public class and function outside the command line to whether it has a docstring.

    The command line's parts and the build step are called by nobody else. Methods may go without where the
    class's docstring and their own name and types say it all.
    """
    found = {}
    for path in modules():
        module = module_name(path)
        if component(module) in ("cli", "_ffi"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found[f"{module}.{node.name}"] = ast.get_docstring(node) is not None
    return found


def test_every_module_says_what_it_is() -> None:
    found = [path for path in modules() if path.stat().st_size > 0]
    assert len(found) > 30
    assert [relative(path) for path in found if not ast.get_docstring(ast.parse(path.read_text("utf-8")))] == []


@pytest.mark.parametrize("name", public_definitions())
def test_public_class_or_function_is_documented(name: str) -> None:
    assert public_definitions()[name]


def test_every_part_of_a_name_that_the_package_exports_is_documented() -> None:
    """Whoever imports ``pykvstream`` alone finds every method, property and function described."""
    package = import_module(PACKAGE)
    exported = [getattr(package, name) for name in package.__all__]
    assert sum(inspect.isclass(each) for each in exported) > 5
    assert [name for each in exported for name in undocumented(each)] == []


def undocumented(exported: object) -> Iterator[str]:
    if inspect.isroutine(exported) and not inspect.getdoc(exported):
        yield exported.__qualname__
    for name, member in vars(exported).items() if inspect.isclass(exported) else ():
        inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isroutine(inner) and not inspect.getdoc(inner):
            yield f"{exported.__qualname__}.{name}"


def test_names_in_all_exist() -> None:
    names = [name for path in modules() if path.name == "__init__.py" for name in missing_names(path)]
    assert names == []


def missing_names(path: Path) -> Iterator[str]:
    module = import_module(module_name(path))
    for name in getattr(module, "__all__", ()):
        if not hasattr(module, name):
            yield f"{module.__name__}.{name}"
