"""Device memory and streams shared with torch, CuPy, cuda.core and numpy: DLPack, ``__cuda_array_interface__``,
``__cuda_stream__``.

Order: what is lent is complete for whoever takes it on the stream that it names; what is adopted is complete for the
device.
Source: ``include/kvstream/interop.h``; the Python specification of DLPack; the CUDA array interface, version 3.
Holds: ``Buffer``, ``DeviceArray``, ``Stream``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check, make_struct
from pykvstream.errors import InvalidArgument, Unsupported

DEFAULT_ALIGNMENT_BYTES = 256
CPU_PLACE = 1
"""DLPack's number for memory of the host."""
_UNTOUCHED, _USED = b"dltensor", b"used_dltensor"
_KINDS = {"i": lib.KVS_ELEMENT_INT, "u": lib.KVS_ELEMENT_UINT, "f": lib.KVS_ELEMENT_FLOAT}
_LEGACY_STREAM, _NO_STREAM = 1, -1

_api = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_rename_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_hold = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", _api))
_let_go = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", _api))


class Stream:
    """The stream in which a card runs operations, borrowed from its device: for libraries that speak
    ``__cuda_stream__``. Raises ``Unsupported`` for a device without streams."""

    __slots__ = ("device", "handle")

    def __init__(self, device: Device) -> None:
        out = ffi.new("uint64_t *")
        check(lib.kvs_device_get_stream(device.ptr, out), device.ptr)
        self.device = device
        self.handle: int = out[0]

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version 0 of the protocol, and the ``CUstream``."""
        return 0, self.handle

    def lead(self, other: object) -> None:
        """Let what comes into ``other``, a stream of the same card, begin behind what the device was given so far."""
        check(lib.kvs_device_lead_stream(self.device.ptr, stream_handle(other)), self.device.ptr)


def stream_handle(stream: object) -> int:
    """The ``CUstream`` of an integer or of an object with ``__cuda_stream__``."""
    speak = getattr(stream, "__cuda_stream__", None)
    if speak is not None:
        _, handle = speak() if callable(speak) else speak
        return int(handle)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    raise InvalidArgument(f"need a stream, an integer or an object with __cuda_stream__, got {type(stream).__name__}")


def place_of(device: Device) -> tuple[int, int]:
    """A device as DLPack numbers it. Raises ``Unsupported`` for one without memory."""
    kind, number = ffi.new("int32_t *"), ffi.new("int32_t *")
    check(lib.kvs_device_get_place(device.ptr, kind, number), device.ptr)
    return kind[0], number[0]


class Buffer(Handle):
    """``n_bytes`` of device memory of its own. ``adopt`` and ``at`` make one of memory that is another's."""

    __slots__ = ("device",)

    def __init__(self, device: Device, n_bytes: int, alignment_bytes: int = DEFAULT_ALIGNMENT_BYTES) -> None:
        cell = new_cell("buffer")
        check(lib.kvs_buffer_create(device.ptr, n_bytes, alignment_bytes, cell), device.ptr)
        self._own(device, cell)

    def _own(self, device: Device, cell: Any) -> None:
        self.device = device
        Handle.__init__(self, cell)

    @classmethod
    def _of(cls, device: Device, cell: Any) -> Self:
        made = cls.__new__(cls)
        made._own(device, cell)
        return made

    @classmethod
    def at(cls, device: Device, address: int, n_bytes: int, owner: object | None = None) -> Self:
        """Over memory at an address, a multiple of 64. ``owner`` is kept alive until the buffer, its views and all that
        was lent of them are gone; without one the caller answers for that.

        Raises ``Unsupported`` for memory that is not the device's.
        """
        cell = new_cell("buffer")
        drop, user = ffi.NULL, ffi.NULL
        if owner is not None:
            drop, user = ffi.addressof(lib, "kvs_py_drop_owner"), ffi.cast("void *", id(owner))
            _hold(owner)
        status = lib.kvs_buffer_adopt(device.ptr, address, n_bytes, drop, user, cell)
        if status < 0 and owner is not None:
            _let_go(owner)
        check(status, device.ptr)
        return cls._of(device, cell)

    @classmethod
    def adopt(cls, device: Device, source: Any) -> Self:
        """Over the memory of a contiguous tensor of another library, by DLPack or else ``__cuda_array_interface__``.

        The device's stream waits for what its owner has under way there; the tensor lives as long as the buffer.
        Raises ``Unsupported`` for memory of another device, ``InvalidArgument`` for what is not contiguous.
        """
        place = place_of(device)
        if hasattr(source, "__dlpack__"):
            if tuple(map(int, source.__dlpack_device__())) != place:
                raise Unsupported(f"the tensor lies on {source.__dlpack_device__()} of DLPack, the device is {place}")
            stream = None if place[0] == CPU_PLACE else Stream(device).handle
            return cls._take(device, source.__dlpack__(stream=stream))
        described = getattr(source, "__cuda_array_interface__", None)
        if described is None or place[0] == CPU_PLACE:
            raise InvalidArgument(f"a {type(source).__name__} speaks neither DLPack nor the CUDA array interface")
        if described.get("strides") is not None:
            raise InvalidArgument("a tensor with strides is not contiguous")
        if described.get("stream") is not None:
            raise Unsupported("a tensor that names a stream: hand it over by DLPack, which orders the two")
        n_bytes = prod(described["shape"]) * np.dtype(described["typestr"]).itemsize
        return cls.at(device, described["data"][0], n_bytes, source)

    @classmethod
    def _take(cls, device: Device, capsule: Any) -> Self:
        managed = ffi.cast("void *", _capsule_pointer(capsule, _UNTOUCHED))
        cell = new_cell("buffer")
        check(lib.kvs_buffer_take(device.ptr, managed, cell), device.ptr)
        _rename_capsule(capsule, _USED)
        return cls._of(device, cell)

    @classmethod
    def of(cls, device: Device, values: NDArray[Any]) -> Self:
        """Of its own, with a copy of ``values``, C-contiguous."""
        made = cls(device, max(values.nbytes, 1))
        try:
            made.write(0, np.ascontiguousarray(values))
        except BaseException:
            made.close()
            raise
        return made

    @property
    def address(self) -> int:
        """The device address of the first byte, valid while the buffer is open."""
        return self._range()[0]

    @property
    def n_bytes(self) -> int:
        return self._range()[1]

    def _range(self) -> tuple[int, int]:
        address, n_bytes = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.kvs_buffer_get_range(self.ptr, address, n_bytes), self.device.ptr)
        return address[0], n_bytes[0]

    def view(self, offset: int, n_bytes: int) -> Buffer:
        """A part that keeps the whole alive; multiples of 64. Raises ``NoSpace``."""
        cell = new_cell("buffer")
        check(lib.kvs_buffer_view(self.ptr, offset, n_bytes, cell), self.device.ptr)
        return Buffer._of(self.device, cell)

    def read(self, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Copy bytes out, behind whatever the device was given. Raises ``NoSpace`` outside."""
        out = np.empty(n_bytes, np.uint8)
        status = lib.kvs_buffer_read_wait(self.ptr, offset, ffi.from_buffer("uint8_t[]", out), n_bytes)
        check(status, self.device.ptr)
        return out

    def write(self, offset: int, data: bytes | NDArray[Any]) -> None:
        """Copy bytes in, behind whatever the device was given. Raises ``NoSpace`` outside."""
        view = ffi.from_buffer("uint8_t[]", data)
        check(lib.kvs_buffer_write_wait(self.ptr, offset, view, len(view)), self.device.ptr)

    def array(self, shape: Sequence[int], dtype: DTypeLike = np.float32, offset: int = 0) -> DeviceArray:
        """A part as a tensor that can be lent. Raises ``NoSpace`` outside, ``InvalidArgument`` for other types."""
        return DeviceArray(self, tuple(shape), np.dtype(dtype), offset)


class DeviceArray:
    """A contiguous tensor in a buffer, which lives as long: ``torch.from_dlpack(array)`` and the like take it as it
    lies. Of the CPU device ``numpy.from_dlpack`` does."""

    __slots__ = ("buffer", "dtype", "offset", "shape")

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> None:
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.offset = offset
        if dtype.kind not in _KINDS or len(shape) > lib.KVS_LEND_MAX_DIMS or min(shape, default=0) < 0:
            raise InvalidArgument(f"no tensor of {dtype} and shape {shape} can be lent")
        lib.kvs_lent_release(self._lend())

    def __dlpack_device__(self) -> tuple[int, int]:
        return place_of(self.buffer.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule. Of a card's memory ``stream`` is the receiver's: it is put behind what the device was given; None
        is the legacy default stream, -1 no stream. Raises ``BufferError`` for a copy or another device."""
        place = self.__dlpack_device__()
        if copy or (dl_device is not None and tuple(dl_device) != place):
            raise BufferError("device memory is lent as it lies: no copy, no other device")
        if place[0] != CPU_PLACE and stream != _NO_STREAM:
            if stream == 0:
                raise BufferError("stream 0 can mean two streams: name 1 (legacy), 2 (per thread) or -1 (none)")
            Stream(self.buffer.device).lead(_LEGACY_STREAM if stream is None else stream)
        managed = self._lend()
        drop = ffi.addressof(lib, "kvs_py_drop_capsule")
        return _new_capsule(int(ffi.cast("uintptr_t", managed)), _UNTOUCHED, int(ffi.cast("uintptr_t", drop)))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """For libraries without DLPack. Absent (``AttributeError``) of the CPU device."""
        device = self.buffer.device
        if place_of(device)[0] == CPU_PLACE:
            raise AttributeError("the memory is the host's")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.buffer.address + self.offset, False),
            "strides": None,
            "stream": Stream(device).handle,
            "version": 3,
        }

    def _lend(self) -> Any:
        desc = make_struct(
            "kvs_lend_desc",
            kind=_KINDS[self.dtype.kind],
            bits=8 * self.dtype.itemsize,
            n_dims=len(self.shape),
            offset=self.offset,
        )
        for i, size in enumerate(self.shape):
            desc.shape[i] = size
        out = ffi.new("void **")
        check(lib.kvs_buffer_lend(self.buffer.ptr, desc, out), self.buffer.device.ptr)
        return out[0]
