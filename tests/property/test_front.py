"""The sampling front: the same words whatever computes them, and the token and log probability of the whole row.

Rows: random, with ties and zeros of both signs, short of finite logits, with padding columns, and broken ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, SamplingParams
from pykvstream.core.candidates import sum_exps
from pykvstream.core.cuda import CudaPlanner
from pykvstream.core.device import Device, Isa
from pykvstream.errors import InvalidArgument, NumericError, Unsupported
from pykvstream.eval.perplexity import nll_of_rows
from pykvstream.gguf import GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.catalogue import cache_type
from pykvstream.runtime.target import Blueprint, TargetOptions
from pykvstream.sampling import (
    FRONT_BEST,
    Choice,
    Front,
    LogitBias,
    Sampler,
    rows_needed_by,
    token_logprobs,
    top_logprobs,
)
from tests.examples import examples
from tests.front_rig import CHUNK, NONE, FrontRig, seal_front, slow_front
from tests.models import write_random_model
from tests.property.test_drafting_promise import PROMPT, Said, listen, put
from tests.scripted_drafter import Scripted, all_right, half_right

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
    rows[1, [8191, 8192, N_COLS - 1]] = np.nan, np.inf, np.nan
    rows[2, N_COLS - 1] = np.inf
    with FrontRig(N_COLS, N_TOKENS, FRONT_BEST, isa=Isa.REFERENCE) as plain:
        expected = plain.run(rows)
    # A row alone is cut into as many pieces as there are threads, of its three chunks.
    for isa, threads in ((Isa.BEST, 1), (Isa.BEST, 2), (Isa.AVX2, 3), (Isa.REFERENCE, 9)):
        with FrontRig(N_COLS, N_TOKENS, FRONT_BEST, isa=isa, threads=threads) as rig:
            assert rig.run(rows).tobytes() == expected.tobytes()
            for i in range(len(rows)):
                assert rig.run(rows[i : i + 1]).tobytes() == expected[i].tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_whoever_has_the_whole_row_finds_the_same_sum(rig: FrontRig, seed: int) -> None:
    """The bits of a pass, on every instruction set, and float64's within what the exponentials leave."""
    for row, words in zip(rows_of(seed), rig.run(rows_of(seed)), strict=True):
        tokens = row[:N_TOKENS]
        total = words[2 * FRONT_BEST + 2 :].copy().view(np.float64)[0]
        for isa in (Isa.REFERENCE, Isa.AVX2, Isa.BEST):
            assert sum_exps(tokens, isa) == (tokens.max(), total)
        front = Front.of(words, 0)
        top = top_logprobs(row, 3, n_vocab=N_TOKENS)
        assert [each.token for each in top] == front.ids[:3].tolist()
        assert [each.logprob for each in top] == (front.logits[:3].astype(np.float64) - front.log_sum_exp).tolist()
        ids = front.ids[:3].tolist()
        logprobs = token_logprobs(np.stack([row] * len(ids)), ids, n_vocab=N_TOKENS).tolist()
        assert logprobs == [each.logprob for each in top]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 2 * CHUNK + 9), st.integers(0, 2**32 - 1), st.sampled_from([0.01, 3.0, 300.0]))
def test_sums_of_any_width_are_the_same_on_every_instruction_set(n: int, seed: int, scale: float) -> None:
    row = (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)
    row[seed % n] = -np.inf if n > 1 else 0.0
    largest, total = sum_exps(row)
    assert (largest, total) == sum_exps(row, Isa.REFERENCE)
    exact = math.fsum(np.exp(row.astype(np.float64) - largest).tolist())
    assert largest == row.max() and total == pytest.approx(exact, rel=4e-7)


def test_sums_of_what_is_no_row_are_refused() -> None:
    for row in ([], [-math.inf] * 3, [0.0, math.nan], [math.inf, 0.0]):
        with pytest.raises(InvalidArgument):
            sum_exps(np.array(row, np.float32))
    with pytest.raises(InvalidArgument):
        sum_exps(np.zeros(3, np.float32), Isa.AVX512)
    with pytest.raises(InvalidArgument, match="2 rows of logits and 1 tokens"):
        token_logprobs(np.zeros((2, 3), np.float32), [1], n_vocab=3)
    with pytest.raises(InvalidArgument, match="tokens 1 to 3, the vocabulary has 3"):
        token_logprobs(np.zeros((2, 4), np.float32), [1, 3], n_vocab=3)
    with pytest.raises(NumericError, match="position 7: index 2 is nan"):
        token_logprobs(np.array([[0, 0, 0], [0, 0, math.nan]], np.float32), [1, 1], n_vocab=3, position=6)


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


def assert_same(sampler: Sampler, row: Rows, position: int, front: Front) -> None:
    """Whatever looks at the row, by the front or by itself: the same token and the same bits."""
    expected = sampler.choose(row, position)
    assert sampler.choose(row, position, front) == expected
    assert sampler.score(expected.token, row, position, front) == expected
    assert sampler.score(expected.token, row, position) == expected
    p, found = sampler.distribution(row, position), sampler.distribution(row, position, front)
    assert p.ids.tobytes() == found.ids.tobytes() and p.weights.tobytes() == found.weights.tobytes()
    for drafted in (int(p.ids[-1]), expected.token):
        assert sampler.judge(row, position, drafted, None, front) == sampler.judge(row, position, drafted)


