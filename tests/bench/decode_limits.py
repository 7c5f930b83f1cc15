"""How near one-row decoding comes to what binds it: the bytes of the weights, or their dot products.

    python tests/bench/decode_limits.py --bench-types build/native/tests/native/bench_types MODEL [MODEL ...]

Per model: bytes and values of its weight matrices by type, bytes of recurrent state; per type the rate of dot products
with panels that stay in the cache. Plain reading of as many bytes takes turns with tokens. A type is bound by the
slower of reading and dot products, the state by reading, and a model's limit is the sum. Best times are set beside the
best reading, medians beside the median, and `in turn` the median token of each turn beside its own readings: what else
the machine does changes within seconds, and both halves of a turn meet the same of it.
Units: tokens/s, G values/s, GB/s (1e9 bytes). Decode: single tokens behind 64.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pykvstream import Model, Phase
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.models.tensors import check_tensors

ROUNDS, READINGS, TOKENS = 40, 4, 6
"""How often reading and tokens take turns, and how many of each are in one."""
_LINE = re.compile(r"isa (\d+):  rows 1: cached +([\d.]+) G/s")


class Reader:
    """Reads as many bytes as a decode step moves, every thread its own part."""

    def __init__(self, n_bytes: int, n_threads: int) -> None:
        self._parts = [np.ones(n_bytes // 8 // n_threads, np.uint64) for _ in range(n_threads)]
        self._n_bytes = n_bytes

    def rate(self) -> float:
        """GB/s of one time over."""
        workers = [threading.Thread(target=part.max) for part in self._parts]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self._n_bytes / (time.perf_counter() - begin) / 1e9


def dot_rate(program: Path, kind: GgmlType, n_threads: int) -> float:
    """G values/s of dot products with cached panels: what ``bench_types`` says of the best instruction set."""
    command = [str(program), str(n_threads), str(kind.id)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    _, cached = max(_LINE.findall(done.stdout), key=lambda found: int(found[0]))
    return float(cached)


def matrices(path: Path) -> dict[GgmlType, tuple[int, int]]:
    """Values and bytes per type of what a decode step multiplies by: no embedding, no MTP block."""
    values: Counter[GgmlType] = Counter()
    sizes: Counter[GgmlType] = Counter()
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        check_tensors(file, config)
        blocks = {f"blk.{i}." for i in range(config.n_layers)}
        is_tied = "output.weight" not in file.tensors
        for name, info in file.tensors.items():
            block = re.match(r"blk\.\d+\.", name)
            is_used = block.group(0) in blocks if block else is_tied or name != "token_embd.weight"
            if is_used and len(info.shape) == 2 and "conv1d" not in name:
                values[info.type] += info.n_values
                sizes[info.type] += info.n_values // info.shape[0] * info.type.row_bytes(info.shape[0])
    return {kind: (values[kind], sizes[kind]) for kind in values}


@dataclass(frozen=True)
class Turn:
    """One turn of reading and then decoding: rates in GB/s, times of a token in seconds."""

    rates: list[float]
    tokens: list[float]


def measure(path: Path, n_bytes: int, n_threads: int) -> list[Turn]:
    """Tokens one by one, and reading between them: both meet the machine as it is at that moment."""
    turns: list[Turn] = []
    reader = Reader(n_bytes, n_threads)
    with Model.open(path, ctx_size=512, ubatch_size=64, threads=n_threads) as model, model.session() as session:
        session.forward([1] * 64)
        for _ in range(ROUNDS):
            turn = Turn([reader.rate() for _ in range(READINGS)], [])
            for _ in range(TOKENS):
                begin = time.perf_counter()
                session.forward([1], phase=Phase.DECODE)
                turn.tokens.append(time.perf_counter() - begin)
            turns.append(turn)
    return turns


@dataclass(frozen=True)
class Work:
    """What a token takes: per type values and bytes of matrices and G values/s of dot products, and bytes of state."""

    parts: list[tuple[int, int, float]]
    state: int

    def limit(self, rate: float) -> float:
        """Seconds at ``rate`` GB/s of reading: each type at the slower of reading and dot products."""
        parts = (max(n_bytes / rate, n_values / dots) / 1e9 for n_values, n_bytes, dots in self.parts)
        return self.state / rate / 1e9 + sum(parts)


def state_bytes(path: Path) -> int:
    """Bytes of recurrent state that a decode step reads and writes."""
    with GgufFile.open(path) as file:
        hybrid = ModelConfig.from_gguf(file).hybrid
    if hybrid is None:
        return 0
    return 2 * len(hybrid.recurrent_layers) * hybrid.delta.state_bytes


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench-types", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("models", type=Path, nargs="+")
    options = parser.parse_args()
    dots: dict[GgmlType, float] = {}
    for path in options.models:
        found = matrices(path)
        for kind in found:
            if kind not in dots:
                dots[kind] = dot_rate(options.bench_types, kind, options.threads)
        state = state_bytes(path)
        turns = measure(path, sum(n_bytes for _, n_bytes in found.values()) + state, options.threads)
        print(f"{path.name}: {state / 1e6:.1f} MB of recurrent state")
        for kind, (n_values, n_bytes) in found.items():
            sizes = f"{n_values / 1e6:8.1f} M values {n_bytes / 1e6:8.1f} MB"
            print(f"  {kind.name:8} {sizes}, {dots[kind]:.1f} G/s of dot products")
        work = Work([(*found[kind], dots[kind]) for kind in found], state)
        rates = [rate for turn in turns for rate in turn.rates]
        tokens = [token for turn in turns for token in turn.tokens]
        for name, rate, taken in (
            ("best", max(rates), min(tokens)),
            ("median", statistics.median(rates), statistics.median(tokens)),
        ):
            limit = work.limit(rate)
            reached = f"decode {1 / taken:.1f} ({limit / taken:.0%})"
            print(f"  {name:8} reading {rate:.1f} GB/s: limit {1 / limit:.1f} tokens/s, {reached}")
        shares = [work.limit(statistics.median(turn.rates)) / statistics.median(turn.tokens) for turn in turns]
        low, middle, high = statistics.quantiles(shares, n=4)
        print(f"  in turn  {middle:.0%} of the limit (quarters {low:.0%} to {high:.0%})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
