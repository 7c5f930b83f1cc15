"""The pager against a list model: passes, faults, forks, truncations, placements in any order (P-SP, P-PF, P-CP).

A tape of two layers writes table rows of the tokens as keys and values and attends to them. The model of a
sequence is its list of tokens; history must decode to the table rows of these tokens, attention must equal a
plain loop over them, and a forecast must equal what a pass then streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import Device, DeviceFlag, HookPoint
from pykvstream.core.kv import PAGE_TOKENS, Cache, KvLayer, Seq, decode_rows
from pykvstream.core.pager import Forecast, Pager
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, Tape, TensorKind, Weight, WeightLayout
from pykvstream.errors import (
    Busy,
    Cancelled,
    ContextFull,
    DeviceError,
    HostMemoryError,
    InvalidArgument,
    KvStreamError,
    NoSpace,
)
from tests.alphabet import ScriptedMachine, u16
from tests.examples import examples

F32, F16 = 0, 1
LAYERS = (KvLayer(1, 16, 16, F32, F32), KvLayer(2, 16, 16, F16, F16))
N_VOCAB = 64
MAX_ROWS = 600
N_SLOTS = 24
POOL, WORKSPACE = 1, 2
CTX = st.one_of(st.integers(1, 1500), st.sampled_from([255, 256, 257, 768, 1500]))
ROWS = st.one_of(st.integers(1, 5), st.integers(1, MAX_ROWS), st.sampled_from([255, 256, 257, 512, MAX_ROWS]))
FAULTS = {HookPoint.COPY: DeviceError, HookPoint.ALLOC: HostMemoryError, HookPoint.OP: DeviceError}


@dataclass(frozen=True)
class Placement:
    resident_pages: tuple[int, ...]
    ring_slots: int
    max_rows: int

    @property
    def n_slots(self) -> int:
        return self.ring_slots + sum(self.resident_pages)

    @property
    def tail_pages(self) -> int:
        return -(-self.max_rows // PAGE_TOKENS) + 1


@dataclass
class Fault:
    """Fails ``count`` calls at ``point`` from the ``first`` on."""

    point: HookPoint
    first: int
    count: int
    seen: int = 0
    fired: int = 0

    def __call__(self, point: HookPoint, index: int) -> int:
        if point is not self.point:
            return 0
        self.seen += 1
        if not self.first < self.seen <= self.first + self.count:
            return 0
        self.fired += 1
        return HostMemoryError.status if point is HookPoint.ALLOC else DeviceError.status


@dataclass(eq=False)
class History:
    """What a sequence must hold."""

    ctx: int
    tokens: list[int] = field(default_factory=list)


@dataclass
class Pass:
    seq: Seq
    history: History
    tokens: list[int]
    forecast: Forecast
    streamed_pages: int
    streamed_bytes: int
    has_run: bool = False
    has_failed: bool = False
    lacks_copies: bool = False
    """Some failed since it began: whoever waits for them hears of it."""


def pages_of(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def faults(*points: HookPoint) -> st.SearchStrategy[Fault | None]:
    """No fault half of the time."""
    some = st.builds(Fault, st.sampled_from(points), st.integers(0, 12), st.integers(1, 3))
    return st.one_of(st.none(), some)


class Tables:
    """Key, value and query rows of every token and layer, small integers that every type holds exactly."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)

        def table(cols: int) -> NDArray[np.float32]:
            return rng.integers(-4, 5, (N_VOCAB, cols)).astype(np.float32)

        self.k = [table(layer.n_kv_heads * layer.head_dim_k) for layer in LAYERS]
        self.v = [table(layer.n_kv_heads * layer.head_dim_v) for layer in LAYERS]
        self.q = [table(layer.n_kv_heads * layer.head_dim_k) for layer in LAYERS]

    def attend(self, layer: int, tokens: list[int], row: int) -> NDArray[np.float64]:
        """Attention output of the row at position ``row``, in double precision."""
        kv = LAYERS[layer]
        seen = tokens[: row + 1]
        out = []
        for head in range(kv.n_kv_heads):
            k_cols = slice(head * kv.head_dim_k, (head + 1) * kv.head_dim_k)
            v_cols = slice(head * kv.head_dim_v, (head + 1) * kv.head_dim_v)
            q = self.q[layer][tokens[row], k_cols].astype(np.float64)
            scores = self.k[layer][seen, k_cols] @ q * SCALE
            weights = np.exp(scores - scores.max())
            out.append(weights @ self.v[layer][seen, v_cols] / weights.sum())
        return np.concatenate(out)


