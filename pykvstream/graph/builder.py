"""The operations that a model's code is written in: one method each, shapes checked as they are recorded.

Shapes: ``[rows, cols]`` float32 throughout. Weight names are those of the GGUF file.
Holds: ``GraphBuilder``.
"""

from __future__ import annotations

from pykvstream.core.kv import KvLayer
from pykvstream.core.tape import FRONT_TAIL, OpCode, RowKind
from pykvstream.errors import InvalidArgument
from pykvstream.graph.values import DeltaSpec, FrontSpec, Graph, Node, Value, WeightSource

PAIRS = 0
"""Rotary mode: values (2i, 2i+1) of a head turn together."""
HALVES = 1
"""Rotary mode: values (i, i + n_rot/2) of a head turn together."""


class GraphBuilder:
    """Records nodes; ``finish`` gives the graph."""

    def __init__(self, weights: WeightSource, layers: tuple[KvLayer, ...]) -> None:
        self._weights = weights
        self._layers = layers
        self._nodes: list[Node] = []
        self._outputs: list[Value] = []
        self._deltas: list[DeltaSpec] = []
        self._inputs: list[Value] = []
        self._n_values = 0

    def _value(self, cols: int, rows: RowKind = RowKind.PASS) -> Value:
        value = Value(self._n_values, cols, rows)
        self._n_values += 1
        return value

    def _add(self, node: Node) -> Value:
        self._nodes.append(node)
        return node.outputs[0]

    def input(self, cols: int) -> Value:
        """Rows that the caller of a pass gives, ``[n, cols]``."""
        value = self._value(cols)
        self._inputs.append(value)
        return value

    def embed(self, table: str) -> Value:
        """Rows of the table named by the pass's tokens, ``[n, k]``."""
        _, k = self._weights.shape(table)
        return self._add(Node(OpCode.EMBED, outputs=(self._value(k),), vectors=(table,)))

    def norm(self, x: Value, weight: str, eps: float, group: int = 0) -> Value:
        """Root-mean-square norm over the row, or over each ``group`` values of it, times the weight."""
        out = self._value(x.cols, x.rows)
        return self._add(Node(OpCode.NORM, (x,), (out,), vectors=(weight,), u=(group,), f=(eps,)))

    def linear(self, x: Value, weight: str) -> Value:
        """``x W^T`` for a weight of n rows of k values: ``[rows, n]``."""
        n, k = self._weights.shape(weight)
        if k != x.cols:
            raise InvalidArgument(f"{weight} has rows of {k} values, its input has {x.cols}")
        out = self._value(n, x.rows)
        return self._add(Node(OpCode.MATMUL, (x,), (out,), weights=(weight,), u=(1, 0)))

    def add(self, x: Value, y: Value) -> Value:
        """``x + y``; ``x`` ends here."""
        out = self._value(x.cols, x.rows)
        return self._add(Node(OpCode.ADD, (y, x), (out,), updates=True))

    def swiglu(self, gate: Value, up: Value) -> Value:
        """``silu(gate) * up``"""
        return self._add(Node(OpCode.GLU, (gate, up), (self._value(gate.cols, gate.rows),), u=(0,)))

    def sigmoid_gate(self, gate: Value, x: Value) -> Value:
        """``sigmoid(gate) * x``; a gate of one column is that of the whole row."""
        return self._add(Node(OpCode.GLU, (gate, x), (self._value(x.cols, x.rows),), u=(1,)))

    def delta(self, x: Value, beta: Value, alpha: Value, spec: DeltaSpec) -> Value:
        """The gated delta net of a recurrent layer, ``[n, n_value_heads * head_dim]``: ``x`` are inputs of the
        convolution, ``beta`` and ``alpha`` write strength and decay of each value head before their activations."""
        if x.cols != spec.channels or {beta.cols, alpha.cols} != {spec.n_value_heads}:
            raise InvalidArgument(
                f"a recurrent layer of {spec.channels} channels and {spec.n_value_heads} value heads,"
                f" its inputs have {x.cols}, {beta.cols} and {alpha.cols} columns"
            )
        self._deltas.append(spec)
        out = self._value(spec.n_value_heads * spec.head_dim)
        return self._add(Node(OpCode.DELTA, (x, beta, alpha), (out,), layer=len(self._deltas) - 1))

    def experts(self, x: Value, router: Value, gate: str, up: str, down: str, n_used: int, scale: float) -> Value:
        """The weighted sum of the ``n_used`` experts with the largest ``router`` logits, ``[n, k]``. Weights hold the
        rows of one expert after another; ``scale`` multiplies the sum."""
        n_experts = router.cols
        (n_gate, k_gate), (n_up, k_up), (n_down, k_down) = (self._weights.shape(name) for name in (gate, up, down))
        is_shaped = k_gate == k_up == x.cols and n_gate == n_up == k_down * n_experts and n_down % n_experts == 0
        if not is_shaped:
            raise InvalidArgument(f"{gate}, {up} and {down} are not {n_experts} experts of {x.cols} inputs")
        out = self._value(n_down // n_experts, x.rows)
        factors = tuple(self._weights.factors(name) for name in (gate, up, down))
        return self._add(
            Node(OpCode.EXPERTS, (x, router), (out,), (gate, up, down), factors, u=(n_experts, n_used), f=(scale,))
        )

    def rope_table(
        self,
        n_rot: int,
        base: float,
        scale: float = 1.0,
        divisors: str | None = None,
        sections: tuple[int, int] = (0, 0),
    ) -> Value:
        """Cosines and sines of the pass's positions, ``[n, n_rot]``. ``scale`` multiplies positions; ``divisors``
        names a float32 vector ``[n_rot / 2]`` by which frequencies are divided; ``sections``: pairs that turn by the
        second and the third position axis."""
        vectors = () if divisors is None else (divisors,)
        u = (n_rot, *sections)
        out = self._value(n_rot)
        return self._add(Node(OpCode.ROPE_TABLE, (), (out,), vectors=vectors, u=u, f=(scale,), f64=base))

    def rope(self, x: Value, table: Value, head_dim: int, n_rot: int, mode: int) -> Value:
        """Rotate the first ``n_rot`` values of each head; ``x`` ends here."""
        out = self._value(x.cols)
        return self._add(Node(OpCode.ROPE, (table, x), (out,), u=(head_dim, n_rot, mode), updates=True))

    def hadamard(self, x: Value, block: int) -> Value:
        """Orthonormal Walsh-Hadamard rotation of each ``block`` values; ``x`` ends here."""
        return self._add(Node(OpCode.HADAMARD, (x,), (self._value(x.cols),), u=(block,), updates=True))

    def kv_write(self, layer: int, k: Value, v: Value) -> None:
        """Append the pass's rows to the cache layer."""
        self._nodes.append(Node(OpCode.KV_WRITE, (k, v), layer=layer))

    def attend(self, layer: int, q: Value, n_heads: int, scale: float) -> Value:
        """Causal attention over the layer's whole history, ``[n, n_heads * head_dim_v]``."""
        out = self._value(n_heads * self._layers[layer].head_dim_v)
        return self._add(Node(OpCode.ATTEND, (q,), (out,), layer=layer, u=(n_heads,), f=(scale,)))

    def gather(self, x: Value) -> Value:
        """The rows for which the pass wants output."""
        return self._add(Node(OpCode.GATHER, (x,), (self._value(x.cols, RowKind.OUT),)))

    def front(self, x: Value, spec: FrontSpec) -> Value:
        """Of rows of logits the best columns and the sum of exponentials, as words; only passes that ask for it have
        it."""
        out = self._value(2 * spec.n_best + FRONT_TAIL, x.rows)
        return self._add(Node(OpCode.FRONT, (x,), (out,), u=(spec.n_best, spec.n_tokens)))

    def output(self, x: Value) -> None:
        """Hand a value to the caller of the pass."""
        self._outputs.append(x)

    def finish(self) -> Graph:
        return Graph(tuple(self._nodes), self._layers, tuple(self._outputs), tuple(self._deltas), tuple(self._inputs))
