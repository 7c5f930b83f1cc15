"""The command line. Holds: ``main``, the one place where errors become exit codes.

The environment and the terminal are read in this package alone. Commands are imported when they are asked for:
``inspect`` answers at once because it brings neither the tokenizer nor the native core.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

from pykvstream.cli.options import (
    PROGRAM,
    ChatOptions,
    DevicesOptions,
    DivergenceOptions,
    GenerateOptions,
    InspectOptions,
    KernelsOptions,
    NeedleOptions,
    Options,
    PerplexityOptions,
    PlanOptions,
)
from pykvstream.cli.parser import parse
from pykvstream.errors import KvStreamError

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    has_stdout = sys.stdout is not None
    _open_missing_streams()
    _accept_any_text()
    try:
        code = _obey(argv, has_stdout)
        # What is still buffered can fail to be written, and must fail here: the interpreter's end would hide it.
        sys.stdout.flush()
    except KvStreamError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return BROKEN_PIPE
    except OSError as error:
        _close_stdout()
        where = "standard output: " if error.errno == errno.ENOSPC else ""
        print(f"{PROGRAM}: error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    return code


def _obey(argv: Sequence[str] | None, has_stdout: bool) -> int:
    """Parse and run. Raises ``OSError`` before any work when whatever it comes to would be printed nowhere."""
    try:
        options, notes = parse(argv, _version)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
        if code == 0:
            _require_stdout(has_stdout)
        return code
    _require_stdout(has_stdout)
    for text in notes:
        print(f"{PROGRAM}: note: {text}", file=sys.stderr)
    return _run(options)


def _require_stdout(has_stdout: bool) -> None:
    if not has_stdout:
        raise OSError(errno.EBADF, "standard output is closed, so that an answer would be lost")


def _run(options: Options) -> int:
    match options:
        case GenerateOptions():
            from pykvstream.cli import generate

            return generate.run(options)
        case ChatOptions():
            from pykvstream.cli import chat

            return chat.run(options)
        case InspectOptions():
            from pykvstream.cli import inspect

            return inspect.run(options)
        case DevicesOptions():
            from pykvstream.cli import devices

            return devices.run(options)
        case KernelsOptions():
            from pykvstream.cli import kernels

            return kernels.run(options)
        case PlanOptions():
            from pykvstream.cli import plan

            return plan.run(options)
        case PerplexityOptions() | DivergenceOptions() | NeedleOptions():
            from pykvstream.cli import evaluate

            return evaluate.run(options)


def _version() -> str:
    try:
        return importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _open_missing_streams() -> None:
    """A stream that was closed before we began is an empty one: nothing to read, nobody who listens.

    Of standard output that is so for what happens to be printed there beside an error.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _accept_any_text() -> None:
    """A terminal that cannot show a character shows a replacement; it does not end the answer."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")


def _close_stdout() -> None:
    """The reader has gone: nothing that is still buffered may raise when the interpreter flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
