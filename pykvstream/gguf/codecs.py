"""Numpy reference of the block formats: decode to float32, encode KV rows.

Shapes: ``decode`` takes bytes and gives a flat array; ``encode`` takes [..., n] and gives [...,
row_bytes(n)].
Order: every decoded value is one float32 rounding of the exact product (and difference) of the stored
numbers, so that any evaluation order gives the same bits. Encoders compute in float32, and choose codes with
the scale before it is rounded to float16.
Source: spec/model.md 6.2 (layouts) and 6.4 (encoders).
Holds: ``decode``, ``encode``, ``DECODABLE``, ``ENCODABLE``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.gguf import codebooks
from pykvstream.gguf.blocks import Bytes, Floats
from pykvstream.gguf.blocks import as_float as _f32
from pykvstream.gguf.blocks import half as _half
from pykvstream.gguf.blocks import nibbles as _nibbles
from pykvstream.gguf.types import GgmlType

_U8: TypeAlias = np.uint8

IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen levels of IQ4_NL and IQ4_XS."""

# A decoder turns a batch of blocks into float32 with several temporaries of its size; the batch keeps them
# small.
_BATCH_VALUES: Final = 1 << 20


def decode(kind: GgmlType, data: Bytes) -> Floats:
    """Decode whole blocks of ``kind`` to a flat float32 array. Bytes are data: NaN and infinite scales pass
    through.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Unsupported(f"no decoder for {kind.name}")
    raw = np.ascontiguousarray(data).reshape(-1)
    if raw.dtype != np.uint8 or raw.size % kind.block_bytes:
        raise InvalidArgument(f"{raw.nbytes} bytes are not whole {kind.name} blocks of {kind.block_bytes}")
    blocks = raw.reshape(-1, kind.block_bytes)
    values = np.empty((len(blocks), kind.block_values), np.float32)
    step = max(1, _BATCH_VALUES // kind.block_values)
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            values[first : first + step] = decoder(blocks[first : first + step])
    return values.reshape(-1)


def encode(kind: GgmlType, values: npt.ArrayLike) -> Bytes:
    """Encode float32 rows as the KV cache does. Block types refuse values that are not finite."""
    encoder = _ENCODERS.get(kind)
    if encoder is None:
        raise Unsupported(f"no encoder for {kind.name}")
    rows = np.ascontiguousarray(values, np.float32)
    if rows.ndim == 0:
        raise InvalidArgument("a row has at least one axis")
    row_bytes = kind.row_bytes(rows.shape[-1])
    if kind.block_values > 1 and not np.isfinite(rows).all():
        raise InvalidArgument(f"{kind.name} cannot hold values that are not finite")
    blocks = rows.reshape(-1, kind.block_values)
    coded = np.empty((len(blocks), kind.block_bytes), np.uint8)
    step = max(1, _BATCH_VALUES // kind.block_values)
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            coded[first : first + step] = encoder(blocks[first : first + step])
    return coded.reshape(*rows.shape[:-1], row_bytes)


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _decode_f16(blocks: Bytes) -> Floats:
    return _half(blocks, 0)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The fifth code bits of Q5_0 and Q5_1, moved to bit 4: bit e of the little-endian word belongs to
    element e.
    """
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << _U8(4)


def _decode_q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_f32(_nibbles(blocks[:, 2:])) - 8)


def _decode_q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _f32(_nibbles(blocks[:, 4:])) + _half(blocks, 2)


def _decode_q5_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_f32(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) - 16)


def _decode_q5_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _f32(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) + _half(blocks, 2)


def _decode_q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _f32(blocks[:, 2:].view(np.int8))


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * np.array(IQ4_VALUES, np.float32)[_nibbles(blocks[:, 2:])]


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    n = len(blocks)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1).reshape(n, 8)
    scales = _half(blocks, 0) * (_f32(low | high << 4) - 32)
    levels = np.array(IQ4_VALUES, np.float32)[_nibbles(blocks[:, 8:].reshape(n, 8, 16))]
    return (scales[..., None] * levels).reshape(n, 256)


