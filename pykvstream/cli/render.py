"""What the terminal sees beside the answer: progress, the summary line, tables.

Units: MiB is 2^20 bytes.
Holds: nothing here writes to standard output on its own; text from files loses its control characters before a
terminal sees it, since a model file may come from anywhere.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from pykvstream.text.deltas import ContentDelta, Delta, ReasoningDelta

if TYPE_CHECKING:
    # ``inspect`` prints tables without the native core, which the runtime imports.
    from pykvstream.runtime.meter import SessionStats
    from pykvstream.runtime.session import ForwardProgress

MIB = 1 << 20
_PLAIN_WIDTH = 100
_STEPS = 10
_INDICES = 8
_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_KEPT_CONTROLS = "\n\t"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader has gone: the command ends as for any other output."""
        raise BrokenPipeError


def console(file: TextIO) -> Console:
    """A console that takes text as it stands; colours only where ``file`` is a terminal and NO_COLOR is not set."""
    width = None if file.isatty() else _PLAIN_WIDTH
    return _Console(file=file, markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def printable(text: str) -> str:
    """``text`` with control and format characters spelled out, line breaks and tabs kept."""
    return "".join(
        char if char in _KEPT_CONTROLS or unicodedata.category(char) not in ("Cc", "Cf", "Cs") else ascii(char)[1:-1]
        for char in text
    )


def note(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def mib(n_bytes: float) -> str:
    return f"{n_bytes / MIB:,.1f} MiB"


def is_shown(wanted: bool | None) -> bool:
    """Whether progress and summaries are shown: as asked for, else where standard error is a terminal."""
    return sys.stderr.isatty() if wanted is None else wanted


LoadProgress = Callable[[str, int], None]
CountProgress = Callable[[int, int], None]


@contextmanager
def loading(
    name: str, n_bytes: int, wanted: bool | None
) -> Iterator[tuple[LoadProgress | None, CountProgress | None]]:
    """Progress of a model of ``n_bytes`` that is opened, on a terminal only; yields what ``Model.open`` takes for its
    weights and for kernels that are compiled."""
    if not _has_bar(wanted):
        yield None, None
        return
    with ExitStack() as stack:
        count = stack.enter_context(_counting("compiling kernels"))
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        bar: Progress | None = None
        task = TaskID(0)

        def show(_: str, n_loaded: int) -> None:
            # A terminal shows one bar at a time; weights come when kernels are there.
            nonlocal bar, task
            if bar is None:
                count(0, 0)
                bar = stack.enter_context(Progress(*columns, console=console(sys.stderr), transient=True))
                task = bar.add_task(f"loading {name}", total=n_bytes)
            bar.advance(task, n_loaded)

        yield show, count


@contextmanager
def compiling(wanted: bool | None) -> Iterator[CountProgress | None]:
    """Progress of kernels that are compiled, on a terminal only."""
    if not _has_bar(wanted):
        yield None
        return
    with _counting("compiling kernels") as count:
        yield count


def _has_bar(wanted: bool | None) -> bool:
    return is_shown(wanted) and sys.stderr.isatty()


@contextmanager
def _counting(name: str) -> Iterator[CountProgress]:
    """A bar that appears with the first count and goes with a total of 0, or at the end."""
    with ExitStack() as stack:
        bar: Progress | None = None
        task = TaskID(0)

        def count(done: int, total: int) -> None:
            nonlocal bar, task
            if total == 0:
                stack.close()
                return
            if bar is None:
                bar = stack.enter_context(_bar())
                task = bar.add_task(name, total=total)
            bar.update(task, completed=done, total=total)

        yield count


@contextmanager
def prefilling(wanted: bool | None) -> Iterator[ForwardProgress | None]:
    """Progress over a prompt: a bar on a terminal, a few lines elsewhere. It disappears with the first token."""
    if not is_shown(wanted):
        yield None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("prompt", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _lines("prompt")


@contextmanager
def measuring(name: str, total: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Progress of a measurement of ``total`` tokens; yields what takes the tokens that were run."""
    if not is_shown(wanted):
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task(name, total=total)
            yield lambda n_tokens: bar.advance(task, n_tokens)
    else:
        show, done = _lines(name), 0

        def add(n_tokens: int) -> None:
            nonlocal done
            done += n_tokens
            show(min(done, total), total)

        yield add


def _bar() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console(sys.stderr), transient=True)


def _lines(name: str) -> ForwardProgress:
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        step = done * _STEPS // total
        if step > shown:
            shown = step
            note(f"{name}: {done} of {total} tokens")

    return show


class ShownAnswer:
    """An answer on the screen: reasoning dim and set off from the content.

    Content alone goes to standard output where that is no terminal; the reasoning then goes to standard error.
    """

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self._aside = sys.stdout if is_terminal else sys.stderr
        has_styles = is_terminal and console(sys.stdout).color_system is not None
        self._dim, self._plain = (_DIM, _PLAIN) if has_styles else ("", "")
        self._is_aside = False

    def add(self, deltas: Iterable[Delta]) -> None:
        """Show what came next."""
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    self._begin_aside()
                    self._aside.write(text)
                    self._aside.flush()
                case ContentDelta(text):
                    self._end_aside("\n\n")
                    sys.stdout.write(text)
                    sys.stdout.flush()

    def end(self, has_come: bool) -> None:
        """Finish the line of an answer of which something has come."""
        is_open = self._is_aside and self._aside is not sys.stdout
        self._end_aside("\n" if is_open else "")
        if has_come:
            print(flush=True)

    def _begin_aside(self) -> None:
        if not self._is_aside:
            self._is_aside = True
            self._aside.write(self._dim)

    def _end_aside(self, gap: str) -> None:
        if self._is_aside:
            self._is_aside = False
            self._aside.write(self._plain + gap)
            self._aside.flush()


def summary(
    name: str,
    seed: int,
    stop_reason: str | None,
    n_prompt: int,
    n_tokens: int,
    streamed_per_token: float,
    stats: SessionStats,
) -> str:
    """One line about one answer; the rates are those of the session."""
    return (
        f"{name}: {n_prompt} prompt + {n_tokens} new tokens, {stop_reason or 'stopped'}, seed {seed}"
        f" | arena {mib(stats.arena_bytes)}, history {mib(stats.history_bytes)},"
        f" streamed {streamed_per_token / MIB:,.2f} MiB per token"
        f" | prompt {stats.prefill_tokens_per_s:,.1f}, answer {stats.decode_tokens_per_s:,.1f} tokens/s"
    )


def stats_table(stats: SessionStats) -> Table:
    """Every counter of a session."""
    table = Table(title="session", title_justify="left")
    table.add_column("counter")
    table.add_column("value", justify="right")
    for name, value in stats.as_dict().items():
        if isinstance(value, int | float):
            shown = f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
            table.add_row(name, f"{shown} ({mib(value)})" if name.endswith("_bytes") else shown)
    if stats.head is not None and stats.head.steps:
        rounds = f"{stats.head.leases:,} with all pages on the device, {stats.head.rounds_in_waves:,} in waves"
        table.add_row("rounds of the MTP head", f"{rounds}, {mib(stats.head.leased_bytes)} leased")
    if stats.draft is not None:
        table.add_row("verify passes", f"{stats.draft.rounds:,} of {stats.draft.tokens_per_round:.2f} tokens each")
        for name, each in stats.draft.by_drafter.items():
            table.add_row(name, f"{each.accepted:,} of {each.proposed:,} accepted, {each.rounds:,} passes")
        if stats.draft.coupled_bound is not None:
            table.add_row("sum of min(p, q)", f"{stats.draft.coupled_bound:.3f}")
        if stats.draft.by_index:
            table.add_row("accepted by index", " ".join(f"{share:.2f}" for share in stats.draft.by_index[:_INDICES]))
    return table