SCALE = 0.125
TABLES = Tables()


def record_tape(device: Device) -> tuple[Tape, list[Weight]]:
    tape = Tape(device, MAX_ROWS, 1)
    weights: list[Weight] = []

    def embed(rows: NDArray[np.float32]) -> int:
        data = rows.view(np.uint8).reshape(-1)
        weights.append(Weight(device, F32, rows.shape[1], N_VOCAB, data, WeightLayout.ROWS))
        tensor = tape.add_tensor(rows.shape[1])
        tape.add_op(Op(OpCode.EMBED, (), (tensor,), (tape.add_weight(weights[-1]),)))
        return tensor

    for kv in LAYERS:
        tape.add_layer(kv)
    for layer, kv in enumerate(LAYERS):
        k, v, q = embed(TABLES.k[layer]), embed(TABLES.v[layer]), embed(TABLES.q[layer])
        out = tape.add_tensor(kv.n_kv_heads * kv.head_dim_v, kind=TensorKind.OUTPUT)
        tape.add_op(Op(OpCode.KV_WRITE, (k, v), layer=layer))
        tape.add_op(Op(OpCode.ATTEND, (q,), (out,), layer=layer, u=(kv.n_kv_heads,), f=(SCALE,)))
    tape.seal()
    return tape, weights


