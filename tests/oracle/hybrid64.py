"""The float64 forward pass of ``qwen35`` and ``qwen35moe``, written for clarity: the oracle of hybrid models.

Shapes: activations [n_tokens, features]; heads [n_tokens, heads, head size]; positions [3, n_tokens]; the state of a
value head [value, key].
Order: float64 throughout, weights decoded once; the recurrence goes token by token.
Source: spec/model.md 1.5, 2.1, 2.2 and 3.1.
Holds: ``Hybrid64``, and ``Mtp64``, the MTP head behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import GgufFile

Array = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]

_SMALLEST_ROUTER_SUM = 6.103515625e-05


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _silu(x: Array) -> Array:
    return np.asarray(x * _sigmoid(x))


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(0, x))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


@dataclass(slots=True)
class _Attended:
    """Keys and values of all tokens so far."""

    k: Array
    v: Array


@dataclass(slots=True)
class _Recurrent:
    """The last inputs of the convolution, and the matrix of each value head."""

    inputs: Array
    matrices: Array


@dataclass(slots=True)
class Hybrid64:
    """A model with its history. Calling it with token ids appends them and returns the logits of each of their rows."""

    file: GgufFile
    arch: str = field(init=False)
    n_layers: int = field(init=False)
    weights: dict[str, Array] = field(init=False)
    layers: list[_Attended | _Recurrent] = field(init=False)
    n_tokens: int = field(init=False, default=0)
    hidden: Array = field(init=False)

    def __post_init__(self) -> None:
        self.arch = self.file.get_str("general.architecture")
        if self.arch not in ("qwen35", "qwen35moe"):
            raise ValueError(f"no hybrid oracle for {self.arch!r}")
        self.n_layers = self._int("block_count") - self._int("nextn_predict_layers", 0)
        self.weights = {name: self.file.tensor_array(name).astype(np.float64) for name in self.file.tensors}
        self._split_fused()
        self.layers = [self._start(i) for i in range(self.n_layers)]

    def _int(self, key: str, default: int | None = None) -> int:
        name = f"{self.arch}.{key}"
        if default is not None and name not in self.file.metadata:
            return default
        values = self.file.get_ints(name) if self.file.metadata.entry(name).element else [self.file.get_int(name)]
        return max(int(value) for value in values)

    @property
    def eps(self) -> float:
        return self.file.get_float(f"{self.arch}.attention.layer_norm_rms_epsilon")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads, KV heads, values per head."""
        heads = self._int("attention.head_count"), self._int("attention.head_count_kv")
        return *heads, self._int("attention.key_length")

    @property
    def delta_sizes(self) -> tuple[int, int, int]:
        """Key heads, value heads, values per head."""
        return self._int("ssm.group_count"), self._int("ssm.time_step_rank"), self._int("ssm.state_size")

    def _is_recurrent(self, i: int) -> bool:
        return f"blk.{i}.ssm_a" in self.weights

    def _split_fused(self) -> None:
        """Give fused tensors the names and factors of their parts."""
        n_heads, n_kv, size = self.sizes
        for name, value in list(self.weights.items()):
            if name.endswith("ffn_gate_up_exps.weight"):
                stem, half = name.removesuffix("gate_up_exps.weight"), value.shape[1] // 2
                parts = {"gate_exps": value[:, :half], "up_exps": value[:, half:]}
                fused = stem + "gate_up_exps"
            elif name.endswith("attn_qkv.weight") and not self._is_recurrent(int(name.split(".")[1])):
                stem, ends = name.removesuffix("qkv.weight"), (2 * n_heads * size, (2 * n_heads + n_kv) * size)
                parts = dict(zip("qkv", np.split(value, ends), strict=True))
                fused = stem + "qkv"
            else:
                continue
            for part, rows in parts.items():
                self.weights[f"{stem}{part}.weight"] = rows
                if f"{fused}.scale" in self.weights:
                    self.weights[f"{stem}{part}.scale"] = self.weights[f"{fused}.scale"]

    def _start(self, i: int) -> _Attended | _Recurrent:
        if self._is_recurrent(i):
            _, n_values, size = self.delta_sizes
            channels, taps = self.weights[f"blk.{i}.ssm_conv1d.weight"].shape
            return _Recurrent(np.zeros((taps - 1, channels)), np.zeros((n_values, size, size)))
        _, n_kv, size = self.sizes
        return _Attended(np.zeros((0, n_kv, size)), np.zeros((0, n_kv, size)))

    def __call__(self, tokens: npt.ArrayLike, positions: npt.ArrayLike | None = None) -> Array:
        ids = np.asarray(tokens, np.int64)
        rows = np.arange(self.n_tokens, self.n_tokens + len(ids))
        where = np.broadcast_to(rows, (3, len(ids))) if positions is None else np.asarray(positions, np.int64)
        x = self.weights["token_embd.weight"][ids]
        for i, layer in enumerate(self.layers):
            block = f"blk.{i}."
            h = self._norm(x, block + "attn_norm")
            if isinstance(layer, _Recurrent):
                x = x + self._delta_net(block, layer, h)
            else:
                x = x + self._attention(block, layer, h, where, rows)
            x = x + self._feed_forward(block, self._norm(x, block + "post_attention_norm"))
        self.n_tokens += len(ids)
        self.hidden = self._norm(x, "output_norm")
        return self._project(self.hidden, self._shared("output", "token_embd"))

    def _shared(self, name: str, other: str) -> str:
        """The tensor of this name, another one where the file leaves it out."""
        return name if f"{name}.weight" in self.weights else other

    def _project(self, x: Array, name: str, expert: int | None = None) -> Array:
        weight, scale = self.weights[f"{name}.weight"], self.weights.get(f"{name}.scale", np.ones(1))
        if expert is None:
            return np.asarray(x @ np.atleast_2d(weight).T * scale[0])
        return np.asarray(x @ weight[expert].T * scale[expert if len(scale) > 1 else 0])

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + self.eps) * self.weights[f"{name}.weight"])

    def _rotate(self, x: Array, positions: Positions) -> Array:
        n_rot = self._int("rope.dimension_count")
        half = n_rot // 2
        _, second, third = self.file.get_ints(f"{self.arch}.rope.dimension_sections")[:3]
        pair = np.arange(half)
        axis = np.where((pair % 3 == 1) & (pair < 3 * second), 1, np.where((pair % 3 == 2) & (pair < 3 * third), 2, 0))
        base = self.file.get_float(f"{self.arch}.rope.freq_base", 10000.0)
        angle = positions[axis].T * base ** (-2 * pair / n_rot)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:n_rot]
        return np.concatenate((a * cos - b * sin, a * sin + b * cos, x[..., n_rot:]), axis=-1)

    def _attention(self, block: str, past: _Attended, x: Array, positions: Positions, rows: Positions) -> Array:
        n_heads, n_kv, size = self.sizes
        q_and_gate = self._project(x, block + "attn_q").reshape(len(x), n_heads, 2 * size)
        q, gate = q_and_gate[..., :size], q_and_gate[..., size:]
        k = self._project(x, block + "attn_k").reshape(len(x), n_kv, size)
        v = self._project(x, block + "attn_v").reshape(len(x), n_kv, size)
        q = self._rotate(self._norm(q, block + "attn_q_norm"), positions)
        past.k = np.concatenate((past.k, self._rotate(self._norm(k, block + "attn_k_norm"), positions)))
        past.v = np.concatenate((past.v, v))
        group = n_heads // n_kv
        keys, values = np.repeat(past.k, group, axis=1), np.repeat(past.v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, keys) / np.sqrt(size)
        scores[:, np.arange(len(keys)) > rows[:, None]] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", _softmax(scores), values) * _sigmoid(gate)
        return self._project(mixed.reshape(len(x), -1), block + "attn_output")

    def _delta_net(self, block: str, state: _Recurrent, x: Array) -> Array:
        n_keys, n_values, size = self.delta_sizes
        inputs = np.concatenate((state.inputs, self._project(x, block + "attn_qkv")))
        taps = self.weights[block + "ssm_conv1d.weight"]
        n_taps = taps.shape[1]
        mixed = _silu(sum(inputs[j : j + len(x)] * taps[:, j] for j in range(n_taps)))
        state.inputs = inputs[len(inputs) - n_taps + 1 :]
        width = n_keys * size
        q = self._unit(mixed[:, :width].reshape(len(x), n_keys, size))
        k = self._unit(mixed[:, width : 2 * width].reshape(len(x), n_keys, size))
        v = mixed[:, 2 * width :].reshape(len(x), n_values, size)
        write = _sigmoid(self._project(x, block + "ssm_beta"))
        bias = self.weights.get(block + "ssm_dt.bias", self.weights.get(block + "ssm_dt"))
        decay = np.exp(self.weights[block + "ssm_a"] * _softplus(self._project(x, block + "ssm_alpha") + bias))
        out = np.empty((len(x), n_values, size))
        for t in range(len(x)):
            for head in range(n_values):
                key, matrix = k[t, head % n_keys], state.matrices[head]
                matrix *= decay[t, head]
                matrix += np.outer(write[t, head] * (v[t, head] - matrix @ key), key)
                out[t, head] = matrix @ q[t, head % n_keys] / np.sqrt(size)
        z = self._project(x, block + "attn_gate").reshape(len(x), n_values, size)
        gated = self._norm(out, block + "ssm_norm") * _silu(z)
        return self._project(gated.reshape(len(x), -1), block + "ssm_out")

    def _unit(self, x: Array) -> Array:
        return np.asarray(x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + self.eps))

    def _feed_forward(self, block: str, x: Array) -> Array:
        if self.arch == "qwen35":
            return self._gated(x, block, "")
        probability = _softmax(self._project(x, block + "ffn_gate_inp"))
        scale = self.file.get_float(f"{self.arch}.expert_weights_scale", 0.0) or 1.0
        routed = np.zeros_like(x)
        for t, row in enumerate(probability):
            chosen = np.argsort(-row, kind="stable")[: self._int("expert_used_count")]
            share = row[chosen] / max(row[chosen].sum(), _SMALLEST_ROUTER_SUM) * scale
            for expert, weight in zip(chosen, share, strict=True):
                routed[t] += weight * self._gated(x[t : t + 1], block, "_exps", int(expert))[0]
        shared = self._gated(x, block, "_shexp")
        return routed + _sigmoid(self._project(x, block + "ffn_gate_inp_shexp")) * shared

    def _gated(self, x: Array, block: str, suffix: str, expert: int | None = None) -> Array:
        gate = self._project(x, f"{block}ffn_gate{suffix}", expert)
        up = self._project(x, f"{block}ffn_up{suffix}", expert)
        return self._project(_silu(gate) * up, f"{block}ffn_down{suffix}", expert)


