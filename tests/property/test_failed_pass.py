"""A failed step loses nothing: faults at every copy, allocation and operation of passes, transitions, forks.

Whatever fails, the session keeps its tokens, every object its invariants, and going on gives the very bits of
a run that nothing disturbed. The model streams: its arena is the smallest that works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.device import DeviceFlag, HookPoint
from pykvstream.engine import Session
from pykvstream.errors import Busy, Cancelled, DeviceError, HostMemoryError, KvStreamError
from pykvstream.runtime.target import Phase
from tests.models import write_random_model
from tests.stack import HARD_FLAGS, Fault, Stack, assert_idle, open_stack

N_PROMPT = 660
PROMPT = np.random.default_rng(11).integers(0, 300, N_PROMPT).tolist()
MORE = np.random.default_rng(12).integers(0, 300, 150).tolist()
TOKEN = [17]
LIMIT = 400
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failed") / "model.gguf"
    write_random_model(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, ctx=2048, seed=3)
    return path


@pytest.fixture(
    scope="module", params=[HARD_FLAGS, HARD_FLAGS | DeviceFlag.DEFERRED], ids=["thread", "deferred"]
)
def stack(model_path: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    with open_stack(model_path, flags=request.param) as made:
        yield made


@pytest.fixture
def session(stack: Stack) -> Iterator[Session]:
    with stack.model.session() as made:
        made.forward(PROMPT, logits="none")
        yield made


def decode(session: Session) -> Logits:
    return session.forward(TOKEN, phase=Phase.DECODE).copy()


def prompt(session: Session) -> Logits:
    return session.forward(MORE, logits="all").copy()


STEPS = {"decode": decode, "prompt": prompt}


@pytest.fixture(scope="module")
def expected(model_path: Path) -> dict[str, Logits]:
    """What the steps give after the prompt, with everything resident and nothing in the way."""
    with open_stack(model_path, extra_slots=40) as stack:
        made = {}
        for name, step in STEPS.items():
            with stack.model.session() as session:
                session.forward(PROMPT, logits="none")
                made[name] = step(session)
                assert session.stats.streamed_bytes == 0
        return made


def fork_into(children: list[Session], parent: Session) -> None:
    children.append(parent.fork())


def attempt(stack: Stack, fault: Fault, action: Callable[[], object]) -> BaseException | None:
    """Run an action under a fault, and what it leaves to the copy engine."""
    caught: BaseException | None = None
    with stack.fault(fault):
        try:
            action()
        except (KvStreamError, KeyboardInterrupt) as error:
            caught = error
        with suppress(Busy):  # lookahead may wait for a slot
            stack.device.drain()
    return caught


def check_every(
    stack: Stack,
    session: Session,
    step: Callable[[Session], Logits],
    expected: Logits,
    make_fault: Callable[[int], Fault],
    error: type[BaseException],
    first_phase: Phase,
) -> int:
    """Disturb ``step`` at every place in turn; returns how many there were."""
    before = session.tokens
    for k in range(LIMIT):
        stack.target.enter(first_phase)
        fault = make_fault(k)
        caught = attempt(stack, fault, lambda: step(session))
        if fault.fired == 0:
            assert caught is None
            session.truncate(len(before))
            return k
        assert_idle(stack.target)
        if caught is None:
            session.truncate(len(before))
        else:
            assert isinstance(caught, error), caught
        assert session.tokens == before
        np.testing.assert_array_equal(step(session), expected)
        session.truncate(len(before))
    raise AssertionError(f"more than {LIMIT} places")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("count", [1, 2, 10**6])
def test_a_failed_copy_loses_nothing(
    stack: Stack, session: Session, expected: dict[str, Logits], name: str, count: int
) -> None:
    n = check_every(
        stack,
        session,
        STEPS[name],
        expected[name],
        lambda k: Fault(HookPoint.COPY, k, count),
        DeviceError,
        Phase.PREFILL,
    )
    assert n > 4
    assert session.stats.streamed_bytes > 0


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("first_phase", Phase)
@pytest.mark.parametrize("count", [1, 2, 10**6])
def test_a_failed_allocation_loses_nothing(
    stack: Stack, session: Session, expected: dict[str, Logits], name: str, first_phase: Phase, count: int
) -> None:
    """With the other phase first, the step begins with a transition. Without end, undoing fails too: poison."""
    n = check_every(
        stack,
        session,
        STEPS[name],
        expected[name],
        lambda k: Fault(HookPoint.ALLOC, k, count),
        KvStreamError,
        first_phase,
    )
    assert n >= 2


@pytest.mark.parametrize("name", STEPS)
def test_a_failed_fence_loses_nothing(
    stack: Stack, session: Session, expected: dict[str, Logits], name: str
) -> None:
    other = Phase.PREFILL if name == "decode" else Phase.DECODE
    n = check_every(
        stack, session, STEPS[name], expected[name], lambda k: Fault(HookPoint.FENCE, k), DeviceError, other
    )
    assert n >= 1


@pytest.mark.parametrize("name", STEPS)
def test_a_failed_operation_loses_nothing(
    stack: Stack, session: Session, expected: dict[str, Logits], name: str
) -> None:
    n = check_every(
        stack,
        session,
        STEPS[name],
        expected[name],
        lambda k: Fault(HookPoint.OP, k),
        DeviceError,
        Phase.PREFILL,
    )
    assert n > 10


@pytest.mark.parametrize("name", STEPS)
def test_cancelling_before_any_operation_loses_nothing(
    stack: Stack, session: Session, expected: dict[str, Logits], name: str
) -> None:
    before = session.tokens
    for k in range(LIMIT):
        fault = Fault(HookPoint.OP, k, action=session.cancel)
        caught = attempt(stack, fault, lambda: STEPS[name](session))
        if fault.fired == 0:
            break
        if caught is None:  # nothing was left to stop: the next pass obeys
            session.truncate(len(before))
            with pytest.raises(Cancelled):
                STEPS[name](session)
        else:
            assert isinstance(caught, Cancelled)
        assert session.tokens == before
        assert_idle(stack.target)
        np.testing.assert_array_equal(STEPS[name](session), expected[name])
        session.truncate(len(before))
    assert 10 < k < LIMIT


def test_a_failed_fork_leaves_parent_and_seed_alone(
    stack: Stack, session: Session, expected: dict[str, Logits]
) -> None:
    undisturbed = session.fork()
    seed = undisturbed.seed
    undisturbed.close()
    for point in (HookPoint.ALLOC, HookPoint.COPY):
        for k in range(LIMIT):
            session.truncate(N_PROMPT)
            with stack.model.session() as fresh:
                fresh.forward(PROMPT, logits="none")
                fault = Fault(point, k)
                children: list[Session] = []
                caught = attempt(stack, fault, partial(fork_into, children, fresh))
                assert caught is None or (fault.fired and isinstance(caught, fault.error))
                if caught is not None:
                    children.append(fresh.fork())
                assert children[0].seed == seed
                for one in (children[0], fresh):
                    assert one.tokens == tuple(PROMPT)
                    np.testing.assert_array_equal(decode(one), expected["decode"])
                children[0].close()
                if fault.fired == 0:
                    break
        assert k < LIMIT - 1


def test_a_pass_of_a_fork_that_fails_leaves_its_parent_alone(
    stack: Stack, session: Session, expected: dict[str, Logits]
) -> None:
    """The first write into a shared page copies it: a fault there may spoil neither."""
    for point in (HookPoint.COPY, HookPoint.OP, HookPoint.ALLOC):
        for k in range(0, LIMIT):
            child = session.fork()
            fault = Fault(point, k)
            caught = attempt(stack, fault, partial(decode, child))
            assert caught is None or (fault.fired and isinstance(caught, fault.error))
            child.truncate(N_PROMPT)
            for one in (child, session):
                np.testing.assert_array_equal(decode(one), expected["decode"])
                one.truncate(N_PROMPT)
            child.close()
            assert_idle(stack.target)
            if fault.fired == 0:
                break
        assert k < LIMIT - 1


@pytest.mark.parametrize("kept", [0, 255, 256, 400, N_PROMPT - 1])
def test_a_failed_truncation_keeps_all_or_what_was_asked(stack: Stack, session: Session, kept: int) -> None:
    with stack.model.session() as other:
        other.forward(PROMPT[:kept] + MORE, logits="none")
        reference = decode(other)
    for k in range(LIMIT):
        session.truncate(0)
        session.forward(PROMPT, logits="none")
        fault = Fault(HookPoint.COPY, k, 2)
        caught = attempt(stack, fault, lambda: session.truncate(kept))
        assert caught is None or (fault.fired and isinstance(caught, DeviceError))
        assert session.tokens == tuple(PROMPT[: N_PROMPT if caught else kept])
        session.truncate(kept)
        session.forward(MORE, logits="none")
        np.testing.assert_array_equal(decode(session), reference)
        if fault.fired == 0:
            break
    assert k < LIMIT - 1


def test_history_that_cannot_be_written_for_a_while_is_not_lost(
    stack: Stack, session: Session, expected: dict[str, Logits]
) -> None:
    """The rows stay on the device; each call says so until copies work again."""
    before = session.tokens
    fault = Fault(HookPoint.COPY, 0, 10**6)
    with stack.fault(fault):
        for _ in range(3):
            with pytest.raises(DeviceError):
                for _ in range(2):
                    session.forward(TOKEN, phase=Phase.DECODE)
            assert session.tokens in (before, (*before, *TOKEN))
    session.truncate(len(before))
    np.testing.assert_array_equal(decode(session), expected["decode"])


SWALLOWING = ("<lambda>", "__del__")
"""Destructors of handles: what is raised there goes nowhere."""


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that the package runs."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.n_lines = 0

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if (
            "pykvstream" not in name
            or name.endswith(("errors.py", "status.py"))
            or frame.f_code.co_name in SWALLOWING
        ):
            return None
        if kind == "line":
            self.n_lines += 1
            if self.n_lines == self.at:
                raise KeyboardInterrupt
        return self

    def run(self, action: Callable[[], object]) -> bool:
        """Whether the interrupt struck and came out, itself and not as an error that it led to."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("first_phase", Phase)
