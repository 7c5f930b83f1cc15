"""Hybrids of gated full attention and gated delta nets: ``qwen35`` and, with experts, ``qwen35moe``.

    h  = x + mix(norm(x)),   mix = attention in every few layers, else the delta net
    x' = h + feed_forward(norm(h))

Attention: each head of q and k is normalised, the first ``n_rot`` values of it rotated by positions on three axes, and
what a head attends to is multiplied by sigmoid(gate), gate a projection of its own. Keys and values may be kept
rotated by a Walsh-Hadamard matrix; the gate belongs to values that are not.
Delta net: norm over the values of each head, then times silu(z).
Source: spec/model.md 1.5 and 2.1; Yang et al. 2024 (Gated Delta Networks); tensor names of the GGUF format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pykvstream.core.kv import KvLayer
from pykvstream.errors import InvalidArgument
from pykvstream.graph import DeltaSpec, FrontSpec, Graph, GraphBuilder, Value, WeightSource
from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import ExpertSize, HybridConfig
from pykvstream.models.span import LayerSpan
from pykvstream.models.stream import Stream


def build(
    config: ModelConfig,
    weights: WeightSource,
    layers: tuple[KvLayer, ...],
    rotation: tuple[int, int],
    *,
    with_hidden: bool = False,
    span: LayerSpan | None = None,
    front: FrontSpec | None = None,
) -> Graph:
    """The trunk: tokens in, logits of the requested rows out, ``[m, n_vocab]``. ``layers``: of full attention alone.

    ``with_hidden``: behind the logits also what the MTP head starts from, the normalised rows of all tokens,
    ``[n, n_embd]``. ``span``: of a model that is cut, the layers of one part; see ``LayerSpan``. ``front``: last the
    sampling front of the logits.
    """
    blocks = blocks_of(config, weights, layers, rotation)
    return blocks.trunk(span or LayerSpan.whole(config), with_hidden=with_hidden, front=front)


def blocks_of(
    config: ModelConfig, weights: WeightSource, layers: tuple[KvLayer, ...], rotation: tuple[int, int]
) -> Blocks:
    """A graph that begins. Raises ``InvalidArgument`` for another architecture."""
    if config.hybrid is None:
        raise InvalidArgument(f"{config.architecture} has no recurrent layers")
    return Blocks(config, config.hybrid, weights, GraphBuilder(weights, layers), rotation)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What layers are made of, those of the trunk and that of an MTP head."""

    config: ModelConfig
    hybrid: HybridConfig
    weights: WeightSource
    g: GraphBuilder
    rotation: tuple[int, int]

    def trunk(self, span: LayerSpan, *, with_hidden: bool, front: FrontSpec | None) -> Graph:
        """The layers of a span, and behind the last one the output; see ``build``."""
        config, g = self.config, self.g
        table = self.rope_table()
        x = Stream.begin(g, config, span)
        n_attention = 0
        for i in span.layers:
            h = g.norm(x.value, f"blk.{i}.attn_norm.weight", config.norm_eps)
            if self.hybrid.is_recurrent[i]:
                x = x.plus(self._delta_net(f"blk.{i}.", h))
            else:
                x = x.plus(self.attention(f"blk.{i}.", n_attention, h, table))
                n_attention += 1
            h = g.norm(x.value, f"blk.{i}.post_attention_norm.weight", config.norm_eps)
            x = x.plus(self.feed_forward(f"blk.{i}.", h))
        if not span.is_last:
            return x.hand_over()
        hidden = g.norm(g.gather(x.value), "output_norm.weight", config.norm_eps)
        logits = g.linear(hidden, self.output_weight)
        g.output(logits)
        if with_hidden:
            # Once more, of all rows: what the logits are made of stays as it is without a head.
            g.output(g.norm(x.value, "output_norm.weight", config.norm_eps))
        if front is not None:
            g.output(g.front(logits, front))
        return g.finish()

    @property
    def output_weight(self) -> str:
        """What gives logits; files may leave it to the embedding."""
        return "output.weight" if self.weights.has("output.weight") else "token_embd.weight"

    def rope_table(self) -> Value:
        """Rotations of the rows of a pass on three axes."""
        config = self.config
        _, second, third = self.hybrid.rope_sections
        return self.g.rope_table(config.n_rot, config.rope_base, config.rope_scale, sections=(second, third))

    def keys_and_values(self, block: str, h: Value, table: Value) -> tuple[Value, Value]:
        """What the cache keeps of each row."""
        k = self.g.linear(h, block + "attn_k.weight")
        v = self.g.linear(h, block + "attn_v.weight")
        return self._as_cached(block, k, v, table)

    def _as_cached(self, block: str, k: Value, v: Value, table: Value) -> tuple[Value, Value]:
        rotate_k, rotate_v = self.rotation
        k = self._turned(k, block + "attn_k_norm.weight", table)
        return self.g.hadamard(k, rotate_k) if rotate_k else k, self.g.hadamard(v, rotate_v) if rotate_v else v

    def _turned(self, x: Value, norm: str, table: Value) -> Value:
        config, g = self.config, self.g
        x = g.norm(x, norm, config.norm_eps, group=config.head_dim_k)
        return g.rope(x, table, config.head_dim_k, config.n_rot, config.rope_mode)

    def attention(self, block: str, layer: int, h: Value, table: Value) -> Value:
        """Gated attention of a block whose keys and values are in ``layer`` of the cache."""
        config, g = self.config, self.g
        q = g.linear(h, block + "attn_q.query")
        k = g.linear(h, block + "attn_k.weight")
        v = g.linear(h, block + "attn_v.weight")
        gate = g.linear(h, block + "attn_q.gate")
        rotate_k, rotate_v = self.rotation
        q = self._turned(q, block + "attn_q_norm.weight", table)
        if rotate_k:
            q = g.hadamard(q, rotate_k)
        g.kv_write(layer, *self._as_cached(block, k, v, table))
        out = g.attend(layer, q, config.n_heads, 1.0 / math.sqrt(config.head_dim_k))
        if rotate_v:
            out = g.hadamard(out, rotate_v)
        return g.linear(g.sigmoid_gate(gate, out), block + "attn_output.weight")

    def _delta_net(self, block: str, h: Value) -> Value:
        g, size = self.g, self.hybrid.delta
        inputs = g.linear(h, block + "attn_qkv.weight")
        z = g.linear(h, block + "attn_gate.weight")
        beta = g.linear(h, block + "ssm_beta.weight")
        alpha = g.linear(h, block + "ssm_alpha.weight")
        bias = block + "ssm_dt.bias"
        spec = DeltaSpec(
            n_key_heads=size.n_key_heads,
            n_value_heads=size.n_value_heads,
            head_dim=size.head_dim,
            conv_width=size.conv_width,
            norm_eps=self.config.norm_eps,
            conv=block + "ssm_conv1d.weight",
            dt_bias=bias if self.weights.has(bias) else block + "ssm_dt",
            decay=block + "ssm_a",
        )
        out = g.delta(inputs, beta, alpha, spec)
        out = g.norm(out, block + "ssm_norm.weight", self.config.norm_eps, group=size.head_dim)
        return g.linear(g.swiglu(z, out), block + "ssm_out.weight")

    def feed_forward(self, block: str, h: Value) -> Value:
        """The dense or the routed part of a block."""
        if self.hybrid.experts is None:
            return self._gated(h, block, "")
        return self._experts(block, h, self.hybrid.experts)

    def _gated(self, h: Value, block: str, suffix: str) -> Value:
        g = self.g
        gate = g.linear(h, f"{block}ffn_gate{suffix}.weight")
        up = g.linear(h, f"{block}ffn_up{suffix}.weight")
        return g.linear(g.swiglu(gate, up), f"{block}ffn_down{suffix}.weight")

    def _experts(self, block: str, h: Value, size: ExpertSize) -> Value:
        """Routed experts, and the shared expert behind a gate of one column."""
        g = self.g
        router = g.linear(h, block + "ffn_gate_inp.weight")
        gate, up, down = (f"{block}ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        routed = g.experts(h, router, gate, up, down, size.n_used, size.weight_scale)
        shared = self._gated(h, block, "_shexp")
        shared_gate = g.linear(h, block + "ffn_gate_inp_shexp.weight")
        return g.add(routed, g.sigmoid_gate(shared_gate, shared))
