"""Files of the counts of ``ngram-cache``.

Holds: ``load_ngram_counts``, ``save_ngram_counts``.
"""

from __future__ import annotations

import os
from pathlib import Path

from pykvstream.errors import DeviceError, InvalidArgument, NotFound
from pykvstream.runtime.whole_file import replacing
from pykvstream.speculation import NgramCounts


def _path_of(path: object) -> Path:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgument(f"n-gram counts lie under a path, got {path!r}")
    return Path(name)


def load_ngram_counts(path: str | os.PathLike[str]) -> NgramCounts:
    """Read a file. Raises ``NotFound``, ``DeviceError``, or ``FormatError`` naming the offset of what is wrong."""
    where = _path_of(path)
    name = f"n-gram counts {str(where)!r}"
    try:
        data = where.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{name}: no such file") from None
    except OSError as error:
        raise DeviceError(f"{name}: {error.strerror}") from None
    return NgramCounts.from_bytes(data, name)


def save_ngram_counts(path: str | os.PathLike[str], counts: NgramCounts) -> None:
    """Write a file whole or not at all. Raises ``DeviceError``; what stood there is as it was then."""
    where = _path_of(path)
    try:
        with replacing(where) as file:
            file.write(counts.to_bytes())
    except OSError as error:
        raise DeviceError(f"n-gram counts {str(where)!r}: {error.strerror}") from None
