"""Small random GGUF models that a loader takes for real ones.

Shapes: weights are declared in ne order (input features first), as files hold them.
Holds: ``write_random_model``, ``random_tensor_bytes``, ``byte_level_vocabulary``. Architectures: dense
``llama`` and ``qwen3``. Matrices have the deviation 1/sqrt(input features) and norm weights lie around 1, so
that every layer matters and logits have a deviation of about 1: a wrong layer shows, and greedy choices are
rarely near ties.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import ENCODABLE, GgmlType, GgufWriter, ValueType, decode, encode
from tests.blocks import FLOORS_AT, put_halves, put_scales

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
N_BYTE_TOKENS = 256
SMALLEST_VOCABULARY = N_BYTE_TOKENS + len(CONTROL_TOKENS)

_WORDS = ("the", "in", "and", "er", "of", "an", "re", "on", "to", "ing")
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5

@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, their types and the merges of a byte-level BPE tokenizer."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]

    def id(self, token: str) -> int:
        """Return the number of a token."""
        return self.tokens.index(token)


def write_random_model(
    path: str | os.PathLike[str],
    *,
    arch: str = "llama",
    n_layers: int = 2,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int = 128,
    n_vocab: int = 320,
    ctx: int = 2048,
    weight_type: GgmlType = GgmlType.F32,
    tied: bool = False,
    rope_base: float = 10000.0,
    scale: float | None = None,
    extra: Mapping[str, npt.ArrayLike] | None = None,
    keys: Mapping[str, int | float | bool | str] | None = None,
    seed: int = 0,
) -> None:
    """Write a model of ``arch`` ("llama" or "qwen3") whose matrices are of ``weight_type`` and norms F32.

    ``head_dim`` is ``n_embd // n_heads`` unless given. Row lengths (``n_embd``, ``n_heads * head_dim``,
    ``n_ff``) must be whole blocks of ``weight_type``. With ``scale`` every matrix but the embedding is divided
    by it and has a ``.scale`` tensor that multiplies its outputs again. ``extra`` tensors are F32. ``keys``
    are added under ``<arch>.`` to those that the arguments say. The same arguments give the same bytes.
    """
    if arch not in ("llama", "qwen3"):
        raise ValueError(f"no random models of {arch!r}")
    head = n_embd // n_heads if head_dim is None else head_dim
    rng = np.random.default_rng(seed)
    writer = GgufWriter()
    writer.add("general.architecture", arch)
    writer.add("general.name", f"random {arch} {seed}")
    _add_hyperparameters(
        writer, arch, n_layers, n_embd, n_heads, n_kv_heads, head, n_ff, n_vocab, ctx, rope_base
    )
    for key, value in (keys or {}).items():
        writer.add(f"{arch}.{key}", value)
    _add_tokenizer(writer, byte_level_vocabulary(n_vocab), "qwen2" if arch == "qwen3" else "gpt2")

    def matrix(name: str, n_in: int, n_out: int, deviation: float | None = None) -> None:
        std = 1 / sqrt(n_in) if deviation is None else deviation
        if scale is not None and name != "token_embd":
            std /= scale
            writer.add_tensor(f"{name}.scale", np.array([scale], np.float32))
        data = random_tensor_bytes(rng, (n_in, n_out), weight_type, std)
        writer.add_tensor(f"{name}.weight", data, weight_type, (n_in, n_out))

    def norm(name: str, n: int) -> None:
        writer.add_tensor(f"{name}.weight", (1 + 0.2 * rng.standard_normal(n)).astype(np.float32))

    matrix("token_embd", n_embd, n_vocab, None if tied else 1.0)
    norm("output_norm", n_embd)
    if not tied:
        matrix("output", n_embd, n_vocab)
    for layer in range(n_layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm", n_embd)
        matrix(f"{block}.attn_q", n_embd, n_heads * head)
        matrix(f"{block}.attn_k", n_embd, n_kv_heads * head)
        matrix(f"{block}.attn_v", n_embd, n_kv_heads * head)
        matrix(f"{block}.attn_output", n_heads * head, n_embd)
        if arch == "qwen3":
            norm(f"{block}.attn_q_norm", head)
            norm(f"{block}.attn_k_norm", head)
        norm(f"{block}.ffn_norm", n_embd)
        matrix(f"{block}.ffn_gate", n_embd, n_ff)
        matrix(f"{block}.ffn_up", n_embd, n_ff)
        matrix(f"{block}.ffn_down", n_ff, n_embd)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write(path)


def random_tensor_bytes(
    rng: np.random.Generator, shape: tuple[int, ...], kind: GgmlType, std: float
) -> npt.NDArray[np.uint8]:
    """Return the encoded bytes of a random tensor of ``kind`` with mean about 0 and deviation about ``std``.

    Types without an encoder get random codes under scales that are chosen to give that mean and deviation.
    """
    row_bytes = kind.row_bytes(shape[0])
    if kind in ENCODABLE:
        values = rng.standard_normal((prod(shape[1:]), shape[0]), np.float32) * np.float32(std)
        return encode(kind, values).reshape(-1)
    n_blocks = prod(shape[1:]) * row_bytes // kind.block_bytes
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), dtype=np.uint8)
    floor_at = FLOORS_AT.get(kind)
    put_scales(kind, blocks, 1.0)
    floor = 0.0
    if floor_at is not None:
        put_halves(blocks, floor_at, 0.0)
        upper = float(decode(kind, blocks).mean())
        put_halves(blocks, floor_at, 1.0)
        floor = upper / (upper - float(decode(kind, blocks).mean()))
        put_halves(blocks, floor_at, floor)
    scale = std / float(decode(kind, blocks).std())
    put_scales(kind, blocks, scale)
    if floor_at is not None:
        put_halves(blocks, floor_at, floor * scale)
    if kind is GgmlType.MXFP4:
        _double_some(blocks, std / float(decode(kind, blocks).std()), rng)
    return blocks.reshape(-1)


def _double_some(blocks: npt.NDArray[np.uint8], ratio: float, rng: np.random.Generator) -> None:
    """Double the scales of as many MXFP4 blocks as multiply the deviation by ``ratio``, which is between 1 and 2."""
    blocks[:, 0] += rng.random(len(blocks)) < (ratio * ratio - 1) / 3


def byte_level_vocabulary(n_vocab: int) -> Vocabulary:
    """Return 256 byte tokens, the merges of some short words as room allows, control tokens, then unused
    padding.
    """
    if n_vocab < SMALLEST_VOCABULARY:
        raise ValueError(f"{n_vocab} tokens, need at least {SMALLEST_VOCABULARY}")
    tokens = _byte_tokens()
    merges: list[str] = []
    for word in (*_WORDS, *("\u0120" + word for word in _WORDS)):
        for cut in range(1, len(word)):
            if len(tokens) + len(CONTROL_TOKENS) < n_vocab and word[: cut + 1] not in tokens:
                merges.append(f"{word[:cut]} {word[cut]}")
                tokens.append(word[: cut + 1])
    types = [_NORMAL] * len(tokens) + [_CONTROL] * len(CONTROL_TOKENS)
    tokens += CONTROL_TOKENS
    padding = n_vocab - len(tokens)
    tokens += [f"[PAD{i}]" for i in range(padding)]
    return Vocabulary(tuple(tokens), tuple(types + [_UNUSED] * padding), tuple(merges))


def _byte_tokens() -> list[str]:
    """The GPT-2 alphabet: printable bytes stand for themselves, the others for code points from 256
    upwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    tokens, other = [], 256
    for byte in range(N_BYTE_TOKENS):
        tokens.append(chr(byte if byte in printable else other))
        other += byte not in printable
    return tokens


