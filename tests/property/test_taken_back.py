"""What was tried and taken back leaves no trace: a conversation goes on with the bits of one that never tried it.

Beside recurrent layers a prompt and single tokens are rounded differently, so that it shows in which of the two ways a
token was run. The last token of an answer is run by whatever comes next, and that may be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, NgramSize, SamplingParams, Session, SpeculationParams
from pykvstream.runtime.target import Phase

GREEDY = SamplingParams(temperature=0.0)
N_ANSWER = 6
MORE = [7, 8, 9]
DRAFTS = SpeculationParams(types=("ngram-simple",), ngram_simple=NgramSize(1, 4), draft_n_max=4)


def answer(session: Session, prompt: list[int], n: int, speculation: SpeculationParams | None = None) -> bytes:
    pieces = session.generate(prompt, max_tokens=n, params=GREEDY, ignore_eos=True, speculation=speculation)
    return b"".join(piece.logits.tobytes() for piece in pieces)


def save_and_load(session: Session, path: Path) -> Session:
    session.save(path)
    return session.model.load_session(path)


TRIED: dict[str, Callable[[Session], object]] = {
    "nothing": lambda session: None,
    "a prompt": lambda session: session.forward(MORE),
    "a long prompt": lambda session: session.forward(list(range(300, 440))),
    "tokens one by one": lambda session: session.forward(MORE, phase=Phase.DECODE),
    "an answer to more": lambda session: answer(session, MORE, 3),
    "the answer itself": lambda session: answer(session, [], 4),
    "the answer, drafted": lambda session: answer(session, [], 9, DRAFTS),
    "a turn": lambda session: list(session.chat("No, stop.", max_tokens=3)),
    "a prompt in two": lambda session: (session.forward(MORE), session.forward(MORE)),
    "a prompt, half of it kept": lambda session: (session.forward(MORE), session.truncate(len(session.tokens) - 2)),
}
GOING_ON: dict[str, Callable[[Session], bytes]] = {
    "the answer": lambda session: answer(session, [], 4),
    "a prompt": lambda session: answer(session, [11, 12, 13], 3),
    "a long prompt": lambda session: answer(session, list(range(100, 270)), 3),
    "one by one": lambda session: session.forward([11, 12], logits="all", phase=Phase.DECODE).tobytes(),
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.open("demo-hybrid", ctx_size=1024, threads=1) as opened:
        yield opened


def kept_of(n_prompt: int) -> Iterator[int]:
    """How much of the answer stays; where all of it goes, the prompt alone."""
    yield from (N_ANSWER, 3, 1, 0) if n_prompt < 100 else (N_ANSWER, 2)


@pytest.mark.parametrize("n_prompt", [5, 63, 64, 130])
@pytest.mark.parametrize("tried", TRIED)
def test_what_was_taken_back_leaves_no_trace(model: Model, tried: str, n_prompt: int, tmp_path: Path) -> None:
    prompt = list(range(300, 300 + n_prompt))
    for n_kept in kept_of(n_prompt):
        for name, go_on in GOING_ON.items():
            with closing(model.session(seed=1)) as plain, closing(model.session(seed=1)) as session:
                answer(plain, prompt, n_kept) if n_kept else plain.forward(prompt)
                expected = go_on(plain)
                answer(session, prompt, N_ANSWER)
                TRIED[tried](session)
                session.truncate(n_prompt + n_kept)
                if (name, n_kept) in (("a prompt", 3), ("the answer", N_ANSWER)):
                    with closing(session.fork()) as child:
                        assert go_on(child) == expected
                    with closing(save_and_load(session, tmp_path / "saved")) as loaded:
                        assert go_on(loaded) == expected
                assert go_on(session) == expected, f"{n_kept} tokens kept, then {name}"
