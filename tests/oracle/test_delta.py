"""Gated delta net layers on the CPU against float64, row by row and in chunks (P-DN).

Order: float32 sums differ from float64 by rounding alone; both forms stay within 1e-5 of the largest value, and of
each other.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.tape import DeltaMode
from tests.delta_rig import N_VOCAB, DeltaRig, Shape, Tables, open_rig
from tests.oracle.delta64 import Doubles, consume, recurrent

N_TOKENS = 150
SHAPES = (Shape(), Shape(2, 6, 32), Shape(2, 2, 64, 2), Shape(1, 3, 128, 8))


def truth(tables: Tables, tokens: NDArray[np.uint32]) -> tuple[Doubles, Doubles]:
    """Outputs of both layers ``[n, cols]``."""
    beta = tables.beta[tokens].astype(np.float64)
    alpha = tables.alpha[tokens].astype(np.float64)
    first = recurrent(*consume(tables, 0, tables.inputs[tokens].astype(np.float64), beta, alpha))
    first = first.reshape(len(tokens), -1)
    second = recurrent(*consume(tables, 1, first @ tables.mixing.T.astype(np.float64), beta, alpha))
    return first, second.reshape(len(tokens), -1)


def decode(rig: DeltaRig, tokens: NDArray[np.uint32], widths: list[int], mode: DeltaMode) -> list[NDArray[np.float32]]:
    lane = rig.lane()
    parts = []
    at = 0
    for width in widths:
        parts.append(lane.take(tokens[at : at + width].tolist(), mode).outputs[:2])
        at += width
    assert at == len(tokens) == lane.position
    lane.close()
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def cut(width: int) -> list[int]:
    """Passes of at most ``width`` rows over all tokens."""
    return [min(width, N_TOKENS - at) for at in range(0, N_TOKENS, width)]


def distance(found: NDArray[np.float32], expected: NDArray[np.float32] | Doubles) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_are_near_float64_and_each_other(shape: Shape) -> None:
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, N_TOKENS).astype(np.uint32)
    with open_rig(shape, log_rows=160) as rig:
        expected = truth(rig.tables, tokens)
        found = {
            (mode, width): decode(rig, tokens, cut(width), mode)
            for mode in DeltaMode
            for width in (1, 3, 63, 64, 65, 150)
        }
    for outputs in found.values():
        assert distance(outputs[0], expected[0]) < 1e-5
        assert distance(outputs[1], expected[1]) < 1e-5
    for width in (1, 3, 63, 64, 65, 150):
        logged, chunked = found[DeltaMode.LOGGED, width], found[DeltaMode.CHUNKED, width]
        assert max(map(distance, chunked, logged)) < 1e-5
        np.testing.assert_array_equal(logged[0], found[DeltaMode.LOGGED, 1][0])
        np.testing.assert_array_equal(logged[1], found[DeltaMode.LOGGED, 1][1])
    np.testing.assert_array_equal(found[DeltaMode.CHUNKED, 64][1], found[DeltaMode.CHUNKED, 150][1])
