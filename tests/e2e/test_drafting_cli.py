"""``--spec-type`` on the command line: the same answer with the same logits in fewer passes, and what is reported."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykvstream import load_ngram_counts
from pykvstream.cli import main

TEXT = "one two three four, one two three five," + " one two three four, one two three five," * 7
SIZES = (
    "--spec-ngram-simple-size-n", "3", "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k4v-size-n", "3",
    "--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1",
)  # fmt: skip
ALL = ("--spec-type", "ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache", *SIZES)
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    def call(model: str, *argv: str) -> dict[str, Any]:
        code = main(
            ["generate", model, "--raw", "-p", TEXT, "-n", "60", "--seed", "3", "-c", "1024", "-t", "2", "-ub", "64",
             "--ignore-eos", "--json", *argv]
        )  # fmt: skip
        out = capsys.readouterr().out
        assert code == 0
        return json.loads(out)  # type: ignore[no-any-return]

    return call


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("name", ["demo", "demo-hybrid"])
def test_a_drafted_answer_is_the_plain_one(
    answer: Answer, request: pytest.FixtureRequest, name: str, temperature: str
) -> None:
    if name == "demo":
        request.getfixturevalue("demo_path")
    plain = answer(name, "--temp", temperature)
    drafted = answer(name, "--temp", temperature, *ALL)
    for key in ("tokens", "text", "logits_sha256", "stop_reason"):
        assert drafted[key] == plain[key], key
    assert "draft" not in plain["stats"]
    draft = drafted["stats"]["draft"]
    assert draft["rounds"] > 0
    assert drafted["stats"]["decode_tokens"] == plain["stats"]["decode_tokens"] == 59
    steps = sum(draft["depth_histogram"])
    assert steps + draft["accepted"] == 59
    if temperature == "0":
        assert draft["accepted"] > 20, "a text that repeats itself drafts well"
    assert sum(each["accepted"] for each in draft["by_drafter"].values()) == draft["accepted"]


FIGURES = {
    "rounds", "proposed", "accepted", "by_index", "tokens_per_round", "depth_histogram", "by_drafter", "decided",
    "coupled_bound",
}  # fmt: skip


@pytest.mark.parametrize("sampling", ["coupled", "greedy", "probabilistic"])
def test_every_figure_of_drafting_is_reported(answer: Answer, sampling: str) -> None:
    argv = ("--temp", "0.8", "--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-sampling", sampling)
    draft = answer("demo-hybrid", *argv)["stats"]["draft"]
    assert set(draft) == FIGURES
    assert len(draft["by_index"]) == 3 == len(draft["depth_histogram"]) - 1
    assert draft["tokens_per_round"] == pytest.approx(1 + draft["accepted"] / draft["rounds"])
    # Of drafts that are not drawn there is no distribution to compare.
    assert (draft["coupled_bound"] is None) == (sampling == "greedy")
    assert draft["coupled_bound"] is None or 0.0 < draft["coupled_bound"] <= 1.0


def test_probabilistic_drafting_answers_and_reports(answer: Answer) -> None:
    first = answer("demo-hybrid", "--temp", "0.8", *ALL, "--spec-draft-sampling", "probabilistic")
    assert first["stats"]["draft"]["rounds"] > 0 and len(first["tokens"]) == 60
    again = answer("demo-hybrid", "--temp", "0.8", *ALL, "--spec-draft-sampling", "probabilistic")
    assert again["tokens"] == first["tokens"]


def test_stats_show_each_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "demo-hybrid", "--raw", "-p", TEXT, "-n", "20", "-c", "1024", "--temp", "0", "--stats"]
    assert main([*argv, "--spec-type", "ngram-simple,ngram-cache", "--spec-ngram-simple-size-n", "3"]) == 0
    err = capsys.readouterr().err
    for words in ("verify passes", "ngram-simple", "ngram-cache", "accepted by index"):
        assert words in err


def test_a_damaged_file_of_counts_is_refused_before_the_model_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "counts"
    where.write_bytes(b"damaged")
    argv = ["generate", "no-such-model", "-p", "hi", "--spec-type", "ngram-cache", "-lcs", str(where)]
    assert main(argv) == 1
    assert "offset 0: 7 bytes are left, an n-gram has 20" in capsys.readouterr().err


def test_a_chat_drafts_and_keeps_its_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "counts"
    said = []
    for argv in ((), ("--spec-type", "ngram-cache", "-lcd", str(where))):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\nAnd again?\n"))
        code = main(["chat", "demo-hybrid", "-n", "24", "--temp", "0.7", "--seed", "5", "-c", "2048", *argv])
        said.append(capsys.readouterr().out)
        assert code == 0
    assert said[0] == said[1]
    assert len(load_ngram_counts(where)) > 100
