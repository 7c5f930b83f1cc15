"""A small GGUF v3 writer for tests, examples and tools.

Order: keys and tensors are declared first; ``write`` then streams header, tensor table and data, encoding one
tensor at a time.
Source: spec/model.md 6.1.
Holds: ``GgufWriter``.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvstream.errors import InvalidArgument
from pykvstream.gguf import codecs
from pykvstream.gguf.types import GgmlType, ValueType

Scalar: TypeAlias = bool | int | float | str | bytes
_ALIGNMENT_KEY: Final = "general.alignment"

# ``struct`` refuses what does not fit; numpy would wrap it or take it through a float.
_LAYOUTS: Final = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A declared tensor; ``data`` holds encoded bytes, or float32 values to encode, or None for zeros."""

    shape: tuple[int, ...]
    type: GgmlType
    data: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | None
    nbytes: int


class GgufWriter:
    """Collects keys and tensors and writes them as one little-endian file."""

    def __init__(self, *, alignment: int = 32, version: int = 3) -> None:
        if alignment < 8 or alignment & (alignment - 1):
            raise InvalidArgument(f"alignment {alignment}, need a power of two, at least 8")
        self._alignment = alignment
        self._version = version
        self._values: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if alignment != 32:
            self.add(_ALIGNMENT_KEY, alignment, ValueType.UINT32)

    def add(self, key: str, value: Scalar, kind: ValueType | None = None) -> None:
        """Add a scalar; without ``kind``: bool, UINT32 or (negative) INT32, FLOAT32, string."""
        chosen = _kind_of(value) if kind is None else kind
        if chosen is ValueType.ARRAY:
            raise InvalidArgument("an array needs add_array")
        self._put(key, struct.pack("<i", chosen) + _value(chosen, value))

    def add_array(
        self, key: str, values: Sequence[Scalar] | npt.NDArray[np.generic], element: ValueType
    ) -> None:
        """Add an array of ``element``; arrays of arrays are no part of the format as it is read."""
        if element is ValueType.ARRAY:
            raise InvalidArgument("an array cannot hold arrays")
        head = struct.pack("<iiQ", ValueType.ARRAY, element, len(values))
        items = values.tolist() if isinstance(values, np.ndarray) else values
        if element is ValueType.STRING:
            body = b"".join(_string(item) for item in items)
        else:
            body = _packed(element, items)
        self._put(key, head + body)

    def add_tensor(
        self,
        name: str,
        data: npt.ArrayLike | bytes,
        kind: GgmlType = GgmlType.F32,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Add a tensor.

        ``shape`` is in ne order (row length first). An array of floats is encoded to ``kind`` when written
        and its own shape, reversed, is the default; bytes or a uint8 array are taken as encoded and need
        ``shape``.
        """
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.asarray(data)
        encoded = raw.dtype == np.uint8
        if encoded and shape is None:
            raise InvalidArgument(f"tensor {name!r} is given as bytes and needs a shape")
        ne = tuple(raw.shape[::-1] if shape is None else shape)
        nbytes = self._checked_bytes(name, ne, kind)
        have, need = raw.size, nbytes if encoded else math.prod(ne)
        if have != need:
            raise InvalidArgument(f"tensor {name!r} of shape {ne} needs {need} elements, have {have}")
        values = raw.reshape(-1) if encoded else np.asarray(raw, np.float32).reshape(-1, ne[0])
        self._tensors[name] = _Tensor(ne, kind, values, nbytes)

    def add_zeros(self, name: str, kind: GgmlType, shape: Sequence[int]) -> None:
        """Add a tensor of zero bytes, a hole in the file: the shape of a model without its size."""
        ne = tuple(shape)
        self._tensors[name] = _Tensor(ne, kind, None, self._checked_bytes(name, ne, kind))

    def _checked_bytes(self, name: str, ne: tuple[int, ...], kind: GgmlType) -> int:
        if not 1 <= len(ne) <= 4 or min(ne) < 1:
            raise InvalidArgument(f"tensor {name!r} has shape {ne}, need 1 to 4 positive dimensions")
        if name in self._tensors:
            raise InvalidArgument(f"tensor {name!r} is added twice")
        return kind.row_bytes(ne[0]) * math.prod(ne[1:])

    def write(self, target: str | os.PathLike[str] | BinaryIO) -> None:
        """Write the file to a path or to a binary stream; zeros need one that can seek."""
        if isinstance(target, (str, os.PathLike)):
            with open(target, "wb") as stream:
                self._stream(stream)
        else:
            self._stream(target)

    def _put(self, key: str, value: bytes) -> None:
        if key in self._values:
            raise InvalidArgument(f"key {key!r} is added twice")
        self._values[key] = value

    def _stream(self, stream: BinaryIO) -> None:
        head = bytearray(b"GGUF" + struct.pack("<Iqq", self._version, len(self._tensors), len(self._values)))
        for key, value in self._values.items():
            head += _string(key) + value
        offset = 0
        for name, tensor in self._tensors.items():
            head += _string(name) + struct.pack(f"<I{len(tensor.shape)}q", len(tensor.shape), *tensor.shape)
            head += struct.pack("<iQ", tensor.type.id, offset)
            offset += tensor.nbytes + self._padding(tensor.nbytes)
        stream.write(head + bytes(self._padding(len(head))))
        for tensor in self._tensors.values():
            padding = self._padding(tensor.nbytes)
            if tensor.data is None:
                stream.seek(tensor.nbytes + padding, os.SEEK_CUR)
                continue
            stream.write(_encoded(tensor.type, tensor.data).tobytes() + bytes(padding))
        if stream.seekable():
            stream.truncate()

    def _padding(self, n_bytes: int) -> int:
        return -n_bytes % self._alignment


def _encoded(
    kind: GgmlType, data: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
) -> npt.NDArray[np.uint8]:
    return data.view(np.uint8) if data.dtype == np.uint8 else codecs.encode(kind, data)


def _kind_of(value: Scalar) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, int):
        return ValueType.INT32 if value < 0 else ValueType.UINT32
    return ValueType.FLOAT32 if isinstance(value, float) else ValueType.STRING


def _value(kind: ValueType, value: Scalar) -> bytes:
    return _string(value) if kind is ValueType.STRING else _packed(kind, (value,))


def _string(value: object) -> bytes:
    if not isinstance(value, (str, bytes)):
        raise InvalidArgument(f"{value!r} is not a string")
    raw = value.encode("utf-8") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _packed(kind: ValueType, values: Sequence[object]) -> bytes:
    if kind is ValueType.BOOL and not all(isinstance(value, bool) for value in values):
        raise InvalidArgument(f"not only bools in {values!r}")
    try:
        return struct.pack(f"<{len(values)}{_LAYOUTS[kind]}", *values)
    except (struct.error, OverflowError) as error:
        raise InvalidArgument(f"not all values fit {kind.name}: {error}") from None
