"""What a GGUF file says about a hybrid beyond what every decoder has: recurrent layers, experts, MTP blocks.

Units: sizes in values, ``_bytes`` per recurrent layer. A *block* is ``blk.i`` of the file: the layers of the trunk,
then the MTP blocks. ``block_count`` counts both.
Source: spec/model.md 1.1 and 2.5.
Holds: ``HybridConfig``, ``DeltaSize``, ``ExpertSize``, ``read_hybrid``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile
from pykvstream.models.keys import count_of, per_block, size_of

DENSE, WITH_EXPERTS = "qwen35", "qwen35moe"
HYBRIDS = (DENSE, WITH_EXPERTS)

_DEFAULT_INTERVAL = 4
_HEAD_DIMS = (16, 32, 64, 128)
_CONV_WIDTHS = range(2, 9)
_MAX_MTP_BLOCKS = 16
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """Sizes of every gated delta net layer. Value head p uses key head p % ``n_key_heads``."""

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Convolution channels: queries, keys, values."""
        return self.head_dim * (2 * self.n_key_heads + self.n_value_heads)

    @property
    def state_bytes(self) -> int:
        """Matrices of the value heads, and the convolution's last inputs."""
        matrices = self.n_value_heads * self.head_dim * self.head_dim
        return _FLOAT_BYTES * (matrices + (self.conv_width - 1) * self.channels)

    @property
    def log_row_bytes(self) -> int:
        """What the recurrence consumes of one token."""
        return _FLOAT_BYTES * (self.channels + 2 * self.n_value_heads)


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """Sizes of a feed-forward part with routed experts and one shared expert."""

    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int
    weight_scale: float


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """``is_recurrent`` per layer of the trunk; ``n_ff`` per block, of a dense feed-forward part.

    ``rope_sections``: rotary pairs that turn by the first, second and third position axis.
    """

    is_recurrent: tuple[bool, ...]
    n_mtp_blocks: int
    n_ff: tuple[int, ...]
    rope_sections: tuple[int, int, int]
    delta: DeltaSize
    experts: ExpertSize | None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers of the trunk with keys and values."""
        return tuple(i for i, is_recurrent in enumerate(self.is_recurrent) if not is_recurrent)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers of the trunk with recurrent state."""
        return tuple(i for i, is_recurrent in enumerate(self.is_recurrent) if is_recurrent)

    @property
    def mtp_blocks(self) -> tuple[int, ...]:
        """Blocks behind the trunk."""
        return tuple(range(len(self.is_recurrent), len(self.is_recurrent) + self.n_mtp_blocks))


def read_hybrid(file: GgufFile, arch: str, n_blocks: int) -> HybridConfig:
    """Read and check. Raises ``FormatError`` and ``Unsupported`` as ``ModelConfig.from_gguf``."""
    n_mtp = count_of(file, f"{arch}.nextn_predict_layers", min(n_blocks - 1, _MAX_MTP_BLOCKS))
    if n_mtp and "blk.0.attn_norm.weight" not in file.tensors:
        raise Unsupported(
            f"{file.path.name} holds only the MTP head of a {arch} model; it is no model by itself, open the main file"
        )
    config = HybridConfig(
        is_recurrent=_recurrent(file, arch, n_blocks, n_mtp),
        n_mtp_blocks=n_mtp,
        n_ff=_dense_sizes(file, arch, n_blocks) if arch == DENSE else (),
        rope_sections=_sections(file, arch),
        delta=_delta(file, arch),
        experts=_experts(file, arch) if arch == WITH_EXPERTS else None,
    )
    if not config.attention_layers:
        raise Unsupported(f"a {arch} model of {n_blocks - n_mtp} layers without full attention is not supported")
    return config


