"""Kernel sources run by themselves, without the library: on a CUDA device, and on the host for their arithmetic alone.

``Parameters`` reads a parameter header, so that a struct's layout lives in one place. An engine uploads arrays, runs a
kernel of a source file with macros, and reads arrays back. Addresses are integers.
Order: the host engine runs blocks one after another and the threads of a block as coroutines (``host_kernels.h``).
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

KERNELS = Path(__file__).parents[2] / "native" / "kernels"
SHIM = Path(__file__).parent / "host_kernels.h"
Array = npt.NDArray[Any]
Grid = tuple[int, int, int]
Macros = Mapping[str, int]
Params = ctypes.Structure

_C_TYPES = {
    "unsigned long long": ctypes.c_uint64,
    "unsigned int": ctypes.c_uint32,
    "int": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


class Parameters:
    """The structs and numbers of a parameter header."""

    def __init__(self, header: str) -> None:
        text = without_comments((KERNELS / header).read_text(encoding="utf-8"))
        self.numbers = {name: int(value, 0) for name, value in re.findall(r"#define (KVS_\w+) (\w+?)u?\n", text)}
        self._structs: dict[str, type[ctypes.Structure]] = {}
        for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL):
            fields = re.findall(r"^\s*(.+?) (\w+)(?:\[(\w+)\])?;", body, re.MULTILINE)
            members = [(field, self._type(kind, count)) for kind, field, count in fields]
            self._structs[name] = type(name, (ctypes.Structure,), {"_fields_": members})

    def _type(self, kind: str, count: str) -> Any:
        one = _C_TYPES[kind] if kind in _C_TYPES else self._structs[kind]
        if not count:
            return one
        length = self.numbers[count] if count in self.numbers else int(count.rstrip("u"))
        return one * length

    def read(self, name: str, address: int) -> ctypes.Structure:
        """A copy of the struct at a host address."""
        return self._structs[name].from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(self._structs[name])))

    def make(self, name: str, **values: Any) -> ctypes.Structure:
        struct = self._structs[name]()
        for field, value in values.items():
            assert hasattr(struct, field), field
            setattr(struct, field, value)
        return struct


def whole_source(name: str, seen: set[str] | None = None) -> str:
    """A kernel's text with the files beside it that it includes."""
    seen = set() if seen is None else seen
    lines = []
    for line in (KERNELS / name).read_text(encoding="utf-8").splitlines():
        match = re.match(r'\s*#include "([^"]+)"', line)
        if match is None:
            lines.append(line)
        elif match[1] not in seen:
            seen.add(match[1])
            lines.append(whole_source(match[1], seen))
    return "\n".join(lines)


class Engine(Protocol):
    name: str
    arch: int
    shared_bytes: int
    """That a block may ask for."""

    def upload(self, array: Array) -> int: ...

    def download(self, address: int, shape: Sequence[int], dtype: npt.DTypeLike) -> Array: ...

    def run(
        self, source: str, kernel: str, macros: Macros, grid: Grid, block: int, params: Params, shared: int = 0
    ) -> None: ...


