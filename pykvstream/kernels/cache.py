"""Images of kernels on disk, by the digest of what they were made of.

Holds: ``ImageCache``. A file that is damaged, cut or another's counts as missing; a folder that cannot be written to
makes later starts slower, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from pykvstream.core.cuda import KernelKey

_FORMAT = "pykvstream image 1"
_DIGEST_BYTES = 32


def default_folder() -> Path:
    """Where images are kept when nobody says otherwise."""
    return Path.home() / ".cache" / "pykvstream" / "kernels"


def digest_of(source: str, key: KernelKey, options: str) -> str:
    """What an image is made of, as a file name."""
    parts = (_FORMAT, str(key), options, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class ImageCache:
    """A folder of images. Made when first written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, digest: str) -> bytes | None:
        """The image of a digest, None where there is none."""
        try:
            data = self._path(digest).read_bytes()
        except OSError:
            return None
        image = data[_DIGEST_BYTES:]
        is_whole = bool(image) and hashlib.sha256(image).digest() == data[:_DIGEST_BYTES]
        return image if is_whole else None

    def store(self, digest: str, image: bytes) -> None:
        """Keep an image, whole or not at all."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".image", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(image).digest() + image)
                os.replace(temporary, self._path(digest))
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.cubin"
