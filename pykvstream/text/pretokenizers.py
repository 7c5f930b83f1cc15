"""How each named pre-tokenizer cuts text into the pieces that byte-pair merging works inside.

Order: the patterns of a rule apply one after another, each inside the pieces that the pattern before it left;
every match becomes a piece of its own and so does every gap between matches.
Source: the published tokenizer files of GPT-2, SmolLM2, Llama 3, Qwen2 and Qwen3.5; spec/model.md 7.2.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _modern(letters: str, digits: str) -> str:
    """Return the pattern that Llama 3 and the Qwen family share but for letters and digits."""
    others = letters.strip("[]")
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s{others}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule: its patterns in order, and whether a piece that is a token skips the merges."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt2": PreTokenizer((_GPT2,)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": PreTokenizer((_modern(r"\p{L}", r"\p{N}{1,3}"),), ignore_merges=True),
    "qwen2": PreTokenizer((_modern(r"\p{L}", r"\p{N}"),)),
    "qwen35": PreTokenizer((_modern(r"[\p{L}\p{M}]", r"\p{N}"),)),
    # What a converter writes that did not recognise the tokenizer; readers agree on these four passes.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
