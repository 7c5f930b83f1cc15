"""Stop strings are found across pieces and nothing of them is emitted."""

from __future__ import annotations

import pytest

from pykvstream.errors import InvalidArgument
from pykvstream.text.stops import StopMatcher


def test_stop_split_over_pieces_is_found_and_not_emitted() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(p) for p in ("a<e", "nd", ">b")] == [("a", False), ("", False), ("", True)]
    assert matcher.matched == "<end>"


def test_false_start_is_released() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("<en") == ("", False)
    assert matcher.push("x") == ("<enx", False)


def test_overlapping_start_is_not_lost() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", False)
    assert matcher.push("ab") == ("a", True)


def test_first_complete_stop_wins_and_longest_of_equals() -> None:
    assert StopMatcher(["abcd", "b"]).push("xabcd") == ("xa", True)
    matcher = StopMatcher(["c", "bc"])
    assert matcher.push("abc") == ("a", True)
    assert matcher.matched == "bc"


def test_flush_returns_what_was_held() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("a\n") == ("a", False)
    assert matcher.flush() == "\n"
    assert matcher.push("\n") == ("", False)


def test_nothing_is_emitted_after_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_no_stops_hold_nothing_back() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)


@pytest.mark.parametrize("stops", [[""], "abc", [3], None, 7])
def test_unusable_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        StopMatcher(stops)
