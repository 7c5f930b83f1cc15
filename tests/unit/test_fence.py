"""Fences and leases as Python handles: completion sticks, consumed handles say so, closing order is free."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator

import pytest

from pykvstream.core.arena import Arena
from pykvstream.core.device import Device, HookPoint
from pykvstream.core.fence import Fence
from pykvstream.errors import (
    Busy,
    Cancelled,
    Closed,
    DeviceError,
    HostMemoryError,
    InvalidArgument,
    NotFound,
    NumericError,
)


@pytest.fixture
def device() -> Iterator[Device]:
    with Device(1) as made:
        yield made
        assert made.info.live_objects == 0
        assert made.info.device_bytes == 0


def _arena(device: Device) -> Arena:
    arena = Arena(device, 4096)
    arena.begin()
    arena.reserve(1, 1024, persistent=True)
    arena.commit()
    return arena


def test_fence_completes_once(device: Device) -> None:
    with Fence(device) as fence:
        assert not fence.is_complete
        assert not fence.wait(0)
        assert not fence.wait(1000)
        fence.signal()
        assert fence.is_complete
        assert fence.wait()
        with pytest.raises(InvalidArgument, match="completed before"):
            fence.signal()


@pytest.mark.parametrize(("status", "error"), [(-12, DeviceError), (-13, NumericError), (-9, Cancelled)])
def test_status_of_a_fence_sticks(device: Device, status: int, error: type[Exception]) -> None:
    with Fence(device) as fence:
        fence.signal(status)
        for _ in range(2):
            with pytest.raises(error):
                fence.wait()
        with pytest.raises(InvalidArgument, match="completed before"):
            fence.signal()
        with pytest.raises(error):
            _ = fence.is_complete


def test_fence_refuses_to_complete_with_a_positive_status(device: Device) -> None:
    with Fence(device) as fence:
        with pytest.raises(InvalidArgument):
            fence.signal(1)
        assert not fence.is_complete


def test_many_threads_wait_for_one_signal(device: Device) -> None:
    with Fence(device) as fence:
        seen: list[bool] = []
        threads = [threading.Thread(target=lambda: seen.append(fence.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        fence.signal()
        for thread in threads:
            thread.join()
        assert seen == [True] * 4


def test_retired_lease_is_consumed_and_drains_until_its_fence(device: Device) -> None:
    with _arena(device) as arena, Fence(device) as fence:
        lease = arena.acquire(1)
        lease.retire(fence)
        assert lease.closed
        for use in (lambda: lease.info, lambda: lease.retire(fence), lambda: lease.claim()):
            with pytest.raises(Closed):
                use()
        lease.close()
        assert (arena.info.n_leases, arena.info.n_draining) == (0, 1)
        arena.begin()
        with pytest.raises(Busy, match="1 draining"):
            arena.commit()
        fence.signal()
        arena.begin()
        arena.commit()
        assert arena.info.n_draining == 0


def test_retire_is_refused_while_other_claims_exist(device: Device) -> None:
    with _arena(device) as arena, Fence(device) as fence, arena.acquire(1) as lease:
        with lease.claim() as second:
            assert arena.info.n_leases == 1
            with pytest.raises(Busy, match="2 claims"):
                lease.retire(fence)
            assert not lease.closed
            assert second.info == lease.info
        lease.retire(fence)
        fence.signal()


def test_fence_closed_unsignalled_lets_its_leases_go(device: Device) -> None:
    with _arena(device) as arena:
        fence = Fence(device)
        arena.acquire(1).retire(fence)
        assert arena.info.n_draining == 1
        fence.close()
        assert arena.info.n_draining == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_parents_and_children_close_in_any_order(order: tuple[int, int, int]) -> None:
    device = Device(1)
    arena = _arena(device)
    lease = arena.acquire(1)
    handles = (device, arena, lease)
    for index in order:
        handles[index].close()
    assert all(handle.closed for handle in handles)
    with pytest.raises(Closed):
        _ = arena.info


def test_released_arena_keeps_its_leases_alive(device: Device) -> None:
    arena = _arena(device)
    with arena.acquire(1) as lease:
        arena.close()
        assert device.info.device_bytes == 4096
        assert lease.info.size_bytes == 1024


def test_unclosed_handle_is_given_back_with_a_warning(device: Device) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fence = Fence(device)
        del fence
        gc.collect()
    assert [str(entry.message) for entry in caught] == ["Fence was never closed"]
    assert device.info.live_objects == 0


def test_hook_fails_the_creation_of_fences_and_leases(device: Device) -> None:
    with _arena(device) as arena:
        seen: list[HookPoint] = []

        def hook(point: HookPoint, _index: int) -> int:
            seen.append(point)
            return DeviceError.status if point is HookPoint.FENCE else HostMemoryError.status

        device.set_hook(hook)
        with pytest.raises(DeviceError):
            Fence(device)
        with pytest.raises(HostMemoryError):
            arena.acquire(1)
        device.set_hook(None)
        assert seen == [HookPoint.FENCE, HookPoint.ALLOC]
        assert arena.info.n_leases == 0


def test_errors_name_what_is_missing_and_belong_to_their_thread(device: Device) -> None:
    with _arena(device) as arena:
        texts: dict[int, str] = {}

        def miss(region_id: int) -> None:
            with pytest.raises(NotFound) as caught:
                arena.acquire(region_id)
            texts[region_id] = str(caught.value)

        threads = [threading.Thread(target=miss, args=(number,)) for number in (71, 72, 73)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(str(number) in texts[number] for number in (71, 72, 73))
