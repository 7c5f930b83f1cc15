"""Checks of a row of logits, and the log probabilities that are reported of it.

Shapes: logits are float32, one row, at least ``n_vocab`` wide: models pad their last matrix, and ids from
``n_vocab`` on are no tokens.
Units: natural logarithms under the softmax of the first ``n_vocab`` raw logits: before bias, penalties,
filters and temperature, so that the number says what the model thought and not what the settings left.
Holds: reported log probabilities decide nothing, so they use the platform's exp and may differ in the last
digits (about 1e-6) between platforms; the tokens may not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import InvalidArgument, NumericError
from pykvstream.sampling.truncation import top_candidates


@dataclass(frozen=True, slots=True)
class Choice:
    """A token and its log probability under the raw logits."""

    token: int
    logprob: float


def check_row(logits: NDArray[np.float32], n_vocab: int, position: int) -> tuple[NDArray[np.float32], int]:
    """Return the first ``n_vocab`` logits and the first index of their maximum.

    The maximum is also the whole check: NaN and plus infinity win it, and minus infinity wins only alone.
    """
    if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 1:
        got = f"{logits.dtype} {logits.shape}" if isinstance(logits, np.ndarray) else type(logits).__name__
        raise InvalidArgument(f"logits must be one float32 row, got {got}")
    if logits.size < n_vocab:
        raise InvalidArgument(f"logits must hold at least n_vocab = {n_vocab} values, got {logits.size}")
    row = logits[:n_vocab]
    best = int(row.argmax())
    padding = logits[n_vocab:]
    if not row[best] < np.inf or (padding.size and not padding.max() < np.inf):
        bad = int(np.flatnonzero(~(logits < np.inf))[0])
        raise NumericError(f"logits at position {position}: index {bad} is {logits[bad]}")
    if row[best] == -np.inf:
        raise NumericError(f"logits at position {position}: all {n_vocab} are -inf, from index 0 on")
    return row, best


def log_denominator(row: NDArray[np.float32], best: int) -> float:
    """Return the logarithm of the softmax denominator of a checked row."""
    peak = row[best]
    with np.errstate(over="ignore", under="ignore"):
        # In float32, which numpy adds up pairwise: within 1e-6, and four times as fast as in float64.
        total = float(np.exp(row - peak).sum())
    return float(peak) + math.log(total)


def top_logprobs(
    logits: NDArray[np.float32], n: int, *, n_vocab: int, position: int = 0
) -> tuple[Choice, ...]:
    """Return the ``n`` most probable tokens, best first, ties by id; ``position`` is for error messages."""
    if n < 1:
        raise InvalidArgument(f"n must be at least 1, got {n}")
    row, best = check_row(logits, n_vocab, position)
    denominator = log_denominator(row, best)
    top = top_candidates(row, n)
    return tuple(Choice(int(i), float(x) - denominator) for i, x in zip(top.ids, top.logits, strict=True))
