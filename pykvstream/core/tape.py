"""Weights, tapes and bindings: a model as C replays it.

Source: ``include/kvstream/tape.h``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.kv import KvLayer
from pykvstream.core.pager import Pager
from pykvstream.core.status import check, make_struct
from pykvstream.errors import Closed, KvStreamError

NONE: int = lib.KVS_NONE


class WeightLayout(enum.IntEnum):
    """How a weight lies on the device."""

    PANELS = lib.KVS_WEIGHT_PANELS
    ROWS = lib.KVS_WEIGHT_ROWS


class TensorKind(enum.IntEnum):
    """Where a tensor lies: in the workspace, or in memory that each pass supplies."""

    WORK = lib.KVS_TENSOR_WORK
    OUTPUT = lib.KVS_TENSOR_OUTPUT


class RowKind(enum.IntEnum):
    """What a tensor's rows are: the tokens of a pass, or its requested output rows."""

    PASS = lib.KVS_ROWS_PASS
    OUT = lib.KVS_ROWS_OUT


class OpCode(enum.IntEnum):
    """Operations of a tape; shapes and parameters stand in the header."""

    EMBED = lib.KVS_OP_EMBED
    NORM = lib.KVS_OP_NORM
    MATMUL = lib.KVS_OP_MATMUL
    ROPE_TABLE = lib.KVS_OP_ROPE_TABLE
    ROPE = lib.KVS_OP_ROPE
    HADAMARD = lib.KVS_OP_HADAMARD
    KV_WRITE = lib.KVS_OP_KV_WRITE
    ATTEND = lib.KVS_OP_ATTEND
    SWIGLU = lib.KVS_OP_SWIGLU
    ADD = lib.KVS_OP_ADD
    GATHER = lib.KVS_OP_GATHER


class Weight(Handle):
    """A weight of ``n`` rows of ``k`` values of a GGUF type on the device.

    ``rows``: uint8 array of the file's bytes. With ``WeightLayout.ROWS`` they are borrowed and kept alive by this
    object.
    ``None`` declares the weight: a tape with it can be measured, not run.
    ``scales`` multiply what a matmul gives, each an equal run of the ``n`` output values.
    """

    __slots__ = ("_rows", "k", "n")

    def __init__(
        self,
        device: Device,
        type_id: int,
        k: int,
        n: int,
        rows: NDArray[np.uint8] | None,
        layout: WeightLayout,
        scales: tuple[float, ...] = (),
    ) -> None:
        out = ffi.new("kvs_weight **")
        view = ffi.NULL if rows is None else ffi.from_buffer(rows)
        check(lib.kvs_weight_create(device.ptr, type_id, k, n, view, int(layout), out), device.ptr)
        self._rows = view if layout is WeightLayout.ROWS else None
        self.k = k
        self.n = n
        super().__init__(out[0], lib.kvs_weight_release)
        if scales:
            try:
                check(lib.kvs_weight_set_scales(self.ptr, scales, len(scales)), device.ptr)
            except KvStreamError:
                self.close()
                raise

    @property
    def device_bytes(self) -> int:
        """Device memory it takes or, declared only, would take; 0 for borrowed rows."""
        out = ffi.new("uint64_t *")
        check(lib.kvs_weight_get_bytes(self.ptr, out))
        count: int = out[0]
        return count


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; ids are those that the tape returned. See ``kvs_op_desc``."""

    code: OpCode
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    layer: int = 0
    u: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    f64: float = 0.0


@dataclass(frozen=True, slots=True)
class TapeInfo:
    """What a sealed tape is: counts, and bytes of its workspace and of the weights that a pass reads."""

    n_ops: int
    n_tensors: int
    workspace_bytes: int
    weight_bytes: int


def _fill(array: Any, values: tuple[Any, ...], default: Any) -> None:
    for i in range(len(array)):
        array[i] = values[i] if i < len(values) else default


class Tape(Handle):
    """A recorded model for passes of up to ``max_rows`` rows with up to ``max_out_rows`` output rows."""

    __slots__ = ("_device", "_weights", "max_out_rows", "max_rows", "n_outputs")

    def __init__(self, device: Device, max_rows: int, max_out_rows: int) -> None:
        out = ffi.new("kvs_tape **")
        check(lib.kvs_tape_create(device.ptr, max_rows, max_out_rows, out), device.ptr)
        self._device = device
        self._weights: list[Weight] = []
        self.max_rows = max_rows
        self.max_out_rows = max_out_rows
        self.n_outputs = 0
        super().__init__(out[0], lib.kvs_tape_release)

    def add_tensor(self, cols: int, *, kind: TensorKind = TensorKind.WORK, rows: RowKind = RowKind.PASS) -> int:
        """A float32 tensor ``[rows, cols]``; returns its id."""
        out = ffi.new("uint32_t *")
        desc = make_struct("kvs_tensor_desc", kind=int(kind), rows=int(rows), cols=cols)
        check(lib.kvs_tape_add_tensor(self.ptr, desc, out), self._device.ptr)
        self.n_outputs += kind is TensorKind.OUTPUT
        tensor_id: int = out[0]
        return tensor_id

    def add_weight(self, weight: Weight) -> int:
        """Returns the weight's id on this tape; the weight is kept alive."""
        out = ffi.new("uint32_t *")
        check(lib.kvs_tape_add_weight(self.ptr, weight.ptr, out), self._device.ptr)
        self._weights.append(weight)
        weight_id: int = out[0]
        return weight_id

    def add_layer(self, layer: KvLayer) -> int:
        """Returns the cache layer's number."""
        out = ffi.new("uint32_t *")
        check(lib.kvs_tape_add_layer(self.ptr, layer.to_c(), out), self._device.ptr)
        number: int = out[0]
        return number

    def add_op(self, op: Op) -> None:
        """Append an operation. Raises ``InvalidArgument`` naming operation and operand."""
        desc = make_struct("kvs_op_desc", code=int(op.code), layer=op.layer)
        _fill(getattr(desc, "in"), op.inputs, NONE)
        _fill(desc.out, op.outputs, NONE)
        _fill(desc.weights, op.weights, NONE)
        _fill(desc.u, op.u, 0)
        _fill(desc.f, op.f, 0.0)
        desc.f64[0] = op.f64
        check(lib.kvs_tape_add_op(self.ptr, desc), self._device.ptr)

    def seal(self) -> TapeInfo:
        """Freeze the tape and size its workspace."""
        check(lib.kvs_tape_seal(self.ptr), self._device.ptr)
        return self.info

    @property
    def info(self) -> TapeInfo:
        info = make_struct("kvs_tape_info")
        check(lib.kvs_tape_get_info(self.ptr, info), self._device.ptr)
        return TapeInfo(info.n_ops, info.n_tensors, info.workspace_bytes, info.weight_bytes)


