"""A device, its host history memory and its fault hook.

Source: ``include/kvstream/device.h``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pykvstream._ffi import ffi, lib
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check, make_struct
from pykvstream.errors import InvalidArgument, error_from_status


class DeviceFlag(enum.IntFlag):
    """How a device behaves; see ``kvs_device_flag``."""

    NONE = 0
    DEFERRED = lib.KVS_DEVICE_DEFERRED
    POISON_RELEASED = lib.KVS_DEVICE_POISON_RELEASED
    STRICT_HISTORY = lib.KVS_DEVICE_STRICT_HISTORY
    REFERENCE_OPS = lib.KVS_DEVICE_REFERENCE_OPS
    NO_EARLY = lib.KVS_DEVICE_NO_EARLY
    NO_GRAPHS = lib.KVS_DEVICE_NO_GRAPHS


class Isa(enum.IntEnum):
    """Instruction sets of the CPU backend, in rising order."""

    BEST = lib.KVS_ISA_BEST
    REFERENCE = lib.KVS_ISA_REFERENCE
    AVX2 = lib.KVS_ISA_AVX2
    AVX512 = lib.KVS_ISA_AVX512


class Stream(enum.IntEnum):
    """What a deferred device can go on with; see ``kvs_stream``."""

    COMPUTE = lib.KVS_STREAM_COMPUTE
    FREE = lib.KVS_STREAM_FREE
    GATED = lib.KVS_STREAM_GATED


class HookPoint(enum.IntEnum):
    """Points at which an injected fault can strike."""

    ALLOC = lib.KVS_HOOK_ALLOC
    COPY = lib.KVS_HOOK_COPY
    FENCE = lib.KVS_HOOK_FENCE
    OP = lib.KVS_HOOK_OP
    SUBMIT = lib.KVS_HOOK_SUBMIT
    FILE = lib.KVS_HOOK_FILE


_TEXT_BYTES = 512
MAX_THREADS = 256
"""Most compute threads of a device."""

SKIP_COPY: int = lib.KVS_PENDING
"""Answer of a hook at ``HookPoint.COPY``: report success without copying a byte."""

Hook = Callable[[HookPoint, int], int]
"""``hook(point, index)`` returns 0 to go on or a negative status to fail there."""


Chooser = Callable[[frozenset[Stream]], Stream]
"""``chooser(offered)`` returns the stream of a deferred device that goes on; two at least are offered."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device holds and has done; bytes and counts.

    Memory and architecture (90 for sm_90) are a card's, else 0. ``is_lost``: a wait for the card has found no end;
    ``n_left`` pieces of memory, ``left_bytes``, were not freed since a lost card may still use them. ``maps_history``:
    kernels of decoding write rows to host history themselves; else copies bring them there.
    """

    n_threads: int
    isa: Isa
    device_bytes: int
    device_peak_bytes: int
    host_bytes: int
    host_touched_bytes: int
    live_objects: int
    copies: int
    copied_bytes: int
    loaded_bytes: int
    load_ns: int
    memory_bytes: int
    memory_free_bytes: int
    arch: int
    name: str
    is_lost: bool
    n_left: int
    left_bytes: int
    maps_history: bool

    @property
    def has_own_memory(self) -> bool:
        """Whether device memory is not the host's."""
        return self.memory_bytes != 0


