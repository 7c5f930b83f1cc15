"""How well a model predicts a text, chunk by chunk as llama.cpp's ``llama-perplexity`` does, so that figures compare.

Order: the text is encoded as a whole, with the leading token where the vocabulary asks for one, and cut into chunks of
``ctx`` tokens that do not overlap; what is left over is dropped. Each chunk is a context of its own, in which the
leading token takes the place of the first one. Of its predictions those behind its middle count: the tokens from
``ctx / 2 + 1`` on, ``ctx - ctx / 2 - 1`` of them.
Units: nats. PPL = exp(m) with m the mean of all counted nll, and the error bar is PPL * sqrt((mean(nll^2) - m^2) / (n
- 1)).
Source: llama.cpp, tools/perplexity/perplexity.cpp, the function ``perplexity`` (chunks without a stride).
Holds: ``Perplexity``, ``nll_of_rows``, ``estimate``. Never more than one pass of logits is held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pykvstream.engine import Model
from pykvstream.errors import InvalidArgument
from pykvstream.eval.measure import Cell, Column, OnTokens, Row
from pykvstream.eval.state import text_digest
from pykvstream.sampling import token_logprobs

SHORTEST_CTX = 4


def nll_of_rows(logits: NDArray[np.float32], targets: Sequence[int], n_vocab: int) -> NDArray[np.float64]:
    """-log softmax of each row at its target; ``[n, vocab rows]`` and n token ids.

    The bits of the log probabilities that generating these tokens reports. Raises ``NumericError`` for a row that is no
    logits, with its number.
    """
    return -token_logprobs(logits, targets, n_vocab=n_vocab)


def estimate(nll: float, nll_squared: float, n: int) -> tuple[float, float]:
    """Perplexity and its error bar from sums over ``n`` predictions."""
    mean = nll / n
    variance = nll_squared / n - mean * mean
    perplexity = math.exp(mean)
    return perplexity, perplexity * math.sqrt(variance / (n - 1)) if variance > 0 and n > 1 else 0.0


def chunks_of(ids: Sequence[int], ctx: int, bos: int | None, most: int | None) -> list[list[int]]:
    """Chunks of ``ctx`` tokens with ``bos`` in front of each. Raises ``InvalidArgument`` where there are not two."""
    if ctx < SHORTEST_CTX:
        raise InvalidArgument(f"chunks of {ctx} tokens: need {SHORTEST_CTX} at least")
    if len(ids) < 2 * ctx:
        raise InvalidArgument(f"the text has {len(ids)} tokens: two chunks of {ctx} need {2 * ctx}")
    n_chunks = len(ids) // ctx if most is None else min(most, len(ids) // ctx)
    chunks = [list(ids[i * ctx : (i + 1) * ctx]) for i in range(n_chunks)]
    if bos is not None:
        for chunk in chunks:
            chunk[0] = bos
    return chunks


class Perplexity:
    """The measurement on an open model, which stays the caller's; the chunks are as long as its context."""

    name = "ppl"
    columns = (
        Column("chunk", "chunk"),
        Column("tokens", "tokens", ",d"),
        Column("chunk_ppl", "PPL of the chunk", ".4f"),
        Column("streamed_bytes", "streamed bytes", ",d"),
    )

    def __init__(self, model: Model, text: str, *, n_chunks: int | None = None, opened: str = "") -> None:
        """``opened`` says how the model was opened, as far as a row depends on it."""
        tokenizer = model.tokenizer
        ids = tokenizer.encode(text, bos=True)
        ctx = model.plan.ctx_tokens
        self._chunks = chunks_of(ids, ctx, tokenizer.bos_id if tokenizer.add_bos else None, n_chunks)
        self._model = model
        self._n_vocab = tokenizer.n_vocab
        self._session = model.session()
        self._step = model.plan.phase("prefill").max_rows
        self.arguments: Mapping[str, object] = {
            "model": model.identity,
            "text": text_digest(text),
            "ctx": ctx,
            "chunks": len(self._chunks),
            "opened": opened,
            "ubatch": self._step,
        }
        self.cells = [Cell(f"chunk {i + 1}", ctx) for i in range(len(self._chunks))]

    def measure(self, cell: Cell, on_tokens: OnTokens) -> Row:
        """One chunk, in a context of its own."""
        number = self.cells.index(cell)
        chunk = self._chunks[number]
        first = len(chunk) // 2
        session = self._session
        session.truncate(0)
        before = session.stats.streamed_bytes
        found: list[NDArray[np.float64]] = []
        for begin in range(0, len(chunk), self._step):
            part = chunk[begin : begin + self._step]
            # A prediction counts from the middle on, and the last token of a chunk has nothing to predict.
            skipped = max(first - begin, 0)
            targets = chunk[begin + skipped + 1 : begin + len(part) + 1]
            rows = session.forward(part, logits="all" if targets and skipped < len(part) else "none")
            if targets and skipped < len(part):
                found.append(nll_of_rows(rows[skipped : skipped + len(targets)], targets, self._n_vocab))
            on_tokens(len(part))
        nll = np.concatenate(found)
        total, squares = float(nll.sum()), float((nll * nll).sum())
        return {
            "chunk": number + 1,
            "tokens": len(nll),
            "nll": total,
            "nll_squared": squares,
            "chunk_ppl": math.exp(total / len(nll)),
            "streamed_bytes": session.stats.streamed_bytes - before,
        }

    def summary(self, rows: Sequence[Row]) -> Row:
        """The estimate over all chunks."""
        n, nll, squares = (sum(_number(row, name) for row in rows) for name in ("tokens", "nll", "nll_squared"))
        perplexity, error = estimate(nll, squares, int(n))
        return {
            "chunks": len(rows),
            "tokens": int(n),
            "ppl": perplexity,
            "error": error,
            "streamed_bytes": int(sum(_number(row, "streamed_bytes") for row in rows)),
            "broken": 0,
        }

    def close(self) -> None:
        """Give the session back; the model stays open."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def running_estimates(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Perplexity and error bar after each chunk."""
    n = nll = squares = 0.0
    values, errors = [], []
    for row in rows:
        n, nll, squares = n + _number(row, "tokens"), nll + _number(row, "nll"), squares + _number(row, "nll_squared")
        value, error = estimate(nll, squares, int(n))
        values.append(value)
        errors.append(error)
    return values, errors


def _number(row: Row, name: str) -> float:
    value = row[name]
    if not isinstance(value, int | float):
        raise InvalidArgument(f"{name} of a row is {value!r}, no number")
    return value
