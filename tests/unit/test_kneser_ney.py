"""The Kneser-Ney model beside one of dictionaries and loops."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from tools.train_demo_hybrid.kneser_ney import KneserNey


class Plain:
    """Interpolated Kneser-Ney by its definition."""

    def __init__(self, text: bytes, order: int) -> None:
        padded = bytes(order - 1) + text
        self.order = order
        longest = Counter(padded[i : i + order] for i in range(len(text)))
        self.counts = {order: dict(longest)}
        for length in range(order - 1, 0, -1):
            in_front: dict[bytes, set[int]] = defaultdict(set)
            for gram in self.counts[length + 1]:
                in_front[gram[1:]].add(gram[0])
            self.counts[length] = {gram: len(found) for gram, found in in_front.items()}

    def discount(self, length: int) -> float:
        values = list(self.counts[length].values())
        once, twice = values.count(1), values.count(2)
        return once / (once + 2 * twice) if once else 0.0

    def p(self, context: bytes, char: int, length: int) -> float:
        if length == 0:
            return 1 / 256
        own = context[len(context) - (length - 1) :]
        followers = {gram: n for gram, n in self.counts[length].items() if gram[:-1] == own}
        lower = self.p(context, char, length - 1)
        if not followers:
            return lower
        d = self.discount(length)
        count = followers.get(own + bytes([char]), 0)
        return (max(count - d, 0) + d * len(followers) * lower) / sum(followers.values())


def sample(seed: int, n: int) -> bytes:
    rng = random.Random(seed)
    return bytes(rng.choice(b"aaabbc\x00d") for _ in range(n))


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_are_those_of_the_definition(order: int) -> None:
    text, asked = sample(1, 300), sample(2, 60) + b"zq" + sample(3, 10)
    plain, padded = Plain(text, order), bytes(order - 1) + asked
    found = KneserNey(text, order).probabilities(asked)
    for i, char in enumerate(asked):
        assert found[i] == pytest.approx(plain.p(padded[i : i + order - 1], char, order), rel=1e-12)


@pytest.mark.parametrize("context", [b"aab", b"zzz", b"a\x00a", b"bzb"])
def test_probabilities_of_all_characters_sum_to_one(context: bytes) -> None:
    model = KneserNey(sample(4, 500), 4)
    total = sum(model.probabilities(context + bytes([char]))[-1] for char in range(256))
    assert total == pytest.approx(1.0, rel=1e-12)


def test_bits_leave_the_ends_of_documents_out() -> None:
    model, text = KneserNey(sample(5, 400), 3), sample(6, 50)
    p = model.probabilities(text)
    kept = [-math.log2(p[i]) for i, char in enumerate(text) if char]
    assert model.bits_per_byte(text) == pytest.approx(sum(kept) / len(kept))


def test_a_text_is_taken_in_pieces_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = KneserNey(sample(7, 400), 5), sample(8, 50)
    whole = model.probabilities(text)
    monkeypatch.setattr("tools.train_demo_hybrid.kneser_ney._BLOCK", 7)
    assert np.array_equal(model.probabilities(text), whole)


def test_text_that_was_seen_costs_less_than_text_that_was_not() -> None:
    model = KneserNey(b"the cat sat on the mat and the dog sat on the log. " * 40, 5)
    assert model.bits_per_byte(b"the dog sat on the mat") < 1 < 4 < model.bits_per_byte(b"XYZZY 42 qwv")


@pytest.mark.parametrize(("text", "order"), [(b"abc", 0), (b"abc", 8), (b"ab", 3)])
def test_what_cannot_be_counted_is_refused(text: bytes, order: int) -> None:
    with pytest.raises(SystemExit, match="an order of"):
        KneserNey(text, order)
