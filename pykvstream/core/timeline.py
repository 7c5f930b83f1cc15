"""What a device did and when: passes, waits and copies.

Units: nanoseconds of the system's monotonic clock, bytes.
Source: ``include/kvstream/timeline.h``.
Holds: ``keep_events``, ``take_events``, ``EventKind``, ``EVENT``.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.status import check


class EventKind(enum.IntEnum):
    """What an event tells of; see ``kvs_event_kind``."""

    OPEN = lib.KVS_EVENT_OPEN
    REPLAY = lib.KVS_EVENT_REPLAY
    CLOSE = lib.KVS_EVENT_CLOSE
    WAIT = lib.KVS_EVENT_WAIT
    LOAD = lib.KVS_EVENT_LOAD
    STORE = lib.KVS_EVENT_STORE


EVENT: Final = np.dtype(
    [
        ("begin_ns", np.uint64),
        ("end_ns", np.uint64),
        ("n_bytes", np.uint64),
        ("first", np.uint64),
        ("n_rows", np.uint32),
        ("kind", np.uint32),
        ("thread", np.uint64),
    ]
)
"""``kvs_event``, field by field."""


def keep_events(device: Device, capacity: int) -> None:
    """Keep up to ``capacity`` events from now on, 0: none. Raises ``HostMemoryError``."""
    check(lib.kvs_timeline_keep(device.ptr, capacity), device.ptr)


def take_events(device: Device, capacity: int) -> tuple[NDArray[np.void], int]:
    """The oldest events, ``capacity`` at most, as an array of ``EVENT``; and how many found no room so far."""
    events = np.empty(capacity, EVENT)
    n_events, n_lost = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    into = ffi.cast("kvs_event *", ffi.from_buffer(events))
    check(lib.kvs_timeline_take(device.ptr, into, capacity, n_events, n_lost), device.ptr)
    return events[: n_events[0]], int(n_lost[0])
