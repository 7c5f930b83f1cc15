"""From nodes to tape records.

Order: records follow the nodes. A node that updates its last inputs writes into the storage of those values, which is
legal because nothing reads them afterwards: that is checked here.
Holds: ``lower``, ``delta_layers``.
"""

from __future__ import annotations

from pykvstream.core.device import Device
from pykvstream.core.state import DeltaLayer
from pykvstream.core.tape import NONE, DeltaMode, Op, OpCode, Tape, TensorKind
from pykvstream.errors import InvalidArgument
from pykvstream.graph.fuse import fuse
from pykvstream.graph.values import Graph, Node, Value, WeightSource

_PARTS = {OpCode.MATMUL: 4, OpCode.EXPERTS: 3}
"""Places for panels among the weights of an operation; vectors come behind."""


def lower(
    graph: Graph,
    weights: WeightSource,
    device: Device,
    *,
    max_rows: int,
    max_out_rows: int,
    fused: bool = True,
    delta_mode: DeltaMode = DeltaMode.LOGGED,
) -> Tape:
    """Record and seal a tape for passes of up to ``max_rows`` rows. With ``fused=False`` each node stays an
    operation of its own: slower, same bits. ``delta_mode``: how recurrent layers take the rows of a pass; in chunks
    they are a prompt's, to matmuls and attention too."""
    if fused:
        graph = fuse(graph)
    tape = Tape(device, max_rows, max_out_rows)
    try:
        _Lowering(graph, weights, tape, delta_mode).run()
        tape.seal()
    except BaseException:
        tape.close()
        raise
    return tape


def delta_layers(graph: Graph, weights: WeightSource) -> tuple[DeltaLayer, ...]:
    """The recurrent layers of a graph with their weights."""
    return tuple(
        DeltaLayer(
            n_key_heads=spec.n_key_heads,
            n_value_heads=spec.n_value_heads,
            head_dim=spec.head_dim,
            conv_width=spec.conv_width,
            norm_eps=spec.norm_eps,
            conv=weights.rows(spec.conv),
            dt_bias=weights.rows(spec.dt_bias),
            decay=weights.rows(spec.decay),
        )
        for spec in graph.deltas
    )


class _Lowering:
    def __init__(self, graph: Graph, weights: WeightSource, tape: Tape, delta_mode: DeltaMode) -> None:
        self._graph = graph
        self._delta_mode = delta_mode
        self._weights = weights
        self._tape = tape
        self._tensors: dict[int, int] = {}
        self._weight_ids: dict[tuple[str, bool], int] = {}
        self._ended: set[int] = set()
        self._outputs = {value.index for value in graph.outputs}

    def run(self) -> None:
        for layer in self._graph.layers:
            self._tape.add_layer(layer)
        for delta in delta_layers(self._graph, self._weights):
            self._tape.add_delta(delta)
        for value in self._graph.inputs:
            self._tensors[value.index] = self._tape.add_tensor(value.cols, kind=TensorKind.INPUT)
        for node in self._graph.nodes:
            self._tape.add_op(self._record(node))

    def _record(self, node: Node) -> Op:
        inputs = node.inputs[: -len(node.outputs)] if node.updates else node.inputs
        in_ids = tuple(self._read(value) for value in inputs)
        out_ids = self._write(node)
        return Op(
            node.code,
            in_ids,
            out_ids,
            self._weights_of(node),
            layer=node.layer,
            u=(int(self._delta_mode),) if node.code is OpCode.DELTA else node.u,
            f=node.f,
            f64=node.f64,
            is_prompt=self._delta_mode is DeltaMode.CHUNKED,
        )

    def _read(self, value: Value) -> int:
        if value.index in self._ended:
            raise InvalidArgument(f"value {value.index} is read after an operation has replaced it")
        return self._tensors[value.index]

    def _write(self, node: Node) -> tuple[int, ...]:
        if node.updates:
            for source, target in zip(node.inputs[-len(node.outputs) :], node.outputs, strict=True):
                self._replace(source, target)
        else:
            for value in node.outputs:
                kind = TensorKind.OUTPUT if value.index in self._outputs else TensorKind.WORK
                self._tensors[value.index] = self._tape.add_tensor(value.cols, kind=kind, rows=value.rows)
        return tuple(self._tensors[value.index] for value in node.outputs)

    def _replace(self, source: Value, target: Value) -> None:
        if source in self._graph.inputs:
            raise InvalidArgument("an input of the pass cannot be written")
        if target.index in self._outputs:
            raise InvalidArgument("an output must be written by an operation of its own")
        self._tensors[target.index] = self._read(source)
        self._ended.add(source.index)

    def _weights_of(self, node: Node) -> tuple[int, ...]:
        panels = [self._weight_id(name, is_rows=False) for name in node.weights]
        vectors = [NONE if name is None else self._weight_id(name, is_rows=True) for name in node.vectors]
        if node.code not in _PARTS:
            return tuple(vectors)
        padding = [NONE] * (_PARTS[node.code] - len(panels))
        return (*panels, *padding, *vectors)

    def _weight_id(self, name: str, *, is_rows: bool) -> int:
        key = (name, is_rows)
        if key not in self._weight_ids:
            weight = self._weights.rows(name) if is_rows else self._weights.panels(name)
            self._weight_ids[key] = self._tape.add_weight(weight)
        return self._weight_ids[key]
