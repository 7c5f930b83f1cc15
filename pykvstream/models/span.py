"""A model cut at a layer boundary: which layers each part has. Nothing here needs the native core.

Holds: ``LayerSpan``, ``cut``, ``ALL_LAYERS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.models.config import ModelConfig

ALL_LAYERS = ("all", "auto")
"""Words for every layer: nothing is fitted behind the caller's back, so that both say the same."""


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers ``begin`` to ``end - 1`` of ``n_layers``.

    The part with layer 0 takes tokens, each other one the hidden rows of the part before it. The part with the last
    layer gives logits, each other one hidden rows of all tokens.
    """

    begin: int
    end: int
    n_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.n_layers:
            raise InvalidArgument(f"layers {self.begin} to {self.end} are no part of {self.n_layers}")

    @classmethod
    def whole(cls, config: ModelConfig) -> Self:
        """All layers."""
        return cls(0, config.n_layers, config.n_layers)

    @property
    def layers(self) -> range:
        """Their numbers in the file."""
        return range(self.begin, self.end)

    @property
    def is_first(self) -> bool:
        """Whether tokens go in."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out."""
        return self.end == self.n_layers

    def attention_layers(self, config: ModelConfig) -> tuple[int, ...]:
        """Those with keys and values, in the order of the cache's layers."""
        return tuple(i for i in config.attention_layers if i in self.layers)

    def __str__(self) -> str:
        return f"layers {self.begin} to {self.end - 1}" if self.end - self.begin > 1 else f"layer {self.begin}"


def cut(config: ModelConfig, gpu_layers: int | str) -> tuple[LayerSpan | None, LayerSpan | None]:
    """The layers that stay on the CPU, and those on the device; None for none.

    The last ``gpu_layers`` layers and the output are the device's, as with llama.cpp's ``-ngl``; as many as the model
    has, or more, are all of them, with the embedding. Raises ``InvalidArgument`` for what is no number of layers,
    ``Unsupported`` where a part would have no layer with keys and values.
    """
    is_number = isinstance(gpu_layers, int) and not isinstance(gpu_layers, bool) and gpu_layers >= 0
    if not is_number and gpu_layers not in ALL_LAYERS:
        raise InvalidArgument(f"gpu_layers must be an integer of at least 0, 'all' or 'auto', got {gpu_layers!r}")
    whole = LayerSpan.whole(config)
    if isinstance(gpu_layers, str) or gpu_layers >= config.n_layers:
        return None, whole
    if gpu_layers == 0:
        return whole, None
    begin = config.n_layers - gpu_layers
    parts = LayerSpan(0, begin, config.n_layers), LayerSpan(begin, config.n_layers, config.n_layers)
    attends = config.attention_layers
    for span, where in zip(parts, ("on the CPU", "on the device"), strict=True):
        if not span.attention_layers(config):
            least, most = config.n_layers - attends[-1], config.n_layers - 1 - attends[0]
            choices = f"{least} to {most}, 0 or all" if least <= most else "0 or all"
            raise Unsupported(
                f"gpu_layers {gpu_layers} leaves {span} {where}, and none with keys and values; supported: {choices}"
            )
    return parts
