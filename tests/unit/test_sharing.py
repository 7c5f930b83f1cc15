"""Who may do what while a call is at work: other threads, callbacks, forks of the process, whoever cuts the file."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.engine import Model, Session
from pykvstream.errors import Busy, Closed, DeviceError, InvalidArgument, KvStreamError, Unsupported
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.target import Phase
from tests.models import write_random_model

TOKENS = [(7 * i + 3) % 250 for i in range(150)]
PASSES = 3
"""A call over ``TOKENS`` has so many passes in each phase."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sharing") / "model.gguf"
    write_random_model(where, n_layers=1, n_embd=64, n_heads=2, n_kv_heads=1, n_ff=64, ctx=1024, seed=1)
    return where


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model.open(path, arena_mib=8, threads=1, ubatch_size=64) as made:
        yield made


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with model.session() as made:
        yield made


@pytest.mark.parametrize("phase", Phase)
def test_close_waits_for_a_call_in_another_thread_and_cuts_it_short(path: Path, phase: Phase) -> None:
    model = Model.open(path, arena_mib=8, threads=1, ubatch_size=64)
    session = model.session()
    is_inside = threading.Event()
    found: list[object] = []

    def work() -> None:
        while not found:
            try:
                session.forward(TOKENS, phase=phase, on_progress=lambda done, total: is_inside.set())
                session.truncate(0)
            except KvStreamError as error:
                found.append(type(error))

    worker = threading.Thread(target=work)
    worker.start()
    is_inside.wait()
    model.close()
    worker.join()
    assert found == [Closed]
    for call in (lambda: session.forward([1]), lambda: session.truncate(0), session.fork, lambda: session.stats):
        with pytest.raises(Closed):
            call()
    session.close()
    model.close()


def test_leaving_the_model_by_an_error_ends_the_answer_of_a_worker(path: Path) -> None:
    has_begun = threading.Event()
    found: list[object] = []

    def talk(session: Session) -> None:
        try:
            for _ in session.generate(TOKENS, ignore_eos=True):
                has_begun.set()
        except KvStreamError as error:
            found.append(type(error))

    worker = None
    with pytest.raises(ZeroDivisionError), Model.open(path, arena_mib=8, threads=1, ubatch_size=64) as model:
        worker = threading.Thread(target=talk, args=(model.session(),))
        worker.start()
        has_begun.wait()
        raise ZeroDivisionError
    assert worker is not None
    worker.join()
    assert found in ([Closed], []), "it was refused, or had come to its end before"


def test_a_callback_cannot_close_what_it_is_called_by(model: Model, session: Session) -> None:
    for close in (model.close, session.close):
        with pytest.raises(Busy):
            session.forward(TOKENS, on_progress=lambda done, total, close=close: close())
        assert session.tokens == ()
    assert session.forward(TOKENS).shape[0] == 1


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("other_phase", Phase)
def test_a_callback_may_use_another_session(model: Model, session: Session, phase: Phase, other_phase: Phase) -> None:
    with model.session() as alone:
        expected = alone.forward(TOKENS, logits="all", phase=phase)
    calls: list[int] = []
    with model.session() as other:

        def tell(done: int, total: int) -> None:
            calls.append(done)
            other.forward([done % 250], phase=other_phase)

        found = session.forward(TOKENS, logits="all", phase=phase, on_progress=tell)
    assert len(calls) == PASSES and np.array_equal(found.view(np.uint32), expected.view(np.uint32))


