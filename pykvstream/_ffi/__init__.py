"""The native core, as cffi sees it. Holds: ``ffi`` and ``lib``; imported by ``pykvstream.core`` alone."""

from pykvstream._ffi._native import ffi, lib

__all__ = ["ffi", "lib"]
