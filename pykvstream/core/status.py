"""From status codes to exceptions.

Holds: ``check``, through which the result of every C call that can fail passes.
"""

from __future__ import annotations

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


def make_struct(kind: str, /, **fields: Any) -> Any:
    """A zeroed C struct with ``struct_size`` set, e.g. ``make_struct("kvs_device_desc", n_threads=2)``."""
    struct = ffi.new(f"{kind} *")
    struct.struct_size = ffi.sizeof(kind)
    for name, value in fields.items():
        setattr(struct, name, value)
    return struct
