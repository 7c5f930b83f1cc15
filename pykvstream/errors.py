"""The exception hierarchy: one class for each negative ``kvs_status`` of the C ABI.

Holds: ``KvStreamError`` and its subclasses, and ``error_from_status``, the only place where a status code turns
into an exception. Every class carries ``status``, the number of ``enum kvs_status`` in ``include/kvstream/base.h``.
Classes that have a natural built-in parent inherit it too, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations

from typing import ClassVar


class KvStreamError(Exception):
    """Base of everything this package raises on purpose."""

    status: ClassVar[int] = 0


class InvalidArgument(KvStreamError, ValueError):
    """An argument is out of its documented range (``KVS_EINVAL``)."""

    status = -1


class HostMemoryError(KvStreamError, MemoryError):
    """Host memory cannot be had; the message has the bytes needed and available (``KVS_ENOMEM``)."""

    status = -2


class SizeOverflow(KvStreamError, OverflowError):
    """A size computation does not fit its type (``KVS_EOVERFLOW``)."""

    status = -3


class NoSpace(KvStreamError):
    """A bounded region (arena, ring, pool) cannot hold what was asked (``KVS_ENOSPACE``)."""

    status = -4


class Busy(KvStreamError):
    """A lease, a fence or another operation still holds the object (``KVS_EBUSY``)."""

    status = -5


class Stale(KvStreamError):
    """An epoch or a generation moved on since the object was made (``KVS_ESTALE``)."""

    status = -6


class Closed(KvStreamError):
    """The object was released; it only waits for its last holder (``KVS_ECLOSED``)."""

    status = -7


class Poisoned(KvStreamError):
    """A failure left device state unknown; rebuild it from host history (``KVS_EPOISONED``)."""

    status = -8


class Cancelled(KvStreamError):
    """``cancel()`` stopped the operation between two steps; nothing was lost (``KVS_ECANCELLED``)."""

    status = -9


class Unsupported(KvStreamError, NotImplementedError):
    """A type, width, architecture or feature is refused by name (``KVS_EUNSUPPORTED``)."""

    status = -10


class NotFound(KvStreamError, LookupError):
    """No object has this id or name (``KVS_ENOTFOUND``)."""

    status = -11


class DeviceError(KvStreamError, OSError):
    """A copy, a launch or a system call failed (``KVS_EIO``)."""

    status = -12


class NumericError(KvStreamError, ArithmeticError):
    """Logits hold NaN or infinity; the message has the position (``KVS_ENUMERIC``)."""

    status = -13


class ContextFull(KvStreamError):
    """The sequence holds as many tokens as its context allows; it stays usable (``KVS_ECONTEXT``)."""

    status = -14


class FormatError(KvStreamError, ValueError):
    """A file is malformed (``KVS_EFORMAT``).

    ``offset`` is the byte position in the file where reading failed and ``key`` the metadata key or tensor name
    concerned; either is ``None`` where it does not apply. Both are part of the message.
    """

    status = -15

    def __init__(self, message: str, *, offset: int | None = None, key: str | None = None) -> None:
        where = [] if offset is None else [f"offset {offset}"]
        where += [] if key is None else [f"key {key!r}"]
        super().__init__(f"{message} ({', '.join(where)})" if where else message)
        self.offset = offset
        self.key = key


class IntegrityError(KvStreamError, AssertionError):
    """``*_check_integrity`` found a broken invariant: a bug in this library (``KVS_ECORRUPT``)."""

    status = -16


_BY_STATUS: dict[int, type[KvStreamError]] = {
    cls.status: cls
    for cls in (
        InvalidArgument, HostMemoryError, SizeOverflow, NoSpace, Busy, Stale, Closed, Poisoned, Cancelled,
        Unsupported, NotFound, DeviceError, NumericError, ContextFull, FormatError, IntegrityError,
    )
}  # fmt: skip


def error_from_status(status: int, message: str) -> KvStreamError:
    """Return the exception for a negative ``kvs_status``, unraised, with ``message`` as its text."""
    return _BY_STATUS.get(status, KvStreamError)(message)
