"""The graph of each architecture.

Holds: ``build_graph``, the one entry, which refuses an architecture that is not listed, by name; ``ARCHITECTURES``.
"""

from __future__ import annotations

from typing import Protocol

from pykvstream.core.kv import KvLayer
from pykvstream.errors import Unsupported
from pykvstream.graph import FrontSpec, Graph, WeightSource
from pykvstream.models import llama, qwen35
from pykvstream.models.config import ModelConfig
from pykvstream.models.hybrid_config import HYBRIDS
from pykvstream.models.span import LayerSpan


class _Builder(Protocol):
    def __call__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        layers: tuple[KvLayer, ...],
        rotation: tuple[int, int],
        *,
        span: LayerSpan | None = None,
        front: FrontSpec | None = None,
    ) -> Graph: ...


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
    span: LayerSpan | None = None,
    front: FrontSpec | None = None,
) -> Graph:
    """The graph of ``config.architecture``. ``rotation``: Hadamard block of K and V, 0 none.

    ``with_hidden``: of a hybrid, with the rows that its MTP head starts from. ``span``: of one part of a model that is
    cut; ``layers`` are then those of the part. ``front``: with the sampling front of the logits as the last output.
    """
    if with_hidden and config.architecture in HYBRIDS:
        return qwen35.build(config, weights, layers, rotation, with_hidden=True, span=span, front=front)
    builder = ARCHITECTURES.get(config.architecture)
    if builder is None:
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(f"architecture {config.architecture!r} is not supported; supported: {known}")
    return builder(config, weights, layers, rotation, span=span, front=front)
