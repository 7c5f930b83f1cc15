"""How fast kernels of the weight side are, on shapes of a 27B model: figures to look at, printed past pytest's capture.
What can fail here is running at all.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pykvstream.gguf import GgmlType
from tests.bench.cuda_attend import tile_figures, variant_figures
from tests.gpu.kernel_engine import CudaEngine, Grid
from tests.gpu.test_kernels_delta import LOGGED, Layer, Shape, Tables
from tests.gpu.weight_rig import STORE, SWIGLU, Weight, WeightRig, build_launches

T = GgmlType
Launch = tuple[str, str, dict[str, int], Grid, int, ctypes.Structure, int]
REPEATS = 12
SHAPES = ((5120, 17408, 2), (5120, 6144, 1), (17408, 5120, 1))
"""Values of k, outputs, weights that share a launch."""


class Recorder(WeightRig):
    """Keeps launches, and runs them when asked."""

    def __init__(self, engine: CudaEngine, launches: ctypes.CDLL) -> None:
        super().__init__(engine, launches)
        self.kept: list[Launch] = []
        self._run = engine.run
        engine.run = self._keep  # type: ignore[method-assign]

    def _keep(
        self, source: str, kernel: str, macros: Any, grid: Grid, block: int, params: Any, shared: int = 0
    ) -> None:
        self.kept.append((source, kernel, dict(macros), grid, block, params, shared))
        self._run(source, kernel, macros, grid, block, params, shared)

    def restore(self) -> None:
        self.engine.run = self._run  # type: ignore[method-assign]

    def microseconds(self, chosen: Callable[[Launch], bool]) -> float:
        """Of all kept launches that are chosen, one after another, per repetition."""
        engine: Any = self.engine
        driver, check = engine._driver, engine._check
        calls = []
        for source, kernel, macros, grid, block, params, shared in filter(chosen, self.kept):
            function = engine._function(source, kernel, macros, shared)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            calls.append(
                (function, *grid, block, 1, 1, shared, driver.CUstream(0), ctypes.addressof(arguments), arguments)
            )
        events = [check(driver.cuEventCreate(0)) for _ in range(2)]
        for repeat in range(REPEATS + 2):
            if repeat == 2:
                check(driver.cuEventRecord(events[0], driver.CUstream(0)))
            for *call, _ in calls:
                check(driver.cuLaunchKernel(*call, 0))
        check(driver.cuEventRecord(events[1], driver.CUstream(0)))
        check(driver.cuEventSynchronize(events[1]))
        return float(check(driver.cuEventElapsedTime(*events))) * 1000 / REPEATS


def show(capsys: pytest.CaptureFixture[str], lines: list[str]) -> None:
    """On the standard error of the process, which workers of a distributed run share with their parent."""
    with capsys.disabled():
        print("\n" + "\n".join(lines), file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_launches(tmp_path_factory.mktemp("launches"))


@pytest.fixture(scope="module")
def cuda() -> CudaEngine:
    return CudaEngine()


@pytest.fixture
def recorder(cuda: CudaEngine, launches: ctypes.CDLL) -> Iterator[Recorder]:
    made = Recorder(cuda, launches)
    made.set_multiprocessors(cuda.n_multiprocessors)
    yield made
    made.restore()
    cuda.release()


def prompt_figures(recorder: Recorder, weights: list[Weight], rng: np.random.Generator) -> str:
    """Rows of a prompt, and what their products come to."""
    figures = []
    for n_rows in (64, 128, 256, 512):
        recorder.kept.clear()
        x = rng.standard_normal((n_rows, weights[0].k), np.float32)
        recorder.matmul(weights, x, epilogue=SWIGLU if len(weights) == 2 else STORE, is_prompt=True)
        spent = recorder.microseconds(lambda launch: launch[0].startswith("matmul"))
        rounding = recorder.microseconds(lambda launch: launch[0] == "act_tile")
        rate = 2e-6 * n_rows * sum(weight.n * weight.k for weight in weights) / spent
        figures.append(f"{n_rows} of a prompt: {spent:.1f}+{rounding:.1f} us {rate:.0f} TFLOP/s")
    return "  ".join(figures)


@pytest.mark.parametrize(
    "kind", [T.Q4_0, T.IQ4_XS, T.Q4_K, T.Q6_K, T.Q8_0, T.IQ2_XS, T.BF16], ids=lambda kind: kind.name
)
def test_matmul_speed(recorder: Recorder, capsys: pytest.CaptureFixture[str], kind: GgmlType) -> None:
    rng = np.random.default_rng(1)
    lines = []
    for k, n, n_weights in SHAPES:
        # Codes do not matter for time: one panel's worth of random rows, repeated in memory, is formed once.
        weights = [recorder.weight(kind, k, 16, rng) for _ in range(n_weights)]
        n_bytes = int(recorder._launches.form_bytes(kind.id, k, n))
        for weight in weights:
            one = int(recorder._launches.form_bytes(kind.id, k, 16))
            panel = recorder.engine.download(weight.address, (one,), np.uint8)
            weight.n, weight.address = n, recorder.put(np.tile(panel, n_bytes // one))
        figures = []
        for n_rows in (1, 2, 6, 8, 16, 64, 512):
            recorder.kept.clear()
            x = rng.standard_normal((n_rows, k), np.float32)
            outs = recorder.matmul(weights, x, epilogue=SWIGLU if n_weights == 2 else STORE)
            assert all(np.isfinite(out).all() for out in outs)
            spent = recorder.microseconds(lambda launch: launch[0].startswith("matmul"))
            apart = recorder.microseconds(lambda launch: launch[0] == "act_quantize")
            rate = n_bytes * n_weights / spent / 1e3
            figures.append(f"{n_rows}: {spent:.1f}{f'+{apart:.1f}' if apart else ''} us {rate:.0f} GB/s")
        lines.append(f"{kind.name} {k}x{n}x{n_weights}  " + "  ".join(figures))
        lines.append(f"{kind.name} {k}x{n}x{n_weights}  " + prompt_figures(recorder, weights, rng))
    show(capsys, lines)


def test_delta_speed(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape(16, 48, 128, 4)
    figures = []
    for n_rows in (1, 6, 64, 512):
        recorder.kept.clear()
        layer = Layer(recorder, Tables(shape, n_rows))
        assert np.isfinite(layer.run(n_rows, LOGGED)).all()
        figures.append(f"{n_rows}: {recorder.microseconds(lambda launch: True):.1f} us")
    show(capsys, ["delta 48 heads of 128: " + "  ".join(figures)])


def test_front_speed(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    """Random logits, and those of which most are left to sort."""
    n_cols, n_best = 248_320, 128
    lines = []
    for name in ("normal", "half of the lanes"):
        figures = []
        for n_rows in (1, 6, 64):
            recorder.kept.clear()
            rows = np.random.default_rng(n_rows).standard_normal((n_rows, n_cols), np.float32)
            if name != "normal":
                rows[:, np.arange(n_cols) % 256 < n_best - 1] += 100
            assert (recorder.front(rows, n_cols, n_best)[:, 2 * n_best] == n_best).all()
            chunks, merge = (
                recorder.microseconds(lambda launch, kernel=kernel: launch[1] == kernel)  # type: ignore[misc]
                for kernel in ("front_chunk", "front_merge")
            )
            figures.append(f"{n_rows}: {chunks:.1f}+{merge:.1f} us")
        lines.append(f"front of 248,320 logits, {name}: " + "  ".join(figures))
    show(capsys, lines)


def test_attend_speed(capsys: pytest.CaptureFixture[str]) -> None:
    device = CudaEngine()
    show(capsys, [*tile_figures(device), *variant_figures(device)])