class HostEngine:
    """Compiles a kernel's source for the host."""

    name = "host"
    arch = 80
    """What launchers may ask of it."""
    shared_bytes = 96 << 10

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler to run kernels on the host")
        self._compiler = compiler
        self._folder = folder
        self._arrays: dict[int, Array] = {}
        self._loaded: dict[tuple[Any, ...], Any] = {}

    def upload(self, array: Array) -> int:
        # Aligned to 256 bytes, as device memory is.
        room = np.empty(array.nbytes + 256, np.uint8)
        start = -room.ctypes.data % 256
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = room.ctypes.data + start
        self._arrays[address] = room
        return address

    def download(self, address: int, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(address, n_bytes), dtype).reshape(shape).copy()

    def run(
        self, source: str, kernel: str, macros: Macros, grid: Grid, block: int, params: Params, shared: int = 0
    ) -> None:
        assert shared <= 227 << 10, "the host has 227 KiB of dynamic shared memory"
        function = self._function(source, kernel, type(params).__name__, macros)
        function(ctypes.byref(params), (ctypes.c_uint * 3)(*grid), ctypes.c_uint(block))

    def _function(self, source: str, kernel: str, params: str, macros: Macros) -> Any:
        key = (source, kernel, *sorted(macros.items()))
        if key not in self._loaded:
            self._loaded[key] = self._compile(source, kernel, params, macros, f"{source}-{len(self._loaded)}")
        return self._loaded[key]

    def _compile(self, source: str, kernel: str, params: str, macros: Macros, name: str) -> Any:
        path = self._folder / f"{name}.so"
        compile_for_host(self._compiler, source, {kernel: params}, macros, path)
        return getattr(ctypes.CDLL(str(path)), f"host_{kernel}")


def compile_for_host(
    compiler: str, source: str, kernels: Mapping[str, str], macros: Macros, library: Path
) -> None:
    """A library where ``host_NAME`` runs a kernel: its argument, of ``host_NAME_bytes``, the grid, threads of a block.

    ``kernels``: names, and the structs that they take.
    """
    text = f'#include "{SHIM}"\n{whole_source(source + ".cu")}\n'
    for kernel, params in kernels.items():
        text += (
            f'extern "C" void host_{kernel}(const void *params, const unsigned *grid, unsigned n_threads)\n{{\n'
            f"    host_launch(host_call<{params}, {kernel}>, params, grid, n_threads);\n}}\n"
            f'extern "C" const unsigned host_{kernel}_bytes = sizeof({params});\n'
        )
    path = library.with_suffix(".cpp")
    path.write_text(text, encoding="utf-8")
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
    defines = [f"-D{macro}={value}" for macro, value in macros.items()]
    subprocess.run([compiler, *options, *defines, str(path), "-o", str(library)], check=True)


def kernels_of(source: str) -> dict[str, str]:
    """Every kernel of a source, and the struct that it takes."""
    text = without_comments(whole_source(source + ".cu"))
    return dict(re.findall(r"__global__[^{;]*?\b(\w+)\(const (\w+) \w+\)\s*\{", text))


