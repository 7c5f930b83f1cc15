"""Nodes that one kernel does in one go. No rule changes a bit: each fused kernel performs the same operations in
the same order.

Order of rules: neighbouring linears of one input become one matmul of up to four parts; a norm that only such a
matmul reads becomes its prologue; gate and up that only a swiglu reads get it as epilogue; a gate that multiplies what
only a matmul reads, with the norm of groups before it, becomes that matmul's prologue; a linear that only an add reads
adds itself; the norm of heads before a rope and the Walsh-Hadamard rotation behind it join it; keys that are turned as
the queries before them are join these, and values that only have the rotation of both join them; the rotation of what
attention gives joins it.
Holds: ``fuse``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pykvstream.core.tape import OpCode
from pykvstream.graph.values import Graph, Node

_MAX_PARTS = 4
_GROUPS = (32, 64, 128, 256, 512)
"""Of the norm before a gate."""
_ADD, _SWIGLU = 1, 2


def fuse(graph: Graph) -> Graph:
    """Apply every rule once."""
    rules = (_merge_linears, _fuse_norms, _fuse_swiglu, _fuse_gates, _fuse_adds)
    for rule in (*rules, _fuse_ropes, _join_ropes, _fuse_attention):
        graph = replace(graph, nodes=rule(graph))
    return graph


def _is_plain_matmul(node: Node) -> bool:
    return node.code is OpCode.MATMUL and node.u[1] == 0 and not node.vectors


def _joined(graph: Graph, join: Callable[[Node, Node], Node | None]) -> tuple[Node, ...]:
    """The nodes in order; ``join(last, node)`` gives one in place of both, or None."""
    nodes: list[Node] = []
    for node in graph.nodes:
        both = join(nodes[-1], node) if nodes else None
        if both is None:
            nodes.append(node)
        else:
            nodes[-1] = both
    return tuple(nodes)


def _merge_linears(graph: Graph) -> tuple[Node, ...]:
    def join(last: Node, node: Node) -> Node | None:
        if not (
            _is_plain_matmul(node)
            and _is_plain_matmul(last)
            and last.inputs == node.inputs
            and len(last.weights) < _MAX_PARTS
        ):
            return None
        weights = last.weights + node.weights
        return replace(last, outputs=last.outputs + node.outputs, weights=weights, u=(len(weights), 0))

    return _joined(graph, join)


def _fuse_norms(graph: Graph) -> tuple[Node, ...]:
    uses = graph.uses()
    outputs = {value.index for value in graph.outputs}

    def join(last: Node, node: Node) -> Node | None:
        if not (
            last.code is OpCode.NORM
            and last.u[0] == 0
            and _is_plain_matmul(node)
            and node.inputs == last.outputs
            and uses[last.outputs[0].index] == 1
            and last.outputs[0].index not in outputs
        ):
            return None
        return replace(node, inputs=last.inputs, vectors=last.vectors, f=last.f)

    return _joined(graph, join)


def _fuse_swiglu(graph: Graph) -> tuple[Node, ...]:
    uses = graph.uses()

    def join(last: Node, node: Node) -> Node | None:
        if not (
            node.code is OpCode.GLU
            and node.u == (0,)
            and last.code is OpCode.MATMUL
            and last.u == (2, 0)
            and node.inputs == last.outputs
            and all(uses[value.index] == 1 for value in last.outputs)
        ):
            return None
        return replace(last, outputs=node.outputs, u=(2, _SWIGLU))

    return _joined(graph, join)


def _fuse_gates(graph: Graph) -> tuple[Node, ...]:
    uses = graph.uses()
    outputs = {value.index for value in graph.outputs}

    def is_inner(node: Node) -> bool:
        return uses.get(node.outputs[0].index) == 1 and node.outputs[0].index not in outputs

    def join_gate(gating: Node, node: Node) -> Node | None:
        if not (
            gating.code is OpCode.GLU
            and gating.inputs[0].cols == gating.inputs[1].cols
            and _is_plain_matmul(node)
            and node.inputs == gating.outputs
            and is_inner(gating)
        ):
            return None
        gate, x = gating.inputs
        return replace(node, inputs=(x, gate), u=(*node.u, gating.u[0] + 1, 0))

    def join_norm(norm: Node, gated: Node) -> Node | None:
        if not (
            norm.code is OpCode.NORM
            and norm.u[0] in _GROUPS
            and gated.code is OpCode.MATMUL
            and len(gated.u) == 4
            and norm.outputs == gated.inputs[:1]
            and is_inner(norm)
        ):
            return None
        inputs = (*norm.inputs, gated.inputs[1])
        return replace(gated, inputs=inputs, vectors=norm.vectors, f=norm.f, u=(*gated.u[:3], norm.u[0]))

    return _joined(replace(graph, nodes=_joined(graph, join_gate)), join_norm)


def _fuse_adds(graph: Graph) -> tuple[Node, ...]:
    uses = graph.uses()

    def join(last: Node, node: Node) -> Node | None:
        if not (
            node.code is OpCode.ADD
            and last.code is OpCode.MATMUL
            and last.u[:2] == (1, 0)
            and (not last.vectors or len(last.inputs) == 2)
            and node.inputs[0] == last.outputs[0]
            and uses[last.outputs[0].index] == 1
        ):
            return None
        inputs, u = (*last.inputs, node.inputs[1]), (1, _ADD, *last.u[2:])
        return replace(last, inputs=inputs, outputs=node.outputs, u=u, updates=True)

    return _joined(graph, join)


def _fuse_ropes(graph: Graph) -> tuple[Node, ...]:
    uses = graph.uses()

    def join(last: Node, node: Node) -> Node | None:
        if last.outputs == () or uses.get(last.outputs[0].index) != 1:
            return None
        if (
            node.code is OpCode.ROPE
            and not node.vectors
            and last.code is OpCode.NORM
            and last.u[0] == node.u[0]
            and node.inputs[1] == last.outputs[0]
            and uses[last.inputs[0].index] == 1
            and last.inputs[0] not in graph.inputs + graph.outputs
        ):
            return replace(node, inputs=(node.inputs[0], last.inputs[0]), f=last.f, vectors=last.vectors)
        if (
            node.code is OpCode.HADAMARD
            and last.code is OpCode.ROPE
            and len(last.u) == 3
            and last.u[0] % node.u[0] == 0
            and node.inputs[0] == last.outputs[0]
        ):
            return replace(last, outputs=node.outputs, u=(*last.u, node.u[0]))
        return None

    return _joined(graph, join)


def _is_turned_alike(node: Node, last: Node) -> bool:
    """Whether one rope does both: of one table, by the same numbers, with norms of heads before both or neither."""
    return (
        node.code is OpCode.ROPE
        and len(last.outputs) == 1
        and node.inputs[0] == last.inputs[0]
        and (node.u, node.f, len(node.vectors)) == (last.u, last.f, len(last.vectors))
    )


def _is_rotated_alike(node: Node, last: Node) -> bool:
    return node.code is OpCode.HADAMARD and len(last.outputs) == 2 and last.u[3:] == node.u


def _join_ropes(graph: Graph) -> tuple[Node, ...]:
    def join(last: Node, node: Node) -> Node | None:
        if not (
            last.code is OpCode.ROPE
            and (_is_turned_alike(node, last) or _is_rotated_alike(node, last))
            and not set(node.inputs) & set(last.outputs)
        ):
            return None
        inputs, vectors = last.inputs + node.inputs[-1:], last.vectors + node.vectors
        return replace(last, inputs=inputs, outputs=last.outputs + node.outputs, vectors=vectors)

    return _joined(graph, join)


def _fuse_attention(graph: Graph) -> tuple[Node, ...]:
    uses = graph.uses()

    def join(last: Node, node: Node) -> Node | None:
        if not (
            node.code is OpCode.HADAMARD
            and last.code is OpCode.ATTEND
            and node.inputs == last.outputs
            and uses[last.outputs[0].index] == 1
            and last.outputs[0] not in graph.outputs
            and graph.layers[last.layer].head_dim_v % node.u[0] == 0
        ):
            return None
        return replace(last, outputs=node.outputs, u=(*last.u, *node.u))

    return _joined(graph, join)
