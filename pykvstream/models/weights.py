"""Weights of a file on a device, each brought once, when first asked for.

Holds: ``FileWeights``; ``check`` compares every tensor with what the configuration expects before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pykvstream.core.device import Device
from pykvstream.core.tape import Weight, WeightLayout
from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile, TensorInfo
from pykvstream.gguf.metadata import Bytes
from pykvstream.models.config import ModelConfig

Progress = Callable[[str, int], None]
"""``progress(tensor name, bytes)`` after each tensor that was brought to the device; borrowed rows are not."""


class FileWeights:
    """The tensors of a file as device weights. ``declared``: shapes only, nothing is read or brought anywhere."""

    def __init__(
        self, file: GgufFile, device: Device, progress: Progress | None = None, *, declared: bool = False
    ) -> None:
        self._declared = declared
        self._file = file
        self._device = device
        self._progress = progress
        self._made: dict[tuple[str, WeightLayout], Weight] = {}

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, int]:
        """``(n, k)``: rows and values per row."""
        info = self._file.tensor(name)
        k = info.shape[0]
        return info.n_values // k, k

    def panels(self, name: str) -> Weight:
        return self._get(name, WeightLayout.PANELS)

    def rows(self, name: str) -> Weight:
        return self._get(name, WeightLayout.ROWS)

    def _get(self, name: str, layout: WeightLayout) -> Weight:
        key = (name, layout)
        if key not in self._made:
            info = self._file.tensor(name)
            n, k = self.shape(name)
            rows = None if self._declared else self._read(name)
            scales = self._scales(name) if layout is WeightLayout.PANELS else ()
            self._made[key] = Weight(self._device, info.type.id, k, n, rows, layout, scales)
            if self._progress is not None and layout is WeightLayout.PANELS:
                self._progress(name, info.nbytes)
        return self._made[key]

    def _scales(self, name: str) -> tuple[float, ...]:
        """What the output of a matmul with the tensor is multiplied by; files of 4-bit floats have it beside them."""
        scale = _companion(name, "scale")
        if self._declared or scale not in self._file.tensors:
            return ()
        values = self._read(scale).view("<f4")
        if not np.isfinite(values).all():
            raise FormatError("the scale of a tensor is not finite", key=scale)
        return tuple(float(value) for value in values)

    def _read(self, name: str) -> Bytes:
        self._device.before_file()
        return self._file.tensor_data(name)

    @property
    def device_bytes(self) -> int:
        """Device memory of all weights made so far."""
        return sum(weight.device_bytes for weight in self._made.values())

    def close(self) -> None:
        """Give all weights back; tapes that use them keep theirs."""
        for weight in self._made.values():
            weight.close()
        self._made.clear()


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Compare every tensor's shape with the configuration.

    Raises ``FormatError`` for a missing or misshapen tensor and ``Unsupported`` for one that would be ignored.
    """
    q_cols = config.n_heads * config.head_dim_k
    k_cols = config.n_kv_heads * config.head_dim_k
    v_cols = config.n_kv_heads * config.head_dim_v
    shapes = {
        "attn_norm": (config.n_embd,),
        "attn_q": (config.n_embd, q_cols),
        "attn_k": (config.n_embd, k_cols),
        "attn_v": (config.n_embd, v_cols),
        "attn_output": (config.n_heads * config.head_dim_v, config.n_embd),
        "attn_q_norm": (config.head_dim_k,),
        "attn_k_norm": (config.head_dim_k,),
        "ffn_norm": (config.n_embd,),
        "ffn_gate": (config.n_embd, config.n_ff),
        "ffn_up": (config.n_embd, config.n_ff),
        "ffn_down": (config.n_ff, config.n_embd),
        "token_embd": (config.n_embd, config.n_vocab),
        "output": (config.n_embd, config.n_vocab),
        "output_norm": (config.n_embd,),
        "rope_freqs": (config.n_rot // 2,),
    }
    expected = config.tensor_names
    scaled = {name for name in expected if len(shapes[_part(name)]) == 2} - {"token_embd.weight"}
    scales = {_companion(name, "scale") for name in scaled}
    # Ranges of inputs, for engines that quantize them to 4 bits; they do not change what the weights mean.
    unused = {_companion(name, "input_scale") for name in scaled}
    for name in file.tensors:
        if name in scales:
            _check_shape(file.tensor(name), (1,))
        elif name not in expected and name not in unused:
            raise Unsupported(f"tensor {name!r} has no place in architecture {config.architecture!r}")
    for name in sorted(expected):
        if name not in file.tensors:
            if name in ("output.weight", "rope_freqs.weight"):
                continue
            raise FormatError("the tensor is missing", key=name)
        _check_shape(file.tensor(name), shapes[_part(name)])


def _part(name: str) -> str:
    """``"attn_q"`` of ``"blk.3.attn_q.weight"``."""
    return name.removesuffix(".weight").split(".")[-1]


def _companion(name: str, suffix: str) -> str:
    """``"blk.3.attn_q.scale"`` of ``"blk.3.attn_q.weight"``."""
    return f"{name.removesuffix('.weight')}.{suffix}"


def _check_shape(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if tuple(info.shape) != shape:
        raise FormatError(f"shape {tuple(info.shape)}, the metadata says {shape}", offset=info.offset, key=info.name)
    if len(shape) == 1 and info.type.name != "F32":
        raise Unsupported(f"tensor {info.name!r} of type {info.type.name}: vectors must be F32")
