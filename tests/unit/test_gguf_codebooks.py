"""Codebook and 4-bit float blocks against scalar loops, and every block type against the ``gguf`` package where it is
installed: on random blocks, and under scales that are infinite, not a number, subnormal or at the ends of their range.

Every decoded value is exact in float64 and rounded to float32 once, so values are compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.gguf import DECODABLE, GgmlType, decode
from pykvstream.gguf.grids import grid
from tests.blocks import FLOORS_AT, put_halves, put_scales
from tests.slow_codebooks import SLOW

Bytes = npt.NDArray[np.uint8]

KINDS = sorted(SLOW, key=lambda kind: kind.id)
BLOCK_KINDS = sorted((kind for kind in DECODABLE if kind.block_values > 1), key=lambda kind: kind.id)
HOSTILE_HALVES = np.array(
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01], np.uint16
).view(np.float16)
GRIDS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def random_blocks(kind: GgmlType, n: int) -> Bytes:
    return np.random.default_rng(kind.id).integers(0, 256, (n, kind.block_bytes), np.uint8)


def hostile_blocks(kind: GgmlType) -> Bytes:
    if kind in (GgmlType.MXFP4, GgmlType.NVFP4):
        blocks = random_blocks(kind, 256)
        blocks[:, 0] = np.arange(256)
        return blocks
    blocks = random_blocks(kind, len(HOSTILE_HALVES))
    with np.errstate(invalid="ignore"):
        put_scales(kind, blocks, HOSTILE_HALVES)
    if kind in FLOORS_AT:
        put_halves(blocks, FLOORS_AT[kind], np.roll(HOSTILE_HALVES, 5))
    return blocks


def extreme_blocks(kind: GgmlType) -> Iterator[Bytes]:
    for byte in (0x00, 0xFF, 0x0F, 0xF0):
        blocks = np.full((1, kind.block_bytes), byte, np.uint8)
        put_scales(kind, blocks, -0.75)
        yield blocks


def assert_equals_loop(kind: GgmlType, blocks: Bytes) -> None:
    with np.errstate(over="ignore"):
        need = np.array([value for row in blocks for value in SLOW[kind](row.tobytes())], np.float64)
        np.testing.assert_array_equal(decode(kind, blocks), need.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_decoder_equals_the_layout_on_random_blocks(kind: GgmlType) -> None:
    assert_equals_loop(kind, random_blocks(kind, 24))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_decoder_equals_the_layout_under_hostile_scales_and_extreme_codes(kind: GgmlType) -> None:
    assert_equals_loop(kind, hostile_blocks(kind))
    for blocks in extreme_blocks(kind):
        assert_equals_loop(kind, blocks)


@pytest.mark.parametrize("name", GRIDS)
def test_codebook_entries_differ_and_use_every_level(name: str) -> None:
    entries = grid(name)
    assert len(np.unique(entries, axis=0)) == len(entries)
    levels = {"IQ1": [-1, 0, 1], "IQ2": [8, 25, 43]}.get(
        name[:3], [4, 12, 20, 28, 36, 44, 52, 62] if name == "IQ3_XXS" else list(range(1, 16, 2))
    )
    assert np.unique(entries).tolist() == levels


@pytest.mark.parametrize("name", GRIDS)
def test_codebook_equals_that_of_the_gguf_package(name: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    theirs = getattr(quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(grid(name), theirs.grid.reshape(theirs.grid_shape))


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_decoder_equals_the_gguf_package(kind: GgmlType) -> None:
    gguf = pytest.importorskip("gguf")
    theirs = gguf.GGMLQuantizationType[kind.name]
    for blocks in (random_blocks(kind, 2000), hostile_blocks(kind), *extreme_blocks(kind)):
        with np.errstate(all="ignore"):
            need = gguf.quants.dequantize(blocks.reshape(-1), theirs)
        np.testing.assert_array_equal(decode(kind, blocks), need.reshape(-1))
