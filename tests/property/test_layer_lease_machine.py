"""Layer leases against a plain model: P-LL, P-ML, P-LC and P-SE of the specification, in any order of calls.

A trunk of two layers and a head of one, each with a pager and a tape that writes table rows of its tokens and
attends to them. The model of a sequence is its list of tokens, of a lease: the sequence, how far it reaches, and
slots borrowed.

What each property protects, and what of it there is here (kept, changed or void, with the reason):

- P-LL1 kept: how many pages stay, how many slots are held and which, spans at exact addresses, attention over them.
  Changed: the tail lies with the pager, so that 1,017 rows are resident, borrowed, resident, not resident and
  borrowed.
- P-LL2 kept: one lease for all widths, a second is refused, another division is refused while it is held and works
  after.
- P-LL3 kept: a wrong layer count, width, token count or generation, or a pool that is too small, changes nothing.
  Changed: no layout revision is asked for: a lease keeps its regions from being divided, so none can be old.
- P-LL4 kept: whoever goes first, memory that a plan names stays; held slots are the ring's last. Void: a guard that
  outlives its lease. The two are one object here, so nothing can forget one of them.
- P-ML1 kept: what is brought is exact, and once for all widths; a short cache borrows nothing.
- P-ML2 kept: of a second lease only the borrowed part is brought; nothing after a truncation; a failed one can be
  tried again.
- P-ML3 kept: another generation, also one past the pager, gives no lease, or no plan and no pass of one that there
  is.
- P-ML4 kept as `reserved_tokens`: slots for rows to come are borrowed, and no byte is brought for them.
- P-ML5 changed: there is no tail to publish to the device, rows are written where they stay. What it protects is
  kept: a pass copies nothing to the device, and plans of the generation before are refused.
- P-ML6 changed: rows need no staging for the same reason. Kept: a pass that fails leaves no row, and rows in a
  borrowed slot reach history before it is given back (test_layer_lease.c cuts those that cannot).
- P-ML7 kept: a truncation under a lease copies nothing, keeps the slots, and makes older plans stale.
- P-LC1 kept: rows before a cut stay and are not brought again. Void: a restore that dirties all rows; pages that
  are loaded into history have new columns (test_cache_machine.py). Trunk and head have caches and generations of
  their own.
- P-LC2 kept: a pass that is aborted leaves nothing, and what was truncated is not found again. Void: foreign
  checkpoints of a head, which has none.
- P-LC3 kept: rows across pages are byte exact in history. Void: writers of a wrong shape; a tape is checked when it
  is sealed.
- P-SE1 void: sessions of the core. Grants that overlap or are too small are refused by arena and pager (their
  machines).
- P-SE2 kept: a pass that is refused or fails to open leaves tokens and generation as they were, and the next one
  works. Void: "tensor init", for which a pass needs nothing that could fail later.
- P-SE3 kept: rows count from the end of the pass on; an aborted one has none. Changed: a sequence that was changed
  past the pager is stale for the lease, not poisoned: it is whole in history.
- P-SE4 kept: a pass that failed never commits. Void: restoring only from 0 tokens; the pages of a sequence may be
  written.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device, DeviceFlag, HookPoint
from pykvstream.core.kv import PAGE_TOKENS, Cache, KvLayer, Seq, decode_rows
from pykvstream.core.layer_lease import LayerLease, missing_slots
from pykvstream.core.pager import Pager
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, Tape, TensorKind, Weight, WeightLayout
from pykvstream.errors import (
    Busy,
    Closed,
    ContextFull,
    InvalidArgument,
    KvStreamError,
    NoSpace,
    Stale,
)
from tests.alphabet import ScriptedMachine, u16
from tests.examples import examples
from tests.property.test_pager_machine import (
    F32,
    FAULTS,
    LAYERS,
    N_VOCAB,
    SCALE,
    TABLES,
    Fault,
    History,
    Placement,
    faults,
    pages_of,
)

MAX_ROWS = 256
HEAD_SLOTS, TRUNK_SLOTS = 8, 12
CTX = 1500
NONE, HEAD, TRUNK = 0, 1, 2
"""Who lends."""
ROWS = st.one_of(st.integers(1, 5), st.integers(1, MAX_ROWS), st.sampled_from([255, MAX_ROWS]))


class Side:
    """A cache, its pager and a tape over it, in an arena of their own."""

    def __init__(self, device: Device, layers: tuple[KvLayer, ...], n_slots: int) -> None:
        self.device, self.layers = device, layers
        self.cache = Cache(device, layers)
        self.tape = Tape(device, MAX_ROWS, 1)
        self.weights: list[Weight] = []
        for kv in layers:
            self.tape.add_layer(kv)
        for layer, kv in enumerate(layers):
            k, v, q = (self.embed(table[layer]) for table in (TABLES.k, TABLES.v, TABLES.q))
            out = self.tape.add_tensor(kv.n_kv_heads * kv.head_dim_v, kind=TensorKind.OUTPUT)
            self.tape.add_op(Op(OpCode.KV_WRITE, (k, v), layer=layer))
            self.tape.add_op(Op(OpCode.ATTEND, (q,), (out,), layer=layer, u=(kv.n_kv_heads,), f=(SCALE,)))
        self.tape.seal()
        self.slot_bytes = self.cache.info.max_record_bytes
        sizes = n_slots * self.slot_bytes, self.tape.info.workspace_bytes
        self.arena = Arena(device, sum(sizes) + 4096, 64)
        self.arena.begin()
        for at, size in enumerate(sizes):
            self.arena.reserve(at + 1, size)
        self.arena.commit()
        self.pool, self.workspace = self.arena.acquire(1), self.arena.acquire(2)
        self.pager = Pager(device, self.cache)
        self.binding = Binding(device, self.tape, self.arena, self.workspace, self.pager)

    def embed(self, rows: NDArray[np.float32]) -> int:
        data = rows.view(np.uint8).reshape(-1)
        self.weights.append(Weight(self.device, F32, rows.shape[1], N_VOCAB, data, WeightLayout.ROWS))
        tensor = self.tape.add_tensor(rows.shape[1])
        self.tape.add_op(Op(OpCode.EMBED, (), (tensor,), (self.tape.add_weight(self.weights[-1]),)))
        return tensor

    def run(self, first: int, tokens: list[int]) -> None:
        """Replay the open pass over the rows from ``first`` on; each must see all tokens before it."""
        n_rows = len(tokens) - first
        outputs = tuple(np.full((n_rows, kv.n_kv_heads * kv.head_dim_v), np.nan, np.float32) for kv in self.layers)
        self.binding.run(np.array(tokens[first:], np.uint32), np.empty(0, np.uint32), outputs, CancelFlag())
        for layer, out in enumerate(outputs):
            for row in {0, n_rows - 1}:
                expected = TABLES.attend(layer, tokens, first + row)
                np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-4)

    def check_page(self, seq: Seq, tokens: list[int], page: int) -> None:
        rows = tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        for layer, kv in enumerate(self.layers):
            k, v = decode_rows(self.device, kv, seq.read_page(layer, page), 0, len(rows))
            np.testing.assert_array_equal(k, TABLES.k[layer][rows])
            np.testing.assert_array_equal(v, TABLES.v[layer][rows])

    @property
    def parts(self) -> list[object]:
        return [self.pager, self.pool, self.workspace, self.arena, self.tape, self.cache, self.binding, *self.weights]


class LayerLeaseMachine(ScriptedMachine):
    target = "lease"

    @initialize(
        deferred=st.booleans(), seed=st.integers(0, 255), ring=st.integers(1, 8), head=st.integers(0, 8),
        n_tokens=st.integers(0, 1400),
    )  # fmt: skip
    def open(self, deferred: bool, seed: int, ring: int, head: int, n_tokens: int) -> None:
        self.act("CREATE", deferred, ring - 1, seed, head)
        flags = DeviceFlag.POISON_RELEASED | DeviceFlag.STRICT_HISTORY
        mode = DeviceFlag.DEFERRED if deferred else DeviceFlag.NONE
        self.device = Device(1, flags=flags | mode, schedule_seed=seed)
        self.is_deferred = deferred
        self.rng = np.random.default_rng(seed)
        self.trunk = Side(self.device, LAYERS, TRUNK_SLOTS)
        self.head = Side(self.device, LAYERS[:1], HEAD_SLOTS)
        self.trunk_placement = Placement((2, 2), ring, MAX_ROWS)
        self.head_placement = Placement((2 + head % 3,), 1 + head // 3, MAX_ROWS)
        self.trunk.pager.attach(self.trunk.pool, self.trunk_placement)
        self.head.pager.attach(self.head.pool, self.head_placement)
        self.talk = self.trunk.cache.sequence(CTX), History(CTX)
        self.live: list[tuple[Seq, History]] = [(self.head.cache.sequence(CTX), History(CTX))]
        self.lease: LayerLease | None = None
        self.leased: tuple[Seq, History] | None = None
        self.reserved = self.lender = self.n_held = 0
        self.is_stale = False
        while len(self.live[0][1].tokens) < n_tokens:
            self.head_pass_of(0, min(MAX_ROWS, n_tokens - len(self.live[0][1].tokens)), None)

    # ---- helpers ----

    def draw_tokens(self, n_rows: int) -> list[int]:
        return list(self.rng.integers(0, N_VOCAB, n_rows).tolist())

    def copied(self) -> tuple[int, int, int]:
        info = self.head.pager.info
        return info.copies, info.loaded_bytes, info.streamed_bytes

    @property
    def lends_trunk(self) -> bool:
        return self.lease is not None and self.lender == TRUNK and self.n_held > 0

    # ---- passes ----

    @rule(n_rows=ROWS, n_passes=st.integers(1, 3))
    def trunk_pass(self, n_rows: int, n_passes: int) -> None:
        for _ in range(n_passes):
            seq, history = self.talk
            self.act("BEGIN", 255, *u16(n_rows))
            if self.lends_trunk:
                with pytest.raises(Busy, match=f"{self.n_held} of {self.trunk_placement.ring_slots} ring slots"):
                    self.trunk.pager.begin(seq, n_rows)
                return
            if len(history.tokens) + n_rows > CTX:
                with pytest.raises(ContextFull):
                    self.trunk.pager.begin(seq, n_rows)
                return
            self.trunk.pager.begin(seq, n_rows)
            tokens = history.tokens + self.draw_tokens(n_rows)
            self.trunk.run(len(history.tokens), tokens)
            self.trunk.pager.end(n_rows)
            history.tokens[:] = tokens

    @rule(data=st.data(), n_rows=ROWS, drops=st.integers(0, 7), n_passes=st.integers(1, 3))
    def head_pass(self, data: st.DataObject, n_rows: int, drops: int, n_passes: int) -> None:
        who = data.draw(st.integers(0, len(self.live) - 1))
        keeps = data.draw(st.integers(0, n_rows)) if drops == 0 else None
        for _ in range(n_passes):
            self.head_pass_of(who, n_rows, keeps)

    def refusal(self, seq: Seq, history: History, n_rows: int) -> type[KvStreamError] | None:
        end = len(history.tokens) + n_rows
        if self.lease is not None:
            assert self.leased is not None
            if self.leased[0] is not seq:
                return Busy
            if self.is_stale:
                return Stale
            if end > self.reserved:
                return NoSpace
        return ContextFull if end > CTX else None

    def head_pass_of(self, who: int, n_rows: int, keeps: int | None) -> None:
        seq, history = self.live[who]
        self.act("BEGIN", who, *u16(n_rows))
        error = self.refusal(seq, history, n_rows)
        generation = seq.info.generation
        if error is not None:
            with pytest.raises(error):
                self.head.pager.begin(seq, n_rows)
            assert seq.info.generation == generation
            return
        is_shared = seq.info.n_shared_pages > 0
        before = self.copied()
        self.head.pager.begin(seq, n_rows)
        tokens = history.tokens + self.draw_tokens(n_rows)
        self.head.run(len(history.tokens), tokens)
        n_kept = n_rows if keeps is None else min(keeps, n_rows)
        self.act("COMMIT", 0, *u16(n_kept))
        self.head.pager.end(n_kept)
        del tokens[len(history.tokens) + n_kept :]
        history.tokens[:] = tokens
        if self.lease is not None:
            n_loaded = self.copied()[0] - before[0]
            assert n_loaded <= (1 if is_shared else 0), "the last page of a fork is all that a pass may bring"
            assert self.copied()[2] == before[2]
            assert self.lease.info.generation == seq.info.generation > generation
            with pytest.raises(Stale):
                self.lease.plan(LAYERS[0], generation, 1)
            event("a pass under a lease")

    # ---- sequences ----

    @rule(data=st.data(), past=st.integers(0, 5).map(lambda n: n == 0))
    def truncate(self, data: st.DataObject, past: bool) -> None:
        who = data.draw(st.integers(0, len(self.live) - 1))
        seq, history = self.live[who]
        n = len(history.tokens) - data.draw(st.one_of(st.integers(0, 20), st.integers(0, 2000)))
        n = max(n, 0)
        self.act("TRUNCATE", who + 128 * past, *u16(n))
        before, generation = self.copied(), seq.info.generation
        is_leased = self.leased is not None and self.leased[0] is seq
        if past:
            self.head.pager.publish_wait()
            seq.truncate(n)
            self.is_stale |= is_leased and seq.info.generation != generation
        else:
            self.head.pager.truncate(seq, n)
        del history.tokens[n:]
        assert self.copied() == before
        if is_leased and self.lease is not None and seq.info.generation != generation:
            assert self.lease.info.n_held_slots == self.n_held
            with pytest.raises(Stale):
                self.lease.plan(LAYERS[0], generation, 1)
            if past:
                with pytest.raises(Stale):
                    self.lease.plan(LAYERS[0], seq.info.generation, 1)

    @precondition(lambda self: len(self.live) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        who = data.draw(st.integers(0, len(self.live) - 1))
        self.act("FORK", who)
        seq, history = self.live[who]
        self.head.pager.publish_wait()
        self.live.append((seq.fork(), History(CTX, list(history.tokens))))

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        who = data.draw(st.integers(0, len(self.live) - 1))
        self.act("RELEASE", who)
        seq, _ = self.live[who]
        if self.leased is not None and self.leased[0] is seq:
            with pytest.raises(Busy):
                self.head.pager.drop(seq)
            return
        self.head.pager.drop(seq)
        seq.close()
        del self.live[who]

    # ---- leases ----

    def expected(self, history: History, reserved: int, lender: int) -> tuple[type[KvStreamError] | None, int]:
        """What an acquisition is refused with, and how many slots it would borrow."""
        committed = len(history.tokens)
        n_missing = max(pages_of(reserved) - self.head_placement.resident_pages[0], 0)
        if self.lease is not None:
            return Busy, 0
        if reserved == 0 or reserved < committed or reserved - committed > MAX_ROWS:
            return InvalidArgument, 0
        if reserved > CTX:
            return ContextFull, 0
        rings = {NONE: 1, HEAD: self.head_placement.ring_slots, TRUNK: self.trunk_placement.ring_slots}
        if n_missing > rings[lender] - 1:
            return NoSpace, 0
        return None, n_missing

    @rule(
        data=st.data(), lender=st.sampled_from([NONE, HEAD, TRUNK, TRUNK, TRUNK]),
        more=st.one_of(st.integers(0, 8), st.integers(0, MAX_ROWS + 1)),
        fault=faults(HookPoint.COPY, HookPoint.ALLOC),
    )  # fmt: skip
    def acquire(self, data: st.DataObject, lender: int, more: int, fault: Fault | None) -> None:
        who = data.draw(st.integers(0, len(self.live) - 1))
        if fault is not None:
            self.act("FAIL", fault.point, fault.first, fault.count - 1)
        self.acquire_as(who, lender, more, fault)

    def acquire_as(self, who: int, lender: int, more: int, fault: Fault | None = None) -> None:
        seq, history = self.live[who]
        self.act("LEASE", who, lender, *u16(more))
        reserved = len(history.tokens) + more
        error, n_missing = self.expected(history, reserved, lender)
        lease = LayerLease(self.device)
        pager = {NONE: None, HEAD: self.head.pager, TRUNK: self.trunk.pager}[lender]
        assert missing_slots(self.device, self.head.pager, reserved) == max(
            pages_of(reserved) - self.head_placement.resident_pages[0], 0
        )
        before = self.head.pager.info
        if self.lease is None:
            with pytest.raises(Stale):
                lease.acquire(self.head.pager, seq, reserved, lender=pager, generation=seq.info.generation + 1)
        if error is not None:
            with pytest.raises(error):
                lease.acquire(self.head.pager, seq, reserved, lender=pager)
            assert self.head.pager.info == before
            lease.close()
            return
        if fault is not None:
            self.device.set_hook(fault)
        try:
            lease.acquire(self.head.pager, seq, reserved, lender=pager)
        except KvStreamError as failure:
            assert fault is not None and fault.fired and isinstance(failure, FAULTS[fault.point]), failure
            lease.close()
            assert self.head.pager.info.n_slots == before.n_slots
            event("a lease that failed")
            return
        finally:
            if not self.is_deferred:
                with suppress(Busy):
                    self.device.drain()
            self.device.set_hook(None)
        self.lease, self.leased = lease, (seq, history)
        self.reserved, self.lender, self.n_held, self.is_stale = reserved, lender, n_missing, False
        self.check_population(before.loaded_pages, before.loaded_bytes)

    def check_population(self, loaded_pages: int, loaded_bytes: int) -> None:
        assert self.lease is not None and self.leased is not None
        info, after = self.lease.info, self.head.pager.info
        n_tokens = len(self.leased[1].tokens)
        ring = (self.head_placement if self.lender == HEAD else self.trunk_placement).ring_slots
        assert info.is_held and info.reserved_tokens == self.reserved
        assert info.n_held_slots == self.n_held
        assert info.first_held_slot == (ring - self.n_held if self.n_held else 0)
        assert info.populated_pages == after.loaded_pages - loaded_pages
        assert info.populated_bytes == after.loaded_bytes - loaded_bytes == info.populated_pages * self.head.slot_bytes
        assert info.reused_pages + info.populated_pages == pages_of(n_tokens)
        assert info.populated_pages >= self.n_borrowed_pages(n_tokens)
        assert (info.later_pages, info.later_bytes) == (0, 0)
        event(f"a lease of {min(self.n_held, 2)} slots or more")

    def n_borrowed_pages(self, n_tokens: int) -> int:
        """Full pages between those that stay and the tail."""
        n_pages, tail = pages_of(self.reserved), n_tokens // PAGE_TOKENS
        resident = self.head_placement.resident_pages[0]
        return 0 if n_pages <= resident else tail - (resident - (n_pages - tail))

    @precondition(lambda self: self.lease is None)
    @rule(data=st.data(), more=st.integers(1, 9))
    def acquire_twice(self, data: st.DataObject, more: int) -> None:
        """Of the second lease only what was borrowed is brought."""
        who = data.draw(st.integers(0, len(self.live) - 1))
        self.acquire_as(who, TRUNK, more)
        if self.lease is None or self.leased is None:
            return
        self.give_back_as(0)
        self.acquire_as(who, TRUNK, more)
        assert self.lease.info.populated_pages == self.n_borrowed_pages(len(self.leased[1].tokens))

    @rule(how=st.integers(0, 1))
    def give_back(self, how: int) -> None:
        self.give_back_as(how)

    def give_back_as(self, how: int) -> None:
        self.act("GIVE_BACK", how)
        if self.lease is None:
            return
        if how == 0:
            self.lease.give_back()
            self.lease.give_back()
            assert not self.lease.info.is_held
            with pytest.raises(Closed):
                self.lease.plan(LAYERS[0], 1, 1)
            self.lease.check_integrity()
        self.lease.close()
        self.lease = self.leased = None
        self.n_held = 0

    @precondition(lambda self: self.lease is not None and not self.is_stale and self.leased[1].tokens)
    @rule(n_rows=st.integers(1, 3))
    def plan(self, n_rows: int) -> None:
        self.act("PLAN", n_rows)
        assert self.lease is not None and self.leased is not None
        seq, history = self.leased
        n_rows = min(n_rows, len(history.tokens))
        with self.lease.plan(LAYERS[0], seq.info.generation, n_rows) as plan:
            table = [int(address) for address in plan.page_table()]
            assert len(table) == len(set(table)) == pages_of(len(history.tokens))
            own = self.head.pool.info.address
            ends = own + HEAD_SLOTS * self.head.slot_bytes
            lender = self.head if self.lender == HEAD else self.trunk
            ring = (self.head_placement if self.lender == HEAD else self.trunk_placement).ring_slots
            held = {
                lender.pool.info.address + slot * lender.slot_bytes for slot in range(ring - self.n_held, ring)
            } if self.n_held else set()  # fmt: skip
            first_own = own + self.head_placement.ring_slots * self.head.slot_bytes
            assert all(first_own <= address < ends for address in table if address not in held)
            rows = history.tokens[-n_rows:]
            found = plan.attend(TABLES.q[0][rows], LAYERS[0].n_kv_heads, SCALE)
        for row in range(n_rows):
            expected = TABLES.attend(0, history.tokens, len(history.tokens) - n_rows + row)
            np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)

    # ---- pools ----

    @rule(ring=st.integers(1, 8))
    def place_trunk(self, ring: int) -> None:
        self.act("PLACE", 0, ring - 1)
        placement = Placement((2, 2), ring, MAX_ROWS)
        if self.lends_trunk:
            for action in (self.trunk.pager.detach, lambda: self.trunk.pager.place(placement)):
                with pytest.raises(Busy):
                    action()
            return
        self.trunk.pager.place(placement)
        self.trunk_placement = placement

    @rule(head=st.integers(0, 8))
    def place_head(self, head: int) -> None:
        self.act("PLACE", 1, head)
        placement = Placement((2 + head % 3,), 1 + head // 3, MAX_ROWS)
        if self.lease is not None:
            for action in (
                self.head.pager.detach, self.head.pager.forget, lambda: self.head.pager.place(placement)
            ):  # fmt: skip
                with pytest.raises(Busy):
                    action()
            return
        self.head.pager.place(placement)
        self.head_placement = placement

    @precondition(lambda self: self.is_deferred)
    @rule(limit=st.integers(1, 9))
    def run_copies(self, limit: int) -> None:
        self.act("ADVANCE", limit - 1, 0)
        assert self.device.run_copies(limit) <= limit

    # ---- what always holds ----

    @invariant()
    def is_whole(self) -> None:
        for side in (self.trunk, self.head):
            for part in (side.arena, side.cache, side.pager):
                part.check_integrity()
        if self.lease is not None:
            self.lease.check_integrity()
            assert self.lease.info.n_held_slots == self.n_held
        for seq, history in (self.talk, *self.live):
            assert seq.info.committed_tokens == len(history.tokens)

    @rule()
    def history_is_true(self) -> None:
        self.act("READ")
        for side, sequences in ((self.trunk, [self.talk]), (self.head, self.live)):
            side.pager.publish_wait()
            for seq, history in sequences:
                for page in range(pages_of(len(history.tokens))):
                    side.check_page(seq, history.tokens, page)

    def teardown(self) -> None:
        self.report_script()
        if not hasattr(self, "is_stale"):
            return
        self.history_is_true()
        everything = [*self.trunk.parts, *self.head.parts, self.talk[0], *(seq for seq, _ in self.live)]
        if self.lease is not None:
            everything.append(self.lease)
        for i in self.rng.permutation(len(everything)):
            everything[i].close()  # type: ignore[attr-defined]
        assert self.device.info.live_objects == 0
        self.device.close()


TestLayerLease = LayerLeaseMachine.TestCase
TestLayerLease.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
