"""What an answer is made of, token by token.

Holds: ``Piece``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.text.deltas import Delta


@dataclass(frozen=True, slots=True)
class Piece:
    """One emitted token: its id, the text that became complete with it (may be empty), its log-probability, and
    the logits it was chosen from (``[vocab rows]`` float32, valid until the next piece).

    ``deltas``: in an answer to a chat, what became certain of its reasoning, content and tool calls.
    """

    token: int
    text: str
    logprob: float
    logits: NDArray[np.float32]
    deltas: tuple[Delta, ...] = ()
