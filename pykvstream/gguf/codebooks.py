"""Numpy reference of the formats whose codes name entries of a codebook, and of the two 4-bit float formats.

Shapes: a decoder takes [n, block_bytes] and gives [n, block_values].
Order: every product is exact in float32, so that any evaluation order gives the same bits.
Source: spec/model.md 6.2.
Holds: ``DECODERS``, which ``codecs`` takes in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import grids
from pykvstream.gguf.blocks import Bytes, Floats, as_float, half, nibbles
from pykvstream.gguf.types import GgmlType

FP4_VALUES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The sixteen levels of MXFP4 and NVFP4, doubled to be whole numbers."""

_DELTA: Final = np.float32(0.125)


@cache
def _grid(name: str) -> Floats:
    return as_float(grids.grid(name))


def _words(blocks: Bytes, at: int, n: int, kind: str) -> npt.NDArray[Any]:
    """``n`` little-endian words of each block from byte ``at`` on, as int64."""
    size = n * np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + size]).view(kind).astype(np.int64)


def _bits(packed: npt.NDArray[Any], shifts: npt.ArrayLike, mask: int) -> npt.NDArray[np.int64]:
    """Fields of each word at ``shifts``, as a new last axis."""
    fields: npt.NDArray[np.int64] = packed.astype(np.int64)[..., None] >> np.asarray(shifts, np.int64) & mask
    return fields


def _pairs(packed: Bytes) -> npt.NDArray[np.int64]:
    """[n, 2m] nibbles of [n, m] bytes, the low one of each byte first."""
    return _bits(packed, (0, 4), 15).reshape(len(packed), -1)


def _signs(bits: npt.NDArray[np.int64]) -> Floats:
    """[..., 8] factors of 8-bit sign masks: -1 where the bit of the element is set."""
    return as_float(1 - 2 * _bits(bits, range(8), 1))


