"""Whether a fact is found again: one fact at a chosen depth of unrelated text, a question at the end, a greedy answer.

Order: a prompt is a head of whole passes, then the passes that hold the question, then the answer token by token. With
``only_nonresident`` the fact lies in pages that every layer brings through the ring in each of these passes, at
depths that divide the span of such pages evenly; else depths divide the text before the question.
Units: positions in tokens, pages of 256, depth in percent of the context.
Holds: ``Needles``. The resident run answers the same prompt in the same passes, and is what the streamed one must
equal.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import Self

import numpy as np

from pykvstream.engine import Model
from pykvstream.errors import IntegrityError, InvalidArgument
from pykvstream.eval.facts import FACTS, digits_of, evenly, filler, name_of
from pykvstream.eval.measure import Cell, Column, OnTokens, Row
from pykvstream.eval.opening import CachePair, OpenedModel, Opening, require_streamed, share_pages
from pykvstream.eval.state import text_digest
from pykvstream.runtime.layout import PAGE_TOKENS
from pykvstream.runtime.target import Phase

_ANSWER_ROOM = 4
_CHARS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class _Case:
    """A cell: the fact number ``repeat`` at one of the depths."""

    ctx: int
    depth: int
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.ctx}, depth {self.depth}, {self.repeat}"


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Token ids with the fact in place. ``n_head``: those of the whole passes before the question's."""

    ids: list[int]
    n_head: int
    n_answer: int
    fact: range
    value: str

    @property
    def fact_pages(self) -> range:
        return range(self.fact.start // PAGE_TOKENS, (self.fact.stop - 1) // PAGE_TOKENS + 1)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    digest: str
    streamed_bytes: int


class Needles:
    """The measurement. The two models of a context stay open while its cells are measured."""

    name = "needle"
    columns = (
        Column("ctx", "context", ",d"),
        Column("depth_percent", "depth %", ".1f"),
        Column("fact_pages", "fact in pages"),
        Column("nonresident_pages", "streamed by all"),
        Column("resident_percent", "resident %", ".1f"),
        Column("streamed_bytes", "bytes streamed", ",d"),
        Column("value", "fact"),
        Column("answer", "answer"),
        Column("is_right", "right"),
        Column("is_equal", "as resident"),
    )

    def __init__(
        self,
        opening: Opening,
        pair: CachePair,
        *,
        contexts: Sequence[int],
        depths: Sequence[Fraction] = evenly(10),
        n_repeats: int = 1,
        percent: float = 100.0,
        only_nonresident: bool = False,
        text: str | None = None,
        seed: int = 1,
    ) -> None:
        """``depths``: shares of the span in which facts lie, 0 its first place and 1 its last.

        ``text`` is what lies around the facts, by default generated sentences. Raises ``InvalidArgument``.
        """
        if only_nonresident and percent == 100:
            raise InvalidArgument("facts in pages that are not resident: with a resident share of 100 % there are none")
        for ctx in contexts:
            if percent < 100:
                share_pages(ctx, opening.ubatch_size, percent)
        self._opening, self._pair, self._percent = opening, pair, percent
        self._depths, self._only_nonresident, self._seed, self._text = depths, only_nonresident, seed, text
        self._cases = [
            _Case(ctx, depth, repeat) for ctx in contexts for depth in range(len(depths)) for repeat in range(n_repeats)
        ]
        n_runs = 1 if percent == 100 else 2
        self.cells = [Cell(case.name, n_runs * case.ctx) for case in self._cases]
        with opening.open(max(contexts), pair) as model:
            self._filler = self._encode_filler(model, max(contexts))
            identity = model.identity
        self.arguments: Mapping[str, object] = {
            "model": identity,
            "text": "" if text is None else text_digest(text),
            "cache": str(pair),
            "contexts": list(contexts),
            "depths": [str(depth) for depth in depths],
            "repeats": n_repeats,
            "percent": percent,
            "only_nonresident": only_nonresident,
            "seed": seed,
            "ubatch": opening.ubatch_size,
        }
        self._stack = ExitStack()
        self._opened: tuple[OpenedModel, OpenedModel | None] | None = None

    def _encode_filler(self, model: Model, n_tokens: int) -> list[int]:
        text = self._text
        if text is None:
            text = filler(random.Random(f"{self._seed} text"), _CHARS_PER_TOKEN * n_tokens)
        ids = model.tokenizer.encode(text, bos=True)
        if len(ids) < n_tokens:
            raise InvalidArgument(f"the text has {len(ids)} tokens, the longest context {n_tokens}")
        return ids

    def measure(self, cell: Cell, on_tokens: OnTokens) -> Row:
        """Ask for one fact, of the resident model and of the streamed one."""
        case = self._cases[self.cells.index(cell)]
        resident, streamed = self._models(case.ctx)
        prompt = self._prompt(case, resident, streamed)
        first = self._ask(prompt, resident, on_tokens)
        row: Row = {
            "ctx": case.ctx,
            "depth": case.depth,
            "depth_percent": 100 * prompt.fact.start / case.ctx,
            "repeat": case.repeat,
            "fact_pages": _span(prompt.fact_pages),
            "nonresident_pages": None,
            "resident_percent": 100.0,
            "streamed_bytes": first.streamed_bytes,
            "value": prompt.value,
            "answer": first.text,
            "resident_answer": first.text,
            "is_right": first.text == prompt.value,
            "is_equal": None,
            "has_equal_logits": None,
        }
        if streamed is None:
            return row
        nonresident = _nonresident(prompt, streamed)
        if self._only_nonresident and not set(prompt.fact_pages) <= set(nonresident):
            raise IntegrityError(f"{case.name}: a page of the fact is resident, pages {_span(nonresident)} are not")
        second = self._ask(prompt, streamed, on_tokens)
        return {
            **row,
            "nonresident_pages": _span(nonresident),
            "resident_percent": streamed.resident_percent,
            "streamed_bytes": second.streamed_bytes,
            "answer": second.text,
            "is_right": second.text == prompt.value,
            "is_equal": second.text == first.text,
            "has_equal_logits": second.digest == first.digest,
        }

    def _models(self, ctx: int) -> tuple[OpenedModel, OpenedModel | None]:
        if self._opened is not None and self._opened[0].model.plan.ctx_tokens == ctx:
            return self._opened
        self.close()
        resident = self._stack.enter_context(self._opening.resident(ctx, self._pair))
        streamed = None
        if self._percent < 100:
            streamed = self._stack.enter_context(self._opening.streamed(resident, self._pair, self._percent))
        self._opened = resident, streamed
        return self._opened

    def _prompt(self, case: _Case, resident: OpenedModel, streamed: OpenedModel | None) -> _Prompt:
        rng = random.Random(f"{self._seed} {case.ctx} {case.depth} {case.repeat}")
        name, value, wording = name_of(rng), digits_of(rng), rng.choice(FACTS)
        encode = resident.model.tokenizer.encode
        fact = encode("\n\n" + wording[0].format(name=name, value=value) + "\n\n")
        opening = wording[2].partition("{value}")[0].format(name=name).rstrip()
        question = encode(f"\n\nQuestion: {wording[1].format(name=name)}\nAnswer: {opening}")
        n_answer = len(encode(" " + value)) + _ANSWER_ROOM
        n_before = case.ctx - n_answer - len(question)
        n_head = n_before // self._opening.ubatch_size * self._opening.ubatch_size
        empty = _Prompt([0] * (n_before + len(question)), n_head, n_answer, range(0), value)
        room = range(0, n_before) if not self._only_nonresident or streamed is None else _tokens_of(empty, streamed)
        last = room.stop - len(fact)
        if last < room.start:
            raise InvalidArgument(f"a context of {case.ctx} tokens has no room for a fact: take a longer one")
        at = room.start + round((last - room.start) * self._depths[case.depth])
        ids = [*self._filler[:at], *fact, *self._filler[at : n_before - len(fact)], *question]
        return _Prompt(ids, n_head, n_answer, range(at, at + len(fact)), value)

    def _ask(self, prompt: _Prompt, opened: OpenedModel, on_tokens: OnTokens) -> _Answer:
        """The greedy answer, each pass checked for what it brought through the ring."""
        tokenizer = opened.model.tokenizer
        digest, answer = hashlib.sha256(), list[int]()
        with opened.model.session() as session:
            if prompt.n_head:
                session.forward(prompt.ids[: prompt.n_head], logits="none", on_progress=_Progress(on_tokens))
            tail = prompt.ids[prompt.n_head :]
            expected = session.stats.streamed_bytes
            for phase, n_committed, n_rows in _passes(prompt, self._opening.ubatch_size):
                if phase is Phase.PREFILL:
                    _check_forecast(session.forecast(n_rows).streamed_bytes, opened, phase, n_committed, n_rows)
                    begin = n_committed - prompt.n_head
                    logits = session.forward(tail[begin : begin + n_rows])
                else:
                    logits = session.forward(answer[-1:], phase=phase)
                expected += opened.streamed_bytes(phase, n_committed, n_rows)
                on_tokens(n_rows)
                if n_committed + n_rows >= len(prompt.ids):
                    digest.update(np.ascontiguousarray(logits, "<f4").tobytes())
                    answer.append(int(logits[0, : tokenizer.n_vocab].argmax()))
            n_bytes = session.stats.streamed_bytes
            require_streamed(n_bytes, expected, "the answer")
        words = tokenizer.decode(answer).split()
        return _Answer(words[0].rstrip(".,;") if words else "", digest.hexdigest(), n_bytes)

    def summary(self, rows: Sequence[Row]) -> Row:
        """Right answers for each context, and rows whose answer is another than the resident run's."""
        result: Row = {"rows": len(rows), "right_percent": _percent(rows)}
        for ctx in dict.fromkeys(row["ctx"] for row in rows):
            result[f"right_percent_{ctx}"] = _percent([row for row in rows if row["ctx"] == ctx])
        result["compared"] = sum(row["is_equal"] is not None for row in rows)
        result["broken"] = sum(row["is_equal"] is False or row["has_equal_logits"] is False for row in rows)
        return result

    def close(self) -> None:
        """Close the models."""
        self._opened = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _passes(prompt: _Prompt, width: int) -> list[tuple[Phase, int, int]]:
    """Phase, committed tokens and rows of every pass behind the head; the last answer token is never run."""
    n_prompt = len(prompt.ids)
    prompts = [
        (Phase.PREFILL, begin, min(width, n_prompt - begin)) for begin in range(prompt.n_head, n_prompt, width)
    ]
    return prompts + [(Phase.DECODE, n_prompt + i, 1) for i in range(prompt.n_answer - 1)]


def _nonresident(prompt: _Prompt, opened: OpenedModel) -> range:
    """Pages that every layer streams in each pass behind the head."""
    spans = [opened.streamed_pages(*each) for each in _passes(prompt, opened.model.plan.phase("prefill").max_rows)]
    first, stop = max(span.start for span in spans), min(span.stop for span in spans)
    return range(first, max(first, stop))


def _tokens_of(prompt: _Prompt, opened: OpenedModel) -> range:
    pages = _nonresident(prompt, opened)
    return range(pages.start * PAGE_TOKENS, pages.stop * PAGE_TOKENS)


def _check_forecast(n_bytes: int, opened: OpenedModel, phase: Phase, n_committed: int, n_rows: int) -> None:
    """The pager itself says what the pass will stream; by that the fact's pages were chosen."""
    require_streamed(n_bytes, opened.streamed_bytes(phase, n_committed, n_rows), "the pager's forecast")


class _Progress:
    """Turns a call's progress into tokens since the last time."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._done = 0

    def __call__(self, done: int, _: int) -> None:
        self._on_tokens(done - self._done)
        self._done = done


def _span(pages: range) -> str:
    return "none" if not pages else f"{pages.start}-{pages.stop - 1}" if len(pages) > 1 else str(pages.start)


def _percent(rows: Sequence[Row]) -> float:
    return 100 * sum(row["is_right"] is True for row in rows) / len(rows)
