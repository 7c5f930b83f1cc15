"""Small random ``qwen35`` and ``qwen35moe`` files, with everything that such files may hold in several ways.

Shapes: matrices are kept as encoded rows, so that fusing tensors is a matter of rows for every type.
Source: spec/model.md 1.1, 1.2 and 10.2. All parameters are random, norms and decays too: a network initialised as for
training hides a missing bias, a wrong head order or a norm that is applied twice.
Holds: ``HybridShape``, ``write_random_hybrid``. The same shape and seed give the same weights, however they are fused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import GgmlType, GgufWriter, ValueType
from tests.models import CHAT_TEMPLATE, byte_level_vocabulary, random_tensor_bytes

Floats = npt.NDArray[np.float32]
Value = int | float | str | tuple[Sequence[int], ValueType]


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, how many of them a token uses, and the widths of one and of the shared one."""

    n_experts: int = 8
    n_used: int = 3
    n_ff: int = 128
    n_ff_shared: int = 96
    weight_scale: float | None = None


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Sizes, and how the file says things. ``interval`` 4: layers 3, 7, ... attend.

    ``lists_recurrent`` writes the flags instead of the interval, ``lists_heads`` head counts per block with zeros on
    recurrent layers. ``widths``: feed-forward sizes per block instead of ``n_ff``.
    """

    n_layers: int = 8
    interval: int = 4
    n_embd: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_rot: int = 16
    sections: tuple[int, ...] = (3, 3, 2, 0)
    n_key_heads: int = 2
    n_value_heads: int = 6
    state: int = 32
    conv: int = 4
    n_ff: int = 512
    widths: tuple[int, ...] = ()
    n_vocab: int = 512
    n_tokens: int | None = None
    ctx: int = 4096
    experts: Experts | None = None
    n_mtp: int = 0
    is_tied: bool = False
    is_fused: bool = False
    has_scales: bool = False
    has_short_dt: bool = False
    lists_recurrent: bool = False
    lists_heads: bool = False
    weight_type: GgmlType = GgmlType.F32
    head_type: GgmlType | None = None
    rope_base: float | None = 1e7

    @property
    def arch(self) -> str:
        return "qwen35" if self.experts is None else "qwen35moe"

    @property
    def n_blocks(self) -> int:
        return self.n_layers + self.n_mtp

    def is_recurrent(self, i: int) -> bool:
        return i < self.n_layers and (i + 1) % self.interval != 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """Encoded rows ``[n, row_bytes]`` (of experts one after another) and the shape in ne order."""

    rows: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    kind: GgmlType


@dataclass(slots=True)
class _Weights:
    """Tensors in file order."""

    shape: HybridShape
    rng: np.random.Generator
    tensors: dict[str, Matrix | Floats] = field(default_factory=dict)

    def matrix(self, name: str, n_in: int, *n_out: int, std: float | None = None, kind: GgmlType | None = None) -> None:
        chosen = self.shape.weight_type if kind is None else kind
        shape = (n_in, *n_out)
        deviation = n_in**-0.5 if std is None else std
        data = random_tensor_bytes(self.rng, shape, chosen, deviation)
        self.tensors[f"{name}.weight"] = Matrix(data.reshape(-1, chosen.row_bytes(n_in)), shape, chosen)

    def vector(self, name: str, values: npt.ArrayLike) -> None:
        self.tensors[name] = np.asarray(values, np.float32)

    def norm(self, name: str, n: int) -> None:
        self.vector(f"{name}.weight", 1 + 0.2 * self.rng.standard_normal(n))

    def matrix_at(self, name: str) -> Matrix:
        found = self.tensors[f"{name}.weight"]
        assert isinstance(found, Matrix)
        return found


def write_random_hybrid(
    path: str | os.PathLike[str],
    shape: HybridShape,
    seed: int = 0,
    *,
    keys: Mapping[str, Value | None] = MappingProxyType({}),
    tensors: Mapping[str, Floats | None] = MappingProxyType({}),
) -> None:
    """Write one file; rows of every matrix must be whole blocks of ``weight_type``.

    ``keys`` (below ``<architecture>.``) and ``tensors`` replace what the shape says; None leaves one out.
    """
    writer = GgufWriter()
    writer.add("general.architecture", shape.arch)
    writer.add("general.name", f"random {shape.arch}")
    for key, value in (make_keys(shape) | dict(keys)).items():
        if isinstance(value, tuple):
            writer.add_array(f"{shape.arch}.{key}", *value)
        elif value is not None:
            writer.add(f"{shape.arch}.{key}", value)
    _add_vocabulary(writer, shape)
    for name, tensor in (make_tensors(shape, seed) | dict(tensors)).items():
        if isinstance(tensor, Matrix):
            writer.add_tensor(name, tensor.rows.reshape(-1), tensor.kind, tensor.shape)
        elif tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write(path)


def make_tensors(shape: HybridShape, seed: int) -> dict[str, Matrix | Floats]:
    """Every tensor of the file by name."""
    weights = _Weights(shape, np.random.default_rng(seed))
    weights.matrix("token_embd", shape.n_embd, shape.n_vocab, std=None if shape.is_tied else 1.0)
    weights.norm("output_norm", shape.n_embd)
    if not shape.is_tied:
        weights.matrix("output", shape.n_embd, shape.n_vocab, kind=shape.head_type)
    for i in range(shape.n_blocks):
        _add_block(weights, i)
    for i in range(shape.n_layers, shape.n_blocks):
        weights.matrix(f"blk.{i}.nextn.eh_proj", 2 * shape.n_embd, shape.n_embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            weights.norm(f"blk.{i}.nextn.{name}", shape.n_embd)
    if shape.is_fused:
        for i in range(shape.n_blocks):
            _fuse_block(weights, i)
    if shape.has_scales:
        _add_scales(weights)
    if shape.has_short_dt:
        weights.tensors = {name.removesuffix(".bias"): tensor for name, tensor in weights.tensors.items()}
    return weights.tensors


def _add_block(weights: _Weights, i: int) -> None:
    shape, block = weights.shape, f"blk.{i}."
    weights.norm(block + "attn_norm", shape.n_embd)
    weights.norm(block + "post_attention_norm", shape.n_embd)
    if shape.is_recurrent(i):
        _add_delta(weights, block)
    else:
        _add_attention(weights, block)
    if shape.experts is None:
        n_ff = shape.widths[i] if shape.widths else shape.n_ff
        weights.matrix(block + "ffn_gate", shape.n_embd, n_ff)
        weights.matrix(block + "ffn_up", shape.n_embd, n_ff)
        weights.matrix(block + "ffn_down", n_ff, shape.n_embd)
    else:
        _add_experts(weights, block, shape.experts)


def _add_attention(weights: _Weights, block: str) -> None:
    shape = weights.shape
    weights.matrix(block + "attn_q", shape.n_embd, shape.n_heads * 2 * shape.head_dim)
    weights.matrix(block + "attn_k", shape.n_embd, shape.n_kv_heads * shape.head_dim)
    weights.matrix(block + "attn_v", shape.n_embd, shape.n_kv_heads * shape.head_dim)
    weights.matrix(block + "attn_output", shape.n_heads * shape.head_dim, shape.n_embd)
    weights.norm(block + "attn_q_norm", shape.head_dim)
    weights.norm(block + "attn_k_norm", shape.head_dim)


def _add_delta(weights: _Weights, block: str) -> None:
    shape, rng = weights.shape, weights.rng
    n_values = shape.n_value_heads * shape.state
    channels = 2 * shape.n_key_heads * shape.state + n_values
    weights.matrix(block + "attn_qkv", shape.n_embd, channels)
    weights.matrix(block + "attn_gate", shape.n_embd, n_values)
    weights.matrix(block + "ssm_beta", shape.n_embd, shape.n_value_heads)
    weights.matrix(block + "ssm_alpha", shape.n_embd, shape.n_value_heads)
    weights.matrix(block + "ssm_conv1d", shape.conv, channels, std=0.5, kind=GgmlType.F32)
    weights.vector(block + "ssm_dt.bias", rng.standard_normal(shape.n_value_heads) - 2)
    weights.vector(block + "ssm_a", -rng.uniform(0.05, 8, shape.n_value_heads))
    weights.norm(block + "ssm_norm", shape.state)
    weights.matrix(block + "ssm_out", n_values, shape.n_embd)


def _add_experts(weights: _Weights, block: str, experts: Experts) -> None:
    n_embd, n = weights.shape.n_embd, experts.n_experts
    weights.matrix(block + "ffn_gate_inp", n_embd, n, kind=GgmlType.F32)
    weights.matrix(block + "ffn_gate_exps", n_embd, experts.n_ff, n)
    weights.matrix(block + "ffn_up_exps", n_embd, experts.n_ff, n)
    weights.matrix(block + "ffn_down_exps", experts.n_ff, n_embd, n)
    weights.matrix(block + "ffn_gate_shexp", n_embd, experts.n_ff_shared)
    weights.matrix(block + "ffn_up_shexp", n_embd, experts.n_ff_shared)
    weights.matrix(block + "ffn_down_shexp", experts.n_ff_shared, n_embd)
    weights.vector(block + "ffn_gate_inp_shexp.weight", weights.rng.standard_normal(n_embd) * n_embd**-0.5)


def _fuse_block(weights: _Weights, i: int) -> None:
    shape, block = weights.shape, f"blk.{i}."
    if not shape.is_recurrent(i):
        _replace(weights, block + "attn_qkv", [block + f"attn_{part}" for part in "qkv"], 1)
    if shape.experts is not None:
        parts = [block + f"ffn_{part}_exps" for part in ("gate", "up")]
        _replace(weights, block + "ffn_gate_up_exps", parts, shape.experts.n_experts)


def _replace(weights: _Weights, name: str, parts: list[str], n_groups: int) -> None:
    """One tensor for several: of each group of rows, those of the first part, of the second and so on."""
    found = [weights.matrix_at(part) for part in parts]
    rows = np.concatenate([each.rows.reshape(n_groups, -1, each.rows.shape[1]) for each in found], axis=1)
    first = found[0]
    weights.tensors = {key: value for key, value in weights.tensors.items() if key[: -len(".weight")] not in parts}
    groups = (n_groups,) if len(first.shape) == 3 else ()
    fused = Matrix(rows.reshape(-1, rows.shape[2]), (first.shape[0], rows.shape[1], *groups), first.kind)
    weights.tensors[f"{name}.weight"] = fused


def _add_scales(weights: _Weights) -> None:
    """A factor for each matrix, or for each expert of it."""
    for name, tensor in list(weights.tensors.items()):
        if isinstance(tensor, Matrix) and "token_embd" not in name and "conv1d" not in name:
            n = tensor.shape[2] if len(tensor.shape) == 3 else 1
            stem = name.removesuffix("weight")
            weights.vector(stem + "scale", weights.rng.uniform(0.7, 1.4, n))
            weights.vector(stem + "input_scale", np.full(1, 0.01))


def make_keys(shape: HybridShape) -> dict[str, Value]:
    """What the file says under ``<architecture>.``: numbers, or a list with the type of its elements."""
    keys: dict[str, Value] = {
        "block_count": shape.n_blocks,
        "context_length": shape.ctx,
        "embedding_length": shape.n_embd,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": shape.n_rot,
        "rope.dimension_sections": (shape.sections, ValueType.INT32),
        "ssm.conv_kernel": shape.conv,
        "ssm.state_size": shape.state,
        "ssm.group_count": shape.n_key_heads,
        "ssm.time_step_rank": shape.n_value_heads,
        "ssm.inner_size": shape.n_value_heads * shape.state,
    }
    if shape.rope_base is not None:
        keys["rope.freq_base"] = shape.rope_base
    if shape.n_mtp:
        keys["nextn_predict_layers"] = shape.n_mtp
    return keys | _block_keys(shape) | _expert_keys(shape)


def _expert_keys(shape: HybridShape) -> dict[str, Value]:
    if shape.experts is None:
        return {}
    keys: dict[str, Value] = {
        "expert_count": shape.experts.n_experts,
        "expert_used_count": shape.experts.n_used,
        "expert_feed_forward_length": shape.experts.n_ff,
        "expert_shared_feed_forward_length": shape.experts.n_ff_shared,
    }
    if shape.experts.weight_scale is not None:
        keys["expert_weights_scale"] = shape.experts.weight_scale
    return keys


def _block_keys(shape: HybridShape) -> dict[str, Value]:
    """Keys that may be one number or a list with an entry for each block."""
    keys: dict[str, Value] = {}
    flags = [shape.is_recurrent(i) for i in range(shape.n_blocks)]
    if shape.lists_recurrent:
        keys["attention.recurrent_layers"] = (flags, ValueType.BOOL)
    else:
        keys["full_attention_interval"] = shape.interval
    for key, value in (("head_count", shape.n_heads), ("head_count_kv", shape.n_kv_heads)):
        values = [0 if flag else value for flag in flags]
        keys[f"attention.{key}"] = (values, ValueType.UINT32) if shape.lists_heads else value
    if shape.widths:
        keys["feed_forward_length"] = (shape.widths, ValueType.INT32)
    elif shape.experts is None:
        keys["feed_forward_length"] = shape.n_ff
    return keys


def _add_vocabulary(writer: GgufWriter, shape: HybridShape) -> None:
    vocabulary = byte_level_vocabulary(shape.n_vocab if shape.n_tokens is None else shape.n_tokens)
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", vocabulary.tokens, ValueType.STRING)
    writer.add_array("tokenizer.ggml.token_type", vocabulary.types, ValueType.INT32)
    writer.add_array("tokenizer.ggml.merges", vocabulary.merges, ValueType.STRING)
    writer.add("tokenizer.ggml.eos_token_id", vocabulary.id("<|im_end|>"))
    writer.add("tokenizer.ggml.padding_token_id", vocabulary.id("<|endoftext|>"))
    writer.add("tokenizer.ggml.add_bos_token", False)
    writer.add("tokenizer.chat_template", CHAT_TEMPLATE)
