"""The recurrent state of one sequence on models with gated delta net layers.

Holds: ``DeltaLayer``, ``State``, ``StateInfo``, ``state_bytes``.
Source: ``include/kvstream/state.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.kv import Seq
from pykvstream.core.status import check, make_struct
from pykvstream.core.weight import Weight

CHUNK_TOKENS: int = lib.KVS_CHUNK_TOKENS
"""Chunks of the chunked form begin at multiples of this, in absolute positions."""


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """One gated delta net layer; its weights are F32 rows.

    Shapes: ``conv`` ``[channels][conv_width]``, ``dt_bias`` and ``decay`` ``[1][n_value_heads]``.
    """

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float
    conv: Weight
    dt_bias: Weight
    decay: Weight

    @property
    def channels(self) -> int:
        """Convolution channels: queries, keys, values."""
        return self.head_dim * (2 * self.n_key_heads + self.n_value_heads)

    def fill(self, out: Any) -> None:
        """Write this layer into a ``kvs_delta_layer``, which borrows the weights."""
        out.n_key_heads = self.n_key_heads
        out.n_value_heads = self.n_value_heads
        out.head_dim = self.head_dim
        out.conv_width = self.conv_width
        out.norm_eps = self.norm_eps
        out.conv = self.conv.ptr
        out.dt_bias = self.dt_bias.ptr
        out.decay = self.decay.ptr


@dataclass(frozen=True, slots=True)
class StateInfo:
    """Where a state stands, in tokens and rows, and its bytes; see ``kvs_state_info``."""

    n_layers: int
    log_rows: int
    pending_rows: int
    open_rows: int
    position: int
    folded_tokens: int
    seq_id: int
    generation: int
    device_bytes: int
    image_bytes: int


def layer_array(layers: Sequence[DeltaLayer]) -> Any:
    """The layers as C wants them; they borrow the weights."""
    array = ffi.new("kvs_delta_layer[]", len(layers))
    for i, layer in enumerate(layers):
        layer.fill(array[i])
    return array


def _desc(layers: Sequence[DeltaLayer], log_rows: int) -> tuple[Any, Any]:
    array = layer_array(layers)
    return make_struct("kvs_state_desc", n_layers=len(layers), layers=array, log_rows=log_rows), array


def state_bytes(device: Device, layers: Sequence[DeltaLayer], log_rows: int) -> int:
    """Device bytes of a state. Weights may be declared only."""
    desc, _array = _desc(layers, log_rows)
    out = ffi.new("uint64_t *")
    check(lib.kvs_state_bytes(device.ptr, desc, out), device.ptr)
    n_bytes: int = out[0]
    return n_bytes


class State(Handle):
    """A state at position 0 that belongs to no sequence. ``log_rows`` is the widest logged pass."""

    __slots__ = ("_device", "layers")

    def __init__(self, device: Device, layers: Sequence[DeltaLayer], log_rows: int) -> None:
        desc, _array = _desc(layers, log_rows)
        cell = new_cell("state")
        check(lib.kvs_state_create(device.ptr, desc, cell), device.ptr)
        self._device = device
        self.layers = tuple(layers)
        super().__init__(cell)

    def _check(self, status: int) -> None:
        check(status, self._device.ptr)

    @property
    def info(self) -> StateInfo:
        out = make_struct("kvs_state_info")
        self._check(lib.kvs_state_get_info(self.ptr, out))
        return StateInfo(
            n_layers=out.n_layers,
            log_rows=out.log_rows,
            pending_rows=out.pending_rows,
            open_rows=out.open_rows,
            position=out.position,
            folded_tokens=out.folded_tokens,
            seq_id=out.seq_id,
            generation=out.generation,
            device_bytes=out.device_bytes,
            image_bytes=out.image_bytes,
        )

    def attach(self, seq: Seq) -> None:
        """From now on the state belongs to ``seq``, which must have as many tokens."""
        self._check(lib.kvs_state_attach(self.ptr, seq.ptr))

    def accept(self, seq: Seq, n_rows: int) -> None:
        """End the pass that has run: its first ``n_rows`` rows belong to the sequence. 0 gives it up."""
        status = lib.kvs_state_accept(self.known or self.ptr, seq.known or seq.ptr, n_rows)
        if status < 0:
            self._check(status)

    def truncate(self, seq: Seq, n_tokens: int) -> None:
        """Follow a sequence that was truncated. Raises ``NotFound`` before ``folded_tokens``."""
        self._check(lib.kvs_state_truncate(self.ptr, seq.ptr, n_tokens))

    def fold(self) -> None:
        """Fold pending rows into the matrices now."""
        self._check(lib.kvs_state_fold(self.ptr))

    def clear(self) -> None:
        """Back to position 0 of no sequence."""
        self._check(lib.kvs_state_clear(self.ptr))

    def copy_to(self, other: State) -> None:
        """Make ``other`` equal to this state; it belongs to no sequence then."""
        self._check(lib.kvs_state_copy(self.ptr, other.ptr))

    def save(self) -> NDArray[np.uint8]:
        """The folded state and pending rows as an image."""
        image = np.empty(self.info.image_bytes, np.uint8)
        self.save_into(image)
        return image

    def save_into(self, image: NDArray[np.uint8]) -> None:
        """Write the image into ``image``, which has ``info.image_bytes`` bytes."""
        into = ffi.from_buffer("uint8_t[]", image, require_writable=True)
        self._check(lib.kvs_state_save(self.ptr, into, image.nbytes))

    def load(self, image: NDArray[np.uint8]) -> None:
        """Take an image back; the state belongs to no sequence then. Raises ``FormatError`` and stays as it was."""
        self._check(lib.kvs_state_load(self.ptr, ffi.from_buffer("uint8_t[]", image), image.nbytes))

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        self._check(lib.kvs_state_check_integrity(self.ptr))


def cut_image(image: NDArray[np.uint8], first_layer: int, n_layers: int) -> NDArray[np.uint8]:
    """The image of some of an image's layers. Raises ``FormatError`` for one that is damaged."""
    n_bytes = ffi.new("uint64_t *")
    given = ffi.from_buffer("uint8_t[]", image), image.nbytes, first_layer, n_layers
    check(lib.kvs_state_image_cut(*given, ffi.NULL, n_bytes))
    part = np.empty(n_bytes[0], np.uint8)
    check(lib.kvs_state_image_cut(*given, ffi.from_buffer("uint8_t[]", part, require_writable=True), n_bytes))
    return part


def join_images(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One image of the layers of two. Raises ``InvalidArgument`` where they are of states at different tokens."""
    n_bytes = ffi.new("uint64_t *")
    given = tuple(each for image in (first, second) for each in (ffi.from_buffer("uint8_t[]", image), image.nbytes))
    check(lib.kvs_state_image_join(*given, ffi.NULL, n_bytes))
    joined = np.empty(n_bytes[0], np.uint8)
    check(lib.kvs_state_image_join(*given, ffi.from_buffer("uint8_t[]", joined, require_writable=True), n_bytes))
    return joined
