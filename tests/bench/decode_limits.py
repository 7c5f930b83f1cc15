"""How near one-row decoding comes to what binds it: the bytes of the weights, or their dot products.

    python tests/bench/decode_limits.py --bench-types build/native/tests/native/bench_types MODEL [MODEL ...]

Per model: bytes and values of its weight matrices by type; per type the rate of dot products with panels that stay in
the cache and the rate of plain reading, both measured here and now by the same number of threads. A type is bound by
the slower of the two, and a model's limit is the sum over its types.
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
from pathlib import Path

import numpy as np

from pykvstream import Model, Phase
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.models.tensors import check_tensors

TOKENS = 120
_LINE = re.compile(r"isa (\d+):  rows 1: cached +([\d.]+) G/s")


def read_rate(n_bytes: int, n_threads: int) -> float:
    """GB/s of reading as many bytes as the weights have, again and again, every thread its own part."""
    parts = [np.ones(n_bytes // 8 // n_threads, np.uint64) for _ in range(n_threads)]
    best = 0.0
    for _ in range(12):
        workers = [threading.Thread(target=part.max) for part in parts]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, n_bytes / (time.perf_counter() - begin) / 1e9)
    return best


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


def decode_rate(path: Path, n_threads: int) -> tuple[float, float]:
    """Tokens per second, one by one: of the shortest time, as the limits are best times, and of the median."""
    taken: list[float] = []
    with Model.open(path, ctx_size=512, ubatch_size=64, threads=n_threads) as model, model.session() as session:
        session.forward([1] * 64)
        for _ in range(TOKENS):
            begin = time.perf_counter()
            session.forward([1], phase=Phase.DECODE)
            taken.append(time.perf_counter() - begin)
    return 1 / min(taken), 1 / statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench-types", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("models", type=Path, nargs="+")
    options = parser.parse_args()
    rates: dict[GgmlType, float] = {}
    for path in options.models:
        found = matrices(path)
        for kind in found:
            if kind not in rates:
                rates[kind] = dot_rate(options.bench_types, kind, options.threads)
        memory = read_rate(sum(n_bytes for _, n_bytes in found.values()), options.threads)
        seconds = 0.0
        print(f"{path.name}: reading {memory:.1f} GB/s")
        for kind, (n_values, n_bytes) in found.items():
            by_bytes, by_dots = n_bytes / memory / 1e9, n_values / rates[kind] / 1e9
            seconds += max(by_bytes, by_dots)
            bound = "bytes" if by_bytes > by_dots else "dot products"
            sizes = f"{n_values / 1e6:8.1f} M values {n_bytes / 1e6:8.1f} MB"
            times = f"{by_bytes * 1e3:6.2f} ms by bytes, {by_dots * 1e3:6.2f} ms at {rates[kind]:.1f} G/s"
            print(f"  {kind.name:8} {sizes}: {times}: {bound}")
        best, median = decode_rate(path, options.threads)
        print(f"  decode, tokens/s: {best:.1f} at best ({best * seconds:.0%}), {median:.1f} in the median"
              f" ({median * seconds:.0%}), limit {1 / seconds:.1f}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
