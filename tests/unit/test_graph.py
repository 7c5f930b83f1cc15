"""Graphs that cannot become a tape are refused where the mistake is, not where it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.tape import WeightLayout
from pykvstream.core.trace import TraceDevice, TraceWeight
from pykvstream.errors import InvalidArgument
from pykvstream.gguf import GgmlType
from pykvstream.graph import GraphBuilder, lower

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
