"""Imports and includes run strictly downward."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.meta.tree import PACKAGE, ROOT, Import, component, imports_of, relative, sources, without_comments

PYTHON_LAYERS = ("_ffi", "core", "kernels", "graph", "models", "runtime", "engine", "eval", "report", "cli")
BESIDE = ("gguf", "text", "sampling", "speculation", "locate")
LOWEST_ABOVE_BESIDE = PYTHON_LAYERS.index("graph")
THIRD_PARTY = {
    "numpy": {"core", "gguf", "graph", "models", "runtime", "sampling", "speculation", "text", "engine", "eval", "cli"},
    "cffi": {"_ffi"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "rich": {"cli", "report"},
    "matplotlib": {"eval"},
    "cuda": {"kernels"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def package_imports() -> list[Import]:
    return [each for path in sources(PACKAGE, suffixes=(".py",)) for each in imports_of(path)]


def describe(found: list[Import]) -> list[str]:
    return [f"{each.importer}:{each.line} imports {each.imported}" for each in found]


def is_allowed(importer: str, imported: str) -> bool:
    """Whether one part of the package may import another."""
    if importer == imported or imported == "errors" or importer in ("", "__main__"):
        return True
    if importer == "sampling" and imported == "core":
        return True  # for the numbers that decide, which are the library's
    if importer == "errors" or importer in BESIDE:
        return False
    rank = PYTHON_LAYERS.index(importer)
    if imported in BESIDE:
        return rank >= LOWEST_ABOVE_BESIDE
    return PYTHON_LAYERS.index(imported) < rank


def test_python_imports_run_strictly_downward() -> None:
    inside = [each for each in package_imports() if each.imported.split(".")[0] == PACKAGE]
    assert len(inside) > 50
    wrong = [each for each in inside if not is_allowed(component(each.importer), component(each.imported))]
    assert describe(wrong) == []


def test_native_module_is_imported_by_core_alone() -> None:
    users = {
        component(each.importer) for each in package_imports() if component(each.imported) == "_ffi"
    } - {"_ffi"}
    assert users == {"core"}


def test_third_party_packages_are_imported_where_they_belong() -> None:
    wrong = [
        each
        for each in package_imports()
        if component(each.importer) not in THIRD_PARTY.get(each.imported.split(".")[0], {component(each.importer)})
    ]
    assert describe(wrong) == []


def test_no_package_is_imported_that_is_not_a_dependency() -> None:
    import sys

    known = {*sys.stdlib_module_names, PACKAGE, *THIRD_PARTY}
    wrong = [each for each in package_imports() if each.imported.split(".")[0] not in known]
    assert describe(wrong) == []


def includes() -> list[tuple[str, str]]:
    """Pairs of a file and what it includes, as paths below ``native/`` or ``include/``."""
    pairs = []
    for path in sources("include", "native", suffixes=(".c", ".h")):
        name = relative(path).split("/", 1)[1]
        pairs += [(name, included) for included in INCLUDE.findall(path.read_text(encoding="utf-8"))]
    return pairs


def test_every_include_names_a_file_from_its_root() -> None:
    roots = (ROOT / "include", ROOT / "native")
    missing = [pair for pair in includes() if not any((root / pair[1]).is_file() for root in roots)]
    assert missing == []


def test_public_headers_include_public_headers_alone() -> None:
    wrong = [pair for pair in includes() if pair[0].startswith("kvstream") and not pair[1].startswith("kvstream")]
    assert wrong == []


def test_base_includes_base_and_public_headers_alone() -> None:
    base = [pair for pair in includes() if pair[0].startswith("base/")]
    assert len(base) > 3
    assert [pair for pair in base if not pair[1].startswith(("base/", "kvstream/", "kernels/grids.h"))] == []


def test_every_internal_function_is_used() -> None:
    """What a header of ``native/`` declares somebody calls: a name stands in its header, its definition and one use."""
    texts = {path: without_comments(path.read_text("utf-8")) for path in sources("native", suffixes=(".c", ".h"))}
    declaration = re.compile(r"^(?:[\w*]+\s+)+\**(kvs_\w+)\([^;{}]*\);", re.MULTILINE)
    names = {name for path, text in texts.items() if path.suffix == ".h" for name in declaration.findall(text)}
    words = Counter(word for text in texts.values() for word in re.findall(r"\bkvs_\w+", text))
    assert len(names) > 150
    assert sorted(name for name in names if words[name] < 3) == []


def test_core_reaches_backends_only_where_a_device_is_made() -> None:
    core = [pair for pair in includes() if pair[0].startswith("core/") and pair[1].startswith("backends/")]
    assert core == [("core/device.c", f"backends/{each}/backend.h") for each in ("cpu", "cuda", "trace")]


@pytest.mark.parametrize("name", sorted({p[0] for p in includes() if p[0].startswith("backends/")}))
def test_backend_includes_the_ops_table_and_its_own_folder_alone(name: str) -> None:
    own = "/".join(name.split("/")[:2]) + "/"
    seen = [included for includer, included in includes() if includer == name]
    outside = {each for each in seen if not each.startswith((own, "base/", "kvstream/", "kernels/"))}
    shared = {each for each in outside if own == "backends/cuda/" and each.startswith("kernels/")}
    assert outside - shared <= {"core/backend.h", "core/footprint.h", "core/step.h"}
