"""Memory and streams of a card, shared with torch, CuPy and cuda.core. Skips without a card."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.arena import Arena
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.share import Buffer, Stream
from pykvstream.errors import Unsupported

VALUES = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)


@pytest.fixture
def device(card: str) -> Iterator[CudaDevice]:
    with CudaDevice() as made:
        yield made
        gc.collect()
        assert made.info.live_objects == 0


@pytest.fixture
def torch(card: str) -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch sees no card")
    return module


def test_bytes_come_back(device: CudaDevice) -> None:
    with Buffer.of(device, VALUES) as buffer:
        assert np.array_equal(buffer.read(0, VALUES.nbytes).view(np.float32), VALUES.reshape(-1))


def test_torch_takes_rows_as_they_lie(device: CudaDevice, torch: Any) -> None:
    with Buffer.of(device, VALUES) as buffer:
        array = buffer.array(VALUES.shape)
        seen = torch.from_dlpack(array)
        assert seen.data_ptr() == buffer.address and str(seen.device) == "cuda:0"
        assert np.array_equal(seen.cpu().numpy(), VALUES)
        assert np.array_equal(torch.as_tensor(array, device="cuda").cpu().numpy(), VALUES)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert float(torch.from_dlpack(array).sum(dtype=torch.float64)) == float(VALUES.sum(dtype=np.float64))
        with pytest.raises(BufferError, match="two streams"):
            array.__dlpack__(stream=0)
        del seen


def test_an_arena_lies_in_memory_of_torch(device: CudaDevice, torch: Any) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    told, address = weakref.ref(tensor), tensor.data_ptr()
    buffer = Buffer.adopt(device, tensor)
    arena = Arena.over(buffer)
    assert device.info.device_bytes == 0
    buffer.write(512, b"\x09" * 512)
    assert int(tensor.sum()) == 9 * 512
    buffer.close()
    arena.begin()
    arena.reserve(1, 4096)
    arena.commit()
    lease = arena.acquire(1)
    assert lease.info.address == address
    arena.close()
    del tensor
    gc.collect()
    assert torch.cuda.memory_allocated() >= 1 << 20
    lease.close()
    gc.collect()
    assert told() is None


def test_memory_of_the_host_is_no_memory_of_the_card(device: CudaDevice) -> None:
    host = np.zeros(4096, np.uint8)
    with pytest.raises(Unsupported, match="no memory of card"):
        Buffer.at(device, -(-host.ctypes.data // 64) * 64, 1024, host)
    with pytest.raises(Unsupported, match="the tensor lies on"):
        Buffer.adopt(device, host)


def test_a_stream_is_led_behind_the_device(device: CudaDevice, torch: Any) -> None:
    stream = Stream(device)
    version, handle = stream.__cuda_stream__()
    assert version == 0 and handle != 0
    other = torch.cuda.Stream()
    stream.lead(other.cuda_stream)
    other.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        assert int(torch.ones(1000, device="cuda").sum()) == 1000


def test_cuda_core_speaks_with_both(device: CudaDevice) -> None:
    core = pytest.importorskip("cuda.core")
    if not hasattr(core, "Device"):
        pytest.skip("this cuda.core has other names")
    owner = core.Device(0)
    owner.set_current()
    stream = owner.create_stream(Stream(device))
    assert int(stream.handle) == Stream(device).handle
    memory = owner.allocate(1 << 16, stream=stream)
    with Buffer.at(device, int(memory.handle), 1 << 16, memory) as buffer:
        buffer.write(0, b"\x05" * (1 << 16))
        assert set(buffer.read(0, 1 << 16)) == {5}
    with Buffer.of(device, VALUES) as buffer:
        view = getattr(core, "utils", None)
        if view is None:
            from cuda.core import utils as view
        seen = view.StridedMemoryView.from_any_interface(buffer.array(VALUES.shape), stream_ptr=-1)
        assert seen.ptr == buffer.address and tuple(seen.shape) == VALUES.shape
        del seen
    memory.close(stream)


def test_cupy_takes_rows(device: CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    with Buffer.of(device, VALUES) as buffer:
        seen = cupy.from_dlpack(buffer.array(VALUES.shape))
        assert seen.data.ptr == buffer.address and np.array_equal(cupy.asnumpy(seen), VALUES)
        del seen
