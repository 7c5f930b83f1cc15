"""Checks of a row of logits, and the log probabilities that are reported of it.

Shapes: logits are float32, one row, at least ``n_vocab`` wide: models pad their last matrix, and ids from
``n_vocab`` on are no tokens.
Units: natural logarithms under the softmax of the first ``n_vocab`` raw logits: before bias, penalties,
filters and temperature, so that the number says what the model thought and not what the settings left.
Holds: one sum, ``sum_exps``, whose order and exponentials are the core's: the sampling front finds its very bits in a
pass (``KVS_OP_FRONT``). A log probability is the same bits whoever looked at the row, on how many threads and on which
platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.candidates import sum_exps
from pykvstream.core.noise import exact_log_of
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


def log_sum_exp(largest: float, total: float) -> float:
    """The logarithm of the softmax denominator, of the largest logit and the sum of exponentials relative to it."""
    return largest + exact_log_of(total)


def log_denominator(row: NDArray[np.float32]) -> float:
    """The same of a checked row: all its columns are tokens."""
    return log_sum_exp(*sum_exps(row))


def token_logprobs(
    logits: NDArray[np.float32], tokens: Sequence[int], *, n_vocab: int, position: int = 0
) -> NDArray[np.float64]:
    """Return the log probability of one token in each row: ``[m, n]`` and ``m`` ids to ``[m]``.

    ``position``: of the first token, for error messages. Raises as ``Sampler.choose`` does.
    """
    if len(logits) != len(tokens):
        raise InvalidArgument(f"{len(logits)} rows of logits and {len(tokens)} tokens")
    if any(not 0 <= token < n_vocab for token in tokens):
        raise InvalidArgument(f"tokens {min(tokens)} to {max(tokens)}, the vocabulary has {n_vocab}")
    found = np.empty(len(tokens))
    for i, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        found[i] = float(row[token]) - log_denominator(check_row(row, n_vocab, position + i)[0])
    return found


def top_logprobs(
    logits: NDArray[np.float32], n: int, *, n_vocab: int, position: int = 0
) -> tuple[Choice, ...]:
    """Return the ``n`` most probable tokens, best first, ties by id; ``position`` is for error messages."""
    if n < 1:
        raise InvalidArgument(f"n must be at least 1, got {n}")
    row, _ = check_row(logits, n_vocab, position)
    denominator = log_denominator(row)
    top = top_candidates(row, n)
    return tuple(Choice(int(i), float(x) - denominator) for i, x in zip(top.ids, top.logits, strict=True))
