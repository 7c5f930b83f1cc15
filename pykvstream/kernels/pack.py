"""Packs: files of images, for machines without a compiler.

Order: header, table, images at multiples of 64 bytes; ``include/kvstream/kernel.h`` describes each field. The core
reads them; here they are made and named.
Holds: ``Pack``, ``pack_bytes``.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from pykvstream.core.cuda import CudaDevice, KernelKey, kernels_digest
from pykvstream.errors import DeviceError, FormatError, NotFound

_MAGIC = b"KVSKPACK"
_VERSION = 1
_MAX_MACROS = 8
_ALIGNMENT = 64
_HEADER = struct.Struct("<8sIIQQ32s")
_ENTRY = struct.Struct("<32s" + "24s" * _MAX_MACROS + "8iIIQQ32s")
_DIGEST_BYTES = 32


def pack_bytes(images: Iterable[tuple[KernelKey, bytes]]) -> bytes:
    """The file of a pack with these images. A key that comes twice is taken once."""
    made = dict(images)
    at = _aligned(_HEADER.size + _DIGEST_BYTES + len(made) * _ENTRY.size)
    table, parts, n_bytes = b"", [], at
    for key, image in made.items():
        table += _entry(key, image, n_bytes)
        padded = image + bytes(_aligned(len(image)) - len(image))
        parts.append(padded)
        n_bytes += len(padded)
    head = _HEADER.pack(_MAGIC, _VERSION, len(made), n_bytes, 0, kernels_digest())
    front = head + hashlib.sha256(head + table).digest() + table
    return b"".join((front, bytes(at - len(front)), *parts))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _entry(key: KernelKey, image: bytes, offset: int) -> bytes:
    names = [name.encode() for name, _ in key.macros] + [b""] * (_MAX_MACROS - len(key.macros))
    values = [value for _, value in key.macros] + [0] * (_MAX_MACROS - len(key.macros))
    digest = hashlib.sha256(image).digest()
    return _ENTRY.pack(
        key.source.encode(), *names, *values, len(key.macros), key.arch, offset, len(image), digest
    )


class Pack:
    """A pack on disk, mapped read-only; a context manager.

    Raises ``NotFound``, ``DeviceError`` where the system refuses it, ``FormatError`` for an empty file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise FormatError(f"pack of kernels {str(self.path)!r} is empty", offset=0)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, ValueError) as error:
            if isinstance(error, FormatError):
                raise
            raise NotFound(f"no such pack of kernels: {str(self.path)!r}") from None
        except OSError as error:
            raise DeviceError(f"pack of kernels {str(self.path)!r}: {error.strerror}") from None

    def give(self, device: CudaDevice) -> int:
        """Give a device what it needs of this pack; returns how many images that were.

        Raises ``FormatError`` naming the file, and the device got nothing, for one that is damaged, no pack, or of
        other kernels than this library's.
        """
        try:
            return device.give_pack(self._map)
        except FormatError as error:
            raise FormatError(f"pack of kernels {str(self.path)!r}: {error}") from None

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
