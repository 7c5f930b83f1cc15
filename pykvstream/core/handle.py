"""The life of a C object in Python.

Holds: ``Handle``. ``close()`` gives the C object back, in any order among handles: parents that a C object needs are kept
alive by the core itself. A handle that is collected unclosed gives its object back too, and says so with a
``ResourceWarning``. After ``close()`` every use raises ``Closed``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pykvstream._ffi import ffi
from pykvstream.errors import Closed


class Handle:
    """Owns one C pointer. Subclasses pass the pointer and the C function that releases it."""

    __slots__ = ("__weakref__", "_guard", "_name", "_release")

    def __init__(self, pointer: Any, release: Callable[[Any], None]) -> None:
        name = type(self).__name__

        def collect(raw: Any) -> None:
            warnings.warn(f"{name} was never closed", ResourceWarning, stacklevel=2)
            release(raw)

        self._name = name
        self._release = release
        self._guard = ffi.gc(pointer, collect)

    @property
    def ptr(self) -> Any:
        """The C pointer. Raises ``Closed`` after ``close()``."""
        if self._guard is None:
            raise Closed(f"this {self._name} is closed")
        return self._guard

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._guard is None

    def close(self) -> None:
        """Give the C object back. A second call does nothing."""
        if self._guard is None:
            return
        pointer = self._detach()
        self._release(pointer)

    def _detach(self) -> Any:
        """Take the pointer out, for a C call that consumes it."""
        pointer = self.ptr
        ffi.gc(pointer, None)
        self._guard = None
        return pointer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
