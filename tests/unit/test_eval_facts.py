"""Needles cannot be guessed, and are the same everywhere."""

from __future__ import annotations

import random
import re

from pykvstream.eval.facts import FACTS, digits_of, filler, name_of


def test_the_text_around_holds_no_digit_and_is_long_enough() -> None:
    text = filler(random.Random("text"), 5000)
    assert 5000 <= len(text) < 6000
    assert re.search(r"\d", text) is None


def test_one_seed_makes_one_text() -> None:
    assert filler(random.Random(4), 900) == filler(random.Random(4), 900)
    assert filler(random.Random(4), 900) != filler(random.Random(5), 900)


def test_values_are_seven_digits() -> None:
    rng = random.Random(1)
    assert all(re.fullmatch(r"[1-9]\d{6}", digits_of(rng)) for _ in range(200))


def test_every_fact_states_asks_and_answers() -> None:
    rng = random.Random(2)
    for statement, question, answer in FACTS:
        name, value = name_of(rng), digits_of(rng)
        assert name in statement.format(name=name, value=value) and value in statement.format(name=name, value=value)
        assert value not in question.format(name=name) and name in question.format(name=name)
        assert answer.format(name=name, value=value).endswith(f"{value}.")
