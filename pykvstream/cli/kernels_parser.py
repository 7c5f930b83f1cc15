"""Flags of ``pykvstream kernels``: one parser for each action.

Holds: ``add_kernels``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pykvstream.cli.foreign import add_foreign
from pykvstream.cli.groups import add_device, add_model
from pykvstream.cli.options import PROGRAM
from pykvstream.cli.values import architectures


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """The actions as commands of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (summary, usage, add) in _ACTIONS.items():
        action = actions.add_parser(
            name, prog=f"{PROGRAM} kernels {name}", help=summary, description=summary,
            usage=f"{PROGRAM} kernels {name} [FLAGS] {usage}",
        )  # fmt: skip
        add(action)
        add_device(action)
        output = action.add_argument_group("output").add_argument
        output("--progress", action=argparse.BooleanOptionalAction, default=None,
               help="show progress on standard error, or nothing (default: a bar where it is a terminal)")  # fmt: skip
        output("--json", action="store_true", help="print one JSON object")
        add_foreign(action)
        action.set_defaults(inner_parser=action, device="cuda")


def _add_check(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--arch", type=architectures, default=(), metavar="SM,SM",
                        help="architectures to compile for, as in sm_80,sm_90; no card is needed then (default: that"
                        " of the card)")  # fmt: skip


def _add_pack(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kernels")
    group.add_argument("models", nargs="*", metavar="MODEL", help="demo, demo-hybrid, or GGUF files")
    group.add_argument("--all", action="store_true", help="everything that any supported model can need")
    group.add_argument("--arch", type=architectures, default=(), metavar="SM,SM",
                       help="architectures of the cards, as in sm_80,sm_90")  # fmt: skip
    group.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the pack")


_ACTIONS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "check": ("Compile or find every kernel that a model needs, and list them.", "MODEL", _add_check),
    "pack": ("Write the kernels that models need into one file. No card is needed.", "MODEL... --arch SM,SM -o FILE",
             _add_pack),
}  # fmt: skip
