"""From the keys that a device's tapes need to images that it has.

Order: packs, the folder on disk, the compiler, else a refusal. Whatever was compiled is kept in the folder at once, so
that an interrupted start goes on where it was.
Holds: ``provide_kernels``, ``collect_images``, ``compile_kernels``, ``Provided``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from pykvstream.core.cuda import CudaDevice, KernelKey, kernel_options, kernel_sources
from pykvstream.errors import Unsupported
from pykvstream.kernels.cache import ImageCache, default_folder, digest_of
from pykvstream.kernels.nvrtc import compile_image, load_compiler
from pykvstream.kernels.pack import Pack

KernelProgress = Callable[[int, int], None]
"""``progress(done, total)`` before the first kernel is compiled, and after each."""
PackPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Provided:
    """Where kernels came from: how many were in packs, were on disk, and were compiled."""

    n_packed: int = 0
    n_found: int = 0
    n_compiled: int = 0


def provide_kernels(
    device: CudaDevice,
    packs: Sequence[PackPath] = (),
    *,
    cache: ImageCache | None = None,
    progress: KernelProgress | None = None,
) -> Provided:
    """Give a device every image that its sealed tapes need.

    ``packs``: files of ``pykvstream kernels pack``, asked first and in order. What they lack is looked for in
    ``cache`` (the user's folder by default), then compiled.
    Raises ``FormatError`` or ``NotFound`` naming a pack that cannot be used, ``Unsupported`` naming a kernel that
    nobody has, its architecture and what to do, ``DeviceError`` for one that does not compile.
    """
    n_packed = 0
    for path in packs:
        with Pack(path) as pack:
            n_packed += pack.give(device)
    numbers = {key: index for index, (key, has_image) in enumerate(device.kernels()) if not has_image}
    images = ImageCache(default_folder()) if cache is None else cache
    missing: list[KernelKey] = []
    for key, image in find_images(numbers, images):
        if image is None:
            missing.append(key)
        else:
            device.give_kernel(numbers[key], image)
    try:
        for key, image in compile_kernels(missing, cache=images, progress=progress):
            device.give_kernel(numbers[key], image)
    except _NoCompiler as error:
        raise Unsupported(_refusal(missing[0], len(missing), [Path(path) for path in packs], images, error)) from error
    return Provided(n_packed, len(numbers) - len(missing), len(missing))


def collect_images(
    keys: Sequence[KernelKey], *, cache: ImageCache | None = None, progress: KernelProgress | None = None
) -> tuple[dict[KernelKey, bytes], int]:
    """Images of keys, without a device: from the disk, else compiled; and how many were compiled.

    Raises ``Unsupported`` where there is no compiler, and ``DeviceError``.
    """
    images = ImageCache(default_folder()) if cache is None else cache
    found = {key: image for key, image in find_images(keys, images) if image is not None}
    compiled = dict(compile_kernels([key for key in keys if key not in found], cache=images, progress=progress))
    return found | compiled, len(compiled)


def find_images(keys: Iterable[KernelKey], images: ImageCache) -> Iterator[tuple[KernelKey, bytes | None]]:
    """What the disk holds of keys, None for what it lacks. Raises ``Unsupported`` for a key without a source."""
    sources = kernel_sources()
    for key in keys:
        if key.source not in sources:
            raise Unsupported(f"kernel {key}: the library has no source of this name")
        yield key, images.load(_digest(sources[key.source], key))


class _NoCompiler(Unsupported):
    """There is nothing to compile with."""


def compile_kernels(
    keys: Sequence[KernelKey], *, cache: ImageCache | None = None, progress: KernelProgress | None = None
) -> Iterator[tuple[KernelKey, bytes]]:
    """Images of keys, in the order in which they are done, by all processors; ``cache`` keeps each.

    Raises ``Unsupported`` where there is no compiler, or no source of a key's name, and ``DeviceError``.
    """
    if not keys:
        return
    sources = kernel_sources()
    try:
        core = load_compiler()
    except Unsupported as error:
        raise _NoCompiler(str(error)) from error
    # Long ones first: one that begins last would run alone.
    ordered = sorted(keys, key=lambda key: -len(sources[key.source]))
    if progress is not None:
        progress(0, len(ordered))
    workers = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        begun = {workers.submit(compile_image, core, sources[key.source], key): key for key in ordered}
        for done, future in enumerate(as_completed(begun), 1):
            key = begun[future]
            try:
                image = future.result()
            except Unsupported as error:
                raise _NoCompiler(str(error)) from error
            if cache is not None:
                cache.store(_digest(sources[key.source], key), image)
            yield key, image
            if progress is not None:
                progress(done, len(ordered))
    finally:
        workers.shutdown(cancel_futures=True)


def _digest(source: str, key: KernelKey) -> str:
    options = " ".join(f"{name}={value}" for name, value in kernel_options().items())
    return digest_of(source, key, options)


def _refusal(
    key: KernelKey, n_missing: int, packs: Sequence[Path], images: ImageCache, error: Unsupported
) -> str:
    where = [f"in the pack {str(path)!r}" for path in packs] or ["in a pack (none was given)"]
    others = "" if n_missing == 1 else f", one of {n_missing} that are missing,"
    return (
        f"kernel {key}{others} is not {', not '.join(where)}, not in {images.folder}, and cannot be compiled: {error};"
        f" or make a pack where there is a compiler: pykvstream kernels pack MODEL --arch sm_{key.arch} -o FILE, and"
        " give it with --kernels FILE"
    )
