"""GGUF files on disk: mapped read-only, one file or a set of shards.

Order: the shard with number 0 is parsed first; its metadata is the metadata of the set.
Source: spec/model.md 6.1; shard names end in ``-00001-of-000NN.gguf``.
Holds: ``GgufFile``. Arrays and views that it hands out keep the mapping alive and stay valid after ``close``.
A mapping shows what is on disk: a file that is cut while open ends the process, as with every mapped file.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from pykvstream.errors import Closed, DeviceError, FormatError, NotFound
from pykvstream.gguf import codecs
from pykvstream.gguf.metadata import REQUIRED, Bytes, LazyStrings, Metadata, Required
from pykvstream.gguf.parse import Image, TensorInfo, Usage, parse_image

# Every mapped shard holds a file descriptor, of which a process commonly has 1024.
MAX_SHARDS: Final = 512

_SHARD_NAME: Final = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_D = TypeVar("_D")


class GgufFile:
    """A GGUF model on disk, open for reading; a context manager.

    ``version``, ``alignment`` and ``metadata`` are those of the first shard; ``tensors`` has the tensors of
    all shards, in file order. ``path`` is the first shard, ``paths`` all of them.
    """

    def __init__(self, paths: tuple[Path, ...], images: tuple[Image, ...], data: tuple[Bytes, ...]) -> None:
        self.paths = paths
        self.version = images[0].version
        self.alignment = images[0].alignment
        self.metadata = images[0].metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_merge(images, paths))
        self._data: tuple[Bytes, ...] | None = data

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Map and check a file; any shard of a set opens the set.

        Raises ``NotFound`` when there is no such file, ``FormatError`` for anything wrong with it (a missing
        shard too), ``DeviceError`` when the system refuses to open or map it.
        """
        first = Path(path)
        name = _SHARD_NAME.match(first.name)
        if name is not None and int(name["number"]) != 1:
            first = _shard_path(first, name, 1)
        data = [_map(first, shard=name is not None and first != Path(path))]
        usage = Usage()
        images = [_parse(data[0], first, 0, usage)]
        n_shards = _shard_count(images[0].metadata, first, name, 1)
        paths = [first]
        if name is not None:
            paths += [_shard_path(first, name, number) for number in range(2, n_shards + 1)]
        for index, other in enumerate(paths[1:], start=1):
            data.append(_map(other, shard=True))
            images.append(_parse(data[index], other, index, usage))
            _shard_count(images[index].metadata, other, name, index + 1)
        _check_tensor_count(images)
        return cls(tuple(paths), tuple(images), tuple(data))

    @property
    def path(self) -> Path:
        """The file, or the first shard."""
        return self.paths[0]

    def close(self) -> None:
        """Let go of the mapping; it disappears with the last array or view taken from it."""
        self._data = None

    def require_whole(self) -> None:
        """Raises ``DeviceError`` where a file has become shorter than it was when it was opened.

        To read what is gone would end the process with SIGBUS.
        """
        for path, data in zip(self.paths, self._data or (), strict=False):
            mapping: mmap.mmap = data.base.obj  # type: ignore[union-attr]
            if mapping.size() < data.size:
                raise DeviceError(f"{path} was cut to {mapping.size()} bytes while it was open, need {data.size}")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_int(self, key: str, default: _D | Required = REQUIRED) -> int | _D:
        """See ``Metadata.get_int``."""
        return self.metadata.get_int(key, default)

    def get_float(self, key: str, default: _D | Required = REQUIRED) -> float | _D:
        """See ``Metadata.get_float``."""
        return self.metadata.get_float(key, default)

    def get_bool(self, key: str, default: _D | Required = REQUIRED) -> bool | _D:
        """See ``Metadata.get_bool``."""
        return self.metadata.get_bool(key, default)

    def get_str(self, key: str, default: _D | Required = REQUIRED) -> str | _D:
        """See ``Metadata.get_str``."""
        return self.metadata.get_str(key, default)

    def get_strs(self, key: str, default: _D | Required = REQUIRED) -> LazyStrings | _D:
        """See ``Metadata.get_strs``."""
        return self.metadata.get_strs(key, default)

    def get_ints(
        self, key: str, default: _D | Required = REQUIRED, *, count: int | None = None
    ) -> npt.NDArray[np.int64] | _D:
        """See ``Metadata.get_ints``."""
        return self.metadata.get_ints(key, default, count=count)

    def get_bools(
        self, key: str, default: _D | Required = REQUIRED, *, count: int | None = None
    ) -> npt.NDArray[np.bool_] | _D:
        """See ``Metadata.get_bools``."""
        return self.metadata.get_bools(key, default, count=count)

    def get_floats(self, key: str, default: _D | Required = REQUIRED) -> npt.NDArray[np.float64] | _D:
        """See ``Metadata.get_floats``."""
        return self.metadata.get_floats(key, default)

    def tensor(self, name: str) -> TensorInfo:
        """Return where a tensor lies; a missing one is a ``FormatError`` naming it."""
        if name not in self.tensors:
            raise FormatError("required tensor is missing", key=name)
        return self.tensors[name]

    def tensor_data(self, name: str) -> Bytes:
        """Return the bytes of a tensor: a read-only view of the mapping, nothing is copied."""
        info = self.tensor(name)
        if self._data is None:
            raise Closed(f"{self.path} is closed")
        return self._data[info.shard][info.offset : info.offset + info.nbytes]

    def tensor_array(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor decoded to float32, rows first: its shape is ne reversed."""
        info = self.tensor(name)
        return codecs.decode(info.type, self.tensor_data(name)).reshape(info.shape[::-1])


def _map(path: Path, *, shard: bool) -> Bytes:
    try:
        # Without O_NONBLOCK a named pipe would hang the open instead of being refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        if shard:
            raise FormatError(f"shard is missing: {path}") from None
        raise NotFound(f"no such file: {path}") from None
    except ValueError as error:
        raise NotFound(f"no such file: {str(path)!r}: {error}") from None
    except OSError as error:
        raise DeviceError(f"cannot open {path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise FormatError(f"{path} is {kind}", offset=0)
        if status.st_size == 0:
            raise FormatError(f"{path} is empty", offset=0)
        try:
            return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
        except OSError as error:
            raise DeviceError(f"cannot map {path} of {status.st_size} bytes: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _parse(data: Bytes, path: Path, shard: int, usage: Usage) -> Image:
    try:
        return parse_image(data, shard, usage)
    except FormatError as error:
        # The parser sees bytes only; the name of the file is what the user can act on.
        named = FormatError(f"{path.name}: {error}")
        named.offset, named.key = error.offset, error.key
        raise named from None


def _shard_path(path: Path, name: re.Match[str], number: int) -> Path:
    return path.with_name(f"{name['stem']}-{number:05d}-of-{name['count']}.gguf")


def _shard_count(metadata: Metadata, path: Path, name: re.Match[str] | None, number: int) -> int:
    """Return the number of shards, after checking that keys, file name and position agree."""
    named = 1 if name is None else int(name["count"])
    count = metadata.get_int("split.count", 1)
    if count == 0 and named == 1:
        return 1
    if count != named:
        raise FormatError(
            f"{path.name}: the file says {count} shards, its name says {named}",
            offset=_offset(metadata, "split.count"),
            key="split.count",
        )
    if not 1 <= count <= MAX_SHARDS:
        raise FormatError(f"{count} shards, need 1 to {MAX_SHARDS}", key="split.count")
    index = metadata.get_int("split.no", 0 if count == 1 else REQUIRED)
    if index != number - 1:
        raise FormatError(
            f"{path.name}: the file says shard {index}, its place is {number - 1}",
            offset=_offset(metadata, "split.no"),
            key="split.no",
        )
    return count


def _offset(metadata: Metadata, key: str) -> int | None:
    return metadata.entry(key).offset if key in metadata else None


def _check_tensor_count(images: list[Image]) -> None:
    key = "split.tensors.count"
    have = sum(len(image.tensors) for image in images)
    need = images[0].metadata.get_int(key, have)
    if need != have:
        raise FormatError(
            f"the shards hold {have} tensors, need {need}", offset=_offset(images[0].metadata, key), key=key
        )


def _merge(images: tuple[Image, ...], paths: tuple[Path, ...]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for image, path in zip(images, paths, strict=True):
        for name, info in image.tensors.items():
            if name in merged:
                raise FormatError(
                    f"tensor is in shard {merged[name].shard} and again in {path.name}",
                    offset=info.offset,
                    key=name,
                )
            merged[name] = info
    return merged
