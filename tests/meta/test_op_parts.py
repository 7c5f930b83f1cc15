"""No operation without its parts: a name, a check, a plain reference, the vectorised twins that it claims, declared
bytes, and a case in float64. The list of operations is the enumeration in the header.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.tape import OpCode
from tests.meta.tree import ROOT, without_comments
from tests.oracle.op_cases import CASES

CPU = ROOT / "native/backends/cpu"
TWINS = {path.stem for path in CPU.glob("*_avx*.c")}


def declared() -> dict[str, int]:
    """The operations of the header, by name and number."""
    text = without_comments((ROOT / "include/kvstream/tape.h").read_text(encoding="utf-8"))
    (body,) = re.findall(r"typedef enum kvs_op_code \{(.*?)\} kvs_op_code;", text, re.DOTALL)
    return {name: int(number) for name, number in re.findall(r"KVS_OP_(\w+) = (\d+)", body)}


def entries(path: str, table: str) -> str:
    """The initializer of a table."""
    text = (ROOT / path).read_text(encoding="utf-8")
    (body,) = re.findall(re.escape(table) + r"\[?[^=]*= \{(.*?)\};", text, re.DOTALL)
    return str(body)


def test_operations_are_numbered_without_gaps() -> None:
    assert sorted(declared().values()) == list(range(len(declared())))
    assert len(declared()) > 10


def test_python_has_every_operation() -> None:
    assert {code.name: int(code) for code in OpCode} == declared()


def test_every_operation_has_its_name() -> None:
    names = re.findall(r'"(\w+)"', entries("native/core/tape_check.c", "*const OP_NAMES"))
    assert names == [name.lower() for name in sorted(declared(), key=declared().__getitem__)]


def test_every_operation_has_a_check() -> None:
    table = entries("native/core/tape_check.c", "(*const CHECKS[])(const struct checker *)")
    checks = re.findall(r"check_(\w+)", table)
    assert checks == [name.lower() for name in sorted(declared(), key=declared().__getitem__)]


def test_every_operation_runs_on_the_cpu() -> None:
    """Attention is not run by one call: the core cuts it into waves."""
    table = entries("native/backends/cpu/ops.c", "(*const RUN[])(const struct call *)")
    assert set(re.findall(r"\[KVS_OP_(\w+)\]", table)) == set(declared()) - {"ATTEND"}
    ops = (CPU / "ops.c").read_text(encoding="utf-8")
    assert all(f"kvs_cpu_attend_{part}(" in ops for part in ("begin", "wave", "finish"))


def test_every_operation_has_a_case() -> None:
    assert {case.code.name for case in CASES} == set(declared())
    assert all(case.footprint_bytes > 0 for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_vectorised_file_is_claimed_and_every_claim_is_kept() -> None:
    claimed = {twin for case in CASES for twin in case.twins}
    assert len(TWINS) > 5
    assert claimed == TWINS


@pytest.mark.parametrize("twin", sorted(TWINS))
def test_every_vectorised_file_has_a_plain_reference(twin: str) -> None:
    """Either ``x_reference.c``, or functions named so in ``x.c``."""
    base = re.sub(r"_avx\w+$", "", twin)
    whole = CPU / f"{base}_reference.c"
    assert whole.is_file() or "_reference(" in (CPU / f"{base}.c").read_text(encoding="utf-8")
