"""Passes over long histories on a card, beside what its bus and its memory allow in the same run.

    python -m tests.bench.cuda_limits MODEL [--contexts 8,32,64,128,256] [--arena-mib 2240] [--rows 1,6] [--rings 0,96]

Histories are made up: one real page of each layer, again and again, in host memory; the recurrent state is that of
the page's end, renumbered. Times do not depend on what is in them. ``--rings`` are slots of the decode pool, 0 for
the policy's choice.
A limit counts a ring of 32 MiB, whatever was used: ``max(streamed / bus, (weights + state twice + pages) / memory)``.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from pykvstream.core.cuda import CardOptions, CudaDevice
from pykvstream.core.device import DeviceFlag
from pykvstream.core.tape import CancelFlag
from pykvstream.engine import Model
from pykvstream.runtime.context import Context
from pykvstream.runtime.layout import PAGE_TOKENS, Placement
from pykvstream.runtime.target import Phase, Target

CHECKSUM = """
#include <stdint.h>
#include <string.h>
uint64_t checksum(const uint8_t *bytes, uint64_t n)
{
    uint64_t sum = n;
    for (uint64_t at = 0; at < n; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, n - at < 8 ? n - at : 8);
        sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        sum = sum << 29 | sum >> 35;
    }
    return sum;
}
"""
READ = """
extern "C" __global__ void read_all(const uint4 *p, unsigned long long n, unsigned *out)
{
    unsigned sum = 0;
    const unsigned long long stride = gridDim.x * 512ull;
    for (unsigned long long i = blockIdx.x * 512ull + threadIdx.x; i + 3 * stride < n; i += 4 * stride) {
        const uint4 a = __ldcs(p + i), b = __ldcs(p + i + stride);
        const uint4 c = __ldcs(p + i + 2 * stride), d = __ldcs(p + i + 3 * stride);
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (sum == 0x12345678u) { *out = sum; }
}
"""
POSITION_AT = 24  # of the folded tokens in a state's image
RING_BYTES = 32 << 20


def ceilings() -> tuple[float, float]:
    """Bytes a second over the bus, 32 MiB a copy, and out of the card's memory."""
    import torch

    from pykvstream.kernels.nvrtc import load_compiler

    core = load_compiler()

    size = 32 << 20
    host = torch.empty(8 * size, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(8 * size, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(8):
            card[i * size : (i + 1) * size].copy_(host[i * size : (i + 1) * size], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 8 * size / (time.perf_counter() - begin))
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    options = core.ProgramOptions(arch=f"sm_{device.arch}", std="c++17")
    kernel = core.Program(READ, "c++", options).compile("cubin").get_kernel("read_all")
    config = core.LaunchConfig(grid=528, block=512)
    big = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    read = 0.0
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(4):
            n_words = np.uint64(big.numel() // 16)
            core.launch(stream, config, kernel, big.data_ptr(), n_words, card.data_ptr())
        stream.sync()
        read = max(read, 4 * big.numel() / (time.perf_counter() - begin))
    del big, card, host
    torch.cuda.empty_cache()
    return best, read


class Histories:
    """Made-up contexts of a target."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        source = folder / "checksum.c"
        source.write_text(CHECKSUM, encoding="ascii")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(folder / "checksum.so"), str(source)], check=True)
        self._sum = ctypes.CDLL(str(folder / "checksum.so")).checksum
        self._sum.restype = ctypes.c_uint64
        with closing(target.context(PAGE_TOKENS)) as context:
            target.enter(Phase.PREFILL)
            tokens = (np.arange(PAGE_TOKENS) % 1000).astype(np.uint32)
            none = np.empty((0, target.n_vocab_rows), np.float32)
            target.run(context, tokens, np.empty(0, np.uint32), none, CancelFlag())
            target.publish_wait()
            self._records = [context.seq.read_page(layer, 0) for layer in range(len(target.records))]
            self._image = None if context.state is None else context.state.save()

    def make(self, n_tokens: int) -> Context:
        """A context of ``n_tokens``, whole pages."""
        context = self._target.context(self._target.plan.ctx_tokens)
        context.seq.append(n_tokens)
        context.seq.commit(n_tokens)
        for page in range(n_tokens // PAGE_TOKENS):
            for layer, record in enumerate(self._records):
                context.seq.write_page(layer, page, record, PAGE_TOKENS)
        if context.state is not None and self._image is not None:
            image = self._image.copy()
            image[POSITION_AT : POSITION_AT + 8].view(np.uint64)[0] = n_tokens
            body = image[:-8]
            total = self._sum(body.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(len(body)))
            image[-8:].view(np.uint64)[0] = total
            context.state.load(image)
            context.state.attach(context.seq)
        return context


def time_passes(target: Target, context: Context, width: int, n_steps: int) -> list[float]:
    out = np.empty((width, target.n_vocab_rows), np.float32)
    rows = np.arange(width, dtype=np.uint32)
    spent = []
    for step in range(n_steps):
        tokens = ((rows + 7 * step) % 1000).astype(np.uint32)
        begin = time.perf_counter()
        target.run(context, tokens, rows, out, CancelFlag())
        spent.append(time.perf_counter() - begin)
    return spent


def report(model: Model, options: argparse.Namespace, bus: float, memory: float, kind: str) -> None:
    target: Target = model._target
    config = model.config
    state = 0 if config.hybrid is None else len(config.hybrid.recurrent_layers) * config.hybrid.delta.state_bytes
    column = sum(record.record_bytes for record in target.records)
    slot = max(record.record_bytes for record in target.records)
    pool = model.plan.phases[Phase.DECODE.value].pool
    ring_slots = -(-RING_BYTES // slot)
    n_steps = options.steps
    with tempfile.TemporaryDirectory() as folder:
        histories = Histories(target, Path(folder))
        for kib in options.contexts:
            begin = time.perf_counter()
            context = histories.make(kib * 1024 - PAGE_TOKENS)
            print(f"{kib} Ki tokens made in {time.perf_counter() - begin:.1f} s", flush=True)
            with closing(context):
                n_pages = kib * 1024 // PAGE_TOKENS
                fits = n_pages * pool.n_layers <= pool.n_slots
                streamed = 0 if fits else n_pages * pool.n_layers - (pool.n_slots - ring_slots)
                target.enter(Phase.DECODE)
                for ring in options.rings:
                    if ring and not fits:
                        max_rows = model.plan.phases[Phase.DECODE.value].max_rows
                        target.place(Phase.DECODE, Placement(pool.deal(ring), ring, max_rows))
                    one = 0.0
                    for width in options.rows:
                        time_passes(target, context, width, n_steps // 2 if ring else n_steps)
                        before, began = target.pager_info, time.perf_counter()
                        spent = time_passes(target, context, width, n_steps)
                        after = target.pager_info
                        typical = statistics.median(spent)
                        one = one or typical
                        moved = (after.streamed_bytes - before.streamed_bytes) / n_steps
                        by_bus = streamed * slot / bus
                        by_memory = (model.report.weight_bytes + 2 * state + n_pages * column) / memory
                        limit = max(by_bus, by_memory)
                        used = target.placement_of(Phase.DECODE).ring_slots
                        print(
                            f"{kind:<22} {kib:>4} Ki {width:>2} rows ring {used:>4}: {typical * 1e3:8.3f} ms"
                            f" (best {min(spent) * 1e3:.3f}, mean {(time.perf_counter() - began) / n_steps * 1e3:.3f}),"
                            f" limit {limit * 1e3:.3f} (bus {by_bus * 1e3:.3f}, memory {by_memory * 1e3:.3f}),"
                            f" ratio {typical / limit:.3f}, to 1 row {typical / one:.3f}, moved {moved / 1e9:.3f} GB"
                            f" at {moved / typical / 1e9:.1f} GB/s, gap {after.gap_ns / 1e6:.2f} ms",
                            flush=True,
                        )
                    if fits:
                        break


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--contexts", type=numbers, default=[8, 32, 64, 128, 256])
    parser.add_argument("--arena-mib", type=float, default=2240)
    parser.add_argument("--rows", type=numbers, default=[1, 6])
    parser.add_argument("--rings", type=numbers, default=[0, 96])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--modes", default="counters,events")
    parser.add_argument("--ctx", type=int, default=262144)
    options = parser.parse_args()
    bus, memory = ceilings()
    print(f"ceilings: bus {bus / 1e9:.1f} GB/s, memory {memory / 1e9:.0f} GB/s", flush=True)
    for mode in options.modes.split(","):
        name, _, flag = mode.partition("-")
        flags = DeviceFlag.NO_GRAPHS if flag else DeviceFlag.NONE
        measure(mode, CudaDevice(flags=flags, options=CardOptions(name)), options, bus, memory)


def measure(kind: str, card: Any, options: argparse.Namespace, bus: float, memory: float) -> None:
    from pykvstream.runtime import opening as engine

    begin = time.perf_counter()
    before, engine.open_device = engine.open_device, lambda *_: card
    try:
        model = Model.open(
            options.model, device="cuda", arena_mib=options.arena_mib, ctx_size=options.ctx, cache_type_k="q8_0",
            cache_type_v="q4_0",
        )  # fmt: skip
    finally:
        engine.open_device = before
    with model:
        print(f"{kind}: opened in {time.perf_counter() - begin:.1f} s", flush=True)
        report(model, options, bus, memory, kind)
        info = card.info
        used = info.memory_bytes - info.memory_free_bytes
        print(f"{kind}: device {info.device_bytes / 2**20:.0f} MiB counted, {used / 2**20:.0f} MiB in use")


if __name__ == "__main__":
    main()
