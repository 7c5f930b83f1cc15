"""The promises on models with recurrent layers: placement and width change no bit, a failed step loses nothing.

Keys and values, and recurrent state, must stay at one token through failures at every copy, allocation and operation;
what a state cannot follow is refused before anything has changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.core.device import Device, HookPoint
from pykvstream.core.state import State
from pykvstream.engine import Session
from pykvstream.errors import Busy, Cancelled, InvalidArgument, KvStreamError, NotFound
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.context import PartContext
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions
from tests.random_hybrid import Experts, HybridShape, write_random_hybrid
from tests.rigs import Rig, open_rig, random_placement, tokens_of
from tests.stack import Fault, Stack, assert_idle, open_stack, smallest_arena

SHAPE = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=300
)
KINDS = {"dense": SHAPE, "experts": replace(SHAPE, experts=Experts(4, 2, 32, 32))}
N_PROMPT, N_MORE = 600, 150
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    write_random_hybrid(made, KINDS[request.param], 2)
    return made


def prompt() -> npt.NDArray[np.uint32]:
    return tokens_of(1, N_PROMPT, 300)


def more() -> npt.NDArray[np.uint32]:
    return tokens_of(2, N_MORE, 300)


def conversation(rig: Rig, width: int = 1) -> bytes:
    """A prompt, an answer in passes of ``width`` rows, another prompt."""
    with closing(rig.session()) as session:
        rows = [session.forward(prompt(), logits="all")]
        rows += [
            session.forward(more()[i : i + width], logits="all", phase=Phase.DECODE) for i in range(0, 60, width)
        ]
        rows.append(session.forward(more(), logits="all"))
        rig.target.check_integrity()
    return np.concatenate(rows).tobytes()


def test_placement_width_threads_and_fusing_change_no_bit(path: Path) -> None:
    with open_rig(path, ubatch=128) as rig:
        expected = conversation(rig)
        assert rig.streamed_bytes == 0
    with open_rig(path, ubatch=128, residency=0.0, threads=3) as rig:
        assert conversation(rig, 5) == expected
        assert rig.streamed_bytes > 0
        for phase in Phase:
            rig.target.place(phase, random_placement(rig.plan, phase, random.Random(7)))
        assert conversation(rig, 12) == expected
    with open_rig(path, ubatch=128, fused=False) as rig:
        assert conversation(rig, 60) == expected


@pytest.fixture(scope="module")
def stack(path: Path) -> Iterator[Stack]:
    with open_stack(path, ubatch_size=64) as made:
        yield made


@pytest.fixture(scope="module")
def session(stack: Stack) -> Iterator[Session]:
    """A prompt and three decoded tokens: the state has a folded part and a log."""
    with stack.model.session() as made:
        made.forward(prompt(), logits="none")
        made.forward(more()[:3], phase=Phase.DECODE)
        yield made


def decode(session: Session) -> Floats:
    return session.forward([17], phase=Phase.DECODE)


def verify(session: Session) -> Floats:
    return session.forward(more()[:9], phase=Phase.DECODE, logits="all")


def long_verify(session: Session) -> Floats:
    return session.forward(more()[:70], phase=Phase.DECODE, logits="all")


def read(session: Session) -> Floats:
    return session.forward(more(), logits="all")


STEPS = {"decode": decode, "verify": verify, "long verify": long_verify, "prompt": read}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("point", [HookPoint.COPY, HookPoint.ALLOC, HookPoint.OP], ids=lambda point: point.name)
def test_a_step_that_fails_anywhere_loses_nothing(
    stack: Stack, session: Session, name: str, point: HookPoint
) -> None:
    step = STEPS[name]
    with session.fork() as child:
        expected = step(child).tobytes()
    n_faults = 0
    for k in places(point):
        with session.fork() as child:
            fault = Fault(point, k)
            caught = attempt(stack, fault, lambda child=child: step(child))
            if fault.fired == 0:
                assert caught is None
                break
            n_faults += caught is not None
            assert_idle(stack.target)
            assert caught is None or child.tokens == session.tokens
            if caught is not None:
                assert step(child).tobytes() == expected
    assert n_faults > 0 or point is HookPoint.ALLOC


def places(point: HookPoint) -> Iterator[int]:
    """Every place for allocations and copies; operations are many, so ever wider steps."""
    k = 0
    while k < 600:
        yield k
        k += 1 if point is not HookPoint.OP else 1 + k // 3


def attempt(stack: Stack, fault: Fault, action: Callable[[], object]) -> BaseException | None:
    caught: BaseException | None = None
    with stack.fault(fault):
        try:
            action()
        except KvStreamError as error:
            caught = error
        with suppress(Busy):
            stack.device.drain()
    return caught


def test_a_prompt_that_is_cancelled_between_passes_leaves_the_state_as_it_was(session: Session) -> None:
    with session.fork() as child:
        expected = decode(child).tobytes()
    with session.fork() as child:
        with pytest.raises(Cancelled):
            child.forward(more(), on_progress=lambda done, total: child.cancel())
        assert child.tokens == session.tokens
        assert decode(child).tobytes() == expected


def test_forks_go_on_alike_and_apart(session: Session) -> None:
    with session.fork() as one, session.fork() as other:
        decode(one)
        with one.fork() as third:
            read(other)
            assert verify(third).tobytes() == verify(one).tobytes()


def test_accepted_rows_of_a_verify_pass_can_be_dropped_in_part(session: Session) -> None:
    with session.fork() as plain:
        plain.forward(more()[:4], phase=Phase.DECODE)
        expected = decode(plain).tobytes()
    with session.fork() as child:
        verify(child)
        child.truncate(len(session.tokens) + 4)
        assert decode(child).tobytes() == expected


def test_going_back_further_than_log_and_checkpoints_is_refused_and_changes_nothing(session: Session) -> None:
    with session.fork() as child:
        verify(child)
        before = child.tokens
        with pytest.raises(NotFound, match="recurrent state"):
            child.truncate(N_PROMPT - 100)
        assert child.tokens == before
        expected = decode(child).tobytes()
    with session.fork() as child:
        verify(child)
        assert decode(child).tobytes() == expected
        child.truncate(0)
        assert child.tokens == ()
        child.forward(prompt(), logits="none")
        child.forward(more()[:3], phase=Phase.DECODE)
        verify(child)
        assert decode(child).tobytes() == expected


def test_a_state_that_cannot_follow_its_sequence_is_begun_anew(path: Path) -> None:
    """What an interrupt leaves that strikes between the two: the tokens are known, so they are run again."""
    with open_rig(path, ubatch=128) as rig, closing(rig.session()) as session, closing(rig.session()) as plain:
        for each in (session, plain):
            each.forward(prompt(), logits="none")
        cut_behind_the_back_of_the_state(rig, session, 100)
        logits = session.forward([1])
        assert session.tokens == (*prompt().tolist(), 1)
        np.testing.assert_allclose(logits, plain.forward([1]), atol=1e-4)


@pytest.mark.parametrize("name", STEPS)
def test_an_interrupt_between_commit_and_accept_loses_nothing(
    session: Session, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of the pass are committed by then, its rows of the state are not."""
    step = STEPS[name]
    with session.fork() as child:
        expected = step(child).tobytes()
    with session.fork() as child:
        with monkeypatch.context() as patched:
            patched.setattr(PartContext, "accept", interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(child)
        assert child.tokens == session.tokens
        assert step(child).tobytes() == expected


def interrupt(context: PartContext | State, *arguments: object) -> None:
    raise KeyboardInterrupt


def test_what_an_interrupt_of_a_truncation_left_is_looked_for(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are cut by then, the state is not; both forks ended their last call well."""
    with session.fork() as plain, session.fork() as child:
        for each in (plain, child):
            each.forward([3, 1, 4], phase=Phase.DECODE)
        n_kept = len(plain.tokens) - 1
        plain.truncate(n_kept)
        with monkeypatch.context() as patched:
            patched.setattr(State, "truncate", interrupt)
            with pytest.raises(KeyboardInterrupt):
                child.truncate(n_kept)
        child.truncate(n_kept)
        expected = plain.forward([5], phase=Phase.DECODE).tobytes()
        assert child.forward([5], phase=Phase.DECODE).tobytes() == expected


def cut_behind_the_back_of_the_state(rig: Rig, session: TokenSession, n_tokens: int) -> None:
    rig.target.recover(session._context)  # as every call begins, that of the interrupt too
    rig.target.parts[-1].pager.truncate(session._context.parts[0].seq, n_tokens)


@pytest.mark.parametrize(
    ("ubatch", "log_rows", "words"),
    [(100, 8, "no multiple of the 64"), (32, 8, "no multiple of the 64"), (64, 65, "log_rows 65"), (64, 0, "log_rows")],
)
def test_widths_that_cannot_be_served_are_refused(path: Path, ubatch: int, log_rows: int, words: str) -> None:
    with GgufFile.open(path) as file, Device(1) as device:
        options = TargetOptions(GgmlType.F16, GgmlType.F16, ubatch, 512, log_rows=log_rows)
        with pytest.raises(InvalidArgument, match=words):
            Blueprint(file, ModelConfig.from_gguf(file), device, options)


def test_a_smaller_log_takes_less_memory_and_changes_no_bit(path: Path) -> None:
    found = []
    for log_rows in (64, 5):
        with GgufFile.open(path) as file, Device(1) as device:
            options = TargetOptions(GgmlType.F16, GgmlType.F16, 64, 1024, log_rows=log_rows)
            blueprint = Blueprint(file, ModelConfig.from_gguf(file), device, options)
            target = Target(device, blueprint, smallest_arena(blueprint))
            with closing(target), closing(TokenSession(target, 1024)) as session:
                session.forward(prompt(), logits="none")
                logits = session.forward(more()[:70], logits="all", phase=Phase.DECODE)
                found.append((target.report.state_bytes, logits.tobytes()))
    assert found[0][0] > found[1][0] and found[0][1] == found[1][1]


def test_everything_on_the_device_is_in_the_report(path: Path) -> None:
    with open_stack(path, ubatch_size=64) as stack:
        report = stack.model.report
        before = stack.device.info.device_bytes
        assert before == report.arena_bytes + report.weight_bytes + report.stage_bytes
        with stack.model.session() as one, stack.model.session():
            one.forward(prompt(), logits="none")
            assert stack.device.info.device_bytes == before + 2 * report.state_bytes
        assert stack.device.info.device_bytes == before