@st.composite
def settings_for_fronts(draw: st.DrawFn, n: int) -> SamplingParams:
    """Of all kinds, often such as a front will do for, and often just so."""
    token = st.integers(0, n - 1)
    last_n = draw(st.sampled_from([0, 1, 8, 64, 88, 127]))
    bias = st.sampled_from([-math.inf, -1.0, -0.0, -1e6])
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.8, 3.0])),
        top_k=draw(st.sampled_from([1, 2, 40, 64, FRONT_BEST - last_n, 0])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        typical_p=draw(st.sampled_from([1.0, 0.5])),
        top_n_sigma=draw(st.sampled_from([-1.0, -1.0, -1.0, 1.0])),
        xtc_probability=draw(st.sampled_from([0.0, 0.5])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.5, 1e6, 1.0, 0.9])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, 100.0])),
        penalty_last_n=last_n,
        dry_multiplier=draw(st.sampled_from([0.0, 0.0, 0.0, 0.8])),
        logit_bias=LogitBias(draw(st.dictionaries(token, bias, max_size=3))),
    )


@st.composite
def front_cases(draw: st.DrawFn) -> tuple[int, Rows, SamplingParams, list[int]]:
    """Vocabularies narrower and wider than what is found, ties, masked tokens, padding; a history of the best tokens,
    which penalties then push out of the best."""
    n = draw(st.sampled_from([1, 2, 7, 127, 128, 129, 700]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = (rng.standard_normal(N_SMALL) * draw(st.sampled_from([0.3, 4.0, 200.0]))).astype(np.float32)
    row = np.round(row) if draw(st.booleans()) else row
    row[rng.random(N_SMALL) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.99]))] = -np.inf
    row[draw(st.integers(0, n - 1))] = draw(st.sampled_from([0.0, -0.0, 1.0, 3.4e38, -3.4e38]))
    row[n:] = draw(st.sampled_from([-np.inf, 1e30]))
    best = np.argsort(-row[:n], kind="stable")[: draw(st.sampled_from([1, 50, 128, 200]))]
    length = draw(st.sampled_from([0, 5, 64, 150]))
    history = (rng.permutation(best)[:length] if draw(st.booleans()) else rng.choice(best, length)).tolist()
    return n, row, draw(settings_for_fronts(n)), history


N_SMALL = 720


@pytest.fixture(scope="module")
def small_rigs() -> Iterator[Callable[[int], FrontRig]]:
    """By the number of tokens."""
    with ExitStack() as stack:
        yield cache(lambda n: stack.enter_context(FrontRig(N_SMALL, n, FRONT_BEST)))


@settings(max_examples=examples(400), deadline=None)
@given(front_cases(), st.integers(0, 2**40))
def test_any_choice_is_that_of_the_whole_chain(
    small_rigs: Callable[[int], FrontRig], case: tuple[int, Rows, SamplingParams, list[int]], position: int
) -> None:
    n, row, params, history = case
    front = Front.of(small_rigs(n).run(row[None])[0], position)
    sampler = Sampler(params, seed=position, n_vocab=n)
    for token in history:
        sampler.accept(token)
    try:
        sampler.choose(row, position)
    except NumericError as refusal:
        with pytest.raises(NumericError, match=re.escape(str(refusal))):
            sampler.choose(row, position, front)
    else:
        assert_same(sampler, row, position, front)


@settings(max_examples=examples(60), deadline=None)
@given(front_cases(), st.integers(0, N_SMALL - 1), st.sampled_from([math.nan, math.inf]))
def test_any_broken_row_is_refused_in_the_same_words(
    small_rigs: Callable[[int], FrontRig],
    case: tuple[int, Rows, SamplingParams, list[int]],
    at: int,
    bad: float,
) -> None:
    n, row, params, _ = case
    row[at] = bad
    with pytest.raises(NumericError) as of_row:
        Sampler(params, seed=1, n_vocab=n).choose(row, 5)
    with pytest.raises(NumericError, match=re.escape(str(of_row.value))):
        Front.of(small_rigs(n).run(row[None])[0], 5)


def test_penalties_push_candidates_out_of_the_best(small_rigs: Callable[[int], FrontRig]) -> None:
    """The property above would be empty without: all of the ten likeliest were said, and none is said again."""
    row = np.linspace(5.0, -5.0, N_SMALL, dtype=np.float32)
    params = SamplingParams(temperature=0.0, presence_penalty=100.0, penalty_last_n=10)
    sampler = Sampler(params, seed=1, n_vocab=700)
    for token in range(10):
        sampler.accept(token)
    assert sampler.choose(row, 0, Front.of(small_rigs(700).run(row[None])[0], 0)).token == 10
    assert_same(sampler, row, 0, Front.of(small_rigs(700).run(row[None])[0], 0))


