"""The parser of one GGUF file image: header, metadata, tensor table, all bounds checked.

Order: a declared count or length is compared with the bytes that remain before anything is allocated for it.
Units: offsets are bytes from the start of the file.
Source: spec/model.md 6.1.
Holds: ``parse_image``, the limits it enforces, and their ``Usage``. It reads bytes only; files and shards are
the matter of ``reader``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pykvstream.errors import FormatError
from pykvstream.gguf.metadata import Bytes, Entry, LazyStrings, Metadata, Numbers
from pykvstream.gguf.types import TYPES_BY_ID, GgmlType, ValueType

MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32

# Each limit is several times what the largest public files need. Together they bound what a hostile file can
# make the parser allocate to less than 64 MiB, whatever its size.
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 15
MAX_STRINGS: Final = 1 << 21
MAX_KEY_BYTES: Final = 65535
MAX_NAMES_BYTES: Final = 4 << 20

_SHOWN: Final = 80  # characters of a broken name that an error repeats
_MIN_KEY_BYTES: Final = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 8 + 4 + 8
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_U64: Final = struct.Struct("<Q")
_I64: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is in ne order (ne0, the row length, first); ``offset`` is from file
    start.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int
    shard: int

    @property
    def n_values(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Image:
    """What one file declares."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]


@dataclass(slots=True)
class Usage:
    """What has been taken of the limits so far; the shards of one set share it."""

    keys: int = 0
    tensors: int = 0
    strings: int = 0
    names_bytes: int = 0


class _Cursor:
    """A reading position that refuses to leave the file."""

    __slots__ = ("data", "end", "pos", "usage")

    def __init__(self, data: Bytes, usage: Usage) -> None:
        self.data = data
        self.end = len(data)
        self.pos = 0
        self.usage = usage

    def need(self, n_bytes: int, what: str, key: str | None = None) -> None:
        """Refuse unless ``n_bytes`` more bytes are there."""
        have = self.end - self.pos
        if n_bytes > have:
            raise FormatError(
                f"truncated: {what} needs {n_bytes} bytes, have {have}", offset=self.pos, key=key
            )

    def take(self, layout: struct.Struct, what: str, key: str | None = None) -> int:
        """Read one integer."""
        self.need(layout.size, what, key)
        (value,) = layout.unpack_from(self.data.data, self.pos)
        self.pos += layout.size
        return int(value)

    def name(self, what: str) -> str:
        """Read a key or a tensor name: bounded, not empty, UTF-8, no NUL."""
        at = self.pos
        length = self.take(_U64, f"length of a {what}")
        if not 1 <= length <= MAX_KEY_BYTES:
            raise FormatError(f"{what} of {length} bytes, need 1 to {MAX_KEY_BYTES}", offset=at)
        self.need(length, what)
        self.usage.names_bytes += length
        if self.usage.names_bytes > MAX_NAMES_BYTES:
            raise FormatError(f"keys and names need more than {MAX_NAMES_BYTES} bytes", offset=at)
        raw = self.data[self.pos : self.pos + length].tobytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{what} is not UTF-8", offset=self.pos + error.start) from None
        if "\0" in text:
            raise FormatError(f"{what} holds a NUL", offset=self.pos, key=text[:_SHOWN])
        self.pos += length
        return text


def parse_image(data: Bytes, shard: int, usage: Usage) -> Image:
    """Parse and check the whole header of a file image, adding to ``usage``; tensor data is not read."""
    cursor = _Cursor(data, usage)
    version = _header(cursor)
    n_tensors = _count(cursor, "tensors", MAX_TENSORS - usage.tensors, _MIN_TENSOR_BYTES)
    n_keys = _count(cursor, "keys", MAX_KEYS - usage.keys, _MIN_KEY_BYTES)
    usage.tensors += n_tensors
    usage.keys += n_keys
    entries: dict[str, Entry] = {}
    for _ in range(n_keys):
        at = cursor.pos
        key = cursor.name("key")
        if key in entries:
            raise FormatError("duplicate key", offset=at, key=key)
        entries[key] = _entry(cursor, key)
    alignment = _alignment(entries)
    declared = _tensor_table(cursor, n_tensors)
    tensors = _place(declared, cursor, alignment, shard)
    return Image(version, alignment, Metadata(entries), tensors)


def _header(cursor: _Cursor) -> int:
    magic = cursor.data[:4].tobytes()
    if magic != MAGIC:
        raise FormatError(f"not a GGUF file: starts with {magic!r}, need {MAGIC!r}", offset=0)
    cursor.pos = 4
    version = cursor.take(_U32, "version")
    if version and version & 0xFFFF == 0:
        raise FormatError("big-endian GGUF file; only little-endian files are read", offset=4)
    if version not in (2, 3):
        raise FormatError(f"GGUF version {version}, need 2 or 3", offset=4)
    return version


def _count(cursor: _Cursor, what: str, limit: int, item_bytes: int) -> int:
    at = cursor.pos
    count = cursor.take(_U64, f"number of {what}")
    if count > limit:
        raise FormatError(f"file declares {count} {what}, at most {limit}", offset=at)
    cursor.need(count * item_bytes, f"table of {count} {what}")
    return count


def _value_type(cursor: _Cursor, what: str, key: str) -> ValueType:
    at = cursor.pos
    number = cursor.take(_U32, what, key)
    if number > max(ValueType):
        raise FormatError(f"unknown {what} {number}", offset=at, key=key)
    return ValueType(number)


