"""The commands, run in this process on a small random model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pykvstream.cli import BROKEN_PIPE, INTERRUPTED, main
from pykvstream.gguf import GgufWriter
from tests.models import CHAT_TEMPLATE, byte_level_vocabulary, write_random_model
from tests.qwen_template import QWEN, TOOLS

N_VOCAB = 320
CTX = 2048
STATS = {
    "arena_bytes",
    "history_bytes",
    "page_tokens",
    "resident_pages",
    "ring_slots",
    "streamed_bytes",
    "copies",
    "stall_ms",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
}
QUICK = ("-t", "1", "-ub", "64")
VOCABULARY = byte_level_vocabulary(N_VOCAB)
NO_END = tuple(
    word for text in ("<|im_end|>", "<|endoftext|>") for word in ("--logit-bias", f"{VOCABULARY.id(text)}-inf")
)


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        assert self.out == json.dumps(found) + "\n"
        return found


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    write_random_model(path, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=N_VOCAB, ctx=CTX, seed=5)
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> Ran:
        code = main(argv)
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give standard input, which is no terminal."""

    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))

    return give


class PressesInterrupt(io.StringIO):
    """A standard output at which somebody presses Ctrl-C once the n-th text has come."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def write(self, text: str) -> int:
        n_chars = super().write(text)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return n_chars


def assert_one_line(ran: Ran, *words: str, code: int = 1) -> None:
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("pykvstream: error: ") and ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err


def test_json_is_one_object_whose_hash_no_arena_changes(run: Run, model: str, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The history of a long conversation. " * 45)
    argv = (
        "generate",
        model,
        "-f",
        str(prompt),
        *QUICK,
        "-n",
        "12",
        "--ignore-eos",
        "-s",
        "9",
        "--json",
        "-ctv",
        "q4_0",
    )
    plan = run("plan", model, *QUICK, "-ctv", "q4_0", "--json").json
    small, large = (repr(plan[f"{name}_arena_mib"]) for name in ("smallest", "recommended"))
    streamed, resident = (run(*argv, "--arena-mib", mib).json for mib in (small, large))
    assert set(streamed) == {
        "model",
        "seed",
        "prompt_tokens",
        "tokens",
        "text",
        "reasoning",
        "content",
        "tool_calls",
        "stop_reason",
        "logits_sha256",
        "stats",
    }
    assert set(streamed["stats"]) >= STATS
    assert streamed["stats"]["streamed_bytes"] > 0 and resident["stats"]["streamed_bytes"] == 0
    assert streamed["prompt_tokens"] > 1000 and len(streamed["tokens"]) == 12 and streamed["stop_reason"] == "length"
    for name in ("prompt_tokens", "tokens", "text", "logits_sha256", "seed"):
        assert streamed[name] == resident[name]
    other = run(*argv, "--seed", "10", "--temp", "3").json
    assert other["logits_sha256"] != resident["logits_sha256"]


def test_text_is_what_json_reports(run: Run, model: str) -> None:
    argv = ("generate", model, "-p", "hello", *QUICK, "-n", "24", "--ignore-eos", "-s", "1")
    text, report = run(*argv), run(*argv, "--json").json
    assert text.code == 0 and text.out == report["text"] + "\n"
    assert text.err.count("\n") == 1 and "seed 1 | arena" in text.err


def test_without_progress_standard_error_is_silent(run: Run, model: str) -> None:
    assert run("generate", model, "-p", "hello", *QUICK, "-n", "2", "--no-progress").err == ""


def test_asked_for_progress_counts_the_prompt_to_its_end(run: Run, model: str) -> None:
    ran = run("generate", model, "--raw", "-p", "x" * 200, *QUICK, "-n", "1", "--progress")
    assert "prompt: 64 of 200 tokens\n" in ran.err and "prompt: 200 of 200 tokens\n" in ran.err


def test_stats_are_a_table_on_standard_error(run: Run, model: str) -> None:
    ran = run("generate", model, "-p", "hello", *QUICK, "-n", "2", "--stats", "--json")
    assert ran.json["stats"]["page_tokens"] == 256
    assert all(name in ran.err for name in STATS)


def test_raw_prompt_from_standard_input_has_no_template(run: Run, model: str, typed: Callable[[str], None]) -> None:
    typed("abc\n")
    report = run("generate", model, "--raw", "-f", "-", *QUICK, "-n", "0", "--json").json
    assert report["prompt_tokens"] == 3 and report["tokens"] == [] and report["stop_reason"] == "length"
    # SHA-256 of nothing: no token, no row.
    assert report["logits_sha256"].startswith("e3b0c442")


def test_template_file_replaces_the_template_of_the_model(run: Run, model: str, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    argv = ("generate", model, "-p", "abc", *QUICK, "-n", "0", "--json")
    assert run(*argv, "--chat-template-file", str(template)).json["prompt_tokens"] == 3
    assert run(*argv).json["prompt_tokens"] > 3
    assert run(*argv, "--system", "be brief").json["prompt_tokens"] > run(*argv).json["prompt_tokens"]


@pytest.fixture
def thinking(tmp_path: Path) -> tuple[str, ...]:
    """Flags that give the model a template that knows thinking and tools."""
    path = tmp_path / "qwen.jinja"
    path.write_text(QWEN)
    return ("--chat-template-file", str(path))


def test_json_has_the_parts_of_an_answer_where_the_template_has_them(
    run: Run, model: str, thinking: tuple[str, ...], tmp_path: Path
) -> None:
    argv = ("generate", model, "-p", "x", *QUICK, "-n", "24", *NO_END, "--json", "-s", "3", *thinking)
    report = run(*argv, "--reasoning-budget", "4", "--reasoning-budget-message", "!").json
    assert report["text"].startswith(f"{report['reasoning']}\n</think>\n\n") and report["reasoning"].endswith("!")
    assert report["content"] and report["text"].endswith(report["content"]) and report["tool_calls"] == []
    off = run(*argv, "--reasoning", "off").json
    assert off["reasoning"] == "" and off["content"] == off["text"].lstrip("\n")
    on = run(*argv, "--reasoning", "on").json
    assert on["reasoning"] and on["content"] == "" and on["prompt_tokens"] < off["prompt_tokens"]
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    assert run(*argv, "--tools", str(tools)).json["prompt_tokens"] > on["prompt_tokens"] + 100
    dated = run(*argv, "--chat-template-kwargs", '{"dated": true}').json
    assert dated["prompt_tokens"] > on["prompt_tokens"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--reasoning", "on"), ("reasoning on", "enable_thinking")),
        (("--reasoning-preserve",), ("reasoning preserve",)),
        (("--reasoning-budget", "3"), ("reasoning budget",)),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_reasoning_of_a_model_that_does_not_think_is_refused_by_name(
    run: Run, model: str, typed: Callable[[str], None], command: str, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    typed("hello\n")
    ran = run(command, model, *QUICK, "-p", "x", *flags)
    assert_one_line(ran, *words)


def test_tools_that_are_no_list_are_refused(run: Run, model: str, thinking: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    for text, words in (("{}", "JSON list"), ("[", "JSON list"), ("[1]", "tools[0]")):
        path.write_text(text)
        assert_one_line(run("generate", model, *QUICK, "-p", "x", *thinking, "--tools", str(path)), words)


def test_prompt_that_fills_the_context_ends_with_context_full(run: Run, model: str) -> None:
    argv = ("generate", model, "--raw", "-p", "a" * 64, *QUICK, "-c", "64", "-n", "5", "--ignore-eos", "--json")
    report = run(*argv).json
    assert report["stop_reason"] == "context_full" and report["tokens"] == []


def test_dry_and_bias_change_what_is_chosen(run: Run, model: str) -> None:
    argv = ("generate", model, "-p", "abc", *QUICK, "-n", "16", "--ignore-eos", "--temp", "0", "--json")
    plain = run(*argv).json["tokens"]
    biased = run(*argv, "--logit-bias", f"{plain[0]}-inf").json["tokens"]
    assert plain[0] not in biased
    assert run(*argv, "--dry-multiplier", "2").code == 0


def test_interrupt_ends_with_130_after_text_and_summary(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = PressesInterrupt(3)
    monkeypatch.setattr(sys, "stdout", out)
    handler = signal.getsignal(signal.SIGINT)
    ran = run("generate", model, "-p", "hello", *QUICK, "-n", "500", "--ignore-eos", "-s", "1")
    assert ran.code == INTERRUPTED and "cancelled" in ran.err and "seed 1" in ran.err
    assert out.getvalue().endswith("\n") and out.left < 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_reader_that_goes_away_ends_quietly(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        ran = run("generate", model, "-p", "hello", *QUICK, "-n", "500", "--ignore-eos", "-s", "1")
    assert ran.code == BROKEN_PIPE and ran.err == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("-p", "x", "--cache-type-k", "q9"), ("'q9'", "q8_0")),
        (("-p", "x", "--device", "gpu"), ("'gpu'", "cpu", "cuda:N")),
        (("-p", "x", "-c", str(CTX + 1)), (str(CTX + 1), str(CTX))),
        (("-p", "x", "--arena-mib", "0.01"), ("need", "have")),
        (("--raw", "-p", ""), ("empty prompt",)),
        (("--raw", "-p", "a" * 65, "-c", "64"), ("65 tokens", "64")),
        (("-f", "/nonexistent/file"), ("no such file",)),
        (("-f", "/"), ("directory",)),
        (("-p", "x", "--chat-template-file", "/nonexistent/file"), ("no such file",)),
        (("-p", "x", "--logit-bias", "99999+1"), ("99999", str(N_VOCAB))),
    ],
)
def test_refusals_are_one_line_and_code_1(run: Run, model: str, argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_one_line(run("generate", model, *QUICK, *argv), *words)


def test_prompt_that_is_not_utf8_is_refused_with_the_byte(run: Run, model: str, tmp_path: Path) -> None:
    prompt = tmp_path / "latin1.txt"
    prompt.write_bytes(b"caf\xe9")
    assert_one_line(run("generate", model, "-f", str(prompt)), "byte 3 is not UTF-8")


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "plan"])
def test_damaged_files_are_one_line_and_code_1(run: Run, model: str, tmp_path: Path, command: str) -> None:
    prompt = ("-p", "x") if command == "generate" else ()
    assert_one_line(run(command, "/nonexistent.gguf", *prompt), "/nonexistent.gguf")
    data = Path(model).read_bytes()
    for name, damaged in (("short", data[:1000]), ("magic", b"GGML" + data[4:]), ("empty", b"")):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(damaged)
        assert_one_line(run(command, str(path), *prompt), path.name)


def test_foreign_flag_is_noted_and_the_answer_comes(run: Run, model: str) -> None:
    ran = run("generate", model, "-p", "x", *QUICK, "-n", "1", "--no-progress", "-np", "1", "--flash-attn", "on")
    assert ran.code == 0 and ran.err.count("pykvstream: note: ") == 2


def test_inspect_shows_metadata_tensors_tokenizer_and_template(run: Run, model: str) -> None:
    ran = run("inspect", model)
    assert ran.code == 0 and ran.err == ""
    for words in ("llama.context_length", str(CTX), "F32", "n_tokens", "<|im_end|>", "chat template"):
        assert words in ran.out
    assert "blk.1.ffn_down.weight" not in ran.out
    assert "blk.1.ffn_down.weight" in run("inspect", model, "--tensors").out
    assert run("inspect", model, "--template").out == CHAT_TEMPLATE + "\n"


def test_inspect_json_counts_every_tensor(run: Run, model: str) -> None:
    report = run("inspect", model, "--json", "--tensors").json
    assert report["metadata"]["general.architecture"] == "llama"
    assert report["metadata"]["tokenizer.ggml.tokens"]["length"] == N_VOCAB
    assert len(report["metadata"]["tokenizer.ggml.tokens"]["first"]) < N_VOCAB
    (only,) = report["tensors"]["types"]
    assert (only["type"], only["bits_per_weight"]) == ("F32", 32.0)
    assert only["count"] == report["tensors"]["count"] == len(report["tensor_list"])
    assert only["bytes"] == sum(tensor["bytes"] for tensor in report["tensor_list"])


def test_inspect_shows_files_that_are_no_models(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = GgufWriter()
    writer.add("note", "a \x1b[31mred\x1b[0m line\nand [bold]another[/bold]")
    writer.write(path)
    ran = run("inspect", str(path))
    assert ran.code == 0 and "\x1b" not in ran.out
    assert "a \\x1b[31mred\\x1b[0m line\\nand [bold]another[/bold]" in ran.out
    assert run("inspect", str(path), "--json").json["tensors"] == {"count": 0, "bytes": 0, "types": []}
    assert_one_line(run("inspect", str(path), "--template"), "no chat template")


def test_inspect_brings_neither_tokenizer_nor_native_core(model: str) -> None:
    program = (
        "import sys; from pykvstream.cli import main; assert main(['inspect', sys.argv[1]]) == 0;"
        "print(sorted({'tokenizers', 'jinja2', 'pykvstream._ffi', 'pykvstream.engine'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program, model], capture_output=True, text=True, check=True)
    assert ran.stdout.endswith("\n[]\n")


def test_smallest_arena_of_the_plan_works_and_one_page_less_is_refused(run: Run, model: str) -> None:
    plan = run("plan", model, *QUICK, "--json").json
    smallest, page = plan["smallest_arena_bytes"], plan["page_bytes"]
    argv = ("generate", model, "-p", "x", *QUICK, "-n", "1", "--json", "--arena-mib")
    assert run(*argv, repr(smallest / 2**20)).json["stats"]["arena_bytes"] == smallest
    assert_one_line(run(*argv, repr((smallest - page) / 2**20)), str(smallest))
    assert_one_line(run("plan", model, *QUICK, "--arena-mib", repr((smallest - page) / 2**20)), str(smallest))


def test_plan_pictures_the_arena_and_gives_flags_that_work(run: Run, model: str) -> None:
    ran = run("plan", model, *QUICK)
    for words in ("prefill", "decode", "workspace", "smallest arena", "recommended arena", "host memory"):
        assert words in ran.out
    assert "█" in ran.out
    (line,) = [line for line in ran.out.splitlines() if line.startswith("as flags")]
    flags = [part.split()[-1] for part in line.split("|")]
    resident = run("plan", model, *QUICK, "--arena-mib", flags[1], "--json").json
    assert all(phase["is_fully_resident"] for phase in resident["phases"])
    assert all(row["streamed_pages"] == 0 for row in resident["contexts"])
    small = run("plan", model, *QUICK, "--arena-mib", flags[0], "--contexts", f"1,{CTX}", "--json").json
    assert [row["tokens"] for row in small["contexts"]] == [1, CTX]
    assert small["contexts"][0]["streamed_pages"] == 0 < small["contexts"][1]["streamed_bytes_per_pass"]


def test_plan_regions_tile_the_arena(run: Run, model: str) -> None:
    plan = run("plan", model, *QUICK, "--json", "-c", "1000").json
    assert plan["ctx_size"] == 1000
    assert plan["host"]["need_bytes"] == plan["arena_bytes"] + plan["history_bytes"] + plan["weight_bytes"]
    for phase in plan["phases"]:
        pool, workspace = phase["regions"]
        assert pool["offset_bytes"] == 0 and workspace["offset_bytes"] == pool["size_bytes"]
        assert workspace["offset_bytes"] + workspace["size_bytes"] + phase["unused_bytes"] == plan["arena_bytes"]
        assert sum(phase["resident_pages"]) + phase["ring_slots"] == phase["page_slots"]


def test_plan_refuses_contexts_beyond_its_own(run: Run, model: str) -> None:
    assert_one_line(run("plan", model, *QUICK, "-c", "512", "--contexts", "513"), "513", "512")

def test_plan_refuses_packs_of_kernels_where_no_card_reads_them(run: Run, model: str) -> None:
    assert_one_line(run("plan", model, *QUICK, "--kernels", "a.pack"), "packs of kernels are for cards")



CHAT = (*QUICK, "-n", "6", "-s", "4", "--no-progress", *NO_END)


def test_chat_answers_line_after_line(run: Run, model: str, typed: Callable[[str], None], tmp_path: Path) -> None:
    saved = tmp_path / "talk.md"
    typed(f"first\nsecond \\\npart\n\n/nonsense\n//slash\n/stats\n/save {saved}\n/help\n/quit\nnever\n")
    ran = run("chat", model, *CHAT)
    assert ran.code == 0
    for words in ("no command /nonsense", f"saved 6 turns to {saved}", "prefill_tokens", "Ctrl-D", "--n-predict"):
        assert words in ran.err
    text = saved.read_text()
    assert text.count("## user\n") == text.count("## assistant (length)\n") == 3
    assert "\nsecond \npart\n" in text and "\n/slash\n" in text and "never" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["talk.md"]


def test_chat_begins_with_the_prompt_and_ends_with_the_input(
    run: Run, model: str, typed: Callable[[str], None]
) -> None:
    typed("")
    ran = run("chat", model, *CHAT, "-p", "hello", "--system", "be brief")
    assert ran.code == 0 and ran.out.endswith("\n")


def test_chat_sets_reasoning_apart_and_drops_it_with_the_next_question(
    run: Run, model: str, typed: Callable[[str], None], thinking: tuple[str, ...], tmp_path: Path
) -> None:
    saved = tmp_path / "talk.md"
    typed(f"first\nsecond\n/save {saved}\n/stats\n")
    budget = ("--reasoning-budget", "3", "--reasoning-budget-message", " THOUGHT")
    ran = run("chat", model, *QUICK, "-n", "40", "-s", "4", "--no-progress", *NO_END, *thinking, *budget)
    assert ran.code == 0 and ran.err.count("THOUGHT\n") == 2
    assert "THOUGHT" not in ran.out and "</think>" not in ran.out + ran.err and "\x1b" not in ran.out + ran.err
    text = saved.read_text()
    assert text.count("\n> ") >= 2 and text.count("THOUGHT\n\n") == 2


def test_chat_goes_on_with_a_saved_session_as_if_it_had_not_stopped(
    run: Run, model: str, typed: Callable[[str], None], thinking: tuple[str, ...], tmp_path: Path
) -> None:
    saved = tmp_path / "talk.session"
    flags = (*QUICK, "-n", "9", "--no-progress", *NO_END, *thinking)
    typed("first\nsecond\n")
    whole = run("chat", model, *flags, "-s", "4").out
    typed(f"first\n/save-session {saved}\n/save-session\n/save-session {tmp_path}/none/talk\n")
    ran = run("chat", model, *flags, "-s", "4")
    assert f"tokens to {saved}" in ran.err and "needs a file name" in ran.err and "not saved: session file" in ran.err
    typed("second\n")
    on = run("chat", model, *flags, "--session", str(saved), "--arena-mib", "4")
    assert on.code == 0 and ran.out + on.out == whole
    saved.write_bytes(saved.read_bytes()[:-1])
    assert_one_line(run("chat", model, *flags, "--session", str(saved)), "session file", "offset")
    for own in (("-s", "4"), ("-sys", "be kind")):
        assert_one_line(run("chat", model, *flags, "--session", str(saved), *own), "--session", code=2)


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_generate_goes_on_with_a_saved_session_in_another_arena(
    run: Run, model: str, thinking: tuple[str, ...], tmp_path: Path, raw: tuple[str, ...]
) -> None:
    saved, other = str(tmp_path / "talk"), str(tmp_path / "other")
    flags = (*QUICK, "-n", "9", "--json", "--ignore-eos", *(raw or thinking))
    first = run("generate", model, *flags, "-s", "4", "-p", "first", "--save-session", saved)
    Path(other).write_bytes(Path(saved).read_bytes())
    answers = [
        json.loads(run("generate", model, *flags, "-p", "second", "--session", name, "--save-session", name, *more).out)
        for name, more in ((saved, ()), (other, ("--arena-mib", "4")))
    ]
    assert first.code == 0 and json.loads(first.out)["seed"] == answers[0]["seed"] == 4
    for key in ("tokens", "text", "logits_sha256", "prompt_tokens"):
        assert answers[0][key] == answers[1][key]
    assert Path(saved).read_bytes() == Path(other).read_bytes()
    alone = json.loads(run("generate", model, *flags, "-s", "4", "-p", "second").out)
    assert alone["logits_sha256"] != answers[0]["logits_sha256"]
    for own in (("-s", "4"),) if raw else (("-s", "4"), ("-sys", "be kind")):
        assert_one_line(run("generate", model, *flags, "-p", "x", "--session", saved, *own), "--session", code=2)
    refused = run("generate", model, *flags, "-s", "4", "-p", "x", "--save-session", str(tmp_path / "none" / "talk"))
    assert (refused.code, refused.out) == (1, "") and "no such folder" in refused.err


def test_generate_and_chat_say_the_same_behind_one_session(
    run: Run, model: str, typed: Callable[[str], None], thinking: tuple[str, ...], tmp_path: Path
) -> None:
    saved = str(tmp_path / "talk")
    flags = (*QUICK, "-n", "9", *NO_END, *thinking)
    run("generate", model, *flags, "-s", "4", "-p", "first", "--save-session", saved)
    said = json.loads(run("generate", model, *flags, "-p", "second", "--session", saved, "--json").out)
    typed("second\n")
    assert said["content"] in run("chat", model, *flags, "--session", saved, "--no-progress").out


def test_a_context_of_0_is_the_models_own(run: Run, model: str, typed: Callable[[str], None]) -> None:
    greetings = []
    for flags in (("-c", "0"), ()):
        typed("/stats\n")
        greetings.append(run("chat", model, *CHAT, *flags).err)
    assert greetings[0] == greetings[1] and "of 2048 tokens" in greetings[0]


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_chat_is_left_by_either_word(run: Run, model: str, typed: Callable[[str], None], word: str) -> None:
    typed(f"{word}\nhello\n")
    ran = run("chat", model, *CHAT)
    assert (ran.code, ran.out, ran.err) == (0, "", "")


@pytest.mark.parametrize("argv", [("generate", "-p", "x"), ("generate", "--help")])
def test_both_models_without_a_file_are_named(run: Run, argv: tuple[str, ...]) -> None:
    ran = run(*argv)
    assert "demo-hybrid" in ran.out + ran.err


def test_clear_begins_anew_with_the_same_answer(run: Run, model: str, typed: Callable[[str], None]) -> None:
    typed("hello\n/clear\nhello\n")
    ran = run("chat", model, *CHAT)
    half = len(ran.out) // 2
    assert ran.out[:half] == ran.out[half:] and "forgotten" in ran.err


def test_chat_with_a_full_context_says_so_and_goes_on(run: Run, model: str, typed: Callable[[str], None]) -> None:
    typed(f"{'a' * 30}\n{'b' * 90}\n/clear\nhello\n")
    ran = run("chat", model, *QUICK, "-c", "96", "-s", "4", "--no-progress", *NO_END)
    assert ran.code == 0
    lines = ran.err.splitlines()
    assert "context is full" in lines[0] and "/clear" in lines[0]
    assert "do not fit the context of 96" in lines[1] and "/clear" in lines[1]
    assert "forgotten" in lines[2] and "context is full" in lines[3]


def test_interrupt_stops_the_answer_and_keeps_the_conversation(
    run: Run, model: str, typed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "talk.md"
    typed(f"hello\nmore\n/save {saved}\n")
    out = PressesInterrupt(3)
    monkeypatch.setattr(sys, "stdout", out)
    ran = run("chat", model, *QUICK, "-n", "40", "-s", "4", "--no-progress", *NO_END)
    assert ran.code == 0 and ran.err.startswith("[stopped]\n[cut off by --n-predict]\n")
    text = saved.read_text()
    assert "## assistant (cancelled)\n" in text and "## assistant (length)\n" in text


def test_interrupt_before_the_answer_drops_the_message(
    run: Run, model: str, typed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(f"{'a' * 300}\nhello\n/stats\n")
    monkeypatch.setattr("pykvstream.cli.render.note", interrupt_once(monkeypatch))
    ran = run("chat", model, *QUICK, "-n", "3", "-s", "4", "--progress", *NO_END)
    assert ran.code == 0 and "the message was not taken in" in ran.err
    assert "[cut off by --n-predict]" in ran.err


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A ``note`` at whose first line about the prompt Ctrl-C is pressed."""
    pressed = []

    def note(text: str) -> None:
        print(text, file=sys.stderr)
        if text.startswith("prompt: ") and not pressed:
            pressed.append(text)
            signal.raise_signal(signal.SIGINT)

    return note


def test_line_that_is_no_text_is_refused_and_the_next_one_answered(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nhello\n"), encoding="utf-8"))
    ran = run("chat", model, *CHAT)
    assert ran.code == 0 and "not UTF-8: byte 3" in ran.err.splitlines()[0] and ran.out != ""


def test_save_that_fails_says_so_and_goes_on(
    run: Run, model: str, typed: Callable[[str], None], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    typed(f"/save /nonexistent/talk.md\n/save ~nobody-here/x\n/save\n/save {pipe}\n/save-session {pipe}\nhello\n")
    ran = run("chat", model, *CHAT)
    assert pipe.is_fifo() and ran.err.count("is not a regular file") == 2
    assert ran.code == 0 and ran.err.count("not saved: ") == 4 and "needs a file name" in ran.err and ran.out != ""
