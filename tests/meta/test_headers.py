"""The public headers are the manual, and the library holds what they promise and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.meta.tree import ROOT, Function, functions, headers, structs, without_comments

# Structs that describe an element of an array or geometry that other structs hold: they never grow.
FIXED = {"kvs_kv_layer", "kvs_delta_layer", "kvs_demand", "kvs_span", "kvs_phase_region", "kvs_event"}
COMMENTS = {each.name: each.comment for each in functions()}
FALLIBLE = [each for each in functions() if each.returns == "kvs_status"]


def names(found: list[Function]) -> list[str]:
    return [f"{each.header}: {each.name}" for each in found]


def test_every_function_has_a_comment() -> None:
    found = functions()
    assert len(found) > 100 and len(FALLIBLE) > 60
    assert names([each for each in found if not each.comment]) == []


@pytest.mark.parametrize("name", COMMENTS)
def test_function_states_its_threads(name: str) -> None:
    assert "thread" in COMMENTS[name]


@pytest.mark.parametrize("name", [each.name for each in FALLIBLE])
def test_function_that_can_fail_states_its_errors(name: str) -> None:
    assert "errors" in COMMENTS[name]


def test_every_constructor_states_who_owns_the_result() -> None:
    made = [each for each in functions() if re.search(r"_(create|create_over|acquire|fork|make)$", each.name)]
    assert len(made) > 10
    assert names([each for each in made if "own:" not in each.comment]) == []


def test_every_function_that_hands_out_an_object_states_who_owns_it() -> None:
    handles = [each for each in functions() if re.search(r"kvs_\w+ \*\*", each.parameters)]
    pointers = [each for each in functions() if "*" in each.returns]
    assert len(handles) > 15 and len(pointers) >= 2
    assert names([each for each in handles + pointers if "own:" not in each.comment]) == []


def test_no_declaration_is_overlooked() -> None:
    """Whatever looks like a function in a header, fenced or not, is among those that the other tests read."""
    words = {
        word
        for path in headers()
        for word in re.findall(r"\b(kvs_\w+)\s*\(", without_comments(path.read_text(encoding="utf-8")))
    }
    assert words == {each.name for each in functions()}


def test_every_callback_type_has_a_comment() -> None:
    found = [
        (path.name, name, comment)
        for path in headers()
        for comment, name in re.findall(
            r"(\*/\n)?typedef [\w *]+\(\*(kvs_\w+)\)\(", path.read_text(encoding="utf-8")
        )
    ]
    assert len(found) > 1
    assert [(header, name) for header, name, comment in found if not comment] == []


def test_every_error_named_in_a_comment_is_a_status() -> None:
    base = (ROOT / "include/kvstream/base.h").read_text(encoding="utf-8")
    known = set(re.findall(r"\bKVS_(E[A-Z]+)\b", base))
    wrong = [
        f"{each.name}: {word}"
        for each in functions()
        for word in re.findall(r"\b(?:KVS_)?(E[A-Z]{3,})\b", each.comment)
        if word not in known
    ]
    assert len(known) == 16
    assert wrong == []


def test_structs_that_callers_fill_begin_with_their_size() -> None:
    found = structs()
    assert len(found) > 20
    wrong = [each.name for each in found if each.first_member != "uint32_t struct_size" and each.name not in FIXED]
    assert wrong == []


def test_umbrella_includes_every_header() -> None:
    umbrella = (ROOT / "include/kvstream.h").read_text(encoding="utf-8")
    assert sorted(re.findall(r'#include "kvstream/(\w+\.h)"', umbrella)) == [path.name for path in headers()]


def test_functions_begin_with_their_noun() -> None:
    assert [each.name for each in functions() if not re.fullmatch(r"kvs(_[a-z0-9]+)+", each.name)] == []


def exported(library: Path) -> set[str]:
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[0].split("@")[0] for line in listing.splitlines()}


def test_shared_library_exports_what_the_headers_declare_and_nothing_else(embed_library: Path) -> None:
    assert exported(embed_library) == {each.name for each in functions()}


def test_extension_exports_its_entry_alone() -> None:
    native = pytest.importorskip("pykvstream._ffi._native")
    assert exported(Path(native.__file__)) == {"PyInit__native"}


def test_extension_offers_every_function_of_the_headers() -> None:
    native = pytest.importorskip("pykvstream._ffi._native")
    assert {each.name for each in functions()} <= set(dir(native.lib))
