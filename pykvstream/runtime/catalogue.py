"""Kernels without a card: those that a model needs on an architecture, and those that any supported model can need.

Order: models that nobody has written are planned as if their file were there, so that the code that plans real ones
says what they need.
Holds: ``kernel_keys``, ``catalogue``, ``covering``; ``CACHE_TYPES``, ``cache_type``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pykvstream.core.cuda import CudaDevice, CudaPlanner, KernelKey
from pykvstream.core.device import Device
from pykvstream.errors import Unsupported
from pykvstream.gguf import DECODABLE, TYPES_BY_ID, GgmlType, GgufFile, TensorInfo
from pykvstream.gguf.metadata import Metadata
from pykvstream.gguf.parse import Image
from pykvstream.models import ModelConfig
from pykvstream.models.hybrid_config import DeltaSize, ExpertSize, HybridConfig
from pykvstream.models.span import LayerSpan
from pykvstream.models.tensors import Shape, expected_shapes
from pykvstream.runtime.target import Blueprint, TargetOptions

CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
"""Types of keys and values."""
TYPES = {kind.name: kind for kind in TYPES_BY_ID.values()}
HEAD_SIZES = (64, 96, 128, 256)
MIXES = (
    ("Q2_K", "Q3_K"), ("Q2_K", "Q4_K"), ("Q3_K", "Q4_K"), ("Q3_K", "Q5_K"), ("Q4_0", "Q6_K"), ("Q4_K", "Q5_K"),
    ("Q4_K", "Q6_K"), ("Q4_K", "Q8_0"), ("Q5_K", "Q6_K"), ("Q6_K", "Q8_0"), ("IQ3_XXS", "IQ3_S"), ("IQ3_S", "Q4_K"),
    ("IQ4_NL", "Q5_K"), ("IQ4_XS", "Q5_K"), ("IQ4_XS", "Q6_K"),
)  # fmt: skip
"""Pairs of weight types that files commonly mix: values of attention have the second one."""
_EMBD, _FF, _VOCAB, _CTX, _ROWS = 256, 4096, 512, 4096, 512
_DELTA_HEADS = (16, 32, 64, 128)
_TAPS = 4
_PRODUCTS = frozenset({"matmul", "matmul_wide", "matmul_float"})
_RECORDS = frozenset({"attend", "attend_mma", "attend_tile", "kv_write"})


def cache_type(name: str) -> GgmlType:
    """A cache type by name, ``q8_0`` or ``Q8_0``. Raises ``Unsupported`` with the list."""
    for kind in TYPES_BY_ID.values():
        if isinstance(name, str) and kind.name == name.upper() and kind.name in CACHE_TYPES:
            return kind
    known = ", ".join(kind.lower() for kind in CACHE_TYPES)
    raise Unsupported(f"cache type {name!r} is not supported; supported: {known}")


def kernel_keys(
    file: GgufFile,
    config: ModelConfig,
    device: Device,
    options: TargetOptions,
    head_file: GgufFile | None = None,
    *,
    span: LayerSpan | None = None,
) -> list[KernelKey]:
    """What a model needs on a device, as far as it is not listed there yet; nothing of a device without kernels.

    ``span``: of a model that is cut, the layers of one part.
    """
    known = len(device.kernels()) if isinstance(device, CudaDevice) else 0
    Blueprint(file, config, device, options, declared=True, head_file=head_file, span=span).close()
    return [key for key, _ in device.kernels()][known:] if isinstance(device, CudaDevice) else []


@dataclass(frozen=True, slots=True)
class _Imagined:
    """A model that nobody has written. ``type_of`` says of which type the matrix of a name is."""

    config: ModelConfig
    type_of: Callable[[str], GgmlType]

    def file(self) -> GgufFile:
        shapes = expected_shapes(self.config)
        tensors = {name: self._tensor(name, shape) for name, shape in shapes.items()}
        return GgufFile((Path("imagined"),), (Image(3, 32, Metadata({}), tensors),), ())

    def _tensor(self, name: str, shape: Shape) -> TensorInfo:
        is_plain = len(shape) == 1 or name.endswith("conv1d.weight")
        kind = TYPES["F32"] if is_plain else self.type_of(name)
        return TensorInfo(name, shape, kind, 0, prod(shape[1:]) * kind.row_bytes(shape[0]), 0)


def _dense(head_dim: int, type_of: Callable[[str], GgmlType], architecture: str = "qwen3") -> _Imagined:
    return _Imagined(_config(architecture, head_dim, None), type_of)


def _hybrid(delta_dim: int, type_of: Callable[[str], GgmlType], *, has_experts: bool) -> _Imagined:
    experts = ExpertSize(8, 2, _EMBD, _EMBD, 1.0) if has_experts else None
    hybrid = HybridConfig(
        is_recurrent=(True, False),
        n_mtp_blocks=1,
        n_ff=() if has_experts else (_FF,) * 3,
        rope_sections=(11, 11, 10),
        delta=DeltaSize(2, 4, delta_dim, _TAPS),
        experts=experts,
    )
    return _Imagined(_config("qwen35moe" if has_experts else "qwen35", 256, hybrid), type_of)


def _config(architecture: str, head_dim: int, hybrid: HybridConfig | None) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        name="imagined",
        n_layers=1 if hybrid is None else len(hybrid.is_recurrent),
        n_embd=_EMBD,
        n_heads=8,
        n_kv_heads=2,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        n_ff=_FF,
        n_vocab=_VOCAB,
        n_ctx_train=_CTX,
        norm_eps=1e-6,
        rope_base=1e6,
        rope_scale=1.0,
        n_rot=64,
        rope_mode=0 if architecture == "llama" else 1,
        hybrid=hybrid,
    )


def _all_of(kind: GgmlType) -> Callable[[str], GgmlType]:
    return lambda name: kind


def _mix_of(kind: GgmlType, of_values: GgmlType) -> Callable[[str], GgmlType]:
    return lambda name: of_values if "attn_v" in name else kind


def _pairs(n_before: int, is_sample: bool) -> Iterator[tuple[str, str]]:
    """Types of keys and of values; of a sample each type once on either side, in an order of ``n_before``."""
    for i, k in enumerate(CACHE_TYPES):
        for v in (CACHE_TYPES[(5 * i + n_before) % len(CACHE_TYPES)],) if is_sample else CACHE_TYPES:
            yield k, v


def _models(is_sample: bool) -> Iterator[tuple[_Imagined, GgmlType, GgmlType]]:
    """Models with the types of their keys and values."""
    plain = TYPES["F32"]
    for n_before, head_dim in enumerate(HEAD_SIZES):
        for k, v in _pairs(n_before, is_sample):
            yield _dense(head_dim, _all_of(plain)), TYPES[k], TYPES[v]
    for kind in sorted(DECODABLE, key=lambda kind: kind.id):
        yield _dense(64, _all_of(kind), "llama"), plain, plain
        for has_experts in (False, True):
            yield _hybrid(128, _all_of(kind), has_experts=has_experts), plain, plain
    for first, second in MIXES:
        yield _dense(64, _mix_of(TYPES[first], TYPES[second])), plain, plain
    for delta_dim in _DELTA_HEADS:
        yield _hybrid(delta_dim, _all_of(plain), has_experts=False), plain, plain


def catalogue(arch: int, *, is_sample: bool = False) -> list[KernelKey]:
    """Every kernel of an architecture: each pair of types of keys and values with each head size, each weight type and
    the mixes that are common, in dense and hybrid models with and without experts, each size of recurrent heads.

    A model that mixes weight types otherwise, or has other sizes, needs kernels beside these. ``is_sample``: fewer
    pairs of types, still each type.
    """
    with CudaPlanner(arch) as device:
        for model, k, v in _models(is_sample):
            options = TargetOptions(k, v, _ROWS, _CTX, mtp=model.config.hybrid is not None)
            kernel_keys(model.file(), model.config, device, options)
        return [key for key, _ in device.kernels()]


def covering(keys: Iterable[KernelKey]) -> list[KernelKey]:
    """A few of the keys that have everything that is in any: each source, each value of each macro of a source that is
    no type, each weight type in one kind of matmul, and each type of keys and of values in one source that reads it."""
    left = {key: _features(key) for key in keys}
    wanted = set().union(*left.values())
    chosen: list[KernelKey] = []
    while wanted:
        # The first of those that bring most, so that the same keys give the same choice.
        best = max(left, key=lambda key: len(left[key] & wanted))
        chosen.append(best)
        wanted -= left.pop(best)
    return chosen


def _features(key: KernelKey) -> frozenset[tuple[str, str, int]]:
    found = {(key.source, "", 0)}
    for name, value in key.macros:
        if name in ("KVS_TYPE_K", "KVS_TYPE_V") and key.source in _RECORDS:
            found.add(("records", name, value))
        elif name in ("KVS_T0", "KVS_T1", "KVS_T2", "KVS_T3") and key.source in _PRODUCTS:
            found.add(("products", "type", value))
        elif key.source != "embed":
            found.add((key.source, name, value))
    return frozenset(found)
