"""Refusals before the first token: host memory for the whole context, and context sizes a model cannot have.

Units: bytes and tokens.
Source: proc(5) (``meminfo``, ``self/status``), cgroups(7), the kernel's cgroup-v1 memory and cgroup-v2 pages.
Holds: what ``check_host_memory`` admits fits every limit that was found. A limit that the machine does not
    have is None, never a large number.

The history grows with the conversation, but is checked at start as a whole: running out of memory at the
hundred-thousandth token would lose a conversation, refusing it costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pykvstream.errors import HostMemoryError, InvalidArgument, NoSpace, Unsupported
from pykvstream.runtime.layout import with_mib

CARD_RESERVE_BYTES = 256 << 20
"""Left free on a card: kernels, the step block, rows of output on their way to the caller."""
_CAP_IPC_LOCK = 14
_UNLIMITED_FROM = 1 << 60
"""A cgroup of version 1 without a limit reports the largest page-aligned number instead of a word."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the machine, the tightest control group around this process, and its lock limit give.

    ``cgroup_used`` leaves out file pages that the kernel drops before it refuses memory: a model file's, say.
    """

    total: int
    available: int
    cgroup_limit: int | None = None
    cgroup_used: int | None = None
    lock_limit: int | None = None

    @property
    def cgroup_available(self) -> int | None:
        if self.cgroup_limit is None:
            return None
        return max(0, self.cgroup_limit - (self.cgroup_used or 0))

    def limits(self, *, pinned: bool) -> dict[str, int]:
        """Return what each limit leaves, by the name that a refusal carries."""
        found = {
            "free memory": self.available,
            "control group limit": self.cgroup_available,
            "lock limit (RLIMIT_MEMLOCK)": self.lock_limit if pinned else None,
        }
        return {name: n_bytes for name, n_bytes in found.items() if n_bytes is not None}


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _fields(text: str | None) -> dict[str, str]:
    """Return ``name value`` or ``name: value`` lines as a mapping; the value's first word."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0].rstrip(":"): pair[1] for pair in pairs if len(pair) >= 2}


def _number(text: str | None) -> int | None:
    word = (text or "").strip()
    return int(word) if word.isascii() and word.isdigit() else None


def _machine(root: Path) -> tuple[int, int]:
    """Return total and available bytes."""
    fields = {name: _number(value) for name, value in _fields(_read(root / "proc/meminfo")).items()}
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if total is not None and available is not None:
        return total * 1024, available * 1024
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        raise Unsupported("host memory: neither /proc/meminfo nor os.sysconf tells how much this machine has")
    page_bytes, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in names else pages
    return pages * page_bytes, free * page_bytes


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the groups around this process that may limit memory, inner ones first."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        elif number == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        else:
            continue
        # In a container the path may name a group that only the host sees; its limit then stands at the base.
        parts = [part for part in path.split("/") if part and part != ".."]
        for length in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:length])


def _cgroup(folder: Path) -> tuple[int, int] | None:
    """Return limit and use of one group, None where it has no limit."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(_read(folder / limit_name))
        if limit is None or limit >= _UNLIMITED_FROM:
            continue
        used = _number(_read(folder / used_name)) or 0
        droppable = _number(_fields(_read(folder / "memory.stat")).get(cache_name)) or 0
        return limit, max(0, used - droppable)
    return None


def _may_lock_without_limit(root: Path) -> bool:
    try:
        capabilities = int(_fields(_read(root / "proc/self/status")).get("CapEff", "0"), 16)
    except ValueError:
        return False
    return bool(capabilities >> _CAP_IPC_LOCK & 1)


def process_lock_limit() -> int | None:
    """Return the bytes this process may lock, None without a limit or on a system that has none."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def host_memory_available(
    root: Path = Path("/"), *, lock_limit: Callable[[], int | None] = process_lock_limit
) -> HostMemory:
    """Read what this process can have. ``root`` is where ``proc`` and ``sys`` are found.

    ``Unsupported`` where the system tells nothing about its memory.
    """
    total, available = _machine(root)
    groups = [group for group in map(_cgroup, _cgroup_folders(root)) if group is not None]
    limit, used = min(groups, key=lambda group: group[0] - group[1], default=(None, None))
    return HostMemory(
        total=total,
        available=available,
        cgroup_limit=limit,
        cgroup_used=used,
        lock_limit=None if _may_lock_without_limit(root) else lock_limit(),
    )


def check_host_memory(need_bytes: int, memory: HostMemory, *, pinned: bool) -> None:
    """Refuse with ``HostMemoryError`` what does not fit, naming both numbers and the limit that binds.

    ``need_bytes`` are those of the full context (``CacheShape.history_bytes``); the lock limit counts where
    they are pinned.
    """
    if need_bytes < 0:
        raise InvalidArgument(f"need_bytes must not be negative, got {need_bytes}")
    limits = memory.limits(pinned=pinned)
    name = min(limits, key=lambda limit: limits[limit])
    if need_bytes > limits[name]:
        kind = "pinned host memory" if pinned else "host memory"
        raise HostMemoryError(
            f"{kind} too small for weights, arena and full context: need {with_mib(need_bytes)},"
            f" have {with_mib(limits[name])} by the {name}"
        )


def check_device_memory(need_bytes: int, free_bytes: int) -> None:
    """Refuse with ``NoSpace`` what does not fit on a card beside what its driver takes, naming all numbers."""
    if need_bytes + CARD_RESERVE_BYTES > free_bytes:
        raise NoSpace(
            f"device memory too small for weights, arena and recurrent state: need {with_mib(need_bytes)} and"
            f" {with_mib(CARD_RESERVE_BYTES)} for kernels and output rows, have {with_mib(free_bytes)} free"
        )


def check_context(ctx_tokens: int, model_ctx: int) -> None:
    """Refuse a context of no tokens, or of more than the model was trained on.

    Positions beyond ``context_length`` are rotated by angles that no weight has seen: the text degrades
    without an error, which is a silent fallback. Every size from 1 to ``model_ctx`` is served as asked,
    without rounding to pages.
    """
    if isinstance(ctx_tokens, bool) or not isinstance(ctx_tokens, int) or ctx_tokens < 1:
        raise InvalidArgument(f"ctx_size must be an integer of at least 1 token, got {ctx_tokens!r}")
    if ctx_tokens > model_ctx:
        raise InvalidArgument(
            f"ctx_size of {ctx_tokens} tokens exceeds the model's context_length of {model_ctx}"
        )
