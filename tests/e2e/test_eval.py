"""``pykvstream eval`` on the hybrid that comes with the project, and what its figures are gates for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model
from pykvstream.cli import main
from pykvstream.eval.divergence import Difference
from pykvstream.eval.needle import Needles

ROOT = Path(__file__).parents[2]
QUICK = ("-t", "1", "-ub", "128")


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> Ran:
        code = main(("eval", *argv, *QUICK))
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((ROOT / "tools" / "demo_text.txt").read_text(encoding="utf-8"), encoding="utf-8")
    return str(path)


def plain_perplexity(text: str, ctx: int, n_chunks: int) -> tuple[float, int]:
    """By whole chunks and loops, in the words of llama.cpp's tool."""
    scores = []
    with Model.open("demo-hybrid", ctx_size=ctx, threads=1, ubatch_size=128) as model:
        ids = model.tokenizer.encode(Path(text).read_text(encoding="utf-8"), bos=True)
        for i in range(n_chunks):
            chunk = ids[i * ctx : (i + 1) * ctx]
            with model.session() as session:
                logits = session.forward(chunk, logits="all").astype(np.float64)
            for j in range(ctx // 2, ctx - 1):
                scores.append(math.log(np.exp(logits[j]).sum()) - logits[j, chunk[j + 1]])
    return math.exp(sum(scores) / len(scores)), len(scores)


def test_perplexity_is_that_of_plain_loops_over_whole_chunks(run: Run, text: str) -> None:
    ran = run("ppl", "demo-hybrid", "--text", text, "-c", "300", "--chunks", "3", "--json")
    expected, n_scores = plain_perplexity(text, 300, 3)
    summary = ran.json["summary"]
    assert ran.code == 0 and summary["tokens"] == n_scores == 3 * 149
    # The logarithm of a sum of float32 exponentials, each within 2e-7 of its own.
    assert summary["ppl"] == pytest.approx(expected, rel=4e-7)
    assert 0 < summary["error"] < summary["ppl"]


def test_perplexity_is_the_same_number_in_the_smallest_arena(run: Run, text: str) -> None:
    with Model.open("demo-hybrid", ctx_size=1024, threads=1, ubatch_size=128) as model:
        smallest = model.plan.smallest_bytes / (1 << 20)
    asked = ("ppl", "demo-hybrid", "--text", text, "-c", "1024", "--json")
    resident, streamed = run(*asked).json, run(*asked, "--arena-mib", str(smallest)).json
    assert resident["summary"]["streamed_bytes"] == 0 < streamed["summary"]["streamed_bytes"]
    assert streamed["summary"]["ppl"] == resident["summary"]["ppl"]


def test_streamed_logits_diverge_by_exactly_nothing(run: Run, text: str) -> None:
    ran = run("kld", "demo-hybrid", "--text", text, "--ctx", "1024", "--resident", "100,50",
              "--cache-types", "q8_0/q4_0,f16", "--json")  # fmt: skip
    rows = ran.json["rows"]
    against = [row for row in rows if row["reference"] == "resident"]
    assert ran.code == 0 and len(against) == 4
    for row in against:
        assert (row["mean"], row["max"], row["unequal_logits"], row["top1_percent"]) == (0, 0, 0, 100)
        assert row["tokens"] == 1024
        assert (row["streamed_bytes"] > 0) == (row["resident_percent"] < 100) == (row["asked_percent"] < 100)
    typed = {(row["cache"], row["rotation"]): row["mean"] for row in rows if row["reference"] == "f32"}
    assert typed.keys() == {("q8_0/q4_0", "off"), ("q8_0/q4_0", "on"), ("f16/f16", "none")}
    assert all(mean > 0 for mean in typed.values())
    assert typed["f16/f16", "none"] < typed["q8_0/q4_0", "on"]


def test_a_streamed_run_that_differs_ends_with_code_1(
    run: Run, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Difference.add

    def tampered(self: Difference, reference: np.ndarray, other: np.ndarray) -> None:
        other[0, 0] += 1
        honest(self, reference, other)

    monkeypatch.setattr(Difference, "add", tampered)
    ran = run("kld", "demo-hybrid", "--text", text, "--ctx", "1024", "--resident", "50", "--cache-types", "q8_0",
              "--against", "resident")  # fmt: skip
    assert ran.code == 1
    assert ran.err.endswith("error: 1 rows of the streamed run differ from the resident run\n")


def test_needles_through_the_ring_are_answered_as_if_resident(run: Run) -> None:
    ran = run("needle", "demo-hybrid", "--ctx", "2048", "--depths", "3", "--only-nonresident", "--resident", "40",
              "--json")  # fmt: skip
    rows = ran.json["rows"]
    assert ran.code == 0 and len(rows) == 3
    for row in rows:
        first, last = (int(page) for page in row["nonresident_pages"].split("-"))
        pages = [int(page) for page in row["fact_pages"].split("-")]
        assert first <= pages[0] and pages[-1] <= last
        assert first >= 1 and last < 2048 // 256 - 1
        assert row["streamed_bytes"] > 0 and row["resident_percent"] == 37.5
        assert row["is_equal"] is row["has_equal_logits"] is True
        assert row["answer"] == row["resident_answer"]
    assert rows[0]["depth_percent"] < rows[1]["depth_percent"] < rows[2]["depth_percent"]
    assert sum(row["is_right"] for row in rows) >= 2


def test_another_answer_than_the_resident_run_gives_ends_with_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Needles._ask
    asked = []

    def tampered(self: Needles, *args: Any) -> Any:
        asked.append(None)
        answer = honest(self, *args)
        return type(answer)("other", answer.digest, answer.streamed_bytes) if len(asked) % 2 == 0 else answer

    monkeypatch.setattr(Needles, "_ask", tampered)
    ran = run("needle", "demo-hybrid", "--ctx", "1024", "--depths", "1", "--resident", "50")
    assert ran.code == 1 and "1 rows of the streamed run differ" in ran.err


def test_needles_without_a_streamed_run_are_scored_alone(run: Run) -> None:
    ran = run("needle", "demo-hybrid", "--ctx", "512", "--depths", "2", "--resident", "100", "--json")
    assert ran.code == 0
    assert [row["is_equal"] for row in ran.json["rows"]] == [None, None]
    assert ran.json["rows"][0]["depth_percent"] == 0
    last = run("needle", "demo-hybrid", "--ctx", "512", "--depths", "100%", "--resident", "100", "--json").json["rows"]
    assert [row["fact_pages"] for row in last] == [ran.json["rows"][1]["fact_pages"]]


def test_a_run_that_was_interrupted_goes_on_and_ends_with_the_same_files(
    run: Run, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(folder: Path) -> tuple[str, ...]:
        return ("ppl", "demo-hybrid", "--text", text, "-c", "256", "--chunks", "4", "--output", str(folder))

    whole = run(*asked(tmp_path / "whole"))
    assert whole.code == 0
    from pykvstream.eval.perplexity import Perplexity

    honest = Perplexity.measure
    measured = []

    def interrupted(self: Perplexity, cell: Any, on_tokens: Any) -> Any:
        if len(measured) == 2:
            measured.append(None)
            raise KeyboardInterrupt
        measured.append(None)
        return honest(self, cell, on_tokens)

    monkeypatch.setattr(Perplexity, "measure", interrupted)
    assert run(*asked(tmp_path / "parts")).code == 130
    assert not (tmp_path / "parts" / "ppl.csv").exists()
    ran = run(*asked(tmp_path / "parts"))
    assert ran.code == 0 and "2 of 4 rows are there already" in ran.err
    assert len(measured) == 5  # two, the interrupt, and the two that were missing
    for name in ("ppl.csv", "ppl.state.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_folder_of_another_run_is_refused_by_name(run: Run, text: str, tmp_path: Path) -> None:
    first = ("ppl", "demo-hybrid", "--text", text, "--chunks", "1", "--output", str(tmp_path))
    assert run(*first, "-c", "128").code == 0
    ran = run(*first, "-c", "64")
    assert ran.code == 1 and "ppl.state.json" in ran.err and "another ctx" in ran.err


def test_the_last_line_makes_the_figure_again(run: Run, text: str) -> None:
    ran = run("ppl", "demo-hybrid", "--text", text, "-c", "64", "--chunks", "1", "--progress")
    assert ran.out.splitlines()[-1] == (
        f"again: pykvstream eval ppl demo-hybrid --text {text} -c 64 --chunks 1 --progress -t 1 -ub 128"
    )
    assert "eval ppl: 64 of 64 tokens" in ran.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("ppl", "demo-hybrid", "--text", "nowhere.txt"), "nowhere.txt"),
        (("ppl", "demo-hybrid", "--text", "TEXT", "-c", "30000"), "two chunks of 30000 need 60000"),
        (("kld", "demo-hybrid", "--text", "TEXT", "--ctx", "512"), "nothing would stream"),
        (("kld", "demo-hybrid", "--text", "TEXT", "--ctx", "1024", "--cache-types", "q9_9"), "q9_9"),
        (("kld", "demo-hybrid", "--text", "TEXT", "--ctx", "30000"), "the longest context 30000"),
        (("needle", "demo-hybrid", "--ctx", "65536"), "32768"),
        (("needle", "demo-hybrid", "--ctx", "20", "--resident", "100"), "no room for a fact"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    run: Run, text: str, argv: tuple[str, ...], words: str
) -> None:
    ran = run(*(text if word == "TEXT" else word for word in argv))
    assert ran.code == 1 and ran.out == ""
    assert ran.err.count("\n") == 1 and words in ran.err
