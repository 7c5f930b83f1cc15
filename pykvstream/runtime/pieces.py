"""What an answer is made of, token by token.

Holds: ``Piece``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.runtime.rows import Logits
from pykvstream.text.deltas import Delta


@dataclass(frozen=True, slots=True)
class Piece:
    """One emitted token: its id, the text that became complete with it (may be empty), its log-probability, and
    the logits it was chosen from (``[vocab rows]`` float32, valid until the next piece).

    On a card a row stays there where the best of it were enough to choose from. ``logits`` then brings it the first
    time that it is read, and raises ``Stale`` where another session has run a pass since.
    ``deltas``: in an answer to a chat, what became certain of its reasoning, content and tool calls.
    """

    token: int
    text: str
    logprob: float
    row: Logits
    deltas: tuple[Delta, ...] = ()

    @property
    def logits(self) -> NDArray[np.float32]:
        """The row. Raises ``Stale``."""
        return self.row() if callable(self.row) else self.row
