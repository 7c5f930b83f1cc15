"""From status codes to exceptions.

Holds: ``check``, through which the result of every C call that can fail passes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pykvstream._ffi import ffi, lib
from pykvstream.errors import error_from_status

_TEXT_BYTES = 512


def check(status: int, device: Any = ffi.NULL) -> int:
    """Return ``status`` if it is no error, else raise the exception of its class.

    ``device`` is the ``kvs_device *`` that keeps this thread's newest error text; with ``NULL`` only the status is
    named.
    """
    if status >= 0:
        return status
    name: str = ffi.string(lib.kvs_status_name(status)).decode()
    text = last_error(device)
    raise error_from_status(status, f"{text} [{name}]" if text else name)


def last_error(device: Any) -> str:
    """The text of this thread's newest failure on ``device`` (``kvs_device *`` or ``NULL``)."""
    if device == ffi.NULL:
        return ""
    buffer = ffi.new("char[]", _TEXT_BYTES)
    lib.kvs_device_last_error(device, buffer, _TEXT_BYTES)
    text: str = ffi.string(buffer).decode("utf-8", "replace")
    return text


@cache
def _layout(kind: str) -> tuple[Any, int]:
    """The type of a pointer to a struct, and the struct's size: looking them up takes longer than making one."""
    return ffi.typeof(f"{kind} *"), ffi.sizeof(kind)


def make_struct(kind: str, /, **fields: Any) -> Any:
    """A zeroed C struct with ``struct_size`` set, e.g. ``make_struct("kvs_device_desc", n_threads=2)``."""
    pointer, size = _layout(kind)
    struct = ffi.new(pointer)
    struct.struct_size = size
    for name, value in fields.items():
        setattr(struct, name, value)
    return struct
