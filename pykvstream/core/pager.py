"""Which pages of a sequence lie on the device, and passes over them.

Source: ``include/kvstream/pager.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Protocol, Self

from pykvstream._ffi import ffi, lib
from pykvstream.core.arena import Lease
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.kv import Cache, Seq
from pykvstream.core.status import check, make_struct


class Placement(Protocol):
    """Division of a pool: resident pages per layer (tail included) and ring slots; ``max_rows`` bounds a pass."""

    @property
    def resident_pages(self) -> tuple[int, ...]: ...
    @property
    def ring_slots(self) -> int: ...
    @property
    def max_rows(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PagerInfo:
    """Counters since creation, pages and bytes; see ``kvs_pager_info``."""

    is_attached: bool
    is_in_pass: bool
    n_slots: int
    ring_slots: int
    resident_pages: int
    placement_generation: int
    streamed_pages: int
    streamed_bytes: int
    loaded_pages: int
    loaded_bytes: int
    published_bytes: int
    copies: int
    waves: int
    stalls: int
    stall_ns: int
    gap_ns: int
    peak_pages: int

    @classmethod
    def total(cls, infos: Sequence[Self]) -> Self:
        """Of several pagers together: sums, and whether any is attached or in a pass."""
        if len(infos) == 1:
            return infos[0]
        columns = zip(*(astuple(info) for info in infos), strict=True)
        return cls(*(any(each) if isinstance(each[0], bool) else sum(each) for each in columns))


class Traffic(NamedTuple):
    """What was copied since creation, and how long passes waited for it: bytes, copies, nanoseconds."""

    streamed_bytes: int
    loaded_bytes: int
    copies: int
    stall_ns: int

    @classmethod
    def total(cls, traffics: Sequence[Self]) -> Self:
        """Of several pagers together."""
        return cls(*map(sum, zip(*traffics, strict=True)))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a pass will find: pages of all layers, bytes."""

    active_pages: int
    resident_pages: int
    streamed_pages: int
    streamed_bytes: int

    @classmethod
    def total(cls, forecasts: Sequence[Self]) -> Self:
        """Of several pagers together."""
        return cls(*(sum(each) for each in zip(*(astuple(forecast) for forecast in forecasts), strict=True)))


def _placement(placement: Placement) -> tuple[Any, Any]:
    pages = ffi.new("uint32_t[]", placement.resident_pages)
    desc = make_struct(
        "kvs_placement",
        n_layers=len(placement.resident_pages),
        resident_pages=pages,
        ring_slots=placement.ring_slots,
        max_rows=placement.max_rows,
    )
    return desc, pages


class Pager(Handle):
    """Pages the sequences of one cache in and out of a pool region."""

    __slots__ = ("_device", "_now")

    def __init__(self, device: Device, cache: Cache) -> None:
        self._now = make_struct("kvs_pager_info")  # read several times a token
        cell = new_cell("pager")
        check(lib.kvs_pager_create(cache.ptr, cell), device.ptr)
        self._device = device
        super().__init__(cell)

    def _check(self, status: int) -> None:
        check(status, self._device.ptr)

    def attach(self, pool: Lease, placement: Placement) -> None:
        """Take a pool and divide it. Raises ``NoSpace`` with slots needed and held."""
        desc, _pages = _placement(placement)
        self._check(lib.kvs_pager_attach(self.ptr, pool.ptr, desc))

    def place(self, placement: Placement) -> None:
        """Divide the attached pool anew."""
        desc, _pages = _placement(placement)
        self._check(lib.kvs_pager_place(self.ptr, desc))

    def detach(self) -> None:
        """Give the pool back; pages at unchanged addresses are found again at the next ``attach``."""
        self._check(lib.kvs_pager_detach(self.ptr))

    def forget(self) -> None:
        """Forget every resident page."""
        self._check(lib.kvs_pager_forget(self.ptr))

    def begin(self, seq: Seq, n_rows: int) -> None:
        """Open a pass over ``n_rows`` new rows."""
        status = lib.kvs_pager_begin(self.known or self.ptr, seq.known or seq.ptr, n_rows)
        if status < 0:
            self._check(status)

    def end(self, n_rows: int) -> None:
        """Commit the first ``n_rows`` rows of the open pass; 0 aborts it."""
        status = lib.kvs_pager_end(self.known or self.ptr, n_rows)
        if status < 0:
            self._check(status)

    def truncate(self, seq: Seq, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` tokens of the sequence."""
        self._check(lib.kvs_pager_truncate(self.ptr, seq.ptr, n_tokens))

    def publish_wait(self) -> None:
        """Wait until every committed row is in host history."""
        self._check(lib.kvs_pager_publish_wait(self.ptr))

    def drop(self, seq: Seq) -> None:
        """Forget a sequence that is about to be closed."""
        self._check(lib.kvs_pager_drop(self.ptr, seq.ptr))

    def forecast(self, seq: Seq, n_rows: int) -> Forecast:
        """What the next pass of ``n_rows`` rows will find; nothing moves."""
        out = make_struct("kvs_pass_forecast")
        self._check(lib.kvs_pager_forecast(self.ptr, seq.ptr, n_rows, out))
        return Forecast(out.active_pages, out.resident_pages, out.streamed_pages, out.streamed_bytes)

    @property
    def is_attached(self) -> bool:
        """Whether it has a pool."""
        return bool(self._read().is_attached)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass is open."""
        return bool(self._read().is_in_pass)

    @property
    def traffic(self) -> Traffic:
        """The counters that every pass is measured by."""
        out = self._now
        status = lib.kvs_pager_get_info(self.known or self.ptr, out)
        if status < 0:
            self._check(status)
        return Traffic(out.streamed_bytes, out.loaded_bytes, out.copies, out.stall_ns)

    @property
    def info(self) -> PagerInfo:
        out = self._read()
        return PagerInfo(
            is_attached=bool(out.is_attached),
            is_in_pass=bool(out.is_in_pass),
            n_slots=out.n_slots,
            ring_slots=out.ring_slots,
            resident_pages=out.resident_pages,
            placement_generation=out.placement_generation,
            streamed_pages=out.streamed_pages,
            streamed_bytes=out.streamed_bytes,
            loaded_pages=out.loaded_pages,
            loaded_bytes=out.loaded_bytes,
            published_bytes=out.published_bytes,
            copies=out.copies,
            waves=out.waves,
            stalls=out.stalls,
            stall_ns=out.stall_ns,
            gap_ns=out.gap_ns,
            peak_pages=out.peak_pages,
        )

    def _read(self) -> Any:
        """The counters as they are, until they are read again."""
        status = lib.kvs_pager_get_info(self.ptr, self._now)
        if status < 0:
            self._check(status)
        return self._now

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        self._check(lib.kvs_pager_check_integrity(self.ptr))
