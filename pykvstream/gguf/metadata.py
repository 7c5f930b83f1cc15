"""Metadata of a GGUF file: lazy strings and a typed mapping over them.

Units: offsets are bytes from the start of the file.
Holds: ``LazyStrings``, ``Entry``, ``Metadata``. Nothing here parses; ``parse`` makes the entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from pykvstream.errors import FormatError
from pykvstream.gguf.types import ValueType

MAX_STRING_BYTES: Final = 8 << 20
"""The longest string that is decoded: a Python string may need four bytes for each, and 64 MiB is the
limit.
"""

Bytes: TypeAlias = npt.NDArray[np.uint8]


class LazyStrings(Sequence[str]):
    """The strings of one array, left in the file and decoded on access.

    ``ends[i]`` is the file offset behind string i; ``start`` is the offset of the length field of string 0. A
    string that is not UTF-8 raises ``FormatError`` when it is asked for; ``raw`` gives its bytes all the
    same.
    """

    __slots__ = ("_data", "_ends", "_key", "_start")

    def __init__(self, data: Bytes, start: int, ends: npt.NDArray[np.int64], key: str) -> None:
        self._data = data.data
        self._start = start
        self._ends = ends
        self._key = key

    def __len__(self) -> int:
        return len(self._ends)

    def _span(self, index: int) -> tuple[int, int]:
        n = len(self._ends)
        if not -n <= index < n:
            raise IndexError(f"string {index} of {n} in {self._key!r}")
        index %= n
        begin = self._start if index == 0 else int(self._ends[index - 1])
        return begin + 8, int(self._ends[index])

    def raw(self, index: int) -> bytes:
        """Return the bytes of string ``index`` as the file holds them."""
        begin, end = self._span(index)
        return bytes(self._data[begin:end])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._decode(*self._span(index))

    def __iter__(self) -> Iterator[str]:
        begin = self._start
        # In pieces, so that a long array does not become as many Python integers at once.
        for first in range(0, len(self._ends), 4096):
            for end in self._ends[first : first + 4096].tolist():
                yield self._decode(begin + 8, end)
                begin = end

    def _decode(self, begin: int, end: int) -> str:
        if end - begin > MAX_STRING_BYTES:
            raise FormatError(
                f"string of {end - begin} bytes, at most {MAX_STRING_BYTES}", offset=begin, key=self._key
            )
        try:
            return str(self._data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("string is not UTF-8", offset=begin + error.start, key=self._key) from None

    def __repr__(self) -> str:
        return f"LazyStrings({self._key!r}, n={len(self)})"


Numbers: TypeAlias = npt.NDArray[np.integer] | npt.NDArray[np.floating] | npt.NDArray[np.bool_]
MetaValue: TypeAlias = int | float | bool | str | Numbers | LazyStrings


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's value as parsed. A scalar string is kept as a ``LazyStrings`` of one, to be decoded on
    access.
    """

    kind: ValueType
    element: ValueType | None
    offset: int
    value: int | float | bool | Numbers | LazyStrings

    def describe(self) -> str:
        """Return the type in words, for messages."""
        return self.kind.name if self.element is None else f"array of {self.element.name}"


class Required:
    """The type of ``REQUIRED``, the default that stands for "must be there"."""


REQUIRED: Final = Required()
_D = TypeVar("_D")


