"""Weights on a device.

Source: ``include/kvstream/tape.h``.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check
from pykvstream.errors import KvStreamError


class WeightLayout(enum.IntEnum):
    """How a weight lies on the device."""

    PANELS = lib.KVS_WEIGHT_PANELS
    ROWS = lib.KVS_WEIGHT_ROWS


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
        cell = new_cell("weight")
        view = ffi.NULL if rows is None else ffi.from_buffer(rows)
        check(lib.kvs_weight_create(device.ptr, type_id, k, n, view, int(layout), cell), device.ptr)
        self._rows = view if layout is WeightLayout.ROWS else None
        self.k = k
        self.n = n
        super().__init__(cell)
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
