"""Divergence beside a plain loop, and what a resident share means."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.errors import IntegrityError, InvalidArgument, Unsupported
from pykvstream.eval.divergence import Difference, Divergence
from pykvstream.eval.opening import CachePair, Opening, held_placement, require_streamed, share_pages
from pykvstream.runtime.layout import CacheShape, PhaseNeed, plan_arena


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(each) for each in row)
    return [math.exp(each) / total for each in row]


def logits_of(seed: int, n_rows: int = 9, n_cols: int = 13) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((n_rows, n_cols))).astype(np.float32)


def test_divergence_is_that_of_a_plain_loop() -> None:
    one, two = logits_of(1), logits_of(2)
    plain, same = [], 0
    for p_row, q_row in zip(one.tolist(), two.tolist(), strict=True):
        p, q = softmax(p_row), softmax(q_row)
        plain.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        same += p.index(max(p)) == q.index(max(q))
    found = Difference()
    found.add(one[:4], two[:4])
    found.add(one[4:], two[4:])
    assert found.total == pytest.approx(sum(plain)) and found.largest == pytest.approx(max(plain))
    assert (found.n_tokens, found.n_same_first, found.n_unequal) == (9, same, one.size)


def test_equal_logits_have_a_divergence_of_exactly_zero() -> None:
    found = Difference()
    found.add(logits_of(1), logits_of(1).copy())
    assert (found.total, found.largest, found.n_unequal, found.n_same_first) == (0.0, 0.0, 0, 9)


def test_one_bit_of_one_logit_is_noticed() -> None:
    one, two = logits_of(1), logits_of(1)
    two.view(np.uint32)[3, 5] ^= 1
    found = Difference()
    found.add(one, two)
    assert found.n_unequal == 1


def test_a_negative_zero_is_another_logit() -> None:
    found = Difference()
    found.add(np.zeros((1, 2), np.float32), np.array([[0.0, -0.0]], np.float32))
    assert (found.n_unequal, found.total) == (1, 0.0)


@pytest.mark.parametrize(("ctx", "percent", "pages"), [(8192, 50, 16), (8192, 10, 3), (4096, 10, 2), (2048, 99, 7)])
def test_a_share_is_pages_rounded_down_but_never_less_than_the_tail(ctx: int, percent: float, pages: int) -> None:
    assert share_pages(ctx, 256, percent) == pages


def test_a_share_with_which_nothing_streams_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="nothing would stream"):
        share_pages(512, 256, 10)
    with pytest.raises(InvalidArgument, match="below 100"):
        share_pages(8192, 256, 100)


@pytest.mark.parametrize("n_pages", [2, 5, 15])
def test_a_held_placement_fits_the_smallest_arena_that_is_made_for_it(n_pages: int) -> None:
    shape = CacheShape(3, 4096, 3 * 4096)
    need = PhaseNeed("prefill", 256, 10_000)
    roomy = plan_arena(shape, 10**7, 4096, [need]).phases[0]
    placement = held_placement(roomy, n_pages)
    assert placement.resident_pages == (n_pages,) * 3
    assert 1 <= placement.ring_slots <= 3 * (16 - n_pages)
    exact = plan_arena(shape, placement.n_slots * 4096 + 10_048, 4096, [need]).phases[0]
    assert exact.pool.n_slots == placement.n_slots


def test_cache_pairs_are_spelled_alike() -> None:
    assert CachePair.parse("Q8_0") == CachePair.parse("q8_0/q8_0") == CachePair("q8_0", "q8_0")
    assert str(CachePair.parse("f16/q4_0")) == "f16/q4_0"
    with pytest.raises(Unsupported, match="q9_9"):
        CachePair.parse("q8_0/q9_9")


def test_a_run_that_streams_something_else_than_it_must_is_refused() -> None:
    require_streamed(12, 12, "a run")
    with pytest.raises(IntegrityError, match="a run: 0 bytes came through the ring, 12 had to"):
        require_streamed(0, 12, "a run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"percents": (0.0,)}, "share of 0 %"),
        ({"contexts": (512,)}, "nothing would stream"),
        ({"references": ("bf16",)}, "resident, f32"),
        ({"contexts": (2048,)}, "the text has"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(given: dict[str, object], words: str) -> None:
    asked: dict[str, object] = {"contexts": (1024,), "pairs": (CachePair("q8_0", "q8_0"),), "percents": (50.0,)}
    with pytest.raises(InvalidArgument, match=words):
        Divergence(Opening("demo-hybrid", threads=1), "Too short a text.", **{**asked, **given})  # type: ignore[arg-type]
