"""The hybrid that comes with the project has learned something: a distant fact comes back, wherever its page lay."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, SamplingParams
from pykvstream.locate import find_model

FILLER = (Path(__file__).parents[2] / "tools" / "demo_text.txt").read_text(encoding="utf-8")
FACT = "\n\nThe secret code of Marina is 7294518.\n\n"
QUESTION = "\n\nQuestion: What is the secret code of Marina?\nAnswer: The secret code of Marina is "


def answer(arena_mib: float | None) -> tuple[str, list[bytes], int]:
    """Greedy answer, the logits of its tokens, and bytes that were streamed."""
    text = FILLER[:1500] + FACT + FILLER[1500:12000] + QUESTION
    with (
        Model.open("demo-hybrid", ctx_size=4096, arena_mib=arena_mib, ubatch_size=256, threads=2) as model,
        model.session(seed=1) as session,
    ):
        pieces = list(session.generate(text, max_tokens=8, params=SamplingParams(temperature=0.0)))
        rows = session.forward([5], logits="last").tobytes()
        return "".join(piece.text for piece in pieces), [rows], session.stats.streamed_bytes


def test_the_file_is_small_and_comes_with_the_package() -> None:
    assert find_model("demo-hybrid").stat().st_size < 16_000_000


def test_a_distant_fact_comes_back_through_the_ring() -> None:
    with Model.open("demo-hybrid", ctx_size=4096, ubatch_size=256, threads=2) as model:
        smallest = model.plan.smallest_bytes / (1 << 20)
    resident, streamed = answer(None), answer(smallest + 0.01)
    assert resident[0].startswith("7294518")
    assert streamed[:2] == resident[:2]
    assert resident[2] == 0 and streamed[2] > 0
