"""How the commands end: Ctrl-C at the edges of the process and pressed twice, readers that go away, broken text."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from pykvstream import __main__ as entry
from pykvstream import cli
from pykvstream.cli import BROKEN_PIPE, INTERRUPTED, main
from tests.models import write_random_model

QUICK = ("-t", "1", "-ub", "64", "-s", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    write_random_model(path, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=320, ctx=2048, seed=5)
    return str(path)


def lines(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


class PressesTwice(io.StringIO):
    """A standard output at which somebody presses Ctrl-C twice when the first text has come."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            super().write(text)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("argv", [("-p", "hello"), ()])
def test_an_impatient_interrupt_ends_any_turn_and_not_the_conversation(
    model: str, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, b"hello\n/stats\n")
    monkeypatch.setattr(sys, "stdout", PressesTwice())
    assert main(["chat", model, *QUICK, "-n", "40", *argv]) == 0
    err = capsys.readouterr().err
    assert "[stopped]" in err and "of 2048 tokens, seed 4" in err


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--tensors"), ("plan",), ("plan", "--json")])
def test_a_reader_that_goes_away_ends_every_command_alike(
    model: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main([*command, model]) == BROKEN_PIPE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("argv", [("--help",), ("generate", "--help"), ("--version",), ("inspect",)])
def test_output_that_cannot_be_written_is_a_failure(
    model: str,
    argv: tuple[str, ...],
    is_buffered: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        full.reconfigure(write_through=not is_buffered)
        monkeypatch.setattr(sys, "stdout", full)
        assert main([*argv, *([model] if argv == ("inspect",) else [])]) == 1
    assert capsys.readouterr().err == f"pykvstream: error: standard output: {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.parametrize("argv", [("generate", "-p", "hi", "-n", "2"), ("inspect",), ("--help",), ("--version",)])
def test_a_standard_output_that_was_closed_is_refused_before_the_work(
    model: str, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(cli, "_run", lambda options: pytest.fail("it began to work"))
    assert main([*argv, *([model] if argv[0] in ("generate", "inspect") else [])]) == 1
    assert "standard output is closed" in capsys.readouterr().err


def test_wrong_usage_is_code_2_whatever_becomes_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "--no-such-flag"]) == 2


AT_IMPORT = """
import signal, sys
class Presses:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Presses())
"""
AT_EXIT = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)\n"


@pytest.mark.parametrize("press", [AT_IMPORT, AT_EXIT], ids=["while importing", "while leaving"])
def test_an_interrupt_at_the_edges_of_the_process_ends_it_quietly(press: str) -> None:
    # A shell may have made background jobs deaf to interrupts.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heard}\n{press}\nimport sys; from pykvstream.__main__ import run; sys.exit(run())"
    ended = subprocess.run(
        [sys.executable, "-c", script, "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == INTERRUPTED and ended.stderr == ""


def test_an_interrupt_that_nothing_inside_has_caught_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> int:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("pykvstream.cli.main", press)
    assert entry.run() == INTERRUPTED == entry.INTERRUPTED
    signal.signal(signal.SIGINT, before)


def test_bytes_that_are_no_text_are_named_by_their_place(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "-p", "caf\u00e9 \udcff"]) == 2
    assert "--prompt is not UTF-8: byte 6" in capsys.readouterr().err
    assert main(["generate", model, "-p", "x", "--system", "\udcff"]) == 2
    assert "--system is not UTF-8: byte 0" in capsys.readouterr().err
    lines(monkeypatch, b"caf\xe9\nhello\n")
    assert main(["chat", model, *QUICK, "-n", "2", "--no-progress"]) == 0
    said = capsys.readouterr()
    assert "the message is not UTF-8: byte 3" in said.err.splitlines()[0] and said.out != ""


def test_a_wide_pass_is_refused_whatever_the_context(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "-p", "x", "-c", "512", "-ub", "2049"]) == 1
    assert "2049 is more than the 2048 rows" in capsys.readouterr().err


def test_the_summary_counts_the_tokens_of_its_turn(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, b"hello\nhello\nhello\n")
    no_end = [word for token in range(256, 262) for word in ("--logit-bias", f"{token}-inf")]
    assert main(["chat", model, *QUICK, "-n", "3", "--progress", *no_end]) == 0
    err = capsys.readouterr().err
    counts = [int(line.split(": ")[1].split(" prompt")[0]) for line in err.splitlines() if " new tokens, " in line]
    assert len(counts) == 3 and max(counts) < 2 * min(counts), "each turn says as much, none the sum of all"


def test_the_plan_says_for_how_many_threads_it_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for n_threads in (1, 2):
        assert main(["plan", model, "-t", str(n_threads)]) == 0
        assert f"with {n_threads} compute thread" in capsys.readouterr().out
