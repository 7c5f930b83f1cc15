"""What all measurements have in common: cells, rows, and a run that can be taken up again.

Holds: ``Measure``, ``Cell``, ``Column``, ``Row``, ``run_measure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pykvstream.eval.state import RunState

Value = int | float | str | bool | None
Row = dict[str, Value]
OnTokens = Callable[[int], None]
"""Called with the tokens that were run since the last call."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row to be: its name within the measurement, and the tokens that it takes to run."""

    name: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table for people: the field of the row, its title, and a format that ``format`` takes."""

    field: str
    title: str
    form: str = ""

    def text(self, row: Mapping[str, Value]) -> str:
        """The value of a row as people read it."""
        value = row.get(self.field)
        if value is None:
            return "-"
        return str(value) if isinstance(value, str | bool) else format(value, self.form)


class Measure(Protocol):
    """A measurement: ``measure`` is asked for one cell after the other, in order."""

    @property
    def name(self) -> str:
        """The command that runs it."""

    @property
    def arguments(self) -> Mapping[str, object]:
        """Everything that a row depends on, as JSON holds it."""

    @property
    def cells(self) -> Sequence[Cell]:
        """What is measured."""

    @property
    def columns(self) -> Sequence[Column]:
        """What of a row people see."""

    def measure(self, cell: Cell, on_tokens: OnTokens) -> Row:
        """Measure one cell."""

    def summary(self, rows: Sequence[Row]) -> Row:
        """What all rows say together; ``broken`` counts rows that break a promise."""


def run_measure(measure: Measure, state: RunState, on_tokens: OnTokens) -> list[Row]:
    """Measure every cell that the state has no row of; each row is kept as soon as it is there."""
    rows = []
    for cell in measure.cells:
        row = state.row(cell.name)
        if row is None:
            row = measure.measure(cell, on_tokens)
            state.add(cell.name, row)
        else:
            on_tokens(cell.n_tokens)
        rows.append(row)
    return rows
