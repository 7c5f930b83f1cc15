"""What streaming costs on the CPU: a decode pass with a quarter of the history resident against a resident one.

    python tests/bench/streaming_overhead.py [--tokens 1000 3000 6000] [--threads 2]

The bound that is printed beside each row: resident time + copied bytes / memcpy rate / 2, where the memcpy rate is
measured in the same run on buffers larger than the caches. Rows alternate between the two models; medians over passes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from pykvstream import Model, Phase, Session
from pykvstream.runtime.layout import pages_of

PASSES = 24
ROUNDS = 5


def memcpy_rate() -> float:
    """Bytes per second of one thread copying 64 MiB buffers; best of 9."""
    source = np.ones(64 << 20, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    best = 0.0
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        best = max(best, source.nbytes / (time.perf_counter() - started))
    return best


def pass_seconds(session: Session, n_tokens: int) -> float:
    """Median time of single-row passes at this context length; the session is left as it was."""
    times = []
    for i in range(PASSES):
        started = time.perf_counter()
        session.forward([1000 + i], phase=Phase.DECODE)
        times.append(time.perf_counter() - started)
    session.truncate(n_tokens)
    return statistics.median(times)


def fill(session: Session, n_tokens: int) -> None:
    ids = [100 + i * 7919 % 40000 for i in range(n_tokens)]
    session.forward(ids, logits="none")


def quarter_arena_mib(resident: Model, n_tokens: int) -> float:
    """An arena whose decode pool holds a quarter of the pages of every layer, beside the ring."""
    plan = resident.plan
    decode = plan.phase("decode")
    pages = max(decode.pool.floor_pages, pages_of(n_tokens + PASSES) // 4)
    slots = plan.shape.n_layers * pages + max(8, plan.shape.n_layers)
    needed = slots * plan.shape.slot_bytes + decode.workspace_region.size_bytes + 128
    return max(needed, plan.smallest_bytes) / (1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 3000, 6000])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rate = memcpy_rate()
    print(f"memcpy {rate / 1e9:.2f} GB/s; {options.threads} threads; q8_0/q8_0; medians of {ROUNDS} rounds")
    print(f"{'tokens':>8}{'resident ms':>13}{'streamed ms':>13}{'MiB/pass':>10}{'bound ms':>10}{'ratio':>7}")
    common = {"ubatch_size": 64, "threads": options.threads, "ctx_size": 8192}
    for n_tokens in options.tokens:
        with Model.open("demo", **common) as resident:
            arena = quarter_arena_mib(resident, n_tokens)
            with (
                Model.open("demo", arena_mib=arena, **common) as streamed,
                resident.session() as a,
                streamed.session() as b,
            ):
                fill(a, n_tokens)
                fill(b, n_tokens)
                pass_seconds(a, n_tokens), pass_seconds(b, n_tokens)
                rounds = []
                for _ in range(ROUNDS):
                    still = pass_seconds(a, n_tokens)
                    before = b.stats.streamed_bytes
                    moving = pass_seconds(b, n_tokens)
                    rounds.append((still, moving, (b.stats.streamed_bytes - before) / PASSES))
        still, moving, n_bytes = (statistics.median(r[i] for r in rounds) for i in range(3))
        bound = still + n_bytes / rate / 2
        print(
            f"{n_tokens:8d}{still * 1e3:13.2f}{moving * 1e3:13.2f}{n_bytes / 2**20:10.1f}{bound * 1e3:10.2f}"
            f"{moving / bound:7.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
