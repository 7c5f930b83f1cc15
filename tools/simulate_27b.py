"""The 27B decode step in virtual time: ``python tools/simulate_27b.py [--json FILE] [--png FILE] [--quick]``.

A tape with the weights, states and pages of the hybrid 27B (48 recurrent and 16 attention layers, 4.25 bits per weight,
Q8_0 keys, Q4_0 values) runs on the trace device under the figures measured on one H200 host. Nothing is computed;
pager, ring, executor and policy are the product's own. Per context and arena it prints the critical path of a step, the
limits of bus and memory, and what the rest of the time went to; then the step against the ring's size.

Units: GB are 1e9 bytes, MiB and Ki binary. Times are virtual.
Source: the limits follow from bytes alone: streamed / 55.0 GB/s, and everything read / 4,550 GB/s. That of the bus is
computed for a 32 MiB ring, whichever was used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pykvstream.core.arena import Arena
from pykvstream.core.kv import PAGE_TOKENS, Cache, KvLayer, Seq, record_layout
from pykvstream.core.pager import Pager
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, RowKind, Tape, TensorKind, WeightLayout
from pykvstream.core.trace import (
    TraceCosts,
    TraceDevice,
    TraceEvent,
    TraceReport,
    TraceStream,
    TraceWeight,
    chrome_events,
)
from pykvstream.gguf import GgmlType
from pykvstream.runtime.layout import Placement, Pool
from pykvstream.runtime.policy import Costs, PolicyConfig, ring_target

KI, MIB = 1 << 10, 1 << 20
N_EMBD, N_FF, N_VOCAB, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD = 5120, 17408, 248320, 64, 24, 4, 256
N_ATTENTION = N_LAYERS // 4
QKV_COLS, VALUE_COLS = 10240, 6144
STATE_BYTES = 3 * MIB
"""Of one recurrent layer; read and written once per pass."""
LAYER = KvLayer(N_KV_HEADS, HEAD, HEAD, GgmlType.Q8_0.id, GgmlType.Q4_0.id)
RECORD_BYTES = record_layout(LAYER).record_bytes
FILL_ROWS = 8192
TIMED_STEPS = 6
"""A copy that is under way at a step's end belongs to the next one; over a few steps that averages out."""
LIMIT_RING_BYTES = 32 * MIB
CONTEXTS = (64 * KI, 128 * KI, 192 * KI, 256 * KI)
ARENAS = (1120 * MIB, 2240 * MIB, 4480 * MIB)
H200 = TraceCosts(
    device_bytes_per_s=4_550_000_000_000,
    copy_in_bytes_per_s=55_000_000_000,
    copy_out_bytes_per_s=55_300_000_000,
    op_ns=500,
    wave_ns=500,
    copy_ns=2_600,
    pass_ns=20_000,
)


class Model:
    """Weights by shape, made as the tape asks for them."""

    def __init__(self, device: TraceDevice, tape: Tape, stack: ExitStack) -> None:
        self._device, self._tape, self._stack = device, tape, stack
        self.weight_bytes = 0

    def weight(self, kind: GgmlType, k: int, n: int, layout: WeightLayout = WeightLayout.PANELS) -> int:
        made = self._stack.enter_context(TraceWeight(self._device, kind.id, k, n, layout))
        self.weight_bytes += made.device_bytes
        return self._tape.add_weight(made)

    def linear(self, x: int, outputs: list[int], cols: list[int], kind: GgmlType, *, k: int, u: int = 0) -> None:
        weights = tuple(self.weight(kind, k, n) for n in cols)
        op = Op(OpCode.MATMUL, (x,), tuple(outputs), weights, u=(len(weights), u), f=(1e-6,))
        self._tape.add_op(op)


def _feed_forward(tape: Tape, model: Model, x: int) -> None:
    hidden = tape.add_tensor(N_FF)
    model.linear(x, [hidden], [N_FF, N_FF], GgmlType.IQ4_XS, k=N_EMBD, u=2)
    model.linear(hidden, [x], [N_EMBD], GgmlType.IQ4_XS, k=N_FF, u=1)


