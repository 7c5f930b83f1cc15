"""Block formats against scalar float64 loops that are written from the layout text of spec/model.md 6.2 and
6.4.

Every decoded value is exact in float64 and rounded to float32 once, so decoders are compared for equality;
encoders are compared byte for byte with loops that round to float32 after each operation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.gguf import DECODABLE, ENCODABLE, GgmlType, decode, encode
from tests import slow_codebooks

T = GgmlType
LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def half(block: bytes, at: int) -> float:
    (value,) = struct.unpack_from("<e", block, at)
    return float(value)


def nibble(block: bytes, at: int, e: int) -> int:
    """Element e of 32 nibbles: 16 low ones, then 16 high ones."""
    return block[at + e] & 15 if e < 16 else block[at + e - 16] >> 4


def slow_f32(b: bytes) -> Iterable[float]:
    return struct.unpack("<f", b)


def slow_f16(b: bytes) -> Iterable[float]:
    return struct.unpack("<e", b)


def slow_bf16(b: bytes) -> Iterable[float]:
    return struct.unpack("<f", b"\0\0" + b)


def slow_q4_0(b: bytes) -> Iterable[float]:
    return [half(b, 0) * (nibble(b, 2, e) - 8) for e in range(32)]


def slow_q4_1(b: bytes) -> Iterable[float]:
    return [half(b, 0) * nibble(b, 4, e) + half(b, 2) for e in range(32)]


def slow_q5_0(b: bytes) -> Iterable[float]:
    (high,) = struct.unpack_from("<I", b, 2)
    return [half(b, 0) * ((nibble(b, 6, e) | (high >> e & 1) << 4) - 16) for e in range(32)]


def slow_q5_1(b: bytes) -> Iterable[float]:
    (high,) = struct.unpack_from("<I", b, 4)
    return [half(b, 0) * (nibble(b, 8, e) | (high >> e & 1) << 4) + half(b, 2) for e in range(32)]


def slow_q8_0(b: bytes) -> Iterable[float]:
    return [half(b, 0) * q for q in struct.unpack_from("<32b", b, 2)]


def slow_q2_k(b: bytes) -> Iterable[float]:
    for e in range(256):
        part, j, place = e // 128, e % 128 // 32, e % 32
        q = b[16 + 32 * part + place] >> 2 * j & 3
        scale = b[8 * part + 2 * j + (place >= 16)]
        yield half(b, 80) * (scale & 15) * q - half(b, 82) * (scale >> 4)


def slow_q3_k(b: bytes) -> Iterable[float]:
    sc = b[96:108]
    for e in range(256):
        part, j, place = e // 128, e % 128 // 32, e % 32
        k = e // 16
        low = sc[k] & 15 if k < 8 else sc[k - 8] >> 4
        scale = low | (sc[8 + k % 4] >> 2 * (k // 4) & 3) << 4
        q = (b[32 + 32 * part + place] >> 2 * j & 3) - (0 if b[place] >> 4 * part + j & 1 else 4)
        yield half(b, 108) * (scale - 32) * q


def k_scale(s: bytes, i: int) -> tuple[int, int]:
    if i < 4:
        return s[i] & 63, s[i + 4] & 63
    return (s[i + 4] & 15) | (s[i - 4] >> 6) << 4, (s[i + 4] >> 4) | (s[i] >> 6) << 4


def slow_q4_k(b: bytes) -> Iterable[float]:
    for e in range(256):
        sub, place = e // 32, e % 32
        byte = b[16 + 32 * (sub // 2) + place]
        scale, floor = k_scale(b[4:16], sub)
        yield half(b, 0) * scale * (byte >> 4 if sub % 2 else byte & 15) - half(b, 2) * floor


def slow_q5_k(b: bytes) -> Iterable[float]:
    for e in range(256):
        sub, place = e // 32, e % 32
        byte = b[48 + 32 * (sub // 2) + place]
        q = (byte >> 4 if sub % 2 else byte & 15) + 16 * (b[16 + place] >> sub & 1)
        scale, floor = k_scale(b[4:16], sub)
        yield half(b, 0) * scale * q - half(b, 2) * floor


def slow_q6_k(b: bytes) -> Iterable[float]:
    for e in range(256):
        part, run, place = e // 128, e % 128 // 32, e % 32
        byte = b[64 * part + 32 * (run % 2) + place]
        low = byte & 15 if run < 2 else byte >> 4
        q = low | (b[128 + 32 * part + place] >> 2 * run & 3) << 4
        (scale,) = struct.unpack_from("<b", b, 192 + e // 16)
        yield half(b, 208) * scale * (q - 32)


def slow_iq4_nl(b: bytes) -> Iterable[float]:
    return [half(b, 0) * LEVELS[nibble(b, 2, e)] for e in range(32)]


def slow_iq4_xs(b: bytes) -> Iterable[float]:
    (high,) = struct.unpack_from("<H", b, 2)
    for e in range(256):
        sub = e // 32
        byte = b[4 + sub // 2]
        scale = (byte >> 4 if sub % 2 else byte & 15) | (high >> 2 * sub & 3) << 4
        yield half(b, 0) * (scale - 32) * LEVELS[nibble(b, 8 + 16 * sub, e % 32)]


SLOW: dict[GgmlType, Callable[[bytes], Iterable[float]]] = {
    T.F32: slow_f32,
    T.F16: slow_f16,
    T.BF16: slow_bf16,
    T.Q4_0: slow_q4_0,
    T.Q4_1: slow_q4_1,
    T.Q5_0: slow_q5_0,
    T.Q5_1: slow_q5_1,
    T.Q8_0: slow_q8_0,
    T.Q2_K: slow_q2_k,
    T.Q3_K: slow_q3_k,
    T.Q4_K: slow_q4_k,
    T.Q5_K: slow_q5_k,
    T.Q6_K: slow_q6_k,
    T.IQ4_NL: slow_iq4_nl,
    T.IQ4_XS: slow_iq4_xs,
}
HALVES_AT = {
    T.Q4_0: (0,),
    T.Q4_1: (0, 2),
    T.Q5_0: (0,),
    T.Q5_1: (0, 2),
    T.Q8_0: (0,),
    T.Q2_K: (80, 82),
    T.Q3_K: (108,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
    T.IQ4_NL: (0,),
    T.IQ4_XS: (0,),
}
# Zeros, the smallest and largest denormals, the smallest normal, 1, the largest, infinities and NaNs of both
# signs.
HOSTILE_HALVES = (
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
)


def same(
    got: npt.NDArray[np.float32], blocks: Iterable[bytes], slow: Callable[[bytes], Iterable[float]]
) -> None:
    with np.errstate(over="ignore"):
        need = np.array([value for block in blocks for value in slow(block)], np.float64).astype(np.float32)
    np.testing.assert_array_equal(got, need)


def by_name(kinds: Iterable[GgmlType]) -> list[GgmlType]:
    return sorted(kinds, key=lambda kind: kind.id)


def test_every_decoder_has_a_slow_loop() -> None:
    assert set(SLOW) | set(slow_codebooks.SLOW) == DECODABLE


@pytest.mark.parametrize("kind", by_name(SLOW), ids=lambda kind: kind.name)
def test_decoder_equals_the_layout_on_random_blocks(kind: GgmlType) -> None:
    rng = np.random.default_rng(kind.id)
    raw = rng.integers(0, 256, (24, kind.block_bytes), dtype=np.uint8)
    same(decode(kind, raw), [row.tobytes() for row in raw], SLOW[kind])


@pytest.mark.parametrize("kind", by_name(HALVES_AT), ids=lambda kind: kind.name)
def test_decoder_equals_the_layout_under_hostile_scales(kind: GgmlType) -> None:
    rng = np.random.default_rng(kind.id)
    scales = HOSTILE_HALVES
    raw = rng.integers(0, 256, (len(scales), kind.block_bytes), dtype=np.uint8)
    for row, scale in zip(raw, scales, strict=True):
        for n, at in enumerate(HALVES_AT[kind]):
            word = scale if n == 0 else scales[(scales.index(scale) + 5) % len(scales)]
            row[at : at + 2] = np.frombuffer(struct.pack("<H", word), np.uint8)
    same(decode(kind, raw), [row.tobytes() for row in raw], SLOW[kind])


@pytest.mark.parametrize("kind", by_name(HALVES_AT), ids=lambda kind: kind.name)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0])
def test_decoder_equals_the_layout_at_the_ends_of_the_code_range(kind: GgmlType, byte: int) -> None:
    raw = np.full(kind.block_bytes, byte, np.uint8)
    for at in HALVES_AT[kind]:
        raw[at : at + 2] = np.frombuffer(struct.pack("<e", -0.75), np.uint8)
    same(decode(kind, raw), [raw.tobytes()], SLOW[kind])


def test_decoder_covers_more_blocks_than_one_batch() -> None:
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (8200, T.Q4_K.block_bytes), dtype=np.uint8)
    whole = decode(T.Q4_K, raw)
    np.testing.assert_array_equal(whole[-512:], decode(T.Q4_K, raw[-2:]))
    assert whole.size == 8200 * 256


@pytest.mark.parametrize("kind", by_name(set(T) - DECODABLE), ids=lambda kind: kind.name)
def test_type_without_decoder_is_refused_by_name(kind: GgmlType) -> None:
    with pytest.raises(Unsupported, match=kind.name):
        decode(kind, np.zeros(kind.block_bytes, np.uint8))


def test_partial_block_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="35 bytes"):
        decode(T.Q8_0, np.zeros(35, np.uint8))
    with pytest.raises(InvalidArgument, match="33 values"):
        encode(T.Q8_0, np.zeros(33, np.float32))
    with pytest.raises(InvalidArgument, match="-32 values"):
        T.Q8_0.row_bytes(-32)


# Encoders. ``f`` rounds to float32, so that each operation rounds as C float arithmetic does.


def f(value: float) -> np.float32:
    return np.float32(value)


def inverse(d: np.float32) -> np.float32:
    if d == 0:
        return f(0)
    with np.errstate(over="ignore"):
        result = f(1) / d
    return result if np.isfinite(result) else f(0)


def half_bytes(value: np.float32) -> bytes:
    with np.errstate(over="ignore"):
        return np.float16(value).tobytes()


def packed(codes: list[int]) -> bytes:
    return bytes(codes[e] & 15 | (codes[e + 16] & 15) << 4 for e in range(16))


def fifth_bits(codes: list[int]) -> bytes:
    return struct.pack("<I", sum((q >> 4 & 1) << e for e, q in enumerate(codes)))


def signed_maximum(x: list[np.float32]) -> np.float32:
    best = x[0]
    for value in x:
        if abs(value) > abs(best):
            best = value
    return best


def half_away(value: np.float32) -> int:
    exact = abs(float(value))
    return int(math.copysign(math.floor(exact + 0.5), value))


def scalar_q8_0(x: list[np.float32]) -> bytes:
    d = abs(signed_maximum(x)) / f(127)
    return half_bytes(d) + struct.pack("<32b", *(half_away(v * inverse(d)) for v in x))


def scalar_symmetric(x: list[np.float32], span: int) -> tuple[np.float32, list[int]]:
    d = signed_maximum(x) / f(-span)
    return d, [min(2 * span - 1, int(v * inverse(d) + f(span + 0.5))) for v in x]


def scalar_q4_0(x: list[np.float32]) -> bytes:
    d, codes = scalar_symmetric(x, 8)
    return half_bytes(d) + packed(codes)


def scalar_q5_0(x: list[np.float32]) -> bytes:
    d, codes = scalar_symmetric(x, 16)
    return half_bytes(d) + fifth_bits(codes) + packed(codes)


def scalar_ranged(x: list[np.float32], top: int) -> tuple[bytes, list[int]]:
    low = min(x)
    d = (max(x) - low) / f(top)
    return half_bytes(d) + half_bytes(low), [min(top, int((v - low) * inverse(d) + f(0.5))) for v in x]


def scalar_q4_1(x: list[np.float32]) -> bytes:
    head, codes = scalar_ranged(x, 15)
    return head + packed(codes)


def scalar_q5_1(x: list[np.float32]) -> bytes:
    head, codes = scalar_ranged(x, 31)
    return head + fifth_bits(codes) + packed(codes)


def nearest_level(value: np.float32) -> int:
    best = 0
    for index, level in enumerate(LEVELS):
        if abs(float(value) - level) <= abs(float(value) - LEVELS[best]):
            best = index
    return best


def scalar_iq4_nl(x: list[np.float32]) -> bytes:
    unit = inverse(signed_maximum(x) / f(-127))
    codes = [nearest_level(v * unit) for v in x]
    product = square = f(0)
    for v, code in zip(x, codes, strict=True):
        weight = v * v
        product += weight * f(LEVELS[code]) * v
        square += weight * f(LEVELS[code]) * f(LEVELS[code])
    return half_bytes(product / square if square > 0 else f(0)) + packed(codes)


SCALAR: dict[GgmlType, Callable[[list[np.float32]], bytes]] = {
    T.Q8_0: scalar_q8_0,
    T.Q4_0: scalar_q4_0,
    T.Q4_1: scalar_q4_1,
    T.Q5_0: scalar_q5_0,
    T.Q5_1: scalar_q5_1,
    T.IQ4_NL: scalar_iq4_nl,
}


def encoder_rows() -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((16, 64)).astype(np.float32)
    ties = np.arange(-64, 64).reshape(2, 64) / 2
    ties[:, 0], ties[:, 32] = 127, 127
    opposite = np.tile(np.array([3, -3, 1.5, -1.5]), (2, 16))
    levels = np.array(LEVELS + [(a + b) / 2 for a, b in pairwise(LEVELS)] + [0])
    return {
        "normal": normal,
        "magnitudes": normal * np.logspace(-30, 30, 16, dtype=np.float32)[:, None],
        "whole and half steps": ties.astype(np.float32),
        "just below a tie": np.nextafter(ties.astype(np.float32), np.float32(0)),
        "sixteen steps": (rng.integers(-16, 17, (8, 64)) / 2).astype(np.float32),
        "equal magnitudes of both signs": opposite.astype(np.float32),
        "zeros": np.zeros((1, 64), np.float32),
        "negative zeros": np.full((1, 64), -0.0, np.float32),
        "constant": np.full((2, 64), -2.5, np.float32),
        "one spike": np.eye(2, 64, dtype=np.float32) * -1e4,
        "denormals": normal * np.float32(1e-39),
        "scale underflows float16": normal * np.float32(1e-9),
        "scale overflows float16": normal * np.float32(1e8),
        "levels and their midpoints": np.stack((levels, -levels)).astype(np.float32),
    }


@pytest.mark.parametrize("kind", by_name(SCALAR), ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", encoder_rows())
def test_encoder_equals_the_scalar_loop(kind: GgmlType, name: str) -> None:
    rows = encoder_rows()[name]
    rows = rows[:, : rows.shape[1] // 32 * 32]
    with np.errstate(all="ignore"):
        need = b"".join(SCALAR[kind](list(block)) for block in rows.reshape(-1, 32))
    coded = encode(kind, rows)
    assert coded.shape == (len(rows), kind.row_bytes(rows.shape[1]))
    assert coded.tobytes() == need


def test_q8_0_rounds_ties_away_from_zero() -> None:
    row = np.zeros(32, np.float32)
    row[:7] = [127, 0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997]
    assert encode(T.Q8_0, row)[2:9].view(np.int8).tolist() == [127, 1, -1, 2, -3, 0, 0]


def test_q4_0_takes_the_sign_of_the_first_of_equal_magnitudes() -> None:
    row = np.zeros(32, np.float32)
    row[3], row[20] = 4, -4
    assert decode(T.Q4_0, encode(T.Q4_0, row))[3] == 4
    assert decode(T.Q4_0, encode(T.Q4_0, -row))[3] == -4


def test_codes_come_from_the_scale_before_it_is_rounded() -> None:
    # 1/2049.5 rounds to a smaller float16; with that scale the second value would be coded one higher.
    row = np.zeros(32, np.float32)
    row[0] = np.float32(127 * (1 + 2.0**-11 - 2.0**-20))
    rounded = np.float32(np.float16(row[0] / np.float32(127)))
    row[1] = np.float32(100.5) * rounded * np.float32(1.0001)
    assert half_away(row[1] / rounded) == 101
    assert encode(T.Q8_0, row)[3] == half_away(row[1] * inverse(row[0] / f(127))) == 100


SPECIAL_BITS = np.array(
    [
        0,
        0x80000000,
        1,
        0x007FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0xFFC00000,
        0x7F7FFFFF,
        0x3F808000,
        0x3F818000,
    ],
    np.uint32,
)


def test_bf16_rounds_to_nearest_even_and_quiets_nan() -> None:
    def scalar(bits: int) -> int:
        if bits & 0x7FFFFFFF > 0x7F800000:
            return bits >> 16 | 64
        return bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF

    rng = np.random.default_rng(3)
    bits = np.concatenate((SPECIAL_BITS, rng.integers(0, 1 << 32, 2000, dtype=np.uint64).astype(np.uint32)))
    need = struct.pack(f"<{len(bits)}H", *(scalar(int(b)) for b in bits))
    assert encode(T.BF16, bits.view(np.float32)).tobytes() == need


def test_f16_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(4)
    values = (rng.standard_normal(2000) * np.logspace(-9, 4, 2000)).astype(np.float32)
    values = np.concatenate((values, np.array([2049, 2051, 65504, 2.0**-25, 2.0**-24 * 1.5], np.float32)))
    assert encode(T.F16, values).tobytes() == b"".join(struct.pack("<e", float(v)) for v in values)


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16], ids=lambda kind: kind.name)
def test_float_types_carry_infinities_and_nan(kind: GgmlType) -> None:
    row = np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)
    np.testing.assert_array_equal(decode(kind, encode(kind, row)), row)


@pytest.mark.parametrize("kind", by_name(SCALAR), ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_block_types_refuse_values_that_are_not_finite(kind: GgmlType, value: float) -> None:
    row = np.zeros(32, np.float32)
    row[5] = value
    with pytest.raises(InvalidArgument, match=kind.name):
        encode(kind, row)


@pytest.mark.parametrize("kind", [T.Q4_1, T.Q5_1], ids=lambda kind: kind.name)
def test_ranged_types_refuse_a_range_that_overflows(kind: GgmlType) -> None:
    row = np.zeros(32, np.float32)
    row[0], row[1] = 3e38, -3e38
    with pytest.raises(InvalidArgument, match="range"):
        encode(kind, row)


@pytest.mark.parametrize("kind", by_name(set(T) - ENCODABLE), ids=lambda kind: kind.name)
def test_type_without_encoder_is_refused_by_name(kind: GgmlType) -> None:
    with pytest.raises(Unsupported, match=kind.name):
        encode(kind, np.zeros(256, np.float32))


def test_codecs_agree_with_the_public_gguf_package() -> None:
    gguf = pytest.importorskip("gguf", reason="the optional comparison needs the package gguf")
    rng = np.random.default_rng(11)
    rows = rng.standard_normal((8, 256)).astype(np.float32)
    for kind in by_name(DECODABLE - {T.F32, T.F16}):
        raw = rng.integers(0, 256, (8, kind.block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            need = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind.id)).reshape(-1)
        np.testing.assert_array_equal(decode(kind, raw), need, err_msg=kind.name)
    for kind in (T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1):
        need = gguf.quantize(rows, gguf.GGMLQuantizationType(kind.id)).view(np.uint8)
        np.testing.assert_array_equal(encode(kind, rows), need, err_msg=kind.name)
