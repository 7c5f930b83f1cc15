"""The MTP head: one more block behind the trunk, which guesses the token after the next one.

    e = norm(embed(token)),  g = norm(hidden)
    x = W [e, g];  x' = x + attention(norm(x));  y = x' + feed_forward(norm(x'))
    hS = norm(y),  logits = W_out hS

``hidden`` of a row is the trunk's normalised output one position before, or, in a chain, the head's own ``hS``. Keys
and values of a row need nothing of the rows before it, so that catching up takes neither attention nor output.
Shapes: ``[n, n_embd]`` in and out, logits ``[n, n_vocab]``; the cache has one layer.
Source: spec/model.md 3.1; DeepSeek-AI 2024 (DeepSeek-V3 technical report), 2.2.
Holds: ``build_step``, ``build_catch_up``, ``check_head``.
"""

from __future__ import annotations

from pykvstream.core.kv import KvLayer
from pykvstream.errors import Unsupported
from pykvstream.graph import Graph, Value, WeightSource
from pykvstream.models.config import ModelConfig
from pykvstream.models.qwen35 import Blocks, blocks_of


def check_head(config: ModelConfig) -> int:
    """The block of the one head. Raises ``Unsupported`` where there is none, or more than one."""
    blocks = () if config.hybrid is None else config.hybrid.mtp_blocks
    if not blocks:
        raise Unsupported(f"the {config.architecture} model has no MTP head (nextn_predict_layers is 0)")
    if len(blocks) > 1:
        raise Unsupported(f"an MTP head of {len(blocks)} blocks is not supported; supported: 1")
    return blocks[0]


def build_step(config: ModelConfig, weights: WeightSource, layer: KvLayer, rotation: tuple[int, int]) -> Graph:
    """Rows that are drafted from: tokens and hidden rows in, logits and hidden rows of the head out."""
    b = blocks_of(config, weights, (layer,), rotation)
    i, g, eps = check_head(config), b.g, config.norm_eps
    block = f"blk.{i}."
    x = _combined(b, block)
    h = g.norm(x, block + "attn_norm.weight", eps)
    x = g.add(x, b.attention(block, 0, h, b.rope_table()))
    h = g.norm(x, block + "post_attention_norm.weight", eps)
    x = g.add(x, b.feed_forward(block, h))
    norm = _own(weights, block + "nextn.shared_head_norm.weight", "output_norm.weight")
    g.output(g.linear(g.norm(x, norm, eps), _own(weights, block + "nextn.shared_head_head.weight", b.output_weight)))
    g.output(g.norm(x, norm, eps))
    return g.finish()


def build_catch_up(config: ModelConfig, weights: WeightSource, layer: KvLayer, rotation: tuple[int, int]) -> Graph:
    """Rows of tokens that were said: tokens and hidden rows in, keys and values into the cache."""
    b = blocks_of(config, weights, (layer,), rotation)
    block = f"blk.{check_head(config)}."
    h = b.g.norm(_combined(b, block), block + "attn_norm.weight", config.norm_eps)
    b.g.kv_write(0, *b.keys_and_values(block, h, b.rope_table()))
    return b.g.finish()


def _combined(b: Blocks, block: str) -> Value:
    """The projection of both sides at once is the sum of those of its halves."""
    g, eps = b.g, b.config.norm_eps
    hidden = g.input(b.config.n_embd)
    table = _own(b.weights, block + "nextn.embed_tokens.weight", "token_embd.weight")
    e = g.norm(g.embed(table), block + "nextn.enorm.weight", eps)
    of_token = g.linear(e, block + "nextn.eh_proj.embedding")
    of_hidden = g.linear(g.norm(hidden, block + "nextn.hnorm.weight", eps), block + "nextn.eh_proj.hidden")
    return g.add(of_token, of_hidden)


def _own(weights: WeightSource, name: str, shared: str) -> str:
    """The head's own tensor where it has one."""
    return name if weights.has(name) else shared
