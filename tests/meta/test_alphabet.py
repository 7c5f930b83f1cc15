"""Python and C speak one action alphabet."""

from __future__ import annotations

import re

import pytest

from tests.alphabet import ACTIONS, encode, replay_command, u16
from tests.meta.tree import ROOT

ENTRY = re.compile(r"^ACTION\((\w+), (\d+)\)", re.MULTILINE)


def test_tables_of_both_languages_agree() -> None:
    """Names, opcodes (by order) and operand counts, as the C preprocessor reads them."""
    table = (ROOT / "fuzz" / "alphabet.def").read_text(encoding="utf-8")
    assert table.count("ACTION(") == len(ACTIONS)
    assert [(name, int(n)) for name, n in ENTRY.findall(table)] == list(ACTIONS.items())


def test_actions_are_opcode_and_operands() -> None:
    assert encode("CREATE", 1, 2) == bytes([0, 1, 2, 0, 0])
    assert encode("APPEND", 3, *u16(0x0201)) == bytes([13, 3, 1, 2])
    with pytest.raises(ValueError, match="ABORT has 0 operands"):
        encode("ABORT", 1)


def test_scripts_print_the_command_that_replays_them() -> None:
    assert replay_command("arena", encode("COMMIT", 255)) == "build/native/fuzz/regress arena --hex 03ff0000"


def test_every_world_has_a_corpus_with_names() -> None:
    for target in re.findall(r'\{"(\w+)", script_', (ROOT / "fuzz" / "regress.c").read_text(encoding="utf-8")):
        files = [path.name for path in (ROOT / "fuzz" / "corpus" / target).iterdir()]
        assert len(files) >= 20, target
        assert [name for name in files if not re.fullmatch(r"[a-z0-9_]{8,}", name)] == []
