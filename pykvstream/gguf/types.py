"""Names and sizes of what a GGUF file holds: tensor types and metadata value types.

Units: ``block_values`` counts elements, ``block_bytes`` bytes; a row of n values is n / block_values blocks.
Source: spec/model.md 6.1 (value types) and 6.2 (tensor types).
Holds: ``GgmlType``, ``TYPES_BY_ID`` and ``ValueType``; the bit layouts of the blocks are in ``codecs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final

from pykvstream.errors import InvalidArgument


class GgmlType(Enum):
    """A tensor type: its number in files, the values of one block and the bytes of one block.

    Every type that a file may carry is here, so that sizes can be checked and shown; ``codecs.DECODABLE``
    says which of them have a numpy reference.
    """

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q8_1 = (9, 32, 36)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    Q8_K = (15, 256, 292)
    IQ2_XXS = (16, 256, 66)
    IQ2_XS = (17, 256, 74)
    IQ3_XXS = (18, 256, 98)
    IQ1_S = (19, 256, 50)
    IQ4_NL = (20, 32, 18)
    IQ3_S = (21, 256, 110)
    IQ2_S = (22, 256, 82)
    IQ4_XS = (23, 256, 136)
    IQ1_M = (29, 256, 56)
    BF16 = (30, 1, 2)
    MXFP4 = (39, 32, 17)
    NVFP4 = (40, 64, 36)

    def __init__(self, type_id: int, block_values: int, block_bytes: int) -> None:
        self.id = type_id
        self.block_values = block_values
        self.block_bytes = block_bytes

    def row_bytes(self, n_values: int) -> int:
        """Return the bytes of a row of ``n_values``; refuse a length that is not whole blocks."""
        if n_values < 0 or n_values % self.block_values:
            raise InvalidArgument(
                f"a row of {n_values} values is not whole {self.name} blocks of {self.block_values}"
            )
        return n_values // self.block_values * self.block_bytes


TYPES_BY_ID: Final[Mapping[int, GgmlType]] = MappingProxyType({member.id: member for member in GgmlType})


class ValueType(IntEnum):
    """The type of a metadata value, by its number in files."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers; a bool is not one."""
        return self in _INTEGERS

    @property
    def is_float(self) -> bool:
        """Whether values are floating-point numbers."""
        return self in (ValueType.FLOAT32, ValueType.FLOAT64)

    @property
    def dtype(self) -> str:
        """Return the little-endian numpy type of one value; strings and arrays have none."""
        if self in (ValueType.STRING, ValueType.ARRAY):
            raise InvalidArgument(f"{self.name} has no fixed size")
        return _DTYPES[self]


_INTEGERS = frozenset(
    {
        ValueType.UINT8,
        ValueType.INT8,
        ValueType.UINT16,
        ValueType.INT16,
        ValueType.UINT32,
        ValueType.INT32,
        ValueType.UINT64,
        ValueType.INT64,
    }
)

_DTYPES: dict[ValueType, str] = {
    ValueType.UINT8: "<u1",
    ValueType.INT8: "<i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.BOOL: "|b1",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}
