"""The list of sabotages fits the tree: ``tools/sabotage.py`` plants them, this only sees that it could."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.meta.tree import ROOT, relative

TOOL = ROOT / "tools" / "sabotage.py"
LIST = ROOT / "tests" / "meta" / "sabotage"
NAMES = sorted(path.stem for path in LIST.iterdir())
EDITED = ("native/", "pykvstream/")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sabotage", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def names_of(path: Path) -> set[str]:
    """Return the tests that a file defines, ``Class::method`` too; what a class takes over from its bases counts."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase":
            found |= {f"{target.id}::runTest" for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_list_is_long_and_spans_the_layers(tool: ModuleType) -> None:
    everything = tool.load_all()
    assert len(everything) >= 25
    folders = {str(Path(sabotage.file).parent) for sabotage in everything}
    assert {"native/core", "native/backends/cpu"} <= folders
    assert {f"pykvstream/{name}" for name in ("core", "gguf", "graph", "runtime", "sampling", "text")} <= folders
    assert len({(sabotage.file, sabotage.old, sabotage.new) for sabotage in everything}) == len(everything)


@pytest.mark.parametrize("name", NAMES)
def test_sabotage_applies_to_this_tree(tool: ModuleType, name: str) -> None:
    sabotage = tool.load(LIST / f"{name}.toml")
    assert sabotage.file.startswith(EDITED) and sabotage.breaks.endswith(".")
    text = (ROOT / sabotage.file).read_text(encoding="utf-8")
    assert sabotage.edited(text) != text


@pytest.mark.parametrize("name", NAMES)
def test_catcher_exists(tool: ModuleType, name: str) -> None:
    sabotage = tool.load(LIST / f"{name}.toml")
    if sabotage.c_test is not None:
        built = (ROOT / "tests" / "native" / "meson.build").read_text(encoding="utf-8")
        assert f"'{sabotage.c_test}'" in built
        return
    file, _, test = sabotage.catcher.partition("::")
    assert file.startswith("tests/") and (ROOT / file).is_file()
    assert not test or re.sub(r"\[.*\]$", "", test) in names_of(ROOT / file)


def test_text_that_does_not_occur_once_is_refused(tool: ModuleType) -> None:
    sabotage = tool.Sabotage("x", "f", "two", "three", "Something.", "native/test_ring")
    assert sabotage.edited("one two") == "one three"
    for text in ("one", "two two"):
        with pytest.raises(tool.SabotageError, match=f"occurs {text.count('two')} times"):
            sabotage.edited(text)


@pytest.mark.parametrize("change", [{"old": 1}, {"more": "x"}, {"ends": "sleeps"}, {"new": "a"}, {"catcher": None}])
def test_bad_files_are_refused(tool: ModuleType, tmp_path: Path, change: dict[str, object]) -> None:
    fields: dict[str, object] = {"file": "f", "old": "a", "new": "b", "breaks": "It.", "catcher": "native/test_ring"}
    fields |= change
    lines = [f"{key} = {value!r}" for key, value in fields.items() if value is not None]
    path = tmp_path / "x.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(tool.SabotageError, match=re.escape("x.toml")):
        tool.load(path)


@pytest.mark.parametrize(
    ("status", "output", "kind", "complaint"),
    [
        (0, "3 passed", "passes", ""),
        (1, "E   assert 1 == 2\n1 failed", "fails", "assert 1 == 2"),
        (2, "E   assert 1 == 2\n!! xdist.dsession.Interrupted: stopping after 1 failures !!", "fails", "assert 1 == 2"),
        (2, "E   NameError: x\n!! Interrupted: 1 error during collection !!", "cannot run (2)", "NameError: x"),
        (4, "ERROR: not found", "cannot run (4)", "ERROR: not found"),
        (-6, "test_ring.c:7: failed: equal", "fails", "equal"),
        (-11, "", "crashes", "signal 11"),
    ],
)
def test_how_a_run_ended_is_told_from_what_it_left(
    tool: ModuleType, status: int, output: str, kind: str, complaint: str
) -> None:
    assert tool.end_of(status, output) == tool.End(kind, complaint)


def test_sample_is_drawn_by_seed_and_unknown_names_are_refused(tool: ModuleType) -> None:
    everything = tool.load_all()
    drawn = tool.choose(everything, [], 6, 1)
    assert len(drawn) == 6 and drawn == tool.choose(everything, [], 6, 1) != tool.choose(everything, [], 6, 2)
    assert tool.choose(everything, [NAMES[3]], 0, 0) == [everything[3]]
    with pytest.raises(tool.SabotageError, match="nobody"):
        tool.choose(everything, ["nobody"], 0, 0)


def test_every_file_of_the_list_is_a_sabotage() -> None:
    assert [relative(path) for path in LIST.iterdir() if path.suffix != ".toml"] == []
