"""Kernels for cards: from a key to an image.

Order: what the disk holds, then the compiler, else a refusal that names the kernel and where it was looked for.
Holds: ``provide_kernels``, ``ImageCache``.
"""

from pykvstream.kernels.cache import ImageCache
from pykvstream.kernels.provider import provide_kernels

__all__ = ["ImageCache", "provide_kernels"]