@pytest.mark.parametrize("name", SETTINGS)
def test_token_and_logprob_are_those_of_the_whole_row(rig: FrontRig, name: str) -> None:
    params = SETTINGS[name]
    assert rows_needed_by(params) is None
    sampler = Sampler(params, seed=5, n_vocab=N_TOKENS)
    rng = np.random.default_rng(3)
    for seed in range(4):
        rows = rows_of(seed)
        fronts = rig.run(rows)
        for position, (row, words) in enumerate(zip(rows, fronts, strict=True)):
            # What was said lately is what the row thinks likely, so that penalties strike where they matter.
            best = np.argsort(-row[:N_TOKENS], kind="stable")[:200]
            sampler.reset()
            for token in rng.choice(best, 90).tolist():
                sampler.accept(token)
            assert_same(sampler, row, position, Front.of(words, position))


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
    for token in range(50):
        sampler.accept(token)
    assert_same(sampler, row, 9, Front.of(rig.run(row[None])[0], 9))


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_a_card_has_kernels_of_it_and_refuses_more_columns_than_they_find(tmp_path: Path, arch: int) -> None:
    with CudaPlanner(arch) as card:
        with pytest.raises(Unsupported, match="a sampling front of 129 columns: a card finds the best 128"):
            seal_front(card, n_best=FRONT_BEST + 1, n_cols=300, n_tokens=300)
        seal_front(card, n_best=FRONT_BEST, n_cols=CHUNK * 128, n_tokens=CHUNK * 128)
        assert "front" in [key.source for key, _ in card.kernels()]
    path = tmp_path / "model.gguf"
    write_random_model(path, head_dim=32)
    file = GgufFile.open(path)
    options = TargetOptions(cache_type("Q8_0"), cache_type("Q8_0"), 64, 512)
    config = ModelConfig.from_gguf(file)
    for device in (CudaPlanner(arch), Device(1)):
        with device, closing(Blueprint(file, config, device, options, declared=True)) as blueprint:
            assert blueprint.front is not None and blueprint.front.n_best == FRONT_BEST
            assert not isinstance(device, CudaPlanner) or "front" in [key.source for key, _ in device.kernels()]


@pytest.mark.parametrize("name", ["default", "greedy", "penalties", "xtc"])
def test_answers_are_the_same_with_and_without_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off: the whole chain over whole rows."""
    path = tmp_path / "model.gguf"
    write_random_model(path, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=700, seed=4)

    def answers() -> list[object]:
        with Model.open(path, threads=1, ctx_size=512, ubatch_size=64) as model, model.session(seed=3) as session:
            return [listen(session, PROMPT, 40, SETTINGS[name], ignore_eos=True)]

    seen = 0
    plain = Sampler.choose

    def choose(sampler: Sampler, logits: object, position: int, front: Front | None = None) -> Choice:
        nonlocal seen
        seen += front is not None and sampler.rows_needed_by is None
        return plain(sampler, None if front is not None else logits, position, front)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "choose", choose)
        on = answers()
    assert seen == 39, "all but the first token, whose row belongs to the prompt"
    monkeypatch.setattr("pykvstream.sampling.sampler.rows_needed_by", lambda _params: "the test wants whole rows")
    assert answers() == on


@pytest.mark.parametrize("name", ["greedy", "penalties", "top_k off"])
def test_log_probabilities_are_those_of_prompt_rows_drafted_or_not_on_any_thread(tmp_path: Path, name: str) -> None:
    """Plain decoding, drafts, another number of threads, a smaller arena and the same tokens as a prompt whose rows are
    scored: one number for each token, bit for bit."""
    path = tmp_path / "model.gguf"
    write_random_model(path, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=700, seed=4)
    params = {**SETTINGS, "top_k off": SamplingParams(top_k=0)}[name]
    said: list[Said] = []
    for threads, rule, is_small in ((1, None, False), (3, None, False), (1, half_right, True), (3, all_right, False)):
        with Model.open(path, threads=threads, ctx_size=1024, ubatch_size=64) as model:
            smallest = model.plan.smallest_bytes / 2**20
        mib = smallest if is_small else None
        with Model.open(path, threads=threads, ctx_size=1024, ubatch_size=64, arena_mib=mib) as model:
            with model.session(seed=3) as session:
                n_before = len(model.tokenizer.encode(PROMPT, bos=True))
                speculation = rule and put(session, Scripted(said[0].conversation, rule))
                said.append(listen(session, PROMPT, 40, params, speculation, ignore_eos=True))
                draft = session.stats.draft
                assert rule is None or (draft is not None and draft.accepted > 5)
            conversation, tokens = said[-1].conversation, said[-1].tokens
            assert conversation[n_before:] == tokens
            with model.session() as session:
                rows = session.forward(conversation[:-1], logits="all")[n_before - 1 :]
            n_vocab = model.tokenizer.n_vocab
            assert token_logprobs(rows, tokens, n_vocab=n_vocab).tolist() == list(said[-1].logprobs)
            assert nll_of_rows(rows, tokens, n_vocab).tolist() == [-each for each in said[-1].logprobs]
    assert said == [said[0]] * 4
