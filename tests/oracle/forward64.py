"""The float64 forward pass of dense ``llama`` and ``qwen3`` models, written for clarity: the oracle of whole
models.

Shapes: activations [n_tokens, features]; q, k, v [n_tokens, heads, head_dim]; logits [n_tokens, n_vocab].
Order: float64 throughout, weights decoded once; no attempt at any particular order of sums.
Source: spec/model.md 1.5 for the layer; ``llama`` files pair elements (2i, 2i+1) for RoPE, ``qwen3`` (i, i +
n_rot/2).
Holds: ``Forward64``, ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import GgufFile

Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class _History:
    """The keys and values of one layer for all tokens so far."""

    k: Array
    v: Array


@dataclass(slots=True)
class Forward64:
    """A model with its history. Calling it with token ids appends them and returns the logits of each of
    their rows.
    """

    file: GgufFile
    arch: str = field(init=False)
    n_layers: int = field(init=False)
    n_heads: int = field(init=False)
    n_kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    n_rot: int = field(init=False)
    rope_base: float = field(init=False)
    eps: float = field(init=False)
    weights: dict[str, Array] = field(init=False)
    history: list[_History] = field(init=False)

    def __post_init__(self) -> None:
        f = self.file
        self.arch = f.get_str("general.architecture")
        if self.arch not in ("llama", "qwen3"):
            raise ValueError(f"no float64 oracle for {self.arch!r}")
        a = self.arch
        self.n_layers = f.get_int(f"{a}.block_count")
        self.n_heads = f.get_int(f"{a}.attention.head_count")
        self.n_kv_heads = f.get_int(f"{a}.attention.head_count_kv", self.n_heads)
        n_embd = f.get_int(f"{a}.embedding_length")
        self.head_dim = f.get_int(f"{a}.attention.key_length", n_embd // self.n_heads)
        self.n_rot = f.get_int(f"{a}.rope.dimension_count", self.head_dim)
        self.rope_base = f.get_float(f"{a}.rope.freq_base", 10000.0)
        self.eps = f.get_float(f"{a}.attention.layer_norm_rms_epsilon")
        if "rope_freqs.weight" in f.tensors or f.get_str(f"{a}.rope.scaling.type", "none") != "none":
            raise ValueError("RoPE scaling is no part of this oracle")
        self.weights = {name: f.tensor_array(name).astype(np.float64) for name in f.tensors}
        self.truncate(0)

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first ``n_tokens`` of the history; 0 starts anew."""
        if n_tokens == 0:
            empty = np.zeros((0, self.n_kv_heads, self.head_dim))
            self.history = [_History(empty, empty) for _ in range(self.n_layers)]
        for layer in self.history:
            layer.k, layer.v = layer.k[:n_tokens], layer.v[:n_tokens]

    def __call__(self, tokens: npt.ArrayLike) -> Array:
        ids = np.asarray(tokens, np.int64)
        start = len(self.history[0].k)
        positions = np.arange(start, start + len(ids))
        x = self.weights["token_embd.weight"][ids]
        for layer in range(self.n_layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"), positions)
            x = x + self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self._project(self._norm(x, "output_norm"), head)

    def _project(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self.weights[f"{name}.weight"].T)

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self.eps) * self.weights[f"{name}.weight"])

    def _rotate(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        half = self.n_rot // 2
        angle = positions[:, None] * self.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first = slice(0, self.n_rot, 2) if self.arch == "llama" else slice(0, half)
        second = slice(1, self.n_rot, 2) if self.arch == "llama" else slice(half, self.n_rot)
        rotated = x.copy()
        rotated[..., first] = x[..., first] * cos - x[..., second] * sin
        rotated[..., second] = x[..., first] * sin + x[..., second] * cos
        return rotated

    def _attention(self, layer: int, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        block, n = f"blk.{layer}", len(x)
        q = self._project(x, f"{block}.attn_q").reshape(n, self.n_heads, self.head_dim)
        k = self._project(x, f"{block}.attn_k").reshape(n, self.n_kv_heads, self.head_dim)
        v = self._project(x, f"{block}.attn_v").reshape(n, self.n_kv_heads, self.head_dim)
        if self.arch == "qwen3":
            q, k = self._norm(q, f"{block}.attn_q_norm"), self._norm(k, f"{block}.attn_k_norm")
        past = self.history[layer]
        past.k = np.concatenate((past.k, self._rotate(k, positions)))
        past.v = np.concatenate((past.v, v))
        group = self.n_heads // self.n_kv_heads
        keys, values = np.repeat(past.k, group, axis=1), np.repeat(past.v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", self._rotate(q, positions), keys) / np.sqrt(self.head_dim)
        scores[:, np.arange(len(keys)) > positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(n, -1)
        return self._project(mixed, f"{block}.attn_output")

    def _feed_forward(self, layer: int, x: Array) -> Array:
        block = f"blk.{layer}"
        gate = self._project(x, f"{block}.ffn_gate")
        up = self._project(x, f"{block}.ffn_up")
        return self._project(gate / (1 + np.exp(-gate)) * up, f"{block}.ffn_down")


def forward(file: GgufFile, tokens: npt.ArrayLike) -> Array:
    """Return the logits [n_tokens, n_vocab] of a whole sequence."""
    return Forward64(file)(tokens)