def _add_hyperparameters(
    writer: GgufWriter,
    arch: str,
    n_layers: int,
    n_embd: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    n_ff: int,
    n_vocab: int,
    ctx: int,
    rope_base: float,
) -> None:
    whole = {
        "block_count": n_layers,
        "context_length": ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": n_vocab,
    }
    for key, value in whole.items():
        writer.add(f"{arch}.{key}", value)
    writer.add(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add(f"{arch}.rope.freq_base", rope_base)


def _add_tokenizer(writer: GgufWriter, vocabulary: Vocabulary, pre: str) -> None:
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", vocabulary.tokens, ValueType.STRING)
    writer.add_array("tokenizer.ggml.token_type", vocabulary.types, ValueType.INT32)
    writer.add_array("tokenizer.ggml.merges", vocabulary.merges, ValueType.STRING)
    writer.add("tokenizer.ggml.bos_token_id", vocabulary.id("<|endoftext|>"))
    writer.add("tokenizer.ggml.eos_token_id", vocabulary.id("<|im_end|>"))
    writer.add("tokenizer.ggml.padding_token_id", vocabulary.id("<|endoftext|>"))
    writer.add("tokenizer.ggml.add_bos_token", False)
    writer.add("tokenizer.chat_template", CHAT_TEMPLATE)