class Metadata(Mapping[str, MetaValue]):
    """The metadata of a file by key, with typed access.

    The ``get_*`` functions return the value of ``key``, or ``default`` where the file lacks the key. A
    missing key without a default, and a value of another type whatever the default, raise ``FormatError``
    naming the key.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> MetaValue:
        entry = self._entries[key]
        if entry.kind is ValueType.STRING and isinstance(entry.value, LazyStrings):
            return entry.value[0]
        return entry.value

    def entry(self, key: str) -> Entry:
        """Return how the file holds ``key``: its type, its offset, its value; ``FormatError`` when
        missing.
        """
        if key not in self._entries:
            raise FormatError("required key is missing", key=key)
        return self._entries[key]

    def _find(self, key: str, default: object) -> Entry | None:
        if key not in self._entries and not isinstance(default, Required):
            return None
        return self.entry(key)

    def get_int(self, key: str, default: _D | Required = REQUIRED) -> int | _D:
        """Return an integer of any width; a bool or a float with a whole value is not one."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if isinstance(entry.value, int) and entry.kind.is_integer:
            return entry.value
        raise _wrong_type(key, entry, "an integer")

    def get_float(self, key: str, default: _D | Required = REQUIRED) -> float | _D:
        """Return a float of either width."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if isinstance(entry.value, float):
            return entry.value
        raise _wrong_type(key, entry, "a float")

    def get_bool(self, key: str, default: _D | Required = REQUIRED) -> bool | _D:
        """Return a bool."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if isinstance(entry.value, bool):
            return entry.value
        raise _wrong_type(key, entry, "a bool")

    def get_str(self, key: str, default: _D | Required = REQUIRED) -> str | _D:
        """Return a string."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if entry.kind is ValueType.STRING and isinstance(entry.value, LazyStrings):
            return entry.value[0]
        raise _wrong_type(key, entry, "a string")

    def get_strs(self, key: str, default: _D | Required = REQUIRED) -> LazyStrings | _D:
        """Return an array of strings."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if entry.element is ValueType.STRING and isinstance(entry.value, LazyStrings):
            return entry.value
        raise _wrong_type(key, entry, "an array of strings")

    def get_ints(
        self, key: str, default: _D | Required = REQUIRED, *, count: int | None = None
    ) -> npt.NDArray[np.int64] | _D:
        """Return an array of integers, widened to int64.

        With ``count``, the array must have that many entries, and a scalar stands for ``count`` equal ones:
        several per-block keys come in both forms.
        """
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if entry.element is None and entry.kind.is_integer and count is not None:
            values = np.full(count, entry.value)
        elif entry.element is not None and entry.element.is_integer and isinstance(entry.value, np.ndarray):
            values = entry.value
        else:
            raise _wrong_type(key, entry, "an array of integers")
        if count is not None and len(values) != count:
            raise FormatError(f"array has {len(values)} entries, need {count}", offset=entry.offset, key=key)
        if values.dtype.itemsize == 8 and len(values) and int(values.max()) >= 1 << 63:
            raise FormatError(f"integer {int(values.max())} is out of range", offset=entry.offset, key=key)
        return _read_only(values.astype(np.int64))

    def get_bools(
        self, key: str, default: _D | Required = REQUIRED, *, count: int | None = None
    ) -> npt.NDArray[np.bool_] | _D:
        """Return an array of bools, which with ``count`` must have that many entries."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if entry.element is not ValueType.BOOL or not isinstance(entry.value, np.ndarray):
            raise _wrong_type(key, entry, "an array of bools")
        if count is not None and len(entry.value) != count:
            raise FormatError(f"array has {len(entry.value)} entries, need {count}", offset=entry.offset, key=key)
        return _read_only(entry.value.astype(np.bool_))

    def get_floats(self, key: str, default: _D | Required = REQUIRED) -> npt.NDArray[np.float64] | _D:
        """Return an array of floats, widened to float64."""
        entry = self._find(key, default)
        if entry is None:
            return _given(default)
        if entry.element is not None and entry.element.is_float and isinstance(entry.value, np.ndarray):
            return _read_only(entry.value.astype(np.float64))
        raise _wrong_type(key, entry, "an array of floats")


_A = TypeVar("_A", bound=np.generic)


def _read_only(array: npt.NDArray[_A]) -> npt.NDArray[_A]:
    array.flags.writeable = False
    return array


def _given(default: _D | Required) -> _D:
    # ``_find`` has raised where the default is REQUIRED.
    return cast(_D, default)


def _wrong_type(key: str, entry: Entry, wanted: str) -> FormatError:
    return FormatError(f"value is {entry.describe()}, need {wanted}", offset=entry.offset, key=key)
