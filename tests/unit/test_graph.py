"""Graphs that cannot become a tape are refused where the mistake is, not where it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.kv import KvLayer
from pykvstream.core.tape import OpCode, WeightLayout
from pykvstream.core.trace import TraceDevice, TraceWeight
from pykvstream.errors import InvalidArgument
from pykvstream.gguf import GgmlType
from pykvstream.graph import GraphBuilder, lower
from pykvstream.graph.fuse import fuse

COLS = 64


class Weights:
    """Matrices and vectors of ``COLS`` values by any name; those that begin with ``m`` are square."""

    def __init__(self, device: TraceDevice) -> None:
        self.device = device
        self.made: list[TraceWeight] = []

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, int]:
        return (COLS if name.startswith("m") else 1), COLS

    def _make(self, name: str, layout: WeightLayout) -> TraceWeight:
        n, k = self.shape(name)
        self.made.append(TraceWeight(self.device, GgmlType.F32.id, k, n, layout))
        return self.made[-1]

    def panels(self, name: str) -> TraceWeight:
        return self._make(name, WeightLayout.PANELS)

    def rows(self, name: str) -> TraceWeight:
        return self._make(name, WeightLayout.ROWS)


@pytest.fixture
def weights() -> Iterator[Weights]:
    with TraceDevice() as device:
        made = Weights(device)
        yield made
        for weight in made.made:
            weight.close()
        assert device.info.live_objects == 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_value_that_was_replaced_is_not_read(weights: Weights, fused: bool) -> None:
    g = GraphBuilder(weights, ())
    x = g.embed("m.table")
    y = g.linear(g.norm(x, "v.norm", 1e-5), "m.out")
    g.add(x, y)  # x ends here
    g.output(g.linear(g.gather(x), "m.head"))
    with pytest.raises(InvalidArgument, match="read after an operation has replaced it"):
        lower(g.finish(), weights, weights.device, max_rows=4, max_out_rows=1, fused=fused)


def test_an_output_is_not_written_into_another_value(weights: Weights) -> None:
    g = GraphBuilder(weights, ())
    x = g.embed("m.table")
    g.output(g.add(x, g.linear(x, "m.out")))
    with pytest.raises(InvalidArgument, match="an output must be written by an operation of its own"):
        lower(g.finish(), weights, weights.device, max_rows=4, max_out_rows=1)


def test_turning_is_one_operation_and_attention_rotates_by_itself(weights: Weights) -> None:
    """Queries, keys and values of a layer whose cache is rotated; values rotated in other blocks stay apart."""
    for block_v, codes in ((32, "ROPE KV_WRITE ATTEND"), (16, "ROPE HADAMARD KV_WRITE ATTEND")):
        g = GraphBuilder(weights, (KvLayer(2, 32, 32, GgmlType.Q8_0.id, GgmlType.Q8_0.id),))
        x, table = g.embed("m.table"), g.rope_table(16, 1e4)
        q, k, v = (g.linear(x, name) for name in ("m.q", "m.k", "m.v"))
        turned = [
            g.hadamard(g.rope(g.norm(each, name, 1e-5, group=32), table, 32, 16, 1), 32)
            for each, name in ((q, "v.q"), (k, "v.k"))
        ]
        g.kv_write(0, turned[1], g.hadamard(v, block_v))
        g.output(g.linear(g.gather(g.hadamard(g.attend(0, turned[0], 2, 1.0), block_v)), "m.head"))
        nodes = fuse(g.finish()).nodes
        found = [node.code.name for node in nodes]
        assert " ".join(found[3:-2]) == codes
        rope, attend = nodes[3], nodes[-3]
        assert rope.inputs == (table, q, k, v)[: len(rope.outputs) + 1] and rope.vectors == ("v.q", "v.k")
        assert rope.u == (32, 16, 1, 32) and attend.u == (2, block_v)


def test_what_only_looks_like_keys_is_not_turned_with_queries(weights: Weights) -> None:
    """Another table, another head size, or what the first rope gives."""
    g = GraphBuilder(weights, ())
    x, first, second = g.embed("m.table"), g.rope_table(16, 1e4), g.rope_table(16, 1e5)
    a, b, c = (g.linear(x, name) for name in ("m.a", "m.b", "m.c"))
    a = g.rope(a, first, 32, 16, 1)
    b = g.rope(b, second, 32, 16, 1)
    c = g.rope(c, second, 64, 16, 1)
    c = g.rope(c, second, 64, 16, 1)
    for value in (a, b, c):
        g.output(g.gather(value))
    ropes = [node for node in fuse(g.finish()).nodes if node.code is OpCode.ROPE]
    assert [len(node.outputs) for node in ropes] == [1, 1, 1, 1]
