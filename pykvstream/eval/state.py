"""Finished rows of a measurement on disk, so that a run that was interrupted goes on where it was.

The file is one JSON object: the command, the arguments with a digest of the model and of texts among them, the rows by
cell, and the digest of all that. It is written anew, aside and renamed, with each row.
Holds: ``RunState``, ``text_digest``. Whatever is not the state of just this run is refused by name; nothing is
dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pykvstream.errors import DeviceError, FormatError, InvalidArgument
from pykvstream.runtime.whole_file import replacing

_FORMAT = "pykvstream eval state 1"
_LARGEST_BYTES = 1 << 28
Value = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class _Body:
    command: str
    arguments: dict[str, object]
    rows: dict[str, dict[str, Value]]


def text_digest(text: str) -> str:
    """What stands for a text among arguments."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class RunState:
    """Rows by cell, of one command with one set of arguments. Without a path they are kept in memory alone."""

    def __init__(self, command: str, arguments: Mapping[str, object], path: Path | None = None) -> None:
        """Raises ``FormatError`` for a damaged file, ``InvalidArgument`` for one of another run."""
        self._command = command
        self._arguments: dict[str, object] = json.loads(json.dumps(dict(arguments)))
        self._path = path
        self._rows: dict[str, dict[str, Value]] = {}
        if path is not None:
            self._rows = self._read(path)

    @property
    def n_rows(self) -> int:
        """Rows that are there."""
        return len(self._rows)

    def row(self, cell: str) -> dict[str, Value] | None:
        """The row of a cell, None where it has not been measured."""
        return self._rows.get(cell)

    def add(self, cell: str, row: Mapping[str, Value]) -> None:
        """Keep a row. Raises ``DeviceError`` where the file cannot be written; it is as before then."""
        rows = {**self._rows, cell: dict(row)}
        if self._path is not None:
            self._write(self._path, rows)
        self._rows = rows

    def _write(self, path: Path, rows: Mapping[str, Mapping[str, Value]]) -> None:
        body = {"format": _FORMAT, "command": self._command, "arguments": self._arguments, "rows": rows}
        try:
            with replacing(path) as file:
                file.write((json.dumps({**body, "digest": _digest(body)}) + "\n").encode("utf-8"))
        except OSError as error:
            raise DeviceError(f"state file {str(path)!r}: {error.strerror}") from None

    def _read(self, path: Path) -> dict[str, dict[str, Value]]:
        try:
            with path.open("rb") as file:
                data = file.read(_LARGEST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DeviceError(f"state file {str(path)!r}: {error.strerror}") from None
        body = _parsed(path, data)
        if body.command != self._command:
            raise InvalidArgument(
                f"state file {str(path)!r} is of {body.command!r}, not of {self._command!r}: give another --output"
            )
        theirs = body.arguments
        for name in (*self._arguments, *theirs):
            if self._arguments.get(name) != theirs.get(name):
                raise InvalidArgument(
                    f"state file {str(path)!r} is of a run with another {name}"
                    f" ({theirs.get(name)!r:.60}, now {self._arguments.get(name)!r:.60}): give another --output"
                )
        return body.rows


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("utf-8")).hexdigest()


def _refusal(path: Path, why: str) -> FormatError:
    return FormatError(f"state file {str(path)!r}: {why}; delete it to begin anew, or give another --output")


def _parsed(path: Path, data: bytes) -> _Body:
    """The checked content of a state file."""
    if len(data) > _LARGEST_BYTES:
        raise _refusal(path, f"more than {_LARGEST_BYTES} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise _refusal(path, "damaged, it is no JSON") from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise _refusal(path, "this is no state of a measurement")
    stated = body.pop("digest", None)
    if stated != _digest(body):
        raise _refusal(path, "damaged, its digest is another")
    command, arguments, rows = body.get("command"), body.get("arguments"), body.get("rows")
    if not isinstance(command, str) or not isinstance(arguments, dict) or not isinstance(rows, dict):
        raise _refusal(path, "command, arguments or rows are missing")
    return _Body(command, arguments, rows)
