"""Sampling against a slow chain in plain Python that shares no code with the product.

The slow chain uses ``math``, lists and integers. Where one of its cuts or comparisons is closer than 1e-9 to
a tie, two correct implementations may differ by a rounding error; such examples are discarded here, and exact
ties are the subject of ``tests/unit/test_sampling.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykvstream.errors import NumericError
from pykvstream.sampling import Sampler, SamplingParams
from pykvstream.sampling.noise import Noise
from pykvstream.sampling.truncation import truncate_row
from tests.examples import examples

INF = math.inf
CLOSE = 1e-9


class Slow:
    """The chain, one obvious step at a time; ``margin`` is the smallest distance to another decision."""

    def __init__(self, params: SamplingParams, seed: int, position: int) -> None:
        self.params, self.seed, self.position, self.margin = params, seed, position, INF

    def at_least(self, value: float, bound: float) -> bool:
        self.margin = min(self.margin, abs(value - bound) / max(1.0, abs(bound)))
        return value >= bound

    def adjusted(self, logits: list[float], history: list[int]) -> list[float]:
        params, row = self.params, list(logits)
        for token, bias in params.logit_bias.items():
            row[token] = f32(row[token] + bias)
        window = tail(history, params.penalty_last_n)
        for token in set(window):
            x = row[token]
            x = x / params.repeat_penalty if x > 0 else x * params.repeat_penalty
            row[token] = f32(x - (window.count(token) * params.frequency_penalty + params.presence_penalty))
        if params.dry_multiplier > 0:
            for token, length in slow_matches(tail(history, params.dry_last_n), params.dry_breakers).items():
                excess = length - params.dry_allowed_length
                if excess >= 0:
                    row[token] = f32(row[token] - params.dry_multiplier * params.dry_base**excess)
        return row

    def softmax(self, kept: list[tuple[int, float]]) -> list[float]:
        peak = max(x for _, x in kept)
        weights = [math.exp(x - peak) for _, x in kept]
        return [w / math.fsum(weights) for w in weights]

    def filtered(self, row: list[float]) -> list[tuple[int, float]]:
        params = self.params
        kept = sorted(((i, x) for i, x in enumerate(row) if x > -INF), key=lambda c: (-c[1], c[0]))
        if params.top_n_sigma > 0:
            mean = math.fsum(x for _, x in kept) / len(kept)
            sigma = math.sqrt(math.fsum((x - mean) ** 2 for _, x in kept) / len(kept))
            floor = kept[0][1] - params.top_n_sigma * sigma
            kept = [kept[0]] + [c for c in kept[1:] if self.at_least(c[1], floor)]
        if params.top_k > 0:
            kept = kept[: params.top_k]
        if params.typical_p < 1:
            kept = self.typical(kept)
        if params.top_p < 1:
            total, prefix = 0.0, []
            for candidate, p in zip(kept, self.softmax(kept), strict=True):
                prefix.append(candidate)
                total += p
                if self.at_least(total, params.top_p):
                    break
            kept = prefix
        if params.min_p > 0:
            floor = kept[0][1] + math.log(params.min_p)
            kept = [kept[0]] + [c for c in kept[1:] if self.at_least(c[1], floor)]
        if params.xtc_probability > 0:
            uniform = slow_uniform(self.seed, 0, self.position, 1)
            if uniform < params.xtc_probability:
                above = [self.at_least(p, params.xtc_threshold) for p in self.softmax(kept)]
                kept = kept[max(0, sum(above) - 1) :]
        return kept

    def typical(self, kept: list[tuple[int, float]]) -> list[tuple[int, float]]:
        probabilities = self.softmax(kept)
        entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
        peak = max(x for _, x in kept)
        log_total = math.log(math.fsum(math.exp(x - peak) for _, x in kept))
        ranked = []
        for rank, (token, x) in enumerate(kept):
            ranked.append((abs(-(x - peak - log_total) - entropy), rank, token, x))
        # Equal logits have exactly equal distances in both implementations; other near ties are discarded.
        for a in ranked:
            for b in ranked:
                if a[3] != b[3]:
                    self.margin = min(self.margin, abs(a[0] - b[0]))
        total, chosen = 0.0, []
        for _, rank, token, x in sorted(ranked):
            chosen.append((rank, token, x))
            total += probabilities[rank]
            if self.at_least(total, self.params.typical_p):
                break
        return [(token, x) for _, token, x in sorted(chosen)]

    def choose(self, logits: list[float], history: list[int]) -> int:
        row = self.adjusted(logits, history)
        if self.params.temperature <= 0:
            return row.index(max(row))
        kept = self.filtered(row)
        peak = kept[0][1]
        scores = []
        for token, x in kept:
            noise = -math.log(-math.log(slow_uniform(self.seed, token, self.position, 0)))
            scores.append(((x - peak) / self.params.temperature + noise, token))
        scores.sort(reverse=True)
        if len(scores) > 1:
            self.margin = min(self.margin, scores[0][0] - scores[1][0])
        return scores[0][1]


def f32(x: float) -> float:
    return float(np.float32(x))


def tail(history: list[int], n: int) -> list[int]:
    return history if n < 0 else history[len(history) - n :] if n < len(history) else history


def slow_matches(window: list[int], breakers: tuple[int, ...]) -> dict[int, int]:
    best: dict[int, int] = {}
    for follower in range(1, len(window)):
        length = 0
        while length < follower:
            a, b = window[follower - 1 - length], window[len(window) - 1 - length]
            if a != b or a in breakers:
                break
            length += 1
        token = window[follower]
        if length and token not in breakers:
            best[token] = max(best.get(token, 0), length)
    return best


def slow_uniform(seed: int, token: int, position: int, stream: int) -> float:
    c = [token, position % 2**32, position >> 32, stream]
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return ((c[0] >> 6) * 2**26 + (c[1] >> 6) + 0.5) / 2**52


def unit_interval(off: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(off), st.floats(0.01, 0.99))


@st.composite
def logit_rows(draw: st.DrawFn, n: int) -> NDArray[np.float32]:
    """Coarse values make ties likely, fine values make cuts likely; some entries are masked."""
    value = draw(
        st.sampled_from(
            [
                st.integers(-3, 3).map(float),
                st.integers(-80, 80).map(lambda i: i / 16),
                st.floats(-30, 30, width=32),
            ]
        )
    )
    row = draw(st.lists(st.one_of(value, value, value, st.just(-INF)), min_size=n, max_size=n))
    row[draw(st.integers(0, n - 1))] = draw(value)
    return np.array(row, dtype=np.float32)


@st.composite
def settings_for(draw: st.DrawFn, n: int) -> SamplingParams:
    token = st.integers(0, n - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.8, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 40])),
        top_p=draw(unit_interval(1.0)),
        min_p=draw(unit_interval(0.0)),
        typical_p=draw(unit_interval(1.0)),
        top_n_sigma=draw(st.sampled_from([-1.0, 0.5, 1.0, 2.5])),
        xtc_probability=draw(st.sampled_from([0.0, 0.5, 1.0])),
        xtc_threshold=draw(st.floats(0.0, 0.6)),
        repeat_penalty=draw(st.sampled_from([1.0, 1.1, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.2])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        penalty_last_n=draw(st.sampled_from([0, 1, 3, 64, -1])),
        dry_multiplier=draw(st.sampled_from([0.0, 0.8])),
        dry_allowed_length=draw(st.integers(1, 3)),
        dry_last_n=draw(st.sampled_from([0, 4, -1])),
        dry_breakers=tuple(draw(st.lists(token, max_size=2))),
        logit_bias=draw(st.dictionaries(token, st.floats(-4, 4), max_size=3)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], SamplingParams, list[int], int, int]:
    n = draw(st.integers(1, 24))
    history = draw(st.lists(st.integers(0, min(n - 1, 4)), max_size=24))
    seed = draw(st.integers(0, 2**64 - 1))
    position = draw(st.integers(0, 2**40))
    return draw(logit_rows(n)), draw(settings_for(n)), history, seed, position


def sampler_with(params: SamplingParams, seed: int, n_vocab: int, history: list[int]) -> Sampler:
    sampler = Sampler(params, seed=seed, n_vocab=n_vocab)
    for token in history:
        sampler.accept(token)
    return sampler


@settings(max_examples=examples(600), deadline=None)
@given(cases())
def test_choice_equals_the_slow_chain(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int],
) -> None:
    row, params, history, seed, position = case
    slow = Slow(params, seed, position)
    expected = slow.choose(row.tolist(), history)
    assume(slow.margin > CLOSE)
    assert sampler_with(params, seed, row.size, history).choose(row, position).token == expected


@settings(max_examples=examples(400), deadline=None)
@given(cases())
def test_filtered_set_equals_the_slow_chain(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int],
) -> None:
    row, params, _, seed, position = case
    slow = Slow(params, seed, position)
    expected = slow.filtered(row.tolist())
    assume(slow.margin > CLOSE)
    kept = truncate_row(row, params, Noise(seed), position)
    assert list(zip(kept.ids.tolist(), kept.logits.tolist(), strict=True)) == expected


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.sampled_from([0, 1, 3, 40, 700]), st.booleans())
def test_filtered_set_of_a_wide_row_equals_the_slow_chain(
    data_seed: int, n: int, top_k: int, is_coarse: bool
) -> None:
    row = (np.random.default_rng(data_seed).standard_normal(n) * 3).astype(np.float32)
    row = np.round(row) if is_coarse else row
    params = SamplingParams(top_k=top_k, top_n_sigma=2.0, top_p=0.9, min_p=0.01)
    slow = Slow(params, data_seed, 0)
    expected = slow.filtered(row.tolist())
    assume(slow.margin > CLOSE)
    kept = truncate_row(row, params, Noise(data_seed), 0)
    assert list(zip(kept.ids.tolist(), kept.logits.tolist(), strict=True)) == expected


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.lists(st.floats(-(2.0**100), 2.0**100, width=32) | st.just(-INF), min_size=1, max_size=8))
def test_choice_ignores_padding_beyond_the_vocabulary(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int], padding: list[float]
) -> None:
    row, params, history, seed, position = case
    sampler = sampler_with(params, seed, row.size, history)
    wide = np.concatenate([row, np.array(padding, dtype=np.float32)])
    chosen = sampler.choose(wide, position)
    assert chosen.token < row.size
    assert chosen == sampler.choose(row, position)


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_choice_ignores_logits_below_every_cut(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int], shuffle_seed: int
) -> None:
    row, params, history, seed, position = case
    params = replace(params, top_k=max(1, params.top_k), top_n_sigma=-1.0, temperature=0.8)
    sampler = sampler_with(params, seed, row.size, history)
    adjusted = Slow(params, seed, position).adjusted(row.tolist(), history)
    ranked = sorted(range(row.size), key=lambda i: (-adjusted[i], i))
    touched = set(history) | set(params.logit_bias)
    below = [
        i
        for i in ranked[params.top_k :]
        if i not in touched and adjusted[i] < adjusted[ranked[params.top_k - 1]]
    ]
    changed = row.copy()
    changed[np.array(below, dtype=np.int64)] = np.random.default_rng(shuffle_seed).permutation(row[below])
    assert sampler.choose(changed, position).token == sampler.choose(row, position).token


@settings(max_examples=examples(200), deadline=None)
@given(cases())
def test_choice_is_pure_and_independent_of_object_identity(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int],
) -> None:
    row, params, history, seed, position = case
    sampler = sampler_with(params, seed, row.size, history)
    kept_row, kept_state = row.copy(), sampler.state()
    first = sampler.choose(row, position)
    sampler.choose(row, position + 1)
    sampler.accept(first.token)
    sampler.truncate(len(history))
    restored = Sampler(params, seed=0, n_vocab=row.size)
    restored.restore(kept_state)
    strided = np.repeat(row, 3)[::3]
    assert first == sampler.choose(row, position) == restored.choose(strided, position)
    assert sampler.fork(seed).choose(row, position) == first
    assert sampler.state() == kept_state
    assert np.array_equal(row, kept_row)


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.sampled_from([math.nan, INF]), st.integers(0, 23))
def test_choice_refuses_nan_and_infinity_whatever_the_settings(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int], bad: float, index: int
) -> None:
    row, params, history, seed, position = case
    index %= row.size
    row[index] = bad
    sampler = sampler_with(params, seed, row.size, history)
    with pytest.raises(NumericError, match=f"position {position}: index {index} is"):
        sampler.choose(row, position)


@settings(max_examples=examples(200), deadline=None)
@given(cases())
def test_choice_never_takes_a_masked_token(
    case: tuple[NDArray[np.float32], SamplingParams, list[int], int, int],
) -> None:
    row, params, history, seed, position = case
    chosen = sampler_with(params, seed, row.size, history).choose(row, position)
    assert row[chosen.token] > -INF
    assert -INF < chosen.logprob <= 1e-6
