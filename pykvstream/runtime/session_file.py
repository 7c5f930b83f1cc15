"""The file of a saved session: sections of bytes behind a table, all of it under digests.

Layout, little endian: magic, version, number of sections, bytes of the file; for each section its name, offset, bytes
and BLAKE2b-128 digest; the digest of all that, the seal; then the sections, one behind the other, to the end of the
file. So there is no byte that nothing checks.
Order: ``SECTIONS``, always all of them; what a version does not need is empty.
Holds: ``write_sections``, which leaves the old file or a whole new one, and ``SectionReader``, which refuses with
``FormatError`` naming section and offset, and takes memory for a section only when the file is known to be that long.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import DeviceError, FormatError, InvalidArgument, NotFound
from pykvstream.runtime.whole_file import check_replaceable, path_of, replacing

Bytes = NDArray[np.uint8]
Gate = Callable[[], None]
"""Called before each access to the file; what it raises stands for the system's refusal."""

VERSION: Final = 3
SECTIONS: Final = ("setting", "tokens", "messages", "state", "kept", "pages", "head")
_MAGIC: Final = b"KVSSAVED"
_DIGEST_BYTES: Final = 16
_HEAD: Final = struct.Struct("<8sIIQ")
_ENTRY: Final = struct.Struct(f"<16sQQ{_DIGEST_BYTES}s")
HEADER_BYTES: Final = _HEAD.size + len(SECTIONS) * _ENTRY.size + _DIGEST_BYTES
"""Where the first section begins."""


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class _Entry:
    offset: int
    n_bytes: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes


def _path_of(path: object) -> Path:
    return path_of("a session is saved", path)


def check_session_path(path: str | os.PathLike[str]) -> None:
    """Whether a session can be saved there.

    Raises ``DeviceError``, and ``InvalidArgument`` for a file that is no session.
    """
    where = _path_of(path)
    name = f"session file {str(where)!r}"
    try:
        check_replaceable(where)
        with where.open("rb") as file:
            begin = file.read(len(_MAGIC))
    except FileNotFoundError:
        if where.parent.is_dir():
            return
        raise DeviceError(f"{name}: no such folder") from None
    except OSError as error:
        raise DeviceError(f"{name}: {error.strerror}") from None
    if not _MAGIC.startswith(begin):
        raise InvalidArgument(f"{name}: the file that is there is no saved session, and stays")


def write_sections(
    path: str | os.PathLike[str], sections: Mapping[str, Iterable[memoryview | bytes]], gate: Gate
) -> None:
    """Write every section, as ``replacing`` does. Raises ``InvalidArgument`` for what is no path or not that of a file,
    and ``DeviceError``; then nothing has changed, whatever stood under that name.
    """
    where = _path_of(path)
    check_session_path(where)
    try:
        with replacing(where) as file:
            _write(file, sections, gate)
            gate()
    except DeviceError:
        raise
    except OSError as error:
        raise DeviceError(f"session file {str(where)!r}: {error.strerror}") from None


def _write(file: BinaryIO, sections: Mapping[str, Iterable[memoryview | bytes]], gate: Gate) -> None:
    entries = []
    file.write(bytes(HEADER_BYTES))
    at = HEADER_BYTES
    for name in SECTIONS:
        digest = _hasher()
        begin = at
        for chunk in sections[name]:
            gate()
            file.write(chunk)
            digest.update(chunk)
            at += len(chunk)
        entries.append(_Entry(begin, at - begin, digest.digest()))
    gate()
    file.seek(0)
    file.write(_header(entries, at))


def _header(entries: Iterable[_Entry], file_bytes: int) -> bytes:
    head = _HEAD.pack(_MAGIC, VERSION, len(SECTIONS), file_bytes)
    for name, entry in zip(SECTIONS, entries, strict=True):
        head += _ENTRY.pack(name.encode(), entry.offset, entry.n_bytes, entry.digest)
    return head + hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest()


