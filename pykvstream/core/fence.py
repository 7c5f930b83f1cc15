"""A fence that the caller signals.

Source: ``include/kvstream/device.h``.
"""

from __future__ import annotations

from pykvstream._ffi import lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check

_FOREVER = 2**64 - 1


class Fence(Handle):
    """Proves that the device has finished. Closed before it is signalled, it completes as cancelled."""

    __slots__ = ("_device",)

    def __init__(self, device: Device) -> None:
        cell = new_cell("fence")
        check(lib.kvs_fence_create(device.ptr, cell), device.ptr)
        self._device = device.ptr
        super().__init__(cell)

    def signal(self, status: int = 0) -> None:
        """Complete it with 0 or a negative status; once."""
        check(lib.kvs_fence_signal(self.ptr, status), self._device)

    @property
    def is_complete(self) -> bool:
        """Whether it completed. Raises the error of the status it completed with."""
        status: int = check(lib.kvs_fence_query(self.ptr))
        return status == 0

    def wait(self, timeout_ns: int = _FOREVER) -> bool:
        """Wait; False when the time is over first. Raises the error of the status it completed with."""
        status: int = check(lib.kvs_fence_wait(self.ptr, timeout_ns))
        return status == 0
