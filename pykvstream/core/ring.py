"""The streaming ring: slots of device memory through which history pages pass in the order of demand.

Order: demands are numbered page by page as they are submitted; ``consumed <= ready <= submitted``.
Source: ``include/kvstream/ring.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykvstream._ffi import ffi, lib
from pykvstream.core.arena import Lease
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.host import Host
from pykvstream.core.status import check, make_struct

_PENDING: int = lib.KVS_PENDING


@dataclass(frozen=True, slots=True)
class Demand:
    """A run of pages of one layer at consecutive host addresses."""

    host: Host
    host_offset_bytes: int
    record_bytes: int
    n_pages: int
    layer: int = 0


@dataclass(frozen=True, slots=True)
class RingInfo:
    """Counters of demands in pages, of copies in runs and bytes; see ``kvs_ring_info``."""

    n_slots: int
    n_held_slots: int
    is_poisoned: bool
    submitted_pages: int
    ready_pages: int
    consumed_pages: int
    copies: int
    copied_bytes: int
    stalls: int
    stall_ns: int


class Ring(Handle):
    """``n_slots`` slots of ``slot_bytes`` in a leased region, from ``offset_bytes`` on.

    ``run_limit_slots`` bounds the pages that one copy brings; 0 means the whole ring.
    """

    __slots__ = ("_device",)

    def __init__(
        self,
        device: Device,
        lease: Lease,
        n_slots: int,
        slot_bytes: int,
        *,
        offset_bytes: int = 0,
        run_limit_slots: int = 0,
    ) -> None:
        desc = make_struct(
            "kvs_ring_desc",
            n_slots=n_slots,
            lease=lease.ptr,
            offset_bytes=offset_bytes,
            slot_bytes=slot_bytes,
            run_limit_slots=run_limit_slots,
        )
        cell = new_cell("ring")
        check(lib.kvs_ring_create(device.ptr, desc, cell), device.ptr)
        self._device = device.ptr
        super().__init__(cell)

    def _check(self, status: int) -> int:
        return check(status, self._device)

    def submit(self, demands: Sequence[Demand]) -> int:
        """Append demands in reading order; returns the number of the first page."""
        array = ffi.new("kvs_demand[]", len(demands))
        for slot, demand in zip(array, demands, strict=True):
            slot.host = demand.host.ptr
            slot.host_offset_bytes = demand.host_offset_bytes
            slot.record_bytes = demand.record_bytes
            slot.n_pages = demand.n_pages
            slot.layer = demand.layer
        first = ffi.new("uint64_t *")
        self._check(lib.kvs_ring_submit(self.ptr, array, len(demands), first))
        number: int = first[0]
        return number

    def address(self, demand: int) -> int:
        """Device address of a submitted, unconsumed demand."""
        out = ffi.new("uint64_t *")
        self._check(lib.kvs_ring_page_address(self.ptr, demand, out))
        address: int = out[0]
        return address

    def is_ready(self, demand: int) -> bool:
        """Whether the demand has been copied; never waits."""
        status: int = self._check(lib.kvs_ring_query(self.ptr, demand))
        return status != _PENDING

    def acquire(self, end: int) -> None:
        """Wait until every demand below ``end`` is ready. Raises ``Busy`` when that can never be."""
        self._check(lib.kvs_ring_acquire_wait(self.ptr, end))

    def consume(self, end: int) -> None:
        """Let go of every demand below ``end``: their readers have finished."""
        self._check(lib.kvs_ring_consume(self.ptr, end))

    def cancel(self) -> None:
        """Drop every unconsumed demand; lifts the poison of a failed copy."""
        self._check(lib.kvs_ring_cancel(self.ptr))

    def hold(self, n_slots: int) -> None:
        """Take the last slots out of the ring; 0 gives them back."""
        self._check(lib.kvs_ring_hold(self.ptr, n_slots))

    @property
    def info(self) -> RingInfo:
        info = make_struct("kvs_ring_info")
        self._check(lib.kvs_ring_get_info(self.ptr, info))
        return RingInfo(
            n_slots=info.n_slots,
            n_held_slots=info.n_held_slots,
            is_poisoned=bool(info.is_poisoned),
            submitted_pages=info.submitted_pages,
            ready_pages=info.ready_pages,
            consumed_pages=info.consumed_pages,
            copies=info.copies,
            copied_bytes=info.copied_bytes,
            stalls=info.stalls,
            stall_ns=info.stall_ns,
        )

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        self._check(lib.kvs_ring_check_integrity(self.ptr))
