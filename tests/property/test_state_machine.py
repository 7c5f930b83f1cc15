"""Recurrent states against plain decoding, to the bit: passes, rejections, folding, copies, images, faults (P-RB).

The model of a sequence is its journal: rows decoded one by one, and chunks as they were cut. A twin replays the
journal on a state of its own; outputs of accepted rows and folded images must be equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.device import HookPoint
from pykvstream.core.state import State
from pykvstream.core.tape import DeltaMode
from pykvstream.errors import (
    Busy,
    Cancelled,
    DeviceError,
    FormatError,
    HostMemoryError,
    InvalidArgument,
    KvStreamError,
    NotFound,
    Stale,
)
from tests.delta_rig import N_VOCAB, DeltaRig, Lane, Run, Shape, open_rig
from tests.examples import examples

LOG_ROWS = 9
MAX_TOKENS = 400
TOKENS = st.integers(0, N_VOCAB - 1)


@dataclass
class Fault:
    """Fails the call ``at`` at ``point``."""

    point: HookPoint
    at: int
    seen: int = 0
    fired: bool = False

    def __call__(self, point: HookPoint, index: int) -> int:
        if point is not self.point:
            return 0
        self.seen += 1
        if self.seen <= self.at or self.fired:
            return 0
        self.fired = True
        return HostMemoryError.status if point is HookPoint.ALLOC else DeviceError.status


@dataclass(frozen=True)
class Event:
    """What the journal keeps: rows one by one, or a pass in chunks."""

    mode: DeltaMode
    tokens: tuple[int, ...]


@dataclass
class Subject:
    """A lane, its journal, and images of it with the journal they were made behind."""

    lane: Lane
    journal: list[Event] = field(default_factory=list)
    images: list[tuple[np.ndarray, list[Event]]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(len(each.tokens) for each in self.journal)

    def rows(self) -> int:
        """Rows at the end that were decoded one by one."""
        n = 0
        for each in reversed(self.journal):
            if each.mode is DeltaMode.CHUNKED:
                break
            n += len(each.tokens)
        return n

    def cut(self, n_rows: int) -> None:
        """Take rows away from the end of the journal."""
        while n_rows:
            last = self.journal.pop()
            kept = last.tokens[: max(0, len(last.tokens) - n_rows)]
            n_rows -= len(last.tokens) - len(kept)
            if kept:
                self.journal.append(Event(last.mode, kept))


class StateMachine(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from([Shape(), Shape(2, 4, 32, 3)]), threads=st.integers(1, 2))
    def open(self, shape: Shape, threads: int) -> None:
        self.rig = DeltaRig(shape, log_rows=LOG_ROWS, max_tokens=MAX_TOKENS, threads=threads)
        self.spare = self.rig.state()
        self.twin = self.rig.lane()
        self.subjects = [Subject(self.rig.lane()) for _ in range(2)]

    # ---- the twin ----

    def replay(self, journal: list[Event]) -> list[tuple[bytes, ...]]:
        """Outputs of every row of a journal; the twin stands behind it then."""
        self.twin.restart()
        rows: list[tuple[bytes, ...]] = []
        for event in journal:
            if event.mode is DeltaMode.CHUNKED:
                rows += self.twin.take(event.tokens, DeltaMode.CHUNKED).rows()
            else:
                for token in event.tokens:
                    rows += self.twin.take([token]).rows()
        return rows

    def check(self, subject: Subject, run: Run | None = None, n_rows: int = 0) -> None:
        """The state is that of plain decoding, and so are the accepted rows of the newest pass."""
        rows = self.replay(subject.journal)
        assert subject.lane.position == subject.n_tokens == subject.lane.seq.info.committed_tokens
        assert subject.lane.image(self.spare) == self.twin.image(self.spare)
        if run is not None:
            assert run.rows()[:n_rows] == rows[len(rows) - n_rows :]

    # ---- rules ----

    @rule(data=st.data(), which=st.integers(0, 1), tokens=st.lists(TOKENS, min_size=1, max_size=LOG_ROWS))
    def verify(self, data: st.DataObject, which: int, tokens: list[int]) -> None:
        subject = self.subjects[which]
        if subject.n_tokens + len(tokens) > MAX_TOKENS:
            return
        n = data.draw(st.integers(0, len(tokens)))
        run = subject.lane.take(tokens, accept=n)
        if n:
            subject.journal.append(Event(DeltaMode.LOGGED, tuple(tokens[:n])))
        self.check(subject, run, n)

    @rule(
        which=st.integers(0, 1),
        seed=st.integers(0, 99),
        n=st.sampled_from([1, 3, 62, 63, 64, 65, 130]),
        keeps=st.booleans(),
    )
    def prefill(self, which: int, seed: int, n: int, keeps: bool) -> None:
        subject = self.subjects[which]
        if subject.n_tokens + n > MAX_TOKENS:
            return
        tokens = tuple(random.Random(seed).choices(range(N_VOCAB), k=n))
        run = subject.lane.run(tokens, DeltaMode.CHUNKED)
        if not keeps:
            subject.lane.end(0)
            self.check(subject)
            return
        subject.lane.end(n)
        subject.journal.append(Event(DeltaMode.CHUNKED, tokens))
        self.check(subject, run, n)

    @rule(which=st.integers(0, 1))
    def fold(self, which: int) -> None:
        state = self.subjects[which].lane.state
        position = state.info.position
        state.fold()
        assert (state.info.pending_rows, state.info.folded_tokens) == (0, position)
        self.check(self.subjects[which])

    @rule(data=st.data(), which=st.integers(0, 1))
    def truncate(self, data: st.DataObject, which: int) -> None:
        subject = self.subjects[which]
        lane = subject.lane
        n = data.draw(st.integers(0, min(subject.rows(), LOG_ROWS + 2)))
        to = subject.n_tokens - n
        folded = lane.state.info.folded_tokens
        self.rig.pager.truncate(lane.seq, to)
        before = lane.state.save().tobytes(), lane.state.info
        if to >= folded:
            lane.state.truncate(lane.seq, to)
            subject.cut(n)
        else:
            with pytest.raises(NotFound):
                lane.state.truncate(lane.seq, to)
            assert (lane.state.save().tobytes(), lane.state.info) == before
            with pytest.raises(Stale):
                lane.run([0])
            lane.end(0)
            subject.cut(n)
            journal = subject.journal
            lane.restart()
            for event in journal:
                lane.take(event.tokens, event.mode) if event.mode is DeltaMode.CHUNKED else [
                    lane.take([token]) for token in event.tokens
                ]
        self.check(subject)

    @rule(which=st.integers(0, 1))
    def save(self, which: int) -> None:
        subject = self.subjects[which]
        subject.images.append((subject.lane.state.save(), list(subject.journal)))

    @precondition(lambda self: any(each.images for each in self.subjects))
    @rule(data=st.data(), which=st.integers(0, 1))
    def load(self, data: st.DataObject, which: int) -> None:
        """Back to an image, as long as the rows before it have not been rewritten."""
        subject = self.subjects[which]
        images = [each for each in subject.images if subject.journal[: len(each[1])] == each[1]]
        if not images:
            return
        image, journal = data.draw(st.sampled_from(images))
        lane = subject.lane
        self.rig.pager.truncate(lane.seq, sum(len(each.tokens) for each in journal))
        lane.state.load(image)
        with pytest.raises(Stale):
            lane.run([0])
        lane.end(0)
        lane.state.attach(lane.seq)
        subject.journal = list(journal)
        self.check(subject)

    @rule(which=st.integers(0, 1), at=st.integers(0, 10**6), bit=st.integers(0, 7))
    def refuse_damage(self, which: int, at: int, bit: int) -> None:
        state = self.subjects[which].lane.state
        image = state.save()
        info = state.info
        damaged = image.copy()
        damaged[at % len(image)] ^= 1 << bit
        for bad in (damaged, image[:-1].copy(), np.append(image, np.uint8(0))):
            with pytest.raises(FormatError):
                state.load(bad)
        assert state.info == info and state.save().tobytes() == image.tobytes()

    @rule(
        which=st.integers(0, 1),
        point=st.sampled_from([HookPoint.OP, HookPoint.COPY]),
        at=st.integers(0, 12),
        step=st.sampled_from(["run", "fold", "save", "load", "copy"]),
    )
    def fail(self, which: int, point: HookPoint, at: int, step: str) -> None:
        """Whatever fails leaves the state as it was."""
        lane = self.subjects[which].lane
        image = lane.state.save()
        if lane.position + 3 > MAX_TOKENS:
            return
        steps = {
            "run": lambda: lane.run([1, 2, 3]),
            "fold": lane.state.fold,
            "save": lane.state.save,
            "load": lambda: lane.state.load(image),
            "copy": lambda: lane.state.copy_to(self.spare),
        }
        fault = Fault(point, at)
        self.rig.device.set_hook(fault)
        failed: KvStreamError | None = None
        try:
            steps[step]()
        except DeviceError as error:
            failed = error
        finally:
            self.rig.device.set_hook(None)
        assert failed is None or fault.fired
        if step == "run":
            try:
                lane.end(0)
            except Busy:  # the pass did not open
                assert failed is not None
        if step == "load" and failed is None:
            lane.state.attach(lane.seq)
        if failed is not None or step != "fold":
            assert lane.state.save().tobytes() == image.tobytes()
        self.check(self.subjects[which])

    @rule(which=st.integers(0, 1))
    def cancel(self, which: int) -> None:
        lane = self.subjects[which].lane
        if lane.position == MAX_TOKENS:
            return
        image = lane.state.save().tobytes()
        with pytest.raises(Cancelled):
            lane.run([5], cancels=True)
        with pytest.raises(Busy):
            lane.state.save()
        lane.end(0)
        assert lane.state.save().tobytes() == image

    @rule(which=st.integers(0, 1))
    def refuse_the_other_sequence(self, which: int) -> None:
        """KV of one sequence and state of another never meet."""
        lane, other = self.subjects[which].lane, self.subjects[1 - which].lane
        if other.position == MAX_TOKENS:
            return
        image = lane.state.save().tobytes()
        with pytest.raises(Stale):
            Lane(self.rig, other.seq, lane.state).run([3])
        self.rig.pager.end(0)
        with pytest.raises(Stale):
            lane.state.truncate(other.seq, other.position)
        assert lane.state.save().tobytes() == image

    @rule(which=st.integers(0, 1), n=st.integers(1, 4))
    def accept_what_was_not_committed(self, which: int, n: int) -> None:
        """The pass is given up; the sequence must follow before it goes on."""
        subject = self.subjects[which]
        lane = subject.lane
        if lane.position + 4 > MAX_TOKENS:
            return
        lane.run([1, 2, 3, 4])
        self.rig.pager.end(0)
        with pytest.raises(InvalidArgument):
            lane.state.accept(lane.seq, n)
        assert lane.state.info.open_rows == 0
        self.check(subject)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "rig"):
            for subject in self.subjects:
                subject.lane.state.check_integrity()
            self.rig.pager.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.spare.close()
            for lane in (self.twin, *(each.lane for each in self.subjects)):
                lane.close()
            self.rig.close()


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)


# ---- the rollback matrix ----


@dataclass
class Plain:
    """Plain decoding of one sequence's tokens behind a prompt in chunks: outputs and folded images by position."""

    tokens: list[int]
    base: int
    rows: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    images: dict[int, bytes] = field(default_factory=dict)
    start: np.ndarray | None = None


