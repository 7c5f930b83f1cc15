"""Rows as files: CSV for spreadsheets, JSON for programs.

Holds: ``write_csv``, ``write_json``. Numbers are written in full: what is read back is what was measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pykvstream.errors import DeviceError, InvalidArgument
from pykvstream.eval.measure import Row


def make_folder(path: Path) -> None:
    """Make the folder that results go to. Raises ``DeviceError``, ``InvalidArgument`` where a file is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidArgument(f"output {str(path)!r} is a file, need a folder") from None
    except OSError as error:
        raise DeviceError(f"output {str(path)!r}: {error.strerror}") from None


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line for each row, under the names of the fields in the order of the first row."""
    if not rows:
        raise InvalidArgument("no rows to write")
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise DeviceError(f"table {str(path)!r}: {error.strerror}") from None


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """One object, indented."""
    try:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"result {str(path)!r}: {error.strerror}") from None
