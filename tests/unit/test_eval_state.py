"""Rows outlive an interrupt; a state file that is damaged or of another run is refused by name."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pykvstream.errors import DeviceError, FormatError, InvalidArgument
from pykvstream.eval.measure import Cell, Column, OnTokens, Row, run_measure
from pykvstream.eval.state import RunState
from pykvstream.eval.table import make_folder, write_csv, write_json

ARGUMENTS = {"model": "abc", "ctx": 512}


class Squares:
    """A measurement that counts what it is asked, and can be interrupted."""

    name = "squares"
    arguments = ARGUMENTS
    columns: Sequence[Column] = ()

    def __init__(self, n_cells: int, stop_at: int | None = None) -> None:
        self.cells = [Cell(f"cell {i}", 10) for i in range(n_cells)]
        self.asked: list[int] = []
        self._stop_at = stop_at

    def measure(self, cell: Cell, on_tokens: OnTokens) -> Row:
        number = self.cells.index(cell)
        if number == self._stop_at:
            raise KeyboardInterrupt
        self.asked.append(number)
        on_tokens(cell.n_tokens)
        return {"number": number, "square": number * number / 3}

    def summary(self, rows: Sequence[Row]) -> Row:
        return {"rows": len(rows), "broken": 0}


def run(measure: Squares, path: Path) -> tuple[list[Row], int]:
    """Rows, and tokens that progress has seen."""
    seen: list[int] = []
    rows = run_measure(measure, RunState("squares", ARGUMENTS, path), seen.append)
    return rows, sum(seen)


def test_an_interrupted_run_goes_on_with_the_rows_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "squares.state.json"
    whole, _ = run(Squares(5), tmp_path / "other.state.json")
    with pytest.raises(KeyboardInterrupt):
        run(Squares(5, stop_at=3), path)
    second = Squares(5)
    rows, seen = run(second, path)
    assert second.asked == [3, 4]
    assert rows == whole and seen == 50


def test_a_finished_run_measures_nothing_again(tmp_path: Path) -> None:
    path = tmp_path / "squares.state.json"
    first, _ = run(Squares(3), path)
    again = Squares(3)
    assert run(again, path)[0] == first and again.asked == []


def written(tmp_path: Path) -> Path:
    path = tmp_path / "squares.state.json"
    run(Squares(2), path)
    return path


def test_any_flipped_byte_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for at in range(0, len(data) - 1, 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises((FormatError, InvalidArgument), match=r"squares\.state\.json"):
            RunState("squares", ARGUMENTS, path)


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'])
def test_what_is_no_state_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "squares.state.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="state file"):
        RunState("squares", ARGUMENTS, path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match="damaged"):
        RunState("squares", ARGUMENTS, path)


def test_the_state_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(InvalidArgument, match=r"another ctx \(512, now 1024\)"):
        RunState("squares", {**ARGUMENTS, "ctx": 1024}, path)
    with pytest.raises(InvalidArgument, match="'squares', not of 'ppl'"):
        RunState("ppl", ARGUMENTS, path)
    assert RunState("squares", ARGUMENTS, path).n_rows == 2


def test_a_state_that_cannot_be_written_is_as_before(tmp_path: Path) -> None:
    state = RunState("squares", ARGUMENTS, tmp_path / "gone" / "squares.state.json")
    with pytest.raises(DeviceError, match="state file"):
        state.add("cell 0", {"number": 0})
    assert state.row("cell 0") is None


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    state = RunState("squares", ARGUMENTS)
    state.add("cell 0", {"number": 0})
    assert state.row("cell 0") == {"number": 0} and list(tmp_path.iterdir()) == []


def test_csv_and_json_hold_numbers_in_full(tmp_path: Path) -> None:
    rows: list[Row] = [{"name": "a, b", "value": 0.1 + 0.2, "none": None}, {"name": "c\nd", "value": 1, "none": None}]
    write_csv(tmp_path / "t.csv", rows)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["name"] for row in found] == ["a, b", "c\nd"]
    assert [float(row["value"]) for row in found] == [0.1 + 0.2, 1.0]
    write_json(tmp_path / "t.json", {"rows": rows})
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8")) == {"rows": rows}


def test_results_go_where_they_can(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file"):
        make_folder(tmp_path / "file")
    with pytest.raises(DeviceError, match="table"):
        write_csv(tmp_path / "no" / "t.csv", [{"a": 1}])
    with pytest.raises(DeviceError, match="result"):
        write_json(tmp_path / "no" / "t.json", {})
    with pytest.raises(InvalidArgument, match="no rows"):
        write_csv(tmp_path / "t.csv", [])


def test_a_column_shows_values_as_people_read_them() -> None:
    column = Column("value", "title", ",.2f")
    assert [column.text({"value": value}) for value in (1234.567, None, "as it is", True)] == [
        "1,234.57", "-", "as it is", "True"
    ]  # fmt: skip
