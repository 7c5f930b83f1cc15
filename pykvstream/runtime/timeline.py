"""A timeline of passes, copies, waits, drafts and rounds, as a file for Perfetto or Chrome's ``about:tracing``.

Units: nanoseconds of the monotonic clock here, microseconds since the recording began in the file.
Order: spans of a thread lie inside one another or apart; copies that overlap stand on tracks of their own; so do the
rounds of each session, which go on while other sessions run.
Source: "Trace Event Format" (Google, 2016), complete events (``ph`` X) and names of tracks (``ph`` M).
Holds: ``Timeline``, ``Span``, ``NO_SPAN``, ``check_timeline_path``, ``write_timeline``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.device import Device
from pykvstream.core.timeline import EventKind, keep_events, take_events
from pykvstream.errors import DeviceError, InvalidArgument
from pykvstream.runtime.whole_file import check_replaceable, path_of, replacing

MOST_EVENTS: Final = 1 << 20
"""Of a timeline; what comes later is counted and not kept."""
_DEVICE_EVENTS: Final = 1 << 16
NO_SPAN: Final[AbstractContextManager[None]] = nullcontext()
"""Where nothing is recorded."""
_THREADS, _COPIES, _SESSIONS = 1, 2, 3
_PROCESSES = {_THREADS: "threads", _COPIES: "copies", _SESSIONS: "sessions"}
_NAMES = {
    EventKind.OPEN: "open the pass",
    EventKind.REPLAY: "replay",
    EventKind.CLOSE: "close the pass",
    EventKind.WAIT: "wait for copies",
    EventKind.LOAD: "to the device",
    EventKind.STORE: "to history",
}
Event = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Told:
    name: str
    process: int
    track: int
    begin_ns: int
    end_ns: int
    details: Mapping[str, object]


class Span:
    """Inside a ``with``, something that the calling thread does."""

    __slots__ = ("_begin_ns", "_details", "_name", "_timeline")

    def __init__(self, timeline: Timeline, name: str, details: Mapping[str, object]) -> None:
        self._timeline, self._name, self._details = timeline, name, details

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        details = self._details if kind is None else {**self._details, "error": kind.__name__}
        track = threading.get_native_id()
        self._timeline.tell(_Told(self._name, _THREADS, track, self._begin_ns, time.monotonic_ns(), details))


class Timeline:
    """What is recorded of devices and of whoever uses them, from now to ``stop``."""

    def __init__(self, *devices: Device) -> None:
        self._devices = devices
        self._told: list[_Told] = []
        self._taken: list[NDArray[np.void]] = []
        self._n_taken = 0
        self._n_dropped = 0
        self._n_unkept = dict.fromkeys(devices, 0)
        self._is_on = True
        for device in devices:
            keep_events(device, _DEVICE_EVENTS)
        self._begin_ns = time.monotonic_ns()

    @property
    def n_events(self) -> int:
        """Events that are kept."""
        return len(self._told) + self._n_taken

    @property
    def n_lost(self) -> int:
        """Events that found no room."""
        return self._n_dropped + sum(self._n_unkept.values())

    def span(self, name: str, details: Mapping[str, object]) -> Span:
        """For ``with``: what the calling thread does."""
        return Span(self, name, details)

    def round(self, session: int, begin_ns: int, details: Mapping[str, object]) -> None:
        """A round of a session ends now."""
        self.tell(_Told("round", _SESSIONS, session, begin_ns, time.monotonic_ns(), details))

    def tell(self, told: _Told) -> None:
        """Keep one, if there is room."""
        if not self._is_on or told.begin_ns < self._begin_ns:
            return
        if self.n_events < MOST_EVENTS:
            self._told.append(told)
        else:
            self._n_dropped += 1

    def drain(self) -> None:
        """Take what the devices have kept, so that they have room."""
        for device in self._devices:
            self._drain(device)

    def _drain(self, device: Device) -> None:
        while self._is_on:
            events, self._n_unkept[device] = take_events(device, _DEVICE_EVENTS // 16)
            if not len(events):
                return
            kept = events[: max(MOST_EVENTS - self.n_events, 0)]
            self._n_dropped += len(events) - len(kept)
            self._taken.append(kept.copy())
            self._n_taken += len(kept)

    def stop(self) -> None:
        """Record nothing any more. A second call does nothing."""
        if self._is_on:
            self.drain()
            for device in self._devices:
                keep_events(device, 0)
            self._is_on = False

    def events(self) -> Iterator[Event]:
        """The events of the file: names of tracks, then all others, each track in the order of beginning."""
        told = sorted([*self._told, *self._of_device()], key=lambda each: (each.begin_ns, -each.end_ns))
        yield from _names(told)
        for each in told:
            yield {
                "name": each.name,
                "ph": "X",
                "pid": each.process,
                "tid": each.track,
                "ts": (each.begin_ns - self._begin_ns) / 1000,
                "dur": (each.end_ns - each.begin_ns) / 1000,
                "args": dict(each.details),
            }

    def _of_device(self) -> Iterator[_Told]:
        taken = np.concatenate(self._taken) if self._taken else ()
        copies: dict[EventKind, list[tuple[int, int, int]]] = {EventKind.LOAD: [], EventKind.STORE: []}
        for event in taken:
            kind = EventKind(int(event["kind"]))
            begin_ns, end_ns = int(event["begin_ns"]), int(event["end_ns"])
            if begin_ns < self._begin_ns:
                continue
            if kind in copies:
                copies[kind].append((begin_ns, end_ns, int(event["n_bytes"])))
                continue
            details: dict[str, object] = {"rows": int(event["n_rows"])} if kind is not EventKind.WAIT else {}
            if kind in (EventKind.OPEN, EventKind.REPLAY):
                details["behind"] = int(event["first"])
            yield _Told(_NAMES[kind], _THREADS, int(event["thread"]), begin_ns, end_ns, details)
        first = 0
        for kind, found in copies.items():
            lanes = _lanes(found)
            for (begin_ns, end_ns, n_bytes), lane in zip(found, lanes, strict=True):
                yield _Told(_NAMES[kind], _COPIES, first + lane, begin_ns, end_ns, {"bytes": n_bytes})
            first += max(lanes, default=-1) + 1


def _lanes(copies: list[tuple[int, int, int]]) -> list[int]:
    """For each copy the lowest track on which none is under way; sorts them by their beginning."""
    copies.sort()
    ends: list[int] = []
    lanes: list[int] = []
    for begin_ns, end_ns, _ in copies:
        lane = next((i for i, end in enumerate(ends) if end <= begin_ns), len(ends))
        ends[lane:lane + 1] = [end_ns]
        lanes.append(lane)
    return lanes


def _names(told: list[_Told]) -> Iterator[Event]:
    tracks = {(each.process, each.track): each.name for each in reversed(told)}
    for process in sorted({process for process, _ in tracks}):
        yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": _PROCESSES[process]}}
    for (process, track), name in sorted(tracks.items()):
        words = {_THREADS: f"thread {track}", _COPIES: name, _SESSIONS: f"session {track}"}
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": track, "args": {"name": words[process]}}


def check_timeline_path(path: str | os.PathLike[str]) -> Path:
    """Where ``write_timeline`` could write. Raises ``DeviceError``, ``InvalidArgument``."""
    where = path_of("a timeline is written", path)
    name = str(where)
    try:
        check_replaceable(where)
    except InvalidArgument:
        raise InvalidArgument(f"timeline {name!r}: no regular file") from None
    except OSError as error:
        raise DeviceError(f"timeline {name!r}: cannot be written: {error.strerror}") from None
    return where


def write_timeline(where: Path, timeline: Timeline, about: Mapping[str, object]) -> None:
    """Write the file whole or not at all. Raises ``DeviceError``; what stood there is as it was then."""
    head = {"displayTimeUnit": "ms", "otherData": {**about, "lost_events": timeline.n_lost}}
    try:
        with replacing(where) as file:
            # The last brace of the head closes the file instead.
            file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [')
            separator = b"\n"
            for event in timeline.events():
                file.write(separator + json.dumps(event).encode())
                separator = b",\n"
            file.write(b"\n]}\n")
    except OSError as error:
        raise DeviceError(f"timeline {str(where)!r}: {error.strerror}") from None
