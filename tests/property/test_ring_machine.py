"""The ring against a model of slots (P-PF, P-CP): order, gates, holds, cancel, failures, and every byte.

Holds: ``RingMachine`` and the injections that must be noticed. The fault hook tells the model which copy is
about to run, so that a write before its slot is consumed is seen at that moment, and the memory is compared
with what the copies so far must have left: pages, or NaN where a slot was let go.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import SKIP_COPY, Device, DeviceFlag, HookPoint
from pykvstream.core.host import Host
from pykvstream.core.ring import Demand, Ring
from pykvstream.errors import Busy, Closed, DeviceError, HostMemoryError, InvalidArgument, NotFound, Poisoned
from tests.alphabet import ScriptedMachine
from tests.examples import examples

SLOT_BYTES = 128
N_HISTORY = 40
NAN_BYTE = 0xFF
HELD_BYTE = 0x33


def page_bytes(page: int, record_bytes: int) -> bytes:
    """A page of history, padded as its slot is: what the copy does not reach stays NaN."""
    return bytes([page + 1]) * record_bytes + bytes([NAN_BYTE]) * (SLOT_BYTES - record_bytes)


def history(device: Device, record_bytes: int) -> Host:
    host = Host(device, N_HISTORY * record_bytes)
    values = np.repeat(np.arange(1, N_HISTORY + 1, dtype=np.uint8), record_bytes)
    host.write(0, values)
    return host


def leased(device: Device, n_bytes: int) -> Lease:
    with Arena(device, n_bytes) as arena:
        arena.begin()
        arena.reserve(1, n_bytes)
        arena.commit()
        return arena.acquire(1)


@dataclass(eq=False)
class Page:
    """One demanded page; ``came`` tells whether its copy moved bytes."""

    page: int
    record_bytes: int
    slot: int
    came: bool = False


@dataclass(eq=False)
class Run:
    end: int
    gate: int


@dataclass
class Model:
    n_slots: int
    limit: int
    held: int = 0
    base: int = 0
    ready: int = 0
    consumed: int = 0
    poisoned: bool = False
    pages: list[Page] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    queued: list[Run] = field(default_factory=list)
    slots: list[bytes] = field(default_factory=list)
    copies: int = 0
    copied_bytes: int = 0
    early: bool = False

    @property
    def submitted(self) -> int:
        return len(self.pages)

    @property
    def open_slots(self) -> int:
        return self.n_slots - self.held

    def submit(self, demands: list[tuple[int, int, int]]) -> None:
        """Page by page; a run ends at its demand, the ring's end, a held slot, or the limit."""
        for first, n_pages, record_bytes in demands:
            length = 0
            for page in range(first, first + n_pages):
                slot = (self.submitted - self.base) % self.open_slots
                if length in (0, self.limit) or slot == 0:
                    self.runs.append(Run(0, 0))
                    self.queued.append(self.runs[-1])
                    self.copies += 1
                    length = 0
                length += 1
                self.pages.append(Page(page, record_bytes, slot))
                self.runs[-1].end = self.submitted
                self.runs[-1].gate = max(self.submitted - self.open_slots, 0)
                self.copied_bytes += record_bytes

    def on_copy(self, answer: int) -> None:
        """The engine is about to run the next copy."""
        run = self.queued.pop(0)
        self.early |= run.gate > self.consumed
        if answer == 0:
            for page in self.pages[self.ready : run.end]:
                page.came = True
                self.slots[page.slot] = page_bytes(page.page, page.record_bytes)
        self.poisoned |= answer < 0
        self.ready = run.end

    def consume(self, end: int) -> None:
        for page in self.pages[self.consumed : end]:
            self.slots[page.slot] = bytes([NAN_BYTE]) * SLOT_BYTES
        self.consumed = end

    def cancel(self) -> None:
        self.queued.clear()
        self.ready = self.submitted
        self.consume(self.submitted)
        self.poisoned = False

    @property
    def acquirable(self) -> int:
        """The end of the last run that may start before more is consumed."""
        return max((run.end for run in self.runs if run.gate <= self.consumed), default=0)

    def gate_of(self, demand: int) -> int:
        return next(run.gate for run in self.runs if run.end > demand)


