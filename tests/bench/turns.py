"""Answers that are timed beside each other: a few tokens of each in turn.

What else a machine does changes within seconds, and whole answers one behind the other would meet different weather.
Holds: ``take_turns``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

SLICE_TOKENS = 20


def take_turns(
    answers: Mapping[str, Iterator[object]], clock: Callable[[], float], n_tokens: int = SLICE_TOKENS
) -> dict[str, float]:
    """Seconds of each answer, by its name, from its first token to its last; ``n_tokens`` of each take turns.

    The first token, before which the prompt is run, is taken beforehand.
    """
    for pieces in answers.values():
        next(pieces)
    seconds = dict.fromkeys(answers, 0.0)
    left = dict(answers)
    while left:
        for name, pieces in list(left.items()):
            started = clock()
            n_taken = sum(1 for _ in islice(pieces, n_tokens))
            seconds[name] += clock() - started
            if n_taken < n_tokens:
                del left[name]
    return seconds