class PagerMachine(ScriptedMachine):
    target = "pager"

    @initialize(deferred=st.booleans(), seed=st.integers(0, 2**32), n_tokens=st.integers(0, 1400))
    def open(self, deferred: bool, seed: int, n_tokens: int) -> None:
        self.act("CREATE", deferred, seed % 4, seed % 256)
        flags = DeviceFlag.POISON_RELEASED | DeviceFlag.STRICT_HISTORY
        self.device = Device(
            1, flags=flags | (DeviceFlag.DEFERRED if deferred else DeviceFlag.NONE), schedule_seed=seed % 256
        )
        self.is_deferred = deferred
        self.cache = Cache(self.device, LAYERS)
        self.tape, self.weights = record_tape(self.device)
        pool_bytes = N_SLOTS * self.cache.info.max_record_bytes
        workspace_bytes = self.tape.info.workspace_bytes
        self.arena = Arena(self.device, pool_bytes + workspace_bytes + 4096, 64)
        self.arena.begin()
        self.arena.reserve(POOL, pool_bytes)
        self.arena.reserve(WORKSPACE, workspace_bytes)
        self.arena.commit()
        self.pager = Pager(self.device, self.cache)
        self.pool: Lease = self.arena.acquire(POOL)
        self.workspace = self.arena.acquire(WORKSPACE)
        self.binding = Binding(self.device, self.tape, self.arena, self.workspace, self.pager)
        self.placement = Placement((3, 4), 1 + seed % 4, 512)
        self.pager.attach(self.pool, self.placement)
        self.is_attached = True
        self.live: list[tuple[Seq, History]] = []
        self.open_pass: Pass | None = None
        self.rng = np.random.default_rng(seed)
        self.live.append((self.cache.sequence(1500), History(1500)))
        while len(self.live[0][1].tokens) < n_tokens:
            self.take_pass(*self.live[0], min(512, n_tokens - len(self.live[0][1].tokens)))

    # ---- helpers ----

    def pick(self, data: st.DataObject) -> tuple[Seq, History]:
        return data.draw(st.sampled_from(self.live))

    def who(self, seq: Seq) -> int:
        return next(at for at, (other, _) in enumerate(self.live) if other is seq)

    def act_under(self, fault: Fault | None, name: str, *operands: int) -> None:
        """Report an action and the fault that strikes in it."""
        if fault is not None:
            self.act("FAIL", fault.point, fault.first, fault.count - 1)
        self.act(name, *operands)

    def attempt(self, fault: Fault | None, action: Callable[[], object]) -> KvStreamError | None:
        """Run ``action`` under a fault; an error must be the fault's."""
        if fault is None:
            try:
                action()
            except DeviceError as error:
                if self.open_pass is None or not self.open_pass.lacks_copies:
                    raise
                return error
            return None
        self.device.set_hook(fault)
        try:
            action()
        except KvStreamError as error:
            assert fault.fired, error
            assert isinstance(error, FAULTS[fault.point]), error
            return error
        finally:
            self.settle_copies()
            self.device.set_hook(None)
            if self.open_pass is not None:
                self.open_pass.lacks_copies |= fault.fired > 0 and fault.point is HookPoint.COPY
        return None

    def attempt_in_the_end(self, fault: Fault | None, action: Callable[[], object]) -> KvStreamError | None:
        """``attempt``, and once more where a copy thread met the fault: whether it does is chance, and what rules find
        afterwards must not depend on it. What has failed can be repeated."""
        error = self.attempt(fault, action)
        if error is None or self.is_deferred or fault is None or fault.point is not HookPoint.COPY:
            return error
        return self.attempt(None, action)

    def settle_copies(self) -> None:
        if not self.is_deferred:
            with suppress(Busy):  # lookahead may wait for a slot
                self.device.drain()

    def end_what_threads_left(self) -> None:
        """Whether and when a copy thread meets a fault is chance, and rules must not depend on it: end the pass."""
        if not self.is_deferred:
            self.act("COMMIT")
            self.pager.end(0)
            self.open_pass = None

    def busy(self) -> bool:
        return self.open_pass is not None

    # ---- sequences ----

    @precondition(lambda self: len(self.live) < 4)
    @rule(ctx=CTX, fault=faults(HookPoint.ALLOC))
    def create(self, ctx: int, fault: Fault | None) -> None:
        self.act_under(fault, "CREATE", *u16(ctx))
        made: list[Seq] = []
        if self.attempt(fault, lambda: made.append(self.cache.sequence(ctx))) is None:
            self.live.append((made[0], History(ctx)))

    @precondition(lambda self: 0 < len(self.live) < 5)
    @rule(data=st.data(), waits=st.booleans(), fault=faults(HookPoint.ALLOC, HookPoint.COPY))
    def fork(self, data: st.DataObject, waits: bool, fault: Fault | None) -> None:
        seq, history = self.pick(data)
        self.act_under(fault, "FORK", self.who(seq), waits)
        if self.open_pass is not None and self.open_pass.seq is seq:
            with pytest.raises(Busy):
                seq.fork()
            return

        made: list[Seq] = []

        def action() -> None:
            if waits and not self.busy():
                self.pager.publish_wait()
            made.append(seq.fork())

        if self.attempt_in_the_end(fault, action) is None:
            self.live.append((made[0], History(history.ctx, list(history.tokens))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fault=faults(HookPoint.COPY))
    def truncate(self, data: st.DataObject, fault: Fault | None) -> None:
        seq, history = self.pick(data)
        least = 0 if len(history.tokens) < PAGE_TOKENS else len(history.tokens) - PAGE_TOKENS
        n = data.draw(st.one_of(st.integers(0, len(history.tokens)), st.integers(least, len(history.tokens))))
        self.act_under(fault, "TRUNCATE", self.who(seq), *u16(n))
        if self.busy():
            with pytest.raises(Busy):
                self.pager.truncate(seq, n)
            return
        with pytest.raises(InvalidArgument):
            self.pager.truncate(seq, len(history.tokens) + 1)
        if self.attempt_in_the_end(fault, lambda: self.pager.truncate(seq, n)) is None:
            del history.tokens[n:]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tells=st.booleans())
    def drop(self, data: st.DataObject, tells: bool) -> None:
        seq, history = self.pick(data)
        self.act("RELEASE", self.who(seq), tells)
        if self.open_pass is not None and self.open_pass.seq is seq:
            with pytest.raises(Busy):
                self.pager.drop(seq)
            return
        if tells:
            self.pager.drop(seq)
        seq.close()
        self.live.remove((seq, history))

    # ---- passes ----

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n_rows=ROWS, fault=faults(HookPoint.ALLOC, HookPoint.COPY))
    def begin(self, data: st.DataObject, n_rows: int, fault: Fault | None) -> None:
        seq, history = self.pick(data)
        self.act_under(fault, "BEGIN", self.who(seq), *u16(n_rows))
        if self.busy() or not self.is_attached:
            with pytest.raises(Busy):
                self.pager.begin(seq, n_rows)
            return
        if n_rows > self.placement.max_rows:
            for action in (self.pager.begin, self.pager.forecast):
                with pytest.raises(InvalidArgument):
                    action(seq, n_rows)
            return
        active = pages_of(len(history.tokens) + n_rows)
        lacks_tail = any(
            active > pages and pages < self.placement.tail_pages for pages in self.placement.resident_pages
        )
        if lacks_tail:
            for action in (self.pager.begin, self.pager.forecast):
                with pytest.raises(NoSpace):
                    action(seq, n_rows)
            return
        if len(history.tokens) + n_rows > history.ctx:
            with pytest.raises(ContextFull):
                self.pager.begin(seq, n_rows)
            return
        forecast = self.pager.forecast(seq, n_rows)
        if forecast.streamed_pages and self.placement.ring_slots == 0:
            with pytest.raises(NoSpace):
                self.pager.begin(seq, n_rows)
            return
        info = self.pager.info
        if self.attempt(fault, lambda: self.pager.begin(seq, n_rows)) is None:
            tokens = self.rng.integers(0, N_VOCAB, n_rows).tolist()
            self.open_pass = Pass(seq, history, tokens, forecast, info.streamed_pages, info.streamed_bytes)
            if fault is not None and fault.point is HookPoint.COPY:
                self.open_pass.lacks_copies = fault.fired > 0
                self.end_what_threads_left()

    @precondition(lambda self: self.open_pass is not None and not self.open_pass.has_failed)
    @rule(fault=faults(HookPoint.COPY, HookPoint.OP), cancels=st.integers(0, 7).map(lambda n: n == 0))
    def run(self, fault: Fault | None, cancels: bool) -> None:
        if self.open_pass is None or self.open_pass.has_run:
            return
        if cancels:
            self.act("CANCEL")
        self.act_under(None if cancels else fault, "RUN")
        if cancels:
            with pytest.raises(Cancelled):
                self.replay_with(cancels=True)
            self.open_pass.has_failed = True
        else:
            self.replay(fault)
            if fault is not None and fault.point is HookPoint.COPY:
                self.end_what_threads_left()

    def replay_with(self, *, cancels: bool) -> tuple[NDArray[np.float32], ...]:
        current = self.open_pass
        assert current is not None
        n_rows = len(current.tokens)
        outputs = tuple(np.full((n_rows, kv.n_kv_heads * kv.head_dim_v), np.nan, np.float32) for kv in LAYERS)
        cancel = CancelFlag()
        if cancels:
            cancel.set()
        self.binding.run(np.array(current.tokens, np.uint32), np.empty(0, np.uint32), outputs, cancel)
        return outputs

    def replay(self, fault: Fault | None) -> None:
        current = self.open_pass
        assert current is not None
        made: list[tuple[NDArray[np.float32], ...]] = []
        if self.attempt(fault, lambda: made.append(self.replay_with(cancels=False))) is not None:
            current.has_failed = True
            return
        current.has_run = True
        self.check_outputs(current, made[0])
        info = self.pager.info
        assert info.streamed_pages - current.streamed_pages == current.forecast.streamed_pages
        assert info.streamed_bytes - current.streamed_bytes == current.forecast.streamed_bytes
        assert info.resident_pages >= current.forecast.resident_pages

    def check_outputs(self, current: Pass, outputs: tuple[NDArray[np.float32], ...]) -> None:
        first = len(current.history.tokens)
        tokens = current.history.tokens + current.tokens
        for layer, out in enumerate(outputs):
            for row in {0, len(current.tokens) // 2, len(current.tokens) - 1}:
                expected = TABLES.attend(layer, tokens, first + row)
                np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-4)

    @precondition(lambda self: self.open_pass is not None)
    @rule(data=st.data(), fault=faults(HookPoint.COPY))
    def end(self, data: st.DataObject, fault: Fault | None) -> None:
        current = self.open_pass
        assert current is not None
        n_rows = len(current.tokens)
        with pytest.raises(InvalidArgument):
            self.pager.end(n_rows + 1)
        n = data.draw(st.one_of(st.just(n_rows), st.integers(0, n_rows))) if current.has_run else 0
        self.act_under(fault, "COMMIT", 0, *u16(n))
        self.attempt(fault, lambda: self.pager.end(n))
        current.history.tokens += current.tokens[:n]
        self.open_pass = None

    @precondition(lambda self: self.live and self.open_pass is None and self.is_attached)
    @rule(data=st.data(), n_rows=ROWS, keeps=st.integers(0, MAX_ROWS))
    def prompt(self, data: st.DataObject, n_rows: int, keeps: int) -> None:
        self.take_pass(*self.pick(data), n_rows, keeps if keeps % 4 == 0 else None)

    @precondition(lambda self: self.live and self.open_pass is None and self.is_attached)
    @rule(data=st.data(), n_rows=st.integers(1, 3), n_passes=st.integers(1, 4))
    def decode(self, data: st.DataObject, n_rows: int, n_passes: int) -> None:
        """Passes that find the demands that the one before has looked ahead to."""
        seq, history = self.pick(data)
        for _ in range(n_passes):
            self.take_pass(seq, history, n_rows)

    def take_pass(self, seq: Seq, history: History, n_rows: int, keeps: int | None = None) -> None:
        """A whole pass without a fault, where the placement can serve it."""
        n_rows = min(n_rows, self.placement.max_rows, history.ctx - len(history.tokens))
        if n_rows == 0:
            return
        self.act("BEGIN", self.who(seq), *u16(n_rows))
        try:
            forecast = self.pager.forecast(seq, n_rows)
            self.pager.begin(seq, n_rows)
        except NoSpace:
            return
        info = self.pager.info
        tokens = self.rng.integers(0, N_VOCAB, n_rows).tolist()
        self.open_pass = Pass(seq, history, tokens, forecast, info.streamed_pages, info.streamed_bytes)
        self.act("RUN")
        self.replay(None)
        n = n_rows if keeps is None else min(keeps, n_rows)
        self.act("COMMIT", 0, *u16(n))
        self.pager.end(n)
        history.tokens += tokens[:n]
        self.open_pass = None
        event("streams" if forecast.streamed_pages else "stays")

    @precondition(lambda self: self.open_pass is None)
    @rule()
    def end_without_pass(self) -> None:
        with pytest.raises(Busy):
            self.pager.end(1)
        if self.is_attached:
            with pytest.raises(Busy):
                self.binding.run(
                    np.zeros(1, np.uint32), np.empty(0, np.uint32), self.rows_for(1), CancelFlag()
                )

    def rows_for(self, n_rows: int) -> tuple[NDArray[np.float32], ...]:
        return tuple(np.empty((n_rows, kv.n_kv_heads * kv.head_dim_v), np.float32) for kv in LAYERS)

    # ---- the pool ----

    @rule(
        pages=st.tuples(st.integers(1, 11), st.integers(1, 11)),
        ring=st.integers(0, 4),
        max_rows=st.sampled_from([1, 5, 256, 300, MAX_ROWS]),
        fault=faults(HookPoint.ALLOC, HookPoint.COPY),
    )
    def place(self, pages: tuple[int, int], ring: int, max_rows: int, fault: Fault | None) -> None:
        placement = Placement(pages, ring, max_rows)
        self.act_under(fault, "PLACE", *(n - 1 for n in pages), ring, *u16(max_rows))
        if self.busy() or not self.is_attached:
            with pytest.raises(Busy):
                self.pager.place(placement)
            return
        if placement.n_slots > N_SLOTS:
            with pytest.raises(NoSpace):
                self.pager.place(placement)
            return
        if max_rows > min(pages) * PAGE_TOKENS:
            with pytest.raises(InvalidArgument, match=f"{max_rows} rows"):
                self.pager.place(placement)
            return
        if self.attempt_in_the_end(fault, lambda: self.pager.place(placement)) is None:
            self.placement = placement

    @rule(fault=faults(HookPoint.COPY))
    def detach(self, fault: Fault | None) -> None:
        self.act_under(fault, "UNBIND", 0)
        if self.busy():
            with pytest.raises(Busy):
                self.pager.detach()
            return
        if self.attempt_in_the_end(fault, self.pager.detach) is None:
            self.is_attached = False

    @precondition(lambda self: not self.busy())
    @rule(fault=faults(HookPoint.ALLOC))
    def attach(self, fault: Fault | None) -> None:
        self.act_under(fault, "BIND")
        if self.is_attached:
            with pytest.raises(Busy):
                self.pager.attach(self.pool, self.placement)
            return
        if self.attempt(fault, lambda: self.pager.attach(self.pool, self.placement)) is None:
            self.is_attached = True

    @rule(fault=faults(HookPoint.COPY))
    def forget(self, fault: Fault | None) -> None:
        self.act_under(fault, "UNBIND", 1)
        if self.busy():
            with pytest.raises(Busy):
                self.pager.forget()
            return
        self.attempt(fault, self.pager.forget)

    @rule(fault=faults(HookPoint.COPY))
    def publish_wait(self, fault: Fault | None) -> None:
        self.act_under(fault, "ADVANCE", 0, 1)
        self.attempt(fault, self.pager.publish_wait)

    @precondition(lambda self: self.is_deferred)
    @rule(limit=st.integers(1, 9))
    def run_copies(self, limit: int) -> None:
        self.act("ADVANCE", limit - 1, 0)
        assert self.device.run_copies(limit) <= limit

    # ---- what always holds ----

    @invariant()
    def is_whole(self) -> None:
        for part in (self.arena, self.cache, self.pager):
            part.check_integrity()
        for seq, history in self.live:
            assert seq.info.committed_tokens == len(history.tokens)
        if self.open_pass is None:
            assert not self.pager.info.is_in_pass

    @rule()
    def history_is_true(self) -> None:
        """What counts as published is what the tokens say, in every layer."""
        self.act("READ")
        if not self.busy():
            self.pager.publish_wait()
        for seq, history in self.live:
            for page in range(pages_of(len(history.tokens))):
                self.check_page(seq, history, page)

    def check_page(self, seq: Seq, history: History, page: int) -> None:
        tokens = history.tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        for layer, kv in enumerate(LAYERS):
            rows = seq.page(layer, page).published_rows
            if not self.busy():
                assert rows >= len(tokens)
            rows = min(rows, len(tokens))
            if rows == 0:
                continue
            k, v = decode_rows(self.device, kv, seq.read_page(layer, page), 0, rows)
            np.testing.assert_array_equal(k, TABLES.k[layer][tokens[:rows]])
            np.testing.assert_array_equal(v, TABLES.v[layer][tokens[:rows]])

    def teardown(self) -> None:
        self.report_script()
        if not hasattr(self, "rng"):
            return
        if self.busy():
            self.pager.end(0)
            self.open_pass = None
        self.history_is_true()
        sequences = [seq for seq, _ in self.live]
        parts = [self.pager, self.pool, self.workspace, self.arena, self.tape, self.cache, self.binding]
        everything = [*parts, *self.weights, *sequences]
        for i in self.rng.permutation(len(everything)):
            everything[i].close()
        assert self.device.info.live_objects == 0
        self.device.close()


TestPager = PagerMachine.TestCase
TestPager.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None, phases=(Phase.explicit, Phase.generate)
)
