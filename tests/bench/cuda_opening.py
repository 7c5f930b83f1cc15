"""How long a start on a card takes, and what of it is beyond bringing the file over the bus (limits: 2 s, file cached).

    python -m tests.bench.cuda_opening MODEL [--times N] [--ctx N]

Order: the file is read once, so that it is in the page cache; a pinned copy of 1 GiB measures the bus; then the model
is opened N times in processes of their own. The first start may compile kernels: it says how many.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

OPEN = """
import sys, time
began = time.perf_counter()
from pykvstream.engine import Model
imported = time.perf_counter()
compiled = [0, imported]
weights = []
def kernels(done, total):
    compiled[:] = [total, time.perf_counter()]
def loaded(name, n_bytes):
    weights.append((time.perf_counter(), n_bytes))
path, ctx_size = sys.argv[1], int(sys.argv[2])
with Model.open(path, device="cuda", ctx_size=ctx_size, progress=loaded, kernel_progress=kernels) as model:
    opened = time.perf_counter()
    with model.session() as session:
        session.forward([1, 2, 3])
    first = time.perf_counter()
print(f"import {imported - began:.2f} s; open {opened - imported:.2f} s: {compiled[0]} kernels compiled,"
      f" first weight after {weights[0][0] - imported:.2f} s, last after {weights[-1][0] - imported:.2f} s;"
      f" first pass {first - opened:.2f} s")
print(opened - imported)
"""


def bus_bytes_per_s() -> float:
    """Pinned host memory to the card, 1 GiB in pieces of 16 MiB, the best of 3."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for at in range(0, 1 << 30, 16 << 20):
            device[at : at + (16 << 20)].copy_(host[at : at + (16 << 20)], non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return (1 << 30) / best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--ctx", type=int, default=8192)
    args = parser.parse_args()
    n_bytes = args.model.stat().st_size
    with args.model.open("rb", buffering=0) as file:
        while file.readinto(bytearray(64 << 20)):
            pass
    bus = bus_bytes_per_s()
    print(f"{n_bytes / 1e9:.2f} GB, bus {bus / 1e9:.1f} GB/s: {n_bytes / bus:.2f} s at bus speed", flush=True)
    for _ in range(args.times):
        command = [sys.executable, "-c", OPEN, str(args.model), str(args.ctx)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        *lines, seconds = done.stdout.splitlines()
        print("\n".join(lines), f"\n  {float(seconds) - n_bytes / bus:.2f} s beyond the bus", flush=True)


if __name__ == "__main__":
    main()
