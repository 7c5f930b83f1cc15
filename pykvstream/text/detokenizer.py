"""Token ids to text, one at a time, never cutting a character in half.

Order: the pieces of ``push`` and that of ``flush`` concatenate to ``Tokenizer.decode`` of the same ids.
Holds: at most three bytes of an unfinished character between two calls.
"""

from __future__ import annotations

import codecs

from pykvstream.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes a stream of ids; ``specials`` renders control tokens too."""

    __slots__ = ("_specials", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, *, specials: bool = False) -> None:
        self._tokenizer = tokenizer
        self._specials = specials
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the characters that ``token`` completes, "" while one is unfinished."""
        return self._utf8.decode(self._tokenizer.token_bytes(token, specials=self._specials))

    @property
    def is_whole(self) -> bool:
        """Whether no character is unfinished."""
        return not self._utf8.getstate()[0]

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, else "", and start afresh."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return tail
