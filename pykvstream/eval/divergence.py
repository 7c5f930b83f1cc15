"""How far the predictions of one run are from those of another: streamed against resident, a cache type against F32.

Order: both runs go through the text in step, one pass at a time, so that no more than a pass of logits of each is
held.
Units: nats. For each token KL(P || Q) = sum p (log p - log q), P the reference's softmax, in float64 over all logits;
the maximum is over tokens, and top-1 agreement counts tokens of which both find the same one likeliest.
Source: Kullback and Leibler 1951.
Holds: ``Divergence``, ``Difference``. Logits that are equal bit by bit have a divergence of exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.errors import InvalidArgument
from pykvstream.eval.measure import Cell, Column, OnTokens, Row
from pykvstream.eval.opening import (
    F32_PAIR,
    CachePair,
    OpenedModel,
    Opening,
    is_rotatable,
    require_streamed,
    share_pages,
)
from pykvstream.eval.state import text_digest
from pykvstream.runtime.target import Phase

RESIDENT, F32 = "resident", "f32"
REFERENCES = (RESIDENT, F32)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each row, in float64: what two runs differ in may be less than what is left out of log probabilities that
    are reported, whose exponentials are float32."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


@dataclass(slots=True)
class Difference:
    """What was found so far, over tokens and logits."""

    n_tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    n_same_first: int = 0
    n_unequal: int = 0

    def add(self, reference: NDArray[np.float32], other: NDArray[np.float32]) -> None:
        """Compare the same tokens of both runs, ``[n, vocab rows]`` each."""
        log_p, log_q = log_softmax(reference), log_softmax(other)
        each = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
        self.n_tokens += len(each)
        self.total += float(each.sum())
        self.largest = max(self.largest, float(each.max()))
        self.n_same_first += int((reference.argmax(axis=1) == other.argmax(axis=1)).sum())
        self.n_unequal += int(np.count_nonzero(reference.view(np.uint32) != other.view(np.uint32)))


@dataclass(frozen=True, slots=True)
class _Case:
    """A cell: what is run beside what."""

    reference: str
    ctx: int
    pair: CachePair
    percent: float = 100.0
    rotation: bool = True

    @property
    def name(self) -> str:
        what = f"{self.percent:g} %" if self.reference == RESIDENT else f"rotation {self.rotation}"
        return f"{self.reference}, {self.ctx}, {self.pair}, {what}"


class Divergence:
    """The measurement. Models are opened for each cell: the reference, and beside it what is compared with it."""

    name = "kld"
    columns = (
        Column("reference", "against"),
        Column("ctx", "context", ",d"),
        Column("cache", "K/V"),
        Column("rotation", "rotation"),
        Column("asked_percent", "asked %", "g"),
        Column("resident_percent", "resident %", ".1f"),
        Column("resident_pages", "pages resident", ",d"),
        Column("streamed_pages", "pages streamed", ",d"),
        Column("streamed_bytes", "bytes streamed", ",d"),
        Column("mean", "mean KLD", ".3g"),
        Column("max", "max KLD", ".3g"),
        Column("top1_percent", "top-1 %", ".2f"),
        Column("unequal_logits", "unequal logits", ",d"),
    )

    def __init__(
        self,
        opening: Opening,
        text: str,
        *,
        contexts: Sequence[int],
        pairs: Sequence[CachePair],
        percents: Sequence[float] = (100.0, 50.0, 25.0, 10.0),
        references: Sequence[str] = REFERENCES,
    ) -> None:
        """Raises ``InvalidArgument`` for a text that is shorter than a context, and for shares that cannot be."""
        for percent in percents:
            if not 0 < percent <= 100:
                raise InvalidArgument(f"a resident share of {percent:g} %: need one above 0 and up to 100")
        for ctx in contexts if RESIDENT in references else ():
            for percent in percents:
                if percent < 100:
                    share_pages(ctx, opening.ubatch_size, percent)
        for reference in references:
            if reference not in REFERENCES:
                raise InvalidArgument(f"reference {reference!r}: known are {', '.join(REFERENCES)}")
        self._opening = opening
        with opening.open(max(contexts), pairs[0]) as model:
            self._ids = model.tokenizer.encode(text, bos=True)
            identity = model.identity
            turns = {pair: (False, True) if is_rotatable(model.config, pair) else (True,) for pair in pairs}
        if len(self._ids) < max(contexts):
            raise InvalidArgument(f"the text has {len(self._ids)} tokens, the longest context {max(contexts)}")
        self._cases = [
            case
            for ctx in contexts
            for pair in pairs
            for case in (
                *(_Case(RESIDENT, ctx, pair, percent) for percent in percents if RESIDENT in references),
                *(_Case(F32, ctx, pair, rotation=on) for on in turns[pair] if F32 in references and pair != F32_PAIR),
            )
        ]
        self.cells = [Cell(case.name, 2 * case.ctx) for case in self._cases]
        self.arguments: Mapping[str, object] = {
            "model": identity,
            "text": text_digest(text),
            "contexts": list(contexts),
            "pairs": [str(pair) for pair in pairs],
            "percents": list(percents),
            "references": list(references),
            "ubatch": opening.ubatch_size,
        }

    def measure(self, cell: Cell, on_tokens: OnTokens) -> Row:
        """Run the two models of a cell beside each other."""
        case = self._cases[self.cells.index(cell)]
        if case.reference == RESIDENT:
            with self._opening.resident(case.ctx, case.pair) as reference:
                if case.percent == 100:
                    with self._opening.resident(case.ctx, case.pair) as twin:
                        return self._row(case, reference, twin, on_tokens)
                with self._opening.streamed(reference, case.pair, case.percent) as other:
                    return self._row(case, reference, other, on_tokens)
        with (
            self._opening.resident(case.ctx, F32_PAIR) as reference,
            self._opening.resident(case.ctx, case.pair, rotation=case.rotation) as other,
        ):
            return self._row(case, reference, other, on_tokens)

    def _row(self, case: _Case, reference: OpenedModel, other: OpenedModel, on_tokens: OnTokens) -> Row:
        difference = Difference()
        step = self._opening.ubatch_size
        expected = 0
        with reference.model.session() as one, other.model.session() as two:
            for begin in range(0, case.ctx, step):
                part = self._ids[begin : min(begin + step, case.ctx)]
                expected += other.streamed_bytes(Phase.PREFILL, begin, len(part))
                difference.add(one.forward(part, logits="all"), two.forward(part, logits="all"))
                on_tokens(2 * len(part))
            if one.stats.streamed_bytes:
                require_streamed(one.stats.streamed_bytes, 0, "the resident run")
            stats = two.stats
        require_streamed(stats.streamed_bytes, expected, case.name)
        return {
            "reference": case.reference,
            "ctx": case.ctx,
            "cache": str(case.pair),
            "rotation": ("on" if case.rotation else "off") if is_rotatable(other.model.config, case.pair) else "none",
            "asked_percent": case.percent,
            "resident_percent": other.resident_percent,
            "arena_bytes": stats.arena_bytes,
            "history_bytes": stats.history_bytes,
            "resident_pages": stats.resident_pages,
            "streamed_pages": stats.streamed_bytes // other.page_bytes,
            "streamed_bytes": stats.streamed_bytes,
            "tokens": difference.n_tokens,
            "mean": difference.total / difference.n_tokens,
            "max": difference.largest,
            "top1_percent": 100 * difference.n_same_first / difference.n_tokens,
            "unequal_logits": difference.n_unequal,
        }

    def summary(self, rows: Sequence[Row]) -> Row:
        """Rows of streamed against resident, and of these, those that are not exactly 0."""
        streamed = [row for row in rows if row["reference"] == RESIDENT]
        broken = [row for row in streamed if row["max"] != 0 or row["mean"] != 0 or row["unequal_logits"] != 0]
        total = sum(n for row in streamed if isinstance(n := row["streamed_bytes"], int))
        return {"rows": len(rows), "against_resident": len(streamed), "streamed_bytes": total, "broken": len(broken)}