def _recurrent(file: GgufFile, arch: str, n_blocks: int, n_mtp: int) -> tuple[bool, ...]:
    key = f"{arch}.attention.recurrent_layers"
    n_layers = n_blocks - n_mtp
    if key in file.metadata:
        flags = file.get_bools(key, count=n_blocks).tolist()
        if any(flags[n_layers:]):
            raise FormatError("an MTP block is marked as recurrent", key=key)
        return tuple(flags[:n_layers])
    key = f"{arch}.full_attention_interval"
    interval = size_of(file, key) if key in file.metadata else _DEFAULT_INTERVAL
    return tuple((i + 1) % interval != 0 for i in range(n_layers))


def _dense_sizes(file: GgufFile, arch: str, n_blocks: int) -> tuple[int, ...]:
    if file.get_int(f"{arch}.expert_count", default=0) != 0:
        raise Unsupported(f"{arch} with experts is not supported; {WITH_EXPERTS} is")
    key = f"{arch}.feed_forward_length"
    sizes = per_block(file, key, n_blocks)
    if min(sizes) == 0:
        raise FormatError(f"0 for block {sizes.index(0)}", key=key)
    return sizes


def _sections(file: GgufFile, arch: str) -> tuple[int, int, int]:
    key = f"{arch}.rope.dimension_sections"
    values = [int(value) for value in file.get_ints(key)]
    if len(values) not in (3, 4) or min(values) < 0:
        raise FormatError(f"{values} are not three or four section sizes", key=key)
    if any(values[3:]):
        raise Unsupported(f"a fourth section of {values[3]} rotary pairs is not supported")
    return values[0], values[1], values[2]


def check_sections(arch: str, sections: tuple[int, int, int], n_rot: int) -> None:
    """Sections share out all rotary pairs, or the file contradicts itself."""
    if 2 * sum(sections) != n_rot:
        raise FormatError(
            f"sections {list(sections)} hold {sum(sections)} pairs, {n_rot} rotary values have {n_rot // 2}",
            key=f"{arch}.rope.dimension_sections",
        )


def _delta(file: GgufFile, arch: str) -> DeltaSize:
    size = DeltaSize(
        n_key_heads=size_of(file, f"{arch}.ssm.group_count"),
        n_value_heads=size_of(file, f"{arch}.ssm.time_step_rank"),
        head_dim=size_of(file, f"{arch}.ssm.state_size"),
        conv_width=size_of(file, f"{arch}.ssm.conv_kernel"),
    )
    if size.n_value_heads % size.n_key_heads != 0:
        raise FormatError(
            f"{size.n_value_heads} value heads are no multiple of {size.n_key_heads} key heads",
            key=f"{arch}.ssm.time_step_rank",
        )
    key = f"{arch}.ssm.inner_size"
    inner = size_of(file, key)
    if inner != size.n_value_heads * size.head_dim:
        raise FormatError(f"{inner}, but {size.n_value_heads} value heads of {size.head_dim} values", key=key)
    if size.head_dim not in _HEAD_DIMS:
        raise Unsupported(f"{arch}.ssm.state_size {size.head_dim} is not supported; supported: 16, 32, 64, 128")
    if size.conv_width not in _CONV_WIDTHS:
        raise Unsupported(f"{arch}.ssm.conv_kernel {size.conv_width} is not supported; supported: 2 to 8")
    return size


def _experts(file: GgufFile, arch: str) -> ExpertSize:
    n_experts = size_of(file, f"{arch}.expert_count")
    key = f"{arch}.expert_weights_scale"
    scale = file.get_float(key, default=0.0)
    if not 0.0 <= scale < float("inf"):
        raise FormatError(f"{scale} is not a factor", key=key)
    return ExpertSize(
        n_experts=n_experts,
        n_used=size_of(file, f"{arch}.expert_used_count", n_experts),
        n_ff=size_of(file, f"{arch}.expert_feed_forward_length"),
        n_ff_shared=size_of(file, f"{arch}.expert_shared_feed_forward_length"),
        weight_scale=scale or 1.0,
    )
