"""An MTP head in a file of its own, beside that of the model: the same metadata, and the tensors of one block.

Source: spec/model.md 1.1, 3.1.
Holds: ``with_head_of``: the model's configuration with that head. Tensors beside the block, such as an embedding that
stands there a second time, are not read: the head shares those of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile
from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import DENSE
from pykvstream.models.keys import count_of, per_block, size_of, uniform_of

_MAX_BLOCKS = 4096


def with_head_of(file: GgufFile, config: ModelConfig) -> ModelConfig:
    """Read and compare. Raises ``Unsupported`` or ``FormatError`` naming the key that says something else."""
    hybrid = config.hybrid
    arch = file.get_str("general.architecture")
    if hybrid is None or arch != config.architecture:
        raise Unsupported(f"{file.path.name} is of architecture {arch[:80]!r}; the model is a {config.architecture}")
    n_blocks = size_of(file, f"{arch}.block_count", _MAX_BLOCKS)
    n_mtp = count_of(file, f"{arch}.nextn_predict_layers", n_blocks)
    if n_mtp != 1:
        raise Unsupported(f"{file.path.name} has an MTP head of {n_mtp} blocks; supported: 1")
    block = n_blocks - 1
    own: dict[str, Callable[[str], int]] = {
        "embedding_length": lambda key: size_of(file, key),
        "attention.head_count": lambda key: uniform_of(file, key, n_blocks, (block,)),
        "attention.head_count_kv": lambda key: uniform_of(file, key, n_blocks, (block,), config.n_heads),
        "attention.key_length": lambda key: file.get_int(key, default=config.n_embd // config.n_heads),
        "attention.value_length": lambda key: file.get_int(key, default=config.n_embd // config.n_heads),
    }
    theirs = (config.n_embd, config.n_heads, config.n_kv_heads, config.head_dim_k, config.head_dim_v)
    _compare(f"{arch}.block_count", block, config.n_layers)
    for (name, read), expected in zip(own.items(), theirs, strict=True):
        _compare(f"{arch}.{name}", read(f"{arch}.{name}"), expected)
    n_ff = hybrid.n_ff[: config.n_layers]
    if arch == DENSE:
        n_ff = (*n_ff, per_block(file, f"{arch}.feed_forward_length", n_blocks)[block])
    return replace(config, hybrid=replace(hybrid, n_mtp_blocks=1, n_ff=n_ff))


def _compare(key: str, found: int, expected: int) -> None:
    if found != expected:
        raise FormatError(f"the MTP head is for {found}, the model has {expected}", key=key)
