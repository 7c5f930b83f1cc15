"""Generated texts whose end can only be known from a distant part: what teaches a small model to look back.

Four kinds: a fact stated between unrelated paragraphs and asked for at the end; records looked up by key; a text
given again with stated edits; a dialogue in the chat format that refers to what was said before.
Shapes: a task is ``(text, spans)``; each span ``(begin, end)`` of characters is an answer, where the loss counts more.
Holds: ``make_task``; names, and the wording of facts and questions, are those of ``pykvstream eval needle``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pykvstream.eval.facts import FACTS, name_of

Task = tuple[str, list[tuple[int, int]]]

_WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket",
          "kettle",
          "ladder", "meadow", "needle", "orange", "pencil", "quarry", "river", "silver", "table", "umbrella",
          "valley", "window", "yellow")  # fmt: skip


def value_of(rng: random.Random) -> str:
    """Digits, or now and then a word pair: an answer that cannot be guessed."""
    if rng.random() < 0.75:
        return str(rng.randrange(10 ** rng.randrange(3, 7), 10**7))[: rng.randrange(4, 8)]
    return f"{rng.choice(_WORDS)}-{rng.choice(_WORDS)}"


class _Writer:
    """Text that grows, with the spans of its answers."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.length = 0
        self.spans: list[tuple[int, int]] = []

    def add(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)

    def answer(self, text: str) -> None:
        self.spans.append((self.length, self.length + len(text)))
        self.add(text)

    def task(self) -> Task:
        return "".join(self.parts), self.spans


def _paragraphs(rng: random.Random, filler: str, n_chars: int) -> list[str]:
    """A stretch of the filler, cut where lines end."""
    if n_chars <= 0:
        return []
    begin = rng.randrange(max(1, len(filler) - n_chars))
    text = filler[begin : begin + n_chars]
    parts = [part.strip("\n") for part in text.split("\n\n")]
    return [part for part in parts if part] or [text]


def _insert(rng: random.Random, paragraphs: Sequence[str], statements: Sequence[str]) -> str:
    """Statements at random places between paragraphs."""
    mixed: list[tuple[float, str]] = [(i + 0.5, part) for i, part in enumerate(paragraphs)]
    mixed += [(rng.random() * len(paragraphs), statement) for statement in statements]
    mixed.sort(key=lambda item: item[0])
    return "\n\n".join(part for _, part in mixed)


def needle(rng: random.Random, filler: str, n_chars: int) -> Task:
    """Facts in unrelated text; some of them are asked for at the end."""
    n_facts = rng.randrange(1, 5 + n_chars // 4000)
    names = list({name_of(rng) for _ in range(n_facts)})
    facts = [(name, value_of(rng), rng.choice(FACTS)) for name in names]
    writer = _Writer()
    statements = [fact[0].format(name=name, value=value) for name, value, fact in facts]
    writer.add(_insert(rng, _paragraphs(rng, filler, n_chars), statements))
    for name, value, fact in rng.sample(facts, min(len(facts), rng.randrange(1, 5))):
        writer.add("\n\nQuestion: " + fact[1].format(name=name) + "\nAnswer: ")
        before, _, after = fact[2].format(name=name, value="\x00").partition("\x00")
        writer.add(before)
        writer.answer(value)
        writer.add(after)
    writer.add("\n")
    return writer.task()


def records(rng: random.Random, filler: str, n_chars: int) -> Task:
    """A table of keys and values, then look-ups."""
    del filler
    n_records = max(4, min(n_chars // 24, 1200))
    table = {f"{rng.choice(_WORDS)}{rng.randrange(1000)}": value_of(rng) for _ in range(n_records)}
    separator = rng.choice((": ", " = ", " -> ", "\t"))
    writer = _Writer()
    writer.add("Records:\n" + "".join(f"{key}{separator}{value}\n" for key, value in table.items()) + "\nLook up:\n")
    for key in rng.sample(sorted(table), min(len(table), rng.randrange(3, 12))):
        writer.add(key + separator)
        writer.answer(table[key])
        writer.add("\n")
    return writer.task()


def edits(rng: random.Random, filler: str, n_chars: int) -> Task:
    """A text, then the same text with one word replaced throughout."""
    size = min(max(300, n_chars // 2), 6000)
    begin = rng.randrange(max(1, len(filler) - size))
    text = filler[begin : begin + size]
    words = sorted({word for word in text.split() if word.isalpha() and len(word) > 4})
    if not words:
        return records(rng, filler, n_chars)
    old, new = rng.choice(words), rng.choice(_WORDS)
    writer = _Writer()
    writer.add(f"Text:\n{text}\n\nThe same text with {new} in place of {old}:\n")
    writer.answer(text.replace(old, new))
    writer.add("\n")
    return writer.task()


def dialogue(rng: random.Random, filler: str, n_chars: int) -> Task:
    """Turns in the chat format; answers refer to earlier turns or to a text that the user has pasted."""
    name, value = name_of(rng), value_of(rng)
    fact = rng.choice(FACTS)
    pasted = "\n\n".join(_paragraphs(rng, filler, rng.randrange(max(1, min(n_chars, 60000)))))
    word, other = rng.choice(_WORDS), rng.choice(_WORDS)
    a, b = rng.randrange(100), rng.randrange(100)
    turns = [
        (f"My name is {name}.", f"Hello {name}, nice to meet you."),
        (f"Please remember this: {fact[0].format(name=name, value=value)}", "I will remember it."),
        (f"Say {word} and then {other}.", f"{word} {other}"),
        (f"What is {a} + {b}?", f"{a} + {b} = {a + b}."),
        (f"Here is a text.\n\n{pasted}", "Thank you, I have read it."),
    ]
    rng.shuffle(turns)
    turns += [
        (fact[1].format(name=name), fact[2].format(name=name, value=value)),
        ("What is my name?", f"Your name is {name}."),
    ]
    writer = _Writer()
    if rng.random() < 0.5:
        writer.add("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    for user, assistant in turns:
        writer.add(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        writer.answer(f"{assistant}<|im_end|>")
        writer.add("\n")
    return writer.task()


_KINDS: tuple[tuple[Callable[[random.Random, str, int], Task], float], ...] = (
    (needle, 0.4), (records, 0.25), (edits, 0.15), (dialogue, 0.2)
)  # fmt: skip


def make_task(rng: random.Random, filler: str, n_chars: int) -> Task:
    """A task of about ``n_chars`` characters."""
    kinds, weights = zip(*_KINDS, strict=True)
    kind: Callable[[random.Random, str, int], Task] = rng.choices(kinds, weights)[0]
    return kind(rng, filler, n_chars)
