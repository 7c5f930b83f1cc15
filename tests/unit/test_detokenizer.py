"""The stream decoder emits whole characters only."""

from __future__ import annotations

import pytest

from pykvstream.text.detokenizer import StreamDecoder
from pykvstream.text.tokenizer import Tokenizer
from tests.text_fixtures import vocabulary

TOKENIZER = Tokenizer.from_metadata(vocabulary(), 10_000)


def byte_ids(data: bytes) -> list[int]:
    """One token a byte: the first 256 tokens stand for the bytes."""
    return list(data)


def test_push_holds_character_until_its_last_byte() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push(i) for i in byte_ids("a🚀é".encode())] == ["a", "", "", "", "🚀", "", "é"]
    assert decoder.flush() == ""


def test_flush_replaces_unfinished_character_once() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push(i) for i in byte_ids("🚀".encode()[:3])] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ord("a")) == "a"


def test_broken_byte_is_replaced_and_stream_goes_on() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert "".join(decoder.push(i) for i in byte_ids(b"\xf0\x9fab\xffc")) == "\ufffdab\ufffdc"


@pytest.mark.parametrize("kind", [3, 4])
def test_tags_of_an_answer_are_text_whatever_type_the_file_gives_them(kind: int) -> None:
    specials = [("</think>", kind), ("<|x|>", kind)]
    tokenizer = Tokenizer.from_metadata(vocabulary(specials=specials), 10_000)
    tag, other = (tokenizer.token_id(text) for text, _ in specials)
    assert tag is not None and other is not None
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(token) for token in (tag, other)] == ["</think>", "<|x|>" if kind == 4 else ""]


def test_control_token_between_bytes_of_a_character_is_not_rendered() -> None:
    end = TOKENIZER.token_id("<|im_end|>")
    assert end is not None
    first, second = byte_ids("é".encode())
    decoder = StreamDecoder(TOKENIZER)
    assert "".join(decoder.push(i) for i in (first, end, second)) == "é"
    assert StreamDecoder(TOKENIZER, specials=True).push(end) == "<|im_end|>"
