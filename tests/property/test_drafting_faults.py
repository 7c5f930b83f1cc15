"""A failed verify pass loses nothing: what was said stays, what was drafted goes, and going on gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pykvstream import SamplingParams, Session, SpeculationParams
from pykvstream.core.device import HookPoint
from pykvstream.errors import Busy, KvStreamError
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.target import Phase
from pykvstream.speculation import DRAFTERS, Chain, ModSize, NgramSize
from tests.models import write_random_model
from tests.property.test_failed_pass import Interrupter
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.scripted_drafter import Rule, Scripted, all_right, half_right
from tests.stack import Fault, Stack, assert_idle, open_stack

SHAPE = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=320
)
PARAMS = SamplingParams(temperature=0.7, repeat_penalty=1.1)
SPECULATION = SpeculationParams(types=("ngram-simple",))
PROMPT = [(7 * i * i + 3) % 250 for i in range(600)]
MORE = [(11 * i + 5) % 250 for i in range(70)]
N_TOKENS = 14
LIMIT = 1200


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path: Path = tmp_path_factory.mktemp("faults") / "model.gguf"
    if request.param == "llama":
        write_random_model(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, ctx=2048, seed=3)
    else:
        write_random_hybrid(path, SHAPE, 5)
    with open_stack(path) as made:
        yield made


@pytest.fixture(scope="module")
def right(stack: Stack) -> tuple[int, ...]:
    """The whole conversation that nothing disturbs."""
    with stack.model.session(seed=1) as session:
        for _ in session.generate(PROMPT, max_tokens=N_TOKENS, params=PARAMS, ignore_eos=True):
            pass
        return session.tokens


@pytest.fixture(scope="module")
def following(stack: Stack, right: tuple[int, ...]) -> dict[tuple[int, bool], bytes]:
    """The logits of what comes next, by the number of tokens that were said and whether the last of them was run."""
    made = {}
    for n_said in range(1, N_TOKENS + 1):
        for was_run in (False, True):
            with stack.model.session(seed=1) as session:
                for _ in session.generate(PROMPT, max_tokens=n_said, params=PARAMS, ignore_eos=True):
                    pass
                if was_run:
                    session.forward((), phase=Phase.DECODE)
                n_tokens = len(session.tokens)
                made[n_tokens, was_run] = session.forward(MORE).tobytes()
    return made


def start(session: Session, right: tuple[int, ...], rule: Rule) -> Iterator[Piece]:
    """An answer whose first token has been said: what fails from now on is decoding."""
    session._speculation, session._chain = SPECULATION, Chain([Scripted(right, rule)])
    pieces = session.generate(PROMPT, max_tokens=N_TOKENS, params=PARAMS, ignore_eos=True, speculation=SPECULATION)
    next(pieces)
    return pieces


@pytest.mark.parametrize("rule", [all_right, half_right])
@pytest.mark.parametrize("point", [HookPoint.COPY, HookPoint.OP, HookPoint.ALLOC])
def test_a_fault_anywhere_in_an_answer_keeps_what_was_said(
    stack: Stack, right: tuple[int, ...], following: dict[tuple[int, bool], bytes], rule: Rule, point: HookPoint
) -> None:
    n_struck = 0
    step = 7 if point is HookPoint.OP else 1
    for k in range(0, LIMIT, step):
        with stack.model.session(seed=1) as session:
            fault = Fault(point, k)
            pieces = start(session, right, rule)
            with stack.fault(fault):
                try:
                    for _ in pieces:
                        pass
                except KvStreamError as error:
                    assert isinstance(error, fault.error)
                    n_struck += 1
                with suppress(Busy):  # lookahead may wait for a slot
                    stack.device.drain()
            check(stack, session, right, following)
        if fault.fired == 0:
            break
    assert n_struck > 0 or k == 0


def check(stack: Stack, session: Session, right: tuple[int, ...], following: dict[tuple[int, bool], bytes]) -> None:
    """What was said is a beginning of the right text, and what comes next is what comes next there."""
    assert_idle(stack.target)
    n_tokens = len(session.tokens)
    assert session.tokens == right[:n_tokens]
    was_run = session._core._n_kept == n_tokens
    assert session.forward(MORE).tobytes() == following[n_tokens, was_run]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("rule", [all_right, half_right])
def test_an_interrupt_at_any_line_keeps_what_was_said(
    stack: Stack, right: tuple[int, ...], following: dict[tuple[int, bool], bytes], rule: Rule
) -> None:
    """A sample of the lines that an answer runs: every 41st."""
    n_struck = 0
    for at in range(1, 100000, 41):
        with stack.model.session(seed=1) as session:
            pieces = start(session, right, rule)
            has_struck = Interrupter(at).run(lambda pieces=pieces: list(pieces))
            n_struck += has_struck
            check(stack, session, right, following)
        if not has_struck:
            break
    assert n_struck > 10


class LearningInterrupter(Interrupter):
    """The same among the lines of drafters and their chain."""

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> Any:
        return super().__call__(frame, kind, argument) if "speculation" in frame.f_code.co_filename else None


def test_an_interrupt_of_drafters_that_learn_costs_no_more_than_a_draft(stack: Stack, right: tuple[int, ...]) -> None:
    """They are told of a prompt token by token, and an interrupt comes between any two. A sample: every 659th line of
    it."""
    size = NgramSize(2, 4)
    speculation = SpeculationParams(DRAFTERS, ngram_simple=size, ngram_map_k=size, ngram_map_k4v=size,
                                    ngram_mod=ModSize(2, 0, 4))  # fmt: skip

    def answer(session: Session, prompt: list[int], n_tokens: int) -> None:
        for _ in session.generate(
            prompt, max_tokens=n_tokens, params=PARAMS, ignore_eos=True, speculation=speculation
        ):
            pass

    with stack.model.session(seed=1) as session:
        answer(session, PROMPT, N_TOKENS)
        assert session.tokens == right
        expected = session.ngram_counts
        assert expected is not None
    n_struck = 0
    with stack.model.session(seed=1) as prompted:
        prompted.forward(PROMPT)
        for at in range(1, 100000, 659):
            with prompted.fork() as session:
                session.seed = 1
                has_struck = LearningInterrupter(at).run(partial(answer, session, [], N_TOKENS))
                n_struck += has_struck
                with session.fork() as child:  # told of everything, or of nothing
                    child.seed = 1
                    answer(child, [], len(right) - len(child.tokens))
                    assert child.tokens == right
                n_left = len(right) - len(session.tokens)
                answer(session, [], n_left)
                assert session.tokens == right
                counts = session.ngram_counts
                assert counts is not None
                assert counts.to_bytes() == expected.to_bytes()
            if not has_struck:
                break
    assert n_struck > 4


def test_a_fork_while_a_draft_is_judged_leaves_what_follows_as_it_was(
    stack: Stack, right: tuple[int, ...], following: dict[tuple[int, bool], bytes]
) -> None:
    """Rows of the draft that were not said yet go; the tokens that are said of it all the same count as decoded."""
    for n_before in range(1, N_TOKENS - 1):
        for n_more in range(1, min(4, N_TOKENS - n_before)):
            with stack.model.session(seed=1) as session:
                pieces = start(session, right, all_right)
                for _ in range(n_before - 1):
                    next(pieces)
                session.fork().close()
                for _ in range(n_more):
                    next(pieces)
                check(stack, session, right, following)
