"""Command lines of ``pykvstream eval`` become options: defaults and refusals."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from pykvstream.cli.options import DivergenceOptions, NeedleOptions, Options, PerplexityOptions
from pykvstream.cli.parser import parse


def options_of(*argv: str) -> Options:
    return parse(("eval", *argv), lambda: "0")[0]


def test_ppl_has_the_chunks_that_llama_cpp_has() -> None:
    options = options_of("ppl", "demo", "--text", "t.txt")
    assert isinstance(options, PerplexityOptions)
    assert (options.model.model, options.model.ctx_size, options.n_chunks) == ("demo", 512, None)
    own = options_of("ppl", "demo", "-f", "t.txt", "-c", "128", "--chunks", "3", "--arena-mib", "9", "-ctk", "f16")
    assert isinstance(own, PerplexityOptions)
    assert (own.model.ctx_size, own.n_chunks, own.model.arena_mib, own.model.cache_type_k) == (128, 3, 9.0, "f16")


def test_kld_compares_six_pairs_at_four_shares_both_ways() -> None:
    options = options_of("kld", "demo", "--text", "t.txt")
    assert isinstance(options, DivergenceOptions)
    assert options.percents == (100, 50, 25, 10) and options.references == ("resident", "f32")
    assert len(options.cache_types) == 6 and options.contexts == (4096,)
    own = options_of("kld", "demo", "-f", "t", "--ctx", "1024,2048", "--resident", "12.5", "--against", "f32",
                     "--cache-types", "f16/q4_0, q8_0")  # fmt: skip
    assert isinstance(own, DivergenceOptions)
    assert own.contexts == (1024, 2048) and own.percents == (12.5,) and own.references == ("f32",)
    assert own.cache_types == ("f16/q4_0", "q8_0")


def test_needle_asks_at_ten_depths_with_a_quarter_resident() -> None:
    options = options_of("needle", "demo")
    assert isinstance(options, NeedleOptions)
    assert options.depths == tuple(Fraction(i, 9) for i in range(10))
    assert (options.percent, options.n_repeats, options.seed) == (25, 1, 1)
    assert (options.only_nonresident, options.text_file, options.cache_types) == (False, None, "q8_0/q8_0")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", (0,)), ("3", (0, 0.5, 1)), ("0,25, 100", (0, 0.25, 1)), ("50%", (0.5,)), ("12.5%,75", (0.125, 0.75))],
)
def test_depths_are_a_number_or_a_list_in_percent(text: str, wanted: tuple[float, ...]) -> None:
    options = options_of("needle", "demo", "--depths", text)
    assert isinstance(options, NeedleOptions) and options.depths == wanted


def test_the_command_line_is_kept_as_it_was_given() -> None:
    argv = ("needle", "demo", "--ctx", "1024", "--output", "a folder", "--plot")
    options = options_of(*argv)
    assert isinstance(options, NeedleOptions)
    assert options.output.argv == ("eval", *argv)
    assert options.output.folder == Path("a folder") and options.output.plot


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "MEASURE"),
        (("bleu",), "bleu"),
        (("ppl", "demo"), "--text"),
        (("ppl", "--text", "t"), "no model"),
        (("ppl", "demo", "--text", "t", "--chunks", "0"), "--chunks"),
        (("kld", "demo", "--text", "t", "--resident", "0"), "above 0 and up to 100"),
        (("kld", "demo", "--text", "t", "--resident", "50,101"), "above 0 and up to 100"),
        (("kld", "demo", "--text", "t", "--against", "f16"), "resident, f32"),
        (("kld", "demo", "--text", "t", "--cache-types", "q8_0,"), "--cache-types"),
        (("kld", "demo", "--text", "t", "--ctx", "1k"), "integer"),
        (("kld", "demo", "--text", "t", "--plot"), "--output DIR"),
        (("needle", "demo", "--depths", "0"), "--depths"),
        (("needle", "demo", "--depths", "0,101"), "0 to 100 percent"),
        (("needle", "demo", "--depths", "10,"), "need a finite number"),
        (("needle", "demo", "--only-nonresident", "--resident", "100"), "below 100"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as ending:
        options_of(*argv)
    assert ending.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pykvstream: error: ") and err.count("\n") == 1
    assert words in err and "eval" in err


@pytest.mark.parametrize("measure", ["ppl", "kld", "needle"])
def test_help_says_how_to_go_on_and_how_to_draw(capsys: pytest.CaptureFixture[str], measure: str) -> None:
    with pytest.raises(SystemExit) as ending:
        options_of(measure, "--help")
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert f"pykvstream eval {measure} [FLAGS] MODEL" in text
    assert "--output" in text and "[eval]" in text and "--json" in text
