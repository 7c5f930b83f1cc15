"""Prompts on a card: tokens a second of passes behind histories of some lengths, and where the time of one goes.

    python -m tests.bench.cuda_prefill [--layers 8] [--rows 512] [--depths 0,8192,32768] [--type IQ4_XS] [--kernels]

The file is that of ``tests.bench.cuda_decode``: layers as wide as those of a 27B model, three of four recurrent. With
``--kernels`` a pass is recorded by CUPTI, which torch brings, and device time is summed by kernel.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from pykvstream.engine import Model, Session
from tests.bench.cuda_decode import write

LAYERS_27B = 64


def tokens(n: int, seed: int) -> list[int]:
    return [(i * 7 + seed * 131) % 1000 for i in range(n)]


def advance(session: Session, depth: int) -> None:
    """Fill the history up to ``depth`` tokens."""
    while len(session.tokens) < depth:
        at = len(session.tokens)
        session.forward(tokens(min(4096, depth - at), at))


def whole_pass(session: Session, rows: int) -> float:
    """Seconds of a pass that takes all the rows it may, of five in a row; the last of a prompt may be cut."""
    ends: list[tuple[int, float]] = []
    session.forward(tokens(6 * rows, 1), on_progress=lambda done, total: ends.append((done, time.perf_counter())))
    spent = [b[1] - a[1] for a, b in pairwise(ends) if b[0] - a[0] == rows]
    return sum(spent) / len(spent)


def kernel_table(session: Session, rows: int) -> list[str]:
    """Device microseconds and launches of the next pass by kernel, longest first."""
    import torch  # CUPTI is what is wanted of it

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        session.forward(tokens(rows, 5))  # two passes: what ends a prompt is a pass of its own
    entries = [(entry.device_time_total, entry.count, entry.key) for entry in profile.key_averages()]
    return [
        f"    {spent:10.1f} us {count:5} {name}" for spent, count, name in sorted(entries, reverse=True) if spent > 0
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--depths", default="0,8192,32768,131072")
    parser.add_argument("--type", default="IQ4_XS")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    depths = [int(depth) for depth in options.depths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wide.gguf"
        write(path, options.layers, options.type)
        ctx = max(depths) + 8 * options.rows
        with Model.open(
            path, device="cuda", ctx_size=ctx, cache_type_k="q8_0", cache_type_v="q4_0", ubatch_size=options.rows
        ) as model:
            for depth in depths:
                with model.session() as session:
                    advance(session, depth)
                    spent = whole_pass(session, options.rows)
                    whole = options.rows / spent * options.layers / LAYERS_27B
                    print(
                        f"{depth:7} tokens before: {spent * 1e3:8.2f} ms a pass of {options.rows} rows, "
                        f"{options.rows / spent:8.0f} tokens/s, of {LAYERS_27B} layers {whole:6.0f}",
                        flush=True,
                    )
                    if options.kernels:
                        print("\n".join(kernel_table(session, options.rows)), flush=True)


if __name__ == "__main__":
    main()
