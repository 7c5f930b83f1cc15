"""A device that computes nothing: it takes virtual time and finds accesses that no fence orders.

Units: times are virtual nanoseconds, rates bytes per second, 0 without limit.
Source: ``include/kvstream/trace.h``.
Holds: ``TraceDevice`` for everything that takes a ``Device``; ``TraceWeight`` for weights that need no bytes;
``chrome_events`` for timeline viewers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device, DeviceFlag
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.host import Host
from pykvstream.core.status import check, make_struct
from pykvstream.core.tape import Weight, WeightLayout

_TEXT_BYTES = 1024
_NO_LAYER: int = lib.KVS_NONE
_NOT_FOUND: int = lib.KVS_ENOTFOUND


class TraceStream(enum.IntEnum):
    """What runs in order; the first two copy streams share one engine."""

    COMPUTE = lib.KVS_TRACE_COMPUTE
    LOAD = lib.KVS_TRACE_LOAD
    RING = lib.KVS_TRACE_RING
    OUT = lib.KVS_TRACE_OUT


class TraceFault(enum.IntEnum):
    """A fence taken out of a schedule that is right; see ``kvs_trace_fault``."""

    NONE = lib.KVS_TRACE_FAULT_NONE
    DROP_GATE = lib.KVS_TRACE_DROP_GATE
    EARLY_GATE = lib.KVS_TRACE_EARLY_GATE
    DROP_WAIT = lib.KVS_TRACE_DROP_WAIT
    DROP_LOOK = lib.KVS_TRACE_DROP_LOOK
    DROP_ADVANCE = lib.KVS_TRACE_DROP_ADVANCE
    EARLY_DONE = lib.KVS_TRACE_EARLY_DONE
    MISPLACE_COPY = lib.KVS_TRACE_MISPLACE_COPY
    LATE_READ = lib.KVS_TRACE_LATE_READ
    EARLY_COPY = lib.KVS_TRACE_EARLY_COPY


@dataclass(frozen=True, slots=True)
class TraceCosts:
    """What things take; see ``kvs_trace_costs``."""

    device_bytes_per_s: int = 0
    copy_in_bytes_per_s: int = 0
    copy_out_bytes_per_s: int = 0
    op_ns: int = 0
    wave_ns: int = 0
    copy_ns: int = 0
    pass_ns: int = 0
    jitter_ns: int = 0
    seed: int = 0
    one_in_queue: bool = False


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Sums over passes, or one pass; see ``kvs_trace_report``."""

    n_hazards: int
    n_passes: int
    begin_ns: int
    end_ns: int
    n_ops: int
    n_waves: int
    copies_in: int
    copies_out: int
    bytes_in: int
    bytes_out: int
    in_busy_ns: int
    out_busy_ns: int
    overlap_ns: int
    latency_ns: int
    weight_ns: int
    page_ns: int
    work_ns: int
    load_wait_ns: int
    ring_wait_ns: int
    out_wait_ns: int
    host_ns: int

    @property
    def span_ns(self) -> int:
        """The critical path: the time of the compute stream, by whatever cause."""
        return self.end_ns - self.begin_ns

    @property
    def in_idle_ns(self) -> int:
        """Time in which nothing came from history."""
        return self.span_ns - self.in_busy_ns

    @property
    def bytes_per_copy_in(self) -> float:
        return self.bytes_in / self.copies_in if self.copies_in else 0.0


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An operation, wave or copy. ``pages`` and ``slots`` are ranges, empty where none are concerned."""

    stream: TraceStream
    name: str
    begin_ns: int
    end_ns: int
    n_bytes: int
    layer: int | None
    pages: range
    slots: range


def _to_report(struct: Any) -> TraceReport:
    return TraceReport(*(getattr(struct, each.name) for each in fields(TraceReport)))


class TraceDevice(Device):
    """A device without arithmetic and without bytes. Released pages are marked unless ``flags`` say otherwise."""

    __slots__ = ()

    def __init__(
        self, costs: TraceCosts | None = None, *, flags: DeviceFlag = DeviceFlag.POISON_RELEASED
    ) -> None:
        desc = make_struct("kvs_device_desc", flags=int(flags), backend=lib.KVS_BACKEND_TRACE)
        cell = new_cell("device")
        check(lib.kvs_device_create(desc, cell))
        self._hook_handle = None
        self._chooser_handle = None
        Handle.__init__(self, cell)
        if costs is not None:
            self.set_costs(costs)

    def set_costs(self, costs: TraceCosts) -> None:
        """Replace the costs of what begins from now on."""
        values = {each.name: getattr(costs, each.name) for each in fields(TraceCosts) if each.name != "one_in_queue"}
        flags = lib.KVS_TRACE_ONE_IN_QUEUE if costs.one_in_queue else 0
        check(lib.kvs_trace_set_costs(self.ptr, make_struct("kvs_trace_costs", flags=flags, **values)), self.ptr)

    def plant(self, fault: TraceFault, index: int = 0) -> None:
        """Take out the ``index``-th fence of a kind from now on."""
        check(lib.kvs_trace_plant(self.ptr, int(fault), index), self.ptr)

    @property
    def report(self) -> TraceReport:
        """Sums over the passes that ended since the last reset."""
        out = make_struct("kvs_trace_report")
        check(lib.kvs_trace_get_report(self.ptr, out), self.ptr)
        return _to_report(out)

    def passes(self) -> list[TraceReport]:
        """The passes that ended since the last reset, one by one."""
        out = make_struct("kvs_trace_report")
        found = []
        for index in range(self.report.n_passes):
            check(lib.kvs_trace_get_pass(self.ptr, index, out), self.ptr)
            found.append(_to_report(out))
        return found

    def hazards(self) -> list[str]:
        """Take the sentences of all hazards that were found and not taken yet."""
        text = ffi.new("char[]", _TEXT_BYTES)
        found: list[str] = []
        while (status := lib.kvs_trace_next_hazard(self.ptr, text, _TEXT_BYTES)) != _NOT_FOUND:
            check(status, self.ptr)
            found.append(ffi.string(text).decode())
        return found

    def events(self) -> list[TraceEvent]:
        """Operations, waves and copies since the last reset."""
        out = make_struct("kvs_trace_event")
        found: list[TraceEvent] = []
        while (status := lib.kvs_trace_get_event(self.ptr, len(found), out)) != _NOT_FOUND:
            check(status, self.ptr)
            found.append(
                TraceEvent(
                    TraceStream(out.stream),
                    ffi.string(out.name).decode(),
                    out.begin_ns,
                    out.end_ns,
                    out.n_bytes,
                    None if out.layer == _NO_LAYER else out.layer,
                    range(out.page_begin, out.page_end),
                    range(out.first_slot, out.first_slot + out.n_slots),
                )
            )
        return found

    def reset(self) -> None:
        """Forget hazards, measures and events; memory, queues and the clock stay."""
        check(lib.kvs_trace_reset(self.ptr), self.ptr)

    def mark_history(self, host: Host, offset: int, n_bytes: int) -> None:
        """Call a range of host history written."""
        check(lib.kvs_trace_mark_history(host.ptr, offset, n_bytes), self.ptr)


class TraceWeight(Weight):
    """A weight of a trace device: a shape and a type; its bytes are never read."""

    __slots__ = ()

    def __init__(self, device: TraceDevice, type_id: int, k: int, n: int, layout: WeightLayout) -> None:
        cell = new_cell("weight")
        rows = ffi.new("char[]", 1)
        check(lib.kvs_weight_create(device.ptr, type_id, k, n, rows, int(layout), cell), device.ptr)
        self._rows = rows
        self.k = k
        self.n = n
        Handle.__init__(self, cell)


def _arguments(event: TraceEvent) -> dict[str, int | str]:
    found: dict[str, int | str] = {"bytes": event.n_bytes}
    if event.layer is not None:
        found["layer"] = event.layer
    if event.pages:
        found["pages"] = f"{event.pages.start} to {event.pages.stop - 1}"
    if event.slots:
        found["slots"] = f"{event.slots.start} to {event.slots.stop - 1}"
    return found


def chrome_events(events: Iterable[TraceEvent]) -> list[dict[str, Any]]:
    """Events as Perfetto and Chrome's trace viewer read them: ``{"traceEvents": chrome_events(...)}`` as JSON."""
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": int(stream), "args": {"name": stream.name.lower()}}
        for stream in TraceStream
    ]
    for event in events:
        layer = "" if event.layer is None else f" {event.layer}"
        found.append(
            {
                "ph": "X",
                "name": f"{event.name}{layer}",
                "pid": 1,
                "tid": int(event.stream),
                "ts": event.begin_ns / 1000,
                "dur": (event.end_ns - event.begin_ns) / 1000,
                "args": _arguments(event),
            }
        )
    return found