CHANGES = [
    lambda session: session.truncate(0),
    lambda session: session.forward([1]),
    lambda session: session.generate([1]),
    lambda session: session.chat("hello"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_cannot_change_its_own_session(session: Session, change: Callable[[Session], object]) -> None:
    calls: list[int] = []

    def meddle(done: int, total: int) -> None:
        calls.append(done)
        with pytest.raises(Busy, match="on_progress"):
            change(session)

    pieces = list(session.generate(TOKENS, max_tokens=4, ignore_eos=True, on_progress=meddle))
    assert len(pieces) == 4 and len(session.tokens) == len(TOKENS) + 4 and len(calls) == PASSES


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_another_thread_waits_and_ends_the_answer(
    session: Session, change: Callable[[Session], object]
) -> None:
    found: list[object] = []
    threads: list[threading.Thread] = []

    def meddle(done: int, total: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=lambda: found.append(change(session))))
            threads[0].start()

    pieces = session.generate(TOKENS, ignore_eos=True, on_progress=meddle)
    first = next(pieces)
    threads[0].join()
    assert found and first.token >= 0
    with pytest.raises(Busy, match="came between"):
        next(pieces)
    session.truncate(0)
    assert len(list(session.generate(TOKENS, max_tokens=4, ignore_eos=True))) == 4


def test_of_several_generations_one_gives_an_answer(session: Session) -> None:
    answers = [session.generate(TOKENS, max_tokens=5, ignore_eos=True) for _ in range(4)]
    found: list[int | str] = []

    def consume(pieces: Iterator[Piece]) -> None:
        try:
            found.append(len(list(pieces)))
        except Busy as error:
            found.append(str(error))

    threads = [threading.Thread(target=consume, args=(pieces,)) for pieces in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(each).__name__ for each in found) == ["int", "str", "str", "str"] and 5 in found
    assert len(session.tokens) == len(TOKENS) + 5


@pytest.mark.parametrize("n_kept", [0, 10, len(TOKENS) + 1])
def test_a_change_between_two_pieces_ends_the_answer(session: Session, n_kept: int) -> None:
    pieces = session.generate(TOKENS, ignore_eos=True)
    next(pieces)
    session.truncate(n_kept)
    with pytest.raises(Busy, match="came between"):
        next(pieces)
    assert len(session.tokens) == n_kept


def test_a_refused_generation_leaves_the_one_in_the_making(session: Session) -> None:
    pieces = session.generate(TOKENS, max_tokens=3, ignore_eos=True)
    next(pieces)
    for arguments in ({"stop": [""]}, {"max_tokens": None}, {"params": 3}, {"on_progress": 3}):
        with pytest.raises(InvalidArgument):
            session.generate([1], **arguments)
    assert len(list(pieces)) == 2 and session.stop_reason == "length"


def test_neither_model_nor_session_is_copied(model: Model, session: Session) -> None:
    for each in (model, session):
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(Unsupported, match="cannot be copied"):
                take(each)
    session.forward([1])


FORKING = """
import os, sys
from pykvstream import Model
from pykvstream.errors import Unsupported
model = Model.open(sys.argv[1], arena_mib=8, threads=2, ubatch_size=64)
session = model.session()
session.forward(list(range(200)))
child = os.fork()
if child == 0:
    try:
        model.session()
        sys.exit(2)
    except Unsupported as error:
        assert "fork" in str(error)
    try:
        session.forward([1])
    except Unsupported as error:
        assert "fork" in str(error)
        if sys.argv[2] == "close":
            session.close()
            model.close()
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
session.forward([1])
model.close()
"""


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_fork_refuses_to_run_and_ends(path: Path, how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(path), how],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr


def test_a_file_that_was_cut_is_refused_before_it_is_read(path: Path, tmp_path: Path) -> None:
    own = tmp_path / "model.gguf"
    shutil.copy(path, own)
    size = own.stat().st_size
    with Model.open(own, arena_mib=8, threads=1, ubatch_size=64) as model, model.session() as session:
        session.forward([1, 2])
        os.truncate(own, 4096)
        for call in (lambda: session.forward([3]), lambda: next(session.generate([3]))):
            with pytest.raises(DeviceError, match=rf"cut to 4096 bytes .* need {size}"):
                call()
        assert session.tokens == (1, 2)