class RingMachine(ScriptedMachine):
    target = "ring"

    @initialize(
        n_slots=st.integers(1, 7), limit=st.integers(0, 4), seed=st.integers(0, 3), deferred=st.booleans()
    )
    def open(self, n_slots: int, limit: int, seed: int, deferred: bool) -> None:
        self.act("CREATE", n_slots - 1, limit, seed, deferred)
        flags = DeviceFlag.POISON_RELEASED | (DeviceFlag.DEFERRED if deferred else DeviceFlag.NONE)
        self.deferred = deferred
        self.device = Device(1, flags=flags, schedule_seed=seed)
        self.hosts = {size: history(self.device, size) for size in (64, SLOT_BYTES)}
        self.lease = leased(self.device, n_slots * SLOT_BYTES)
        self.address = self.lease.info.address
        self.ring = Ring(self.device, self.lease, n_slots, SLOT_BYTES, run_limit_slots=limit)
        self.model = Model(n_slots, limit or n_slots, slots=[bytes([NAN_BYTE]) * SLOT_BYTES] * n_slots)
        self.fault = 0
        self.fault_after = 0
        self.device.set_hook(self.on_hook)

    def on_hook(self, point: HookPoint, index: int) -> int:
        if point != HookPoint.COPY:
            return 0
        answer = 0
        if self.fault:
            if self.fault_after == 0:
                answer, self.fault = self.fault, 0
            else:
                self.fault_after -= 1
        self.model.on_copy(answer)
        return answer

    @rule(
        demands=st.lists(
            st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from([64, SLOT_BYTES])), max_size=3
        )
    )
    def submit(self, demands: list[tuple[int, int, int]]) -> None:
        if self.model.submitted - self.model.consumed > 30:
            return
        triples = [(first, n - 1, size // SLOT_BYTES) for first, n, size in demands]
        self.act("PREFETCH", len(demands), *(operand for triple in triples for operand in triple))
        asked = [Demand(self.hosts[size], first * size, size, n) for first, n, size in demands]
        if self.model.poisoned or not demands:
            with pytest.raises(Poisoned if demands else InvalidArgument):
                self.ring.submit(asked)
            return
        expected = self.model.submitted
        self.model.submit(demands)
        assert self.ring.submit(asked) == expected

    @rule(n_pages=st.sampled_from([0, N_HISTORY + 1]), record_bytes=st.sampled_from([64, SLOT_BYTES, 192]))
    def submit_nonsense(self, n_pages: int, record_bytes: int) -> None:
        good = Demand(self.hosts[64], 0, 64, 1)
        bad = Demand(self.hosts[64], 0, record_bytes, n_pages)
        with pytest.raises((InvalidArgument, Poisoned)):
            self.ring.submit([good, bad])

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        model = self.model
        end = data.draw(st.integers(model.consumed, model.submitted + 1))
        self.act("ACQUIRE", end - model.consumed)
        was_ready = end <= model.ready
        if end > model.submitted:
            expected: type[Exception] | None = NotFound
        elif model.poisoned:
            expected = DeviceError
        elif end > model.ready and model.gate_of(end - 1) > model.consumed:
            expected = Busy
        else:
            expected = None
        if expected is not None:
            with pytest.raises(expected):
                self.ring.acquire(end)
            return
        try:
            self.ring.acquire(end)
        except DeviceError:
            assert model.poisoned and not was_ready
            return
        assert self.ring.info.ready_pages >= end

    @rule()
    def read_what_can_be_had(self) -> None:
        """Wave by wave, as attention does."""
        self.act("READ")
        model = self.model
        while not model.poisoned and model.consumed < model.submitted:
            end = model.acquirable
            assert model.consumed < end <= model.consumed + model.open_slots
            try:
                self.ring.acquire(end)
            except DeviceError:
                assert model.poisoned
                return
            self.check_pages(end)
            model.consume(end)
            self.ring.consume(end)

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        model = self.model
        limit = model.ready + 1 if self.deferred else model.acquirable
        end = data.draw(st.integers(max(model.consumed - 1, 0), limit))
        self.act("CONSUME", end - max(model.consumed - 1, 0))
        if not self.deferred:
            self.ring.acquire(end)  # the copy thread decides when; the model must not
        ready = self.ring.info.ready_pages
        if model.poisoned:
            with pytest.raises(Poisoned):
                self.ring.consume(end)
        elif end < model.consumed or end > ready:
            with pytest.raises(InvalidArgument):
                self.ring.consume(end)
        else:
            self.check_pages(ready)
            model.consume(end)
            self.ring.consume(end)

    @rule()
    def cancel(self) -> None:
        self.act("CANCEL")
        self.ring.cancel()
        self.model.cancel()

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        model = self.model
        n_slots = data.draw(st.integers(0, model.n_slots))
        self.act("HOLD", n_slots)
        if n_slots == model.n_slots or model.consumed != model.submitted:
            with pytest.raises((InvalidArgument, Busy)):
                self.ring.hold(n_slots)
            return
        self.ring.hold(n_slots)
        for slot in range(model.n_slots - model.held, model.n_slots - n_slots):
            model.slots[slot] = bytes([NAN_BYTE]) * SLOT_BYTES
        model.held = n_slots
        model.base = model.submitted
        for slot in range(model.open_slots, model.n_slots):
            ctypes.memset(self.address + slot * SLOT_BYTES, HELD_BYTE, SLOT_BYTES)
            model.slots[slot] = bytes([HELD_BYTE]) * SLOT_BYTES

    @rule(limit=st.integers(1, 6))
    def run_copies(self, limit: int) -> None:
        self.act("ADVANCE", limit - 1)
        if not self.deferred:
            with pytest.raises(InvalidArgument):
                self.device.run_copies(limit)
            return
        waiting = [run for run in self.model.queued if run.gate <= self.model.consumed]
        try:
            ran = self.device.run_copies(limit)
        except DeviceError:
            assert self.model.poisoned
        else:
            assert ran == min(limit, len(waiting))

    @rule(fault=st.sampled_from([HostMemoryError.status, DeviceError.status]), after=st.integers(0, 2))
    def arm_fault(self, fault: int, after: int) -> None:
        if self.deferred:
            self.act("FAIL", 2 if fault == HostMemoryError.status else 1, after)
            self.fault, self.fault_after = fault, after

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        model = self.model
        demand = data.draw(st.integers(0, model.submitted + 1))
        self.act("RUN", demand % 256)
        if not model.consumed <= demand < model.submitted:
            with pytest.raises(NotFound):
                self.ring.address(demand)
            with pytest.raises(NotFound):
                self.ring.is_ready(demand)
            return
        assert self.ring.address(demand) == self.address + model.pages[demand].slot * SLOT_BYTES
        if model.poisoned:
            with pytest.raises(DeviceError):
                self.ring.is_ready(demand)
        elif self.deferred:
            assert self.ring.is_ready(demand) == (demand < model.ready)

    def memory(self, slot: int) -> bytes:
        return ctypes.string_at(self.address + slot * SLOT_BYTES, SLOT_BYTES)

    def check_pages(self, ready: int) -> None:
        for page in self.model.pages[self.model.consumed : ready]:
            if page.came:
                assert self.memory(page.slot) == page_bytes(page.page, page.record_bytes)

    @invariant()
    def counters_agree(self) -> None:
        model = self.model
        self.ring.check_integrity()
        info = self.ring.info
        assert (info.submitted_pages, info.consumed_pages) == (model.submitted, model.consumed)
        assert (info.copies, info.copied_bytes) == (model.copies, model.copied_bytes)
        assert (info.n_slots, info.n_held_slots) == (model.n_slots, model.held)
        assert not model.early, "a copy ran before its slots were consumed"
        self.check_pages(info.ready_pages)
        if self.deferred:
            assert info.ready_pages == model.ready
            assert info.is_poisoned == model.poisoned
            assert [self.memory(slot) for slot in range(model.n_slots)] == model.slots

    def teardown(self) -> None:
        self.report_script()
        if not hasattr(self, "ring"):
            return
        self.ring.close()
        with pytest.raises(Closed):
            self.ring.cancel()
        self.device.set_hook(None)
        self.lease.close()
        for host in self.hosts.values():
            host.close()
        assert self.device.info.live_objects == 0
        self.device.close()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


def in_order(device: Device, n_slots: int, n_pages: int) -> list[bytes]:
    """What a reader finds that acquires, reads and consumes page by page."""
    found = []
    with (
        history(device, SLOT_BYTES) as host,
        leased(device, n_slots * SLOT_BYTES) as lease,
        Ring(device, lease, n_slots, SLOT_BYTES, run_limit_slots=1) as ring,
    ):
        ring.submit([Demand(host, 0, SLOT_BYTES, n_pages)])
        for page in range(n_pages):
            ring.acquire(page + 1)
            found.append(ctypes.string_at(ring.address(page), SLOT_BYTES))
            ring.consume(page + 1)
    return found


@given(seed=st.integers(0, 1000), n_slots=st.integers(1, 6), n_pages=st.integers(1, N_HISTORY))
@settings(max_examples=examples(40), deadline=None)
def test_any_schedule_brings_the_same_bytes(seed: int, n_slots: int, n_pages: int) -> None:
    flags = DeviceFlag.DEFERRED | DeviceFlag.POISON_RELEASED
    with Device(1, flags=flags, schedule_seed=seed) as device:
        found = in_order(device, n_slots, n_pages)
    assert found == [page_bytes(page, SLOT_BYTES) for page in range(n_pages)]


@given(seed=st.integers(0, 1000), skipped=st.integers(0, 9), deferred=st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_one_skipped_copy_is_noticed(seed: int, skipped: int, deferred: bool) -> None:
    """A copy that reports success without moving a byte leaves NaN: exactly its page differs."""
    flags = DeviceFlag.POISON_RELEASED | (DeviceFlag.DEFERRED if deferred else DeviceFlag.NONE)
    calls = [0]

    def hook(point: HookPoint, index: int) -> int:
        if point != HookPoint.COPY:
            return 0
        calls[0] += 1
        return SKIP_COPY if calls[0] == 1 + skipped + 1 else 0  # the first copy writes the history

    with Device(1, flags=flags, schedule_seed=seed) as device:
        device.set_hook(hook)
        found = in_order(device, 3, 10)
        device.set_hook(None)
    expected = [page_bytes(page, SLOT_BYTES) for page in range(10)]
    expected[skipped] = bytes([NAN_BYTE]) * SLOT_BYTES
    assert found == expected


def test_read_after_consume_finds_nan() -> None:
    with (
        Device(1, flags=DeviceFlag.POISON_RELEASED) as device,
        history(device, SLOT_BYTES) as host,
        leased(device, 2 * SLOT_BYTES) as lease,
        Ring(device, lease, 2, SLOT_BYTES) as ring,
    ):
        ring.submit([Demand(host, 0, SLOT_BYTES, 2)])
        ring.acquire(2)
        address = ring.address(0)
        ring.consume(1)
        late = np.frombuffer(ctypes.string_at(address, SLOT_BYTES), np.float32)
        assert np.isnan(late).all()
