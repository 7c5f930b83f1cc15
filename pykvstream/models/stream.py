"""The stream of hidden rows through the layers of one part of a model: where it comes from and where it goes.

Shapes: hidden rows float32 ``[n, n_embd]``, one for each token of a pass.
Holds: ``Stream``. The numbers that cross the boundary of two parts are those that the next layer would have read: a
model that is cut has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from pykvstream.graph import Graph, GraphBuilder, Value
from pykvstream.models.config import ModelConfig
from pykvstream.models.span import LayerSpan


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a graph. ``is_given``: it is the caller's, whose memory no operation may write."""

    g: GraphBuilder
    value: Value
    is_given: bool

    @classmethod
    def begin(cls, g: GraphBuilder, config: ModelConfig, span: LayerSpan) -> Self:
        """Embedded tokens, or what the part before has handed over."""
        return cls(g, g.embed("token_embd.weight"), False) if span.is_first else cls(g, g.input(config.n_embd), True)

    def plus(self, y: Value) -> Stream:
        """``stream + y``. The sum of two numbers does not depend on which comes first, so either may be replaced."""
        value = self.g.add(y, self.value) if self.is_given else self.g.add(self.value, y)
        return replace(self, value=value, is_given=False)

    def hand_over(self) -> Graph:
        """End the graph here. The rows are gathered: what is written last is an operand that an addition replaced."""
        self.g.output(self.g.gather(self.value))
        return self.g.finish()
