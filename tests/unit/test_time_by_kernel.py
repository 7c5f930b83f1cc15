"""What a record of a card's work is summed up to, by kernel and between passes."""

from __future__ import annotations

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.bench.cuda_decode import BETWEEN, IDLE, time_by_kernel


def test_idle_time_between_passes_is_told_from_gaps_within_them() -> None:
    one_pass = [(0, 4, "embed"), (5, 9, "matmul"), (8, 12, "matmul"), (14, 15, "front")]
    ranges = [(begin + at, end + at, name) for at in (100, 130) for begin, end, name in one_pass]
    spent, counts = time_by_kernel(ranges, 2)
    assert counts == {"embed": 2, "matmul": 4, "front": 2}
    assert spent == {"embed": 8, "matmul": 14, "front": 2, IDLE: 2 * (1 + 2), BETWEEN: 130 - 115}


def test_without_a_name_of_each_pass_all_gaps_are_alike() -> None:
    spent, _ = time_by_kernel([(0, 1, "matmul"), (3, 4, "matmul"), (7, 8, "matmul")], 2)
    assert spent == {"matmul": 3, IDLE: 5}
