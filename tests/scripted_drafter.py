"""A drafter that knows how the text will go on, and makes of it what a rule says: all of it, none, some.

Holds: ``Scripted``, ``Rule``, ``RULES`` and each of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pykvstream.speculation import Draft

Rule = Callable[[list[int], random.Random], list[int]]


class Scripted:
    """Proposes what a rule makes of the right continuation, which it is told."""

    name = "scripted"

    def __init__(self, right: Sequence[int], rule: Rule) -> None:
        self.right, self.rule = list(right), rule
        self.n_tokens = 0
        self.rng = random.Random(1)

    def observe(self, tokens: Sequence[int]) -> None:
        self.n_tokens += len(tokens)

    def begin(self) -> None:
        pass

    def truncate(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def fork(self) -> Scripted:
        child = Scripted(self.right, self.rule)
        child.n_tokens = self.n_tokens
        return child

    def draft(self, n_max: int) -> Draft:
        ahead = self.right[self.n_tokens : self.n_tokens + n_max]
        return Draft(tuple(self.rule(ahead, self.rng)[:n_max]))

    def judge(self, n_accepted: int) -> None:
        pass


def all_right(ahead: list[int], rng: random.Random) -> list[int]:
    return ahead[: rng.randint(1, 63)]


def all_wrong(ahead: list[int], rng: random.Random) -> list[int]:
    return [(token + 1) % 250 for token in ahead[: rng.randint(1, 9)]]


def reversed_(ahead: list[int], rng: random.Random) -> list[int]:
    return ahead[: rng.randint(1, 8)][::-1]


def half_right(ahead: list[int], rng: random.Random) -> list[int]:
    """Right up to a place, wrong there, right again behind it."""
    draft = ahead[: rng.randint(1, 20)]
    if draft:
        at = rng.randrange(len(draft))
        draft[at] = (draft[at] + 1) % 250
    return draft


def any_tokens(ahead: list[int], rng: random.Random) -> list[int]:
    return [rng.randrange(250) for _ in ahead[: rng.randint(1, 8)]]


RULES = (all_right, all_wrong, reversed_, half_right, any_tokens)
