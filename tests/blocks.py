"""Scales of random blocks: where each type keeps them, and how to write them.

Shapes: blocks are [n, block_bytes].
Holds: ``FLOORS_AT``, ``put_scales``, ``put_halves``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import GgmlType

Bytes = npt.NDArray[np.uint8]

FLOORS_AT: Final = {
    GgmlType.Q4_1: 2, GgmlType.Q5_1: 2, GgmlType.Q2_K: 82, GgmlType.Q4_K: 2, GgmlType.Q5_K: 2,
}  # fmt: skip
"""Byte offset of the float16 minimum, or scale of minima, of the types that have one."""

_SCALES_AT = {GgmlType.Q2_K: 80, GgmlType.Q3_K: 108, GgmlType.Q6_K: 208}


def put_halves(blocks: Bytes, at: int, values: npt.ArrayLike) -> None:
    """Write float16 numbers, one for all blocks or one for each, at byte ``at``."""
    halves = np.broadcast_to(np.asarray(values, "<f2"), len(blocks))
    blocks[:, at : at + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)


def put_scales(kind: GgmlType, blocks: Bytes, values: npt.ArrayLike) -> None:
    """Give blocks of a quantized type scales: one for all, or one for each.

    The 8-bit scales of MXFP4 and NVFP4 have no sign; they get the power of two below the number or the 4-bit mantissa
    below it.
    """
    scales = np.broadcast_to(np.asarray(values, np.float64), len(blocks))
    if kind is GgmlType.MXFP4:
        blocks[:, 0] = np.clip(np.floor(np.log2(np.maximum(np.abs(scales), 1e-38))) + 128, 0, 255)
    elif kind is GgmlType.NVFP4:
        # The bits of a float16 without its lowest seven are those of the small float, 8 powers of two apart.
        bits = (np.abs(scales) / 128).astype("<f2").view(np.uint16) >> 7
        blocks[:, :4] = bits.astype(np.uint8)[:, None]
    elif kind is GgmlType.IQ1_M:
        bits = scales.astype("<f2").view(np.uint16)
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15).astype(np.uint8) << 4
    else:
        put_halves(blocks, _SCALES_AT.get(kind, 0), scales)