class CancelFlag:
    """A flag that a pass reads between operations; may be raised from any thread."""

    __slots__ = ("_cell",)

    def __init__(self) -> None:
        self._cell = ffi.new("uint32_t *")

    def set(self) -> None:
        self._cell[0] = 1

    def clear(self) -> None:
        self._cell[0] = 0

    def is_set(self) -> bool:
        return bool(self._cell[0])

    @property
    def cell(self) -> Any:
        return self._cell


class Binding(Handle):
    """A sealed tape with addresses, valid at one arena epoch."""

    __slots__ = ("_device", "_pager", "_tape")

    def __init__(self, device: Device, tape: Tape, arena: Arena, workspace: Lease, pager: Pager | None) -> None:
        cell = new_cell("kvs_binding **", lib.kvs_py_drop_binding)
        pager_ptr = ffi.NULL if pager is None else pager.ptr
        check(lib.kvs_tape_bind(tape.ptr, arena.ptr, workspace.ptr, pager_ptr, cell), device.ptr)
        self._device = device
        self._tape = tape
        self._pager = pager
        super().__init__(cell)

    def run(
        self,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        outputs: tuple[NDArray[np.float32], ...],
        cancel: CancelFlag,
    ) -> None:
        """Replay the tape for the open pass.

        ``tokens`` ``[n]``; ``out_rows`` ``[m]`` rising row numbers; ``outputs``: one C-contiguous float32 array
        per output tensor, ``[m, cols]``. Raises ``Cancelled``, ``Stale``, ``DeviceError``; the pass must then be
        ended with 0 rows.
        """
        if self._pager is not None and self._pager.closed:
            raise Closed("the pager of this Binding is closed")
        pointers = ffi.new("float *[]", [ffi.from_buffer("float[]", array) for array in outputs])
        desc = make_struct(
            "kvs_pass_desc",
            n_rows=len(tokens),
            tokens=ffi.from_buffer("uint32_t[]", tokens),
            n_out_rows=len(out_rows),
            n_outputs=len(outputs),
            out_rows=ffi.from_buffer("uint32_t[]", out_rows),
            outputs=pointers,
            cancel=cancel.cell,
        )
        check(lib.kvs_binding_run(self.ptr, desc), self._device.ptr)
