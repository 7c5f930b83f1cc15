"""Promise 3 over all that can be combined: drafter, depth, how drafts are chosen, temperature, seed.

Each drafted answer is compared with the plain one: token ids, hash of the logits, text, log probabilities. About sixty
combinations, of which every two choices occur together, run always; the product of all of them is marked slow, and a
part of it runs on the two models that people use.
Units: ``depth`` in tokens; None leaves each drafter its own, ``auto`` decides by what it brings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from pykvstream import Model, SamplingParams, Session, SpeculationParams
from pykvstream.gguf import GgufFile
from pykvstream.speculation import DRAFTERS, HEAD_DRAFTER, Chain
from pykvstream.speculation.controller import Controller
from tests.models import write_random_model
from tests.property.test_drafting_promise import SHAPE, SMALL, Said, listen
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.scripted_drafter import Rule, Scripted, any_tokens, reversed_

MTP = HybridShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "n_mtp": 1})
CTX = 512
N_TOKENS = 24
PROMPT = "the end of the thing and the end of the thing and the other thing, and so on. "
TEMPERATURES = (0.0, 0.7, 1.0)
N_SEEDS = 20
ALL_NGRAMS = "+".join(DRAFTERS)
ADVERSARIES: dict[str, Rule] = {"random": any_tokens, "reversed": reversed_}
NGRAMS = (*DRAFTERS, ALL_NGRAMS, *ADVERSARIES)
HEADS = (HEAD_DRAFTER, f"{ALL_NGRAMS}+{HEAD_DRAFTER}", *ADVERSARIES)
KINDS = tuple([("llama", name) for name in NGRAMS] + [("hybrid", name) for name in HEADS])
DEPTHS = (None, 1, 2, 3, 5, 8, "auto")
SAMPLINGS = ("coupled", "greedy")
Combination = tuple[tuple[str, str], int | str | None, str, float, int]


def params_of(temperature: float) -> SamplingParams:
    """At 0.7 with penalties and the usual filters, at 1.0 over the whole vocabulary."""
    if temperature == 1.0:
        return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return SamplingParams(temperature=temperature, repeat_penalty=1.1 if temperature else 1.0)


def seeds_of(temperature: float) -> range:
    """Without temperature no noise is asked for."""
    return range(N_SEEDS if temperature else 1)


def pairwise(factors: Sequence[Sequence[object]], seed: int) -> list[tuple[object, ...]]:
    """Rows of one choice of each factor, so that every two choices of two factors stand in some row."""
    rng = random.Random(seed)
    open_pairs = {
        (i, a, j, b) for i, j in combinations(range(len(factors)), 2) for a in factors[i] for b in factors[j]
    }
    rows = []
    while open_pairs:
        i, a, j, b = min(open_pairs, key=repr)
        rows_tried = []
        for _ in range(60):
            row = [rng.choice(list(factor)) for factor in factors]
            row[i], row[j] = a, b
            new = {(k, row[k], m, row[m]) for k, m in combinations(range(len(row)), 2)} & open_pairs
            rows_tried.append((len(new), tuple(row), new))
        _, best, new = max(rows_tried, key=lambda tried: tried[0])
        rows.append(best)
        open_pairs -= new
    return rows


FACTORS = (KINDS, (None, 1, 3, 8, "auto"), SAMPLINGS, TEMPERATURES, range(3))
PAIRS = pairwise(FACTORS, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("product")
    write_random_model(where / "llama", n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, n_ff=64, ctx=CTX, seed=1)
    write_random_hybrid(where / "hybrid", MTP, 5)
    return where


class Rig:
    """A model, and plain answers that are made once."""

    def __init__(self, model: Model, prompt: str = PROMPT, n_tokens: int = N_TOKENS) -> None:
        self.model, self.prompt, self.n_tokens = model, prompt, n_tokens
        self.plain = lru_cache(maxsize=None)(self._plain)

    def _plain(self, temperature: float, seed: int) -> tuple[Said, tuple[int, ...]]:
        with self.model.session(seed=seed) as session:
            said = listen(session, self.prompt, self.n_tokens, params_of(temperature), ignore_eos=True)
            return said, session.tokens

    def check(self, name: str, depth: int | str | None, sampling: str, temperature: float, seed: int) -> int:
        """Compare a drafted answer with the plain one; returns the rounds that had a draft."""
        expected, right = self.plain(temperature, seed)
        with self.model.session(seed=seed) as session:
            types = tuple(name.split("+"))
            known = () if name in ADVERSARIES else types
            speculation = SpeculationParams(types=known, draft_n_max=depth, draft_sampling=sampling, **SMALL)  # type: ignore[arg-type]
            if name in ADVERSARIES:
                put(session, speculation, Scripted(right, ADVERSARIES[name]), depth)
            said = listen(
                session, self.prompt, self.n_tokens, params_of(temperature), speculation, ignore_eos=True
            )
            assert said == expected
            draft = session.stats.draft
        assert draft is not None
        # Every round gives a token of its own beside the drafted ones that were right.
        assert sum(draft.depth_histogram) + draft.accepted == self.n_tokens - 1
        assert depth in (None, "auto") or len(draft.depth_histogram) <= int(depth) + 1
        return draft.rounds


def put(session: Session, speculation: SpeculationParams, drafter: Scripted, depth: int | str | None) -> None:
    """Let a drafter of the test's own draft in this session."""
    controller = Controller((drafter.name,)) if depth == "auto" else None
    chain = Chain([drafter], None if depth == "auto" else depth, controller=controller)  # type: ignore[arg-type]
    session._speculation, session._chain = speculation, chain


