"""Settings of drafting, several drafters in a row, what they report, and the file of n-gram counts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from pykvstream import ModSize, NgramCounts, NgramSize, SpeculationParams, load_ngram_counts, save_ngram_counts
from pykvstream.errors import DeviceError, FormatError, InvalidArgument, KvStreamError, NotFound, Unsupported
from pykvstream.speculation import (
    DRAFTERS,
    Chain,
    Draft,
    NgramCache,
    NgramMap,
    NgramMod,
    NgramSimple,
    Window,
    chain_of,
    make_drafters,
)


class Fixed:
    """Always drafts the same, and writes down what it is told."""

    def __init__(self, name: str, *tokens: int) -> None:
        self.name = name
        self.tokens = tokens
        self.text: list[int] = []
        self.judged: list[int] = []
        self.n_begun = 0

    def observe(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def begin(self) -> None:
        self.n_begun += 1

    def truncate(self, n_tokens: int) -> None:
        del self.text[n_tokens:]

    def fork(self) -> Fixed:
        return Fixed(self.name, *self.tokens)

    def draft(self, n_max: int) -> Draft:
        return Draft(self.tokens)

    def judge(self, n_accepted: int) -> None:
        self.judged.append(n_accepted)


def drafted(chain: Chain, room: int) -> Window:
    window = chain.draft(room)
    assert window is not None
    return window


def test_drafters_are_asked_in_their_own_order() -> None:
    params = SpeculationParams(types=DRAFTERS[::-1])
    assert [drafter.name for drafter in make_drafters(params)] == list(DRAFTERS)
    assert params.types == DRAFTERS


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SpeculationParams(types=("ngram-simple",), ngram_simple=NgramSize(1, 3)), (3, 4, 5)),
        (SpeculationParams(types=("ngram-simple",), ngram_simple=NgramSize(2, 3)), ()),
        (SpeculationParams(types=("ngram-map-k",), ngram_map_k=NgramSize(1, 2)), (3, 4)),
        (SpeculationParams(types=("ngram-map-k",), ngram_map_k=NgramSize(2, 2)), ()),
        (SpeculationParams(types=("ngram-map-k4v",), ngram_map_k4v=NgramSize(1, 4, 1)), (3, 4, 5, 6)),
        (SpeculationParams(types=("ngram-map-k4v",), ngram_map_k4v=NgramSize(1, 4, 2)), ()),
        (SpeculationParams(types=("ngram-mod",), ngram_mod=ModSize(1, 3, 5)), (3, 4, 5, 2, 3)),
        (SpeculationParams(types=("ngram-mod",), ngram_mod=ModSize(2, 3, 5)), ()),
    ],
)
def test_sizes_reach_their_drafters(params: SpeculationParams, expected: tuple[int, ...]) -> None:
    """The last token has been there before, the last two have not."""
    (drafter,) = make_drafters(params)
    drafter.observe([9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 5, 2])
    drafter.begin()
    assert drafter.draft(64).tokens == expected


@pytest.mark.parametrize(
    ("drafter", "own"),
    [(NgramSimple(12, 48), 48), (NgramMap(12, 48), 48), (NgramMap(12, 48, 1), 48), (NgramMod(24, 48, 64), 64),
     (NgramCache(), 8)],
    ids=DRAFTERS,
)  # fmt: skip
def test_a_draft_is_as_long_as_its_drafter_says_and_no_longer_than_asked(
    drafter: NgramSimple | NgramMap | NgramMod | NgramCache, own: int
) -> None:
    drafter.observe(list(range(100)) * 3)
    drafter.begin()
    following = [i % 100 for i in range(64)]
    assert list(drafter.draft(64).tokens) == following[:own]
    assert list(drafter.draft(5).tokens) == following[:5]


def test_the_first_that_drafts_is_taken_and_it_alone_is_judged() -> None:
    none, first, second = Fixed("a"), Fixed("b", 1, 2, 3), Fixed("c", 7)
    chain = Chain([none, first, second])
    chain.begin([5, 6])
    window = drafted(chain, 8)
    assert window.expected == 1
    assert chain.take(window, 1) and window.expected == 2
    assert not chain.take(window, 9)
    chain.close(window)
    assert (none.judged, first.judged, second.judged) == ([], [1], [])


def test_drafts_are_cut_to_the_room_and_short_ones_are_passed_over() -> None:
    chain = Chain([Fixed("a", 1), Fixed("b", 1, 2, 3, 4)], n_max=3, n_min=2)
    assert drafted(chain, 8).draft.tokens == (1, 2, 3)
    assert drafted(chain, 2).draft.tokens == (1, 2)
    assert chain.draft(1) is None and chain.draft(0) is None


def test_an_answer_begins_from_what_both_texts_have_in_common() -> None:
    drafter = Fixed("a", 1)
    chain = Chain([drafter])
    for text in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5, 6], [1], []):
        chain.begin(text)
        assert drafter.text == text
    chain.observe((8,))
    chain.observe((9,))
    assert drafter.text == [] and drafter.n_begun == 5
    assert chain.draft(1) is not None and drafter.text == [8, 9]
    chain.observe((7,))
    chain.begin([8, 6])
    assert drafter.text == [8, 6]


def test_stats_tell_drafters_and_indices_apart() -> None:
    chain = Chain([Fixed("a", 1, 2), Fixed("b", 3)])
    window = drafted(chain, 8)
    chain.take(window, 1)
    chain.close(window)
    window = drafted(chain, 8)
    chain.close(window)
    assert chain.draft(0) is None
    stats = chain.stats
    assert (stats.rounds, stats.proposed, stats.accepted) == (2, 4, 1)
    assert stats.by_index == (0.5, 0.0)
    assert stats.tokens_per_round == 1.5
    assert stats.depth_histogram == (1, 0, 2)
    assert stats.by_drafter["a"].accepted_by_index == (1, 0)
    assert stats.by_drafter["b"].rounds == 0
    assert Chain([]).stats.tokens_per_round == 0.0
    assert chain.fork().stats.rounds == 0


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: SpeculationParams(types=("ngram",)), InvalidArgument, "'ngram' is no drafter; supported: ngram-"),
        (lambda: SpeculationParams(draft_p_min=1.5), InvalidArgument, "draft_p_min must be a number from 0 to 1"),
        (lambda: SpeculationParams(types=("draft-eagle3",)), Unsupported, "there is no second model"),
        (lambda: SpeculationParams(types="ngram-mod"), InvalidArgument, "a sequence of names"),  # type: ignore[arg-type]
        (lambda: SpeculationParams(types=5), InvalidArgument, "a sequence of names"),  # type: ignore[arg-type]
        (lambda: SpeculationParams(ngram_simple=5), InvalidArgument, "ngram_simple must be NgramSize, got 5"),  # type: ignore[arg-type]
        (lambda: SpeculationParams(types=("ngram-mod", "ngram-mod")), InvalidArgument, "a drafter twice"),
        (lambda: SpeculationParams(draft_n_max=0), InvalidArgument, "draft_n_max must be an integer from 1 to 8"),
        (lambda: SpeculationParams(draft_n_max=9), InvalidArgument, "draft_n_max must be an integer from 1 to 8"),
        (lambda: SpeculationParams(draft_n_max=2, draft_n_min=3), InvalidArgument, "from 0 to 2, got 3"),
        (lambda: SpeculationParams(draft_sampling="best"), InvalidArgument, "one of coupled, greedy, probabilistic"),
        (lambda: SpeculationParams(static=NgramCounts()), InvalidArgument, "static counts need the drafter"),
        (lambda: SpeculationParams(types=("ngram-cache",), dynamic=3), InvalidArgument, "NgramCounts, got int"),  # type: ignore[arg-type]
        (lambda: NgramSize(size_n=0), InvalidArgument, "size_n must be an integer from 1"),
        (lambda: NgramSize(size_m=True), InvalidArgument, "size_m must be an integer"),
        (lambda: NgramSize(min_hits=0), InvalidArgument, "min_hits must be an integer"),
        (lambda: ModSize(n_min=65), InvalidArgument, "n_min must be an integer from 0 to 64, got 65"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(make: object, error: type[KvStreamError], words: str) -> None:
    with pytest.raises(error) as caught:
        make()  # type: ignore[operator]
    assert words in str(caught.value)


def test_counts_of_another_vocabulary_are_refused() -> None:
    counts = NgramCounts()
    counts.add((3, 500), 7)
    params = SpeculationParams(types=("ngram-cache",), static=counts)
    chain_of(params, 501)
    with pytest.raises(InvalidArgument, match="static counts name token 500, the vocabulary has 500 tokens"):
        chain_of(params, 500)


def record(ngram: Sequence[int], *pairs: tuple[int, int]) -> bytes:
    return struct.pack("<5i", *ngram, len(pairs)) + b"".join(struct.pack("<ii", *pair) for pair in pairs)


GOOD = record((1, 2, -1, -1), (3, 4), (5, 1))


def test_the_bytes_are_those_that_the_format_says() -> None:
    counts = NgramCounts()
    for _ in range(4):
        counts.add((1, 2), 3)
    counts.add((1, 2), 5)
    assert counts.to_bytes() == GOOD
    assert NgramCounts.from_bytes(GOOD, "x").of((1, 2)) == {3: 4, 5: 1}
    assert NgramCounts.from_bytes(b"", "x").to_bytes() == b""


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (GOOD[:-1], "offset 0: 2 tokens follow, 15 bytes are left"),
        (GOOD + b"\0" * 7, "offset 36: 7 bytes are left, an n-gram has 20"),
        (GOOD + record((-1, -1, -1, -1), (3, 4)), "offset 36: [-1, -1, -1, -1] is no n-gram"),
        (GOOD + record((1, -1, 2, -1), (3, 4)), "offset 36: [1, -1, 2, -1] is no n-gram"),
        (GOOD + record((1, -2, -1, -1), (3, 4)), "offset 36: [1, -2, -1, -1] is no n-gram"),
        (GOOD + GOOD, "offset 36: the n-gram [1, 2] stands there twice"),
        (GOOD + record((1, 3, -1, -1)), "offset 36: 0 tokens follow"),
        (GOOD + struct.pack("<5i", 1, 3, -1, -1, -5), "offset 36: -5 tokens follow"),
        (GOOD + struct.pack("<5i", 1, 3, -1, -1, 2**31 - 1), "offset 36: 2147483647 tokens follow, 0 bytes are left"),
        (record((1, -1, -1, -1), (-1, 4)), "offset 0: token -1 with count 4"),
        (record((1, -1, -1, -1), (3, 0)), "offset 0: token 3 with count 0"),
        (record((1, -1, -1, -1), (3, 1), (3, 2)), "offset 0: token 3 with count 2 again"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(tmp_path: Path, data: bytes, words: str) -> None:
    where = tmp_path / "counts"
    where.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        load_ngram_counts(where)
    assert str(caught.value).startswith(f"n-gram counts '{where}': ") and words in str(caught.value)


def test_no_byte_that_is_cut_off_goes_unnoticed() -> None:
    data = GOOD + record((7, -1, -1, -1), (1, 1))
    for n_bytes in range(1, len(data)):
        if n_bytes != len(GOOD):
            with pytest.raises(FormatError):
                NgramCounts.from_bytes(data[:n_bytes], "x")


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    where = tmp_path / "counts"
    save_ngram_counts(where, NgramCounts.from_bytes(GOOD, "x"))
    assert where.read_bytes() == GOOD
    assert load_ngram_counts(where).of((1, 2)) == {3: 4, 5: 1}
    assert [each.name for each in tmp_path.iterdir()] == ["counts"]


def test_files_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        load_ngram_counts(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="no regular file"):
        load_ngram_counts(tmp_path)
    with pytest.raises(DeviceError, match="No such file"):
        save_ngram_counts(tmp_path / "none" / "counts", NgramCounts())
    for path in ("", "a\0b", 3):
        with pytest.raises(InvalidArgument, match="lie under a path"):
            load_ngram_counts(path)  # type: ignore[arg-type]
