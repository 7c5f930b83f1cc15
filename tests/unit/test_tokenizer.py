"""The tokenizer refuses malformed vocabularies by key and keeps special tokens out of user text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers

from pykvstream.errors import FormatError, InvalidArgument, Unsupported
from pykvstream.gguf.reader import GgufFile
from pykvstream.text.tokenizer import MAX_WHITESPACE_RUN, Tokenizer
from tests.text_fixtures import CHARS, PARAGRAPH, PIECES, SPECIALS, slow_encode, vocabulary

K = "tokenizer.ggml."
N = len(vocabulary()[K + "tokens"])  # type: ignore[arg-type]


def make(pre: str = "qwen35", rows: int = N + 5, **changes: object) -> Tokenizer:
    metadata = vocabulary(pre)
    for name, value in changes.items():
        metadata[K + name] = value
    return Tokenizer.from_metadata({k: v for k, v in metadata.items() if v is not None}, rows)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make()


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Tokenizer:
    with GgufFile.open(demo_path) as file:
        return Tokenizer.from_metadata(file.metadata, 49152)


TRICKY = [
    "", " ", "a", "\n", "don't DON'T they'LL I'M 'tis", "x  y   z    ", "\n\n  \n x\r\n\r\n",
    "1234567 12 3", "²½Ⅷ٣", "e\u0301a\u0301", "\u0301\u0301x", " \u0301!", "हिन्दी ไทยสวัสดี",
    "漢字かな 한글", "🚀👨\u200d👩\u200d👧!", "...\n\n!?", "a\u00a0b\u3000c\u2028d",
    "\t\tif x:\n\t\t\tpass", "http://x.y/z?q=1&r=2", "'s's", " '", "' s", "A" * 50 + " " * 50,
]  # fmt: skip


@pytest.mark.parametrize("pre", sorted(PIECES))
@pytest.mark.parametrize("text", [*TRICKY, PARAGRAPH])
def test_encode_equals_slow_reference(pre: str, text: str) -> None:
    tokenizer = make(pre)
    ids = tokenizer.encode(text)
    assert ids == slow_encode(text, pre, vocabulary(pre))
    assert tokenizer.decode(ids) == text


def test_pre_tokenizers_cut_digits_each_their_way() -> None:
    extra = ["12", "123", "1234"]
    cut = {}
    for pre in ("gpt2", "smollm", "llama-bpe", "qwen2", "qwen35"):
        metadata = vocabulary(pre, extra=extra)
        metadata[K + "merges"] = [*metadata[K + "merges"], "1 2", "12 3", "123 4"]  # type: ignore[misc]
        t = Tokenizer.from_metadata(metadata, 10_000)
        cut[pre] = [t.tokens[i] for i in t.encode("1234")]
    digits = ["1", "2", "3", "4"]
    assert cut == {
        "gpt2": ["1234"], "smollm": digits, "llama-bpe": ["123", "4"], "qwen2": digits, "qwen35": digits,
    }  # fmt: skip


def test_llama_bpe_takes_whole_piece_that_no_merge_reaches() -> None:
    metadata = {pre: vocabulary(pre, extra=["zqzq"]) for pre in ("llama-bpe", "qwen2")}
    whole, merged = (Tokenizer.from_metadata(metadata[pre], 10_000) for pre in ("llama-bpe", "qwen2"))
    assert [whole.tokens[i] for i in whole.encode("zqzq")] == ["zqzq"]
    assert [merged.tokens[i] for i in merged.encode("zqzq")] == ["z", "q", "z", "q"]


def test_llama_bpe_never_takes_special_token_as_whole_piece() -> None:
    t = Tokenizer.from_metadata(vocabulary("llama-bpe", specials=[("word", 3), ("other", 4)]), 10_000)
    assert not {t.token_id("word"), t.token_id("other")} & set(t.encode("word other"))
    assert t.encode("word", specials=True) == [t.token_id("word")]


def test_combining_marks_stay_with_letters_in_qwen35_only() -> None:
    z, first, second = (CHARS[b] for b in "z\u0301".encode())
    whole = z + first + second
    for pre in ("qwen35", "qwen2"):
        metadata = vocabulary(pre, extra=[z + first, whole])
        metadata[K + "merges"] = [f"{z} {first}", f"{z + first} {second}"]
        t = Tokenizer.from_metadata(metadata, 10_000)
        assert (t.encode("z\u0301") == [t.token_id(whole)]) == (pre == "qwen35")


def test_user_text_never_yields_special_token(tokenizer: Tokenizer) -> None:
    special = {tokenizer.token_id(text) for text, _ in SPECIALS}
    text = " ".join(text for text, _ in SPECIALS)
    assert not special & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_specials_match_longest_first(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x<|im_end|>!<|im_end|><think>", specials=True)
    want = [tokenizer.token_id(t) for t in ("x", "<|im_end|>!", "<|im_end|>", "<think>")]
    assert ids == want


def test_unused_token_is_never_parsed(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("[PAD1]") not in tokenizer.encode("[PAD1]", specials=True)


def test_bos_is_added_only_where_asked_and_declared() -> None:
    t = make(bos_token_id=0, add_bos_token=True)
    assert t.encode("a", bos=True) == [0, *t.encode("a")]
    assert make(bos_token_id=0).encode("a", bos=True) == t.encode("a")


def test_eog_set_is_looked_up_by_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eog_ids == {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")}


def test_eog_token_marked_normal_is_still_out_of_reach_of_text() -> None:
    metadata = vocabulary("llama-bpe", specials=[("fin", 1)])
    t = Tokenizer.from_metadata({**metadata, K + "eos_token_id": N - len(SPECIALS)}, N)
    assert t.eog_ids == {t.token_id("fin")}
    assert t.token_id("fin") not in t.encode("fin")


def test_control_tokens_render_only_on_request(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(t) for t in ("<|im_end|>", "<think>", "a", "[PAD1]")]
    assert tokenizer.decode(ids) == "<think>a"  # type: ignore[arg-type]
    assert tokenizer.decode(ids, specials=True) == "<|im_end|><think>a"  # type: ignore[arg-type]


def test_padding_rows_have_no_text_and_ids_beyond_are_refused(tokenizer: Tokenizer) -> None:
    assert (tokenizer.n_vocab, tokenizer.n_vocab_rows) == (N, N + 5)
    assert tokenizer.token_bytes(N + 4, specials=True) == b""
    for bad in (N + 5, -1):
        with pytest.raises(InvalidArgument, match=str(bad)):
            tokenizer.token_bytes(bad)


def test_merge_table_is_built_on_first_use_only() -> None:
    t = make()
    assert "_backend" not in t.__dict__
    t.encode("a")
    assert "_backend" in t.__dict__


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("tokens", None, "tokens"),
        ("tokens", [], "tokens"),
        ("tokens", "abc", "tokens"),
        ("tokens", [1, 2], "tokens"),
        ("tokens", ["a", "b", "a"], "tokens"),
        ("tokens", np.zeros(4), "tokens"),
        ("merges", None, "merges"),
        ("merges", ["ab"], "merges"),
        ("merges", ["a b c"], "merges"),
        ("merges", [" b"], "merges"),
        ("merges", ["a "], "merges"),
        ("merges", ["t h", "t h"], "merges"),
        ("token_type", [1, 1], "token_type"),
        ("token_type", np.full(N, 7, np.int32), "token_type"),
        ("token_type", np.full(N, -1, np.int32), "token_type"),
        ("token_type", np.full(N, 1.0, np.float32), "token_type"),
        ("token_type", ["1"] * N, "token_type"),
        ("token_type", "1", "token_type"),
        ("token_type", np.ones((N, 1), np.int32), "token_type"),
        ("scores", np.zeros(N - 1, np.float32), "scores"),
        ("scores", np.zeros(N, np.uint8), "scores"),
        ("eos_token_id", N, "eos_token_id"),
        ("eos_token_id", -1, "eos_token_id"),
        ("eos_token_id", "2", "eos_token_id"),
        ("bos_token_id", True, "bos_token_id"),
        ("add_bos_token", 1, "add_bos_token"),
        ("add_bos_token", True, "bos_token_id"),
        ("model", None, "model"),
        ("pre", None, "pre"),
    ],
)
def test_malformed_vocabulary_is_refused_by_key(name: str, value: object, key: str) -> None:
    with pytest.raises(FormatError) as caught:
        make(**{name: value})  # type: ignore[arg-type]
    assert caught.value.key == K + key


def test_special_token_of_unbounded_length_is_refused() -> None:
    with pytest.raises(FormatError, match="600 characters"):
        Tokenizer.from_metadata(vocabulary(specials=[("x" * 600, 3)]), 10_000)


def test_merge_into_control_token_is_refused() -> None:
    metadata = vocabulary(specials=[("qz", 3)])
    metadata[K + "merges"] = ["q z"]
    with pytest.raises(FormatError, match="control token"):
        Tokenizer.from_metadata(metadata, 10_000)


@pytest.mark.parametrize("merge", ["a nope", "nope a", "q z"])
def test_merge_of_what_a_cut_vocabulary_lacks_never_takes_place(merge: str) -> None:
    metadata = vocabulary()
    whole = Tokenizer.from_metadata(metadata, 10_000)
    metadata[K + "merges"] = [merge, *metadata[K + "merges"]]  # type: ignore[misc]
    cut = Tokenizer.from_metadata(metadata, 10_000)
    assert cut.merges == whole.merges
    assert cut.encode("qz the nope") == whole.encode("qz the nope")


def test_vocabulary_larger_than_logits_is_refused_with_both_numbers() -> None:
    with pytest.raises(FormatError, match=rf"{N} tokens.*{N - 1} logits"):
        make(rows=N - 1)


@pytest.mark.parametrize(("name", "value"), [("model", "llama"), ("pre", "deepseek-llm"), ("pre", 3)])
def test_other_tokenizers_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(Unsupported, match=str(value)) as caught:
        make(**{name: value})  # type: ignore[arg-type]
    assert "gpt2" in str(caught.value)


def test_text_with_byte_that_no_token_spells_is_refused() -> None:
    tokens = list(vocabulary()[K + "tokens"])  # type: ignore[call-overload]
    tokens[4] = "unreachable"
    t = make(tokens=tokens)
    assert t.encode("fine")
    with pytest.raises(InvalidArgument, match="0x04"):
        t.encode("a\x04b")


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="character 2"):
        tokenizer.encode("ab\ud800")


def test_white_space_run_beyond_engine_limit_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match=str(MAX_WHITESPACE_RUN)):
        tokenizer.encode("a" + " " * (MAX_WHITESPACE_RUN + 1) + "b")


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen35"])
@pytest.mark.parametrize("unit", ["A", " ", "\n", "\u0301", "漢", "'"])
def test_million_equal_characters_encode_completely(pre: str, unit: str) -> None:
    tokenizer = make(pre)
    ids = tokenizer.encode(unit * 1_000_000)
    lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)])
    assert int(lengths[np.array(ids)].sum()) == 1_000_000 * len(unit.encode())


def test_demo_ids_equal_its_published_pipeline(demo: Tokenizer) -> None:
    vocab = {t: i for i, t in enumerate(demo.tokens)}
    reference = Reference(models.BPE(vocab, list(demo.merges)))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    reference.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), to_bytes])
    for text in [*TRICKY, PARAGRAPH]:
        assert demo.encode(text) == reference.encode(text, add_special_tokens=False).ids
        assert demo.decode(demo.encode(text)) == text


def test_demo_ends_on_its_turn_and_text_tokens(demo: Tokenizer) -> None:
    assert demo.eog_ids == {demo.token_id("<|im_end|>"), demo.token_id("<|endoftext|>")}
    assert demo.encode("Hello") == [19556]
    assert not demo.add_bos