@dataclass(slots=True)
class Mtp64:
    """The head of one block with its own keys and values. Rows are tokens with hidden rows of the position before."""

    trunk: Hybrid64
    past: _Attended = field(init=False)

    def __post_init__(self) -> None:
        _, n_kv, size = self.trunk.sizes
        self.past = _Attended(np.zeros((0, n_kv, size)), np.zeros((0, n_kv, size)))

    def __call__(self, tokens: npt.ArrayLike, hidden: Array, first: int) -> tuple[Array, Array]:
        """Append rows that begin at position ``first``; what was there from ``first`` on goes. Logits, hidden rows."""
        t = self.trunk
        ids = np.asarray(tokens, np.int64)
        block = f"blk.{t.n_layers}."
        self.past.k, self.past.v = self.past.k[:first], self.past.v[:first]
        rows = np.arange(first, first + len(ids))
        table = t.weights[t._shared(block + "nextn.embed_tokens", "token_embd") + ".weight"]
        e = t._norm(table[ids], block + "nextn.enorm")
        x = t._project(np.concatenate([e, t._norm(hidden, block + "nextn.hnorm")], axis=1), block + "nextn.eh_proj")
        positions = np.broadcast_to(rows, (3, len(ids)))
        x = x + t._attention(block, self.past, t._norm(x, block + "attn_norm"), positions, rows)
        x = x + t._feed_forward(block, t._norm(x, block + "post_attention_norm"))
        out = t._norm(x, t._shared(block + "nextn.shared_head_norm", "output_norm"))
        head = t._shared("output", "token_embd")
        return t._project(out, t._shared(block + "nextn.shared_head_head", head)), out
