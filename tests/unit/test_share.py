"""Device memory lent to numpy and torch and taken from them, on the CPU; who keeps what alive."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena
from pykvstream.core.cuda import CudaPlanner
from pykvstream.core.device import Device
from pykvstream.core.share import Buffer, Stream, stream_handle
from pykvstream.core.trace import TraceDevice
from pykvstream.errors import InvalidArgument, NoSpace, Unsupported

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


class Owner:
    """Somebody whose memory is used."""

    def __init__(self, n_bytes: int) -> None:
        self.bytes = np.zeros(n_bytes + 64, np.uint8)
        self.address = -(-self.bytes.ctypes.data // 64) * 64


@pytest.fixture
def device() -> Iterator[Device]:
    with Device(1) as made:
        yield made
        gc.collect()
        assert made.info.live_objects == 0


def test_rows_are_lent_as_they_lie(device: Device) -> None:
    with Buffer.of(device, VALUES) as buffer:
        array = buffer.array((4, 6))
        seen = np.from_dlpack(array)
        assert array.__dlpack_device__() == (1, 0) and np.array_equal(seen, VALUES)
        assert seen.ctypes.data == buffer.address
        buffer.write(4, np.float32([-1.0]))
        assert seen[0, 1] == -1 and np.array_equal(buffer.read(0, 4).view(np.float32), [0])
        del seen
        part = np.from_dlpack(buffer.array((2, 3), offset=24))
        assert np.array_equal(part, np.arange(6, 12, dtype=np.float32).reshape(2, 3))
        del part


def test_what_is_lent_outlives_buffer_and_device() -> None:
    with Device(1) as device, Buffer.of(device, VALUES) as buffer:
        seen = np.from_dlpack(buffer.array((24,)))
    assert np.array_equal(seen, VALUES.reshape(-1))


def test_a_capsule_that_nobody_takes_gives_its_claim_back(device: Device) -> None:
    with Buffer.of(device, VALUES) as buffer:
        capsule = buffer.array((24,)).__dlpack__()
        n_before = device.info.live_objects
        del capsule
        assert device.info.live_objects == n_before - 1


@pytest.mark.parametrize("kind", ["int8", "uint16", "int64", "float16", "float64"])
def test_element_types_come_through(device: Device, kind: str) -> None:
    values = np.arange(8, dtype=kind)
    with Buffer.of(device, values) as buffer:
        seen = np.from_dlpack(buffer.array((8,), kind))
        assert seen.dtype == values.dtype and np.array_equal(seen, values)
        del seen


def test_torch_takes_and_gives(device: Device) -> None:
    torch = pytest.importorskip("torch")
    with Buffer.of(device, VALUES) as buffer:
        seen = torch.from_dlpack(buffer.array((4, 6)))
        assert torch.equal(seen, torch.from_numpy(VALUES.copy()))
        del seen
    tensor = torch.zeros(4096, dtype=torch.uint8)
    with Buffer.adopt(device, tensor) as buffer:
        assert (buffer.address, buffer.n_bytes) == (tensor.data_ptr(), 4096)
        buffer.write(0, b"\x07" * 4096)
    assert bool((tensor == 7).all())


def test_logits_and_hidden_rows_are_tensors_of_the_host() -> None:
    rows = np.zeros((2, 8), np.float32)
    assert np.from_dlpack(rows).ctypes.data == rows.ctypes.data


def test_what_cannot_be_lent_is_refused(device: Device) -> None:
    with Buffer(device, 256) as buffer:
        for shape, kind, offset, error in (
            ((65,), np.float32, 0, NoSpace), ((64,), np.float32, 4, NoSpace), ((2,), np.float32, 2, InvalidArgument),
            ((2,), np.complex64, 0, InvalidArgument), ((1,) * 9, np.float32, 0, InvalidArgument),
            ((-1,), np.float32, 0, InvalidArgument), ((1 << 62, 4), np.float32, 0, InvalidArgument),
        ):  # fmt: skip
            with pytest.raises(error):
                buffer.array(shape, kind, offset)
        array = buffer.array((64,))
        with pytest.raises(BufferError, match="no copy"):
            array.__dlpack__(copy=True)
        with pytest.raises(BufferError, match="no other device"):
            array.__dlpack__(dl_device=(2, 0))
        assert not hasattr(array, "__cuda_array_interface__")
        with pytest.raises(Unsupported, match="no streams"):
            Stream(device)


def test_adopted_memory_lives_until_its_last_claim(device: Device) -> None:
    owner = Owner(4096)
    told = weakref.ref(owner)
    n_references = sys.getrefcount(owner)
    buffer = Buffer.at(device, owner.address, 4096, owner)
    assert sys.getrefcount(owner) == n_references + 1
    view = buffer.view(64, 128)
    buffer.close()
    del owner
    assert told() is not None
    seen = np.from_dlpack(view.array((128,), np.uint8))
    view.close()
    gc.collect()
    assert told() is not None and seen.sum() == 0
    del seen
    assert told() is None


def test_adopted_bytes_are_no_allocation_of_the_device(device: Device) -> None:
    owner = Owner(4096)
    with Buffer.at(device, owner.address, 4096, owner):
        assert device.info.device_bytes == 0
    with Buffer(device, 4096):
        assert device.info.device_bytes == 4096


def test_an_arena_lies_in_adopted_memory(device: Device) -> None:
    owner = Owner(1 << 16)
    told = weakref.ref(owner)
    buffer = Buffer.at(device, owner.address, 1 << 16, owner)
    arena = Arena.over(buffer, 64)
    buffer.close()
    address = owner.address
    del owner
    arena.begin()
    arena.reserve(1, 4096)
    arena.commit()
    lease = arena.acquire(1)
    arena.check_integrity()
    assert lease.info.address == address
    arena.close()
    assert told() is not None
    lease.close()
    gc.collect()
    assert told() is None


def test_a_refused_adoption_leaves_the_owner_alone(device: Device) -> None:
    owner = Owner(64)
    n_references = sys.getrefcount(owner)
    for address, n_bytes in ((0, 64), (owner.address + 8, 64), (owner.address, 0)):
        with pytest.raises(InvalidArgument):
            Buffer.at(device, address, n_bytes, owner)
    with pytest.raises(InvalidArgument, match="not contiguous"):
        Buffer.adopt(device, np.zeros((64, 64), np.float32).T)
    with pytest.raises(InvalidArgument, match="neither DLPack"):
        Buffer.adopt(device, object())
    assert sys.getrefcount(owner) == n_references


def test_devices_without_memory_share_none() -> None:
    for made in (TraceDevice(), CudaPlanner(90)):
        with made as device, pytest.raises(Unsupported, match="memory"):
            Buffer.at(device, 1 << 20, 64)


def test_a_stream_is_an_integer_or_speaks_for_itself() -> None:
    class Speaker:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    assert stream_handle(5) == 5 and stream_handle(Speaker()) == 77
    for wrong in (True, "7", None):
        with pytest.raises(InvalidArgument, match="need a stream"):
            stream_handle(wrong)
