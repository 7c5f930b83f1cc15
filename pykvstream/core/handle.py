"""The life of a C object in Python.

Holds: ``Handle``, ``new_cell``. ``close()`` gives the C object back, in any order among handles: parents that a C
object needs are kept alive by the core itself. A handle that is collected unclosed gives its object back too, and
says so with a ``ResourceWarning``. After ``close()`` every use raises ``Closed``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pykvstream._ffi import ffi
from pykvstream.errors import Closed


def new_cell(kind: str, drop: Callable[[Any], None]) -> Any:
    """A place for a handle, ``new_cell("kvs_lease **", lib.kvs_py_drop_lease)``, that owns what C puts there.

    Between the C call and a constructor an interrupt can strike; what is in the cell goes with the cell.
    """
    return ffi.gc(ffi.new(kind), drop)


class Handle:
    """Owns one C pointer. Subclasses pass the pointer and the C function that releases it, or a cell alone."""

    __slots__ = ("__weakref__", "_guard", "_is_cell", "known")

    def __init__(self, pointer: Any, release: Callable[[Any], None] | None = None) -> None:
        self._is_cell = release is None
        # The C function itself is the destructor: an interrupt can strike only before or after it.
        self._guard = pointer if release is None else ffi.gc(pointer, release)
        self.known: Any = self._guard[0] if self._is_cell else self._guard
        """What ``ptr`` returns, None once it may raise: ``handle.known or handle.ptr`` spares calls of every token."""

    def __del__(self) -> None:
        if getattr(self, "_guard", None) is not None:
            warnings.warn(f"{type(self).__name__} was never closed", ResourceWarning, stacklevel=2)

    @property
    def ptr(self) -> Any:
        """The C pointer. Raises ``Closed`` after ``close()``."""
        if self._guard is None:
            raise Closed(f"this {type(self).__name__} is closed")
        return self._guard[0] if self._is_cell else self._guard

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._guard is None

    def close(self) -> None:
        """Give the C object back. A second call does nothing."""
        self.known = None
        guard, self._guard = self._guard, None
        if guard is not None:
            ffi.release(guard)

    def _detach(self) -> Any:
        """Take the pointer out, for a C call that consumes it."""
        pointer = self.ptr
        self.known = None
        if self._is_cell:
            self._guard[0] = ffi.NULL
        else:
            ffi.gc(pointer, None)
        self._guard = None
        return pointer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
