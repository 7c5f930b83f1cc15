"""The life of a C object in Python.

Holds: ``Handle``, ``new_cell``. ``close()`` gives the C object back, in any order among handles: parents that a C
object needs are kept alive by the core itself. A handle that is collected unclosed gives its object back too, and
says so with a ``ResourceWarning``. After ``close()`` every use raises ``Closed``.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Self

from pykvstream._ffi import ffi, lib
from pykvstream.errors import Closed


def new_cell(kind: str) -> Any:
    """A place for a handle's object, of a kind such as ``lease``, that owns what C puts there.

    Between the C call and a constructor an interrupt can strike; what is in the cell goes with the cell.
    """
    # The C function itself is the destructor: an interrupt can strike only before or after it.
    return ffi.gc(ffi.new(f"kvs_{kind} **"), getattr(lib, f"kvs_py_drop_{kind}"))


class Handle:
    """Owns the C object in a cell, which may be filled later."""

    __slots__ = ("__weakref__", "_cell", "known")

    def __init__(self, cell: Any) -> None:
        self._cell = cell
        self.known: Any = cell[0]
        """What ``ptr`` returns, None once it may raise: ``handle.known or handle.ptr`` spares calls of every token."""

    def __del__(self) -> None:
        if getattr(self, "_cell", None) is not None:
            warnings.warn(f"{type(self).__name__} was never closed", ResourceWarning, stacklevel=2)

    @property
    def ptr(self) -> Any:
        """The C pointer. Raises ``Closed`` after ``close()``."""
        if self._cell is None:
            raise Closed(f"this {type(self).__name__} is closed")
        return self._cell[0]

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._cell is None

    def close(self) -> None:
        """Give the C object back. A second call does nothing."""
        self.known = None
        cell, self._cell = self._cell, None
        if cell is not None:
            ffi.release(cell)

    def _detach(self) -> Any:
        """Take the pointer out, for a C call that consumes it."""
        pointer = self.ptr
        self.known = None
        self._cell[0] = ffi.NULL
        self._cell = None
        return pointer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