@pytest.fixture(scope="module")
def rigs(folder: Path) -> Iterator[dict[str, Rig]]:
    with (
        Model.open(folder / "llama", threads=1, ubatch_size=64, ctx_size=CTX) as llama,
        Model.open(folder / "hybrid", threads=1, ubatch_size=64, ctx_size=CTX, mtp=True) as hybrid,
    ):
        yield {"llama": Rig(llama), "hybrid": Rig(hybrid)}


def test_every_two_choices_are_in_some_combination() -> None:
    for i, j in combinations(range(len(FACTORS)), 2):
        assert {(row[i], row[j]) for row in PAIRS} == set(product(FACTORS[i], FACTORS[j]))
    assert 60 <= len(PAIRS) <= 80


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: "-".join(map(str, (*row[0], *row[1:]))))
def test_a_combination_gives_the_plain_answer(rigs: dict[str, Rig], row: Combination) -> None:
    (model, name), depth, sampling, temperature, seed = row
    rigs[model].check(name, depth, sampling, temperature, seed)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_product_gives_the_plain_answers(
    rigs: dict[str, Rig], kind: tuple[str, str], depth: int | str | None, temperature: float
) -> None:
    model, name = kind
    n_rounds = sum(
        rigs[model].check(name, depth, sampling, temperature, seed)
        for sampling, seed in product(SAMPLINGS, seeds_of(temperature))
    )
    assert n_rounds > 0, "nothing was drafted: the test shows nothing"


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Iterator[Rig]:
    with Model.open(demo_path, threads=1, ubatch_size=64, ctx_size=CTX) as model:
        yield Rig(model, n_tokens=40)


@pytest.fixture(scope="module")
def demo_hybrid() -> Iterator[Rig]:
    with Model.open("demo-hybrid", threads=1, ubatch_size=64, ctx_size=CTX, mtp=True) as model:
        yield Rig(model, n_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", NGRAMS)
def test_demo_gives_its_plain_answers(demo: Rig, name: str, temperature: float) -> None:
    depths = random.Random(f"{name} {temperature}")
    for seed in seeds_of(temperature):
        demo.check(name, depths.choice(DEPTHS), "coupled", temperature, seed)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", HEADS)
def test_demo_hybrid_gives_its_plain_answers(demo_hybrid: Rig, name: str, sampling: str, temperature: float) -> None:
    depths = random.Random(f"{name} {sampling} {temperature}")
    for seed in seeds_of(temperature):
        demo_hybrid.check(name, depths.choice(DEPTHS), sampling, temperature, seed)


def make_ties(path: Path) -> None:
    """Of every four rows of the output matrix two are one, and two differ in the last bits."""
    with GgufFile.open(path) as file:
        raw = bytes(file.tensor_data("output.weight"))
    whole = path.read_bytes()
    assert whole.count(raw) == 1
    rows = np.frombuffer(raw, np.float32).reshape(-1, 64).copy()
    rows[1::4] = rows[0::4]
    rows[3::4] = rows[2::4] * np.float32(1 + 2**-22)
    path.write_bytes(whole.replace(raw, rows.tobytes()))


def other_of_a_pair(ahead: list[int], rng: random.Random) -> list[int]:
    """The token that is as likely as the right one, or nearly."""
    return [token ^ 1 for token in ahead[: rng.randint(1, 5)]]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_ties_make_progress_and_give_the_plain_answer(tmp_path: Path, temperature: float) -> None:
    where = tmp_path / "ties"
    write_random_model(where, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, n_ff=64, ctx=CTX, seed=1)
    make_ties(where)
    with Model.open(where, threads=1, ubatch_size=64, ctx_size=CTX) as model:
        rig = Rig(model, n_tokens=40)
        for name in DRAFTERS:
            rig.check(name, None, "coupled", temperature, 0)
        expected, right = rig.plain(temperature, 0)
        with model.session(seed=0) as session:
            speculation = SpeculationParams(types=("ngram-simple",))
            put(session, speculation, Scripted(right, other_of_a_pair), None)
            said = listen(session, PROMPT, 40, params_of(temperature), speculation, ignore_eos=True)
            draft = session.stats.draft
        assert said == expected
        assert draft is not None and draft.accepted == 0 and sum(draft.depth_histogram) == 39
