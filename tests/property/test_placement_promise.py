"""Promise 1: placement never changes a bit.

A target with a small arena and its fully resident twin live through the same conversations; every logits row of the one
equals that of the other, byte for byte. Released pages are NaN and history is closed to everything but copies, so that
a path that reads what it should not cannot pass.
Units: prompts in tokens, pages of 256.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pykvstream.core.device import SKIP_COPY, DeviceFlag, HookPoint
from pykvstream.errors import ContextFull, KvStreamError
from pykvstream.gguf import GgmlType
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.session import LogitsWanted, TokenSession
from pykvstream.runtime.target import Phase
from tests.models import write_random_model
from tests.rigs import HONEST, KV_TYPES, Rig, StreamForecast, open_rig, random_placement, tight_placement, tokens_of

CTX = 6400
LONGEST_PROMPT = 6000
MAX_SESSIONS = 3

SEEDS = st.integers(0, 2**32 - 1)
PHASES = st.sampled_from(Phase)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is opened."""

    arch: str
    n_layers: int
    head_dim: int
    type_k: GgmlType
    type_v: GgmlType
    ubatch: int
    residency: float
    threads: int
    is_deferred: bool
    seed: int

    def model(self, folder: Path) -> Path:
        path = folder / f"{self.arch}-{self.n_layers}-{self.head_dim}.gguf"
        if not path.exists():
            write_random_model(
                path,
                arch=self.arch,
                n_layers=self.n_layers,
                n_embd=32,
                n_heads=2,
                n_kv_heads=1,
                head_dim=self.head_dim,
                n_ff=32,
                n_vocab=259,
                ctx=CTX,
                seed=self.n_layers,
            )
        return path

    def open(self, folder: Path, residency: float) -> Rig:
        flags = HONEST | (DeviceFlag.DEFERRED if self.is_deferred and residency < 1 else DeviceFlag.NONE)
        return open_rig(
            self.model(folder),
            residency=residency,
            type_k=self.type_k,
            type_v=self.type_v,
            ubatch=self.ubatch,
            ctx=CTX,
            threads=self.threads if residency < 1 else 1,
            flags=flags,
            schedule_seed=self.seed,
        )


CASES = st.builds(
    Case,
    arch=st.sampled_from(("llama", "qwen3")),
    n_layers=st.integers(2, 4),
    head_dim=st.sampled_from((64, 32, 96, 128)),
    type_k=st.sampled_from(KV_TYPES),
    type_v=st.sampled_from(KV_TYPES),
    ubatch=st.sampled_from((512, 33, 128, 256, 300)) | st.integers(32, 700),
    residency=st.sampled_from((0.0, 0.05, 0.25, 0.5, 0.9)) | st.floats(0, 0.99),
    threads=st.integers(1, 2),
    is_deferred=st.booleans(),
    seed=SEEDS,
)


@dataclass(slots=True)
class Pair:
    """The same conversation on both targets."""

    small: TokenSession
    full: TokenSession

    @property
    def room(self) -> int:
        return CTX - len(self.full.tokens)

    def close(self) -> None:
        self.small.close()
        self.full.close()


