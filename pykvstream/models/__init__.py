"""Model architectures: what a file says (``config``), what it must hold (``tensors``), its weights on a device
(``weights``), and the graph of each family.

``build_graph`` is the one entry: it refuses an architecture that is not listed, by name.
"""

from __future__ import annotations

from collections.abc import Callable

from pykvstream.core.kv import KvLayer
from pykvstream.errors import Unsupported
from pykvstream.graph import Graph, WeightSource
from pykvstream.models import llama, qwen35
from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import HYBRIDS
from pykvstream.models.weights import FileWeights

__all__ = ["ARCHITECTURES", "HYBRIDS", "FileWeights", "ModelConfig", "build_graph"]

_Builder = Callable[[ModelConfig, WeightSource, tuple[KvLayer, ...], "tuple[int, int]"], Graph]

ARCHITECTURES: dict[str, _Builder] = {
    **dict.fromkeys(("llama", "qwen3"), llama.build),
    **dict.fromkeys(HYBRIDS, qwen35.build),
}


def build_graph(
    config: ModelConfig, weights: WeightSource, layers: tuple[KvLayer, ...], rotation: tuple[int, int]
) -> Graph:
    """The graph of ``config.architecture``. ``rotation``: Hadamard block of K and V, 0 none."""
    builder = ARCHITECTURES.get(config.architecture)
    if builder is None:
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(f"architecture {config.architecture!r} is not supported; supported: {known}")
    return builder(config, weights, layers, rotation)
