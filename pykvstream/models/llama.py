"""Dense pre-norm decoders: ``llama`` and ``qwen3``.

    h = x + W_o attend(rope(q), rope(k), v),   q, k, v = W norm(x)
    x' = h + W_down(silu(W_gate norm(h)) * W_up norm(h))

``qwen3`` normalises each head of q and k before the rotation.
Source: Touvron et al. 2023 (LLaMA); Qwen team 2025 (Qwen3 technical report); tensor names of the GGUF format.
"""

from __future__ import annotations

import math

from pykvstream.core.kv import KvLayer
from pykvstream.graph import FrontSpec, Graph, GraphBuilder, Value, WeightSource
from pykvstream.models.config import ModelConfig
from pykvstream.models.span import LayerSpan
from pykvstream.models.stream import Stream


def build(
    config: ModelConfig,
    weights: WeightSource,
    layers: tuple[KvLayer, ...],
    rotation: tuple[int, int],
    *,
    span: LayerSpan | None = None,
    front: FrontSpec | None = None,
) -> Graph:
    """The whole model: tokens in, logits of the requested rows out, ``[m, n_vocab]``; last the sampling front of these.

    ``span``: of a model that is cut, the layers of one part; see ``LayerSpan`` for what goes in and out there.
    """
    g = GraphBuilder(weights, layers)
    span = span or LayerSpan.whole(config)
    has_divisors = weights.has("rope_freqs.weight")
    table = g.rope_table(
        config.n_rot, config.rope_base, config.rope_scale, "rope_freqs.weight" if has_divisors else None
    )
    x = Stream.begin(g, config, span)
    for i in span.layers:
        x = x.plus(_attention(g, config, i, i - span.begin, x.value, table, rotation))
        x = x.plus(_feed_forward(g, config, i, x.value))
    if not span.is_last:
        return x.hand_over()
    hidden = g.norm(g.gather(x.value), "output_norm.weight", config.norm_eps)
    is_tied = not weights.has("output.weight")
    logits = g.linear(hidden, "token_embd.weight" if is_tied else "output.weight")
    g.output(logits)
    if front is not None:
        g.output(g.front(logits, front))
    return g.finish()


def _attention(
    g: GraphBuilder, config: ModelConfig, i: int, layer: int, x: Value, table: Value, rotation: tuple[int, int]
) -> Value:
    """Of block ``i``, whose keys and values are in ``layer`` of the cache."""
    block = f"blk.{i}."
    h = g.norm(x, block + "attn_norm.weight", config.norm_eps)
    q = g.linear(h, block + "attn_q.weight")
    k = g.linear(h, block + "attn_k.weight")
    v = g.linear(h, block + "attn_v.weight")
    rotate_k, rotate_v = rotation
    q = _turned(g, config, q, block + "attn_q_norm.weight", table, rotate_k)
    k = _turned(g, config, k, block + "attn_k_norm.weight", table, rotate_k)
    if rotate_v:
        v = g.hadamard(v, rotate_v)
    g.kv_write(layer, k, v)
    out = g.attend(layer, q, config.n_heads, 1.0 / math.sqrt(config.head_dim_k))
    if rotate_v:
        out = g.hadamard(out, rotate_v)
    return g.linear(out, block + "attn_output.weight")


def _turned(g: GraphBuilder, config: ModelConfig, x: Value, norm: str, table: Value, block: int) -> Value:
    """Heads as scores are made of them, rotated by Walsh-Hadamard in blocks of ``block`` values, 0 none."""
    if config.architecture == "qwen3":
        x = g.norm(x, norm, config.norm_eps, group=config.head_dim_k)
    x = g.rope(x, table, config.head_dim_k, config.n_rot, config.rope_mode)
    return g.hadamard(x, block) if block else x


def _feed_forward(g: GraphBuilder, config: ModelConfig, i: int, x: Value) -> Value:
    block = f"blk.{i}."
    h = g.norm(x, block + "ffn_norm.weight", config.norm_eps)
    gate = g.linear(h, block + "ffn_gate.weight")
    up = g.linear(h, block + "ffn_up.weight")
    return g.linear(g.swiglu(gate, up), block + "ffn_down.weight")