def plain_decoding(rig: DeltaRig, spare: State, base: int, seed: int, n_rows: int) -> Plain:
    tokens = random.Random(seed).choices(range(N_VOCAB), k=base + n_rows)
    plain = Plain(tokens, base)
    lane = rig.lane()
    if base:
        lane.take(tokens[:base], DeltaMode.CHUNKED)
    plain.start = lane.state.save()
    plain.images[base] = lane.image(spare)
    for at in range(base, base + n_rows):
        plain.rows[at] = lane.take([tokens[at]]).row(0)
        plain.images[at + 1] = lane.image(spare)
    lane.close()
    return plain


@dataclass
class Racer:
    """A sequence on its way through one cell of the matrix."""

    plain: Plain
    lane: Lane

    def back(self) -> None:
        assert self.plain.start is not None
        self.lane.rig.pager.truncate(self.lane.seq, self.plain.base)
        self.lane.state.load(self.plain.start)
        self.lane.state.attach(self.lane.seq)

    def verify(self, n: int, accepted: int) -> None:
        """The first ``accepted`` draft tokens are right, the others wrong."""
        at = self.lane.position
        right = self.plain.tokens[at : at + accepted]
        wrong = [(token + 1) % N_VOCAB for token in self.plain.tokens[at + accepted : at + n]]
        run = self.lane.take([*right, *wrong], accept=accepted)
        assert run.rows()[:accepted] == [self.plain.rows[at + i] for i in range(accepted)]

    def check(self, spare: State) -> None:
        assert self.lane.image(spare) == self.plain.images[self.lane.position]


