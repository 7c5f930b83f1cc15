"""``ngram-simple``: what followed the last tokens when they stood in the text before.

Source: model.md 4.2. N counts the tokens before the newest one.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykvstream.speculation.drafter import NO_DRAFT, Draft
from pykvstream.speculation.occurrences import Occurrences


class NgramSimple:
    """Copies up to ``size_m`` tokens from behind the latest earlier place of the last ``size_n`` tokens."""

    name = "ngram-simple"

    def __init__(self, size_n: int, size_m: int) -> None:
        self._n = size_n
        self._m = size_m
        self._text = Occurrences(size_n)

    def observe(self, tokens: Sequence[int]) -> None:
        """The text has become longer by these."""
        self._text.extend(tokens)

    def begin(self) -> None:
        """Nothing is prepared for an answer."""

    def truncate(self, n_tokens: int) -> None:
        """The text is its first tokens."""
        self._text.truncate(n_tokens)

    def fork(self) -> NgramSimple:
        """One that goes on alone."""
        child = NgramSimple(self._n, self._m)
        child._text = self._text.fork()
        return child

    def draft(self, n_max: int) -> Draft:
        """What followed at the latest earlier place, if as much as was compared follows there."""
        tokens, n = self._text.tokens, self._n
        n_before = len(tokens) - 1
        if n_before <= n + self._m + 1 or self._text.is_new(len(tokens) - n):
            return NO_DRAFT
        for at in self._text.before(len(tokens) - n):
            if at <= n_before - n - 1:
                n_copied = min(self._m, n_before - (at + n))
                # Place 0 never counts.
                if at == 0 or n_copied < n:
                    return NO_DRAFT
                return Draft(tuple(tokens[at + n : at + n + min(n_copied, n_max)]))
        return NO_DRAFT

    def judge(self, n_accepted: int) -> None:
        """Nothing is learnt from a draft."""