def _crumbs(packed: Bytes) -> Bytes:
    """Two-bit codes [n, 256] of 64 bytes: halves of 32 bytes, each giving four runs of 32 elements."""
    n = len(packed)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (packed.reshape(n, 2, 1, 32) >> shifts & _U8(3)).reshape(n, 256)


def _decode_q2_k(blocks: Bytes) -> Floats:
    n = len(blocks)
    codes = _f32(_crumbs(blocks[:, 16:80])).reshape(n, 16, 16)
    scale = _half(blocks, 80) * _f32(blocks[:, :16] & 15)
    floor = _half(blocks, 82) * _f32(blocks[:, :16] >> 4)
    return (scale[..., None] * codes - floor[..., None]).reshape(n, 256)


def _decode_q3_k(blocks: Bytes) -> Floats:
    n = len(blocks)
    bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _f32(_crumbs(blocks[:, 32:96])) - 4 * (1 - _f32(bits.reshape(n, 256)))
    low = _nibbles(blocks[:, 96:104])
    high = blocks[:, None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = _half(blocks, 108) * (_f32(low | high.reshape(n, 16) << 4) - 32)
    return (scales[..., None] * codes.reshape(n, 16, 16)).reshape(n, 256)


def _scales_and_floors(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and floors of Q4_K and Q5_K, multiplied out: 6-bit numbers packed in bytes 4 to 15."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    floor = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return _half(blocks, 0) * _f32(scale), _half(blocks, 2) * _f32(floor)


def _decode_q4_k(blocks: Bytes) -> Floats:
    n = len(blocks)
    scale, floor = _scales_and_floors(blocks)
    codes = _f32(_nibbles(blocks[:, 16:].reshape(n, 4, 32))).reshape(n, 8, 32)
    return (scale[..., None] * codes - floor[..., None]).reshape(n, 256)


def _decode_q5_k(blocks: Bytes) -> Floats:
    n = len(blocks)
    scale, floor = _scales_and_floors(blocks)
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _f32(_nibbles(blocks[:, 48:].reshape(n, 4, 32)).reshape(n, 8, 32) | bits << 4)
    return (scale[..., None] * codes - floor[..., None]).reshape(n, 256)


def _decode_q6_k(blocks: Bytes) -> Floats:
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64)).reshape(n, 256)
    codes = _f32(low | _crumbs(blocks[:, 128:192]) << 4) - 32
    scales = _half(blocks, 208) * _f32(blocks[:, 192:208].view(np.int8))
    return (scales[..., None] * codes.reshape(n, 16, 16)).reshape(n, 256)


def _halves(values: Floats) -> Bytes:
    """A column of numbers as the bytes of float16, rounded to nearest even."""
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def _inverse(d: Floats) -> Floats:
    """1/d, and 0 where d is 0 or so small that 1/d overflows; such a d is 0 as a float16 anyway."""
    inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0)).astype(np.float32)


def _signed_maximum(x: Floats) -> Floats:
    """The element of largest magnitude of each block with its sign, the first of equals, as a column."""
    return np.take_along_axis(x, np.argmax(np.abs(x), axis=1)[:, None], axis=1)


def _pack_nibbles(codes: Bytes) -> Bytes:
    return codes[:, :16] | codes[:, 16:] << _U8(4)


def _encode_f32(x: Floats) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def _encode_f16(x: Floats) -> Bytes:
    return _halves(x)


def _encode_bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16
    quiet = bits >> 16 | 64
    return np.where(np.isnan(x), quiet, rounded).astype("<u2").view(np.uint8)


def _encode_q8_0(x: Floats) -> Bytes:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    whole = np.trunc(scaled)
    # Adding 0.5 first would round 0.49999997 up; the fraction itself is exact.
    away = np.where(np.abs(scaled - whole) >= np.float32(0.5), np.sign(scaled), np.float32(0))
    codes = (whole + away).astype(np.int8).view(np.uint8)
    return np.concatenate((_halves(d), codes), axis=1)


def _symmetric_codes(x: Floats, half_range: int) -> tuple[Floats, Bytes]:
    d = _signed_maximum(x) / np.float32(-half_range)
    codes = np.minimum(x * _inverse(d) + np.float32(half_range + 0.5), 2 * half_range - 1)
    return d, codes.astype(np.uint8)


