"""The 27B decode step in virtual time: ``python -m tools.simulate_27b [--json FILE] [--png FILE] [--quick]``.

The tape of the hybrid 27B (48 recurrent and 16 attention layers, 4.25 bits per weight, Q8_0 keys, Q4_0 values) runs on
the trace device under the figures measured on one H200 host. Nothing is computed, and the file holds no values; graph,
tape, layout, pager, ring, executor and policy are the product's own. Per context and arena it prints the critical path
of a step, the limits of bus and memory, and what the rest of the time went to; then the step against the ring's size.

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
from tempfile import TemporaryDirectory

from pykvstream.core.kv import PAGE_TOKENS
from pykvstream.core.trace import TraceCosts, TraceDevice, TraceEvent, TraceReport, TraceStream, chrome_events
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.layout import Placement, Pool
from pykvstream.runtime.policy import Costs, PolicyConfig, ring_target
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions
from tools.hybrid_outline import OUTLINE_27B, write_outline

KI, MIB = 1 << 10, 1 << 20
UBATCH = 2048
LOG_ROWS = 9
"""The widest draft and one row."""
TIMED_STEPS = 6
"""A copy that is under way at a step's end belongs to the next one; over a few steps that averages out."""
LIMIT_RING_BYTES = 32 * MIB
FIRST_OP = "rope_table"
"""With it a step begins."""
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
    record_bytes: int
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
        return next(e.begin_ns for e in reversed(self.events) if e.name == FIRST_OP)

    @property
    def last_events(self) -> list[TraceEvent]:
        """Those of the last step alone."""
        return [e for e in self.events if e.end_ns > self.last_begin_ns]

    @property
    def measured(self) -> Costs:
        n_pages = self.report.bytes_in // self.record_bytes
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
        if event.name == FIRST_OP:
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
        folder = stack.enter_context(TemporaryDirectory())
        path = Path(folder) / "27b.gguf"
        write_outline(path, OUTLINE_27B)
        file = stack.enter_context(GgufFile.open(path))
        self.device = stack.enter_context(TraceDevice())
        options = TargetOptions(
            GgmlType.Q8_0, GgmlType.Q4_0, UBATCH, context + PAGE_TOKENS, log_rows=LOG_ROWS, checkpoint_bytes=0
        )
        blueprint = Blueprint(file, ModelConfig.from_gguf(file), self.device, options)
        stack.callback(blueprint.close)
        self._target = Target(self.device, blueprint, arena_bytes)
        stack.callback(self._target.close)
        self._session = TokenSession(self._target, context + PAGE_TOKENS)
        stack.callback(self._session.close)
        self.record_bytes = blueprint.shape.slot_bytes
        self.n_layers = blueprint.shape.n_layers
        # A step reads and writes the state of every recurrent layer.
        self.work_bytes = blueprint.weights.device_bytes + 2 * blueprint.slot_bytes
        self._plan = self._target.plan.phase("decode")
        # The last passes of the context are steps, so that it holds `context` tokens when one is timed.
        self._session.forward([1] * (context - 64), logits="none")
        self._target.publish_wait()
        self.device.set_costs(H200)

    @property
    def pool(self) -> Pool:
        return self._plan.pool

    def streamed_bytes(self, ring_slots: int) -> int:
        """Bytes that one step must bring with a ring of this size."""
        tail_first = self._session.n_cached // PAGE_TOKENS
        return self.record_bytes * sum(max(0, tail_first + 1 - pages) for pages in self.pool.deal(ring_slots))

    def step(self, ring_slots: int) -> Step:
        ring_slots = max(ring_slots, self.pool.ring_floor)
        self._target.place(Phase.DECODE, Placement(self.pool.deal(ring_slots), ring_slots, self._plan.max_rows))
        for _ in range(2):
            self._run()
        self.device.reset()
        for _ in range(TIMED_STEPS):
            self._run()
        report, events = self.device.report, self.device.events()
        hazards = self.device.hazards()
        if hazards:
            raise SystemExit("\n".join(hazards))
        limit_ring = max(self.pool.ring_floor, min(LIMIT_RING_BYTES // self.record_bytes, self.pool.ring_cap))
        kv_bytes = self._session.n_cached * self.record_bytes // PAGE_TOKENS * self.n_layers
        return Step(
            self.context,
            self.arena_bytes,
            ring_slots,
            report,
            self.streamed_bytes(limit_ring) / H200.copy_in_bytes_per_s * 1e9,
            (self.work_bytes + kv_bytes) / H200.device_bytes_per_s * 1e9,
            _gap_ns(events),
            self.record_bytes,
            tuple(events),
        )

    def _run(self) -> None:
        self._session.forward([1], phase=Phase.DECODE)

    def policy_ring(self, measured: Costs) -> int:
        """The ring that the policy wants after such a step."""
        config = PolicyConfig(run_pages=self.run_pages)
        return ring_target(config, self.pool, measured, self.context // PAGE_TOKENS + 1)

    @property
    def run_pages(self) -> int:
        """Pages of one copy."""
        return self._target.plan.shape.run_pages


@contextmanager
def simulation(context: int, arena_bytes: int) -> Iterator[Simulation]:
    with ExitStack() as stack:
        yield Simulation(context, arena_bytes, stack)


def settled(sim: Simulation) -> Step:
    """The step under the policy's ring: two rounds of measuring and placing are enough to stand still."""
    step = sim.step(sim.pool.unmeasured_ring(sim.run_pages))
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
