"""Laws of text for any input: round trips, streaming equals whole, stops equal a whole-text search."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream.errors import InvalidArgument
from pykvstream.text.chat import ChatTemplate, encode_chat
from pykvstream.text.detokenizer import StreamDecoder
from pykvstream.text.provenance import Marked, join, marks_of
from pykvstream.text.stops import StopMatcher
from pykvstream.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text_fixtures import PIECES, SPECIALS, slow_encode, vocabulary

METADATA = {pre: vocabulary(pre) for pre in PIECES}
TOKENIZERS = {pre: Tokenizer.from_metadata(metadata, 500) for pre, metadata in METADATA.items()}
QWEN = TOKENIZERS["qwen35"]
SPECIAL_IDS = {QWEN.token_id(text) for text, _ in SPECIALS}

# Python and the regular expression engine know different Unicode versions; these characters are old.
CHARACTERS = "aZ'stS 1²Ⅷ٣.,!-\n\r\t\u0301\u00a0\u3000éß漢हि🚀<|>"
WORDS = [*CHARACTERS, "'ll", "'RE", "the", " there", "12345", "  ", "\r\n", "e\u0301"]
tricky_text = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)
spelled_specials = st.lists(
    st.sampled_from([t for t, _ in SPECIALS] + ["<|", "im_end", "|>", "!", "x", "\n"])
)
token_ids = st.lists(st.integers(0, QWEN.n_vocab_rows - 1), max_size=40)


@given(st.sampled_from(sorted(PIECES)), tricky_text)
@settings(max_examples=examples(400), deadline=None)
def test_encode_equals_slow_reference_on_any_text(pre: str, text: str) -> None:
    assert TOKENIZERS[pre].encode(text) == slow_encode(text, pre, METADATA[pre])


@given(st.sampled_from(sorted(PIECES)), st.text(max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_decode_inverts_encode(pre: str, text: str) -> None:
    assert TOKENIZERS[pre].decode(TOKENIZERS[pre].encode(text)) == text


@given(spelled_specials.map("".join))
@settings(deadline=None)
def test_plain_encoding_has_no_special_and_both_spell_the_text(text: str) -> None:
    plain = QWEN.encode(text)
    assert not SPECIAL_IDS & set(plain)
    assert QWEN.decode(plain) == text
    assert QWEN.decode(QWEN.encode(text, specials=True), specials=True) == text


@given(token_ids, st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_streamed_pieces_concatenate_to_decode(ids: list[int], specials: bool) -> None:
    decoder = StreamDecoder(QWEN, specials=specials)
    pieces = [decoder.push(i) for i in ids]
    assert "".join([*pieces, decoder.flush()]) == QWEN.decode(ids, specials=specials)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_streamed_valid_text_has_no_replacement_character(text: str) -> None:
    decoder = StreamDecoder(QWEN)
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert decoder.flush() == ""


stop_strings = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


@given(stop_strings, st.lists(st.text("ab<c", max_size=6), max_size=12))
@settings(max_examples=examples(500))
def test_stop_matcher_equals_search_in_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    want = text[: min(ends)[0] + min(ends)[1]] if ends else text
    matcher = StopMatcher(stops)
    emitted, stopped = "", False
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        emitted += emit
        assert want.startswith(emitted)
    assert stopped == bool(ends)
    assert emitted + matcher.flush() == want


TRUSTED = "AB\tX"


def by_alphabet(text: str) -> bytes:
    """Marks that the characters themselves tell: those in ``TRUSTED`` are the template's."""
    return bytes(char in TRUSTED for char in text)


@given(st.text("ab \n" + TRUSTED, max_size=16), st.text("aAX ", min_size=1, max_size=2), st.integers(-1, 3))
@settings(max_examples=examples(500))
def test_marks_follow_their_characters(plain: str, separator: str, count: int) -> None:
    text, mark = Marked(plain, by_alphabet(plain)), Marked(separator, by_alphabet(separator))
    assert text.split(separator, count) == plain.split(separator, count)
    assert text.rsplit(None, count) == plain.rsplit(None, count)
    assert text.splitlines() == plain.splitlines()
    pieces = [*text.split(separator, count), *text.rsplit(separator, count), *text.split(None, count)]
    pieces += [
        *text.rsplit(None, count),
        *text.splitlines(),
        *text.splitlines(True),
        *text.partition(separator),
    ]
    pieces += [*text.rpartition(separator), text.strip(), text.lstrip(separator), text.rstrip(separator)]
    pieces += [text.removeprefix(separator), text.removesuffix(separator), text[1:-1], text[::-2], text * 2]
    pieces += [text + "ab", "ab" + text, text + mark, mark.join([text, "a", text]), join("a", [text, mark])]
    pieces += [text[i] for i in range(-len(text), len(text))]
    assert [marks_of(piece) for piece in pieces] == [by_alphabet(piece) for piece in pieces]


TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role }}\n{{ m.content|trim }}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
)


@given(st.lists(spelled_specials.map("".join), min_size=1, max_size=3))
@settings(max_examples=examples(300), deadline=None)
def test_any_content_leaves_only_the_templates_special_tokens(contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    try:
        ids = encode_chat(QWEN, TEMPLATE, messages)
    except InvalidArgument as refused:
        assert "told apart" in str(refused)
        return
    special = [QWEN.tokens[i] for i in ids if i in SPECIAL_IDS]
    assert special == ["<|im_start|>", "<|im_end|>"] * len(contents)
    assert QWEN.decode(ids, specials=True) == TEMPLATE.render(messages)
