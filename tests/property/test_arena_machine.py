"""Arena and leases against a plain model (P-AR1 to P-AR4): random transactions, leases, fences, releases.

The model keeps a layout as a dict from id to ``Region`` and finds the first fit by trying every offset.
Handles that were consumed are used again on purpose: they raise ``Closed`` and change nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pykvstream.core.arena import Arena, ArenaState, Lease, Region
from pykvstream.core.device import Device, HookPoint
from pykvstream.core.fence import Fence
from pykvstream.errors import (
    Busy,
    Closed,
    HostMemoryError,
    InvalidArgument,
    KvStreamError,
    NoSpace,
    NotFound,
)
from tests.alphabet import ScriptedMachine, u16
from tests.examples import examples

CAPACITY = 8192
ALIGNMENT = 64

Layout = dict[int, Region]
ids = st.integers(0, 5)
sizes = st.one_of(st.integers(1, 2500), st.sampled_from([64, 4096, 8192, 8193, 2**64 - 1]))
ALIGNMENTS = [0, 64, 128, 1024]
alignments = st.sampled_from(ALIGNMENTS)


@dataclass(eq=False)
class HeldLease:
    """A lease as the model sees it."""

    handle: Lease
    region: Region
    epoch: int
    fence: Fence | None = None
    claims: list[Lease] = field(default_factory=list)


def expect(error: type[KvStreamError] | None) -> AbstractContextManager[object]:
    """A context in which this error is raised, or none."""
    return nullcontext() if error is None else pytest.raises(error)


def overlaps(layout: Layout, offset: int, size: int) -> bool:
    return any(
        r.offset_bytes < offset + size and offset < r.offset_bytes + r.size_bytes for r in layout.values()
    )


def first_fit(layout: Layout, size: int, alignment: int) -> int | None:
    if size > CAPACITY:
        return None
    candidates = range(0, CAPACITY - size + 1, alignment)
    return next((offset for offset in candidates if not overlaps(layout, offset, size)), None)


def places(layout: Layout) -> set[tuple[int, int, int]]:
    return {(r.id, r.offset_bytes, r.size_bytes) for r in layout.values()}


class ArenaMachine(ScriptedMachine):
    target = "arena"

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(1)
        self.arena = Arena(self.device, CAPACITY, ALIGNMENT)
        self.committed: Layout = {}
        self.staged: Layout | None = None
        self.epoch = 0
        self.quiesced = False
        self.leases: list[HeldLease] = []
        self.consumed: list[Lease] = []
        self.fences: list[Fence] = []
        self.act("CREATE")

    def act_reserve(self, region_id: int, size: int, flags: int, offset: int) -> None:
        self.act("RESERVE", region_id, *u16(min(size, 0xFFFF)), flags, offset)

    def act_on(self, name: str, lease: HeldLease, *operands: int) -> None:
        self.act(name, [lease for lease in self.leases if lease.fence is None].index(lease), *operands)

    def counted(self) -> list[HeldLease]:
        """Leases that still protect their region."""
        return [lease for lease in self.leases if lease.fence is None or lease.fence in self.fences]

    @rule(keep=st.booleans())
    def begin(self, keep: bool) -> None:
        self.act("BEGIN", keep)
        with expect(Busy if self.staged is not None else None):
            self.arena.begin(keep_persistent=keep)
        if self.staged is None:
            self.staged = {r.id: r for r in self.committed.values() if keep and r.persistent}

    @rule(region_id=ids, size=sizes, alignment=alignments, persistent=st.booleans())
    def reserve(self, region_id: int, size: int, alignment: int, persistent: bool) -> None:
        self.act_reserve(region_id, size, ALIGNMENTS.index(alignment) | persistent << 2, 0)
        effective = max(alignment, ALIGNMENT)
        offset = None if self.staged is None else first_fit(self.staged, size, effective)
        error: type[KvStreamError] | None = None
        if self.staged is None or region_id in self.staged:
            error = InvalidArgument
        elif offset is None:
            error = NoSpace
        with expect(error):
            made = self.arena.reserve(region_id, size, alignment_bytes=alignment, persistent=persistent)
        if error is None:
            assert self.staged is not None
            assert offset is not None
            assert made == Region(region_id, offset, size, effective, persistent)
            self.staged[region_id] = made

    @rule(
        region_id=ids, offset=st.integers(0, 140), size=sizes, alignment=alignments, persistent=st.booleans()
    )
    def reserve_at(self, region_id: int, offset: int, size: int, alignment: int, persistent: bool) -> None:
        self.act_reserve(region_id, size, ALIGNMENTS.index(alignment) | persistent << 2 | 8, offset)
        offset_bytes = offset * 64
        effective = max(alignment, ALIGNMENT)
        error: type[KvStreamError] | None = None
        if self.staged is None or region_id in self.staged or offset_bytes % effective:
            error = InvalidArgument
        elif offset_bytes + size > CAPACITY:
            error = NoSpace
        elif overlaps(self.staged, offset_bytes, size):
            error = Busy
        with expect(error):
            made = self.arena.reserve_at(
                region_id, offset_bytes, size, alignment_bytes=alignment, persistent=persistent
            )
        if error is None:
            assert self.staged is not None
            assert made == Region(region_id, offset_bytes, size, effective, persistent)
            self.staged[region_id] = made

    def breaks_a_lease(self) -> bool:
        assert self.staged is not None
        for lease in self.counted():
            new = self.staged.get(lease.region.id)
            old = self.committed[lease.region.id]
            if new is None or not (old.persistent and new.persistent) or places({0: old}) != places({0: new}):
                return True
        return False

    @rule()
    def commit(self) -> None:
        self.act("COMMIT")
        error: type[KvStreamError] | None = None
        if self.staged is None:
            error = InvalidArgument
        elif self.breaks_a_lease():
            error = Busy
        with expect(error):
            self.arena.commit()
        if error is None:
            assert self.staged is not None
            self.epoch += places(self.staged) != places(self.committed)
            self.committed = self.staged
        self.staged = None

    @rule()
    def abort(self) -> None:
        self.act("ABORT")
        with expect(InvalidArgument if self.staged is None else None):
            self.arena.abort()
        self.staged = None

    @rule()
    def quiesce(self) -> None:
        self.act("STOP")
        self.arena.quiesce()
        self.quiesced = True

    @rule()
    def resume(self) -> None:
        self.act("GO")
        with expect(Busy if self.staged is not None else None):
            self.arena.resume()
        if self.staged is None:
            self.quiesced = False

    @rule(region_id=ids)
    def acquire(self, region_id: int) -> None:
        self.act("ACQUIRE", region_id)
        error: type[KvStreamError] | None = None
        if self.quiesced:
            error = Busy
        elif region_id not in self.committed:
            error = NotFound
        with expect(error):
            handle = self.arena.acquire(region_id)
        if error is None:
            self.leases.append(HeldLease(handle, self.committed[region_id], self.epoch))

    @rule(region_id=ids)
    def acquire_without_memory(self, region_id: int) -> None:
        self.act("FAIL", HookPoint.ALLOC)
        self.act("ACQUIRE", region_id)
        self.device.set_hook(lambda point, _: HostMemoryError.status if point is HookPoint.ALLOC else 0)
        with pytest.raises(HostMemoryError):
            self.arena.acquire(region_id)
        self.device.set_hook(None)

    @precondition(lambda self: any(lease.fence is None for lease in self.leases))
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.fence is None]))
        self.act_on("CLAIM", lease)
        lease.claims.append(lease.handle.claim())

    @precondition(lambda self: any(lease.fence is None for lease in self.leases))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.fence is None]))
        self.act_on("RELEASE", lease)
        lease.handle.close()
        self.consumed.append(lease.handle)
        if lease.claims:
            lease.handle = lease.claims.pop()
        else:
            self.leases.remove(lease)

    @precondition(lambda self: self.fences and any(lease.fence is None for lease in self.leases))
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.leases if lease.fence is None]))
        fence = data.draw(st.sampled_from(self.fences))
        self.act_on("RETIRE", lease, self.fences.index(fence))
        with expect(Busy if lease.claims else None):
            lease.handle.retire(fence)
        if not lease.claims:
            lease.fence = fence
            self.consumed.append(lease.handle)

    @rule()
    def create_fence(self) -> None:
        self.act("CREATE")
        self.fences.append(Fence(self.device))

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), status=st.sampled_from([0, -12, None]))
    def complete(self, data: st.DataObject, status: int | None) -> None:
        """Signal, or close unsignalled: both end what waits behind the fence."""
        fence = data.draw(st.sampled_from(self.fences))
        self.act("ADVANCE", self.fences.index(fence), [0, -12, None].index(status))
        if status is not None:
            fence.signal(status)
        fence.close()
        self.fences.remove(fence)
        self.leases = [lease for lease in self.leases if lease.fence is not fence]

    @precondition(lambda self: self.consumed)
    @rule(data=st.data())
    def use_consumed_handle(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.consumed))
        with pytest.raises(Closed):
            _ = handle.info
        with pytest.raises(Closed):
            handle.claim()
        handle.close()

    @rule()
    def release_arena_before_its_leases(self) -> None:
        """The old arena goes while leases may live; a fresh one takes its place in the model."""
        self.act("CLOSE")
        self.arena.close()
        held = bool(self.counted())
        assert (self.device.info.device_bytes == CAPACITY) == held
        for lease in self.leases:
            if lease.fence is None:
                assert lease.handle.info.size_bytes == lease.region.size_bytes
                for handle in [lease.handle, *lease.claims]:
                    handle.close()
                    self.consumed.append(handle)
        for fence in self.fences:
            fence.close()
        assert self.device.info.device_bytes == 0
        assert self.device.info.live_objects == 0
        self.leases, self.fences = [], []
        self.arena = Arena(self.device, CAPACITY, ALIGNMENT)
        self.committed, self.staged, self.epoch, self.quiesced = {}, None, 0, False

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.arena.check_integrity()
        info = self.arena.info
        counted = self.counted()
        draining = [lease for lease in counted if lease.fence is not None]
        by_address = sorted(self.committed.values(), key=lambda region: region.offset_bytes)
        assert self.arena.regions == tuple(by_address)
        assert info.epoch == self.epoch
        assert info.n_draining == len(draining)
        assert info.n_leases == len(counted) - len(draining)
        assert info.used_bytes == sum(region.size_bytes for region in by_address)
        assert info.high_water_bytes == (
            by_address[-1].offset_bytes + by_address[-1].size_bytes if by_address else 0
        )
        assert info.is_building == (self.staged is not None)
        closed = ArenaState.DRAINING if counted else ArenaState.QUIESCENT
        assert info.state is (closed if self.quiesced else ArenaState.OPEN)

    @invariant()
    def leases_keep_what_they_had(self) -> None:
        for lease in self.leases:
            if lease.fence is None:
                info = lease.handle.info
                assert (info.region_id, info.epoch) == (lease.region.id, lease.epoch)
                assert (info.offset_bytes, info.size_bytes) == (
                    lease.region.offset_bytes,
                    lease.region.size_bytes,
                )
                assert not info.is_draining

    def teardown(self) -> None:
        self.report_script()
        self.device.set_hook(None)
        self.arena.close()
        for lease in self.leases:
            for handle in [lease.handle, *lease.claims]:
                handle.close()
        for fence in self.fences:
            fence.close()
        assert self.device.info.live_objects == 0
        assert self.device.info.device_bytes == 0
        self.device.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
