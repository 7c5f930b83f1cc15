"""Pictures are PNG files, or refused with what to install."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pykvstream.errors import DeviceError, InvalidArgument, Unsupported
from pykvstream.eval.measure import Row
from pykvstream.eval.plots import plot, require_matplotlib

PPL: list[Row] = [{"tokens": 10, "nll": 20.0 + i, "nll_squared": 50.0 + i} for i in range(3)]
KLD: list[Row] = [
    {"reference": "resident", "ctx": 1024, "resident_percent": share, "streamed_bytes": 10**5, "max": 0.0}
    for share in (100.0, 50.0)
] + [
    {"reference": "f32", "ctx": 1024, "cache": cache, "rotation": rotation, "mean": 1e-3}
    for cache, rotation in (("q8_0/q8_0", "off"), ("q8_0/q8_0", "on"), ("f16/f16", "none"))
]
NEEDLE: list[Row] = [
    {"ctx": 4096, "depth": depth, "is_right": depth > 0, "resident_percent": 25.0} for depth in range(3)
]
ROWS = {"ppl": PPL, "kld": KLD, "needle": NEEDLE}


def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"matplotlib.*pip install .pykvstream\[eval\]"):
        require_matplotlib()


@pytest.mark.parametrize("command", ROWS)
def test_rows_become_the_same_picture_each_time(tmp_path: Path, command: str) -> None:
    pytest.importorskip("matplotlib")
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    plot(one, command, ROWS[command])
    plot(two, command, ROWS[command])
    assert one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and len(one.read_bytes()) > 2000
    assert one.read_bytes() == two.read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgument, match="bleu"):
        plot(tmp_path / "x.png", "bleu", PPL)
    with pytest.raises(DeviceError, match="picture"):
        plot(tmp_path / "no" / "x.png", "ppl", PPL)
