"""Promises 1 and 2 with a layer lease: whether pages of the head are its own, borrowed or streamed changes nothing.

Units: pages, slots; a history of ``PROMPT`` is five pages, so that with two of its own a pager misses three.
Holds: what each way of having them copies, too: nothing per step under a lease, and what is missing once per lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from pykvstream import SamplingParams, Session, SpeculationParams
from pykvstream.core.device import HookPoint
from pykvstream.errors import Busy
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from pykvstream.speculation import HEAD_DRAFTER
from tests.property.test_drafting_faults import SHAPE
from tests.random_hybrid import write_random_hybrid
from tests.stack import Fault, Stack, open_stack

PROMPT = [(7 * i * i + 3) % 250 for i in range(1100)]
OTHER = [(13 * i * i + 5) % 250 for i in range(1180)]
N_TOKENS = 40
DEPTH = 4
CHAINS = {
    "greedy": SamplingParams(temperature=0.0),
    "warm": SamplingParams(temperature=0.7, repeat_penalty=1.1),
    "hot": SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
}


@dataclass(frozen=True)
class Way:
    """Pages and ring slots of the head's pager, ring slots of the trunk's; slots that a lease must then hold."""

    pages: int
    own_ring: int
    trunk_ring: int
    n_held: int | None


WAYS = {
    "resident": Way(8, 0, 2, 0),
    "own ring": Way(2, 4, 2, 3),
    "trunk's ring": Way(2, 1, 8, 3),
    "waves": Way(2, 1, 3, None),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path: Path = tmp_path_factory.mktemp("lease") / "model.gguf"
    write_random_hybrid(path, replace(SHAPE, n_mtp=1), 5)
    with open_stack(path, mtp=True, extra_slots=20) as made:
        yield made


def divide(stack: Stack, way: Way) -> None:
    """Have pages and rings as told; of the trunk most pages stream."""
    target, head = stack.target, stack.target.head
    assert head is not None
    target.place(Phase.DECODE, Placement((2, 2), way.trunk_ring, target.plan.phase("decode").max_rows))
    head.placement = Placement((way.pages,), way.own_ring, head.placement.max_rows)
    head.pager.place(head.placement)


@dataclass(frozen=True)
class Heard:
    """All that can be seen of two answers, and what the head guessed: its choices, and logits of each."""

    tokens: tuple[int, ...]
    logits: str
    guesses: tuple[int, ...]
    guess_logits: str


def listen(stack: Stack, session: Session, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> Heard:
    head = stack.target.head
    assert head is not None
    guesses: list[int] = []
    logits, guess_logits = hashlib.sha256(), hashlib.sha256()
    step = head.step

    def note(*given: object) -> object:
        row, hidden = step(*given)  # type: ignore[arg-type]
        guesses.append(int(row.argmax()))
        guess_logits.update(row.tobytes() + hidden.tobytes())
        return row, hidden

    told = SpeculationParams(types=(HEAD_DRAFTER,), draft_n_max=DEPTH)
    with monkeypatch.context() as patch:
        patch.setattr(head, "step", note)
        for prompt in (PROMPT, OTHER[:40]):
            for piece in session.generate(
                prompt, max_tokens=N_TOKENS, params=params, speculation=told, ignore_eos=True
            ):
                logits.update(piece.logits.tobytes())
    return Heard(session.tokens, logits.hexdigest(), tuple(guesses), guess_logits.hexdigest())


@pytest.mark.parametrize("params", CHAINS)
def test_no_way_of_having_the_pages_changes_a_bit(
    stack: Stack, params: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = {}
    for name, way in WAYS.items():
        divide(stack, way)
        with stack.model.session(seed=3) as session:
            heard[name] = listen(stack, session, CHAINS[params], monkeypatch)
            stats = session.stats.head
            assert stats is not None and stats.steps > 100
            assert (stats.leases == 0) == (way.n_held is None) and (stats.rounds_in_waves > 0) == (way.n_held is None)
            assert stats.most_held_slots == (way.n_held or 0)
            assert (stats.step_bytes > 0) == (way.n_held is None)
    assert len(set(heard.values())) == 1, heard
    with stack.model.session(seed=3) as plain:
        for prompt in (PROMPT, OTHER[:40]):
            for _ in plain.generate(prompt, max_tokens=N_TOKENS, params=CHAINS[params], ignore_eos=True):
                pass
        assert plain.tokens == heard["waves"].tokens


def draft(session: Session, n_max: int = DEPTH) -> list[tuple[int, bytes]]:
    """One round behind a pending token: choices and the logits that they were made by."""
    session._core.push(9)
    found: list[tuple[int, bytes]] = []

    def choose(logits: np.ndarray, position: int) -> int:
        found.append((int(logits.argmax()), logits.tobytes()))
        return found[-1][0]

    session._core.draft(n_max, choose)
    session.truncate(len(session.tokens) - 1)
    return found


@pytest.mark.parametrize("name", WAYS)
def test_the_first_draft_of_a_second_prompt_is_that_of_a_fresh_session(stack: Stack, name: str) -> None:
    divide(stack, WAYS[name])
    with stack.model.session(seed=3) as session, stack.model.session(seed=3) as fresh:
        session.forward(PROMPT)
        draft(session)
        session.truncate(0)
        session.forward(OTHER)
        fresh.forward(OTHER)
        assert draft(session) == draft(fresh)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.n_held is not None])
def test_a_lease_brings_what_is_missing_once_and_no_step_copies(stack: Stack, name: str) -> None:
    """Exact, of copies that were asked for as of pages that arrived."""
    divide(stack, WAYS[name])
    n_held = WAYS[name].n_held or 0
    head = stack.target.head
    assert head is not None
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        draft(session)
        for depth in (1, 4, 8, 2):
            before, stats = head.pager.info, session.stats.head
            assert stats is not None
            seen: list[int] = []
            session._core.push(9)

            def choose(logits: np.ndarray, position: int, seen: list[int] = seen) -> int:
                seen.append(head.pager.info.copies)
                return int(logits.argmax())

            session._core.draft(depth, choose)
            session.truncate(len(session.tokens) - 1)
            after, now = head.pager.info, session.stats.head
            assert now is not None and now.leases == stats.leases + 1
            n_bytes = n_held * head.blueprint.record_bytes
            assert after.loaded_bytes - before.loaded_bytes == n_bytes == now.leased_bytes - stats.leased_bytes
            assert now.reused_pages - stats.reused_pages == 5 - n_held
            assert after.streamed_pages == before.streamed_pages
            assert seen == [before.copies + n_held] * depth, "all copies come before the first step"
            assert now.step_bytes == stats.step_bytes


def test_in_waves_every_step_copies_what_is_missing(stack: Stack) -> None:
    divide(stack, WAYS["waves"])
    head = stack.target.head
    assert head is not None
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        draft(session)
        before = head.pager.info.streamed_pages
        draft(session)
        assert head.pager.info.streamed_pages - before == DEPTH * 3


def test_the_ring_is_whole_before_a_draft_is_verified(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """While drafting the trunk cannot begin a pass; then it streams as ever."""
    divide(stack, WAYS["trunk's ring"])
    target = stack.target
    head = target.head
    assert head is not None
    n_tried = 0
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        context = session._core._context
        step = head.step

        def attempt(*given: object) -> object:
            nonlocal n_tried
            n_tried += 1
            with pytest.raises(Busy, match="3 of 8 ring slots"):
                target.parts[-1].pager.begin(context.parts[-1].seq, 1)
            with pytest.raises(Busy, match="layer lease"):
                target.place(Phase.DECODE, Placement((2, 2), 7, 64))
            target.check_integrity()
            return step(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(head, "step", attempt)
        told = SpeculationParams(types=(HEAD_DRAFTER,), draft_n_max=DEPTH)
        before = target.pager_info.streamed_pages
        for _ in session.generate((), max_tokens=12, params=CHAINS["greedy"], speculation=told, ignore_eos=True):
            pass
        assert n_tried > DEPTH
        assert target.pager_info.streamed_pages - before > 0
        target.check_integrity()


def test_a_draft_gives_the_ring_back_when_it_ends(stack: Stack) -> None:
    divide(stack, WAYS["trunk's ring"])
    pager = stack.target.parts[-1].pager
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        session._core.push(9)
        session._core.draft(2, lambda logits, position: 0)
        pager.begin(session._core._context.parts[-1].seq, 1)
        pager.end(0)


@pytest.mark.parametrize("point", [HookPoint.COPY, HookPoint.ALLOC])
def test_a_lease_that_fails_is_given_back(stack: Stack, point: HookPoint) -> None:
    divide(stack, WAYS["trunk's ring"])
    n_struck = 0
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        right = draft(session)
        for k in range(40):
            fault = Fault(point, k)
            session._core.push(9)
            with stack.fault(fault):
                try:
                    session._core.draft(1, lambda logits, position: 0)
                except fault.error:
                    n_struck += 1
            session.truncate(len(session.tokens) - 1)
            stack.target.check_integrity()
        assert n_struck > 1
        assert draft(session) == right


def test_an_interrupted_draft_leaves_no_slot_held(stack: Stack) -> None:
    divide(stack, WAYS["trunk's ring"])
    head = stack.target.head
    assert head is not None
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        right = draft(session)
        give_back = head.recover
        head.recover = lambda: None  # type: ignore[method-assign]
        try:
            session._core.push(9)
            session._core.draft(2, lambda logits, position: 0)
        finally:
            head.recover = give_back  # type: ignore[method-assign]
        with pytest.raises(Busy, match="ring slots"):
            stack.target.parts[-1].pager.begin(session._core._context.parts[-1].seq, 1)
        session.truncate(len(session.tokens) - 1)
        assert draft(session) == right
        session.forward([1, 2, 3])


def test_rows_that_a_borrowed_slot_has_lost_are_made_again(stack: Stack) -> None:
    """The cache of the head may be shorter than it was known to be true; then it catches up again."""
    divide(stack, WAYS["trunk's ring"])
    head = stack.target.head
    assert head is not None
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        known = session._core._context.head
        assert known is not None
        right = draft(session)
        head.pager.truncate(known.seq, len(PROMPT) - 20)
        assert draft(session) == right
        head.pager.truncate(known.seq, 700)
        assert len(draft(session)) == DEPTH
        assert known.base > 700, "of rows further back the trunk's hidden rows are gone"


def test_a_session_that_is_closed_while_another_drafts_later_is_no_matter(stack: Stack) -> None:
    divide(stack, WAYS["trunk's ring"])
    with stack.model.session(seed=3) as session:
        session.forward(PROMPT)
        right = draft(session)
        with stack.model.session(seed=4) as other:
            other.forward(OTHER)
            draft(other)
            child = other.fork()
            draft(child)
            assert draft(session) == right
            child.close()
        assert draft(session) == right


def test_the_trunk_may_take_its_ring_away_between_rounds(stack: Stack) -> None:
    """The policy divides the decode pool as it goes; a round takes what it finds."""
    with stack.model.session(seed=3) as session:
        divide(stack, WAYS["trunk's ring"])
        session.forward(PROMPT)
        right = draft(session)
        for name in ("waves", "resident", "own ring", "trunk's ring", "waves"):
            divide(stack, WAYS[name])
            assert draft(session) == right
