"""A failed verify pass loses nothing: what was said stays, what was drafted goes, and going on gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pykvstream import SamplingParams, Session, SpeculationParams
from pykvstream.core.device import HookPoint
from pykvstream.errors import Busy, KvStreamError
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.target import Phase
from pykvstream.speculation import Chain
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
