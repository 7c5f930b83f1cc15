"""A pass of the MTP head that fails loses nothing: what was said stays, and going on gives the same bits and drafts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from pykvstream import SamplingParams, Session, SpeculationParams
from pykvstream.core.device import HookPoint
from pykvstream.errors import Busy, KvStreamError
from pykvstream.runtime.target import Phase
from pykvstream.speculation import HEAD_DRAFTER
from tests.property.test_drafting_faults import SHAPE
from tests.property.test_failed_pass import Interrupter
from tests.random_hybrid import write_random_hybrid
from tests.stack import Fault, Stack, assert_idle, open_stack

PARAMS = SamplingParams(temperature=0.7, repeat_penalty=1.1)
SPECULATION = SpeculationParams(types=(HEAD_DRAFTER,), draft_n_max=3)
PROMPT = [(7 * i * i + 3) % 250 for i in range(600)]
MORE = [(11 * i + 5) % 250 for i in range(70)]
N_TOKENS = 6
Right = dict[tuple[int, bool], tuple[tuple[int, ...], bytes, list[int]]]
LIMIT = 1500


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In the smallest arena: the head's pages stream too."""
    path: Path = tmp_path_factory.mktemp("faults") / "model.gguf"
    write_random_hybrid(path, replace(SHAPE, n_mtp=1), 5)
    with open_stack(path, mtp=True) as made:
        yield made


@pytest.fixture(scope="module")
def right(stack: Stack) -> Right:
    """By the number of tokens that were said, and whether the last one was run: the conversation, what comes next, and
    what is drafted then."""
    made = {}
    for n_said in range(1, N_TOKENS + 1):
        for was_run in (False, True):
            with stack.model.session(seed=1) as session:
                for _ in session.generate(PROMPT, max_tokens=n_said, params=PARAMS, ignore_eos=True):
                    pass
                if was_run:
                    session.forward((), phase=Phase.DECODE)
                tokens = session.tokens
                made[len(tokens), was_run] = (tokens, *what_follows(session))
    return made


def what_follows(session: Session) -> tuple[bytes, list[int]]:
    logits = session.forward(MORE).tobytes()
    session._core.push(9)
    found: list[int] = []

    def choose(row: np.ndarray, position: int) -> int:
        found.append(int(row.argmax()))
        return found[-1]

    session._core.draft(3, choose)
    return logits, found


def check(stack: Stack, session: Session, right: Right) -> None:
    assert_idle(stack.target)
    head = stack.target.head
    assert head is not None and not head.pager_info.is_in_pass
    n_tokens = len(session.tokens)
    tokens, logits, drafts = right[n_tokens, session._core._n_kept == n_tokens]
    assert session.tokens == tokens
    assert what_follows(session) == (logits, drafts)


def start(session: Session) -> Iterator[object]:
    pieces = session.generate(PROMPT, max_tokens=N_TOKENS, params=PARAMS, ignore_eos=True, speculation=SPECULATION)
    next(pieces)
    return pieces


@pytest.mark.parametrize("point", [HookPoint.COPY, HookPoint.OP, HookPoint.ALLOC])
def test_a_fault_anywhere_in_drafting_keeps_what_was_said(
    stack: Stack, right: Right, point: HookPoint
) -> None:
    n_struck = 0
    for k in range(0, LIMIT, 23 if point is HookPoint.OP else 2):
        with stack.model.session(seed=1) as session:
            fault = Fault(point, k)
            pieces = start(session)
            with stack.fault(fault):
                try:
                    for _ in pieces:
                        pass
                except KvStreamError as error:
                    assert isinstance(error, fault.error)
                    n_struck += 1
                with suppress(Busy):  # lookahead may wait for a slot
                    stack.device.drain()
            check(stack, session, right)
        if fault.fired == 0:
            break
    assert n_struck > 0 or k == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_drafting_keeps_what_was_said(
    stack: Stack, right: Right
) -> None:
    """A sample of the lines that an answer runs: every 97th."""
    n_struck = 0
    for at in range(1, 100000, 97):
        with stack.model.session(seed=1) as session:
            pieces = start(session)
            has_struck = Interrupter(at).run(lambda pieces=pieces: list(pieces))
            n_struck += has_struck
            gc.collect()  # a handle that was struck while it closed goes with the interrupt's traceback
            check(stack, session, right)
        if not has_struck:
            break
    assert n_struck > 5


class LeaseInterrupter(Interrupter):
    """Counts the lines alone that take a head's lease and give it back."""

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> Any:
        is_near = frame.f_code.co_filename.endswith(("head.py", "layer_lease.py", "handle.py"))
        if kind == "call" and not (is_near and frame.f_code.co_name in LEASING):
            return None
        return super().__call__(frame, kind, argument)


LEASING = ("recover", "give_back", "drafting", "_take_lease", "acquire")
"""Not ``close``: between its two lines, where only a tracer strikes, a handle goes with the interrupt's traceback."""


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_lease_leaves_nothing_held(stack: Stack, right: Right) -> None:
    """Nor does anything wait for the garbage collector, which may not come before the next pass."""
    n_struck = 0
    gc.disable()
    try:
        for at in range(1, 200):
            with stack.model.session(seed=1) as session:
                pieces = start(session)
                has_struck = LeaseInterrupter(at).run(lambda pieces=pieces: list(pieces))
                n_struck += has_struck
                check(stack, session, right)
            if not has_struck:
                break
    finally:
        gc.enable()
    assert 30 < n_struck < 190


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_close_is_ended_by_another(stack: Stack) -> None:
    """Whatever line it strikes: nothing of the session is left once another one has come and gone."""

    def close_one(session: Session, at: int) -> bool:
        child = session.fork()
        child.forward(MORE[:3])
        has_struck = Interrupter(at).run(child.close)
        child.close()
        return has_struck

    with stack.model.session(seed=1) as session:
        session.forward(PROMPT)
        close_one(session, 0)
        objects = stack.device.info.live_objects
        n_struck = 0
        while close_one(session, n_struck + 1):
            n_struck += 1
            close_one(session, 0)
            gc.collect()
            assert stack.device.info.live_objects == objects, n_struck
        assert n_struck > 20
        stack.model.check_integrity()
