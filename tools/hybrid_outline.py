"""GGUF files with the tensors of a hybrid model and no values: a 27B takes 50 KiB of disk.

What reads shapes alone works on them: ``inspect``, ``plan``, the trace device. A tensor reads as zeros.
Units: sizes are counts of values; ``Outline`` names them as the metadata does.
Source: spec/model.md 1.1, 1.2 and 1.5; the presets are the published sizes of Qwen3.5 models.
Holds: ``Outline``, ``OUTLINE_0_8B``, ``OUTLINE_27B``, ``write_outline``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from pykvstream.gguf import GgmlType, GgufWriter, ValueType

ARCH = "qwen35"
INTERVAL = 4
"""Each fourth layer attends, the others are recurrent."""

TensorInfo = tuple[str, GgmlType, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Outline:
    """A dense hybrid with one MTP block and untied embeddings: types as in files of 4.25 bits per weight."""

    name: str
    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_ff: int
    n_value_heads: int
    n_key_heads: int = 16
    head_dim: int = 256
    state: int = 128
    conv: int = 4
    n_rot: int = 64
    sections: tuple[int, ...] = (11, 11, 10, 0)
    n_vocab: int = 248_320
    ctx: int = 262_144
    kind: GgmlType = GgmlType.IQ4_XS
    wide: GgmlType = GgmlType.Q6_K
    mtp_kind: GgmlType = GgmlType.Q8_0

    @property
    def n_values(self) -> int:
        """Channels of the values of a recurrent layer."""
        return self.n_value_heads * self.state

    @property
    def n_channels(self) -> int:
        """Channels of its convolution: queries, keys and values."""
        return 2 * self.n_key_heads * self.state + self.n_values


OUTLINE_0_8B = Outline("0.8B", 1024, 24, 8, 2, 3584, n_value_heads=16)
OUTLINE_27B = Outline("27B", 5120, 64, 24, 4, 17408, n_value_heads=48)


def write_outline(path: str | os.PathLike[str], outline: Outline) -> None:
    """Write the file. Raises ``OSError``."""
    writer = GgufWriter()
    writer.add("general.architecture", ARCH)
    writer.add("general.name", f"outline of {outline.name}")
    for key, value in _keys(outline).items():
        writer.add(f"{ARCH}.{key}", value)
    writer.add_array(f"{ARCH}.rope.dimension_sections", outline.sections, ValueType.INT32)
    for name, kind, shape in _tensors(outline):
        writer.add_zeros(name, kind, shape)
    writer.write(path)


def _keys(outline: Outline) -> dict[str, int | float]:
    return {
        "block_count": outline.n_layers + 1,
        "nextn_predict_layers": 1,
        "context_length": outline.ctx,
        "embedding_length": outline.n_embd,
        "feed_forward_length": outline.n_ff,
        "full_attention_interval": INTERVAL,
        "attention.head_count": outline.n_heads,
        "attention.head_count_kv": outline.n_kv_heads,
        "attention.key_length": outline.head_dim,
        "attention.value_length": outline.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": outline.n_rot,
        "ssm.conv_kernel": outline.conv,
        "ssm.state_size": outline.state,
        "ssm.group_count": outline.n_key_heads,
        "ssm.time_step_rank": outline.n_value_heads,
        "ssm.inner_size": outline.n_values,
    }


def _tensors(outline: Outline) -> Iterator[TensorInfo]:
    n_embd, f32 = outline.n_embd, GgmlType.F32
    yield "token_embd.weight", outline.wide, (n_embd, outline.n_vocab)
    yield "output_norm.weight", f32, (n_embd,)
    yield "output.weight", outline.wide, (n_embd, outline.n_vocab)
    for i in range(outline.n_layers + 1):
        is_mtp = i == outline.n_layers
        if is_mtp:
            part = (*_attention(outline, outline.mtp_kind), *_mtp(outline))
        elif (i + 1) % INTERVAL == 0:
            part = tuple(_attention(outline, outline.kind))
        else:
            part = tuple(_recurrent(outline))
        for name, kind, shape in (*part, *_every_block(outline)):
            yield f"blk.{i}.{name}", kind, shape


def _every_block(outline: Outline) -> Iterator[TensorInfo]:
    n_embd, n_ff = outline.n_embd, outline.n_ff
    for name in ("attn_norm", "post_attention_norm"):
        yield f"{name}.weight", GgmlType.F32, (n_embd,)
    yield "ffn_gate.weight", outline.kind, (n_embd, n_ff)
    yield "ffn_up.weight", outline.kind, (n_embd, n_ff)
    yield "ffn_down.weight", outline.kind, (n_ff, n_embd)


def _attention(outline: Outline, kind: GgmlType) -> Iterator[TensorInfo]:
    n_embd, head_dim = outline.n_embd, outline.head_dim
    yield "attn_q.weight", kind, (n_embd, 2 * outline.n_heads * head_dim)
    yield "attn_k.weight", kind, (n_embd, outline.n_kv_heads * head_dim)
    yield "attn_v.weight", kind, (n_embd, outline.n_kv_heads * head_dim)
    yield "attn_output.weight", kind, (outline.n_heads * head_dim, n_embd)
    for name in ("attn_q_norm", "attn_k_norm"):
        yield f"{name}.weight", GgmlType.F32, (head_dim,)


def _mtp(outline: Outline) -> Iterator[TensorInfo]:
    yield "nextn.eh_proj.weight", outline.mtp_kind, (2 * outline.n_embd, outline.n_embd)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        yield f"nextn.{name}.weight", GgmlType.F32, (outline.n_embd,)


def _recurrent(outline: Outline) -> Iterator[TensorInfo]:
    n_embd, heads, f32 = outline.n_embd, outline.n_value_heads, GgmlType.F32
    yield "attn_qkv.weight", outline.kind, (n_embd, outline.n_channels)
    yield "attn_gate.weight", outline.kind, (n_embd, outline.n_values)
    yield "ssm_conv1d.weight", f32, (outline.conv, outline.n_channels)
    yield "ssm_dt.bias", f32, (heads,)
    yield "ssm_a", f32, (heads,)
    yield "ssm_alpha.weight", f32, (n_embd, heads)
    yield "ssm_beta.weight", f32, (n_embd, heads)
    yield "ssm_norm.weight", f32, (outline.state,)
    yield "ssm_out.weight", outline.kind, (outline.n_values, n_embd)
