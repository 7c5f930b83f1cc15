"""Command lines become options: spellings, defaults, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pykvstream.cli.foreign import FOREIGN, Foreign
from pykvstream.cli.options import ChatOptions, GenerateOptions, InspectOptions, Options, PlanOptions
from pykvstream.cli.parser import parse
from pykvstream.sampling import SamplingParams
from pykvstream.text.wishes import Reasoning

OWN_SPELLINGS = [
    "--ctx-size",
    "--shared-device-memory-mib",
    "--arena-mib",
    "--kv-stream-arena-mib",
    "--kv-stream-stage-mib",
    "--cache-type-k",
    "--cache-type-v",
    "--batch-size",
    "--ubatch-size",
    "--n-predict",
    "--temp",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repeat-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--seed",
    "--stop",
    "--prompt",
    "--prompt-file",
    "--system",
    "--raw",
    "--threads",
    "--device",
    "--json",
    "--stats",
    "--progress",
    "--no-progress",
    "--reasoning",
    "--reasoning-preserve",
    "--no-reasoning-preserve",
    "--reasoning-budget",
    "--reasoning-budget-message",
    "--chat-template-kwargs",
    "--tools",
]
"""Every flag that the issue names."""


def options_of(*argv: str) -> Options:
    return parse(argv, lambda: "0")[0]


def generate(*argv: str) -> GenerateOptions:
    options = options_of("generate", "m.gguf", "-p", "hi", *argv)
    assert isinstance(options, GenerateOptions)
    return options


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ending:
        parse(argv, lambda: "0")
    assert ending.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pykvstream: error: ") and err.count("\n") == 1
    return err


def test_defaults_are_those_that_llama_cpp_users_expect() -> None:
    options = generate()
    assert options.generation.params == SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert options.generation.n_predict == -1 and options.generation.stop == ()
    assert options.model.ctx_size is None and options.model.arena_mib is None
    assert (options.model.cache_type_k, options.model.cache_type_v) == ("q8_0", "q8_0")
    assert options.model.ubatch_size == 256 and options.model.threads == 0 and options.model.kv_rotation
    assert options.output.progress is None and not options.output.json


def test_help_names_every_flag_of_the_issue_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(["generate", "--help"], lambda: "0")
    assert ending.value.code == 0
    text = capsys.readouterr().out
    words = set(text.replace(",", " ").split())
    assert set(OWN_SPELLINGS) <= words
    headings = ["model:", "context and memory:", "generation:", "sampling:", "prompt:", "output:"]
    places = [text.index(f"\n{heading}\n") for heading in headings]
    assert places == sorted(places)


def test_help_lists_no_foreign_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["generate", "--help"], lambda: "0")
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert not words & {name for foreign in FOREIGN for name in foreign.names}


@pytest.mark.parametrize(
    "flag", ["--shared-device-memory-mib", "--arena-mib", "--kv-stream-arena-mib", "--kv-stream-stage-mib"]
)
def test_every_spelling_of_the_arena_sets_it(flag: str) -> None:
    assert generate(flag, "12.5").model.arena_mib == 12.5


def test_short_flags_reach_their_options() -> None:
    options = generate(
        "-c", "4096", "-ctk", "q4_0", "-ctv", "f16", "-b", "512", "-ub", "128", "-n", "7", "-s", "3", "-t", "2",
        "-dev", "cpu", "-sys", "be brief", "-l", "5-inf",
    )  # fmt: skip
    model, generation = options.model, options.generation
    assert (model.ctx_size, model.cache_type_k, model.cache_type_v, model.ubatch_size) == (4096, "q4_0", "f16", 128)
    assert (model.threads, model.device, generation.n_predict, generation.seed) == (2, "cpu", 7, 3)
    assert options.prompt.system == "be brief"
    assert generation.params.logit_bias == {5: -math.inf}


def test_sampling_flags_reach_every_field() -> None:
    params = generate(
        "--temp", "0", "--top-k", "1", "--top-p", "0.1", "--min-p", "0.2", "--typical", "0.3", "--top-n-sigma", "1.5",
        "--xtc-probability", "0.4", "--xtc-threshold", "0.5", "--repeat-last-n", "-1", "--repeat-penalty", "1.1",
        "--presence-penalty", "0.6", "--frequency-penalty", "0.7", "--dry-multiplier", "0.8", "--dry-base", "2",
        "--dry-allowed-length", "3", "--dry-penalty-last-n", "9", "--logit-bias", "1+2", "--logit-bias", "3-.5",
    ).generation.params  # fmt: skip
    assert params == SamplingParams(
        temperature=0.0, top_k=1, top_p=0.1, min_p=0.2, typical_p=0.3, top_n_sigma=1.5, xtc_probability=0.4,
        xtc_threshold=0.5, penalty_last_n=-1, repeat_penalty=1.1, presence_penalty=0.6, frequency_penalty=0.7,
        dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_last_n=9, logit_bias={1: 2.0, 3: -0.5},
    )  # fmt: skip


def test_reasoning_flags_reach_their_options() -> None:
    assert generate().prompt.reasoning == Reasoning() and generate().prompt.variables == {}
    prompt = generate(
        "--reasoning", "off", "--reasoning-preserve", "--reasoning-budget", "7", "--reasoning-budget-message", "m",
        "--chat-template-kwargs", '{"a": [1]}', "--tools", "t.json",
    ).prompt  # fmt: skip
    assert prompt.reasoning == Reasoning(enabled=False, preserve=True, budget=7, message="m")
    assert prompt.variables == {"a": [1]} and prompt.tools_file == Path("t.json")
    chat = options_of("chat", "demo", "--reasoning", "on", "--no-reasoning-preserve")
    assert isinstance(chat, ChatOptions) and chat.prompt.reasoning == Reasoning(enabled=True, preserve=False)


def test_stop_strings_add_up() -> None:
    assert generate("--stop", "a", "--stop", "b").generation.stop == ("a", "b")


def test_seed_minus_one_is_a_seed_that_can_be_given_again() -> None:
    seeds = {generate("--seed", "-1").generation.seed for _ in range(8)}
    assert len(seeds) > 1 and all(generate("-s", str(seed)).generation.seed == seed for seed in seeds)


def test_dry_breakers_have_defaults_and_none() -> None:
    assert "\n" in generate().generation.dry_breakers
    assert generate("--dry-sequence-breaker", "none").generation.dry_breakers == ()
    assert generate("--dry-sequence-breaker", ";").generation.dry_breakers == (";",)


def test_progress_is_a_choice_of_three() -> None:
    assert generate("--progress").output.progress is True
    assert generate("--no-progress").output.progress is False


def test_model_is_a_word_or_a_flag() -> None:
    options = options_of("inspect", "-m", "x.gguf")
    assert isinstance(options, InspectOptions) and options.model == "x.gguf"
    assert options_of("inspect", "x.gguf") == options


def test_chat_and_plan_have_their_options() -> None:
    chat = options_of("chat", "demo", "--system", "s", "--chat-template-file", "t.jinja")
    assert isinstance(chat, ChatOptions) and chat.prompt.template_file == Path("t.jinja")
    plan = options_of("plan", "demo", "--contexts", "1,2000", "--json")
    assert isinstance(plan, PlanOptions) and plan.contexts == (1, 2000) and plan.json


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("generate", "-p", "x"), "no model"),
        (("generate", "demo"), "no prompt"),
        (("generate", "a", "-m", "b", "-p", "x"), "two models: a and b"),
        (("generate", "demo", "-p", "x", "-f", "y"), "not allowed with"),
        (("generate", "demo", "-p", "x", "--ctx-size", "-5"), "from 0 to"),
        (("generate", "demo", "-p", "x", "--ctx-size", "many"), "need an integer, got 'many'"),
        (("generate", "demo", "-p", "x", "--arena-mib", "0"), "above 0 MiB"),
        (("generate", "demo", "-p", "x", "--arena-mib", "nan"), "need a finite number"),
        (("generate", "demo", "-p", "x", "--arena-mib", "inf"), "below 1099511627776 MiB, got inf"),
        (("generate", "demo", "-p", "x", "--arena-mib", "1e300"), "below 1099511627776 MiB, got 1e300"),
        (("generate", "demo", "-f", ""), "--prompt-file needs the name of a file"),
        (("generate", "demo", "-p", "x", "-n", "-2"), "from -1 to"),
        (("generate", "demo", "-p", "x", "--dry-sequence-breaker", ""), "not empty"),
        (("generate", "demo", "-p", "x", "-b", "64", "-ub", "128"), "--batch-size 64 is below --ubatch-size 128"),
        (("generate", "demo", "-p", "x", "--top-p", "1.5"), "top_p must be a number from 0 to 1"),
        (("generate", "demo", "-p", "x", "--temp", "inf"), "need a finite number"),
        (("generate", "demo", "-p", "x", "--stop", ""), "not empty"),
        (("generate", "demo", "-p", "x", "--logit-bias", "5"), "15043+1"),
        (("generate", "demo", "-p", "x", "--raw", "--system", "s"), "--system needs the chat template"),
        (("generate", "demo", "-p", "x", "--cache-type", "q8_0"), "unrecognized arguments"),
        (("generate", "demo", "-p", "x", "--raw", "--reasoning-budget", "0"), "--reasoning-budget needs the chat"),
        (("generate", "demo", "-p", "x", "--raw", "--chat-template-kwargs", '{"a": 1}'), "-template-kwargs needs"),
        (("generate", "demo", "-p", "x", "--reasoning-budget-message", "m"), "needs --reasoning-budget N"),
        (("generate", "demo", "-p", "x", "--reasoning-budget", "-2"), "from -1 to"),
        (("generate", "demo", "-p", "x", "--reasoning", "maybe"), "invalid choice"),
        (("generate", "demo", "-p", "x", "--chat-template-kwargs", "[1]"), "need a JSON object"),
        (("chat", "demo", "--ignore-eos"), "unrecognized arguments"),
        (("dance", "demo"), "invalid choice"),
        ((), "required: COMMAND"),
    ],
)
def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str) -> None:
    assert words in refusal(capsys, *argv)


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.names[0])
def test_foreign_flags_are_refused_by_name_with_the_reason(
    capsys: pytest.CaptureFixture[str], foreign: Foreign
) -> None:
    if foreign.nargs == 0 and foreign.harmless:
        pytest.skip("this switch asks for what happens anyway")
    for name in foreign.names:
        value = () if foreign.nargs == 0 else ("no-such-value",)
        err = refusal(capsys, "generate", "demo", "-p", "x", name, *value)
        assert f"{' '.join((name, *value))} is refused: {foreign.reason}" in err


@pytest.mark.parametrize("foreign", [f for f in FOREIGN if f.harmless], ids=lambda foreign: foreign.names[0])
@pytest.mark.parametrize("command", ["generate", "chat", "plan"])
def test_harmless_foreign_flags_leave_a_note_and_nothing_else(foreign: Foreign, command: str) -> None:
    prompt = ("-p", "x") if command == "generate" else ()
    plain, none = parse((command, *prompt, "-m", "demo"), lambda: "0")
    assert none == ()
    for name in foreign.names:
        for value in sorted(foreign.harmless):
            argv = (command, *prompt, name, *((value,) if value else ()), "-m", "demo")
            options, notes = parse(argv, lambda: "0")
            assert len(notes) == 1 and notes[0].startswith(f"{name} {value}".strip() + " is ignored: ")
            assert type(options) is type(plain) and options.model == plain.model


def test_foreign_flags_hide_none_of_ours_and_none_of_each_other() -> None:
    names = [name for foreign in FOREIGN for name in foreign.names]
    assert len(set(names)) == len(names) and not set(names) & set(OWN_SPELLINGS)


def test_version_is_looked_up_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(["--version"], lambda: "1.2.3")
    assert ending.value.code == 0 and capsys.readouterr().out == "pykvstream 1.2.3\n"