def test_an_interrupt_anywhere_leaves_the_session_usable(
    model_path: Path, expected: dict[str, Logits], name: str, first_phase: Phase
) -> None:
    """A handle whose constructor is interrupted may leak a C object, so each model is fresh and not asked for leaks."""
    with open_stack(model_path, checks_leaks=False) as stack, stack.model.session() as session:
        session.forward(PROMPT, logits="none")
        before = session.tokens
        counter = Interrupter(-1)
        stack.target.enter(first_phase)
        counter.run(lambda: STEPS[name](session))
        session.truncate(len(before))
        struck = 0
        for at in range(1, counter.n_lines + 1):
            stack.target.enter(first_phase)
            struck += Interrupter(at).run(lambda: STEPS[name](session))
            n = len(session.tokens)
            assert n >= len(before)
            assert session.tokens[: len(before)] == before
            session.truncate(len(before))
            np.testing.assert_array_equal(STEPS[name](session), expected[name])
            session.truncate(len(before))
            assert_idle(stack.target)
        assert struck > counter.n_lines // 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_of_a_hook_is_an_error_of_the_pass(
    stack: Stack, session: Session, expected: dict[str, Logits], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = session.tokens
    caught = attempt(stack, Fault(HookPoint.OP, 5, action=interrupt), lambda: decode(session))
    assert isinstance(caught, KvStreamError | KeyboardInterrupt)
    assert session.tokens == before
    np.testing.assert_array_equal(decode(session), expected["decode"])


def test_generation_that_cannot_resume_keeps_its_last_token(stack: Stack, session: Session) -> None:
    before = session.tokens
    with stack.fault(Fault(HookPoint.OP, 3)), pytest.raises(DeviceError):
        next(iter(session.generate(())))
    assert session.tokens == before
    with stack.fault(Fault(HookPoint.ALLOC, 0, 10**6)), pytest.raises(HostMemoryError):
        next(iter(session.generate(MORE)))
    assert session.tokens == before
