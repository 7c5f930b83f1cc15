"""Typed, range-checked reading of metadata keys.

Holds: every function raises ``FormatError`` naming the key for a value that no model can have.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile

LARGEST_SIZE = 2**31 - 1


def size_of(file: GgufFile, key: str, largest: int = LARGEST_SIZE) -> int:
    """A positive size."""
    value = file.get_int(key)
    if not 0 < value <= largest:
        raise FormatError(f"{value} is not between 1 and {largest}", key=key)
    return value


def count_of(file: GgufFile, key: str, largest: int) -> int:
    """A count, 0 where the key is missing."""
    value = file.get_int(key, default=0)
    if not 0 <= value <= largest:
        raise FormatError(f"{value} is not between 0 and {largest}", key=key)
    return value


def positive_of(file: GgufFile, key: str, default: float | None = None) -> float:
    """A positive finite float."""
    value = file.get_float(key) if default is None else file.get_float(key, default=default)
    if not 0.0 < value < float("inf"):
        raise FormatError(f"{value} is not a positive number", key=key)
    return value


def fraction_of(file: GgufFile, key: str) -> float:
    """A float between 0 and 1, without the two."""
    value = positive_of(file, key)
    if value >= 1.0:
        raise FormatError(f"{value} is not between 0 and 1", key=key)
    return value


def per_block(file: GgufFile, key: str, n_blocks: int) -> tuple[int, ...]:
    """A size that is stored once or for each block, as one for each block; zeros are kept."""
    values = tuple(int(value) for value in file.get_ints(key, count=n_blocks))
    if min(values) < 0 or max(values) > LARGEST_SIZE:
        raise FormatError(f"{min(values)} to {max(values)} is out of range", key=key)
    return values


def uniform_of(
    file: GgufFile, key: str, n_blocks: int, blocks: Sequence[int], default: int | None = None
) -> int:
    """A size on which all of ``blocks`` must agree; what the other blocks say does not count."""
    if default is not None and key not in file.metadata:
        return default
    values = per_block(file, key, n_blocks)
    found = sorted({values[i] for i in blocks})
    if len(found) != 1:
        raise Unsupported(f"{key} differs between layers: {found}")
    if found[0] == 0:
        raise FormatError("0 is out of range", key=key)
    return found[0]
