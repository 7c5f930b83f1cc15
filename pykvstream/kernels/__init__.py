"""Kernels for cards: from a key to an image.

Order: packs, what the folder on disk holds, the compiler, else a refusal that names the kernel and where it was looked
for.
Holds: ``provide_kernels``, ``collect_images``, ``compile_kernels``, ``ImageCache``, ``Pack``, ``pack_bytes``.
"""

from pykvstream.kernels.cache import ImageCache
from pykvstream.kernels.pack import Pack, pack_bytes
from pykvstream.kernels.provider import (
    KernelProgress,
    PackPath,
    Provided,
    collect_images,
    compile_kernels,
    provide_kernels,
)

__all__ = [
    "ImageCache",
    "KernelProgress",
    "Pack",
    "PackPath",
    "Provided",
    "collect_images",
    "compile_kernels",
    "pack_bytes",
    "provide_kernels",
]
