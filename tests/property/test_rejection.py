"""Drafts that are accepted by their probability leave the distribution as it is.

The distribution of what is emitted is summed up exactly over every draft and both outcomes; what the noise makes of it
is counted over many positions, whose expected deviation is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvstream.errors import InvalidArgument
from pykvstream.sampling import Distribution, Sampler, SamplingParams
from pykvstream.sampling.noise import Noise
from pykvstream.sampling.rejection import is_accepted, residual

N_VOCAB = 6
PARAMS = (
    SamplingParams(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=1.0, top_k=4, top_p=0.9),
    SamplingParams(temperature=1.3, repeat_penalty=1.4, presence_penalty=0.3, logit_bias={2: -np.inf}),
)
N_DRAWS = 4000
NOISY = Noise(12345)
"""What the tests draw drafts with: a stream of its own."""

WEIGHTS = st.lists(st.sampled_from((0.0, 1e-12, 0.1, 0.2, 0.5, 1.0)), min_size=N_VOCAB, max_size=N_VOCAB)
DISTRIBUTIONS = WEIGHTS.filter(any).map(lambda w: as_distribution(np.array(w) / sum(w)))


def as_distribution(weights: npt.NDArray[np.float64]) -> Distribution:
    ids = np.flatnonzero(weights)
    return Distribution(ids.astype(np.int64), weights[ids])


def dense(d: Distribution) -> npt.NDArray[np.float64]:
    full = np.zeros(N_VOCAB)
    full[d.ids] = d.weights
    return full


def emitted(p: Distribution, q: Distribution) -> npt.NDArray[np.float64]:
    """What comes out: for each draft the chance that it stays, and what is drawn in its place."""
    left = dense(residual(p, q))
    full = np.zeros(N_VOCAB)
    for token in q.ids:
        stays = min(1.0, p.of(int(token)) / q.of(int(token)))
        full[token] += q.of(int(token)) * stays
        full += q.of(int(token)) * (1 - stays) * left / left.sum()
    return full


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS)
def test_what_is_emitted_has_the_distribution_of_the_target(p: Distribution, q: Distribution) -> None:
    np.testing.assert_allclose(emitted(p, q), dense(p), atol=1e-14)


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS)
def test_the_share_that_is_accepted_is_what_both_have_in_common(p: Distribution, q: Distribution) -> None:
    accepted = sum(q.of(t) * min(1.0, p.of(t) / q.of(t)) for t in q.ids.tolist())
    assert accepted == pytest.approx(np.minimum(dense(p), dense(q)).sum())


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS, share=st.floats(1e-9, 1 - 1e-9))
def test_a_draft_stays_exactly_below_its_ratio(p: Distribution, q: Distribution, share: float) -> None:
    for token in q.ids.tolist():
        assert is_accepted(p, q, token, share) == (share * q.of(token) < p.of(token))


@given(p=DISTRIBUTIONS, token=st.integers(0, N_VOCAB - 1))
def test_a_draft_that_was_not_drawn_is_rejected_into_the_others(p: Distribution, token: int) -> None:
    left = residual(p, Distribution.certain(token))
    if p.of(token) < 1:
        assert token not in left.ids
        assert dict(zip(left.ids, left.weights, strict=True)) == {
            i: w for i, w in zip(p.ids, p.weights, strict=True) if i != token
        }


def test_a_draft_that_its_distribution_cannot_draw_is_refused() -> None:
    p = as_distribution(np.full(N_VOCAB, 1 / N_VOCAB))
    with pytest.raises(InvalidArgument, match=r"token 3, which has the probability 0\.0"):
        is_accepted(p, Distribution.certain(2), 3, 0.5)


def test_equal_distributions_accept_everything_and_leave_the_target() -> None:
    p = as_distribution(np.array([0.1, 0.2, 0.3, 0.1, 0.2, 0.1]))
    assert all(is_accepted(p, p, token, 1 - 1e-16) for token in range(N_VOCAB))
    assert residual(p, p) is p


def row_of(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1.5, N_VOCAB).astype(np.float32)


def sampler_of(params: SamplingParams) -> Sampler:
    sampler = Sampler(params, seed=99, n_vocab=N_VOCAB)
    for token in (1, 1, 4):
        sampler.accept(token)
    return sampler


@pytest.mark.parametrize("params", PARAMS)
def test_the_distribution_is_that_which_tokens_are_chosen_from(params: SamplingParams) -> None:
    sampler, row = sampler_of(params), row_of(1)
    p = sampler.distribution(row, 0)
    assert p.weights.sum() == pytest.approx(1)
    assert_drawn_from(p, [sampler.choose(row, position).token for position in range(N_DRAWS)])


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("drafted", range(N_VOCAB))
def test_judged_drafts_that_follow_the_text_keep_the_distribution(params: SamplingParams, drafted: int) -> None:
    sampler, row = sampler_of(params), row_of(2)
    p = sampler.distribution(row, 0)
    tokens = [sampler.judge(row, position, drafted).token for position in range(N_DRAWS)]
    assert_drawn_from(p, tokens)


@pytest.mark.parametrize("params", PARAMS)
def test_judged_drafts_that_were_drawn_keep_the_distribution(params: SamplingParams) -> None:
    sampler, row = sampler_of(params), row_of(3)
    p = sampler.distribution(row, 0)
    q = as_distribution(np.array([0.3, 0.1, 0.1, 0.0, 0.2, 0.3]))
    tokens, n_stayed = [], 0
    for position in range(N_DRAWS):
        scores = np.log(q.weights) + NOISY.gumbel(position, q.ids)
        drafted = int(q.ids[scores.argmax()])
        tokens.append(sampler.judge(row, position, drafted, q).token)
        n_stayed += tokens[-1] == drafted
    assert_drawn_from(p, tokens)
    # What is drawn in place of a draft is never the draft: there q exceeds p.
    common = np.minimum(dense(p), dense(q)).sum()
    assert n_stayed / N_DRAWS == pytest.approx(common, abs=5 * np.sqrt(common * (1 - common) / N_DRAWS))


def assert_drawn_from(p: Distribution, tokens: list[int]) -> None:
    """No frequency is more than five deviations off; the noise is fixed, so this never fails by chance."""
    counts = Counter(tokens)
    for token, expected in enumerate(dense(p)):
        deviation = np.sqrt(expected * (1 - expected) / len(tokens))
        assert abs(counts[token] / len(tokens) - expected) <= 5 * deviation + 1e-12


def test_judging_changes_nothing_and_is_a_function_of_seed_and_position() -> None:
    sampler, row = sampler_of(PARAMS[0]), row_of(4)
    before = sampler.state()
    first = [sampler.judge(row, position, 1) for position in range(50)]
    assert [sampler.judge(row, position, 1) for position in reversed(range(50))] == first[::-1]
    assert sampler.state() == before


@given(drafted=st.integers(0, N_VOCAB - 1), seed=st.integers(0, 1000))
def test_without_temperature_a_draft_is_right_where_it_is_the_choice(drafted: int, seed: int) -> None:
    sampler, row = sampler_of(replace(PARAMS[2], temperature=0.0)), row_of(seed)
    assert sampler.judge(row, 0, drafted) == sampler.choose(row, 0)
    assert sampler.distribution(row, 0).of(sampler.choose(row, 0).token) == 1.0
