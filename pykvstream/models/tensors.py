"""Which tensors a file of a configuration must and may hold, and which weights are part of a tensor.

Shapes: in ne order, the row length first, as files state them.
Source: spec/model.md 1.2.
Holds: ``check_tensors`` compares all of it before anything is loaded, ``check_head_tensors`` those of a head in a file
of its own; ``selections``, ``head_selections``; ``expected_shapes``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile, TensorInfo
from pykvstream.gguf.metadata import Metadata
from pykvstream.gguf.parse import Image
from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import ExpertSize, HybridConfig

Shape = tuple[int, ...]

_NO_MATRIX = ("token_embd.weight", "embed_tokens.weight", "conv1d.weight")


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Rows of a tensor that are a weight of their own: of each ``stride`` rows behind row ``base``, ``repeats``
    times over, ``count`` rows that begin at row ``offset``.
    """

    tensor: str
    base: int
    repeats: int
    stride: int
    offset: int
    count: int

    @property
    def n_rows(self) -> int:
        return self.repeats * self.count


@dataclass(frozen=True, slots=True)
class ColumnSelection:
    """Values ``begin`` to ``begin + count`` of each row of a matrix that are a weight of their own; whole blocks."""

    tensor: str
    begin: int
    count: int


Selection = RowSelection | ColumnSelection


