"""The sampling front: the same words whatever computes them, and the token and log probability of the whole row.

Rows: random, with ties and zeros of both signs, short of finite logits, with padding columns, and broken ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, SamplingParams
from pykvstream.core.device import DeviceFlag, Isa
from pykvstream.errors import InvalidArgument, NumericError
from pykvstream.sampling import FRONT_BEST, Front, LogitBias, Sampler, rows_needed_by
from tests.front_rig import CHUNK, NONE, FrontRig, slow_front
from tests.models import write_random_model
from tests.property.test_drafting_promise import PROMPT, listen

N_COLS, N_TOKENS = 2 * CHUNK + 777, 2 * CHUNK + 700
Rows = NDArray[np.float32]


def rows_of(seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((8, N_COLS)) * np.array([1, 5, 30, 0.01, 3, 3, 3, 3])[:, None]).astype(np.float32)
    rows[3] = np.round(rows[3] * 100) / 2  # many ties, and zeros of both signs
    rows[4, rng.random(N_COLS) < 0.999] = -np.inf
    rows[5] = 0.0
    rows[5, ::3] = -0.0
    rows[6] = -np.inf
    rows[6, [5, 9000, N_TOKENS - 1]] = [1.0, 3.0, 1.0]
    rows[7, N_TOKENS:] = 1e30  # padding is no token
    return rows


@pytest.fixture(scope="module")
def rig() -> Iterator[FrontRig]:
    with FrontRig(N_COLS, N_TOKENS, FRONT_BEST) as made:
        yield made


@pytest.mark.parametrize("seed", range(3))
def test_best_and_sum_are_those_of_a_sort_and_of_float64(rig: FrontRig, seed: int) -> None:
    rows = rows_of(seed)
    for row, words in zip(rows, rig.run(rows), strict=True):
        ids, logits, bad, log_sum = slow_front(row, N_TOKENS, FRONT_BEST)
        found = Front.of(words, 0)
        assert bad is None and found.ids.tolist() == ids and found.logits.tolist() == logits
        assert found.is_whole == (len(ids) < FRONT_BEST)
        # Each exponential is within 2e-7 of its own, and sums in float64 add nothing to that.
        assert found.log_sum_exp == pytest.approx(log_sum, abs=4e-7)


def test_words_are_the_same_on_every_instruction_set_thread_and_width() -> None:
    rows = rows_of(7)
    rows[1, 8191] = np.nan
    rows[2, N_COLS - 1] = np.inf
    with FrontRig(N_COLS, N_TOKENS, FRONT_BEST, isa=Isa.REFERENCE) as plain:
        expected = plain.run(rows)
    for isa, threads, flags in ((Isa.BEST, 1, DeviceFlag.NONE), (Isa.AVX2, 3, DeviceFlag.NONE)):
        with FrontRig(N_COLS, N_TOKENS, FRONT_BEST, isa=isa, threads=threads, flags=flags) as rig:
            assert rig.run(rows).tobytes() == expected.tobytes()
            for i in range(len(rows)):
                assert rig.run(rows[i : i + 1]).tobytes() == expected[i].tobytes()


def test_broken_rows_are_told_by_column_and_value(rig: FrontRig) -> None:
    for at, value in ((0, np.nan), (8191, np.inf), (8192, np.nan), (N_TOKENS - 1, np.inf), (N_COLS - 1, np.nan)):
        row = rows_of(1)[:1]
        row[0, at] = value
        row[0, N_COLS - 1] = np.nan
        words = rig.run(row)[0]
        assert words[2 * FRONT_BEST + 1] == at
        sampler = Sampler(SamplingParams(), seed=1, n_vocab=N_TOKENS)
        with pytest.raises(NumericError) as of_row:
            sampler.choose(row[0], 77)
        with pytest.raises(NumericError) as of_front:
            Front.of(words, 77)
        assert str(of_front.value) == str(of_row.value)
    with pytest.raises(NumericError, match="all of them are -inf"):
        Front.of(rig.run(np.full((1, N_COLS), -np.inf, np.float32))[0], 3)


def test_passes_that_do_not_ask_leave_the_words_alone(rig: FrontRig) -> None:
    assert (rig.run(rows_of(2), has_front=False) == 0xABABABAB).all()
    assert NONE not in rig.run(rows_of(2))[:, :FRONT_BEST]


def test_shapes_are_checked() -> None:
    for n_cols, n_tokens, n_best in ((100, 101, 4), (100, 0, 4), (100, 50, 0), (100, 50, 513)):
        with pytest.raises(InvalidArgument, match=r"front"):
            FrontRig(n_cols, n_tokens, n_best)
    with FrontRig(100, 50, 300) as small:
        row = np.arange(100, dtype=np.float32)[None]
        assert Front.of(small.run(row)[0], 0).ids.tolist() == list(range(49, -1, -1))


SETTINGS = {
    "default": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "cold": SamplingParams(temperature=1e-6, top_k=1),
    "wide": SamplingParams(top_k=128, top_p=1.0, min_p=0.0),
    "typical": SamplingParams(typical_p=0.6, top_k=100),
    "xtc": SamplingParams(xtc_probability=0.7, xtc_threshold=0.02),
    "penalties": SamplingParams(repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, penalty_last_n=64),
    "greedy, penalties": SamplingParams(temperature=0.0, repeat_penalty=2.0, penalty_last_n=100),
    "bias": SamplingParams(logit_bias=LogitBias({5: -math.inf, 9000: -2.5, 17: 0.0})),
    "greedy, bias": SamplingParams(temperature=0.0, logit_bias=LogitBias({i: -math.inf for i in range(60)})),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_token_and_logprob_are_those_of_the_whole_row(rig: FrontRig, name: str) -> None:
    params = SETTINGS[name]
    assert rows_needed_by(params) is None
    whole = Sampler(replace(params, dry_multiplier=1e-300, dry_last_n=0), seed=5, n_vocab=N_TOKENS)
    sampler = Sampler(params, seed=5, n_vocab=N_TOKENS)
    rng = np.random.default_rng(3)
    for seed in range(4):
        rows = rows_of(seed)
        fronts = rig.run(rows)
        for position, (row, words) in enumerate(zip(rows, fronts, strict=True)):
            # What was said lately is what the row thinks likely, so that penalties strike where they matter.
            best = np.argsort(-row[:N_TOKENS], kind="stable")[:200]
            for each in (whole, sampler):
                each.reset()
            for token in rng.choice(best, 90).tolist():
                whole.accept(token)
                sampler.accept(token)
            front = Front.of(words, position)
            expected = whole.choose(row, position)
            found = sampler.choose(row, position, front)
            assert found.token == expected.token
            assert found.logprob == float(row[found.token]) - front.log_sum_exp
            assert found.logprob == pytest.approx(expected.logprob, abs=2e-6)
            assert whole.score(found.token, row, position, front) == found


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (SamplingParams(top_k=0), "top_k is off"),
        (SamplingParams(top_k=129), "129 candidates and 0 lowered tokens are more than the 128 best"),
        (SamplingParams(top_n_sigma=1.0), "top_n_sigma"),
        (SamplingParams(dry_multiplier=0.8), "dry"),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias raises"),
        (SamplingParams(repeat_penalty=0.9), "repeat_penalty raises"),
        (SamplingParams(presence_penalty=-0.5), "presence_penalty raises"),
        (SamplingParams(repeat_penalty=1.1, penalty_last_n=-1), "whole history"),
        (SamplingParams(repeat_penalty=1.1, penalty_last_n=100), "40 candidates and 100 lowered"),
    ],
)
def test_settings_that_need_whole_rows_are_named(rig: FrontRig, params: SamplingParams, why: str) -> None:
    assert why in (rows_needed_by(params) or "")
    sampler = Sampler(params, seed=2, n_vocab=N_TOKENS)
    assert sampler.rows_needed_by == rows_needed_by(params)
    row = rows_of(4)[1]
    front = Front.of(rig.run(row[None])[0], 9)
    for token in range(50):
        sampler.accept(token)
    found = sampler.choose(row, 9, front)
    assert found.token == sampler.choose(row, 9).token
    assert found.logprob == float(row[found.token]) - front.log_sum_exp


@pytest.mark.parametrize("name", ["default", "greedy", "penalties", "xtc"])
def test_answers_are_the_same_with_and_without_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off: the whole chain over whole rows, which the log probability's sum comes beside."""
    path = tmp_path / "model.gguf"
    write_random_model(path, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=700, seed=4)

    def answers() -> list[object]:
        with Model.open(path, threads=1, ctx_size=512, ubatch_size=64) as model, model.session(seed=3) as session:
            return [listen(session, PROMPT, 40, SETTINGS[name], ignore_eos=True)]

    seen = 0
    plain = Sampler._candidates

    def count(*arguments: object) -> object:
        nonlocal seen
        seen += 1
        return plain(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "_candidates", count)
        on = answers()
    assert seen == 39, "all but the first token, whose row belongs to the prompt"
    monkeypatch.setattr("pykvstream.sampling.sampler.rows_needed_by", lambda _params: "the test wants whole rows")
    assert answers() == on