class CudaEngine:
    """The driver and NVRTC through cuda.bindings; skips by name where there is no device."""

    name = "cuda"

    def __init__(self) -> None:
        reason = "no CUDA device to run kernels on"
        self._driver = pytest.importorskip("cuda.bindings.driver", reason=reason, exc_type=ImportError)
        self._nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=reason, exc_type=ImportError)
        try:
            (result,) = self._driver.cuInit(0)
        except (RuntimeError, OSError) as problem:
            pytest.skip(f"{reason}: {problem}")
        if int(result) != 0:
            pytest.skip(f"{reason}: {result}")
        device = self._check(self._driver.cuDeviceGet(0))
        self._check(self._driver.cuCtxSetCurrent(self._check(self._driver.cuDevicePrimaryCtxRetain(device))))
        prefix = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
        asked = [getattr(self._driver.CUdevice_attribute, prefix + part) for part in ("MAJOR", "MINOR")]
        numbers = [self._check(self._driver.cuDeviceGetAttribute(attribute, device)) for attribute in asked]
        self.arch = 10 * numbers[0] + numbers[1]
        self._arch = f"sm_{self.arch}{'a' if self.arch == 90 else ''}"
        attributes = self._driver.CUdevice_attribute
        shared = attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.shared_bytes: int = self._check(self._driver.cuDeviceGetAttribute(shared, device))
        count = attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.n_multiprocessors: int = self._check(self._driver.cuDeviceGetAttribute(count, device))
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._images: dict[tuple[Any, ...], bytes] = {}
        self._pointers: list[Any] = []
        self._is_eager = True  # every launch is waited for, so that a fault names its kernel

    def _check(self, results: tuple[Any, ...]) -> Any:
        status, *values = results
        assert int(status) == 0, status
        return values[0] if len(values) == 1 else values

    def upload(self, array: Array) -> int:
        contiguous = np.ascontiguousarray(array)
        pointer = self._check(self._driver.cuMemAlloc(max(contiguous.nbytes, 16)))
        self._pointers.append(pointer)
        self._check(self._driver.cuMemcpyHtoD(pointer, contiguous.ctypes.data, contiguous.nbytes))
        return int(pointer)

    def release(self) -> None:
        """Give back all arrays."""
        for pointer in self._pointers:
            self._check(self._driver.cuMemFree(pointer))
        self._pointers.clear()

    def download(self, address: int, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        array = np.empty(shape, dtype)
        self._check(self._driver.cuMemcpyDtoH(array.ctypes.data, self._driver.CUdeviceptr(address), array.nbytes))
        return array

    def run(
        self, source: str, kernel: str, macros: Macros, grid: Grid, block: int, params: Params, shared: int = 0
    ) -> None:
        function = self._function(source, kernel, macros, shared)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        shape = (*grid, block, 1, 1, shared, self._driver.CUstream(0))
        self._check(self._driver.cuLaunchKernel(function, *shape, ctypes.addressof(arguments), 0))
        if self._is_eager:
            self._check(self._driver.cuCtxSynchronize())

    def seconds(self, run: Callable[[], None], n: int) -> float:
        """Device seconds of one of n runs in a row, after one that is not counted."""
        run()
        start, end = (self._check(self._driver.cuEventCreate(0)) for _ in range(2))
        self._is_eager = False
        self._check(self._driver.cuEventRecord(start, self._driver.CUstream(0)))
        for _ in range(n):
            run()
        self._check(self._driver.cuEventRecord(end, self._driver.CUstream(0)))
        self._check(self._driver.cuEventSynchronize(end))
        self._is_eager = True
        return float(self._check(self._driver.cuEventElapsedTime(start, end))) / 1e3 / n

    def _function(self, source: str, kernel: str, macros: Macros, shared: int) -> Any:
        key = (source, kernel, shared, *macros.items())
        if key not in self._functions:
            function = self._check(self._driver.cuModuleGetFunction(self._module(source, macros), kernel.encode()))
            if shared:  # what the kernel declares counts too, so that less than 48 KiB can be too much
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._check(self._driver.cuFuncSetAttribute(function, attribute, shared))
            self._functions[key] = function
        return self._functions[key]

    def compile_ahead(self, source: str, macros: Macros) -> None:
        """From any thread."""
        self._images[(source, *sorted(macros.items()))] = self._compile(source, macros)

    def _module(self, source: str, macros: Macros) -> Any:
        key = (source, *sorted(macros.items()))
        if key not in self._modules:
            image = self._images[key] if key in self._images else self._compile(source, macros)
            self._modules[key] = self._check(self._driver.cuModuleLoadData(image))
        return self._modules[key]

    def _compile(self, source: str, macros: Macros) -> bytes:
        return self._compile_text(whole_source(source + ".cu"), source, macros)

    def _compile_text(self, text: str, source: str, macros: Macros) -> bytes:
        nvrtc = self._nvrtc
        program = self._check(nvrtc.nvrtcCreateProgram(text.encode(), f"{source}.cu".encode(), 0, [], []))
        options = [f"--gpu-architecture={self._arch}", "-std=c++17", "-fmad=false"]
        options += [f"-D{macro}={value}" for macro, value in macros.items()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = b" " * self._check(nvrtc.nvrtcGetProgramLogSize(program))
            self._check(nvrtc.nvrtcGetProgramLog(program, log))
            pytest.fail(f"{source} {dict(macros)}: {log.decode()}")
        binary = b" " * self._check(nvrtc.nvrtcGetCUBINSize(program))
        self._check(nvrtc.nvrtcGetCUBIN(program, binary))
        return binary