def _recurrent(tape: Tape, model: Model, x: int) -> None:
    """Five nodes: projections, recurrence, output, feed forward in two."""
    qkv, gate, out = tape.add_tensor(QKV_COLS), tape.add_tensor(VALUE_COLS), tape.add_tensor(256)
    model.linear(x, [qkv, gate], [QKV_COLS, VALUE_COLS], GgmlType.IQ4_XS, k=N_EMBD)
    # The state stands as a weight of twice its size: it is read and written.
    model.linear(gate, [out], [2 * STATE_BYTES // (4 * VALUE_COLS)], GgmlType.F32, k=VALUE_COLS)
    model.linear(gate, [x], [N_EMBD], GgmlType.IQ4_XS, k=VALUE_COLS, u=1)
    _feed_forward(tape, model, x)


def _attention(tape: Tape, model: Model, x: int) -> None:
    """Six nodes: projections with rotation, the writer, attention, output, feed forward in two."""
    cols = [2 * N_HEADS * HEAD, N_KV_HEADS * HEAD, N_KV_HEADS * HEAD]
    q, k, v = (tape.add_tensor(n) for n in cols)
    model.linear(x, [q, k, v], cols, GgmlType.IQ4_XS, k=N_EMBD)
    layer = tape.add_layer(LAYER)
    tape.add_op(Op(OpCode.KV_WRITE, (k, v), layer=layer))
    # The gate half of q is not read by attention: 48 query heads stand for 24 and their gates.
    out = tape.add_tensor(2 * N_HEADS * HEAD)
    tape.add_op(Op(OpCode.ATTEND, (q,), (out,), layer=layer, u=(2 * N_HEADS,), f=(HEAD**-0.5,)))
    model.linear(out, [x], [N_EMBD], GgmlType.IQ4_XS, k=2 * N_HEADS * HEAD, u=1)
    _feed_forward(tape, model, x)


def decode_tape(device: TraceDevice, stack: ExitStack) -> tuple[Tape, int]:
    """The step for one row, and the bytes of weights and states that it reads and writes."""
    tape = stack.enter_context(Tape(device, 1, 1))
    model = Model(device, tape, stack)
    x = tape.add_tensor(N_EMBD)
    tape.add_op(Op(OpCode.EMBED, (), (x,), (model.weight(GgmlType.Q6_K, N_EMBD, N_VOCAB, WeightLayout.ROWS),)))
    for i in range(N_LAYERS):
        (_attention if i % 4 == 3 else _recurrent)(tape, model, x)
    hidden = tape.add_tensor(N_EMBD, rows=RowKind.OUT)
    logits = tape.add_tensor(N_VOCAB, kind=TensorKind.OUTPUT, rows=RowKind.OUT)
    tape.add_op(Op(OpCode.GATHER, (x,), (hidden,)))
    model.linear(hidden, [logits], [N_VOCAB], GgmlType.Q6_K, k=N_EMBD)
    tape.seal()
    return tape, model.weight_bytes


def fill_tape(device: TraceDevice, stack: ExitStack) -> Tape:
    """Writes rows of every layer, and nothing else: a history without the work of a prompt."""
    tape = stack.enter_context(Tape(device, FILL_ROWS, 1))
    table = stack.enter_context(TraceWeight(device, GgmlType.F32.id, N_KV_HEADS * HEAD, 16, WeightLayout.ROWS))
    x = tape.add_tensor(N_KV_HEADS * HEAD)
    tape.add_op(Op(OpCode.EMBED, (), (x,), (tape.add_weight(table),)))
    for _ in range(N_ATTENTION):
        tape.add_op(Op(OpCode.KV_WRITE, (x, x), layer=tape.add_layer(LAYER)))
    tape.seal()
    return tape


def _pass(pager: Pager, binding: Binding, seq: Seq, n_rows: int, outputs: tuple[np.ndarray, ...] = ()) -> None:
    pager.begin(seq, n_rows)
    out_rows = np.arange(1 if outputs else 0, dtype=np.uint32)
    binding.run(np.zeros(n_rows, np.uint32), out_rows, outputs, CancelFlag())
    pager.end(n_rows)


@dataclass(frozen=True, slots=True)
class Step:
    """Decode steps in a row: measures of all, limits of one in ns, and what the policy would have been told."""

    context: int
    arena_bytes: int
    ring_slots: int
    report: TraceReport
    bus_ns: float
    memory_ns: float
    gap_ns: int
    events: tuple[TraceEvent, ...]

    @property
    def limit_ns(self) -> float:
        return max(self.bus_ns, self.memory_ns)

    @property
    def span_ns(self) -> float:
        return self.report.span_ns / TIMED_STEPS

    @property
    def over(self) -> float:
        """How far above its limit the step is."""
        return self.span_ns / self.limit_ns - 1

    @property
    def last_begin_ns(self) -> int:
        return next(e.begin_ns for e in reversed(self.events) if e.name == "embed")

    @property
    def last_events(self) -> list[TraceEvent]:
        """Those of the last step alone."""
        return [e for e in self.events if e.end_ns > self.last_begin_ns]

    @property
    def measured(self) -> Costs:
        n_pages = self.report.bytes_in // RECORD_BYTES
        per_page = self.report.in_busy_ns / n_pages / 1e9 if n_pages else None
        return Costs(per_page, self.gap_ns / 1e9)


def _gap_ns(events: list[TraceEvent]) -> int:
    """The longest stretch between two waves of streamed pages of one step in which the compute stream had other work.

    Waiting for the next page is no part of it. Both as in the pager's own measure.
    """
    streamed = {(e.layer, page) for e in events if e.stream is TraceStream.RING for page in e.pages}
    longest, busy, is_counting = 0, 0, False
    for event in events:
        if event.stream is not TraceStream.COMPUTE:
            continue
        if event.name == "embed":
            is_counting = False
        elif event.name == "attend wave" and (event.layer, event.pages.start) in streamed:
            longest = max(longest, busy if is_counting else 0)
            busy, is_counting = 0, True
        else:
            busy += event.end_ns - event.begin_ns
    return longest


class Simulation:
    """One context in one arena; ``step(ring_slots)`` places the pool anew and times a step that has settled."""

    def __init__(self, context: int, arena_bytes: int, stack: ExitStack) -> None:
        self.context, self.arena_bytes = context, arena_bytes
        self.device = stack.enter_context(TraceDevice())
        self._tape, self.weight_bytes = decode_tape(self.device, stack)
        workspace_bytes = self._tape.info.workspace_bytes
        arena = stack.enter_context(Arena(self.device, arena_bytes))
        fill_space = stack.enter_context(Arena(self.device, 512 * MIB))
        self.n_slots = (arena_bytes - workspace_bytes - 4096) // RECORD_BYTES
        for each, sizes in ((arena, (workspace_bytes, self.n_slots * RECORD_BYTES)), (fill_space, (512 * MIB,))):
            each.begin()
            for i, n_bytes in enumerate(sizes):
                each.reserve(i, n_bytes)
            each.commit()
        self._pool = stack.enter_context(arena.acquire(1))
        workspace, scratch = stack.enter_context(arena.acquire(0)), stack.enter_context(fill_space.acquire(0))
        cache = stack.enter_context(Cache(self.device, [LAYER] * N_ATTENTION))
        self._pager = stack.enter_context(Pager(self.device, cache))
        self._seq = stack.enter_context(cache.sequence(context + PAGE_TOKENS))
        self._binding = stack.enter_context(Binding(self.device, self._tape, arena, workspace, self._pager))
        fill = stack.enter_context(
            Binding(self.device, fill_tape(self.device, stack), fill_space, scratch, self._pager)
        )
        self._logits = np.zeros((1, N_VOCAB), np.float32)
        # The last passes of the context are steps, so that it holds `context` tokens when one is timed.
        self._fill(fill, context - 64)

    def _fill(self, binding: Binding, n_tokens: int) -> None:
        tail = FILL_ROWS // PAGE_TOKENS + 1
        self._pager.attach(self._pool, Placement((tail,) * N_ATTENTION, 1, FILL_ROWS))
        for begin in range(0, n_tokens, FILL_ROWS):
            _pass(self._pager, binding, self._seq, min(FILL_ROWS, n_tokens - begin))
        self._pager.publish_wait()
        self.device.set_costs(H200)

    @property
    def pool(self) -> Pool:
        return Pool(N_ATTENTION, self.n_slots, 2, self.context // PAGE_TOKENS + 1)

    def streamed_bytes(self, ring_slots: int) -> int:
        """Bytes that one step must bring with a ring of this size."""
        tail_first = self._seq.info.committed_tokens // PAGE_TOKENS
        return RECORD_BYTES * sum(max(0, tail_first + 1 - pages) for pages in self.pool.deal(ring_slots))

    def step(self, ring_slots: int) -> Step:
        ring_slots = max(ring_slots, self.pool.ring_floor)
        self._pager.place(Placement(self.pool.deal(ring_slots), ring_slots, 1))
        for _ in range(2):
            self._run()
        self.device.reset()
        for _ in range(TIMED_STEPS):
            self._run()
        report, events = self.device.report, self.device.events()
        hazards = self.device.hazards()
        if hazards:
            raise SystemExit("\n".join(hazards))
        limit_ring = max(self.pool.ring_floor, min(LIMIT_RING_BYTES // RECORD_BYTES, self.pool.ring_cap))
        kv_bytes = self._seq.info.committed_tokens * RECORD_BYTES // PAGE_TOKENS * N_ATTENTION
        return Step(
            self.context,
            self.arena_bytes,
            ring_slots,
            report,
            self.streamed_bytes(limit_ring) / H200.copy_in_bytes_per_s * 1e9,
            (self.weight_bytes + kv_bytes) / H200.device_bytes_per_s * 1e9,
            _gap_ns(events),
            tuple(events),
        )

    def _run(self) -> None:
        _pass(self._pager, self._binding, self._seq, 1, (self._logits,))

    def policy_ring(self, measured: Costs) -> int:
        """The ring that the policy wants after such a step."""
        config = PolicyConfig(run_pages=16 * MIB // RECORD_BYTES)
        return ring_target(config, self.pool, measured, self.context // PAGE_TOKENS + 1)


@contextmanager
def simulation(context: int, arena_bytes: int) -> Iterator[Simulation]:
    with ExitStack() as stack:
        yield Simulation(context, arena_bytes, stack)


def settled(sim: Simulation) -> Step:
    """The step under the policy's ring: two rounds of measuring and placing are enough to stand still."""
    step = sim.step(sim.pool.unmeasured_ring(16 * MIB // RECORD_BYTES))
    for _ in range(2):
        step = sim.step(sim.policy_ring(step.measured))
    return step


HEADER = (
    "| context | arena MiB | ring slots | streamed GB | step ms | bus limit ms | memory limit ms | above the limit |"
    " copy busy | MiB/copy | nodes | waits ms: ring, load, out | latency ms | host ms |\n" + "|---" * 14 + "|"
)


def row(step: Step) -> str:
    """One line of the table."""
    r = step.report
    ms = 1e-6 / TIMED_STEPS
    name = "bus" if step.bus_ns > step.memory_ns else "memory"
    waits = ", ".join(f"{each * ms:.2f}" for each in (r.ring_wait_ns, r.load_wait_ns, r.out_wait_ns))
    return (
        f"| {step.context // KI} Ki | {step.arena_bytes // MIB} | {step.ring_slots}"
        f" | {r.bytes_in / TIMED_STEPS / 1e9:.2f} | {step.span_ns / 1e6:.2f}"
        f" | {step.bus_ns / 1e6:.2f} | {step.memory_ns / 1e6:.2f} | {step.over:+.1%} ({name})"
        f" | {r.in_busy_ns / r.span_ns:.1%} | {r.bytes_per_copy_in / MIB:.1f} | {r.n_ops // TIMED_STEPS} | {waits}"
        f" | {r.latency_ns * ms:.2f} | {r.host_ns * ms:.2f} |"
    )


def _bars(step: Step, stream: TraceStream, waves: bool) -> list[tuple[float, float]]:
    begin = step.last_begin_ns
    return [
        ((e.begin_ns - begin) / 1e6, (e.end_ns - e.begin_ns) / 1e6)
        for e in step.last_events
        if e.stream is stream and (e.name == "attend wave") is waves
    ]


def draw(step: Step, path: Path) -> bool:
    """A picture of one step and of two of its milliseconds, where matplotlib is installed."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    figure, axes = pyplot.subplots(2, 1, figsize=(12, 5), constrained_layout=True)
    whole = step.span_ns / 1e6
    for axis, window in ((axes[0], (0.0, whole)), (axes[1], (0.0, 2.5))):
        for stream in TraceStream:
            for waves, color in ((False, f"C{int(stream) * 3}"), (True, "tab:orange")):
                axis.broken_barh(_bars(step, stream, waves), (int(stream) - 0.4, 0.8), facecolors=color)
        axis.set_yticks([int(stream) for stream in TraceStream], [stream.name.lower() for stream in TraceStream])
        axis.set_xlim(*window)
        axis.set_xlabel("ms")
    axes[0].set_title(
        f"27B, {step.context // KI} Ki tokens, arena {step.arena_bytes // MIB} MiB, ring {step.ring_slots} slots:"
        f" {whole:.2f} ms, limit {step.limit_ns / 1e6:.2f} ms (orange: waves of attention)"
    )
    figure.savefig(path, dpi=100)
    return True


def ring_study(context: int, arena_bytes: int) -> None:
    with simulation(context, arena_bytes) as sim:
        chosen = settled(sim)
        sizes = (8, 16, 32, 48, 64, 78, 96, 128, 192, 256, 384)
        steps = [sim.step(n) for n in sizes if n <= sim.pool.ring_cap]
    best = min(steps, key=lambda each: each.span_ns)
    gap_us = chosen.gap_ns / 1e3
    print(f"\n{context // KI} Ki, {arena_bytes // MIB} MiB: ring slots and step in ms (gap {gap_us:.0f} us):")
    print("  " + "  ".join(f"{each.ring_slots}: {each.span_ns / 1e6:.2f}" for each in steps))
    loss = chosen.span_ns / best.span_ns - 1
    print(f"  policy {chosen.ring_slots}: {chosen.span_ns / 1e6:.2f}, {loss:+.1%} beside the best of these")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the timeline of one step for Perfetto")
    parser.add_argument("--png", type=Path, help="draw the same step (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="one context and arena, no study of the ring")
    arguments = parser.parse_args()
    cases = [(c, a) for c in CONTEXTS for a in ARENAS] if not arguments.quick else [(128 * KI, 2240 * MIB)]
    print(HEADER)
    for context, arena_bytes in cases:
        with simulation(context, arena_bytes) as sim:
            step = settled(sim)
        print(row(step), flush=True)
        if (context, arena_bytes) == (128 * KI, 2240 * MIB):
            if arguments.json is not None:
                timeline = {"traceEvents": chrome_events(step.last_events)}
                arguments.json.write_text(json.dumps(timeline), encoding="utf-8")
            if arguments.png is not None and not draw(step, arguments.png):
                print("no picture: matplotlib is not installed", file=sys.stderr)
    if not arguments.quick:
        for context, arena_bytes in ((128 * KI, 2240 * MIB), (256 * KI, 2240 * MIB), (64 * KI, 1120 * MIB)):
            ring_study(context, arena_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