class SectionReader:
    """A session file whose header, table and sizes have been checked; a context manager."""

    def __init__(self, path: str | os.PathLike[str], gate: Gate) -> None:
        """Raises ``NotFound``, ``DeviceError``, or ``FormatError`` for what is no whole file of this version."""
        self.path = _path_of(path)
        self._gate = gate
        try:
            # A name that stands for a pipe must not wait for whoever would write into it.
            self._handle: int | None = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NotFound(f"session file {str(self.path)!r}: no such file") from None
        except OSError as error:
            raise self._failure(error) from None
        try:
            self._entries = self._read_table()
        except BaseException:
            self.close()
            raise

    def _failure(self, error: OSError) -> DeviceError:
        return DeviceError(f"session file {str(self.path)!r}: {error.strerror}")

    def _refuse(self, what: str, section: str, offset: int) -> FormatError:
        return FormatError(f"session file {str(self.path)!r}: {section}: {what}", offset=offset)

    def refusal(self, name: str, what: str, at: int = 0) -> FormatError:
        """The error for a section whose byte ``at`` says what cannot be."""
        return self._refuse(what, name, self._entries[name].offset + at)

    def size(self, name: str) -> int:
        """Bytes of a section; the file has them."""
        return self._entries[name].n_bytes

    def require_size(self, name: str, n_bytes: int) -> None:
        """Raises ``FormatError`` where a section has another size than what else is known asks for."""
        if self.size(name) != n_bytes:
            raise self.refusal(name, f"{self.size(name)} bytes, need {n_bytes}")

    def _read_table(self) -> dict[str, _Entry]:
        """Header, seal and table. A version from the future may look different behind its number."""
        file_bytes = self._file_bytes()
        head = self._read(0, min(HEADER_BYTES, file_bytes), "header")
        data = head.tobytes()
        if data[: len(_MAGIC)] != _MAGIC:
            raise self._refuse("no saved session", "header", 0)
        if len(data) < _HEAD.size:
            raise self._refuse(f"cut off after {file_bytes} bytes", "header", file_bytes)
        _, version, n_sections, stated_bytes = _HEAD.unpack_from(data)
        if version != VERSION:
            raise self._refuse(f"version {version}, this program reads version {VERSION}", "header", len(_MAGIC))
        if len(data) < HEADER_BYTES:
            raise self._refuse(f"cut off after {file_bytes} bytes", "header", file_bytes)
        seal_at = HEADER_BYTES - _DIGEST_BYTES
        if hashlib.blake2b(data[:seal_at], digest_size=_DIGEST_BYTES).digest() != data[seal_at:]:
            raise self._refuse("the header is damaged: its digest is another", "header", seal_at)
        if n_sections != len(SECTIONS):
            raise self._refuse(f"{n_sections} sections, need {len(SECTIONS)}", "header", len(_MAGIC) + 4)
        if stated_bytes != file_bytes:
            raise self._refuse(f"the file has {file_bytes} bytes, not {stated_bytes}", "header", len(_MAGIC) + 8)
        return self._entries_of(data, file_bytes)

    def _file_bytes(self) -> int:
        try:
            status = os.fstat(self._open_handle())
        except OSError as error:
            raise self._failure(error) from None
        if not stat.S_ISREG(status.st_mode):
            raise self._refuse("no regular file", "header", 0)
        return status.st_size

    def _entries_of(self, data: bytes, file_bytes: int) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        at = HEADER_BYTES
        for i, name in enumerate(SECTIONS):
            where = _HEAD.size + i * _ENTRY.size
            stated, offset, n_bytes, digest = _ENTRY.unpack_from(data, where)
            if stated.rstrip(b"\0") != name.encode():
                raise self._refuse(f"the entry of another section: {stated!r}", name, where)
            if offset != at or n_bytes > file_bytes - at:
                raise self._refuse(f"{n_bytes} bytes at {offset} do not lie at {at} in {file_bytes}", name, where)
            at += n_bytes
            entries[name] = _Entry(offset, n_bytes, digest)
        if at != file_bytes:
            raise self._refuse(f"{file_bytes - at} bytes behind the last section", SECTIONS[-1], at)
        return entries

    def _open_handle(self) -> int:
        if self._handle is None:
            raise InvalidArgument(f"session file {str(self.path)!r} was closed")
        return self._handle

    def _read(self, offset: int, n_bytes: int, section: str) -> Bytes:
        self._gate()
        data = np.empty(n_bytes, np.uint8)
        view = data.data
        n_read = 0
        while n_read < n_bytes:
            try:
                n = os.preadv(self._open_handle(), [view[n_read:]], offset + n_read)
            except OSError as error:
                raise self._failure(error) from None
            if n == 0:
                raise self._refuse("the file became shorter", section, offset + n_read)
            n_read += n
        return data

    def chunks(self, name: str, sizes: Iterable[int]) -> Iterator[Bytes]:
        """A section in pieces of ``sizes``, which cover it. Whether it is whole is known at the end only: whoever
        takes pieces must be able to give up what was made of them.
        """
        entry = self._entries[name]
        digest = _hasher()
        at = entry.offset
        for n_bytes in sizes:
            piece = self._read(at, n_bytes, name)
            digest.update(piece.data)
            at += n_bytes
            yield piece
        if at != entry.end or digest.digest() != entry.digest:
            raise self.refusal(name, "the section is damaged: its digest is another")

    def read(self, name: str) -> Bytes:
        """A whole section."""
        pieces = list(self.chunks(name, [self.size(name)]))
        return pieces[0]

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
