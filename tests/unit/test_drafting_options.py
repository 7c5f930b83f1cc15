"""Flags of drafting become parameters, or are refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pykvstream import ModSize, NgramCounts, NgramSize, SpeculationParams, load_ngram_counts, save_ngram_counts
from pykvstream.cli.drafting import DraftingOptions, keep_counts, speculation_for
from pykvstream.cli.options import ChatOptions, GenerateOptions
from pykvstream.cli.parser import parse
from pykvstream.errors import DeviceError, FormatError, InvalidArgument, NotFound
from pykvstream.speculation import DRAFTERS


def drafting(*argv: str, command: str = "generate") -> DraftingOptions:
    options, notes = parse([command, "m.gguf", "-p", "hi", *argv], lambda: "0")
    assert isinstance(options, GenerateOptions | ChatOptions) and notes == ()
    return options.generation.drafting


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_nothing_is_drafted_unless_asked_for(command: str) -> None:
    assert drafting(command=command) == DraftingOptions()
    assert drafting("--spec-type", "none", command=command) == DraftingOptions()
    assert speculation_for(DraftingOptions()) is None


def test_a_list_of_names_is_taken_in_any_order() -> None:
    options = drafting("--spec-type", "ngram-cache, ngram-simple,ngram-mod,ngram-map-k4v,ngram-map-k")
    assert options.params == SpeculationParams(types=DRAFTERS, draft_n_max="auto")


@pytest.mark.parametrize(
    ("argv", "n_max"),
    [
        ((), "auto"),
        (("--draft-max", "auto"), "auto"),
        (("--draft-max", "own"), None),
        (("--draft-max", "5"), 5),
        (("--spec-draft-sampling", "probabilistic"), None),
    ],
)
def test_how_far_drafts_go_is_decided_unless_it_is_said(argv: tuple[str, ...], n_max: object) -> None:
    params = drafting("--spec-type", "draft-mtp", *argv).params
    assert params is not None and params.draft_n_max == n_max


def test_every_flag_reaches_its_field() -> None:
    options = drafting(
        "--spec-type", ",".join(DRAFTERS), "--spec-draft-n-max", "7", "--spec-draft-n-min", "2",
        "--spec-draft-sampling", "probabilistic", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4",
        "--spec-ngram-map-k-size-n", "5", "--spec-ngram-map-k-size-m", "6", "--spec-ngram-map-k4v-size-n", "7",
        "--spec-ngram-map-k4v-size-m", "8", "--spec-ngram-map-k4v-min-hits", "9", "--spec-ngram-mod-n-match", "10",
        "--spec-ngram-mod-n-min", "0", "--spec-ngram-mod-n-max", "12", "-lcs", "s", "-lcd", "d",
    )  # fmt: skip
    assert options == DraftingOptions(
        SpeculationParams(
            types=DRAFTERS,
            draft_n_max=7,
            draft_n_min=2,
            draft_sampling="probabilistic",
            ngram_simple=NgramSize(3, 4),
            ngram_map_k=NgramSize(5, 6),
            ngram_map_k4v=NgramSize(7, 8, 9),
            ngram_mod=ModSize(10, 0, 12),
        ),
        None,
        Path("s"),
        Path("d"),
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--spec-type", "draft-eagle3"), "spec_type 'draft-eagle3' is not supported: there is no second model"),
        (("--spec-type", "ngram-simple,draft-simple"), "'draft-simple' is not supported"),
        (("--spec-type", "draft-mtp", "-ctkd", "f16"), "keeps its keys and values in the types of the model"),
        (("--spec-type", "draft-mtp", "--spec-draft-p-min", "1.5"), "1.5"),
        (("--spec-type", "ngram-mod", "--mtp-file", "f"), "--mtp-file needs --spec-type draft-mtp"),
        (("--spec-type", "none,ngram-simple"), "'none' is no drafter"),
        (("--spec-type", "ngram-mod,ngram-mod"), "names a drafter twice"),
        (("--spec-type", "ngram-mod", "--spec-draft-n-max", "0"), "from 1 to 8, got 0"),
        (("--spec-type", "ngram-mod", "--draft-max", "9"), "from 1 to 8, got 9"),
        (("--spec-type", "ngram-mod", "--draft", "many"), "need an integer, got 'many'"),
        (("--spec-type", "ngram-mod", "--draft", "auto", "--spec-draft-sampling", "probabilistic"), "give a number"),
        (("--spec-type", "ngram-mod", "--spec-draft-n-max", "2", "--draft-min", "3"), "from 0 to 2, got 3"),
        (("--spec-type", "ngram-mod", "--spec-draft-sampling", "best"), "invalid choice: 'best'"),
        (("--spec-draft-n-max", "3"), "--spec-draft-n-max needs --spec-type"),
        (("--spec-draft-n-min", "0"), "--spec-draft-n-min needs --spec-type"),
        (("--spec-draft-sampling", "greedy"), "--spec-draft-sampling needs --spec-type"),
        (("--spec-type", "ngram-mod", "--spec-ngram-simple-size-m", "9"),
         "--spec-ngram-simple-size-m needs --spec-type ngram-simple"),
        (("--spec-ngram-mod-n-min", "9"), "--spec-ngram-mod-n-min needs --spec-type ngram-mod"),
        (("--spec-type", "ngram-mod", "--spec-ngram-mod-n-min", "65"), "n_min must be an integer from 0 to 64, got 65"),
        (("--spec-type", "ngram-mod", "-lcs", "f"), "--lookup-cache-static needs --spec-type ngram-cache"),
        (("-lcd", "f"), "--lookup-cache-dynamic needs --spec-type ngram-cache"),
        (("--spec-draft-p-min", "0.5"), "--spec-draft-p-min needs --spec-type draft-mtp"),
        (("--spec-ngram-map-k-min-hits", "2"), "drafts the first time that a key is met again"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(SystemExit) as ending:
        drafting(*argv)
    assert ending.value.code == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def counted(*text: int) -> NgramCounts:
    made = NgramCounts()
    made.observe(text, 0)
    return made


def test_a_conversation_is_added_to_the_dynamic_file(tmp_path: Path) -> None:
    """The first time there is none yet; then it grows by each."""
    where = tmp_path / "dynamic"
    options = drafting("--spec-type", "ngram-cache", "-lcd", str(where))
    for n in (1, 2):
        speculation = speculation_for(options)
        assert speculation is not None and speculation.dynamic is not None
        keep_counts(options, speculation, counted(1, 2))
        assert load_ngram_counts(where).of((1,)) == {2: n}


def test_a_file_that_is_not_named_is_not_written(tmp_path: Path) -> None:
    options = drafting("--spec-type", "ngram-cache")
    keep_counts(options, speculation_for(options), counted(1, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_could_not_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, error, words in (
        ("none/counts", DeviceError, "cannot be written: No such file or directory"),
        ("pipe", InvalidArgument, "no regular file"),
        (".", InvalidArgument, "no regular file"),
    ):
        with pytest.raises(error, match=words):
            speculation_for(drafting("--spec-type", "ngram-cache", "-lcd", str(tmp_path / name)))


def test_a_file_of_counts_has_a_bound_and_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "long").open("wb") as file:
        file.truncate((1 << 30) + 1)
    for name, words in (("pipe", "no regular file"), ("long", "1073741825 bytes, at most 1073741824")):
        with pytest.raises(InvalidArgument, match=words):
            speculation_for(drafting("--spec-type", "ngram-cache", "-lcs", str(tmp_path / name)))


def test_files_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    where = tmp_path / "counts"
    with pytest.raises(NotFound, match="counts"):
        speculation_for(drafting("--spec-type", "ngram-cache", "-lcs", str(where)))
    save_ngram_counts(where, counted(1, 2, 3))
    speculation = speculation_for(drafting("--spec-type", "ngram-cache", "-lcs", str(where)))
    assert speculation is not None and speculation.static is not None
    assert speculation.static.of((1, 2)) == {3: 1}
    where.write_bytes(where.read_bytes()[:-1])
    for flag in ("-lcs", "-lcd"):
        with pytest.raises(FormatError, match="offset"):
            speculation_for(drafting("--spec-type", "ngram-cache", flag, str(where)))
