"""What a GGUF file says about a decoder, dense or hybrid.

Units: sizes in values, ``n_ctx_train`` in tokens.
Source: GGUF metadata keys ``<architecture>.*`` (spec/model.md 1.1).
Holds: ``ModelConfig.from_gguf``, which refuses by name what the runtime would otherwise get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile
from pykvstream.models.assumed import refuse_other_mathematics
from pykvstream.models.hybrid_config import HYBRIDS, HybridConfig, check_sections, read_hybrid
from pykvstream.models.keys import fraction_of, positive_of, size_of, uniform_of

_ROPE_PAIRS, _ROPE_HALVES = 0, 1
_ROPE_MODE = {"llama": _ROPE_PAIRS, "qwen3": _ROPE_HALVES, **dict.fromkeys(HYBRIDS, _ROPE_HALVES)}
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one model. ``n_layers`` are those of the trunk; ``n_ff`` is the widest feed-forward part.

    ``hybrid``: what only models with recurrent layers have.
    """

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
    hybrid: HybridConfig | None = None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read and check. Raises ``FormatError`` for missing or contradictory keys, ``Unsupported`` by name."""
        arch = file.get_str("general.architecture")
        if arch not in _ROPE_MODE:
            raise Unsupported(f"architecture {arch[:80]!r} is not supported; supported: {', '.join(_ROPE_MODE)}")
        n_blocks = size_of(file, f"{arch}.block_count", _MAX_LAYERS)
        hybrid = read_hybrid(file, arch, n_blocks) if arch in HYBRIDS else None
        if hybrid is None:
            _refuse_experts(file, arch)
        with_attention = range(n_blocks) if hybrid is None else (*hybrid.attention_layers, *hybrid.mtp_blocks)
        n_embd = size_of(file, f"{arch}.embedding_length")
        n_heads = uniform_of(file, f"{arch}.attention.head_count", n_blocks, with_attention)
        n_kv_heads = uniform_of(file, f"{arch}.attention.head_count_kv", n_blocks, with_attention, n_heads)
        if n_heads % n_kv_heads != 0:
            raise FormatError(f"{n_heads} query heads are no multiple of {n_kv_heads} KV heads",
                              key=f"{arch}.attention.head_count_kv")  # fmt: skip
        head_dim_k = _head_dim(file, f"{arch}.attention.key_length", n_embd, n_heads)
        refuse_other_mathematics(
            file, arch, head_dim_k, has_experts=hybrid is not None and hybrid.experts is not None
        )
        config = cls(
            architecture=arch,
            name=file.get_str("general.name", default=""),
            n_layers=n_blocks if hybrid is None else n_blocks - hybrid.n_mtp_blocks,
            n_embd=n_embd,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim_k=head_dim_k,
            head_dim_v=_head_dim(file, f"{arch}.attention.value_length", n_embd, n_heads),
            n_ff=_widest(file, arch, n_blocks, hybrid),
            n_vocab=_vocabulary(file),
            n_ctx_train=size_of(file, f"{arch}.context_length"),
            norm_eps=fraction_of(file, f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_base=positive_of(file, f"{arch}.rope.freq_base", 10000.0),
            rope_scale=_rope_scale(file, arch),
            n_rot=file.get_int(f"{arch}.rope.dimension_count", default=head_dim_k),
            rope_mode=_ROPE_MODE[arch],
            hybrid=hybrid,
        )
        if not 0 < config.n_rot <= head_dim_k or config.n_rot % 2 != 0:
            raise FormatError(f"{config.n_rot} rotary values do not fit heads of {head_dim_k}",
                              key=f"{arch}.rope.dimension_count")  # fmt: skip
        if hybrid is not None:
            check_sections(arch, hybrid.rope_sections, config.n_rot)
        return config

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with keys and values, in the order of the cache's layers."""
        return tuple(range(self.n_layers)) if self.hybrid is None else self.hybrid.attention_layers

    @property
    def layer_counts(self) -> dict[str, int]:
        """Blocks of the file by what they are."""
        n_attention, hybrid = len(self.attention_layers), self.hybrid
        n_mtp = 0 if hybrid is None else hybrid.n_mtp_blocks
        return {"full attention": n_attention, "recurrent": self.n_layers - n_attention, "mtp": n_mtp}


def _head_dim(file: GgufFile, key: str, n_embd: int, n_heads: int) -> int:
    if key in file.metadata:
        return size_of(file, key, 4096)
    if n_embd % n_heads != 0:
        raise FormatError(f"missing, and {n_embd} values are no multiple of {n_heads} heads", key=key)
    return n_embd // n_heads


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensor("token_embd.weight")
    if len(embedding.shape) != 2:
        raise FormatError("the embedding is not a matrix", offset=embedding.offset, key=embedding.name)
    return int(embedding.shape[1])


def _widest(file: GgufFile, arch: str, n_blocks: int, hybrid: HybridConfig | None) -> int:
    if hybrid is None:
        return uniform_of(file, f"{arch}.feed_forward_length", n_blocks, range(n_blocks))
    return max(hybrid.n_ff) if hybrid.experts is None else max(hybrid.experts.n_ff, hybrid.experts.n_ff_shared)


def _rope_scale(file: GgufFile, arch: str) -> float:
    """A factor without a type is linear scaling, and so is the older key for it: files have both."""
    type_key = f"{arch}.rope.scaling.type"
    kind = file.get_str(type_key, default="linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise Unsupported(f"{type_key} {kind!r} is not supported; supported: none, linear")
    factor_key = f"{arch}.rope.scaling.factor"
    for key in (factor_key, f"{arch}.rope.scale_linear"):
        if key in file.metadata:
            return 1.0 / positive_of(file, key)
    if type_key in file.metadata:
        raise FormatError("required key is missing beside linear scaling", key=factor_key)
    return 1.0


def _refuse_experts(file: GgufFile, arch: str) -> None:
    if file.get_int(f"{arch}.expert_count", default=0) != 0:
        raise Unsupported(f"{arch} with experts is not supported")
