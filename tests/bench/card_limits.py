"""What a card allows and what is reached, in one run: a conversation that grows to 256 Ki tokens, measured on its way.

    python -m tests.bench.card_limits FILE [--device cuda] [--depths 8,32,64,128,192,256] [--arena-mib 2240]
        [--rings 128,192]

FILE is a model of the 27B shape (``python -m tests.bench.shaped_file 27b FILE``). Ceilings come first: copies of 16 MiB
from pinned memory, a kernel that only reads device memory. Then, behind each number of Ki tokens:

- passes of 1 and 6 rows, all pages resident, beside what reading weights, states and pages takes at the ceiling;
- the same in the arena that was named, beside the larger of that and what the bus takes for the pages that a ring of
  32 MiB leaves no room for, whatever ring was used;
- the same with rings of as many MiB as ``--rings`` names, which leave room for fewer pages;
- prompts in passes of 512 rows, resident and in that arena.

Last the time of a pass that the card does not work, and how much of it lies between passes: host time that nothing
hides.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from ctypes import Structure, c_uint64
from dataclasses import dataclass
from pathlib import Path

from pykvstream.engine import Model, Session
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests.bench.cuda_decode import BETWEEN, IDLE, kernel_table, time_steps
from tests.bench.cuda_prefill import tokens, whole_pass
from tests.gpu.kernel_engine import CudaEngine, Macros

MIB = 1 << 20
RING = 32 * MIB
CHUNK = 16 * MIB
READ_BYTES = 8 << 30
CONTEXT = 262144
"""Of the file: the last depth is as far below as what is measured there takes."""
ROWS = 512
PAGE = 256
"""Tokens."""
READ = """
struct params { unsigned long long from, n, to; };
extern "C" __global__ void __launch_bounds__(512) read(const params p)
{
    const uint4 *from = (const uint4 *)p.from;
    const unsigned long long step = (unsigned long long)gridDim.x * 512;
    unsigned int found = 0;
    unsigned long long i = (unsigned long long)blockIdx.x * 512 + threadIdx.x;
    for (; i + 7 * step < p.n; i += 8 * step) {
        uint4 got[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            got[j] = from[i + j * step];
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            found |= got[j].x ^ got[j].y ^ got[j].z ^ got[j].w;
        }
    }
    if (found == 0x12345u) {
        *(unsigned int *)p.to = found;
    }
}
"""


class _Read(Structure):
    _fields_ = (("from_", c_uint64), ("n", c_uint64), ("to", c_uint64))


class Ceilings(CudaEngine):
    """What the driver and one kernel of this file reach."""

    def _compile(self, source: str, macros: Macros) -> bytes:
        return self._compile_text(READ, source, macros)

    def read_rate(self) -> float:
        """Bytes a second from device memory."""
        base = self._check(self._driver.cuMemAlloc(READ_BYTES))
        self._check(self._driver.cuMemsetD8(base, 0, READ_BYTES))
        params = _Read(int(base), READ_BYTES // 16, int(base))
        rates = [
            READ_BYTES / self.seconds(lambda grid=grid: self.run("read", "read", {}, (grid, 1, 1), 512, params), 5)
            for grid in (528, 1056, 2112)
        ]
        self._check(self._driver.cuMemFree(base))
        return max(rates)

    def bus_rate(self) -> float:
        """Bytes a second from pinned memory in pieces of ``CHUNK``."""
        host = self._check(self._driver.cuMemAllocHost(16 * CHUNK))
        base = self._check(self._driver.cuMemAlloc(16 * CHUNK))
        stream = self._driver.CUstream(0)

        def copy() -> None:
            for i in range(16):
                at = (int(base) + i * CHUNK, int(host) + i * CHUNK)
                self._check(self._driver.cuMemcpyHtoDAsync(self._driver.CUdeviceptr(at[0]), at[1], CHUNK, stream))

        rate = 16 * CHUNK / min(self.seconds(copy, 4) for _ in range(3))
        self._check(self._driver.cuMemFree(base))
        self._check(self._driver.cuMemFreeHost(host))
        return rate


@dataclass(frozen=True)
class Bounds:
    """Bytes a second, and what a pass moves at least."""

    bus: float
    read: float
    fixed_bytes: int
    token_bytes: int
    pool_bytes: int

    def resident_s(self, n_tokens: int) -> float:
        return (self.fixed_bytes + n_tokens * self.token_bytes) / self.read

    def streamed_s(self, n_tokens: int) -> float:
        return max(0, n_tokens * self.token_bytes - (self.pool_bytes - RING)) / self.bus


def bounded(model: Model, phase: Phase, arena_bytes: int, ring_bytes: int = RING) -> Placement:
    """As many pages of each layer as an arena of that size has room for beside its ring."""
    layout = model.plan.phases[phase.value]
    record = model.plan.shape.column_bytes // layout.pool.n_layers
    n_ring = max(ring_bytes // record, layout.pool.n_layers)
    pages = (arena_bytes // record - n_ring) // layout.pool.n_layers
    return Placement((pages,) * layout.pool.n_layers, n_ring, layout.max_rows)


def passes(
    session: Session, bounds: Bounds, n_steps: int, name: str, widths: Sequence[int] = (1, 6)
) -> Iterator[str]:
    is_resident, base = name == "resident", 0.0
    for width in widths:
        n_tokens = len(session.tokens)
        before = session.stats.streamed_bytes
        seconds = time_steps(session, width, n_steps)
        moved = (session.stats.streamed_bytes - before) / n_steps
        floor, bus = bounds.resident_s(n_tokens), bounds.streamed_s(n_tokens)
        limit = floor if is_resident else max(floor, bus)
        base = base or seconds
        yield (
            f"{name:<9}{n_tokens:7} tokens {width} rows {seconds * 1e3:8.3f} ms"
            f"  limit {limit * 1e3:7.3f} ms  {seconds / limit:5.2f} x  {seconds / base:5.2f} x 1 row"
            f"  {width / seconds:7.1f} tokens/s  {moved / seconds / 1e9:5.1f} GB/s over the bus"
        )


def prompts(session: Session, name: str) -> str:
    n_tokens = len(session.tokens)
    seconds = whole_pass(session, ROWS)
    spent = f"{seconds * 1e3:8.2f} ms of {ROWS} rows {ROWS / seconds:7.0f} tokens/s"
    return f"prompt, {name:<9}{n_tokens:7} tokens before {spent}"


def place_all(model: Model, placements: dict[Phase, Placement]) -> None:
    for phase, placement in placements.items():
        model.place(phase, placement)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depths", default="8,32,64,128,192,256")
    parser.add_argument("--arena-mib", type=int, default=2240)
    parser.add_argument("--rings", type=lambda text: [int(mib) for mib in text.split(",")], default=[])
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    depths = [int(depth) * 1024 for depth in options.depths.split(",")]
    engine = Ceilings()
    bus, read = engine.bus_rate(), engine.read_rate()
    print(f"bus {bus / 1e9:.1f} GB/s, device memory {read / 1e9:.0f} GB/s", flush=True)
    n_more = 2 * 7 * ROWS + (8 + len(options.rings)) * 7 * options.steps + 1024
    ctx = min(max(depths) + n_more, CONTEXT)
    with Model.open(
        options.file, device=options.device, ctx_size=ctx, cache_type_k="q8_0", cache_type_v="q4_0", ubatch_size=ROWS
    ) as model:
        hybrid = model.config.hybrid
        state = 0 if hybrid is None else len(hybrid.recurrent_layers) * hybrid.delta.state_bytes
        token_bytes = model.plan.shape.column_bytes // PAGE
        bounds = Bounds(bus, read, model.report.weight_bytes + 2 * state, token_bytes, options.arena_mib * MIB)
        wide = {phase: model.plan.phases[phase.value].placement for phase in (Phase.PREFILL, Phase.DECODE)}
        narrow = {phase: bounded(model, phase, bounds.pool_bytes) for phase in wide}
        with model.session() as session:
            for depth in depths:
                grow(session, min(depth, ctx - n_more))
                place_all(model, wide)
                print("\n".join(passes(session, bounds, options.steps, "resident")), flush=True)
                print(prompts(session, "resident"), flush=True)
                place_all(model, narrow)
                print("\n".join(passes(session, bounds, options.steps, "arena")), flush=True)
                print(prompts(session, "arena"), flush=True)
                for mib in options.rings:
                    model.place(Phase.DECODE, bounded(model, Phase.DECODE, bounds.pool_bytes, mib * MIB))
                    print(*passes(session, bounds, options.steps, f"ring {mib}", (1,)), flush=True)
                place_all(model, wide)
            print_idle(session, options.steps)


def grow(session: Session, depth: int) -> None:
    """By a prompt, up to ``depth`` tokens."""
    at = len(session.tokens)
    if at < depth:
        begin = time.perf_counter()
        session.forward(tokens(depth - at, at))
        spent = time.perf_counter() - begin
        print(f"prompt from {at} to {depth} tokens: {spent:.1f} s, {(depth - at) / spent:.0f} tokens/s", flush=True)


def print_idle(session: Session, n_steps: int) -> None:
    seconds = time_steps(session, 1, n_steps)
    table = kernel_table(session, 1, 8)
    spent = {name: float(us) for us, _, _, name in (line.split(maxsplit=3) for line in table[1:])}
    whole, between = sum(spent.values()), spent.get(BETWEEN, 0.0)
    busy = whole - between - spent.get(IDLE, 0.0)
    print("\n".join(table))
    share = 100 * (1 - busy / 1e6 / seconds)
    print(f"card at work {busy / 1e3:.3f} ms of a pass of {seconds * 1e3:.3f} ms: {share:.1f} % idle")
    print(f"while recorded, {whole / 1e3:.3f} ms: between passes {between:.0f} us, {100 * between / whole:.1f} % of it")
    assert busy > 0


if __name__ == "__main__":
    main()
