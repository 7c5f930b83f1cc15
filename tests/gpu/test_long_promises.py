"""What proves the promises at full length on a card finds what it should, on the CPU and in seconds."""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.long_promises import Judge, main

SHORT = ("demo-hybrid", "--device", "cpu", "--contexts", "900", "--steps", "6", "--widths", "2,5")


def test_every_arena_and_width_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--arenas", "smallest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].strip() for line in lines][:3] == ["resident", "2 rows a pass", "5 rows a pass"]
    assert len(lines) == 4 and all("  same  7 rows" in line for line in lines)
    assert "0.0 MB" not in lines[-1]


def test_what_begins_late_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--late-steps", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("  same  " in line for line in lines)


def test_a_difference_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge()
    for how, said in (("resident", "a"), ("512 MiB", "a"), ("8 rows", "b")):
        judge.hear("model 4096", how, said, "")
    judge.hear("model 8192", "resident", "b", "")
    assert judge.different == ["model 4096, 8 rows: b in place of a"]
    assert [word for line in capsys.readouterr().out.splitlines() for word in line.split() if word.isupper()] == [
        "DIFFERENT"
    ]
