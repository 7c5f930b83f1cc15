"""Chunks, scores and error bars of the perplexity, beside plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pykvstream.errors import InvalidArgument
from pykvstream.eval.perplexity import chunks_of, estimate, nll_of_rows, running_estimates


def test_nll_is_that_of_a_plain_softmax() -> None:
    rng = np.random.default_rng(3)
    logits = (20 * rng.standard_normal((7, 11))).astype(np.float32)
    targets = rng.integers(0, 11, 7).tolist()
    for row, target, found in zip(logits.tolist(), targets, nll_of_rows(logits, targets, 11), strict=True):
        plain = -math.log(math.exp(row[target]) / sum(math.exp(each) for each in row))
        # Exponentials are float32, each within 2e-7 of its own.
        assert found == pytest.approx(plain, rel=1e-12, abs=4e-7)


def test_nll_of_logits_far_from_zero_does_not_overflow() -> None:
    logits = np.array([[3e4, 3e4, -3e4]], np.float32)
    assert nll_of_rows(logits, [1], 3)[0] == pytest.approx(math.log(2))


def test_estimate_is_mean_and_deviation_of_the_mean() -> None:
    scores = np.random.default_rng(5).exponential(2.0, 400)
    found, error = estimate(float(scores.sum()), float((scores**2).sum()), len(scores))
    assert found == pytest.approx(math.exp(scores.mean()))
    assert error == pytest.approx(found * scores.std() / math.sqrt(len(scores) - 1))


def test_equal_scores_have_no_error_bar() -> None:
    assert estimate(8.0, 16.0, 4) == (pytest.approx(math.exp(2.0)), 0.0)
    assert estimate(2.0, 4.0, 1)[1] == 0.0


def test_chunks_do_not_overlap_and_drop_the_rest() -> None:
    assert chunks_of(range(23), 5, None, None) == [list(range(i, i + 5)) for i in (0, 5, 10, 15)]
    assert len(chunks_of(range(23), 5, None, 2)) == 2
    assert len(chunks_of(range(23), 5, None, 99)) == 4


def test_the_leading_token_takes_the_place_of_the_first_of_each_chunk() -> None:
    ids = list(range(100, 112))
    assert chunks_of(ids, 4, 7, None) == [[7, 101, 102, 103], [7, 105, 106, 107], [7, 109, 110, 111]]
    assert ids == list(range(100, 112))


@pytest.mark.parametrize(("n_tokens", "ctx"), [(9, 5), (100, 3)])
def test_what_has_no_two_chunks_is_refused_with_both_numbers(n_tokens: int, ctx: int) -> None:
    with pytest.raises(InvalidArgument, match=str(ctx)):
        chunks_of(range(n_tokens), ctx, None, None)


def test_running_estimates_end_at_the_whole() -> None:
    rows = [{"tokens": 3, "nll": 6.0, "nll_squared": 14.0}, {"tokens": 1, "nll": 1.0, "nll_squared": 1.0}]
    values, errors = running_estimates(rows)  # type: ignore[arg-type]
    assert values[0] == pytest.approx(math.exp(2.0))
    assert (values[1], errors[1]) == estimate(7.0, 15.0, 4)