def _ranged_codes(x: Floats, top: int) -> tuple[Floats, Floats, Bytes]:
    low = x.min(axis=1, keepdims=True)
    extent = x.max(axis=1, keepdims=True) - low
    if not np.isfinite(extent).all():
        raise InvalidArgument("the range of a block is not finite in float32")
    d = extent / np.float32(top)
    codes = np.minimum((x - low) * _inverse(d) + np.float32(0.5), top)
    return d, low, codes.astype(np.uint8)


def _pack_fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _encode_q4_0(x: Floats) -> Bytes:
    d, codes = _symmetric_codes(x, 8)
    return np.concatenate((_halves(d), _pack_nibbles(codes)), axis=1)


def _encode_q4_1(x: Floats) -> Bytes:
    d, low, codes = _ranged_codes(x, 15)
    return np.concatenate((_halves(d), _halves(low), _pack_nibbles(codes)), axis=1)


def _encode_q5_0(x: Floats) -> Bytes:
    d, codes = _symmetric_codes(x, 16)
    return np.concatenate((_halves(d), _pack_fifth_bits(codes), _pack_nibbles(codes & _U8(15))), axis=1)


def _encode_q5_1(x: Floats) -> Bytes:
    d, low, codes = _ranged_codes(x, 31)
    packed = (_halves(d), _halves(low), _pack_fifth_bits(codes), _pack_nibbles(codes & _U8(15)))
    return np.concatenate(packed, axis=1)


def _encode_iq4_nl(x: Floats) -> Bytes:
    levels = np.array(IQ4_VALUES, np.float32)
    scaled = x * _inverse(_signed_maximum(x) / levels[0])
    above = np.clip(np.searchsorted(levels, scaled, side="right"), 1, 15)
    codes = np.where(scaled - levels[above - 1] < levels[above] - scaled, above - 1, above).astype(np.uint8)
    # The sums run over the elements in order, one float32 addition each, as a scalar loop does.
    product = np.zeros(len(x), np.float32)
    square = np.zeros(len(x), np.float32)
    for column in range(32):
        weight = x[:, column] * x[:, column] * levels[codes[:, column]]
        product += weight * x[:, column]
        square += weight * levels[codes[:, column]]
    d = np.where(square > 0, product / square, np.float32(0)).astype(np.float32)
    return np.concatenate((_halves(d[:, None]), _pack_nibbles(codes)), axis=1)


_DECODERS: Final[dict[GgmlType, Callable[[Bytes], Floats]]] = {
    GgmlType.F32: _decode_f32,
    GgmlType.F16: _decode_f16,
    GgmlType.BF16: _decode_bf16,
    GgmlType.Q4_0: _decode_q4_0,
    GgmlType.Q4_1: _decode_q4_1,
    GgmlType.Q5_0: _decode_q5_0,
    GgmlType.Q5_1: _decode_q5_1,
    GgmlType.Q8_0: _decode_q8_0,
    GgmlType.Q2_K: _decode_q2_k,
    GgmlType.Q3_K: _decode_q3_k,
    GgmlType.Q4_K: _decode_q4_k,
    GgmlType.Q5_K: _decode_q5_k,
    GgmlType.Q6_K: _decode_q6_k,
    GgmlType.IQ4_NL: _decode_iq4_nl,
    GgmlType.IQ4_XS: _decode_iq4_xs,
    **codebooks.DECODERS,
}

_ENCODERS: Final[dict[GgmlType, Callable[[Floats], Bytes]]] = {
    GgmlType.F32: _encode_f32,
    GgmlType.F16: _encode_f16,
    GgmlType.BF16: _encode_bf16,
    GgmlType.Q8_0: _encode_q8_0,
    GgmlType.Q4_0: _encode_q4_0,
    GgmlType.Q4_1: _encode_q4_1,
    GgmlType.Q5_0: _encode_q5_0,
    GgmlType.Q5_1: _encode_q5_1,
    GgmlType.IQ4_NL: _encode_iq4_nl,
}

DECODABLE: Final[frozenset[GgmlType]] = frozenset(_DECODERS)
ENCODABLE: Final[frozenset[GgmlType]] = frozenset(_ENCODERS)
