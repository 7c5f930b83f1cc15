"""Rows of logits of one call, which may have stayed on the card that found their sampling fronts.

Shapes: a row is float32 ``[vocab rows]``.
Holds: ``LogitRows``; ``RowReader``; ``Logits``, a row or how to have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

RowReader = Callable[[int, NDArray[np.float32]], None]
"""``read(i, rows)``: rows from number ``i`` on, from where the device has them. Raises ``Stale`` where it has them no
more."""

Logits = NDArray[np.float32] | Callable[[], NDArray[np.float32]]


class LogitRows:
    """``here``: room for the rows, which are in it unless there is a ``reader``."""

    __slots__ = ("_fetched", "_here", "_reader")

    def __init__(self, here: NDArray[np.float32], reader: RowReader | None = None) -> None:
        self._here = here
        self._reader = reader
        self._fetched: set[int] = set()

    def __len__(self) -> int:
        return len(self._here)

    def at(self, i: int) -> Logits:
        """A row, or where it stayed on the card a function that brings it."""
        if self._reader is None or i in self._fetched:
            row: NDArray[np.float32] = self._here[i]
            return row
        return partial(self._fetch, i)

    def all(self) -> NDArray[np.float32]:
        """All rows. Raises ``Stale`` where the device has begun another pass since they were computed."""
        if self._reader is not None:
            for i in range(len(self)):
                self._fetch(i)
        return self._here

    def _fetch(self, i: int) -> NDArray[np.float32]:
        if self._reader is not None and i not in self._fetched:
            self._reader(i, self._here[i : i + 1])
            self._fetched.add(i)
        row: NDArray[np.float32] = self._here[i]
        return row