def _even(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sign masks of 7-bit codes: the eighth sign makes the number of minus signs even."""
    parity: npt.NDArray[np.int64] = np.bitwise_xor.reduce(_bits(codes, range(7), 1), axis=-1)
    return codes | parity << 7


def _scaled(scale: Floats, entries: Floats) -> Floats:
    """Entries [n, runs, ...] under [n, runs] scales, as [n, 256]."""
    n, runs = scale.shape
    return (scale[..., None] * entries.reshape(n, runs, -1)).reshape(n, -1)


def _odd(blocks: Bytes, nibs: npt.NDArray[np.int64], unit: float) -> Floats:
    """d * (2 s + 1) * unit for each sub-block."""
    return half(blocks, 0) * as_float(2 * nibs + 1) * np.float32(unit)


def _decode_iq2_xxs(blocks: Bytes) -> Floats:
    n = len(blocks)
    packed = blocks[:, 2:].reshape(n, 8, 8)
    aux = np.ascontiguousarray(packed[..., 4:]).view("<u4").astype(np.int64).reshape(n, 8)
    entries = _grid("IQ2_XXS")[packed[..., :4]] * _signs(_even(_bits(aux, (0, 7, 14, 21), 127)))
    return _scaled(_odd(blocks, aux >> 28, 0.125), entries)


def _decode_iq2_xs(blocks: Bytes) -> Floats:
    codes = _words(blocks, 2, 32, "<u2")
    entries = _grid("IQ2_XS")[codes & 511] * _signs(_even(codes >> 9))
    return _scaled(_odd(blocks, _pairs(blocks[:, 66:74]), 0.125), entries)


def _decode_iq2_s(blocks: Bytes) -> Floats:
    high = _bits(blocks[:, 66:74], (0, 2, 4, 6), 3).reshape(len(blocks), 32)
    entries = _grid("IQ2_S")[blocks[:, 2:34] | high << 8] * _signs(blocks[:, 34:66].astype(np.int64))
    return _scaled(_odd(blocks, _pairs(blocks[:, 74:82]), 0.125), entries)


def _decode_iq3_xxs(blocks: Bytes) -> Floats:
    n = len(blocks)
    aux = _words(blocks, 66, 8, "<u4")
    signs = _signs(_even(_bits(aux, (0, 7, 14, 21), 127))).reshape(n, 64, 4)
    return _scaled(_odd(blocks, aux >> 28, 0.25), _grid("IQ3_XXS")[blocks[:, 2:66]] * signs)


def _decode_iq3_s(blocks: Bytes) -> Floats:
    n = len(blocks)
    high = _bits(blocks[:, 66:74], range(8), 1).reshape(n, 64)
    signs = _signs(blocks[:, 74:106].astype(np.int64)).reshape(n, 64, 4)
    entries = _grid("IQ3_S")[blocks[:, 2:66] | high << 8] * signs
    return _scaled(_odd(blocks, _pairs(blocks[:, 106:110]), 1.0), entries)


def _decode_iq1_s(blocks: Bytes) -> Floats:
    n = len(blocks)
    high = _words(blocks, 34, 8, "<u2")
    indices = blocks[:, 2:34] | _bits(high, (0, 3, 6, 9), 7).reshape(n, 32) << 8
    delta = np.where(high >> 15 == 1, -_DELTA, _DELTA)
    entries = _grid("IQ1_S")[indices].reshape(n, 8, 32) + delta[..., None]
    return _scaled(_odd(blocks, high >> 12 & 7, 1.0), entries)


def _decode_iq1_m(blocks: Bytes) -> Floats:
    n = len(blocks)
    words = _words(blocks, 48, 4, "<u2")
    # The float16 scale is spread over the top nibbles of the four words, the lowest nibble first.
    top = np.bitwise_or.reduce(words >> 12 << np.arange(0, 16, 4), axis=1)
    scale = top.astype("<u2").view("<f2").astype(np.float32)[:, None]
    high = _pairs(blocks[:, 32:48])
    delta = np.where(high >> 3 == 1, -_DELTA, _DELTA)
    entries = _grid("IQ1_S")[blocks[:, :32] | (high & 7) << 8] + delta[..., None]
    steps = _bits(words, (0, 3, 6, 9), 7).reshape(n, 16)
    return _scaled(scale * as_float(2 * steps + 1), entries)


def _decode_mxfp4(blocks: Bytes) -> Floats:
    # 2^-128 and 2^-127 are subnormal, and ldexp gives them exactly.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * np.array(FP4_VALUES, np.float32)[nibbles(blocks[:, 1:])]


def _decode_nvfp4(blocks: Bytes) -> Floats:
    codes = blocks[:, :4]
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), as_float(codes & 7)
    normal = np.ldexp(1 + mantissa / np.float32(8), exponent - 7)
    scale = np.where(exponent == 0, np.ldexp(mantissa, -9), normal)
    # Of the two codes for "no number" only the one without the top bit counts as zero.
    halved = np.where(codes == 0x7F, np.float32(0), scale * np.float32(0.5))
    levels = np.array(FP4_VALUES, np.float32)[nibbles(blocks[:, 4:].reshape(len(blocks), 4, 8))]
    return _scaled(halved, levels)


DECODERS: Final[dict[GgmlType, Callable[[Bytes], Floats]]] = {
    GgmlType.IQ1_S: _decode_iq1_s,
    GgmlType.IQ1_M: _decode_iq1_m,
    GgmlType.IQ2_XXS: _decode_iq2_xxs,
    GgmlType.IQ2_XS: _decode_iq2_xs,
    GgmlType.IQ2_S: _decode_iq2_s,
    GgmlType.IQ3_XXS: _decode_iq3_xxs,
    GgmlType.IQ3_S: _decode_iq3_s,
    GgmlType.MXFP4: _decode_mxfp4,
    GgmlType.NVFP4: _decode_nvfp4,
}
