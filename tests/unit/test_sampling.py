"""Sampling: worked examples, boundary values, published vectors, accuracy, distribution and pinned tokens.

Everything is deterministic: the statistical tests draw with fixed seeds, so they pass always or never.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from decimal import Decimal, localcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvstream.core.candidates import best_candidates
from pykvstream.core.noise import noise_gumbel, noise_words
from pykvstream.errors import InvalidArgument, NumericError
from pykvstream.sampling import (
    Choice,
    LogitBias,
    Sampler,
    SamplerState,
    SamplingParams,
    fork_seed,
    top_logprobs,
)
from pykvstream.sampling.elementary import fixed_exp, fixed_log
from pykvstream.sampling.noise import Noise
from pykvstream.sampling.penalties import DRY_LONGEST_MATCH, longest_matches
from pykvstream.sampling.truncation import (
    Candidates,
    drop_top_choices,
    keep_min_p,
    keep_top_p,
    keep_typical,
    sigma_floor,
    top_candidates,
)
from tests.slow_noise import _LN2_HIGH, _LN2_LOW, philox, philox_round_keys, slow_exp, slow_gumbel, slow_log

INF = math.inf
OFF = SamplingParams(top_k=0, top_p=1.0, min_p=0.0)
F32_MAX = float(np.finfo(np.float32).max)


def row_of(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def candidates_of(*probabilities: float) -> Candidates:
    """Candidates with these (relative) probabilities, best first."""
    return Candidates(np.arange(len(probabilities)), np.log(np.array(probabilities)))


def greedy(row: NDArray[np.float32], history: tuple[int, ...] = (), **params: object) -> int:
    sampler = Sampler(SamplingParams(temperature=0.0, **params), seed=0, n_vocab=row.size)  # type: ignore[arg-type]
    for token in history:
        sampler.accept(token)
    return sampler.choose(row, 0).token


# Philox and its derivatives


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_equals_the_published_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox(np.array(counter, dtype=np.uint64)[:, None], philox_round_keys(key[0] | key[1] << 32))
    assert words[:, 0].tolist() == expected
    seed, number = key[0] | key[1] << 32, counter[1] | counter[2] << 32
    assert noise_words(seed, number, counter[3], np.array([counter[0]])).tolist() == [expected]


@pytest.mark.parametrize("stream", range(5))
def test_noise_has_the_bits_of_its_slow_twin(stream: int) -> None:
    tokens = np.concatenate([np.arange(500), np.array([49_151, 248_319, (1 << 32) - 1])])
    for seed, number in ((0, 0), (7, 1), ((1 << 64) - 1, (1 << 64) - 1), (1 << 33, 3 << 40)):
        assert noise_gumbel(seed, number, stream, tokens).tolist() == slow_gumbel(seed, number, stream, tokens).tolist()


@pytest.mark.parametrize("k", [1, 2, 40, 255, 256, 300])
def test_the_best_candidates_are_those_of_a_whole_sort(k: int) -> None:
    rng = np.random.default_rng(k)
    rows = [rng.standard_normal(n).astype(np.float32) for n in (300, 1000, 50_000)]
    rows += [np.round(row * 4) / np.float32(4) for row in rows]  # ties, and zeros of both signs
    rows += [np.full(300, -np.inf, np.float32), np.arange(400, dtype=np.float32), -np.arange(400, dtype=np.float32)]
    rows[-3][[7, 299]] = [-F32_MAX, 1.0]
    for row in rows:
        finite = np.flatnonzero(row > -np.inf)
        order = finite[np.lexsort((finite, -row[finite].astype(np.float64)))][:k]
        found = top_candidates(row, k)
        for ids, logits in (best_candidates(row, k), (found.ids, found.logits)):
            assert ids.tolist() == order.tolist()
            assert logits.tobytes() == row[order].astype(np.float64).tobytes()


def test_exp_and_log_have_the_bits_of_their_slow_twins() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([-rng.exponential(30.0, 200_000), np.array([0.0, -0.0, -708.0, -708.1, -1e300, -INF])])
    assert fixed_exp(x).tobytes() == slow_exp(x).tobytes()
    powers = 2.0 ** np.arange(-1022.0, 1024.0)
    positive = np.concatenate([rng.random(200_000), np.exp(rng.uniform(-700, 700, 100_000)), powers])
    assert fixed_log(positive).tobytes() == slow_log(positive).tobytes()


def test_noise_of_a_token_does_not_depend_on_the_others_asked_for() -> None:
    noise = Noise(7)
    everything = noise.gumbel(3, np.arange(10_000))
    some = np.array([9_999, 0, 4_095, 4_096, 17])
    assert noise.gumbel(3, some).tolist() == everything[some].tolist()


def test_noise_differs_by_seed_position_and_token() -> None:
    tokens = np.arange(50)
    values = [
        Noise(seed).gumbel(position, tokens).tolist()
        for seed in (0, 1, 1 << 32)
        for position in (0, 1, 1 << 32)
    ]
    assert len({x for row in values for x in row}) == 9 * 50


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    drawn = np.sort(Noise(11).gumbel(0, np.arange(200_000)))
    expected = np.exp(-np.exp(-drawn))
    distance = np.abs(expected - (np.arange(drawn.size) + 0.5) / drawn.size).max()
    # Kolmogorov-Smirnov at the 0.1 % level.
    assert distance < 1.95 / math.sqrt(drawn.size)


def test_fork_seed_is_reproducible_and_distinct() -> None:
    seeds = {fork_seed(seed, k) for seed in range(50) for k in range(50)}
    assert len(seeds) == 2500
    assert fork_seed(5, 3) == fork_seed(5, 3)
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert any(seed >= 1 << 63 for seed in seeds)


# exp and log


def ulps(values: NDArray[np.float64], exact: list[float]) -> float:
    errors = (abs(a - b) / math.ulp(b) for a, b in zip(values.tolist(), exact, strict=True))
    return float(max(errors))


def test_fixed_exp_is_within_two_ulps() -> None:
    x = np.concatenate([np.linspace(-708.0, 0.0, 40_001), -np.geomspace(1e-18, 700.0, 20_001)])
    assert ulps(fixed_exp(x), [math.exp(v) for v in x.tolist()]) <= 2.0


def test_fixed_exp_at_its_ends() -> None:
    x = np.array([0.0, -0.0, -708.0, -708.5, -1e300, -INF])
    values = fixed_exp(x).tolist()
    assert values[:2] == [1.0, 1.0]
    assert values[2] > 0.0
    assert values[3:] == [0.0, 0.0, 0.0]


def test_fixed_log_is_within_three_ulps() -> None:
    near_one = 1.0 + np.concatenate([-np.geomspace(1e-16, 0.5, 20_001), np.geomspace(1e-15, 1.0, 20_001)])
    x = np.concatenate([np.geomspace(2.3e-308, 1.7e308, 40_001), near_one])
    x = x[x != 1.0]
    assert ulps(fixed_log(x), [math.log(v) for v in x.tolist()]) <= 3.0


def test_fixed_log_of_one_and_of_powers_of_two() -> None:
    assert fixed_log(np.array([1.0])).tolist() == [0.0]
    powers = 2.0 ** np.arange(-1022.0, 1024.0)
    assert ulps(fixed_log(powers), [math.log(v) for v in powers.tolist()]) <= 1.0


def test_the_two_parts_of_ln_2_add_up_to_it() -> None:
    with localcontext() as context:
        context.prec = 50
        difference = Decimal(_LN2_HIGH) + Decimal(_LN2_LOW) - Decimal(2).ln()
        assert abs(difference) < Decimal(2) ** -85


# Filters


def test_top_k_breaks_ties_by_lowest_id() -> None:
    row = row_of(1, 3, 2, 3, 2, 2)
    assert top_candidates(row, 3).ids.tolist() == [1, 3, 2]
    assert top_candidates(row, 0).ids.tolist() == [1, 3, 2, 4, 5, 0]
    assert top_candidates(row, 100).ids.tolist() == [1, 3, 2, 4, 5, 0]


def test_top_k_treats_the_two_zeros_as_equal() -> None:
    assert top_candidates(row_of(-0.0, 0.0, -0.0, -1.0), 2).ids.tolist() == [0, 1]


def test_top_k_never_keeps_masked_tokens() -> None:
    assert top_candidates(row_of(-INF, 1, -INF, -F32_MAX), 3).ids.tolist() == [1, 3]


def test_top_k_of_a_wide_row_of_equal_logits_keeps_the_lowest_ids() -> None:
    assert top_candidates(np.zeros(50_000, dtype=np.float32), 40).ids.tolist() == list(range(40))


def test_top_p_cut_is_inclusive_on_exact_sums() -> None:
    quarters = Candidates(np.arange(4), np.zeros(4))
    for p, n_kept in [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.9999, 4), (1.0, 4)]:
        assert keep_top_p(quarters, p).ids.size == n_kept


def test_top_p_of_a_worked_example() -> None:
    assert keep_top_p(candidates_of(0.5, 0.3, 0.15, 0.05), 0.9).ids.tolist() == [0, 1, 2]
    assert keep_top_p(candidates_of(0.5, 0.3, 0.15, 0.05), 0.79).ids.tolist() == [0, 1]


def test_min_p_cut_is_relative_to_the_best() -> None:
    assert keep_min_p(candidates_of(0.6, 0.31, 0.06, 0.03), 0.09).ids.tolist() == [0, 1, 2]
    assert keep_min_p(candidates_of(0.6, 0.31, 0.06, 0.03), 0.11).ids.tolist() == [0, 1]
    assert keep_min_p(Candidates(np.arange(3), np.array([2.0, 2.0, 1.9])), 1.0).ids.tolist() == [0, 1]


def test_min_p_applies_to_what_an_earlier_filter_left() -> None:
    # Typical drops token 0, whose surprise is the farthest from the entropy, so the best left is token 1.
    row = np.log(np.array([0.36] + [0.16] * 4)).astype(np.float32)
    params = dataclasses.replace(OFF, typical_p=0.5, min_p=0.9)
    sampler = Sampler(params, seed=1, n_vocab=5)
    assert {sampler.choose(row, i).token for i in range(100)} == {1, 2, 3, 4}


def test_typical_keeps_the_nearest_to_the_entropy() -> None:
    # Entropy of (.5, .25, .125, .125) is 1.75 bits; surprises are 1, 2, 3, 3; distances .75, .25, 1.25, 1.25.
    candidates = candidates_of(0.5, 0.25, 0.125, 0.125)
    assert keep_typical(candidates, 0.2).ids.tolist() == [1]
    assert keep_typical(candidates, 0.5).ids.tolist() == [0, 1]
    assert keep_typical(candidates, 0.8).ids.tolist() == [0, 1, 2]
    assert keep_typical(candidates, 0.9).ids.tolist() == [0, 1, 2, 3]
    assert keep_typical(candidates, 0.0).ids.tolist() == [1]


def test_top_n_sigma_floor_uses_the_population_deviation_of_finite_logits() -> None:
    row = row_of(2, 4, 4, 4, 5, 5, 7, 9, -INF)
    assert sigma_floor(row, 1.0) == 7.0
    assert top_candidates(row, 0, 7.0).ids.tolist() == [7, 6]
    assert top_candidates(row, 1, 7.0).ids.tolist() == [7]


def test_top_n_sigma_of_equal_logits_keeps_all() -> None:
    row = np.full(7, 0.1, dtype=np.float32)
    assert top_candidates(row, 0, sigma_floor(row, 0.5)).ids.size == 7


def test_xtc_drops_all_top_choices_but_the_least() -> None:
    candidates = candidates_of(0.4, 0.3, 0.2, 0.1)
    assert drop_top_choices(candidates, 0.15).ids.tolist() == [2, 3]
    assert drop_top_choices(candidates, 0.35).ids.tolist() == [0, 1, 2, 3]
    assert drop_top_choices(candidates, 0.55).ids.tolist() == [0, 1, 2, 3]
    assert drop_top_choices(candidates, 0.0).ids.tolist() == [3]


def test_xtc_decision_has_its_probability_and_its_own_stream() -> None:
    noise = Noise(3)
    draws = [noise.xtc_uniform(position) for position in range(20_000)]
    n_below = sum(draw < 0.3 for draw in draws)
    assert abs(n_below - 6_000) < 4 * math.sqrt(20_000 * 0.3 * 0.7)
    assert len(set(draws)) == len(draws)
    implied = -math.log(-math.log(draws[5]))
    assert abs(noise.gumbel(5, np.zeros(1, dtype=np.int64))[0] - implied) > 1e-6


# Bias, penalties, DRY


def test_greedy_takes_the_first_maximum() -> None:
    assert greedy(row_of(1, 5, 5, 2)) == 1
    assert greedy(row_of(-0.0, 0.0)) == 0


def test_bias_moves_and_suppresses() -> None:
    row = row_of(1, 2, 3)
    assert greedy(row, logit_bias={0: 2.5}) == 0
    assert greedy(row, logit_bias={2: -INF}) == 1
    assert greedy(row, logit_bias={2: -INF, 1: -1.5}) == 0


def test_bias_that_suppresses_every_finite_logit_is_refused() -> None:
    sampler = Sampler(SamplingParams(logit_bias={1: -INF}), seed=0, n_vocab=2)
    with pytest.raises(NumericError, match="position 4: bias suppresses"):
        sampler.choose(row_of(-INF, 1), 4)


def test_bias_does_not_raise_a_masked_token() -> None:
    assert greedy(row_of(-INF, 0), logit_bias={0: 1e6}) == 1


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert greedy(row_of(4.0, 2.1), (0,), repeat_penalty=2.0) == 1
    assert greedy(row_of(4.0, 1.9), (0,), repeat_penalty=2.0) == 0
    assert greedy(row_of(-1.0, -1.9), (0,), repeat_penalty=2.0) == 1
    assert greedy(row_of(-1.0, -2.1), (0,), repeat_penalty=2.0) == 0


def test_frequency_counts_and_presence_does_not() -> None:
    row = row_of(1.0, 0.0)
    assert greedy(row, (0, 0), frequency_penalty=0.4) == 0
    assert greedy(row, (0, 0, 0), frequency_penalty=0.4) == 1
    assert greedy(row, (0, 0, 0), presence_penalty=0.9) == 0
    assert greedy(row, (0,), presence_penalty=1.1) == 1


def test_penalty_window_covers_exactly_the_last_n() -> None:
    row = row_of(1.0, 0.0, -9.0)
    assert greedy(row, (0, 2, 2), presence_penalty=2.0, penalty_last_n=2) == 0
    assert greedy(row, (0, 2, 2), presence_penalty=2.0, penalty_last_n=3) == 1
    assert greedy(row, (0, 2, 2), presence_penalty=2.0, penalty_last_n=-1) == 1
    assert greedy(row, (0, 2, 2), presence_penalty=2.0, penalty_last_n=0) == 0


def test_penalties_count_a_long_window_like_a_short_one() -> None:
    history = tuple([0] * 3000 + [1] * 1000)
    row = row_of(3.0, 1.0, -1.05)
    assert greedy(row, history, frequency_penalty=0.00099, penalty_last_n=-1) == 0
    assert greedy(row, history, frequency_penalty=0.00101, penalty_last_n=-1) == 1
    assert greedy(row, history, frequency_penalty=0.00204, penalty_last_n=-1) == 1
    assert greedy(row, history, frequency_penalty=0.00206, penalty_last_n=-1) == 2


def test_penalties_saturate_at_the_largest_finite_logit() -> None:
    row = row_of(-F32_MAX, -F32_MAX, -INF)
    assert greedy(row, (0, 2), repeat_penalty=1e6) == 0
    assert greedy(row_of(F32_MAX, 0.0), (0,), repeat_penalty=1e-6) == 0


def test_dry_penalises_what_would_continue_a_repetition() -> None:
    # The text "1 2 3 ... 1 2": token 3 would continue a match of length 2.
    history = (1, 2, 3, 4, 1, 2)
    row = row_of(0.0, 0.0, 0.0, 1.0, 0.5)
    assert greedy(row, history) == 3
    assert greedy(row, history, dry_multiplier=0.4) == 3
    assert greedy(row, history, dry_multiplier=0.6) == 4
    assert greedy(row, history, dry_multiplier=0.6, dry_allowed_length=3) == 3
    assert greedy(row, history, dry_multiplier=0.6, dry_last_n=4) == 3
    assert greedy(row, history, dry_multiplier=0.6, dry_last_n=0) == 3
    assert greedy(row, history, dry_multiplier=0.6, dry_breakers=(1,)) == 3
    assert greedy(row, history, dry_multiplier=0.6, dry_breakers=(3,)) == 3


def test_dry_penalty_grows_with_the_match() -> None:
    history = (1, 2, 3, 4, 0, 1, 2, 3)
    row = row_of(0.0, 0.0, 0.0, 0.0, 3.0)
    # A match of 3 tokens at allowed length 2 costs multiplier * base.
    assert greedy(row, history, dry_multiplier=1.5, dry_base=2.1) == 0
    assert greedy(row, history, dry_multiplier=1.5, dry_base=1.9) == 4


def matches(window: list[int], breakers: tuple[int, ...] = ()) -> dict[int, int]:
    ids, lengths = longest_matches(np.array(window, dtype=np.int32), np.array(breakers, dtype=np.int32))
    return dict(zip(ids.tolist(), lengths.tolist(), strict=True))


def test_dry_matches_of_worked_examples() -> None:
    assert matches([]) == {}
    assert matches([5]) == {}
    assert matches([5, 5]) == {5: 1}
    assert matches([1, 2, 3, 1, 2]) == {3: 2}
    assert matches([1, 2, 3, 9, 2, 4, 1, 2]) == {3: 2, 4: 1}
    assert matches([1, 2, 3, 1, 2], (2,)) == {}
    assert matches([1, 2, 3, 1, 2], (1,)) == {3: 1}
    assert matches([1, 2, 3, 1, 2], (3,)) == {}


def test_dry_match_length_is_bounded_in_a_loop() -> None:
    assert matches([7] * 5000) == {7: DRY_LONGEST_MATCH}
    assert greedy(row_of(100.0, 0.0), (0,) * 5000, dry_multiplier=0.8) == 1


# Row checks


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bad_logits_name_the_position_and_the_first_index(bad: float, temperature: float) -> None:
    row = np.zeros(1000, dtype=np.float32)
    row[[421, 900]] = bad
    row[3] = -INF
    sampler = Sampler(SamplingParams(temperature=temperature), seed=0, n_vocab=1000)
    with pytest.raises(NumericError, match=r"position 77: index 421 is (nan|inf)"):
        sampler.choose(row, 77)


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_bad_padding_is_refused_too(bad: float) -> None:
    sampler = Sampler(SamplingParams(), seed=0, n_vocab=2)
    with pytest.raises(NumericError, match=f"index 3 is {bad}"):
        sampler.choose(row_of(1, 2, 3, bad), 0)


def test_a_row_of_nothing_but_minus_infinity_is_refused() -> None:
    sampler = Sampler(SamplingParams(), seed=0, n_vocab=3)
    with pytest.raises(NumericError, match="position 9: all 3 are -inf"):
        sampler.choose(row_of(-INF, -INF, -INF, 5), 9)


@pytest.mark.parametrize(
    "row",
    [np.zeros(4), np.zeros((1, 4), dtype=np.float32), np.zeros(3, dtype=np.float32), [0.0] * 4],
    ids=["float64", "two-dimensional", "short", "list"],
)
def test_rows_of_another_type_or_shape_are_refused(row: object) -> None:
    with pytest.raises(InvalidArgument, match="logits must"):
        Sampler(SamplingParams(), seed=0, n_vocab=4).choose(row, 0)  # type: ignore[arg-type]


def test_padding_ids_are_never_sampled_at_high_temperature() -> None:
    rng = np.random.default_rng(0)
    row = rng.standard_normal(64).astype(np.float32)
    row[40:] = 30.0
    sampler = Sampler(dataclasses.replace(OFF, temperature=5.0), seed=1, n_vocab=40)
    seen = {sampler.choose(row, position).token for position in range(10_000)}
    assert seen == set(range(40))


# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", INF),
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("min_p", math.nan),
        ("typical_p", 2),
        ("top_n_sigma", INF),
        ("xtc_probability", -1),
        ("xtc_threshold", 1.5),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("frequency_penalty", INF),
        ("presence_penalty", -INF),
        ("penalty_last_n", -2),
        ("dry_multiplier", -0.1),
        ("dry_base", 0.99),
        ("dry_allowed_length", 0),
        ("dry_last_n", -2),
        ("dry_breakers", (-1,)),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: INF}),
        ("logit_bias", {"a": 1.0}),
    ],
)
def test_params_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_params_are_immutable_hashable_and_copyable() -> None:
    source = {3: 1.0, 1: -INF}
    params = SamplingParams(logit_bias=source, dry_breakers=(5, 2, 5))
    source[4] = 9.0
    assert dict(params.logit_bias) == {1: -INF, 3: 1.0}
    assert params.dry_breakers == (2, 5)
    assert isinstance(params.logit_bias, LogitBias)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    for twin in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert twin == params and hash(twin) == hash(params)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"logit_bias names token 10.* 10 tokens"):
        Sampler(SamplingParams(logit_bias={10: 1.0}), seed=0, n_vocab=10)
    with pytest.raises(InvalidArgument, match="dry_breakers names token 12"):
        Sampler(SamplingParams(dry_breakers=(12,)), seed=0, n_vocab=10)
    with pytest.raises(InvalidArgument, match="token 10"):
        Sampler(SamplingParams(), seed=0, n_vocab=10).accept(10)


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5])
def test_seeds_and_positions_must_fit_64_bits(seed: object) -> None:
    with pytest.raises(InvalidArgument, match="seed"):
        Sampler(SamplingParams(), seed=seed, n_vocab=4)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="position"):
        Sampler(SamplingParams(), seed=1, n_vocab=4).choose(row_of(1, 2, 3, 4), seed)  # type: ignore[arg-type]


# History and state


def test_truncate_equals_never_having_accepted() -> None:
    row = row_of(2.0, 1.5, 0.0)
    sampler = Sampler(SamplingParams(temperature=0.0, presence_penalty=1.0), seed=0, n_vocab=3)
    sampler.accept(2)
    before = sampler.choose(row, 1)
    for _ in range(200):
        sampler.accept(0)
    assert sampler.choose(row, 1) != before
    sampler.truncate(1)
    assert sampler.n_accepted == 1
    assert sampler.choose(row, 1) == before
    with pytest.raises(InvalidArgument, match="cannot keep 2 tokens, 1 were accepted"):
        sampler.truncate(2)
    sampler.reset()
    assert sampler.state() == SamplerState(0, ())


def test_choosing_accepts_nothing() -> None:
    """A token that is chosen and not emitted must not weigh on those after it."""
    sampler = Sampler(SamplingParams(repeat_penalty=2.0), seed=1, n_vocab=8)
    sampler.accept(3)
    before = sampler.state()
    row = np.linspace(0.0, 4.0, 8, dtype=np.float32)
    assert sampler.choose(row, 1) == sampler.choose(row, 1)
    with pytest.raises(NumericError):
        sampler.choose(np.full(8, np.nan, np.float32), 2)
    assert sampler.state() == before and sampler.n_accepted == 1


def test_fork_shares_the_past_and_nothing_else() -> None:
    parent = Sampler(SamplingParams(), seed=1, n_vocab=9)
    parent.accept(4)
    child = parent.fork(fork_seed(1, 0))
    child.accept(5)
    parent.accept(6)
    assert parent.state() == SamplerState(1, (4, 6))
    assert child.state() == SamplerState(fork_seed(1, 0), (4, 5))


def test_restore_refuses_foreign_tokens_and_changes_nothing() -> None:
    sampler = Sampler(SamplingParams(), seed=1, n_vocab=9)
    sampler.accept(4)
    for state in (SamplerState(2, (1, 9)), SamplerState(-1, (1,))):
        with pytest.raises(InvalidArgument):
            sampler.restore(state)
        assert sampler.state() == SamplerState(1, (4,))
    sampler.restore(SamplerState(2, (7, 8)))
    assert sampler.state() == SamplerState(2, (7, 8))


# Log probabilities


def test_logprob_is_of_the_raw_softmax() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(np.float32) + np.float32(3.0)
    params = SamplingParams(temperature=0.0, logit_bias={0: -INF})
    choice = Sampler(params, seed=0, n_vocab=4).choose(row, 0)
    assert choice.token == 1
    assert choice.logprob == pytest.approx(math.log(0.25), abs=1e-6)


def test_top_logprobs_are_sorted_and_agree_with_choose() -> None:
    row = np.random.default_rng(5).standard_normal(5000).astype(np.float32)
    top = top_logprobs(row, 5, n_vocab=4000)
    exact = row[:4000].astype(np.float64) - math.log(math.fsum(np.exp(row[:4000].astype(np.float64))))
    order = np.argsort(-exact)[:5]
    assert [choice.token for choice in top] == order.tolist()
    assert [choice.logprob for choice in top] == pytest.approx(exact[order].tolist(), abs=1e-6)
    assert top[0] == Sampler(SamplingParams(temperature=0.0), seed=0, n_vocab=4000).choose(row, 0)
    assert top_logprobs(row_of(1, -INF), 9, n_vocab=2) == (Choice(0, 0.0),)
    with pytest.raises(InvalidArgument, match="n must"):
        top_logprobs(row, 0, n_vocab=4000)


# Distribution and pinned tokens


def test_coupled_draws_follow_the_filtered_distribution() -> None:
    # Token 1 is penalised from 0.4 to 0.2 of the same unit, top-k drops 5, min-p drops 4, T = 2 takes roots.
    row = np.log(np.array([0.30, 0.40, 0.16, 0.10, 0.02, 0.01])).astype(np.float32)
    params = SamplingParams(
        temperature=2.0, top_k=5, top_p=1.0, min_p=0.1, presence_penalty=math.log(2.0), penalty_last_n=1
    )
    roots = [math.sqrt(p) for p in (0.30, 0.20, 0.16, 0.10)]
    expected = [root / sum(roots) for root in roots]
    sampler = Sampler(params, seed=2024, n_vocab=6)
    sampler.accept(1)
    n_draws = 20_000
    counts = np.bincount([sampler.choose(row, i).token for i in range(n_draws)], minlength=6)
    assert counts[4:].sum() == 0
    pairs = zip(counts[:4].tolist(), expected, strict=True)
    chi_square = sum((count - n_draws * p) ** 2 / (n_draws * p) for count, p in pairs)
    # 3 degrees of freedom, 0.1 % level.
    assert chi_square < 16.27


def test_gumbel_maximum_over_positions_follows_the_softmax() -> None:
    probabilities = np.array([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    seed, n_positions, n_tokens = 99, 200_000, probabilities.size
    # The noise of all positions at once; that the sampler sees the same is asserted on some of them.
    counter = np.zeros((4, n_positions * n_tokens), dtype=np.uint64)
    counter[0] = np.tile(np.arange(n_tokens), n_positions)
    counter[1] = np.repeat(np.arange(n_positions), n_tokens)
    words = philox(counter, philox_round_keys(seed))
    bits = (words[0] >> np.uint64(6)) * np.uint64(1 << 26) + (words[1] >> np.uint64(6))
    gumbel = -fixed_log(-fixed_log((bits.astype(np.float64) + 0.5) * 2.0**-52)).reshape(-1, n_tokens)
    for position in (0, 1, 777, n_positions - 1):
        assert Noise(seed).gumbel(position, np.arange(n_tokens)).tolist() == gumbel[position].tolist()
    counts = np.bincount((gumbel + np.log(probabilities)).argmax(axis=1), minlength=n_tokens)
    expected = probabilities * n_positions
    # 5 degrees of freedom, 0.1 % level.
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.52


def test_equal_scores_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    # Candidates come as ids 1, 0 with relative logits 0, -1; this noise makes both scores 0.
    monkeypatch.setattr(Noise, "gumbel", lambda *_: np.array([0.0, 1.0]))
    sampler = Sampler(dataclasses.replace(OFF, temperature=1.0), seed=0, n_vocab=2)
    assert sampler.choose(row_of(0, 1), 0).token == 0


def synthetic_row(index: int, n: int) -> NDArray[np.float32]:
    """Logits in steps of 1/64 from an integer recurrence: the same bits on every platform."""
    state = np.arange(n, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(index * 40503 + 1)
    state ^= state >> np.uint64(15)
    state = (state * np.uint64(2246822519)) & np.uint64(0xFFFFFFFF)
    state ^= state >> np.uint64(13)
    total = (state & np.uint64(255)) + ((state >> np.uint64(8)) & np.uint64(255))
    total += (state >> np.uint64(16)) & np.uint64(255)
    return (total.astype(np.float32) - np.float32(384)) / np.float32(64)


GOLDEN_PARAMS = {
    "default": SamplingParams(),
    "open": dataclasses.replace(OFF, temperature=1.3),
    "all": SamplingParams(
        temperature=1.1,
        top_k=200,
        top_p=0.9,
        min_p=0.02,
        typical_p=0.95,
        top_n_sigma=3.0,
        xtc_probability=0.5,
        xtc_threshold=0.005,
        repeat_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        dry_multiplier=0.8,
        logit_bias={7: 2.0},
    ),
}
GOLDEN_TOKENS = {
    "default": [2772, 2173, 918, 317, 3562, 4276, 114, 3217],
    "open": [3516, 2173, 2638, 2487, 2822, 2640, 1751, 4004],
    "all": [3516, 2173, 2638, 960, 767, 2640, 1751, 1570],
}


@pytest.mark.parametrize("name", sorted(GOLDEN_PARAMS))
def test_tokens_of_fixed_logits_are_pinned(name: str) -> None:
    sampler = Sampler(GOLDEN_PARAMS[name], seed=0x0123456789ABCDEF, n_vocab=5000)
    tokens = []
    for position in range(8):
        tokens.append(sampler.choose(synthetic_row(position % 3, 5000), position).token)
        sampler.accept(tokens[-1])
    assert tokens == GOLDEN_TOKENS[name]


def test_noise_bits_are_pinned() -> None:
    values = Noise(42).gumbel(1234, np.array([0, 1, 49_151, 248_319]))
    assert [value.hex() for value in values.tolist()] == [
        "-0x1.066a0c73385cep+0",
        "-0x1.fc7456cbd7d24p-2",
        "0x1.4b07e07f4361ap+0",
        "-0x1.7364a5d42b748p-3",
    ]
