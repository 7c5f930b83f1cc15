"""The demo model end to end: what a user is promised, on a real model.

Units: arenas in MiB as on the command line.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykvstream.engine import Model
from pykvstream.errors import NoSpace
from pykvstream.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
CTX = 4096
N_PROMPT = 3000
N_ANSWER = 8
ARENAS = (12, 20, 512)
_TEXT = "the river of stone and light runs under seven bridges while old traders count copper by the gate"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one arena gave: tokens, a hash over the logits they were chosen from, bytes that streamed."""

    tokens: tuple[int, ...]
    logits_sha256: str
    streamed_bytes: int


def long_text(n_words: int) -> str:
    rng = random.Random(7)
    words = _TEXT.split()
    return " ".join(rng.choice(words) + ("." if rng.random() < 0.1 else "") for _ in range(n_words))


def answer(path: Path, arena_mib: float) -> Answer:
    with (
        Model.open(
            path, arena_mib=arena_mib, ctx_size=CTX, cache_type_k="q8_0", cache_type_v="q4_0", ubatch_size=128
        ) as model,
        closing(model.session(seed=1)) as session,
    ):
        prompt = model.tokenizer.encode(long_text(N_PROMPT))[:N_PROMPT]
        assert len(prompt) == N_PROMPT
        digest = hashlib.sha256()
        tokens = []
        for piece in session.generate(prompt, max_tokens=N_ANSWER, params=GREEDY, ignore_eos=True):
            digest.update(piece.logits.astype("<f4").tobytes())
            tokens.append(piece.token)
        model.check_integrity()
        return Answer(tuple(tokens), digest.hexdigest(), session.stats.streamed_bytes)


def test_arenas_of_12_20_and_512_mib_give_the_same_logits(demo_path: Path) -> None:
    small, middle, resident = (answer(demo_path, mib) for mib in ARENAS)
    assert small.streamed_bytes > middle.streamed_bytes > 0
    assert resident.streamed_bytes == 0
    assert len(resident.tokens) == N_ANSWER
    assert small.tokens == middle.tokens == resident.tokens
    assert small.logits_sha256 == middle.logits_sha256 == resident.logits_sha256


def test_the_answer_is_sensible(demo_path: Path) -> None:
    with Model.open(demo_path, ctx_size=512) as model, closing(model.session()) as session:
        pieces = session.generate("The capital of France is", max_tokens=4, params=GREEDY)
        assert "Paris" in "".join(piece.text for piece in pieces)


def test_the_smallest_arena_works_and_a_page_less_is_refused(demo_path: Path) -> None:
    with Model.open(demo_path, ctx_size=CTX, ubatch_size=128) as model:
        smallest = model.plan.smallest_bytes
        page = model.plan.shape.slot_bytes
    with (
        Model.open(demo_path, arena_mib=smallest / 2**20, ctx_size=CTX, ubatch_size=128) as model,
        closing(model.session()) as session,
    ):
        assert model.plan.arena_bytes == smallest
        session.forward(model.tokenizer.encode(long_text(900))[:800], logits="none")
        assert session.stats.streamed_bytes > 0
    have = smallest - page
    with pytest.raises(NoSpace) as refusal:
        Model.open(demo_path, arena_mib=have / 2**20, ctx_size=CTX, ubatch_size=128)
    assert str(smallest) in str(refusal.value)
    assert str(have // 64 * 64) in str(refusal.value)