@dataclass(slots=True)
class _Expected:
    """Shapes by name. ``optional`` tensors may be missing, ``ignored`` ones are known to mean nothing here."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)

    def need(self, **shapes: Shape) -> None:
        """Matrices and vectors ``NAME.weight``."""
        self.shapes |= {f"{name}.weight": shape for name, shape in shapes.items()}

    def block(self, i: int, **shapes: Shape) -> None:
        self.need(**{f"blk.{i}.{name}": shape for name, shape in shapes.items()})

    def allow(self, name: str, shape: Shape) -> None:
        self.shapes[name] = shape
        self.optional.add(name)

    def allow_scales(self, experts: ExpertSize | None) -> None:
        """A matrix may come with a factor of its output: one, or one for each expert."""
        for name, shape in list(self.shapes.items()):
            if len(shape) >= 2 and not name.endswith(_NO_MATRIX):
                is_routed = experts is not None and len(shape) == 3
                self.allow(name.removesuffix("weight") + "scale", (experts.n_experts if experts and is_routed else 1,))
                # Ranges of inputs, for engines that quantize them to 4 bits; they do not change what weights mean.
                self.ignored.add(name.removesuffix("weight") + "input_scale")


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """Compare every tensor with the configuration.

    Raises ``FormatError`` for a missing or misshapen tensor and ``Unsupported`` for one that would be ignored.
    """
    expected = _dense(config) if config.hybrid is None else _hybrid(file, config, config.hybrid)
    for name in file.tensors:
        if name not in expected.shapes and name not in expected.ignored:
            raise Unsupported(f"tensor {name!r} has no place in architecture {config.architecture!r}")
    _compare(file, expected)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """What a file of a configuration holds that fuses nothing and has an output matrix of its own, by name."""
    nothing = GgufFile((Path("imagined"),), (Image(3, 32, Metadata({}), {}),), ())
    expected = _dense(config) if config.hybrid is None else _hybrid(nothing, config, config.hybrid)
    kept = {name: shape for name, shape in expected.shapes.items() if name not in expected.optional}
    return kept | {"output.weight": expected.shapes["output.weight"]}


def check_head_tensors(file: GgufFile, config: ModelConfig, i: int) -> None:
    """Compare the tensors of one MTP block, in a file of its own. Raises ``FormatError`` and ``Unsupported``."""
    expected = _Expected()
    if config.hybrid is not None:
        _expect_block(file, expected, config, config.hybrid, i)
        _expect_mtp(expected, config, i)
        expected.allow_scales(config.hybrid.experts)
    for name in file.tensors:
        if name.startswith(f"blk.{i}.") and name not in expected.shapes and name not in expected.ignored:
            raise Unsupported(f"tensor {name!r} has no place in an MTP head of {config.architecture!r}")
    _compare(file, expected)


def _compare(file: GgufFile, expected: _Expected) -> None:
    for name in sorted(expected.shapes):
        if name in file.tensors:
            _check_shape(file.tensor(name), expected.shapes[name])
        elif name not in expected.optional:
            raise FormatError("the tensor is missing", key=name)


def _check_shape(info: TensorInfo, shape: Shape) -> None:
    if tuple(info.shape) != shape:
        raise FormatError(f"shape {tuple(info.shape)}, the metadata says {shape}", offset=info.offset, key=info.name)
    is_plain = len(shape) == 1 or info.name.endswith("conv1d.weight")
    if is_plain and info.type.name != "F32":
        raise Unsupported(f"tensor {info.name!r} of type {info.type.name}: it must be F32")


def _top(config: ModelConfig) -> _Expected:
    expected = _Expected()
    expected.need(token_embd=(config.n_embd, config.n_vocab), output_norm=(config.n_embd,))
    expected.allow("output.weight", (config.n_embd, config.n_vocab))
    return expected


def _dense(config: ModelConfig) -> _Expected:
    expected = _top(config)
    expected.allow("rope_freqs.weight", (config.n_rot // 2,))
    for i in range(config.n_layers):
        q_cols, k_cols, v_cols = _attention_cols(config)
        expected.block(
            i,
            attn_norm=(config.n_embd,),
            attn_q=(config.n_embd, q_cols),
            attn_k=(config.n_embd, k_cols),
            attn_v=(config.n_embd, v_cols),
            attn_output=(config.n_heads * config.head_dim_v, config.n_embd),
            ffn_norm=(config.n_embd,),
            ffn_gate=(config.n_embd, config.n_ff),
            ffn_up=(config.n_embd, config.n_ff),
            ffn_down=(config.n_ff, config.n_embd),
        )
        if config.architecture == "qwen3":
            expected.block(i, attn_q_norm=(config.head_dim_k,), attn_k_norm=(config.head_dim_k,))
    expected.allow_scales(None)
    return expected


def _attention_cols(config: ModelConfig) -> tuple[int, int, int]:
    k_cols, v_cols = config.n_kv_heads * config.head_dim_k, config.n_kv_heads * config.head_dim_v
    return config.n_heads * config.head_dim_k, k_cols, v_cols


def _hybrid(file: GgufFile, config: ModelConfig, hybrid: HybridConfig) -> _Expected:
    expected = _top(config)
    blocks = (*range(config.n_layers), *hybrid.mtp_blocks)
    for i in blocks:
        _expect_block(file, expected, config, hybrid, i)
    for i in hybrid.mtp_blocks:
        _expect_mtp(expected, config, i)
    expected.allow_scales(hybrid.experts)
    return expected


def _expect_block(
    file: GgufFile, expected: _Expected, config: ModelConfig, hybrid: HybridConfig, i: int
) -> None:
    expected.block(i, attn_norm=(config.n_embd,), post_attention_norm=(config.n_embd,))
    if i in hybrid.recurrent_layers:
        _expect_delta(file, expected, config, hybrid, i)
    else:
        _expect_gated_attention(file, expected, config, i)
    if hybrid.experts is None:
        n_embd, n_ff = config.n_embd, hybrid.n_ff[i]
        expected.block(i, ffn_gate=(n_embd, n_ff), ffn_up=(n_embd, n_ff), ffn_down=(n_ff, n_embd))
    else:
        _expect_experts(file, expected, config.n_embd, hybrid.experts, i)


def _is_fused_attention(file: GgufFile, i: int) -> bool:
    return f"blk.{i}.attn_qkv.weight" in file.tensors


def _is_fused_experts(file: GgufFile, i: int) -> bool:
    return f"blk.{i}.ffn_gate_up_exps.weight" in file.tensors


def _expect_gated_attention(file: GgufFile, expected: _Expected, config: ModelConfig, i: int) -> None:
    q_cols, k_cols, v_cols = _attention_cols(config)
    gated = q_cols + config.n_heads * config.head_dim_v
    if _is_fused_attention(file, i):
        expected.block(i, attn_qkv=(config.n_embd, gated + k_cols + v_cols))
    else:
        expected.block(
            i, attn_q=(config.n_embd, gated), attn_k=(config.n_embd, k_cols), attn_v=(config.n_embd, v_cols)
        )
    expected.block(
        i,
        attn_q_norm=(config.head_dim_k,),
        attn_k_norm=(config.head_dim_k,),
        attn_output=(config.n_heads * config.head_dim_v, config.n_embd),
    )


def _expect_delta(
    file: GgufFile, expected: _Expected, config: ModelConfig, hybrid: HybridConfig, i: int
) -> None:
    delta = hybrid.delta
    value_cols = delta.n_value_heads * delta.head_dim
    expected.block(
        i,
        attn_qkv=(config.n_embd, delta.channels),
        attn_gate=(config.n_embd, value_cols),
        ssm_alpha=(config.n_embd, delta.n_value_heads),
        ssm_beta=(config.n_embd, delta.n_value_heads),
        ssm_conv1d=(delta.conv_width, delta.channels),
        ssm_norm=(delta.head_dim,),
        ssm_out=(value_cols, config.n_embd),
    )
    has_short_name = f"blk.{i}.ssm_dt" in file.tensors
    expected.shapes[f"blk.{i}.ssm_dt" + ("" if has_short_name else ".bias")] = (delta.n_value_heads,)
    expected.shapes[f"blk.{i}.ssm_a"] = (delta.n_value_heads,)


def _expect_experts(file: GgufFile, expected: _Expected, n_embd: int, experts: ExpertSize, i: int) -> None:
    n, n_ff, n_shared = experts.n_experts, experts.n_ff, experts.n_ff_shared
    if _is_fused_experts(file, i):
        expected.block(i, ffn_gate_up_exps=(n_embd, 2 * n_ff, n))
    else:
        expected.block(i, ffn_gate_exps=(n_embd, n_ff, n), ffn_up_exps=(n_embd, n_ff, n))
    expected.block(
        i,
        ffn_gate_inp=(n_embd, n),
        ffn_down_exps=(n_ff, n_embd, n),
        ffn_gate_shexp=(n_embd, n_shared),
        ffn_up_shexp=(n_embd, n_shared),
        ffn_down_shexp=(n_shared, n_embd),
        ffn_gate_inp_shexp=(n_embd,),
    )


def _expect_mtp(expected: _Expected, config: ModelConfig, i: int) -> None:
    block, n_embd = f"blk.{i}.nextn.", config.n_embd
    expected.block(i, **{"nextn.eh_proj": (2 * n_embd, n_embd), "nextn.enorm": (n_embd,), "nextn.hnorm": (n_embd,)})
    expected.allow(block + "shared_head_norm.weight", (n_embd,))
    expected.allow(block + "embed_tokens.weight", (n_embd, config.n_vocab))
    expected.allow(block + "shared_head_head.weight", (n_embd, config.n_vocab))


def selections(file: GgufFile, config: ModelConfig) -> dict[str, Selection]:
    """Weights that graphs name and files hold as part of a larger tensor, by the name that graphs use.

    Query and gate rows of attention alternate head by head; fused tensors hold their parts one after another, those
    of experts expert by expert. The columns of an MTP head's projection belong to the token, then to the hidden row.
    """
    hybrid = config.hybrid
    found: dict[str, Selection] = {}
    if hybrid is None:
        return found
    for i in hybrid.attention_layers:
        found |= _attention_rows(file, config, i)
    for i in range(config.n_layers):
        if hybrid.experts is not None and _is_fused_experts(file, i):
            found |= _expert_rows(hybrid.experts, i)
    for i in hybrid.mtp_blocks:
        found |= head_selections(file, config, i)
    return found


def head_selections(file: GgufFile, config: ModelConfig, i: int) -> dict[str, Selection]:
    """Those of one MTP block, which may lie in a file of its own."""
    found: dict[str, Selection] = {**_attention_rows(file, config, i)}
    if config.hybrid is not None and config.hybrid.experts is not None and _is_fused_experts(file, i):
        found |= _expert_rows(config.hybrid.experts, i)
    name = f"blk.{i}.nextn.eh_proj."
    for part, begin in (("embedding", 0), ("hidden", config.n_embd)):
        found[name + part] = ColumnSelection(name + "weight", begin, config.n_embd)
    return found


def _attention_rows(file: GgufFile, config: ModelConfig, i: int) -> dict[str, RowSelection]:
    q_cols, k_cols, v_cols = _attention_cols(config)
    block, k, v = f"blk.{i}.", config.head_dim_k, config.head_dim_v
    is_fused = _is_fused_attention(file, i)
    source = block + ("attn_qkv.weight" if is_fused else "attn_q.weight")
    heads = (0, config.n_heads, k + v)
    found = {
        block + "attn_q.query": RowSelection(source, *heads, 0, k),
        block + "attn_q.gate": RowSelection(source, *heads, k, v),
    }
    if is_fused:
        gated = q_cols + config.n_heads * v
        found[block + "attn_k.weight"] = RowSelection(source, gated, 1, k_cols, 0, k_cols)
        found[block + "attn_v.weight"] = RowSelection(source, gated + k_cols, 1, v_cols, 0, v_cols)
    return found


def _expert_rows(experts: ExpertSize, i: int) -> dict[str, RowSelection]:
    source, n_ff = f"blk.{i}.ffn_gate_up_exps.weight", experts.n_ff
    parts = (("gate", 0), ("up", n_ff))
    return {
        f"blk.{i}.ffn_{part}_exps.weight": RowSelection(source, 0, experts.n_experts, 2 * n_ff, offset, n_ff)
        for part, offset in parts
    }