def _entry(cursor: _Cursor, key: str) -> Entry:
    kind = _value_type(cursor, "value type", key)
    at = cursor.pos
    if kind is ValueType.ARRAY:
        element = _value_type(cursor, "array element type", key)
        if element is ValueType.ARRAY:
            raise FormatError("array of arrays", offset=at, key=key)
        count = cursor.take(_U64, "array length", key)
        if element is ValueType.STRING:
            return Entry(kind, element, at, _strings(cursor, count, key))
        return Entry(kind, element, at, _numbers(cursor, element, count, key))
    if kind is ValueType.STRING:
        return Entry(kind, None, at, _strings(cursor, 1, key))
    return Entry(kind, None, at, _numbers(cursor, kind, 1, key)[0].item())


def _numbers(cursor: _Cursor, kind: ValueType, count: int, key: str) -> Numbers:
    dtype = np.dtype(kind.dtype)
    cursor.need(count * dtype.itemsize, f"{count} values of {kind.name}", key)
    raw = cursor.data[cursor.pos : cursor.pos + count * dtype.itemsize]
    if kind is ValueType.BOOL and count and int(raw.max()) > 1:
        bad = int(np.argmax(raw))
        raise FormatError(f"bool is {raw[bad]}, need 0 or 1", offset=cursor.pos + bad, key=key)
    cursor.pos += raw.nbytes
    return raw.view(dtype)


def _strings(cursor: _Cursor, count: int, key: str) -> LazyStrings:
    cursor.need(count * 8, f"{count} strings", key)
    cursor.usage.strings += count
    if cursor.usage.strings > MAX_STRINGS:
        raise FormatError(f"more than {MAX_STRINGS} strings", offset=cursor.pos, key=key)
    start = cursor.pos
    ends = np.fromiter(_string_ends(cursor, count, key), np.int64, count)
    if count:
        cursor.pos = int(ends[-1])
    return LazyStrings(cursor.data, start, ends, key)


def _string_ends(cursor: _Cursor, count: int, key: str) -> Iterator[int]:
    # The one pass over a vocabulary: nothing but a length read and a comparison for each string.
    unpack, data, end, pos = _U64.unpack_from, cursor.data.data, cursor.end, cursor.pos
    for index in range(count):
        if pos + 8 > end:
            raise FormatError(f"truncated in string {index} of {count}", offset=pos, key=key)
        (length,) = unpack(data, pos)
        stop = pos + 8 + length
        if stop > end:
            raise FormatError(
                f"string {index} of {count} needs {length} bytes, have {end - pos - 8}", offset=pos, key=key
            )
        pos = stop
        yield pos


def _alignment(entries: dict[str, Entry]) -> int:
    key = "general.alignment"
    entry = entries.get(key)
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if entry.kind is not ValueType.UINT32 or not isinstance(value, int):
        raise FormatError(f"value is {entry.describe()}, need UINT32", offset=entry.offset, key=key)
    # Below 8 the data of an F32 tensor could lie on an odd address, which no kernel can read.
    if value < 8 or value & (value - 1):
        raise FormatError(f"alignment {value}, need a power of two, at least 8", offset=entry.offset, key=key)
    return value


@dataclass(frozen=True, slots=True)
class _Declared:
    """A tensor table row: ``at`` is where it stands, ``relative`` its offset in the data section."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    relative: int
    nbytes: int
    at: int


def _tensor_table(cursor: _Cursor, n_tensors: int) -> dict[str, _Declared]:
    table: dict[str, _Declared] = {}
    for _ in range(n_tensors):
        at = cursor.pos
        name = cursor.name("tensor name")
        if name in table:
            raise FormatError("duplicate tensor", offset=at, key=name)
        shape = _shape(cursor, name)
        type_at = cursor.pos
        type_id = cursor.take(_I32, "tensor type", name)
        kind = TYPES_BY_ID.get(type_id)
        if kind is None:
            raise FormatError(f"unknown tensor type {type_id}", offset=type_at, key=name)
        if shape[0] % kind.block_values:
            raise FormatError(
                f"rows of {shape[0]} values are not whole {kind.name} blocks of {kind.block_values}",
                offset=at,
                key=name,
            )
        relative = cursor.take(_U64, "tensor offset", name)
        nbytes = kind.row_bytes(shape[0]) * math.prod(shape[1:])
        table[name] = _Declared(name, shape, kind, relative, nbytes, at)
    return table


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    at = cursor.pos
    n_dims = cursor.take(_U32, "number of dimensions", name)
    if not 1 <= n_dims <= 4:
        raise FormatError(f"tensor has {n_dims} dimensions, need 1 to 4", offset=at, key=name)
    shape = []
    for axis in range(n_dims):
        at = cursor.pos
        extent = cursor.take(_I64, f"dimension {axis}", name)
        if extent <= 0:
            raise FormatError(f"dimension {axis} is {extent}, need at least 1", offset=at, key=name)
        shape.append(extent)
    return tuple(shape)


def _place(table: dict[str, _Declared], cursor: _Cursor, alignment: int, shard: int) -> dict[str, TensorInfo]:
    base = -(-cursor.pos // alignment) * alignment
    for row in table.values():
        if row.relative % alignment:
            raise FormatError(
                f"tensor offset {row.relative} is no multiple of the alignment {alignment}",
                offset=row.at,
                key=row.name,
            )
        if base + row.relative + row.nbytes > cursor.end:
            raise FormatError(
                f"tensor of {row.nbytes} bytes at {base + row.relative} leaves the file of {cursor.end}",
                offset=row.at,
                key=row.name,
            )
    previous: _Declared | None = None
    for row in sorted(table.values(), key=lambda r: r.relative):
        if previous is not None and previous.relative + previous.nbytes > row.relative:
            raise FormatError(f"tensor overlaps {previous.name!r}", offset=row.at, key=row.name)
        previous = row
    return {
        row.name: TensorInfo(row.name, row.shape, row.type, base + row.relative, row.nbytes, shard)
        for row in table.values()
    }
