"""All pages of a layer on the device at once: those that its pager has no room for lie in slots borrowed from a ring.

Source: ``include/kvstream/layer_lease.h``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.kv import KvLayer, Seq
from pykvstream.core.pager import Pager
from pykvstream.core.span import SpanPlan
from pykvstream.core.status import check, make_struct
from pykvstream.errors import Busy


@dataclass(frozen=True, slots=True)
class LayerLeaseInfo:
    """Pages, slots and bytes; see ``kvs_layer_lease_info``."""

    is_held: bool
    reserved_tokens: int
    generation: int
    n_held_slots: int
    first_held_slot: int
    resident_pages: int
    reused_pages: int
    populated_pages: int
    populated_bytes: int
    later_pages: int
    later_bytes: int


def missing_slots(device: Device, pager: Pager, reserved_tokens: int) -> int:
    """Slots of a ring that a lease of the pager's layer would borrow."""
    out = ffi.new("uint64_t *")
    check(lib.kvs_layer_lease_slots(pager.ptr, reserved_tokens, out), device.ptr)
    n_slots: int = out[0]
    return n_slots


class LayerLease(Handle):
    """Nothing is leased before ``acquire``, which can be called once. Whoever has the object before that call can give
    the lease back wherever an interrupt strikes.
    """

    __slots__ = ("_device",)

    def __init__(self, device: Device) -> None:
        self._device = device
        super().__init__(new_cell("layer_lease"))

    def acquire(
        self,
        pager: Pager,
        seq: Seq,
        reserved_tokens: int,
        *,
        lender: Pager | None = None,
        generation: int | None = None,
    ) -> None:
        """Borrow what is missing and bring it. ``lender``: the pager whose ring lends slots; may be ``pager``.

        ``generation``: of the sequence, as the caller knows it. Raises ``NoSpace`` with the slots that are missing and
        those that the ring can give, ``Stale``, ``Busy``; after any error everything is as before.
        """
        if self.ptr != ffi.NULL:
            raise Busy("the layer is leased already")
        desc = make_struct(
            "kvs_layer_lease_desc",
            pager=pager.ptr,
            lender=ffi.NULL if lender is None else lender.ptr,
            seq=seq.ptr,
            generation=seq.info.generation if generation is None else generation,
            reserved_tokens=reserved_tokens,
        )
        check(lib.kvs_layer_lease_acquire_populated(desc, self._cell), self._device.ptr)

    def plan(self, layer: KvLayer, generation: int, n_query_rows: int) -> SpanPlan:
        """Where all committed tokens lie. Raises ``Stale`` for another generation than the newest."""
        cell = new_cell("span_plan")
        check(lib.kvs_layer_lease_plan(self.ptr, generation, n_query_rows, cell), self._device.ptr)
        return SpanPlan.of(self._device, layer, cell)

    def give_back(self) -> None:
        """The ring is whole again; of what was never leased, or given back already, it is.

        Raises ``Busy`` while a pass is open. Raises ``DeviceError``, and the ring is whole all the same, where rows in
        a borrowed slot did not reach history: the sequence is cut to those that did.
        """
        if self.ptr != ffi.NULL:
            check(lib.kvs_layer_lease_return_wait(self.ptr), self._device.ptr)

    @property
    def info(self) -> LayerLeaseInfo:
        out = make_struct("kvs_layer_lease_info")
        check(lib.kvs_layer_lease_get_info(self.ptr, out), self._device.ptr)
        return LayerLeaseInfo(
            is_held=bool(out.is_held),
            reserved_tokens=out.reserved_tokens,
            generation=out.generation,
            n_held_slots=out.n_held_slots,
            first_held_slot=out.first_held_slot,
            resident_pages=out.resident_pages,
            reused_pages=out.reused_pages,
            populated_pages=out.populated_pages,
            populated_bytes=out.populated_bytes,
            later_pages=out.later_pages,
            later_bytes=out.later_bytes,
        )

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        if self.ptr != ffi.NULL:
            check(lib.kvs_layer_lease_check_integrity(self.ptr), self._device.ptr)
