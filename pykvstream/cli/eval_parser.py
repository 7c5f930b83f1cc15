"""Flags of ``pykvstream eval``: one parser for each measurement.

Holds: ``add_eval``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pykvstream.cli.groups import add_device, add_model
from pykvstream.cli.options import DEFAULT_CACHE_TYPE, DEFAULT_UBATCH, PROGRAM
from pykvstream.cli.values import contexts, depths, integer, names, percent, percents, positive

_PAIRS = "q8_0/q8_0,q8_0/q4_0,q4_0/q4_0,q5_1/q5_1,f16/f16,bf16/bf16"
_REFERENCES = ("resident", "f32")


def add_eval(parser: argparse.ArgumentParser) -> None:
    """The measurements as commands of the command."""
    measures = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    for name, (summary, add) in _MEASURES.items():
        measure = measures.add_parser(
            name, prog=f"{PROGRAM} eval {name}", help=summary, description=summary,
            usage=f"{PROGRAM} eval {name} [FLAGS] MODEL",
        )
        add(measure)
        _add_output(measure)
        measure.set_defaults(inner_parser=measure)


def _add_ppl(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_device(parser)
    parser.set_defaults(ctx_size=512)
    add = parser.add_argument_group("measurement").add_argument
    _add_text(parser, required=True)
    add("--chunks", type=positive(), metavar="N", help="chunks of --ctx-size tokens (default 512 each) at most;"
        " default: as many as the text has")  # fmt: skip


def _add_kld(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    _add_opening(parser)
    _add_text(parser, required=True)
    add = parser.add_argument_group("measurement").add_argument
    add("--ctx", "-c", type=contexts, default=(4096,), metavar="N,N", help="context lengths (default 4096)")
    add("--resident", type=percents, default=(100.0, 50.0, 25.0, 10.0), metavar="P,P",
        help="shares of the history that are resident, in percent (default 100,50,25,10)")  # fmt: skip
    add("--cache-types", type=names(), default=tuple(_PAIRS.split(",")), metavar="K/V,K/V",
        help=f"types of keys and values (default {_PAIRS})")  # fmt: skip
    add("--against", type=names(_REFERENCES), default=_REFERENCES, metavar="WHAT",
        help="resident: streamed against fully resident; f32: each pair against F32 keys and values, with and without"
        " rotation (default resident,f32)")  # fmt: skip


def _add_needle(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    _add_opening(parser)
    _add_text(parser, required=False)
    add = parser.add_argument_group("measurement").add_argument
    add("-ctk", "--cache-type-k", default=DEFAULT_CACHE_TYPE, metavar="TYPE", help="type of keys (default %(default)s)")
    add("-ctv", "--cache-type-v", default=DEFAULT_CACHE_TYPE, metavar="TYPE",
        help="type of values (default %(default)s)")  # fmt: skip
    add("--ctx", "-c", type=contexts, default=(4096,), metavar="N,N", help="context lengths (default 4096)")
    add("--depths", type=depths, default=depths("10"), metavar="N|P,P",
        help="depths of the fact: so many, evenly, or a list in percent: 0,50,90 or 50%% (default 10)")  # fmt: skip
    add("--repeat", type=integer(1, 1000), default=1, metavar="N",
        help="facts at each depth, one prompt each (default %(default)s)")  # fmt: skip
    add("--resident", type=percent, default=25.0, metavar="P",
        help="share of the history that is resident in the run that is compared with the fully resident one, in"
        " percent; 100 leaves it out (default 25)")  # fmt: skip
    add("--only-nonresident", action="store_true", help="put facts only where they must come through the ring")
    add("-s", "--seed", type=integer(0, 2**64 - 1), default=1, metavar="N", help="seed of facts and text (default 1)")


def _add_opening(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("memory").add_argument
    add("-ub", "--ubatch-size", type=positive(), default=DEFAULT_UBATCH, metavar="N",
        help="rows of a pass (default %(default)s)")  # fmt: skip
    add("-t", "--threads", type=integer(-1), default=0, metavar="N", help="compute threads (default: one per core)")
    add("-dev", "--device", default="cpu", metavar="NAME", help="the device (default %(default)s)")


def _add_text(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument_group("text").add_argument(
        "--text", "-f", "--file", dest="text", required=required, metavar="FILE",
        help="UTF-8 text to measure on; - is standard input" if required else
        "UTF-8 text around the facts (default: generated sentences)",
    )  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output", "--resume", dest="output", type=Path, metavar="DIR",
        help="folder for state, CSV and JSON; a run that was interrupted goes on from there")  # fmt: skip
    add("--plot", action="store_true", help="draw a PNG into the folder (needs matplotlib, the extra [eval])")
    add("--json", action="store_true", help="print one JSON object in place of tables")
    add("--progress", action=argparse.BooleanOptionalAction, default=None,
        help="show progress on standard error, or nothing (default: a bar where it is a terminal)")  # fmt: skip


_MEASURES: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "ppl": ("Perplexity of a text, chunk by chunk as llama.cpp counts it.", _add_ppl),
    "kld": ("KL divergence of streamed from resident, and of cache types from F32.", _add_kld),
    "needle": ("Facts in chosen pages, asked for at the end.", _add_needle),
}
