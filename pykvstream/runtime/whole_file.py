"""Writing a file whole or not at all.

Order: another name in the same folder, the disk, the mode, the name.
Holds: ``path_of``; ``replacing``; ``check_replaceable``, which finds before any work what would be refused. A file that
is there keeps its permissions, and a link to it stays a link. A new one is for its owner alone (0600, whatever the
umask allows), unless it is said to be public: most of what is written here is what somebody said to a model.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pykvstream.errors import InvalidArgument

_OPEN_PRIVATE = partial(os.open, mode=0o600)
"""No function of Python's, which an interrupt could leave with a file open that nobody closes."""


def path_of(what: str, path: object) -> Path:
    """A path that a file can have. Raises ``InvalidArgument``, beginning with ``what``, for anything else."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if isinstance(name, str) and name and "\0" not in name:
        try:
            os.fsencode(name)
            return Path(name)
        except UnicodeEncodeError:
            pass
    raise InvalidArgument(f"{what} under a path, got {path!r:.200}")


@contextmanager
def replacing(path: Path, *, is_public: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when the block ends; whatever the block raises, the old file stays.

    Raises ``InvalidArgument`` for the name of a folder, a pipe or a device, and ``OSError``.
    """
    mode = _mode_of(path)
    where = Path(os.path.realpath(path))
    # Named before it is there, so that an interrupt leaves nothing behind. A name may take 255 bytes, a letter four.
    temporary = where.with_name(f".{where.name[:48]}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=_OPEN_PRIVATE) as file:
            yield file
            file.flush()
            if mode is None and is_public:
                mode = 0o666 & ~_umask()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, where)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(where.parent)


def check_replaceable(path: Path) -> None:
    """Refuse what ``replacing`` would: Raises ``InvalidArgument`` for what is no file, ``OSError`` for its folder."""
    _mode_of(path)
    where = Path(os.path.realpath(path))
    if not where.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(where.parent))
    if not os.access(where.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(where.parent))


def _mode_of(where: Path) -> int | None:
    """Permissions of the file that is there, None where there is none.

    Asked of the name as it was given: what a link below /proc stands for, a pipe say, has no name of its own.
    """
    try:
        status = os.stat(where)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{str(where)!r} is not a regular file")
    return stat.S_IMODE(status.st_mode)


def _umask() -> int:
    """What the process takes from new files; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the new name outlast a crash."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
