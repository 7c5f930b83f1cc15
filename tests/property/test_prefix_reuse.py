"""Going back in conversations of hybrids: little is run again, and not a bit tells that anything was.

What a session has run is a list of tokens and phases. ``replayed`` runs it anew, each stretch of one phase in one call;
a session that was cut, continued and forked must give the very bits of that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from pykvstream.core.bank import Bank
from pykvstream.core.device import HookPoint
from pykvstream.core.state import CHUNK_TOKENS
from pykvstream.errors import InvalidArgument, KvStreamError, NotFound
from pykvstream.runtime.checkpoints import CheckpointStore, checkpoint_bytes_of, checkpoint_slots
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase
from pykvstream.text.transcript import Transcript
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.rigs import Rig, open_rig, tokens_of
from tests.stack import Fault

SHAPE = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=300,
    ctx=8192,
)  # fmt: skip
Said = list[tuple[Phase, int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    write_random_hybrid(made, SHAPE, 4)
    return made


@pytest.fixture(scope="module")
def rig(path: Path) -> Iterator[Rig]:
    with open_rig(path, ubatch=128, checkpoint_bytes=16 << 20) as made:
        yield made
        assert store(made).n_kept == 0


def store(rig: Rig) -> CheckpointStore:
    assert rig.target.parts[0].checkpoints is not None
    return rig.target.parts[0].checkpoints


def bank(rig: Rig) -> Bank:
    return store(rig)._bank


def words(rng: random.Random, n_tokens: int) -> list[int]:
    return [rng.randrange(300) for _ in range(n_tokens)]


def replayed(rig: Rig, said: Said) -> bytes:
    """The last logits of a session that has never been anywhere else."""
    logits = b""
    with closing(rig.session()) as session:
        for phase, group in groupby(said, lambda each: each[0]):
            logits = session.forward([token for _, token in group], phase=phase).tobytes()
    return logits


class Conversation:
    """A session, and what it has run."""

    def __init__(self, rig: Rig, session: TokenSession, said: Said) -> None:
        self.rig, self.session, self.said = rig, session, said

    def say(self, phase: Phase, tokens: list[int], marks: tuple[int, ...] = ()) -> bytes:
        logits = self.session.forward(tokens, phase=phase, marks=marks).tobytes()
        self.said += [(phase, token) for token in tokens]
        return logits

    def cut(self, n_tokens: int) -> bool:
        before = self.session.tokens, self.session.n_cached
        try:
            self.session.truncate(n_tokens)
        except NotFound:
            assert (self.session.tokens, self.session.n_cached) == before
            return False
        del self.said[n_tokens:]
        return True

    def fork(self) -> Conversation:
        return Conversation(self.rig, self.session.fork(), list(self.said))


def test_an_edited_last_turn_costs_that_turn_and_one_chunk(path: Path) -> None:
    rng = random.Random(1)
    with open_rig(path, ubatch=256, ctx=5000) as rig, closing(rig.session()) as session:
        sizes = [1500, 37, 411, 64, 999, 600, 389]
        for size in sizes:
            session.forward(words(rng, size), logits="none", marks=(len(session.tokens),))
        begin = sum(sizes[:-1])
        assert len(session.tokens) == 4000
        before = session.stats
        edited = words(rng, 301)
        session.truncate(begin)
        logits = session.forward(edited)
        after = session.stats
        assert after.recomputed_tokens - before.recomputed_tokens == begin % CHUNK_TOKENS
        assert after.prefill_tokens - before.prefill_tokens == len(edited) + begin % CHUNK_TOKENS
        with closing(rig.session()) as cold:
            assert cold.forward(session.tokens).tobytes() == logits.tobytes()
            assert cold.stats.recomputed_tokens == 0


def test_an_edited_turn_behind_a_decoded_answer_costs_only_itself(rig: Rig) -> None:
    rng = random.Random(2)
    with closing(rig.session()) as session:
        talk = Conversation(rig, session, [])
        talk.say(Phase.PREFILL, words(rng, 333))
        for _ in range(150):
            talk.say(Phase.DECODE, words(rng, 1))
        talk.say(Phase.PREFILL, words(rng, 200))
        before = session.stats
        assert talk.cut(483)
        assert talk.say(Phase.PREFILL, words(rng, 100)) == replayed(rig, talk.said)
        after = session.stats
        assert (after.recomputed_tokens, after.decode_tokens) == (before.recomputed_tokens, before.decode_tokens)
        assert after.prefill_tokens == before.prefill_tokens + 100


def test_ending_passes_for_checkpoints_changes_no_bit(path: Path) -> None:
    prompt, marks = tokens_of(3, 1000), (64, 65, 130, 300, 512, 700, 999)
    found = []
    for budget, kept in ((0, ()), (None, ()), (None, marks)):
        with open_rig(path, ubatch=512, checkpoint_bytes=budget) as rig, closing(rig.session()) as session:
            found.append(session.forward(prompt, logits="all", marks=kept).tobytes())
            places = sorted(session._context.parts[0].kept)
            expected = {(960, *(at // CHUNK_TOKENS * CHUNK_TOKENS for at in kept))} if budget is None else {()}
            assert {tuple(places)} == {tuple(sorted(set(each))) for each in expected}
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("seed", range(24))
def test_cuts_continuations_and_forks_leave_no_trace(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        talks = [Conversation(rig, stack.enter_context(closing(rig.session())), [])]
        n_cuts = 0
        for _ in range(20):
            talk = rng.choice(talks)
            n = len(talk.said)
            if n and rng.random() < 0.5:
                n_cuts += talk.cut(rng.choice((rng.randrange(n), max(n - rng.randrange(90), 0))))
            if talk.said and len(talks) < 3 and rng.random() < 0.15:
                talk = talk.fork()
                talks.append(talk)
                stack.enter_context(closing(talk.session))
            phase = rng.choice((Phase.PREFILL, Phase.PREFILL, Phase.DECODE))
            most = 10 if phase is Phase.DECODE else rng.choice((5, 70, 250))
            size = min(rng.randint(1, most), 1900 - len(talk.said))
            marks = tuple(rng.randrange(len(talk.said) + size) for _ in range(rng.randrange(3)))
            assert talk.say(phase, words(rng, size), marks) == replayed(rig, talk.said)
        assert n_cuts > 0
        rig.target.check_integrity()


def test_a_branch_that_comes_back_goes_on_as_if_it_had_never_left(rig: Rig) -> None:
    rng = random.Random(5)
    prompt, one, other = words(rng, 500), words(rng, 200), words(rng, 150)
    with closing(rig.session()) as session:
        session.forward(prompt)
        first = session.forward(one).tobytes()
        for _ in range(3):
            session.truncate(500)
            second = session.forward(other).tobytes()
            session.truncate(500)
            assert session.forward(one).tobytes() == first
        session.truncate(500)
        assert session.forward(other).tobytes() == second


@pytest.mark.parametrize("n_answer", [0, 9])
@pytest.mark.parametrize("phase", Phase)
def test_a_session_out_of_a_file_has_the_newest_snapshot_and_goes_on_alike(
    rig: Rig, tmp_path: Path, n_answer: int, phase: Phase
) -> None:
    rng = random.Random(13)
    with closing(rig.session()) as session:
        talk = Conversation(rig, session, [])
        talk.say(Phase.PREFILL, words(rng, 300))
        if n_answer:
            talk.say(Phase.DECODE, words(rng, n_answer))
        session.save(tmp_path / "saved", 1, 0, Transcript())
        loaded, _ = TokenSession.load(rig.target, tmp_path / "saved", None)
        with closing(loaded):
            assert loaded.tokens == session.tokens and len(loaded._context.parts[0].kept) == 1
            more = words(rng, 40)
            assert loaded.forward(more, phase=phase).tobytes() == talk.say(phase, more) == replayed(rig, talk.said)


def test_the_last_token_can_be_run_again(rig: Rig) -> None:
    for n_tokens in (1, 64, 300, 320):
        with closing(rig.session()) as session:
            logits = session.forward(tokens_of(6, n_tokens)).tobytes()
            session.rewind()
            assert session.n_cached < n_tokens
            assert session.forward(()).tobytes() == logits


def test_forks_share_snapshots_until_the_last_lets_go(rig: Rig) -> None:
    with closing(rig.session()) as parent:
        parent.forward(tokens_of(7, 400), marks=(130,))
        assert store(rig).n_kept == 2
        child = parent.fork()
        assert store(rig).n_kept == 2
        parent.truncate(384)
        parent.truncate(200)
        assert store(rig).n_kept == 2
        child.forward(tokens_of(8, 300), logits="none")
        assert store(rig).n_kept == 3
        child.close()
        assert store(rig).n_kept == 1 and bank(rig).info.n_valid == 1
        parent.truncate(150)
        assert parent.n_cached == 128
    assert store(rig).n_kept == 0 and bank(rig).info.n_valid == 0


def test_the_least_recently_used_makes_room_and_the_budget_holds(path: Path) -> None:
    with open_rig(path, ubatch=128) as rig:
        slot = bank(rig).info.slot_bytes
    with open_rig(path, ubatch=128, checkpoint_bytes=4 * slot - 1) as rig:
        assert rig.target.blueprint.checkpoint_bytes == bank(rig).info.host_bytes == 3 * slot
        with closing(rig.session()) as session, closing(rig.session()) as other:
            session.forward(tokens_of(9, 700), marks=(130, 260))
            session.truncate(200)  # uses the one at 128
            assert session.n_cached == 128 and store(rig).n_kept == 1
            session.forward(tokens_of(9, 300), logits="none", marks=(260,))
            assert sorted(session._context.parts[0].kept) == [128, 256, 448]
            session.truncate(500)
            for n in range(3):
                other.forward(tokens_of(10 + n, 100), logits="none")
                assert store(rig).n_kept == bank(rig).info.n_valid == 3
            assert all(each.snapshot is None for each in session._context.parts[0].kept.values())
            before = session.tokens, session.n_cached
            with pytest.raises(NotFound):
                session.truncate(300)
            assert (session.tokens, session.n_cached) == before
            session.truncate(300, or_begin_anew=True)
            assert (session.tokens, session.n_cached) == (before[0][:300], 0)
            again = session.forward(tokens_of(13, 50)).tobytes()
            with closing(rig.session()) as cold:
                assert cold.forward(session.tokens).tobytes() == again
            rig.target.check_integrity()
        assert store(rig).n_kept == bank(rig).info.n_valid == 0


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_a_prompt_in_pieces_gives_the_same_bits_whatever_is_kept(path: Path, slots: int) -> None:
    """Other sessions take the places of states that the next piece would begin from: then more is run again."""
    rng = random.Random(4)
    with open_rig(path, ubatch=128) as rig:
        slot = bank(rig).info.slot_bytes
    with (
        open_rig(path, ubatch=128, checkpoint_bytes=slots * slot) as rig,
        closing(rig.session()) as session,
        closing(rig.session()) as other,
    ):
        talk = Conversation(rig, session, [])
        for phase, n_tokens in (
            (Phase.PREFILL, 100), (Phase.PREFILL, 40), (Phase.DECODE, 3), (Phase.PREFILL, 30), (Phase.PREFILL, 170),
            (Phase.PREFILL, 1),
        ):  # fmt: skip
            logits = talk.say(phase, words(rng, n_tokens))
            assert logits == replayed(rig, talk.said)
            other.truncate(0)
            other.forward(words(rng, 300), logits="none", marks=(64, 128, 192))
        assert session.stats.recomputed_tokens > (0 if slots else 400)


@pytest.mark.parametrize("point", [HookPoint.COPY, HookPoint.OP, HookPoint.ALLOC], ids=lambda point: point.name)
def test_a_failure_anywhere_leaves_the_session_usable_and_exact(rig: Rig, point: HookPoint) -> None:
    rng = random.Random(11)
    prompt, answer, turn, edited = words(rng, 300), words(rng, 5), words(rng, 90), words(rng, 80)
    said: Said = [(Phase.PREFILL, token) for token in prompt] + [(Phase.DECODE, token) for token in answer]
    expected = [replayed(rig, said + [(Phase.PREFILL, token) for token in each]) for each in (turn, edited)]
    k = n_faults = 0
    while k < 1500:
        fault = Fault(point, k)
        with closing(rig.session()) as session:
            session.forward(prompt)
            session.forward(answer, phase=Phase.DECODE)
            steps = [partial(session.forward, turn), partial(session.truncate, 305), partial(session.truncate, 290)]
            rig.device.set_hook(fault)
            n_failed = 0
            for step in steps:
                before = session.tokens
                try:
                    step()
                except KvStreamError:
                    n_failed += 1
                    assert session.tokens == before
            rig.device.set_hook(None)
            n_faults += n_failed
            rig.target.check_integrity()
            session.truncate(290)
            session.forward(prompt[290:])
            session.forward(answer, phase=Phase.DECODE)
            assert session.forward(turn).tobytes() == expected[0]
            session.truncate(305)
            assert session.forward(edited).tobytes() == expected[1]
        if fault.fired == 0:
            break
        k += 1 if point is HookPoint.COPY else 1 + k // 4
    assert n_faults > 0 or point is HookPoint.ALLOC


@pytest.mark.parametrize("mib", [-1, True, "4", float("nan"), float("inf"), 2**40])
def test_budgets_that_are_none_are_refused(mib: float) -> None:
    with pytest.raises(InvalidArgument, match="checkpoints"):
        checkpoint_bytes_of(mib)


def test_the_default_budget_is_bounded_in_bytes_and_in_number() -> None:
    assert [checkpoint_slots(size, None) for size in (1, 8 << 20, 9 << 20, 256 << 20, 257 << 20)] == [32, 32, 28, 1, 0]
    assert checkpoint_slots(100, 99) == checkpoint_slots(100, 0) == 0
    assert checkpoint_slots(100, checkpoint_bytes_of(0.001)) == 10
    assert np.iinfo(np.uint16).max < checkpoint_slots(1, 1 << 40)
