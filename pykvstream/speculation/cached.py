"""``ngram-cache``: the token that most often followed the last few, in this text, in earlier ones, in a corpus.

Source: model.md 4.5. Thresholds are by the length of the n-gram, from 1 token to 4.
Order: this text decides first, its longest n-gram before the shorter ones; then earlier texts; then the corpus. Of
tokens that are equally good the one of the lowest id is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pykvstream.speculation.counts import LONGEST, NgramCounts
from pykvstream.speculation.drafter import NO_DRAFT, Draft

STATIC_TOKENS = 2
N_DRAFT = 8
_Thresholds = tuple[tuple[int, ...], tuple[int, ...]]
LAX: _Thresholds = ((2, 2, 1, 1), (66, 50, 50, 50))
STRICT: _Thresholds = ((4, 3, 2, 2), (75, 66, 66, 66))
"""Fewest samples, and the least share in per cent of the token that is taken."""
_STATIC_WEIGHT = 100
_NOTHING: Mapping[int, int] = {}


class NgramCache:
    """``dynamic`` holds counts of earlier texts, ``static`` of a corpus; neither changes."""

    name = "ngram-cache"

    def __init__(self, static: NgramCounts | None = None, dynamic: NgramCounts | None = None) -> None:
        self._static = static or NgramCounts()
        self._dynamic = dynamic or NgramCounts()
        self._context = NgramCounts()
        self._tokens: list[int] = []

    @property
    def context(self) -> NgramCounts:
        """The counts of this text."""
        return self._context

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""
        first = len(self._tokens)
        self._tokens += tokens
        self._context.observe(self._tokens, first)

    def begin(self) -> None:
        """Nothing is prepared for an answer."""

    def truncate(self, n_tokens: int) -> None:
        """The text is its first tokens."""
        self._context.forget(self._tokens, n_tokens)
        del self._tokens[n_tokens:]

    def fork(self) -> NgramCache:
        """One that goes on alone."""
        child = NgramCache(self._static, self._dynamic)
        child._context = self._context.copy()
        child._tokens = list(self._tokens)
        return child

    def draft(self, n_max: int) -> Draft:
        """One token after another, until none is likely enough."""
        if len(self._tokens) < STATIC_TOKENS:
            return NO_DRAFT
        text = tuple(self._tokens[-LONGEST:])
        drafted: list[int] = []
        sure: list[float] = []
        while len(drafted) < min(N_DRAFT, n_max) and (found := self._next(text)) is not None:
            token, how_sure = found
            drafted.append(token)
            sure.append(how_sure)
            text = (*text, token)[-LONGEST:]
        return Draft(tuple(drafted), sure=tuple(sure)) if drafted else NO_DRAFT

    def judge(self, n_accepted: int) -> None:
        """Nothing is learnt from a draft."""

    def _next(self, text: tuple[int, ...]) -> tuple[int, float] | None:
        """The token that is likely enough, and its share of what was seen and of one more."""
        corpus = self._static.of(text[-STATIC_TOKENS:]) if self._static else _NOTHING
        seen = self._seen(text)
        for n in range(len(seen), 0, -1):
            found = _likely(seen[n - 1], corpus, n, LAX)
            if found is not None:
                return found
        for n in range(len(text), 0, -1) if self._dynamic else ():
            found = _likely(self._dynamic.of(text[-n:]), corpus, n, STRICT)
            if found is not None:
                return found
        return _likely(corpus, _NOTHING, STATIC_TOKENS, LAX) if corpus else None

    def _seen(self, text: tuple[int, ...]) -> list[Mapping[int, int]]:
        """What followed the last token in this text, the last two, and so on: what followed more followed fewer."""
        seen: list[Mapping[int, int]] = []
        for n in range(1, len(text) + 1):
            followers = self._context.of(text[-n:])
            if not followers:
                break
            seen.append(followers)
        return seen


def _likely(
    followers: Mapping[int, int], corpus: Mapping[int, int], n: int, thresholds: _Thresholds
) -> tuple[int, float] | None:
    """The token whose count, weighed by the corpus, is largest, where it is seen often enough."""
    if not followers:
        return None
    fewest, least_percent = thresholds[0][n - 1], thresholds[1][n - 1]
    if len(followers) == 1:
        ((best, total),) = followers.items()
        return None if total < fewest else (best, total / (total + 1))

    def weight(token: int) -> tuple[int, int]:
        in_corpus = corpus.get(token)
        return followers[token] * (1 if in_corpus is None else _STATIC_WEIGHT * in_corpus), -token

    best = max(followers, key=weight)
    total = sum(followers.values())
    if total < fewest or 100 * followers[best] < least_percent * total:
        return None
    return best, followers[best] / (total + 1)
