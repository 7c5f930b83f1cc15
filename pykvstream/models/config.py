"""What a GGUF file says about a dense decoder.

Units: sizes in values, ``n_ctx_train`` in tokens.
Source: GGUF metadata keys ``<architecture>.*`` (spec/model.md 1.1 for the general ones).
Holds: ``ModelConfig.from_gguf``, which refuses by name what the runtime would otherwise get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile

_ROPE_PAIRS, _ROPE_HALVES = 0, 1
_ROPE_MODE = {"llama": _ROPE_PAIRS, "qwen3": _ROPE_HALVES}
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one model."""

    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope_base: float
    rope_scale: float
    n_rot: int
    rope_mode: int

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read and check. Raises ``FormatError`` for missing or contradictory keys, ``Unsupported`` by name."""
        arch = file.get_str("general.architecture")
        if arch not in _ROPE_MODE:
            raise Unsupported(f"architecture {arch!r} is not supported; supported: {', '.join(_ROPE_MODE)}")
        _refuse_experts(file, arch)
        n_embd = _size(file, f"{arch}.embedding_length")
        n_layers = _size(file, f"{arch}.block_count", _MAX_LAYERS)
        n_heads = _uniform(file, f"{arch}.attention.head_count", n_layers)
        n_kv_heads = _uniform(file, f"{arch}.attention.head_count_kv", n_layers, n_heads)
        if n_heads % n_kv_heads != 0:
            raise FormatError(f"{n_heads} query heads are no multiple of {n_kv_heads} KV heads",
                              key=f"{arch}.attention.head_count_kv")  # fmt: skip
        head_dim_k = _head_dim(file, f"{arch}.attention.key_length", n_embd, n_heads)
        config = cls(
            architecture=arch,
            name=file.get_str("general.name", default=""),
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim_k=head_dim_k,
            head_dim_v=_head_dim(file, f"{arch}.attention.value_length", n_embd, n_heads),
            n_ff=_uniform(file, f"{arch}.feed_forward_length", n_layers),
            n_vocab=_vocabulary(file),
            n_ctx_train=_size(file, f"{arch}.context_length"),
            norm_eps=_positive(file, f"{arch}.attention.layer_norm_rms_epsilon", None),
            rope_base=_positive(file, f"{arch}.rope.freq_base", 10000.0),
            rope_scale=_rope_scale(file, arch),
            n_rot=file.get_int(f"{arch}.rope.dimension_count", default=head_dim_k),
            rope_mode=_ROPE_MODE[arch],
        )
        if not 0 < config.n_rot <= head_dim_k or config.n_rot % 2 != 0:
            raise FormatError(f"{config.n_rot} rotary values do not fit heads of {head_dim_k}",
                              key=f"{arch}.rope.dimension_count")  # fmt: skip
        return config

    @property
    def tensor_names(self) -> frozenset[str]:
        """Every tensor that a file of this configuration may hold."""
        parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
        if self.architecture == "qwen3":
            parts += ["attn_q_norm", "attn_k_norm"]
        names = {f"blk.{i}.{part}.weight" for i in range(self.n_layers) for part in parts}
        return frozenset(names | {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"})


def _size(file: GgufFile, key: str, largest: int = 2**31 - 1) -> int:
    value = file.get_int(key)
    if not 0 < value <= largest:
        raise FormatError(f"{value} is not between 1 and {largest}", key=key)
    return value


def _uniform(file: GgufFile, key: str, n_layers: int, default: int | None = None) -> int:
    """A size that may be stored per layer; all layers must agree."""
    if default is not None and key not in file.metadata:
        return default
    values = {int(value) for value in file.get_ints(key, count=n_layers)}
    if len(values) != 1:
        raise Unsupported(f"{key} differs between layers: {sorted(values)}")
    value = values.pop()
    if not 0 < value < 2**31:
        raise FormatError(f"{value} is out of range", key=key)
    return value


def _positive(file: GgufFile, key: str, default: float | None) -> float:
    value = file.get_float(key) if default is None else file.get_float(key, default=default)
    if not 0.0 < value < float("inf"):
        raise FormatError(f"{value} is not a positive number", key=key)
    return value


def _head_dim(file: GgufFile, key: str, n_embd: int, n_heads: int) -> int:
    if key in file.metadata:
        return _size(file, key, 4096)
    if n_embd % n_heads != 0:
        raise FormatError(f"missing, and {n_embd} values are no multiple of {n_heads} heads", key=key)
    return n_embd // n_heads


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensor("token_embd.weight")
    if len(embedding.shape) != 2:
        raise FormatError("the embedding is not a matrix", offset=embedding.offset, key=embedding.name)
    return int(embedding.shape[1])


def _rope_scale(file: GgufFile, arch: str) -> float:
    kind = file.get_str(f"{arch}.rope.scaling.type", default="none")
    if kind == "none":
        return 1.0
    if kind == "linear":
        return 1.0 / _positive(file, f"{arch}.rope.scaling.factor", None)
    raise Unsupported(f"rope scaling {kind!r} is not supported; supported: none, linear")


def _refuse_experts(file: GgufFile, arch: str) -> None:
    if file.get_int(f"{arch}.expert_count", default=0) != 0:
        raise Unsupported(f"{arch} with experts is not supported")