@pytest.mark.parametrize("n_sequences", [1, 2, 3, 4])
@pytest.mark.parametrize("base", [0, 60, 250])
def test_rollback_matrix(base: int, n_sequences: int) -> None:
    with open_rig(log_rows=8, max_rows=256, max_tokens=512) as rig:
        spare = rig.state()
        plains = [plain_decoding(rig, spare, base, seed, 20) for seed in range(n_sequences)]
        racers = [Racer(plain, rig.lane()) for plain in plains]
        for racer in racers:
            if base:
                racer.lane.take(racer.plain.tokens[:base], DeltaMode.CHUNKED)
        for n in range(1, 9):
            for accepted in range(n + 1):
                for singles in range(4):
                    for racer in racers:
                        racer.back()
                        racer.verify(n, accepted)
                        racer.check(spare)
                    for _ in range(singles):
                        for racer in racers:
                            racer.verify(1, 1)
                    for racer in racers:
                        racer.verify(n, n)
                        racer.check(spare)
        for racer in racers:
            racer.lane.close()
        spare.close()


def test_a_sequence_that_was_rewritten_refuses_its_old_state() -> None:
    """Same sequence, same position, but other rows: only the count of rewrites can tell."""
    with open_rig() as rig:
        lane, other = rig.lane(), rig.state()
        lane.take([1, 2, 3, 4, 5])
        lane.state.copy_to(other)
        other.attach(lane.seq)
        usurper = Lane(rig, lane.seq, other)
        rig.pager.truncate(lane.seq, 3)
        other.truncate(lane.seq, 3)
        usurper.take([6, 7])
        assert lane.position == other.info.position == lane.seq.info.committed_tokens
        with pytest.raises(Stale):
            lane.run([8])
        lane.end(0)
        assert lane.state.info.pending_rows == 5
        usurper.take([8])
        other.close()
        lane.close()