class Device(Handle):
    """The CPU as a device, with ``n_threads`` compute threads (0: one per core) and a copy thread.

    Raises ``Unsupported`` for an instruction set that this machine lacks, ``DeviceError`` where no thread can be
    started, ``HostMemoryError``.
    """

    __slots__ = ("_chooser_handle", "_hook_handle")

    def __init__(
        self,
        n_threads: int = 0,
        *,
        flags: DeviceFlag = DeviceFlag.NONE,
        isa: Isa = Isa.BEST,
        schedule_seed: int = 0,
    ) -> None:
        if isinstance(n_threads, bool) or not isinstance(n_threads, int) or not 0 <= n_threads <= MAX_THREADS:
            raise InvalidArgument(f"threads must be an integer from 0 to {MAX_THREADS}, got {n_threads!r}")
        desc = make_struct(
            "kvs_device_desc",
            flags=int(flags),
            backend=lib.KVS_BACKEND_CPU,
            n_threads=n_threads,
            isa=int(isa),
            schedule_seed=schedule_seed,
        )
        threads = f"{n_threads} compute thread{'s' if n_threads > 1 else ''}"
        wanted = threads if n_threads else "one compute thread per core"
        cell = make_device(desc, f"no device with {wanted} and a copy thread")
        self._hook_handle: Any = None
        self._chooser_handle: Any = None
        super().__init__(cell)

    @property
    def load_ns(self) -> int:
        """Nanoseconds of copies to the device: what ``info`` says of them, at less cost."""
        info = make_struct("kvs_device_info")
        check(lib.kvs_device_get_info(self.ptr, info), self.ptr)
        load_ns: int = info.load_ns
        return load_ns

    @property
    def info(self) -> DeviceInfo:
        info = make_struct("kvs_device_info")
        check(lib.kvs_device_get_info(self.ptr, info), self.ptr)
        return DeviceInfo(
            n_threads=info.n_threads,
            isa=Isa(info.isa),
            device_bytes=info.device_bytes,
            device_peak_bytes=info.device_peak_bytes,
            host_bytes=info.host_bytes,
            host_touched_bytes=info.host_touched_bytes,
            live_objects=info.live_objects,
            copies=info.copies,
            copied_bytes=info.copied_bytes,
            loaded_bytes=info.loaded_bytes,
            load_ns=info.load_ns,
            memory_bytes=info.memory_bytes,
            memory_free_bytes=info.memory_free_bytes,
            arch=info.arch,
            name=ffi.string(info.name).decode("utf-8", "replace"),
            is_lost=bool(info.is_lost),
            n_left=info.n_left,
            left_bytes=info.left_bytes,
            maps_history=bool(info.maps_history),
        )

    def set_hook(self, hook: Hook | None) -> None:
        """Install or remove the fault hook; never while a pass runs."""
        if hook is None:
            check(lib.kvs_device_set_hook(self.ptr, ffi.NULL, ffi.NULL), self.ptr)
            self._hook_handle = None
            return
        handle = ffi.new_handle(hook)
        check(lib.kvs_device_set_hook(self.ptr, lib.kvs_py_hook, handle), self.ptr)
        self._hook_handle = handle

    def before_file(self) -> None:
        """Let the hook strike before a file is read. Raises what it answers."""
        check(lib.kvs_device_ask_hook(self.ptr, lib.KVS_HOOK_FILE), self.ptr)

    def set_chooser(self, chooser: Chooser | None) -> None:
        """Deferred mode: let ``chooser`` state the order of copies, or the seed again."""
        if chooser is None:
            check(lib.kvs_device_set_chooser(self.ptr, ffi.NULL, ffi.NULL), self.ptr)
            self._chooser_handle = None
            return
        handle = ffi.new_handle(chooser)
        check(lib.kvs_device_set_chooser(self.ptr, lib.kvs_py_choose, handle), self.ptr)
        self._chooser_handle = handle

    def run_copies(self, limit: int) -> int:
        """Deferred mode: run up to ``limit`` queued copies; returns how many ran."""
        ran = ffi.new("uint32_t *")
        check(lib.kvs_device_run_copies(self.ptr, limit, ran), self.ptr)
        count: int = ran[0]
        return count

    def drain(self) -> None:
        """Wait until both copy queues are empty."""
        check(lib.kvs_device_drain(self.ptr), self.ptr)


def make_device(desc: Any, refusal: str) -> Any:
    """A cell with a device. Raises what ``refusal`` and the core's text, or the meaning of its status, say."""
    text = ffi.new("char[]", _TEXT_BYTES)
    desc.failure = text
    desc.failure_bytes = _TEXT_BYTES
    cell = new_cell("device")
    status = lib.kvs_device_create(desc, cell)
    if status >= 0:
        return cell
    lacks = {
        lib.KVS_EIO: "the system starts no more threads: their number is limited, or memory for their stacks is",
        lib.KVS_ENOMEM: "the system has no memory for it",
        lib.KVS_EUNSUPPORTED: "this machine lacks the instruction set",
    }.get(status, "it was described wrongly")
    why: str = lacks if desc.backend == lib.KVS_BACKEND_CPU else ffi.string(text).decode("utf-8", "replace") or lacks
    name: str = ffi.string(lib.kvs_status_name(status)).decode()
    raise error_from_status(status, f"{refusal}: {why} [{name}]")


@ffi.def_extern(name="kvs_py_hook", error=lib.KVS_EINVAL)  # type: ignore[untyped-decorator]
def _run_hook(user: Any, point: int, index: int) -> int:
    hook: Hook = ffi.from_handle(user)
    return hook(HookPoint(point), index)


@ffi.def_extern(name="kvs_py_choose", error=lib.KVS_STREAM_COMPUTE)  # type: ignore[untyped-decorator]
def _run_chooser(user: Any, offered: int) -> int:
    chooser: Chooser = ffi.from_handle(user)
    return int(chooser(frozenset(each for each in Stream if offered >> each & 1)))
