"""Host history memory: address space that only the copy engine reaches.

Source: ``include/kvstream/device.h``, ``kvs_host``.
Holds: ``Host``, ``check_history``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check


class Host(Handle):
    """``n_bytes`` of history, written and read through the copy engine alone."""

    __slots__ = ("_device",)

    def __init__(self, device: Device, n_bytes: int) -> None:
        cell = new_cell("host")
        check(lib.kvs_host_create(device.ptr, n_bytes, cell), device.ptr)
        self._device = device.ptr
        super().__init__(cell)

    def read(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Copy bytes out. Raises ``NoSpace`` outside the memory."""
        out = np.empty(n_bytes, np.uint8)
        status = lib.kvs_host_read_wait(self.ptr, offset, ffi.from_buffer("uint8_t[]", out), n_bytes)
        check(status, self._device)
        return out

    def write(self, offset: int, data: bytes | NDArray[np.uint8]) -> None:
        """Copy bytes in. Raises ``NoSpace`` outside the memory."""
        view = ffi.from_buffer("uint8_t[]", data)
        check(lib.kvs_host_write_wait(self.ptr, offset, view, len(view)), self._device)


def check_history(device: Device, n_bytes: int) -> None:
    """Raises ``HostMemoryError`` with the limits found where so much history could not be registered with a driver."""
    check(lib.kvs_host_admit(device.ptr, n_bytes), device.ptr)
