"""Tapes and bindings: a model as C replays it.

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
from pykvstream.core.state import DeltaLayer, State
from pykvstream.core.status import check, make_struct
from pykvstream.core.weight import Weight, WeightLayout
from pykvstream.errors import Busy, Closed, InvalidArgument

NONE: int = lib.KVS_NONE
_WORDS = ffi.typeof("uint32_t[]")
_FLOATS = ffi.typeof("float[]")
FRONT_TAIL: int = lib.KVS_FRONT_TAIL

__all__ = [
    "FRONT_TAIL",
    "NONE",
    "Binding",
    "CancelFlag",
    "DeltaMode",
    "Op",
    "OpCode",
    "RowKind",
    "Tape",
    "TapeInfo",
    "TensorKind",
    "Weight",
    "WeightLayout",
]


class TensorKind(enum.IntEnum):
    """Where a tensor lies: in the workspace, or in memory that each pass supplies, to write into or to read from."""

    WORK = lib.KVS_TENSOR_WORK
    OUTPUT = lib.KVS_TENSOR_OUTPUT
    INPUT = lib.KVS_TENSOR_INPUT


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
    GLU = lib.KVS_OP_GLU
    ADD = lib.KVS_OP_ADD
    GATHER = lib.KVS_OP_GATHER
    DELTA = lib.KVS_OP_DELTA
    EXPERTS = lib.KVS_OP_EXPERTS
    FRONT = lib.KVS_OP_FRONT


class DeltaMode(enum.IntEnum):
    """How the recurrent layers of a tape run: row by row into the log, or in chunks into the state."""

    LOGGED = lib.KVS_DELTA_LOGGED
    CHUNKED = lib.KVS_DELTA_CHUNKED


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
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class TapeInfo:
    """What a sealed tape is: counts, and bytes of its workspace and of the weights that a pass reads."""

    n_ops: int
    n_tensors: int
    workspace_bytes: int
    weight_bytes: int
    n_delta_layers: int
    is_logged: bool


def _fill(array: Any, values: tuple[Any, ...], default: Any) -> None:
    for i in range(len(array)):
        array[i] = values[i] if i < len(values) else default


class Tape(Handle):
    """A recorded model for passes of up to ``max_rows`` rows with up to ``max_out_rows`` output rows."""

    __slots__ = ("_device", "_weights", "max_out_rows", "max_rows", "n_inputs", "n_outputs")

    def __init__(self, device: Device, max_rows: int, max_out_rows: int) -> None:
        cell = new_cell("tape")
        check(lib.kvs_tape_create(device.ptr, max_rows, max_out_rows, cell), device.ptr)
        self._device = device
        self._weights: list[Weight] = []
        self.max_rows = max_rows
        self.max_out_rows = max_out_rows
        self.n_outputs = 0
        self.n_inputs = 0
        super().__init__(cell)

    def add_tensor(self, cols: int, *, kind: TensorKind = TensorKind.WORK, rows: RowKind = RowKind.PASS) -> int:
        """A float32 tensor ``[rows, cols]``; returns its id."""
        out = ffi.new("uint32_t *")
        desc = make_struct("kvs_tensor_desc", kind=int(kind), rows=int(rows), cols=cols)
        check(lib.kvs_tape_add_tensor(self.ptr, desc, out), self._device.ptr)
        self.n_outputs += kind is TensorKind.OUTPUT
        self.n_inputs += kind is TensorKind.INPUT
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

    def add_delta(self, layer: DeltaLayer) -> int:
        """Returns the recurrent layer's number; its weights are kept alive."""
        out = ffi.new("uint32_t *")
        struct = ffi.new("kvs_delta_layer *")
        layer.fill(struct)
        check(lib.kvs_tape_add_delta(self.ptr, struct, out), self._device.ptr)
        self._weights += (layer.conv, layer.dt_bias, layer.decay)
        number: int = out[0]
        return number

    def add_op(self, op: Op) -> None:
        """Append an operation. Raises ``InvalidArgument`` naming operation and operand."""
        desc = make_struct("kvs_op_desc", code=int(op.code), layer=op.layer, flags=int(op.is_prompt))
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
        return TapeInfo(
            n_ops=info.n_ops,
            n_tensors=info.n_tensors,
            workspace_bytes=info.workspace_bytes,
            weight_bytes=info.weight_bytes,
            n_delta_layers=info.n_delta_layers,
            is_logged=bool(info.is_logged),
        )


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

    __slots__ = ("_desc", "_device", "_held", "_inputs", "_outputs", "_pager", "_tape")

    def __init__(self, device: Device, tape: Tape, arena: Arena, workspace: Lease, pager: Pager | None) -> None:
        cell = new_cell("binding")
        pager_ptr = ffi.NULL if pager is None else pager.ptr
        check(lib.kvs_tape_bind(tape.ptr, arena.ptr, workspace.ptr, pager_ptr, cell), device.ptr)
        self._device = device
        self._tape = tape
        self._pager = pager
        # Filled anew for each pass: making them takes longer.
        self._outputs = ffi.new("float *[]", max(tape.n_outputs, 1))
        self._inputs = ffi.new("float *[]", max(tape.n_inputs, 1))
        self._desc = make_struct(
            "kvs_pass_desc", outputs=self._outputs, inputs=ffi.cast("float **", self._inputs), n_axes=1
        )
        self._held: tuple[object, ...] = ()  # what a pass that has begun reads and writes
        super().__init__(cell)

    def run(
        self,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        outputs: tuple[NDArray[np.float32] | None, ...],
        cancel: CancelFlag,
        *,
        positions: NDArray[np.uint32] | None = None,
        state: State | None = None,
        inputs: tuple[NDArray[np.float32], ...] = (),
        has_front: bool = False,
    ) -> None:
        """Replay the tape for the open pass.

        ``tokens`` ``[n]``; ``out_rows`` ``[m]`` rising row numbers; ``outputs``: one C-contiguous float32 array
        per output tensor, ``[m, cols]``, or None for one that stays on a device with memory of its own, for
        ``read_output``; ``positions`` ``[n]`` or, on three axes, ``[3, n]``: without them rows count
        on; ``state`` of the pass's sequence, for a tape with recurrent layers; ``inputs``: one C-contiguous float32
        array per input tensor, ``[n, cols]``; ``has_front``: run front operations too.
        Raises ``Cancelled``, ``Stale``, ``DeviceError``; the pass must then be
        ended with 0 rows, and given up with ``State.accept(seq, 0)``.
        """
        desc = self._fill(tokens, out_rows, outputs, cancel, positions, state, inputs, has_front=has_front)
        status = lib.kvs_binding_run(self.ptr, desc)
        if status < 0:
            check(status, self._device.ptr)

    def begin(
        self,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        outputs: tuple[NDArray[np.float32] | None, ...],
        cancel: CancelFlag,
        *,
        positions: NDArray[np.uint32] | None = None,
        state: State | None = None,
        inputs: tuple[NDArray[np.float32], ...] = (),
        has_front: bool = False,
    ) -> None:
        """The first half of ``run``: the device is at work when this returns. ``end`` follows, or ``abort``.

        Raises ``Busy`` where a pass has begun and has not ended; else as ``run``, and then there is no end.
        """
        desc = self._fill(tokens, out_rows, outputs, cancel, positions, state, inputs, has_front=has_front)
        # Held before it begins: what an interrupt then leaves behind is still there when the pass is given up.
        self._held = (tokens, out_rows, outputs, cancel, positions, state, inputs)
        status = lib.kvs_binding_begin(self.known or self.ptr, desc)
        if status < 0:
            self._held = ()
            check(status, self._device.ptr)

    def _fill(
        self,
        tokens: NDArray[np.uint32],
        out_rows: NDArray[np.uint32],
        outputs: tuple[NDArray[np.float32] | None, ...],
        cancel: CancelFlag,
        positions: NDArray[np.uint32] | None,
        state: State | None,
        inputs: tuple[NDArray[np.float32], ...],
        *,
        has_front: bool,
    ) -> Any:
        """The description of a pass, until the next one is filled in."""
        if self._pager is not None and self._pager.closed:
            raise Closed("the pager of this Binding is closed")
        if self._held:
            raise Busy("a pass of this Binding has begun and has not ended")
        n_axes = 1
        if positions is not None:
            n_axes = 1 if positions.ndim == 1 else positions.shape[0]
            is_rows = positions.dtype == np.uint32 and positions.flags.c_contiguous and positions.ndim in (1, 2)
            if not is_rows or n_axes not in (1, 3) or positions.shape[-1] != len(tokens):
                raise InvalidArgument(f"positions must be uint32 [{len(tokens)}] or [3, {len(tokens)}]")
        # A count that is wrong is refused by the core, which then looks at none of them.
        if len(outputs) <= len(self._outputs):
            for i, array in enumerate(outputs):
                self._outputs[i] = ffi.NULL if array is None else ffi.from_buffer(_FLOATS, array)
        if len(inputs) <= len(self._inputs):
            for i, array in enumerate(inputs):
                self._inputs[i] = ffi.from_buffer(_FLOATS, array)
        desc = self._desc
        desc.n_rows = len(tokens)
        desc.tokens = ffi.from_buffer(_WORDS, tokens)
        desc.n_out_rows = len(out_rows)
        desc.n_outputs = len(outputs)
        desc.out_rows = ffi.from_buffer(_WORDS, out_rows)
        desc.cancel = cancel._cell
        desc.positions = ffi.NULL if positions is None else ffi.from_buffer(_WORDS, positions)
        desc.n_axes = n_axes
        desc.state = ffi.NULL if state is None else state.known or state.ptr
        desc.n_inputs = len(inputs)
        desc.flags = lib.KVS_PASS_FRONT if has_front else 0
        return desc

    def end(self) -> None:
        """Wait for the pass that has begun; its outputs are written then. Raises as ``run``."""
        status = lib.kvs_binding_end(self.known or self.ptr)
        self._held = ()
        if status < 0:
            check(status, self._device.ptr)

    def abort(self) -> None:
        """Give up the pass that has begun, if there is one: waits for the device, and outputs are not written."""
        if self._held:
            check(lib.kvs_binding_abort(self.ptr), self._device.ptr)
            self._held = ()

    @property
    def newest_pass(self) -> int:
        """The number of the newest pass, by which its outputs are read; 0 where it failed, or on the CPU."""
        number = ffi.new("uint64_t *")
        check(lib.kvs_binding_get_pass(self.ptr, number), self._device.ptr)
        return int(number[0])

    def read_output(self, number: int, output: int, first_row: int, rows: NDArray[np.float32]) -> None:
        """Rows of an output of the pass of a number, ``[n, cols]`` C-contiguous, from where the device still has them.

        Raises ``Stale`` where the device has begun another pass since; ``Unsupported`` on the CPU, whose caller has
        all outputs.
        """
        to = ffi.from_buffer("float[]", rows)
        check(lib.kvs_binding_read_output(self.ptr, number, output, first_row, len(rows), to), self._device.ptr)
