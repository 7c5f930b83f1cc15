"""What decoders of all block formats share.

Shapes: a batch of blocks is [n, block_bytes]; a field of every block is a column [n, 1].
Holds: ``Bytes``, ``Floats``, ``half``, ``nibbles``, ``as_float``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def as_float(codes: npt.NDArray[Any]) -> Floats:
    """Small integers as float32, exactly."""
    return codes.astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high nibbles, along the last axis."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)
