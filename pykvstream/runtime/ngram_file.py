"""Files of the counts of ``ngram-cache``.

Holds: ``load_ngram_counts``, ``save_ngram_counts``, ``check_ngram_file``.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pykvstream.errors import DeviceError, HostMemoryError, InvalidArgument, NotFound
from pykvstream.runtime.whole_file import check_replaceable, path_of, replacing
from pykvstream.speculation import NgramCounts

MOST_BYTES = 1 << 30
"""Of a file; its counts take several times as much memory."""


def _path_of(path: object) -> Path:
    return path_of("n-gram counts lie", path)


def load_ngram_counts(path: str | os.PathLike[str]) -> NgramCounts:
    """Read a file.

    Raises ``NotFound``, ``DeviceError``, ``InvalidArgument`` for what is no file or above ``MOST_BYTES``,
    ``HostMemoryError``, or ``FormatError`` naming the offset of what is wrong.
    """
    where = _path_of(path)
    name = f"n-gram counts {str(where)!r}"
    try:
        status = where.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{name}: no regular file")
        if status.st_size > MOST_BYTES:
            raise InvalidArgument(f"{name}: {status.st_size} bytes, at most {MOST_BYTES}")
        return NgramCounts.from_bytes(where.read_bytes(), name)
    except FileNotFoundError:
        raise NotFound(f"{name}: no such file") from None
    except OSError as error:
        raise DeviceError(f"{name}: {error.strerror}") from None
    except MemoryError:
        raise HostMemoryError(f"{name}: no memory for the counts of {status.st_size} bytes") from None


def check_ngram_file(path: str | os.PathLike[str]) -> None:
    """Whether ``save_ngram_counts`` could write there. Raises ``DeviceError``, ``InvalidArgument``."""
    where = _path_of(path)
    name = f"n-gram counts {str(where)!r}"
    try:
        check_replaceable(where)
    except InvalidArgument:
        raise InvalidArgument(f"{name}: no regular file") from None
    except OSError as error:
        raise DeviceError(f"{name}: cannot be written: {error.strerror}") from None


def save_ngram_counts(path: str | os.PathLike[str], counts: NgramCounts) -> None:
    """Write a file whole or not at all.

    Raises ``DeviceError``, or ``InvalidArgument`` for what are no counts; what stood there is as it was then.
    """
    where = _path_of(path)
    if not isinstance(counts, NgramCounts):
        raise InvalidArgument(f"counts must be NgramCounts, got {type(counts).__name__}")
    try:
        with replacing(where) as file:
            file.write(counts.to_bytes())
    except OSError as error:
        raise DeviceError(f"n-gram counts {str(where)!r}: {error.strerror}") from None
