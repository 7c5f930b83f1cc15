"""Operations of the weight side and the sampling front by their own launchers, on any engine of ``kernel_engine``.

The launchers are C of the backend: they are compiled beside ``weight_launches.c``, which hands each launch to the
engine. Memory that operations write begins as 0xff, so that what nobody writes shows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.gguf import GgmlType
from pykvstream.gguf.codecs import decode
from tests.blocks import FLOORS_AT, put_halves, put_scales
from tests.gpu.kernel_engine import Engine, Parameters

ROOT = Path(__file__).parents[2]
LAUNCHES = Path(__file__).parent / "weight_launches.c"
BACKEND = ("launch_delta", "launch_experts", "launch_front", "launch_matmul", "product", "weight_form")
BASE = ("block_grid", "blocks", "types")
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

EMBED, MATMUL, EXPERTS, FRONT = 0, 2, 12, 13
STORE, STORE_ADD, SWIGLU = range(3)
GROUP: Final = 32
FEW: Final = 2
"""Multiprocessors: so few that blocks have several turns."""
_STRUCTS = {
    "act_quantize": "kvs_act_params",
    "matmul": "kvs_matmul_narrow_params",
    "act_tile": "kvs_act_params",
    "matmul_tile": "kvs_matmul_params",
    "matmul_wide": "kvs_matmul_params",
    "matmul_fold": "kvs_matmul_params",
    "matmul_float": "kvs_matmul_float_params",
    "embed": "kvs_embed_params",
    "experts": "kvs_experts_params",
    "delta": "kvs_delta_params",
    "delta_chunk": "kvs_delta_chunk_params",
    "glu": "kvs_glu_params",
    "front": "kvs_front_params",
}


class Macro(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_int32))


class FlatWeight(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32), ("n_scales", ctypes.c_uint32), ("k", ctypes.c_uint64), ("n", ctypes.c_uint64),
        ("address", ctypes.c_uint64), ("scales", ctypes.c_uint64),
    )  # fmt: skip


class FlatOp(ctypes.Structure):
    _fields_ = (
        ("weights", FlatWeight * 6), ("inputs", ctypes.c_uint64 * 3), ("out", ctypes.c_uint64 * 4),
        ("scratch", ctypes.c_uint64), ("tokens", ctypes.c_uint64), ("in_cols", ctypes.c_uint32 * 3),
        ("out_cols", ctypes.c_uint32 * 4), ("u", ctypes.c_uint32 * 4), ("code", ctypes.c_uint32),
        ("n_rows", ctypes.c_uint32), ("f", ctypes.c_float), ("flags", ctypes.c_uint32),
    )  # fmt: skip


class FlatDelta(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "conv", "dt_bias", "decay", "matrix_in", "conv_in", "log_in", "matrix_out", "conv_out", "log_out",
            "inputs", "beta", "alpha", "out",
        )
    ) + tuple(
        (name, ctypes.c_uint32)
        for name in ("n_key_heads", "n_value_heads", "head_dim", "conv_width", "n_pending", "n_rows", "mode", "folds")
    ) + (
        ("norm_eps", ctypes.c_float), ("first_token", ctypes.c_uint32), ("scratch", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
    )  # fmt: skip


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.POINTER(Macro),
    ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64,
)  # fmt: skip


def build_launches(folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler for the launchers")
    native = ROOT / "native"
    sources = [native / "backends/cuda" / f"{name}.c" for name in BACKEND]
    sources += [native / "base" / f"{name}.c" for name in BASE]
    library = folder / "launches.so"
    options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{native}", f"-I{ROOT / 'include'}"]
    subprocess.run([compiler, *options, str(LAUNCHES), *map(str, sources), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.form_bytes.restype = ctypes.c_uint64
    loaded.form_bytes.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
    loaded.form.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
    return loaded


def random_table(kind: GgmlType, k: int, n: int, rng: np.random.Generator) -> Bytes:
    """``n`` rows of ``k`` values with random codes and small scales, as a file holds them."""
    if kind is GgmlType.F32:
        return rng.standard_normal(n * k, np.float32).view(np.uint8)
    if kind is GgmlType.F16:
        return rng.standard_normal(n * k, np.float32).astype("<f2").view(np.uint8)
    if kind is GgmlType.BF16:
        return (rng.standard_normal(n * k, np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    n_blocks = n * k // kind.block_values
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), np.uint8)
    put_scales(kind, blocks, rng.normal(0, 0.01, n_blocks))
    if kind in FLOORS_AT:
        put_halves(blocks, FLOORS_AT[kind], rng.normal(0, 0.01, n_blocks))
    return blocks.reshape(-1)


@dataclass
class Weight:
    """A random weight: its numbers, and where it is on the engine."""

    kind: GgmlType
    k: int
    n: int
    rows: Bytes
    address: int
    scales: Floats | None = None
    scales_address: int = 0

    @property
    def values(self) -> Doubles:
        return decode(self.kind, self.rows).reshape(self.n, self.k).astype(np.float64)

    def flat(self) -> FlatWeight:
        n_scales = 0 if self.scales is None else len(self.scales)
        return FlatWeight(self.kind.id, n_scales, self.k, self.n, self.address, self.scales_address)


def quantized(x: Doubles | Floats) -> Doubles:
    """Activations as matmuls with quantized weights see them."""
    groups = np.asarray(x, np.float32).reshape(-1, GROUP)
    largest = np.abs(groups).max(1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= np.float32(1e-30))
    codes = np.rint(groups * inverse)
    return (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


def seen_by(kind: GgmlType, x: Doubles | Floats) -> Doubles:
    return x.astype(np.float64) if kind in (GgmlType.F32, GgmlType.F16, GgmlType.BF16) else quantized(x)


def silu(x: Doubles) -> Doubles:
    with np.errstate(over="ignore"):  # to the left the quotient is 0
        return x / (1 + np.exp(-x))


class WeightRig:
    """One engine with the launchers. What runs last waits for the engine, so results can be read at once."""

    def __init__(self, engine: Engine, launches: ctypes.CDLL) -> None:
        self.engine = engine
        self.parameters = Parameters("weight_params.h")
        self.row_parameters = Parameters("attend_params.h")
        self._others = {"glu": self.row_parameters, "front": Parameters("front_params.h")}
        self._launches = launches
        self._callback = _LAUNCH(self._launch)
        self._problem: BaseException | None = None
        self.launched: list[tuple[str, dict[str, int], int]] = []
        """Sources, macros and dynamic shared bytes so far."""
        launches.set_launch(self._callback)
        self.set_multiprocessors(FEW)

    def set_multiprocessors(self, n: int) -> None:
        """What launchers may cut blocks for."""
        self._launches.set_device(self.engine.arch, n, self.engine.shared_bytes)

    def set_shared_bytes(self, n: int) -> None:
        """What a block may ask for, at most what the engine has."""
        self._launches.set_device(self.engine.arch, FEW, min(n, self.engine.shared_bytes))

    def _launch(
        self, source: bytes, kernel: bytes, n_macros: int, macros: Any, grid: Any, block: int, shared: int, params: int
    ) -> int:
        name = source.decode()
        struct = self._others.get(name, self.parameters).read(_STRUCTS[name], params)
        values = {macros[i].name.decode(): macros[i].value for i in range(n_macros)}
        self.launched.append((name, values, shared))
        try:
            self.engine.run(name, kernel.decode(), values, (grid[0], grid[1], grid[2]), block, struct, shared)
        except BaseException as problem:  # a callback from C cannot raise: checked raises it
            self._problem = problem
            return -12
        return 0

    def checked(self, function: str, argument: ctypes.Structure) -> None:
        status = getattr(self._launches, function)(ctypes.byref(argument))
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem
        assert status == 0

    def put(self, array: npt.NDArray[Any]) -> int:
        return self.engine.upload(array)

    def room(self, n_bytes: int) -> int:
        return self.engine.upload(np.full(max(n_bytes, 16), 0xFF, np.uint8))

    def weight(
        self,
        kind: GgmlType,
        k: int,
        n: int,
        rng: np.random.Generator,
        scales: Floats | None = None,
        *,
        raw: bool = False,
    ) -> Weight:
        """``raw``: as the file holds it."""
        rows = random_table(kind, k, n, rng)
        formed = rows
        if not raw:
            formed = np.full(self._launches.form_bytes(kind.id, k, n), 0xFF, np.uint8)
            self._launches.form(kind.id, k, n, rows.ctypes.data, formed.ctypes.data)
        made = Weight(kind, k, n, rows, self.put(formed), scales)
        if scales is not None:
            made.scales_address = self.put(scales)
        return made

    def scratch(self, op: FlatOp, max_rows: int) -> int:
        n_bytes = ctypes.c_uint64()
        assert self._launches.scratch_bytes(ctypes.byref(op), max_rows, ctypes.byref(n_bytes)) == 0
        return self.room(n_bytes.value)

    def front(self, rows: Floats, n_tokens: int, n_best: int, max_rows: int = 0) -> npt.NDArray[np.uint32]:
        """The words of each row; scratch as for ``max_rows``, by default for as many as there are."""
        n_rows, n_cols = rows.shape
        op = FlatOp(code=FRONT, n_rows=n_rows)
        op.inputs[0], op.in_cols[0] = self.put(rows), n_cols
        op.u[0], op.u[1] = n_best, n_tokens
        op.out_cols[0] = 2 * n_best + 4
        op.out[0] = self.room(4 * n_rows * op.out_cols[0])
        op.scratch = self.scratch(op, max(n_rows, max_rows))
        self.checked("run_op", op)
        return self.engine.download(op.out[0], (n_rows, op.out_cols[0]), np.uint32)

    def embed(self, table: Weight, tokens: Sequence[int]) -> Floats:
        op = FlatOp(code=EMBED, n_rows=len(tokens))
        op.weights[0] = table.flat()
        op.tokens = self.put(np.array(tokens, np.uint32))
        op.out_cols[0] = table.k
        op.out[0] = self.room(4 * table.k * len(tokens))
        self.checked("run_op", op)
        return self.engine.download(op.out[0], (len(tokens), table.k), np.float32)

    def matmul(
        self, weights: Sequence[Weight], x: Floats, *, epilogue: int = STORE, norm: Floats | None = None,
        residual: Floats | None = None, gate: Floats | None = None, is_sigmoid: bool = False, is_prompt: bool = False,
    ) -> list[Floats]:  # fmt: skip
        """Outputs of each part; with SWIGLU of the one. Behind a gate a norm is over groups as long as its weight."""
        op = FlatOp(code=MATMUL, n_rows=len(x), f=1e-6)
        for i, weight in enumerate(weights):
            op.weights[i] = weight.flat()
        if norm is not None:
            op.weights[4] = FlatWeight(0, 0, len(norm), 1, self.put(norm), 0)
        op.u[0], op.u[1], op.flags = len(weights), epilogue, int(is_prompt)
        op.inputs[0], op.in_cols[0] = self.put(x), x.shape[1]
        if gate is not None:
            op.inputs[1], op.in_cols[1] = self.put(gate), gate.shape[1]
            op.u[2], op.u[3] = 1 + is_sigmoid, 0 if norm is None else len(norm)
        outs = weights[:1] if epilogue == SWIGLU else weights
        for i, weight in enumerate(outs):
            op.out[i] = self.room(4 * weight.n * len(x)) if residual is None else self.put(residual)
            op.out_cols[i] = weight.n
        op.scratch = self.scratch(op, len(x))
        self.checked("run_op", op)
        return [self.engine.download(op.out[i], (len(x), weight.n), np.float32) for i, weight in enumerate(outs)]

    def experts(
        self,
        weights: Sequence[Weight],
        factors: Sequence[Floats | None],
        x: Floats,
        router: Floats,
        n_chosen: int,
        factor: float,
    ) -> Floats:
        op = FlatOp(code=EXPERTS, n_rows=len(x), f=factor)
        for i, (weight, each) in enumerate(zip(weights, factors, strict=True)):
            op.weights[i] = weight.flat()
            if each is not None:
                op.weights[3 + i] = FlatWeight(0, 0, len(each), 1, self.put(each), 0)
        op.u[0], op.u[1] = router.shape[1], n_chosen
        op.inputs[0], op.in_cols[0] = self.put(x), x.shape[1]
        op.inputs[1], op.in_cols[1] = self.put(router), router.shape[1]
        op.out[0], op.out_cols[0] = self.room(x.nbytes), x.shape[1]
        op.scratch = self.scratch(op, len(x))
        self.checked("run_op", op)
        return self.engine.download(op.out[0], x.shape, np.float32)
