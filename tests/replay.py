"""Plays choices of drafter and depth through recorded answers, at recorded costs.

Holds: ``Sequence``, ``Costs``, ``load``, ``fixed``, ``controlled``, ``FIXED``. Time is simulated; a choice brings what
it would have brought in the answer that was recorded.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from pykvstream.speculation.controller import NOTHING, Controller

NGRAM, HEAD = "ngram", "head"
FIXED = [(None, 0), *((NGRAM, n) for n in (4, 8, 16)), *((HEAD, n) for n in range(1, 9)),
         *(("both", n) for n in range(1, 9))]  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Seconds of passes by their rows, of beginning a draft of the head and of each of its steps."""

    passes: dict[int, float]
    begin: float
    step: float

    def of_pass(self, n_rows: int) -> float:
        below = max(n for n in self.passes if n <= n_rows)
        above = min((n for n in self.passes if n >= n_rows), default=below)
        if below == above:
            return self.passes[below]
        share = (n_rows - below) / (above - below)
        return (1 - share) * self.passes[below] + share * self.passes[above]

    def of_draft(self, name: str, n: int) -> float:
        return self.begin + n * self.step if name == HEAD else 0.0


@dataclass(frozen=True)
class Sequence:
    """By the places of an answer: tokens of the head's draft that are right, of an n-gram draft, and its length; and
    how sure each drafter was of each token, from 0 to 1 (nothing known: empty)."""

    head: tuple[int, ...]
    proposed: tuple[int, ...]
    right: tuple[int, ...]
    head_sure: tuple[tuple[float, ...], ...] = ()
    sure: tuple[tuple[float, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.head)

    def possible(self, at: int) -> dict[str, int]:
        left = len(self) - at - 1
        return {NGRAM: min(self.proposed[at], left), HEAD: min(8, left)}

    def how_sure(self, name: str, at: int) -> tuple[float, ...]:
        told = self.head_sure if name == HEAD else self.sure
        return told[at] if told else ()

    def n_right(self, name: str, at: int, depth: int) -> int:
        return min((self.head if name == HEAD else self.right)[at], depth)


def load(path: Path) -> tuple[Costs, dict[str, Sequence]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    costs = found["costs"]
    passes = {int(rows): seconds for rows, seconds in costs["passes"].items()}
    return Costs(passes, costs["begin"], costs["step"]), {name: _read(each) for name, each in found["records"].items()}


def _read(record: dict[str, str]) -> Sequence:
    head, proposed, right = (tuple(int(digit, 36) for digit in record[key]) for key in ("head", "proposed", "right"))
    told = record["head_sure"]
    width = len(told) // len(head)
    head_sure = tuple(_sure(told[i : i + width]) for i in range(0, len(told), width))
    return Sequence(head, proposed, right, head_sure, tuple(_sure(each) for each in record["sure"].split(",")))


def _sure(digits: str) -> tuple[float, ...]:
    return tuple((int(digit, 36) + 0.5) / 36 for digit in digits)


def fixed(sequence: Sequence, costs: Costs, kind: str | None, depth: int) -> float:
    """Seconds of an answer in which every round drafts alike; ``both``: the head where no n-gram is proposed."""
    at, seconds = 0, 0.0
    while at < len(sequence):
        possible = sequence.possible(at)
        name = kind
        if kind == "both":
            name = NGRAM if possible[NGRAM] else HEAD
        n = 0 if name is None else min(possible[name], 16 if kind == "both" and name == NGRAM else depth)
        seconds += costs.of_pass(1 + n) + (costs.of_draft(name, n) if n and name is not None else 0.0)
        at += 1 + (sequence.n_right(name, at, n) if n and name is not None else 0)
    return seconds


def controlled(
    sequence: Sequence, costs: Costs, noise: float = 0.0, seed: int = 0, *, with_sure: bool = True
) -> tuple[float, Controller]:
    """Seconds of an answer whose rounds a controller decides; what it is told of times is off by up to ``noise``.

    ``with_sure``: it is told how sure the drafters are.
    """
    rng = random.Random(seed)
    controller = Controller((NGRAM, HEAD), frozenset((HEAD,)))

    def about(took: float) -> float:
        return took * (1 + noise * rng.uniform(-1, 1))

    at, seconds = 0, 0.0
    while at < len(sequence):
        possible = sequence.possible(at)
        sure = {name: sequence.how_sure(name, at) if with_sure else () for name in (NGRAM, HEAD)}
        is_asking = controller.is_asking()
        decision = controller.decide(possible, {NGRAM: sure[NGRAM]}) if is_asking else NOTHING
        name, n, n_made = decision.drafter, decision.depth, None
        if name == HEAD:
            is_open = with_sure and sure[HEAD] and controller.knows(HEAD) and not decision.is_probe
            if is_open:
                n = 1
                while n < possible[HEAD] and controller.goes_on(HEAD, sure[HEAD][:n], possible[HEAD]):
                    n += 1
                n_made = n
            drafting = costs.of_draft(HEAD, n)
            controller.observe_draft(HEAD, n, about(drafting))
            seconds += drafting
            if is_open:
                n = controller.worth(HEAD, sure[HEAD][:n])
        took = costs.of_pass(1 + n)
        if is_asking:
            controller.observe_pass(1 + n, about(took))
        seconds += took
        n_right = 0
        if name is not None:
            n_right = sequence.n_right(name, at, n)
            controller.observe(name, n, n_right, sure[name][:n], n_made)
        at += 1 + n_right
    return seconds, controller
