"""The arena: one bounded device allocation, its regions, and leases on them.

Units: offsets and sizes are bytes from the arena's start, addresses are device addresses.
Source: ``include/kvstream/arena.h``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Self

from pykvstream._ffi import lib
from pykvstream.core.device import Device
from pykvstream.core.fence import Fence
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.share import Buffer
from pykvstream.core.status import check, make_struct

DEFAULT_ALIGNMENT_BYTES = 256


class ArenaState(enum.IntEnum):
    """Whether an arena accepts leases; see ``kvs_arena_state``."""

    OPEN = lib.KVS_ARENA_OPEN
    DRAINING = lib.KVS_ARENA_DRAINING
    QUIESCENT = lib.KVS_ARENA_QUIESCENT
    ZOMBIE = lib.KVS_ARENA_ZOMBIE


@dataclass(frozen=True, slots=True)
class Region:
    """A named range of an arena. A persistent one may keep its leases over commits that leave it alone."""

    id: int
    offset_bytes: int
    size_bytes: int
    alignment_bytes: int
    persistent: bool


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """State and counts; ``high_water_bytes`` is the end of the last region."""

    state: ArenaState
    capacity_bytes: int
    alignment_bytes: int
    used_bytes: int
    high_water_bytes: int
    epoch: int
    n_regions: int
    n_leases: int
    n_draining: int
    is_building: bool


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """What a lease keeps. ``epoch`` is that of its acquisition."""

    region_id: int
    epoch: int
    offset_bytes: int
    size_bytes: int
    address: int
    is_draining: bool


class Lease(Handle):
    """A claim on the storage of a region. It survives the arena; made by ``Arena.acquire``."""

    __slots__ = ("_device",)

    def __init__(self, cell: Any, device: Any) -> None:
        self._device = device
        super().__init__(cell)

    def claim(self) -> Lease:
        """One more claim on the same lease; the region counts it once."""
        cell = new_cell("lease")
        lib.kvs_lease_retain(self.ptr)
        cell[0] = self.ptr
        return Lease(cell, self._device)

    def retire(self, fence: Fence) -> None:
        """Close it behind a fence; the region drains until then. Raises ``Busy`` when other claims exist."""
        check(lib.kvs_lease_retire(self.ptr, fence.ptr), self._device)
        self._detach()

    @property
    def info(self) -> LeaseInfo:
        info = make_struct("kvs_lease_info")
        check(lib.kvs_lease_get_info(self.ptr, info), self._device)
        return LeaseInfo(
            region_id=info.region_id,
            epoch=info.epoch,
            offset_bytes=info.offset_bytes,
            size_bytes=info.size_bytes,
            address=info.address,
            is_draining=bool(info.is_draining),
        )


class Arena(Handle):
    """An arena over memory of its own, laid out by ``begin``, ``reserve``, then ``commit`` or ``abort``."""

    __slots__ = ("_device",)

    def __init__(
        self, device: Device, capacity_bytes: int, alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES
    ) -> None:
        cell = new_cell("arena")
        check(lib.kvs_arena_create(device.ptr, capacity_bytes, alignment_bytes, cell), device.ptr)
        self._device = device.ptr
        super().__init__(cell)

    @classmethod
    def over(cls, buffer: Buffer, alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES) -> Self:
        """An arena in a buffer, which lives as long: of its own, or adopted from another library."""
        cell = new_cell("arena")
        check(lib.kvs_arena_create_over(buffer.ptr, alignment_bytes, cell), buffer.device.ptr)
        made = cls.__new__(cls)
        made._device = buffer.device.ptr
        Handle.__init__(made, cell)
        return made

    @property
    def device_ptr(self) -> Any:
        """The ``kvs_device *`` that keeps the texts of failures."""
        return self._device

    def begin(self, *, keep_persistent: bool = False) -> None:
        """Open a transaction, with no region staged or with the committed persistent ones."""
        flags = lib.KVS_BEGIN_KEEP_PERSISTENT if keep_persistent else 0
        check(lib.kvs_arena_begin(self.ptr, flags), self._device)

    def reserve(
        self, region_id: int, size_bytes: int, *, alignment_bytes: int = 0, persistent: bool = False
    ) -> Region:
        """Stage a region at the lowest address that fits. Raises ``NoSpace``; then nothing is staged."""
        region = _new_region(region_id, 0, size_bytes, alignment_bytes, persistent)
        check(lib.kvs_arena_reserve(self.ptr, region), self._device)
        return _to_region(region)

    def reserve_at(
        self,
        region_id: int,
        offset_bytes: int,
        size_bytes: int,
        *,
        alignment_bytes: int = 0,
        persistent: bool = False,
    ) -> Region:
        """Stage a region at an offset. Raises ``Busy`` when it overlaps another."""
        region = _new_region(region_id, offset_bytes, size_bytes, alignment_bytes, persistent)
        check(lib.kvs_arena_reserve_at(self.ptr, region), self._device)
        return _to_region(region)

    def commit(self) -> None:
        """Make the staged layout the committed one. Raises ``Busy`` when a leased region would change."""
        check(lib.kvs_arena_commit(self.ptr), self._device)

    def abort(self) -> None:
        """Forget the staged layout."""
        check(lib.kvs_arena_abort(self.ptr), self._device)

    def find(self, region_id: int) -> Region:
        """A committed region. Raises ``NotFound``."""
        region = make_struct("kvs_region")
        check(lib.kvs_arena_find_region(self.ptr, region_id, region), self._device)
        return _to_region(region)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The committed regions in address order."""
        region = make_struct("kvs_region")
        found: list[Region] = []
        for index in range(self.info.n_regions):
            check(lib.kvs_arena_region_at(self.ptr, index, region), self._device)
            found.append(_to_region(region))
        return tuple(found)

    def acquire(self, region_id: int) -> Lease:
        """Claim a committed region. Raises ``NotFound``, or ``Busy`` while quiesced."""
        cell = new_cell("lease")
        check(lib.kvs_arena_acquire(self.ptr, region_id, cell), self._device)
        return Lease(cell, self._device)

    def quiesce(self) -> None:
        """Refuse new leases. Waits for nothing."""
        check(lib.kvs_arena_quiesce(self.ptr), self._device)

    def resume(self) -> None:
        """Accept leases again. Raises ``Busy`` while a transaction is open."""
        check(lib.kvs_arena_resume(self.ptr), self._device)

    @property
    def info(self) -> ArenaInfo:
        info = make_struct("kvs_arena_info")
        check(lib.kvs_arena_get_info(self.ptr, info), self._device)
        return ArenaInfo(
            state=ArenaState(info.state),
            capacity_bytes=info.capacity_bytes,
            alignment_bytes=info.alignment_bytes,
            used_bytes=info.used_bytes,
            high_water_bytes=info.high_water_bytes,
            epoch=info.epoch,
            n_regions=info.n_regions,
            n_leases=info.n_leases,
            n_draining=info.n_draining,
            is_building=bool(info.is_building),
        )

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        check(lib.kvs_arena_check_integrity(self.ptr), self._device)


def _new_region(
    region_id: int, offset_bytes: int, size_bytes: int, alignment_bytes: int, persistent: bool
) -> Any:
    return make_struct(
        "kvs_region",
        flags=lib.KVS_REGION_PERSISTENT if persistent else 0,
        id=region_id,
        offset_bytes=offset_bytes,
        size_bytes=size_bytes,
        alignment_bytes=alignment_bytes,
    )


def _to_region(region: Any) -> Region:
    return Region(
        id=region.id,
        offset_bytes=region.offset_bytes,
        size_bytes=region.size_bytes,
        alignment_bytes=region.alignment_bytes,
        persistent=bool(region.flags & lib.KVS_REGION_PERSISTENT),
    )
