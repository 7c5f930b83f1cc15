"""``pykvstream eval``: measure, show, write.

Holds: ``run``. Exit code 1 where a row breaks a promise: a streamed run whose logits or answers are not the resident
one's.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from pykvstream.cli.options import (
    PROGRAM,
    DivergenceOptions,
    EvalOptions,
    EvalOutputOptions,
    NeedleOptions,
    PerplexityOptions,
)
from pykvstream.cli.render import console, measuring, note
from pykvstream.cli.session import open_model, read_text
from pykvstream.eval.divergence import Divergence
from pykvstream.eval.measure import Measure, Row, run_measure
from pykvstream.eval.needle import Needles
from pykvstream.eval.opening import CachePair, Opening
from pykvstream.eval.perplexity import Perplexity
from pykvstream.eval.plots import plot, require_matplotlib
from pykvstream.eval.state import RunState
from pykvstream.eval.table import make_folder, write_csv, write_json

_MOST_SHOWN = 60
_WIDTH = 160


def run(options: EvalOptions) -> int:
    """Measure what was asked for. Raises ``KvStreamError``."""
    output = options.output
    if output.plot:
        require_matplotlib()
    if output.folder is not None:
        make_folder(output.folder)
    with _measure(options) as measure:
        state = RunState(measure.name, measure.arguments, _path(output, measure.name, "state.json"))
        if state.n_rows:
            note(f"{state.n_rows} of {len(measure.cells)} rows are there already")
        total = sum(cell.n_tokens for cell in measure.cells)
        with measuring(f"eval {measure.name}", total, output.progress) as on_tokens:
            rows = run_measure(measure, state, on_tokens)
        return _report(measure, rows, output)


@contextmanager
def _measure(options: EvalOptions) -> Iterator[Measure]:
    match options:
        case PerplexityOptions():
            text = read_text(options.text_file, "text")
            own = options.model
            arena = "the default" if own.arena_mib is None else f"{own.arena_mib} MiB"
            opened = f"{own.cache_type_k}/{own.cache_type_v}, rotation {own.kv_rotation}, arena {arena}"
            with (
                open_model(own, options.output.progress) as model,
                Perplexity(model, text, n_chunks=options.n_chunks, opened=opened) as measure,
            ):
                yield measure
        case DivergenceOptions():
            yield Divergence(
                _opening(options),
                read_text(options.text_file, "text"),
                contexts=options.contexts,
                pairs=[CachePair.parse(pair) for pair in options.cache_types],
                percents=options.percents,
                references=options.references,
            )
        case NeedleOptions():
            around = None if options.text_file is None else read_text(options.text_file, "text")
            with Needles(
                _opening(options),
                CachePair.parse(options.cache_types),
                contexts=options.contexts,
                depths=options.depths,
                n_repeats=options.n_repeats,
                percent=options.percent,
                only_nonresident=options.only_nonresident,
                text=around,
                seed=options.seed,
            ) as needles:
                yield needles


def _opening(options: DivergenceOptions | NeedleOptions) -> Opening:
    return Opening(options.model, options.device, options.ubatch_size, options.threads)


def _path(output: EvalOutputOptions, command: str, suffix: str) -> Path | None:
    return None if output.folder is None else output.folder / f"{command}.{suffix}"


def _report(measure: Measure, rows: list[Row], output: EvalOutputOptions) -> int:
    summary = measure.summary(rows)
    again = shlex.join((PROGRAM, *output.argv))
    result = {
        "command": measure.name, "arguments": measure.arguments, "rows": rows, "summary": summary, "again": again
    }  # fmt: skip
    if output.folder is not None:
        write_csv(output.folder / f"{measure.name}.csv", rows)
        write_json(output.folder / f"{measure.name}.json", result)
        if output.plot:
            plot(output.folder / f"{measure.name}.png", measure.name, rows)
    if output.json:
        print(json.dumps(result))
    else:
        _show(measure, rows, summary)
        print(f"again: {again}")
    if summary["broken"]:
        note(f"{PROGRAM}: error: {summary['broken']} rows of the streamed run differ from the resident run")
    return 1 if summary["broken"] else 0


def _show(measure: Measure, rows: list[Row], summary: Row) -> None:
    out = console(sys.stdout)
    if not sys.stdout.isatty():
        out.width = _WIDTH
    table = Table()
    for column in measure.columns:
        table.add_column(column.title, justify="right")
    for row in rows[-_MOST_SHOWN:]:
        table.add_row(*(column.text(row) for column in measure.columns))
    if len(rows) > _MOST_SHOWN:
        out.print(f"the last {_MOST_SHOWN} of {len(rows)} rows")
    out.print(table)
    if measure.name == "ppl":
        out.print(f"PPL {summary['ppl']:.4f} +/- {summary['error']:.5f} over {summary['tokens']:,} tokens")
    else:
        out.print(", ".join(f"{name} {_plain(value)}" for name, value in summary.items()))


def _plain(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
