"""Each drafter answers as its rules written down slowly do, whatever was said, taken back, judged and forked before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream.speculation import Drafter, NgramCache, NgramCounts, NgramMap, NgramMod, NgramSimple
from pykvstream.speculation.occurrences import Occurrences
from tests.examples import examples
from tests.slow_drafters import Counts, SlowCache, SlowDrafter, SlowMap, SlowMod, SlowSimple, count_ngrams

Pair = tuple[Drafter, SlowDrafter]
TABLE = 37
"""So small that n-grams share entries all the time."""


@dataclass(frozen=True)
class Step:
    """``tokens`` to observe; ``share`` of a draft that is right, or of the text that stays; ``repeat``: how far back
    to say again or to take back, or how long a draft may be."""

    kind: str
    tokens: tuple[int, ...] = ()
    share: float = 0.0
    repeat: int = 0


TOKENS = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 30), min_size=8, max_size=20)
).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.builds(Step, st.just("observe"), TOKENS),
        st.builds(Step, st.just("repeat"), repeat=st.integers(1, 30)),
        st.builds(Step, st.just("draft"), share=st.floats(0, 1), repeat=st.integers(1, 9)),
        st.builds(Step, st.just("draft"), share=st.just(1.0), repeat=st.just(64)),
        st.builds(Step, st.just("truncate"), share=st.floats(0, 1)),
        st.builds(Step, st.just("shorten"), repeat=st.integers(1, 9)),
        st.builds(Step, st.just("begin")),
        st.builds(Step, st.just("fork")),
        st.builds(Step, st.just("other")),
    ),
    min_size=15,
    max_size=60,
)


def act(pair: Pair, other: Pair, step: Step) -> tuple[Pair, Pair]:
    """Do one thing to a drafter and its slow twin; what they draft must be equal."""
    fast, slow = pair
    text = slow.text
    if step.kind == "observe":
        fast.observe(step.tokens)
        slow.observe(step.tokens)
    elif step.kind == "repeat":
        again = text[-step.repeat :]
        fast.observe(again)
        slow.observe(list(again))
    elif step.kind == "truncate":
        n_kept = int(step.share * len(text))
        fast.truncate(n_kept)
        slow.truncate(n_kept)
    elif step.kind == "shorten":
        n_kept = max(len(text) - step.repeat, 0)
        fast.truncate(n_kept)
        slow.truncate(n_kept)
    elif step.kind == "begin":
        fast.begin()
        slow.begin()
    elif step.kind == "fork":
        return (fast.fork(), slow.fork()), pair
    elif step.kind == "other":
        return other, pair
    elif step.kind == "draft" and text:
        draft = slow.draft(step.repeat)
        assert list(fast.draft(step.repeat).tokens) == draft
        if draft:
            n_accepted = round(step.share * len(draft))
            fast.judge(n_accepted)
            slow.judge(n_accepted)
    return pair, other


def run(make: Callable[[], Pair], steps: list[Step]) -> None:
    """Do all steps; whatever has become longer drafts, too."""
    pair, other = make(), make()
    for step in steps:
        pair, other = act(pair, other, step)
        if step.kind in ("observe", "repeat"):
            act(pair, other, Step("draft", share=1.0, repeat=64))
    act(pair, other, Step("draft", repeat=64))


SIZES = {"n": st.integers(1, 3), "m": st.integers(1, 8)}


@settings(max_examples=examples(200))
@given(steps=STEPS, **SIZES)
def test_ngram_simple_equals_its_scan(steps: list[Step], n: int, m: int) -> None:
    run(lambda: (NgramSimple(n, m), SlowSimple(n, m)), steps)


@settings(max_examples=examples(200))
@given(steps=STEPS, table=st.sampled_from((TABLE, 1024)), **SIZES)
def test_ngram_map_k_equals_its_scan(steps: list[Step], n: int, m: int, table: int) -> None:
    run(lambda: (NgramMap(n, m, table_size=table), SlowMap(n, m, None, table)), steps)


@settings(max_examples=examples(200))
@given(steps=STEPS, table=st.sampled_from((TABLE, 1024)), min_hits=st.integers(1, 3), **SIZES)
def test_ngram_map_k4v_equals_its_scan(steps: list[Step], n: int, m: int, min_hits: int, table: int) -> None:
    run(lambda: (NgramMap(n, m, min_hits, table_size=table), SlowMap(n, m, min_hits, table)), steps)


@settings(max_examples=examples(200))
@given(steps=STEPS, n=st.integers(1, 3), n_min=st.integers(0, 5), more=st.integers(0, 60),
       table=st.sampled_from((5, TABLE, 4096)))  # fmt: skip
def test_ngram_mod_equals_its_table(steps: list[Step], n: int, n_min: int, more: int, table: int) -> None:
    n_max = max(n_min + more, 1)
    run(lambda: (NgramMod(n, n_min, n_max, table_size=table), SlowMod(n, n_min, n_max, table)), steps)


TEXTS = st.lists(st.integers(0, 2), max_size=40)


@settings(max_examples=examples(200))
@given(steps=STEPS, corpus=TEXTS, earlier=TEXTS)
def test_ngram_cache_equals_counting_anew(steps: list[Step], corpus: list[int], earlier: list[int]) -> None:
    static, dynamic = counted(corpus), counted(earlier)
    run(lambda: (NgramCache(static, dynamic), SlowCache(count_ngrams(corpus), count_ngrams(earlier))), steps)


@given(steps=STEPS)
def test_counts_of_a_text_are_those_of_counting_anew(steps: list[Step]) -> None:
    fast, slow = NgramCache(), SlowCache({}, {})
    for step in steps:
        if step.kind in ("observe", "repeat", "truncate", "shorten"):
            act((fast, slow), (fast, slow), step)
    assert plain(fast.context) == count_ngrams(slow.text)


@given(steps=STEPS, n=st.integers(1, 3))
def test_an_index_that_grew_and_shrank_finds_every_place(steps: list[Step], n: int) -> None:
    index, text = Occurrences(n), SlowDrafter()
    for step in steps:
        if step.kind in ("observe", "repeat"):
            more = list(step.tokens) if step.tokens else text.text[-step.repeat :]
            index.extend(more)
            text.observe(more)
        elif step.kind in ("truncate", "shorten"):
            n_kept = int(step.share * len(text.text)) if step.share else max(len(text.text) - step.repeat, 0)
            index.truncate(n_kept)
            text.truncate(n_kept)
        elif step.kind == "fork":
            index = index.fork()
        for place in range(len(text.text) - n + 1):
            wanted = text.text[place : place + n]
            assert list(index.before(place)) == [at for at in range(place - 1, -1, -1) if text.starts(at, wanted)]


def test_ngram_simple_copies_from_a_place_that_ends_before_the_text_does() -> None:
    """The newest of three equal tokens follows the first of them; behind the second nothing is known yet."""
    drafter = NgramSimple(1, 3)
    drafter.observe([9, 1, 1, 7, 8, 8, 1, 1, 1])
    assert drafter.draft(64).tokens == (1,)


def test_ngram_map_looks_again_at_places_whose_tokens_are_others_now() -> None:
    drafter = NgramMap(1, 1)
    drafter.observe(range(8))
    drafter.draft(64)
    drafter.truncate(3)
    drafter.observe([8, 9, 3, 4, 5, 6, 8])
    assert drafter.draft(64).tokens == (9,)


def test_ngram_mod_begins_its_table_anew_after_five_wrong_drafts_in_a_row() -> None:
    drafter = NgramMod(2, 1, 8)
    drafter.observe(list(range(20)) * 2)
    drafter.begin()
    for n_accepted in (0, 1, 0, 0, 2, 1, 1, 0, 1):  # 2 of 8 are a quarter: not low
        assert len(drafter.draft(64).tokens) == 8
        drafter.judge(n_accepted)
    assert len(drafter.draft(64).tokens) == 8
    drafter.judge(0)
    assert drafter.draft(64).tokens == ()


def counted(text: list[int]) -> NgramCounts:
    made = NgramCounts()
    made.observe(text, 0)
    return made


def plain(counts: NgramCounts) -> Counts:
    return {ngram: Counter(counts.of(ngram)) for ngram in counts}


@given(a=TEXTS, b=TEXTS)
def test_counts_come_back_from_their_bytes(a: list[int], b: list[int]) -> None:
    counts = counted(a)
    counts.merge(counted(b))
    again = NgramCounts.from_bytes(counts.to_bytes(), "x")
    assert plain(again) == plain(counts)
    expected = count_ngrams(a)
    for ngram, followers in count_ngrams(b).items():
        expected.setdefault(ngram, Counter()).update(followers)
    assert plain(again) == expected
    assert again.to_bytes() == counts.to_bytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: NgramSimple(12, 48),
        lambda: NgramMap(12, 48),
        lambda: NgramMap(12, 48, 1),
        lambda: NgramMod(24, 48, 64),
        lambda: NgramCache(),
    ],
    ids=["simple", "map-k", "map-k4v", "mod", "cache"],
)
@pytest.mark.parametrize("period", [1, 7, 100])
def test_a_long_repetitive_text_costs_steps_in_proportion(make: Callable[[], Drafter], period: int) -> None:
    """Counts the interpreter's function calls and lines: twice the text, about twice the work, whatever repeats."""
    work = [work_of(make(), period, n_tokens) for n_tokens in (1000, 2000)]
    assert work[1] < 3 * work[0]


def work_of(drafter: Drafter, period: int, n_tokens: int) -> int:
    """Lines that were run to draft behind each token of a text."""
    import sys

    n_lines = 0

    def count(*_: object) -> object:
        nonlocal n_lines
        n_lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        for i in range(n_tokens):
            drafter.observe((i % period,))
            draft = drafter.draft(8)
            if draft.tokens:
                drafter.judge(len(draft.tokens))
    finally:
        sys.settrace(before)
    return n_lines
