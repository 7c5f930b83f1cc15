"""The parser: flags in the groups of ``--help``: model, context and memory, generation, sampling, prompt, reasoning,
output.

Holds: ``parse``, which returns options that are valid as far as can be known without the model, or ends with code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pykvstream.cli.drafting import add_drafting
from pykvstream.cli.eval_parser import add_eval
from pykvstream.cli.foreign import NOTES, add_foreign
from pykvstream.cli.groups import add_device, add_gpu_layers, add_model
from pykvstream.cli.kernels_parser import add_kernels
from pykvstream.cli.options import (
    PROGRAM,
    RANDOM_SEED,
    REASONING_MODES,
    SAMPLING_FIELDS,
    Options,
    build,
)
from pykvstream.cli.values import bias, contexts, integer, json_object, real
from pykvstream.errors import InvalidArgument
from pykvstream.sampling.params import SamplingParams
from pykvstream.text.wishes import UNLIMITED

_USAGES = {"eval": "MEASURE [FLAGS] MODEL", "devices": "[FLAGS]", "kernels": "ACTION [FLAGS] MODEL..."}
_EPILOG = "Flags of llama.cpp that mean nothing here are refused with the reason, or ignored with a note."


class _Help(argparse.RawDescriptionHelpFormatter):
    """All spellings of a flag, its value once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {self._format_args(action, action.dest.upper())}"


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **kwargs)

    def error(self, message: str) -> NoReturn:
        """One line on standard error, and code 2."""
        self.exit(2, f"{PROGRAM}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """The base class passes over what cannot be written; of help that was asked for, the caller must hear it."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def parse(argv: Sequence[str] | None, version: Callable[[], str]) -> tuple[Options, tuple[str, ...]]:
    """Options of a command line, and notes on flags that were ignored.

    Raises ``SystemExit``: 0 after ``--help`` and ``--version``, 2 after one line on standard error for what cannot
    be meant.
    """
    parser, commands = _make_parser(version)
    args = parser.parse_args(argv)
    args.argv = tuple(sys.argv[1:] if argv is None else argv)
    command: argparse.ArgumentParser = getattr(args, "inner_parser", commands[args.command])
    try:
        options = build(args)
    except InvalidArgument as error:
        command.error(str(error))
    return options, tuple(getattr(args, NOTES, ()))


class _Version(argparse.Action):
    """Looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, lookup: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version", default=argparse.SUPPRESS, **kwargs)
        self._lookup = lookup

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(f"{PROGRAM} {self._lookup()}")
        parser.exit()


def _make_parser(version: Callable[[], str]) -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog=PROGRAM,
        description="Run one long conversation whose KV history streams through a bounded arena, exactly.",
        epilog=f"`{PROGRAM} COMMAND --help` lists the flags of a command. Exit codes: 0 done, 1 refused or failed,"
        " 2 wrong usage, 130 interrupted.",
    )
    parser.add_argument("--version", action=_Version, lookup=version)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, _Parser] = {}
    for name, (summary, add) in _COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            usage=f"{PROGRAM} {name} {_USAGES.get(name, '[FLAGS] MODEL')}",
            epilog=_EPILOG if name not in ("inspect", "devices", "eval", "kernels") else None,
        )
        add(command)
        commands[name] = command
    return parser, commands


def _add_generation(parser: _Parser, *, is_chat: bool) -> None:
    add = parser.add_argument_group("generation").add_argument
    add("-n", "--n-predict", "--predict", type=integer(-1), default=-1, metavar="N",
        help="tokens of an answer at most; -1 (default): until the model or the context ends it")  # fmt: skip
    add("-s", "--seed", type=integer(RANDOM_SEED, 2**64 - 1), default=RANDOM_SEED, metavar="N",
        help="seed of the choice; -1 (default): a random one, printed in the summary")  # fmt: skip
    add("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be repeated")
    saver = "/save-session" if is_chat else "--save-session"
    add("--session", type=Path, metavar="FILE", help=f"go on with the conversation that {saver} wrote")
    if not is_chat:
        add("--save-session", type=Path, metavar="FILE", help="write the conversation behind the answer, for --session")
        add("--ignore-eos", action="store_true", help="go on where the model would end")


def _add_sampling(parser: _Parser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    own = SamplingParams()

    def number(*names: str, text: str, kind: Callable[[str], float | int] = real, dest: str | None = None) -> None:
        field = dest or names[-1].removeprefix("--").replace("-", "_")
        add(*names, dest=field, type=kind, default=getattr(own, SAMPLING_FIELDS[field]), metavar="N",
            help=f"{text} (default %(default)s)")  # fmt: skip

    number("--temp", "--temperature", dest="temp", text="temperature; 0 takes the likeliest token")
    number("--top-k", kind=int, text="keep the k likeliest tokens; 0 is off")
    number("--top-p", text="keep the likeliest tokens of this total probability; 1 is off")
    number("--min-p", text="drop tokens below this share of the likeliest; 0 is off")
    number("--typical", "--typical-p", dest="typical", text="keep tokens of typical surprise; 1 is off")
    number("--top-n-sigma", "--top-nsigma", dest="top_n_sigma",
           text="keep logits within n deviations of the best; 0 or less is off")  # fmt: skip
    number("--xtc-probability", text="chance to drop all but the last of the tokens above the threshold; 0 is off")
    number("--xtc-threshold", text="the threshold of XTC")
    number("--repeat-last-n", kind=int, text="tokens that penalties look back; -1 is all, 0 none")
    number("--repeat-penalty", text="divide the logits of repeated tokens; 1 is off")
    number("--presence-penalty", text="subtract from tokens that occurred; 0 is off")
    number("--frequency-penalty", text="subtract for each occurrence; 0 is off")
    number("--dry-multiplier", text="strength of the penalty on repeated sequences; 0 is off")
    number("--dry-base", text="growth of DRY per repeated token")
    number("--dry-allowed-length", kind=int, text="repeated tokens that DRY lets pass")
    number("--dry-penalty-last-n", kind=int, text="tokens that DRY looks back; -1 is all")
    add("--dry-sequence-breaker", action="append", metavar="TEXT",
        help="no repetition reaches across this text; may be repeated (default: line end : \" *)")  # fmt: skip
    add("-l", "--logit-bias", action="append", type=bias, default=[], metavar="ID+N",
        help="add to the logit of a token, as in 15043+1, 15043-1.5 or 15043-inf; may be repeated")  # fmt: skip


def _add_prompt(parser: _Parser, *, is_chat: bool) -> None:
    first = "the first message" if is_chat else "the user's message; with --raw the text to continue"
    group = parser.add_argument_group("prompt")
    either = group.add_mutually_exclusive_group()
    either.add_argument("-p", "--prompt", metavar="TEXT", help=first)
    either.add_argument("-f", "--prompt-file", "--file", dest="prompt_file", metavar="FILE",
                        help="the same from a UTF-8 file without its last newline; - is standard input")  # fmt: skip
    group.add_argument("-sys", "--system", "--system-prompt", dest="system", metavar="TEXT", help="the system message")
    group.add_argument("--chat-template-file", type=Path, metavar="FILE", help="a template in place of the model's own")
    group.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON",
                       help="more variables of the template, as a JSON object")  # fmt: skip
    if not is_chat:
        group.add_argument("--tools", type=Path, metavar="FILE", help="tools that the model may call, as a JSON list")
        group.add_argument("--raw", action="store_true", help="continue the text as it stands, without a chat template")


def _add_reasoning(parser: _Parser) -> None:
    add = parser.add_argument_group("reasoning").add_argument
    add("--reasoning", choices=sorted(REASONING_MODES), default="auto",
        help="let the model think before it answers, or not (default: as its template does)")  # fmt: skip
    add("--reasoning-preserve", action=argparse.BooleanOptionalAction, default=None,
        help="keep earlier thinking in the conversation, or leave it out (default: as the template does)")  # fmt: skip
    add("--reasoning-budget", type=integer(UNLIMITED), default=UNLIMITED, metavar="N",
        help="thinking tokens of an answer at most; -1 (default): any number")  # fmt: skip
    add("--reasoning-budget-message", metavar="TEXT", help="what the model is made to think when the budget is spent")


def _add_output(parser: _Parser, *, is_chat: bool) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--stats", action="store_true", help="print a table of counters on standard error")
    add("--progress", action=argparse.BooleanOptionalAction, default=None,
        help="show progress on standard error, or nothing (default: a bar where it is a terminal)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="write a timeline of passes, copies, waits and drafts, for Perfetto or Chrome")  # fmt: skip
    if not is_chat:
        add("--json", action="store_true", help="print one JSON object in place of the text")
        add("--embeddings-nextn", type=Path, metavar="FILE",
            help="write the hidden rows that feed the MTP head, one for each of the newest tokens, as an array of"
            " NumPy")  # fmt: skip


def _add_talking(parser: _Parser, *, is_chat: bool) -> None:
    add_model(parser)
    add_device(parser)
    _add_generation(parser, is_chat=is_chat)
    _add_sampling(parser)
    add_drafting(parser)
    _add_prompt(parser, is_chat=is_chat)
    _add_reasoning(parser)
    _add_output(parser, is_chat=is_chat)
    add_foreign(parser)


def _add_generate(parser: _Parser) -> None:
    _add_talking(parser, is_chat=False)


def _add_chat(parser: _Parser) -> None:
    _add_talking(parser, is_chat=True)


def _add_devices(parser: _Parser) -> None:
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="print one JSON object")


def _add_inspect(parser: _Parser) -> None:
    add_model(parser)
    add = parser.add_argument_group("output").add_argument
    add("--tensors", action="store_true", help="list every tensor")
    add("--template", action="store_true", help="print the chat template and nothing else")
    add("--json", action="store_true", help="print one JSON object")
    add_gpu_layers(parser.add_argument_group("parts"), default=None)


def _add_plan(parser: _Parser) -> None:
    add_model(parser)
    add_device(parser)
    add = parser.add_argument_group("output").add_argument
    add("--contexts", type=contexts, default=(), metavar="N,N", help="context lengths to show (default: powers of two)")
    add("--json", action="store_true", help="print one JSON object")
    add_foreign(parser)


_COMMANDS: dict[str, tuple[str, Callable[[_Parser], None]]] = {
    "generate": ("Answer one prompt.", _add_generate),
    "chat": ("Talk with the model in the terminal.", _add_chat),
    "inspect": ("Show what a GGUF file holds.", _add_inspect),
    "devices": ("List what models can run on here, and why a card cannot be used.", _add_devices),
    "kernels": ("Compile what models need on cards, list it, or pack it into a file.", add_kernels),
    "plan": ("Show how the arena would be divided, and what would be streamed.", _add_plan),
    "eval": ("Measure perplexity, divergence, or whether facts are found again.", add_eval),
}
