"""Scalar float64 loops over the blocks of codebook and 4-bit float types, from the layout text of spec/model.md 6.2.

Holds: ``SLOW``, a loop for each type. A codebook is taken from ``pykvstream.gguf.grids``: it is data without a rule.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import GgmlType
from pykvstream.gguf.grids import grid

FP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


@cache
def entries(name: str) -> npt.NDArray[np.float64]:
    return grid(name).astype(np.float64)


def half(block: bytes, at: int) -> float:
    (value,) = struct.unpack_from("<e", block, at)
    return float(value)


def half_of(bits: int) -> float:
    (value,) = struct.unpack("<e", struct.pack("<H", bits))
    return float(value)


def word(block: bytes, at: int) -> int:
    (value,) = struct.unpack_from("<H", block, at)
    return int(value)


def long_word(block: bytes, at: int) -> int:
    (value,) = struct.unpack_from("<I", block, at)
    return int(value)


def sign(code: int, j: int) -> int:
    """Sign j of a 7-bit code."""
    return -1 if (code >> j & 1 if j < 7 else code.bit_count() & 1) else 1


def mask_sign(mask: int, j: int) -> int:
    return -1 if mask >> j & 1 else 1


def places() -> Iterator[tuple[int, int, int]]:
    """Sub-block of 32, run of 8 in it and place in the run, for the 256 elements of a block."""
    for e in range(256):
        yield e // 32, e // 8 % 4, e % 8


def slow_iq2_xxs(b: bytes) -> Iterable[float]:
    for sub, run, j in places():
        aux = long_word(b, 2 + 8 * sub + 4)
        scale = half(b, 0) * (0.5 + (aux >> 28)) * 0.25
        yield scale * sign(aux >> 7 * run & 127, j) * entries("IQ2_XXS")[b[2 + 8 * sub + run]][j]


def slow_iq2_xs(b: bytes) -> Iterable[float]:
    for sub, run, j in places():
        code = word(b, 2 + 2 * (4 * sub + run))
        nibble = b[66 + sub] & 15 if run < 2 else b[66 + sub] >> 4
        yield half(b, 0) * (0.5 + nibble) * 0.25 * sign(code >> 9, j) * entries("IQ2_XS")[code & 511][j]


def slow_iq2_s(b: bytes) -> Iterable[float]:
    for sub, run, j in places():
        index = b[2 + 4 * sub + run] | (b[66 + sub] >> 2 * run & 3) << 8
        nibble = b[74 + sub] & 15 if run < 2 else b[74 + sub] >> 4
        value = mask_sign(b[34 + 4 * sub + run], j) * entries("IQ2_S")[index][j]
        yield half(b, 0) * (0.5 + nibble) * 0.25 * value


def slow_iq3_xxs(b: bytes) -> Iterable[float]:
    for sub, run, j in places():
        aux = long_word(b, 66 + 4 * sub)
        index = b[2 + 8 * sub + 2 * run + j // 4]
        value = sign(aux >> 7 * run & 127, j) * entries("IQ3_XXS")[index][j % 4]
        yield half(b, 0) * (0.5 + (aux >> 28)) * 0.5 * value


def slow_iq3_s(b: bytes) -> Iterable[float]:
    for sub, run, j in places():
        i = 2 * run + j // 4
        index = b[2 + 8 * sub + i] | (b[66 + sub] >> i & 1) << 8
        nibble = b[106 + sub // 2] >> 4 if sub % 2 else b[106 + sub // 2] & 15
        value = mask_sign(b[74 + 4 * sub + run], j) * entries("IQ3_S")[index][j % 4]
        yield half(b, 0) * (1 + 2 * nibble) * value


def slow_iq1_s(b: bytes) -> Iterable[float]:
    for sub, run, j in places():
        high = word(b, 34 + 2 * sub)
        index = b[2 + 4 * sub + run] | (high >> 3 * run & 7) << 8
        delta = -0.125 if high >> 15 else 0.125
        yield half(b, 0) * (2 * (high >> 12 & 7) + 1) * (entries("IQ1_S")[index][j] + delta)


def slow_iq1_m(b: bytes) -> Iterable[float]:
    scale = half_of(sum((word(b, 48 + 2 * i) >> 12) << 4 * i for i in range(4)))
    for sub, run, j in places():
        high = b[32 + 2 * sub + run // 2] >> 4 * (run % 2) & 15
        index = b[4 * sub + run] | (high & 7) << 8
        step = 2 * sub + run // 2
        small = word(b, 48 + 2 * (step // 4)) >> 3 * (step % 4) & 7
        delta = -0.125 if high & 8 else 0.125
        yield scale * (2 * small + 1) * (entries("IQ1_S")[index][j] + delta)


def slow_mxfp4(b: bytes) -> Iterable[float]:
    for e in range(32):
        nibble = b[1 + e] & 15 if e < 16 else b[1 + e - 16] >> 4
        yield 2.0 ** (b[0] - 128) * FP4[nibble]


def small_float(code: int) -> float:
    if code == 0x7F:
        return 0.0
    exponent, mantissa = code >> 3 & 15, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def slow_nvfp4(b: bytes) -> Iterable[float]:
    for e in range(64):
        sub, place = e // 16, e % 16
        byte = b[4 + 8 * sub + place % 8]
        yield 0.5 * small_float(b[sub]) * FP4[byte & 15 if place < 8 else byte >> 4]


SLOW: dict[GgmlType, Callable[[bytes], Iterable[float]]] = {
    GgmlType.IQ1_S: slow_iq1_s,
    GgmlType.IQ1_M: slow_iq1_m,
    GgmlType.IQ2_XXS: slow_iq2_xxs,
    GgmlType.IQ2_XS: slow_iq2_xs,
    GgmlType.IQ2_S: slow_iq2_s,
    GgmlType.IQ3_XXS: slow_iq3_xxs,
    GgmlType.IQ3_S: slow_iq3_s,
    GgmlType.MXFP4: slow_mxfp4,
    GgmlType.NVFP4: slow_nvfp4,
}