class Twins:
    """A streaming target and its resident twin, moved in step; every step is compared."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.small = case.open(folder, case.residency)
        self.full = case.open(folder, 1.0)

    def pair(self) -> Pair:
        return Pair(self.small.session(), self.full.session())

    def forward(self, pair: Pair, tokens: np.ndarray, phase: Phase) -> np.ndarray:
        """Run tokens in both; returns the logits after checking rows, tokens and streamed bytes."""
        forecast = StreamForecast(self.small.target, phase, pair.small.n_cached)
        before = self.small.streamed_bytes
        wanted: LogitsWanted = "all" if len(tokens) else "last"
        rows = pair.small.forward(tokens, logits=wanted, phase=phase, on_progress=forecast)
        assert self.small.streamed_bytes - before == forecast.streamed_bytes
        twin = pair.full.forward(tokens, logits=wanted, phase=phase)
        assert np.isfinite(twin).all()
        unequal = np.flatnonzero((rows.view(np.uint32) != twin.view(np.uint32)).any(axis=1))
        assert unequal.size == 0, f"{unequal.size} of {len(rows)} rows differ, the first is {unequal[0]}"
        assert pair.small.tokens == pair.full.tokens
        assert self.full.streamed_bytes == 0
        return rows

    def decode(self, pair: Pair, logits: np.ndarray, n_tokens: int) -> None:
        """Choose greedily, each target from its own logits."""
        row = logits[-1]
        for _ in range(n_tokens):
            token = int(row.argmax())
            pair.small.push(token)
            pair.full.push(token)
            row = self.forward(pair, tokens_of(0, 0), Phase.DECODE)[-1]

    def check(self) -> None:
        self.small.target.check_integrity()
        self.full.target.check_integrity()

    def close(self) -> None:
        self.small.close()
        self.full.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placement")


class PlacementMachine(RuleBasedStateMachine):
    """Conversations that grow, fork, are cut and interleaved while the pool is divided anew around them."""

    folder: Path

    @initialize(case=CASES, n_tokens=st.integers(1, 3000), seed=SEEDS)
    def begin(self, case: Case, n_tokens: int, seed: int) -> None:
        self.twins = Twins(case, self.folder)
        self.pairs = [self.twins.pair()]
        self.phase = Phase.PREFILL
        self.twins.forward(self.pairs[0], tokens_of(seed, n_tokens), Phase.PREFILL)

    def pick(self, index: int) -> Pair:
        return self.pairs[index % len(self.pairs)]

    @rule(index=st.integers(0, 9), n_tokens=st.integers(1, 1500), seed=SEEDS)
    def prefill(self, index: int, n_tokens: int, seed: int) -> None:
        pair = self.pick(index)
        n_tokens = min(n_tokens, pair.room)
        if n_tokens > 0:
            self.twins.forward(pair, tokens_of(seed, n_tokens), Phase.PREFILL)

    @rule(index=st.integers(0, 9), n_tokens=st.integers(1, 200), seed=SEEDS)
    def verify(self, index: int, n_tokens: int, seed: int) -> None:
        """Wide decode passes, as drafting makes them."""
        pair = self.pick(index)
        n_tokens = min(n_tokens, pair.room)
        if n_tokens > 0:
            self.twins.forward(pair, tokens_of(seed, n_tokens), Phase.DECODE)

    @rule(index=st.integers(0, 9), n_tokens=st.integers(1, 6), seed=SEEDS)
    def decode(self, index: int, n_tokens: int, seed: int) -> None:
        pair = self.pick(index)
        n_tokens = min(n_tokens, pair.room - 1)
        if n_tokens > 0:
            logits = self.twins.forward(pair, tokens_of(seed, 1), Phase.DECODE)
            self.twins.decode(pair, logits, n_tokens)

    @rule(index=st.integers(0, 9), share=st.floats(0, 1), on_page=st.booleans())
    def truncate(self, index: int, share: float, on_page: bool) -> None:
        pair = self.pick(index)
        keep = int(len(pair.full.tokens) * share)
        keep -= keep % 256 if on_page else 0
        pair.small.truncate(keep)
        pair.full.truncate(keep)

    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        if len(self.pairs) < MAX_SESSIONS:
            pair = self.pick(index)
            self.pairs.append(Pair(pair.small.fork(), pair.full.fork()))

    @rule()
    def open(self) -> None:
        if len(self.pairs) < MAX_SESSIONS:
            self.pairs.append(self.twins.pair())

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        self.pairs.pop(index % len(self.pairs)).close()

    @rule(phase=PHASES, seed=SEEDS)
    def place(self, phase: Phase, seed: int) -> None:
        small = self.twins.small
        small.target.place(phase, random_placement(small.plan, phase, random.Random(seed)))

    @rule(phase=PHASES)
    def enter(self, phase: Phase) -> None:
        self.twins.small.target.enter(phase)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check()

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            for pair in self.pairs:
                pair.close()
            self.twins.close()


def run_machine(folder: Path, n_examples: int, n_steps: int) -> None:
    machine = type("Machine", (PlacementMachine,), {"folder": folder})
    health = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=n_steps,
            deadline=None,
            suppress_health_check=health,
        ),
    )


def test_a_streaming_target_lives_like_its_resident_twin(models: Path) -> None:
    run_machine(models, n_examples=60, n_steps=20)


@pytest.mark.slow
def test_a_streaming_target_lives_like_its_resident_twin_in_many_lives(models: Path) -> None:
    run_machine(models, n_examples=600, n_steps=40)


PAIRS = [(kind, KV_TYPES[(i * 5 + 3) % len(KV_TYPES)]) for i, kind in enumerate(KV_TYPES)]


def case_of(index: int, **changes: Any) -> Case:
    """The case with index ``index`` of a walk through architectures, head sizes, widths and types."""
    type_k, type_v = PAIRS[index % len(PAIRS)]
    case = Case(
        arch=("llama", "qwen3")[index % 2],
        n_layers=2 + index % 3,
        head_dim=(64, 32, 128, 96)[index % 4],
        type_k=type_k,
        type_v=type_v,
        ubatch=(512, 128, 300)[index % 3],
        residency=(0.0, 0.1, 0.3)[index % 3],
        threads=1 + index % 2,
        is_deferred=index % 3 == 1,
        seed=index,
    )
    return replace(case, **changes)


@pytest.mark.parametrize("index", range(len(PAIRS)), ids=[f"{k.name}-{v.name}" for k, v in PAIRS])
def test_a_prompt_of_6000_tokens_streams_to_the_same_bits(models: Path, index: int) -> None:
    case = case_of(index)
    with closing(Twins(case, models)) as twins, closing(twins.pair()) as pair:
        logits = twins.forward(pair, tokens_of(index, LONGEST_PROMPT), Phase.PREFILL)
        streamed = twins.small.streamed_bytes
        assert streamed > 0
        small = twins.small
        small.target.place(Phase.DECODE, tight_placement(small.plan, Phase.DECODE))
        twins.decode(pair, logits, 3)
        twins.check()
        for keep in (5000, 4608, 700, 255):
            pair.small.truncate(keep)
            pair.full.truncate(keep)
            logits = twins.forward(pair, tokens_of(keep, 40), Phase.DECODE)
            twins.decode(pair, logits, 1)
            twins.check()
        assert twins.small.streamed_bytes > streamed


def test_forks_of_a_streamed_history_do_not_feel_each_other(models: Path) -> None:
    with closing(Twins(case_of(2), models)) as twins, closing(twins.pair()) as trunk:
        twins.forward(trunk, tokens_of(1, 3000), Phase.PREFILL)
        with closing(Pair(trunk.small.fork(), trunk.full.fork())) as branch:
            for step in range(4):
                twins.forward(trunk, tokens_of(10 + step, 70), Phase.DECODE)
                twins.forward(branch, tokens_of(20 + step, 30), Phase(step % 2))
                twins.check()
            branch.small.truncate(1300)
            branch.full.truncate(1300)
            twins.forward(branch, tokens_of(30, 600), Phase.PREFILL)
        twins.forward(trunk, tokens_of(31, 5), Phase.DECODE)
        twins.check()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_no_ring_size_changes_a_bit(models: Path, share: float) -> None:
    """From one slot, where each copy waits for attention, to all that the tails leave."""
    with closing(Twins(case_of(4, residency=0.3), models)) as twins, closing(twins.pair()) as pair:
        twins.forward(pair, tokens_of(1, 4000), Phase.PREFILL)
        layout = twins.small.plan.phases[Phase.DECODE.value]
        pool = layout.pool
        ring = pool.ring_floor + int((pool.ring_cap - pool.ring_floor) * share)
        twins.small.target.place(Phase.DECODE, Placement(pool.deal(ring), ring, layout.max_rows))
        before = twins.small.streamed_bytes
        logits = twins.forward(pair, tokens_of(2, 64), Phase.DECODE)
        twins.decode(pair, logits, 3)
        twins.check()
        assert twins.small.streamed_bytes > before


def test_seeds_of_a_deferred_schedule_change_no_bit(models: Path) -> None:
    for seed in range(6):
        case = case_of(1, is_deferred=True, seed=seed, residency=0.2)
        with closing(Twins(case, models)) as twins, closing(twins.pair()) as pair:
            logits = twins.forward(pair, tokens_of(1, 2500), Phase.PREFILL)
            twins.decode(pair, logits, 3)
            twins.check()
            assert twins.small.streamed_bytes > 0


def test_a_context_that_streams_can_be_filled_to_its_last_token(models: Path) -> None:
    with closing(Twins(case_of(3, residency=0.0), models)) as twins, closing(twins.pair()) as pair:
        twins.forward(pair, tokens_of(1, CTX - 70), Phase.PREFILL)
        logits = twins.forward(pair, tokens_of(2, 67), Phase.DECODE)
        twins.decode(pair, logits, 3)
        assert pair.room == 0
        with pytest.raises(ContextFull):
            pair.small.forward(tokens_of(3, 1), phase=Phase.DECODE)
        twins.check()
        for session in (pair.small, pair.full):
            session.truncate(CTX - 1)
        twins.forward(pair, tokens_of(4, 1), Phase.DECODE)


def test_a_history_in_the_ring_is_what_the_model_reads(models: Path) -> None:
    """Other tokens in pages that only stream change the logits: nothing beyond the arena is left out."""
    case = case_of(5, residency=0.0)
    rows = []
    for changed in (None, *range(0, 3000, 500)):
        tokens = tokens_of(1, 3000)
        if changed is not None:
            tokens[changed] = (tokens[changed] + 1) % 259
        with case.open(models, 0.0) as rig, closing(rig.session()) as session:
            rows.append(session.forward(tokens)[0].tobytes())
            assert rig.streamed_bytes > 0
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("nth", [0, 7, 40])
def test_a_copy_engine_that_does_nothing_is_noticed(models: Path, nth: int) -> None:
    """From the nth copy on success is reported and no byte moves: an error, or logits that differ."""
    case = case_of(0, is_deferred=False, threads=1)
    tokens = tokens_of(1, 2500)
    with case.open(models, 1.0) as rig, closing(rig.session()) as session:
        honest = session.forward(tokens, logits="all")
    with case.open(models, 0.0) as rig, closing(rig.session()) as session:

        def skip(point: HookPoint, index: int) -> int:
            return SKIP_COPY if point is HookPoint.COPY and index >= nth else 0

        rig.device.set_hook(skip)
        try:
            rows = session.forward(tokens, logits="all")
        except KvStreamError:
            return
        finally:
            rig.device.drain()
            rig.device.set_hook(None)
        assert rows.tobytes() != honest.tobytes()
        assert np.isnan(rows[-1]).any(), "what no copy brought must be NaN, not an earlier page"
