"""The graph of each architecture.

Holds: ``build_graph``, the one entry, which refuses an architecture that is not listed, by name; ``ARCHITECTURES``.
"""

from __future__ import annotations

from collections.abc import Callable

from pykvstream.core.kv import KvLayer
from pykvstream.errors import Unsupported
from pykvstream.graph import Graph, WeightSource
from pykvstream.models import llama, qwen35
from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import HYBRIDS

_Builder = Callable[[ModelConfig, WeightSource, tuple[KvLayer, ...], "tuple[int, int]"], Graph]

ARCHITECTURES: dict[str, _Builder] = {
    **dict.fromkeys(("llama", "qwen3"), llama.build),
    **dict.fromkeys(HYBRIDS, qwen35.build),
}


def build_graph(
    config: ModelConfig,
    weights: WeightSource,
    layers: tuple[KvLayer, ...],
    rotation: tuple[int, int],
    *,
    with_hidden: bool = False,
) -> Graph:
    """The graph of ``config.architecture``. ``rotation``: Hadamard block of K and V, 0 none.

    ``with_hidden``: of a hybrid, with the rows that its MTP head starts from.
    """
    if with_hidden and config.architecture in HYBRIDS:
        return qwen35.build(config, weights, layers, rotation, with_hidden=True)
    builder = ARCHITECTURES.get(config.architecture)
    if builder is None:
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(f"architecture {config.architecture!r} is not supported; supported: {known}")
    return builder(config, weights, layers, rotation)
