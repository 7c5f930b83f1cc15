"""Host memory and context sizes are refused early, by name, with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvstream.errors import HostMemoryError, InvalidArgument
from pykvstream.runtime.admission import (
    HostMemory,
    check_context,
    check_host_memory,
    host_memory_available,
)

MIB = 1 << 20
V1_UNLIMITED = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, files: dict[str, str] | None = None) -> Path:
    meminfo = f"MemTotal:       {8000 * 1024} kB\nMemFree: 1 kB\nMemAvailable:   {6000 * 1024} kB\n"
    plain = {"proc/meminfo": meminfo, "proc/self/status": "CapEff:\t0000000000000000\n"}
    return write(root, {**plain, **(files or {})})


def read(root: Path, lock_limit: int | None = None) -> HostMemory:
    return host_memory_available(root, lock_limit=lambda: lock_limit)


def test_meminfo_gives_total_and_available(tmp_path: Path) -> None:
    assert read(machine(tmp_path)) == HostMemory(8000 * MIB, 6000 * MIB)


def test_cgroup_v2_limit_counts_droppable_cache_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user/chat"
    memory = read(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user/chat\n",
                f"{group}/memory.max": f"{1000 * MIB}\n",
                f"{group}/memory.current": f"{700 * MIB}\n",
                f"{group}/memory.stat": f"anon 5\ninactive_file {400 * MIB}\nactive_file 9\n",
            },
        )
    )
    assert (memory.cgroup_limit, memory.cgroup_used) == (1000 * MIB, 300 * MIB)
    assert memory.cgroup_available == 700 * MIB


def test_tightest_group_on_the_way_up_binds(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    memory = read(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{base}/a/b/memory.max": "max\n",
                f"{base}/a/memory.max": f"{500 * MIB}\n",
                f"{base}/a/memory.current": f"{450 * MIB}\n",
                f"{base}/memory.max": f"{400 * MIB}\n",
                f"{base}/memory.current": "0\n",
            },
        )
    )
    assert memory.cgroup_available == 50 * MIB


def test_cgroup_v1_limit_is_found_beside_other_controllers(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    memory = read(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory,hugetlb:/job\n3:cpu:/job\n0::/\n",
                f"{base}/job/memory.limit_in_bytes": f"{300 * MIB}\n",
                f"{base}/job/memory.usage_in_bytes": f"{100 * MIB}\n",
                f"{base}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {30 * MIB}\n",
                f"{base}/memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
            },
        )
    )
    assert (memory.cgroup_limit, memory.cgroup_used) == (300 * MIB, 70 * MIB)


def test_cgroup_path_that_only_the_host_sees_falls_back_to_the_mount(tmp_path: Path) -> None:
    memory = read(
        machine(
            tmp_path,
            {
                "proc/self/cgroup": "0::/../host/slice\n",
                "sys/fs/cgroup/memory.max": f"{256 * MIB}\n",
                "sys/fs/cgroup/memory.current": "0\n",
            },
        )
    )
    assert memory.cgroup_available == 256 * MIB


@pytest.mark.parametrize("limit", ["max\n", V1_UNLIMITED, "", "many\n"])
def test_a_group_without_limit_is_none(tmp_path: Path, limit: str) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n0::/\n",
        "sys/fs/cgroup/memory.max": limit,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
    }
    assert read(machine(tmp_path, files)).cgroup_limit is None


def test_lock_limit_does_not_bind_who_may_lock_everything(tmp_path: Path) -> None:
    assert read(machine(tmp_path), 8 * MIB).lock_limit == 8 * MIB
    privileged = {"proc/self/status": f"Name:\tx\nCapEff:\t{1 << 14:016x}\n"}
    assert read(machine(tmp_path, privileged), 8 * MIB).lock_limit is None


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "nonsense\n"}, {"proc/meminfo": "MemTotal: x kB\n"}])
def test_without_meminfo_sysconf_answers(tmp_path: Path, files: dict[str, str]) -> None:
    memory = read(write(tmp_path, files))
    assert 0 < memory.available <= memory.total
    assert memory.cgroup_limit is None


def test_this_machine_has_memory() -> None:
    memory = host_memory_available()
    assert 0 < memory.available <= memory.total


LIMITED = HostMemory(8000 * MIB, 6000 * MIB, 500 * MIB, 200 * MIB, lock_limit=64 * MIB)


def test_what_fits_exactly_is_admitted() -> None:
    check_host_memory(300 * MIB, LIMITED, pinned=False)
    check_host_memory(64 * MIB, LIMITED, pinned=True)
    check_host_memory(6000 * MIB, HostMemory(8000 * MIB, 6000 * MIB), pinned=True)


@pytest.mark.parametrize(
    ("memory", "pinned", "have", "limit"),
    [
        (LIMITED, False, 300 * MIB, "control group limit"),
        (LIMITED, True, 64 * MIB, "lock limit"),
        (HostMemory(8000 * MIB, 6000 * MIB, lock_limit=MIB), False, 6000 * MIB, "free memory"),
        (HostMemory(8000 * MIB, 10 * MIB, 500 * MIB, 0), True, 10 * MIB, "free memory"),
        (HostMemory(8000 * MIB, 10 * MIB, 500 * MIB, 600 * MIB), False, 0, "control group limit"),
    ],
)
def test_one_byte_more_is_refused_by_the_binding_limit(
    memory: HostMemory, pinned: bool, have: int, limit: str
) -> None:
    with pytest.raises(HostMemoryError) as refused:
        check_host_memory(have + 1, memory, pinned=pinned)
    message = str(refused.value)
    assert f"({have + 1} bytes)" in message and f"({have} bytes)" in message
    assert limit in message
    assert isinstance(refused.value, MemoryError)


def test_negative_need_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        check_host_memory(-1, LIMITED, pinned=False)


@pytest.mark.parametrize("ctx_tokens", [1, 255, 256, 257, 511, 512, 513, 8191, 8192])
def test_context_of_any_size_up_to_the_models_is_allowed(ctx_tokens: int) -> None:
    check_context(ctx_tokens, 8192)


@pytest.mark.parametrize("ctx_tokens", [0, -1, -(2**63), True, 1.5, "512"])
def test_context_without_tokens_is_refused(ctx_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="ctx_size"):
        check_context(ctx_tokens, 8192)


@pytest.mark.parametrize("ctx_tokens", [8193, 2**63])
def test_context_beyond_the_models_is_refused_with_both_numbers(ctx_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{ctx_tokens} .*context_length of 8192"):
        check_context(ctx_tokens, 8192)
