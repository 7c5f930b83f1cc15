"""What needles are made of: facts that nobody can guess, questions for them, and unrelated text around.

Holds: ``FACTS``, ``name_of``, ``digits_of``, ``filler``, ``evenly``. The demo hybrid has learned this wording.
"""

from __future__ import annotations

import random
from fractions import Fraction

FACTS = (
    (
        "The secret code of {name} is {value}.",
        "What is the secret code of {name}?",
        "The secret code of {name} is {value}.",
    ),
    (
        "Remember that {name} keeps the number {value}.",
        "Which number does {name} keep?",
        "{name} keeps the number {value}.",
    ),
    (
        "The key to the {name} archive is {value}.",
        "What is the key to the {name} archive?",
        "The key to the {name} archive is {value}.",
    ),
    ("{name} lives at number {value}.", "At which number does {name} live?", "{name} lives at number {value}."),
)
"""Statement, question, answer; ``value`` is what must be recalled."""

_FIRST = ("Al", "Bel", "Cor", "Dan", "El", "Far", "Gor", "Hal", "Il", "Jor", "Kel", "Lor", "Mar", "Nor", "Or", "Pel",
          "Quin", "Ros", "Sal", "Tor", "Ul", "Ver", "Wil", "Yor", "Zan")  # fmt: skip
_SECOND = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "ar", "er", "or", "el", "il", "as")
_THIRD = ("ba", "da", "dor", "la", "lin", "mir", "na", "nis", "ra", "ric", "sa", "ta", "than", "vin", "wen", "zo")

_WHO = ("the keeper", "a clerk", "the old baker", "her sister", "the ferryman", "a young surveyor", "the gardener",
        "the postmaster", "a visitor", "the miller", "their neighbour", "the watchman")  # fmt: skip
_DID = ("looked at", "carried", "wrote about", "painted", "repaired", "found", "described", "forgot", "sold",
        "measured", "remembered", "waited for")  # fmt: skip
_WHAT = ("the narrow bridge", "a basket of apples", "the long letter", "the broken clock", "a map of the valley",
         "the harbour wall", "an empty boat", "the winter coats", "the green ledger", "a row of lamps",
         "the stone stairs", "the last train")  # fmt: skip
_WHEN = ("in the early morning", "before the rain came", "after a long silence", "when the market closed",
         "near the end of the summer", "on the way to the mill", "while the others slept", "as the fog lifted",
         "during the second week", "at the edge of the wood")  # fmt: skip
_SENTENCES = (3, 7)


def name_of(rng: random.Random) -> str:
    """A name of three syllables."""
    return rng.choice(_FIRST) + rng.choice(_SECOND) + rng.choice(_THIRD)


def digits_of(rng: random.Random) -> str:
    """Seven digits, the first of them not 0."""
    return str(rng.randrange(10**6, 10**7))


def filler(rng: random.Random, n_chars: int) -> str:
    """At least so many characters of plain sentences in paragraphs, with no digit in them."""
    parts: list[str] = []
    length = 0
    while length < n_chars:
        sentences = [_sentence(rng) for _ in range(rng.randint(*_SENTENCES))]
        parts.append(" ".join(sentences))
        length += len(parts[-1]) + 2
    return "\n\n".join(parts)


def _sentence(rng: random.Random) -> str:
    who, did, what, when = (rng.choice(words) for words in (_WHO, _DID, _WHAT, _WHEN))
    if rng.random() < 0.5:
        return f"{when[0].upper()}{when[1:]}, {who} {did} {what}."
    return f"{who[0].upper()}{who[1:]} {did} {what} {when}."


def evenly(n: int) -> tuple[Fraction, ...]:
    """``n`` depths from the first place to the last; one alone is the first."""
    return tuple(Fraction(i, max(n - 1, 1)) for i in range(n))
