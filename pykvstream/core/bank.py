"""Snapshots of recurrent states in host memory.

Holds: ``Bank``, ``Snapshot``, ``snapshot_bytes``.
Source: ``include/kvstream/bank.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.state import DeltaLayer, State, layer_array
from pykvstream.core.status import check, make_struct


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Name and place of one snapshot: it is refused once its slot holds another one. Units: ``n_tokens``."""

    slot: int
    capture: int
    seq_id: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class BankInfo:
    """Counts, and bytes of host and device memory; see ``kvs_bank_info``."""

    n_slots: int
    n_valid: int
    is_capturing: bool
    slot_bytes: int
    host_bytes: int
    device_bytes: int
    n_captures: int
    n_restores: int


def _desc(layers: Sequence[DeltaLayer], n_slots: int) -> tuple[Any, Any]:
    array = layer_array(layers)
    return make_struct("kvs_bank_desc", n_layers=len(layers), layers=array, n_slots=n_slots), array


def snapshot_bytes(device: Device, layers: Sequence[DeltaLayer]) -> int:
    """Host bytes of one snapshot. Weights may be declared only."""
    desc, _array = _desc(layers, 1)
    out = ffi.new("uint64_t *")
    check(lib.kvs_bank_slot_bytes(device.ptr, desc, out), device.ptr)
    n_bytes: int = out[0]
    return n_bytes


class Bank(Handle):
    """``n_slots`` snapshots of states with these layers."""

    __slots__ = ("_device",)

    def __init__(self, device: Device, layers: Sequence[DeltaLayer], n_slots: int) -> None:
        desc, _array = _desc(layers, n_slots)
        cell = new_cell("bank")
        check(lib.kvs_bank_create(device.ptr, desc, cell), device.ptr)
        self._device = device
        super().__init__(cell)

    def _check(self, status: int) -> None:
        check(status, self._device.ptr)

    @property
    def info(self) -> BankInfo:
        out = make_struct("kvs_bank_info")
        self._check(lib.kvs_bank_get_info(self.ptr, out))
        return BankInfo(
            n_slots=out.n_slots,
            n_valid=out.n_valid,
            is_capturing=bool(out.is_capturing),
            slot_bytes=out.slot_bytes,
            host_bytes=out.host_bytes,
            device_bytes=out.device_bytes,
            n_captures=out.n_captures,
            n_restores=out.n_restores,
        )

    def snapshot(self, slot: int) -> Snapshot | None:
        """What a slot holds, None where it is empty."""
        out = make_struct("kvs_snapshot_info")
        self._check(lib.kvs_bank_get_snapshot(self.ptr, slot, out))
        return Snapshot(slot, out.capture, out.seq_id, out.n_tokens) if out.is_valid else None

    def capture(self, slot: int, state: State) -> None:
        """Begin to copy a folded state into a slot, whose snapshot is gone; ``publish`` ends it."""
        self._check(lib.kvs_bank_capture_wait(self.ptr, slot, state.ptr))

    def publish(self) -> None:
        """Wait for the copies of the capture under way. After an error its slot is empty."""
        self._check(lib.kvs_bank_publish_wait(self.ptr))

    def cancel(self) -> None:
        """Give the capture under way up: its slot is empty."""
        self._check(lib.kvs_bank_cancel(self.ptr))

    def drop(self, slot: int) -> None:
        """Forget a snapshot."""
        self._check(lib.kvs_bank_drop(self.ptr, slot))

    def restore(self, snapshot: Snapshot, state: State) -> None:
        """Bring a snapshot into a state, which then belongs to no sequence. After any error the state is as before."""
        status = lib.kvs_bank_restore_wait(self.ptr, snapshot.slot, snapshot.capture, snapshot.seq_id, state.ptr)
        self._check(status)

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        self._check(lib.kvs_bank_check_integrity(self.ptr))
