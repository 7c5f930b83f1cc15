"""Small byte-level BPE vocabularies trained on the spot, and a slow tokenizer to compare with."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

PARAGRAPH = (
    "The history of the long conversation streams through a bounded arena. It's what we've built: don't "
    "stop, they'll read the other 12345 pages there and then. Überall naïve café, "
    "漢字かな漢字 한글 हिन्दी e\u0301e\u0301 🚀🚀!!\n\n"
    "    def main():\n        return 'the end' + \"...\"\n\t\tthe  there   other\r\n"
)
SPECIALS = (
    ("<|endoftext|>", 3), ("<|im_start|>", 3), ("<|im_end|>", 3), ("<|im_end|>!", 3), ("<think>", 4),
    ("</think>", 4), ("<tool_response>", 4), ("</tool_response>", 4), ("<|vision_start|>", 3),
    ("<|image_pad|>", 3), ("[PAD1]", 5),
)  # fmt: skip


def byte_chars() -> list[str]:
    """The character that stands for each byte: itself where it is visible, else the next from U+0100."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(b) if b in visible else chr(256 + hidden.index(b)) for b in range(256)]


CHARS = byte_chars()


def merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """Replace every ``pair`` in ``word``, from the left."""
    out: list[str] = []
    i = 0
    while i < len(word):
        found = word[i : i + 2] == pair
        out.append("".join(pair) if found else word[i])
        i += 2 if found else 1
    return tuple(out)


def train(text: str, n_merges: int) -> list[tuple[str, str]]:
    """Learn merges from the words of ``text``, most frequent pair first."""
    words = Counter(tuple(CHARS[b] for b in piece.encode()) for piece in gpt2_pieces(text))
    merges: list[tuple[str, str]] = []
    while len(merges) < n_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        best = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(best)
        words = Counter({merge(word, best): n for word, n in words.items()})
    return merges


def is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] == "L"


def is_letter_or_mark(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM"


def is_number(char: str) -> bool:
    return unicodedata.category(char)[0] == "N"


def run_end(text: str, at: int, holds: Callable[[str], bool], limit: int = 1 << 30) -> int:
    """Where the run of characters that ``holds`` accepts, starting at ``at``, ends."""
    end = at
    while end < len(text) and end - at < limit and holds(text[end]):
        end += 1
    return end


def space_end(text: str, at: int, newlines: bool) -> int:
    """White space goes up to its last line break, or leaves one character to the word that follows."""
    end = run_end(text, at, str.isspace)
    last = max((i for i in range(at, end) if text[i] in "\r\n"), default=-1)
    if newlines and last >= 0:
        return last + 1
    return end - 1 if end < len(text) and end - at > 1 else end


def contraction_end(text: str, at: int) -> int:
    for ending in ("s", "t", "re", "ve", "m", "ll", "d"):
        if text.startswith("'" + ending, at):
            return at + 1 + len(ending)
    return at


def gpt2_pieces(text: str) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        end = contraction_end(text, at)
        word = at + (text[at] == " ")
        for holds in (is_letter, is_number, lambda c: not (c.isspace() or is_letter(c) or is_number(c))):
            if end == at:
                stop = run_end(text, word, holds)
                end = stop if stop > word else at
        end = space_end(text, at, newlines=False) if end == at else end
        pieces.append(text[at:end])
        at = end
    return pieces


def smollm_pieces(text: str) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        end = at + 1 if is_number(text[at]) else run_end(text, at, lambda c: not is_number(c))
        pieces += gpt2_pieces(text[at:end])
        at = end
    return pieces


def modern_pieces(text: str, letter: Callable[[str], bool], digits: int) -> list[str]:
    def other(char: str) -> bool:
        return not (char.isspace() or letter(char) or is_number(char))

    pieces, at = [], 0
    while at < len(text):
        end = contraction_end(text.lower() if text.isascii() else text, at)
        glued = not (text[at] in "\r\n" or is_letter(text[at]) or is_number(text[at]))
        for start in (at + glued, at):
            if end == at and (stop := run_end(text, start, letter)) > start:
                end = stop
        if end == at:
            end = run_end(text, at, is_number, digits)
        start = at + (text[at] == " ")
        if end == at and (stop := run_end(text, start, other)) > start:
            end = run_end(text, stop, lambda c: c in "\r\n")
        end = space_end(text, at, newlines=True) if end == at else end
        pieces.append(text[at:end])
        at = end
    return pieces


PIECES: dict[str, Callable[[str], list[str]]] = {
    "gpt2": gpt2_pieces,
    "smollm": smollm_pieces,
    "llama-bpe": lambda text: modern_pieces(text, is_letter, 3),
    "qwen2": lambda text: modern_pieces(text, is_letter, 1),
    "qwen35": lambda text: modern_pieces(text, is_letter_or_mark, 1),
}


def slow_encode(text: str, pre: str, metadata: dict[str, object]) -> list[int]:
    """Cut with the reference above and merge the best ranked pair until none is left."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(line.split(" ")): i for i, line in enumerate(merges)}
    out: list[int] = []
    for piece in PIECES[pre](text):
        word = tuple(CHARS[b] for b in piece.encode())
        if pre == "llama-bpe" and "".join(word) in ids:
            word = ("".join(word),)
        while True:
            pairs = [pair for pair in pairwise(word) if pair in ranks]
            if not pairs:
                break
            word = merge(word, min(pairs, key=lambda p: ranks[p]))
        out += [ids[part] for part in word]
    return out


def vocabulary(
    pre: str = "qwen35", specials: Sequence[tuple[str, int]] = SPECIALS, extra: Sequence[str] = ()
) -> dict[str, object]:
    """The ``tokenizer.ggml.*`` keys of a vocabulary: 256 bytes, 150 merges, ``extra``, ``specials``."""
    merges = train(PARAGRAPH, 150)
    words = [*CHARS, *dict.fromkeys("".join(pair) for pair in merges), *extra]
    tokens = [*words, *(text for text, _ in specials)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(words) + [kind for _, kind in specials],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.add_bos_token": False,
    }
    if any(text == "<|im_end|>" for text, _ in specials):
        metadata["tokenizer.ggml.eos_token_id"] = tokens.index("<|im_end|>")
    return metadata
