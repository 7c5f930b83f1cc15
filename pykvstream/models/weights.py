"""Weights of a file on a device, each brought once, when first asked for.

Holds: ``FileWeights``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.device import Device
from pykvstream.core.tape import Weight, WeightLayout
from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile, TensorInfo
from pykvstream.gguf.metadata import Bytes
from pykvstream.models.tensors import ColumnSelection, Selection

Progress = Callable[[str, int], None]
"""``progress(tensor name, bytes)`` after each tensor that was brought to the device; borrowed rows are not."""

_NOTHING: Mapping[str, Selection] = MappingProxyType({})


class FileWeights:
    """The tensors of a file as device weights. ``declared``: shapes only, nothing is read or brought anywhere.

    ``beside``: a second file, which has the tensors whose names begin with ``block``.
    ``selections``: weights that are part of a tensor, by name. A tensor of three dimensions is one of all its rows.
    """

    def __init__(
        self,
        file: GgufFile,
        device: Device,
        progress: Progress | None = None,
        *,
        declared: bool = False,
        selections: Mapping[str, Selection] = _NOTHING,
        beside: GgufFile | None = None,
        block: str = "",
    ) -> None:
        self._declared = declared
        self._file = file
        self._beside = beside
        self._block = block
        self._device = device
        self._progress = progress
        self._selections = selections
        self._made: dict[tuple[str, WeightLayout], Weight] = {}

    def has(self, name: str) -> bool:
        return name in self._selections or name in self._file_of(name).tensors

    def _file_of(self, name: str) -> GgufFile:
        return self._file if self._beside is None or not name.startswith(self._block) else self._beside

    def _tensor(self, name: str) -> TensorInfo:
        return self._file_of(name).tensor(name)

    def shape(self, name: str) -> tuple[int, int]:
        """``(n, k)``: rows and values per row."""
        selection = self._selections.get(name)
        info = self._tensor(name if selection is None else selection.tensor)
        k = info.shape[0]
        if isinstance(selection, ColumnSelection):
            _require_blocks(info, selection)
            return info.n_values // k, selection.count
        return (info.n_values // k if selection is None else selection.n_rows), k

    def factors(self, name: str) -> str | None:
        """The tensor that holds a factor for each expert of this weight, None where the file has none."""
        selection = self._selections.get(name)
        tensor = name if selection is None else selection.tensor
        scale = tensor.removesuffix("weight") + "scale"
        return scale if tensor.endswith(".weight") and scale in self._file_of(scale).tensors else None

    def panels(self, name: str) -> Weight:
        return self._get(name, WeightLayout.PANELS)

    def rows(self, name: str) -> Weight:
        return self._get(name, WeightLayout.ROWS)

    def _get(self, name: str, layout: WeightLayout) -> Weight:
        key = (name, layout)
        if key not in self._made:
            selection = self._selections.get(name)
            info = self._tensor(name if selection is None else selection.tensor)
            n, k = self.shape(name)
            rows = None if self._declared else self._bytes(name, selection)
            scales = self._scales(info.name) if layout is WeightLayout.PANELS else ()
            self._made[key] = Weight(self._device, info.type.id, k, n, rows, layout, scales)
            if self._progress is not None and layout is WeightLayout.PANELS:
                self._progress(name, n * info.type.row_bytes(k))
        return self._made[key]

    def _bytes(self, name: str, selection: Selection | None) -> NDArray[np.uint8]:
        if selection is None:
            return self._read(name)
        info = self._tensor(selection.tensor)
        rows = self._read(selection.tensor).reshape(-1, info.type.row_bytes(info.shape[0]))
        if isinstance(selection, ColumnSelection):
            first, n_bytes = info.type.row_bytes(selection.begin), info.type.row_bytes(selection.count)
            return np.ascontiguousarray(rows[:, first : first + n_bytes]).reshape(-1)
        span = rows[selection.base : selection.base + selection.repeats * selection.stride]
        parts = span.reshape(selection.repeats, selection.stride, -1)
        chosen = parts[:, selection.offset : selection.offset + selection.count]
        return np.ascontiguousarray(chosen).reshape(-1)

    def _scales(self, name: str) -> tuple[float, ...]:
        """What the output of a matmul with the tensor is multiplied by; files of 4-bit floats have it beside them."""
        scale = name.removesuffix("weight") + "scale"
        if self._declared or scale not in self._file_of(scale).tensors or len(self._tensor(name).shape) != 2:
            return ()
        values = self._read(scale).view("<f4")
        if not np.isfinite(values).all():
            raise FormatError("the scale of a tensor is not finite", key=scale)
        return tuple(float(value) for value in values)

    def _read(self, name: str) -> Bytes:
        self._device.before_file()
        return self._file_of(name).tensor_data(name)

    @property
    def device_bytes(self) -> int:
        """Device memory of all weights made so far."""
        return sum(weight.device_bytes for weight in self._made.values())

    def close(self) -> None:
        """Give all weights back; tapes that use them keep theirs."""
        for weight in self._made.values():
            weight.close()
        self._made.clear()


def _require_blocks(info: TensorInfo, selection: ColumnSelection) -> None:
    """A block of values has one scale and cannot be divided."""
    size = info.type.block_values
    if selection.begin % size or selection.count % size:
        raise Unsupported(
            f"tensor {info.name!r} of type {info.type.name}: {selection.count} values are no whole blocks of {size}"
        )
