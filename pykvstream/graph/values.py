"""The intermediate form between a model's code and a tape.

Shapes: a ``Value`` is float32 ``[rows, cols]``; ``rows`` is one per token of a pass, or one per requested output row.
Order: nodes are in execution order; each value but inputs is written by exactly one node (static single assignment).
Holds: ``Value``, ``Node``, ``DeltaSpec``, ``FrontSpec``, ``Graph``, ``WeightSource``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pykvstream.core.kv import KvLayer
from pykvstream.core.tape import OpCode, RowKind, Weight


class WeightSource(Protocol):
    """Where a graph's weights come from; each name is brought to the device once and shared by all tapes."""

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        ...

    def shape(self, name: str) -> tuple[int, int]:
        """``(n rows, k values per row)`` of a matrix; a vector is one row."""
        ...

    def factors(self, name: str) -> str | None:
        """The tensor of one factor for each expert of this weight, None where there is none."""
        ...

    def panels(self, name: str) -> Weight:
        """The matrix, repacked for matmul."""
        ...

    def rows(self, name: str) -> Weight:
        """The matrix or vector as the file holds it."""
        ...


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: its number in the graph, columns, and what its rows are."""

    index: int
    cols: int
    rows: RowKind = RowKind.PASS


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. ``u``, ``f``, ``f64`` and ``layer`` are the parameters of ``kvs_op_desc``.

    ``weights`` are matmul panels, ``vectors`` rows in file layout, None for one that is left out. ``updates`` says
    that outputs continue in the storage of as many last inputs, in order, whose values end here.
    """

    code: OpCode
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    weights: tuple[str, ...] = ()
    vectors: tuple[str | None, ...] = ()
    layer: int = 0
    u: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    f64: float = 0.0
    updates: bool = False


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A recurrent layer: ``kvs_delta_layer`` with weights by name."""

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float
    conv: str
    dt_bias: str
    decay: str

    @property
    def channels(self) -> int:
        return self.head_dim * (2 * self.n_key_heads + self.n_value_heads)


@dataclass(frozen=True, slots=True)
class FrontSpec:
    """A sampling front: how many of the best logits, of how many columns that are tokens."""

    n_best: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in order, the cache layers and recurrent layers they name, and values that the caller gets and gives."""

    nodes: tuple[Node, ...]
    layers: tuple[KvLayer, ...]
    outputs: tuple[Value, ...] = field(default=())
    deltas: tuple[DeltaSpec, ...] = field(default=())
    inputs: tuple[Value, ...] = field(default=())

    def uses(self) -> dict[int, int]:
        """How many nodes read each value (by index)."""
        counts: dict[int, int] = {}
        for node in self.nodes:
            for value in node.inputs:
                counts[value.index] = counts.get(value.index, 0) + 1
        return counts
