"""Pictures of measurements, as PNG files. They take ``matplotlib``, which the extra ``[eval]`` brings.

Holds: ``require_matplotlib``, ``plot``. Drawn without a display, from rows alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pykvstream.errors import DeviceError, InvalidArgument, Unsupported
from pykvstream.eval.measure import Row
from pykvstream.eval.perplexity import running_estimates

_DPI = 90
_MIB = 1 << 20


def require_matplotlib() -> None:
    """Raise ``Unsupported`` with what to install where there is no ``matplotlib``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported('a picture needs matplotlib, which is not installed: pip install "pykvstream[eval]"')


def plot(path: Path, command: str, rows: Sequence[Row]) -> None:
    """Draw the picture of a command's rows into a PNG file."""
    require_matplotlib()
    from matplotlib.figure import Figure

    if command not in _PICTURES:
        raise InvalidArgument(f"no picture of {command!r}")
    figure: Any = Figure(layout="constrained")
    _PICTURES[command](figure, rows)
    try:
        # Without the version of the program that drew it the same rows give the same file.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise DeviceError(f"picture {str(path)!r}: {error.strerror}") from None


def _ppl(figure: Any, rows: Sequence[Row]) -> None:
    figure.set_size_inches(7, 3.5)
    axes = figure.subplots()
    values, errors = running_estimates(rows)
    chunks = list(range(1, len(rows) + 1))
    axes.plot(chunks, values)
    low = [value - error for value, error in zip(values, errors, strict=True)]
    high = [value + error for value, error in zip(values, errors, strict=True)]
    axes.fill_between(chunks, low, high, alpha=0.2)
    axes.set(xlabel="chunks", ylabel="perplexity, with error bar", title="Estimate after each chunk")


def _kld(figure: Any, rows: Sequence[Row]) -> None:
    streamed = [row for row in rows if row["reference"] == "resident"]
    typed = [row for row in rows if row["reference"] == "f32"]
    panels = [(draw, part) for draw, part in ((_streamed, streamed), (_typed, typed)) if part]
    figure.set_size_inches(6.5 * max(len(panels), 1), 4)
    for i, (draw, part) in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), i + 1), part)


def _streamed(axes: Any, rows: Sequence[Row]) -> None:
    """Bytes that came through the ring, by the share that was resident; each point says by how much logits differ."""
    for ctx in dict.fromkeys(row["ctx"] for row in rows):
        own = [row for row in rows if row["ctx"] == ctx]
        percents = [row["resident_percent"] for row in own]
        axes.plot(percents, [_float(row["streamed_bytes"]) / _MIB for row in own], "o", label=f"{ctx:,} tokens")
    largest = max(_float(row["max"]) for row in rows)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set(
        xlabel="resident, % of the history",
        ylabel="MiB through the ring",
        title=f"Streamed against resident: {len(rows)} runs, largest KLD {largest:g}",
    )
    axes.legend()


def _typed(axes: Any, rows: Sequence[Row]) -> None:
    """Mean divergence from F32 keys and values, by type, without and with rotation; the longest context alone."""
    longest = max(_float(row["ctx"]) for row in rows)
    rows = [row for row in rows if row["ctx"] == longest]
    names = list(dict.fromkeys(str(row["cache"]) for row in rows))
    kinds = {"off": (-0.2, "unrotated"), "on": (0.2, "rotated"), "none": (0.0, "never rotated")}
    for kind, (shift, label) in kinds.items():
        own = [row for row in rows if row["rotation"] == kind]
        places = [names.index(str(row["cache"])) + shift for row in own]
        if own:
            axes.bar(places, [_float(row["mean"]) for row in own], 0.38, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set(ylabel="mean KLD, nats", title=f"Against F32 keys and values, {longest:,.0f} tokens")
    axes.legend()


def _needle(figure: Any, rows: Sequence[Row]) -> None:
    contexts = list(dict.fromkeys(row["ctx"] for row in rows))
    n_depths = 1 + max(int(_float(row["depth"])) for row in rows)
    figure.set_size_inches(9, 1.6 + 0.7 * len(contexts))
    axes = figure.subplots()
    grid = [[_share(rows, ctx, depth) for depth in range(n_depths)] for ctx in contexts]
    axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for y, shares in enumerate(grid):
        for x, share in enumerate(shares):
            color = "black" if 25 <= share <= 75 else "white"
            axes.text(x, y, f"{share:.0f}", ha="center", va="center", color=color)
    axes.set_yticks(range(len(contexts)), [f"{ctx:,}" for ctx in contexts])
    axes.set_xticks(range(n_depths), [str(i + 1) for i in range(n_depths)])
    resident = min(_float(row["resident_percent"]) for row in rows)
    title = f"Right answers, %; {resident:.0f} % of the history resident"
    axes.set(xlabel="depth of the fact", ylabel="context", title=title)


def _share(rows: Sequence[Row], ctx: object, depth: int) -> float:
    own = [row for row in rows if row["ctx"] == ctx and row["depth"] == depth]
    return 100 * sum(row["is_right"] is True for row in own) / max(len(own), 1)


def _float(value: object) -> float:
    if not isinstance(value, int | float):
        raise InvalidArgument(f"a row has {value!r} where a number belongs")
    return float(value)


_PICTURES = {"ppl": _ppl, "kld": _kld, "needle": _needle}
