"""From the keys that a device's tapes need to images that it has.

Holds: ``provide_kernels``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pykvstream.core.cuda import CudaDevice, KernelKey, kernel_sources
from pykvstream.errors import Unsupported
from pykvstream.kernels.cache import ImageCache, default_folder, digest_of
from pykvstream.kernels.nvrtc import OPTIONS, compile_image, load_compiler

KernelProgress = Callable[[int, int], None]
"""``progress(done, total)`` after each kernel that was compiled."""


def provide_kernels(
    device: CudaDevice, cache: ImageCache | None = None, progress: KernelProgress | None = None
) -> tuple[int, int]:
    """Give a device every image that its sealed tapes need; returns how many came from disk, and how many were
    compiled.

    Raises ``Unsupported`` naming the first kernel that nobody has, ``DeviceError`` for one that does not compile.
    """
    images = ImageCache(default_folder()) if cache is None else cache
    sources = kernel_sources()
    missing: list[tuple[int, KernelKey, str]] = []
    n_found = 0
    for index, (key, has_image) in enumerate(device.kernels()):
        if has_image:
            continue
        if key.source not in sources:
            raise Unsupported(f"kernel {key}: the library has no source of this name")
        digest = digest_of(sources[key.source], key, OPTIONS)
        image = images.load(digest)
        if image is None:
            missing.append((index, key, digest))
        else:
            device.give_kernel(index, image)
            n_found += 1
    if not missing:
        return n_found, 0
    try:
        core = load_compiler()
        with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
            compiled = workers.map(lambda each: compile_image(core, sources[each[1].source], each[1]), missing)
            for done, ((index, _, digest), image) in enumerate(zip(missing, compiled, strict=True), 1):
                images.store(digest, image)
                device.give_kernel(index, image)
                if progress is not None:
                    progress(done, len(missing))
    except Unsupported as error:
        raise Unsupported(f"kernel {missing[0][1]} is not in {images.folder}, and there is {error}") from error
    return n_found, len(missing)
