"""Speed on a card: prompts, tokens and verify passes, resident and streamed, of layers as wide as those of a 27B model.

    python -m tests.bench.cuda_decode [--layers 8] [--tokens 8192] [--steps 32] [--type Q4_K] [--kernels]
        [--device cuda] [--rows 1,2,4,6,8,16,49] [--head Q6_K] [--file FILE]

The file is random: rows repeat, so that it is written in seconds. Each figure stands beside what it moves: weights,
state and pages of a pass over its time. With ``--kernels`` some passes are recorded by CUPTI, which torch brings, and
device time is summed by kernel. ``--device cuda,graphs=off,early=off`` launches otherwise. With ``--head`` the output
is a matrix of its own, of 248,320 rows. ``--file`` is written where it is not there yet, and kept.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from pykvstream.engine import Model, Session
from pykvstream.gguf import TYPES_BY_ID, GgmlType
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests import models, random_hybrid
from tests.random_hybrid import HybridShape, write_random_hybrid

DIFFERENT_ROWS = 32
IDLE, BETWEEN = "idle", "idle between passes"


def repeated_rows(
    rng: np.random.Generator, shape: tuple[int, ...], kind: GgmlType, std: float
) -> npt.NDArray[np.uint8]:
    """A tensor whose rows repeat after ``DIFFERENT_ROWS``."""
    n_rows = int(np.prod(shape[1:]))
    few = models.random_tensor_bytes(rng, (shape[0], min(n_rows, DIFFERENT_ROWS)), kind, std)
    rows = few.reshape(-1, kind.row_bytes(shape[0]))
    return np.tile(rows, (-(-n_rows // len(rows)), 1))[:n_rows].reshape(-1)


def write(path: Path, n_layers: int, weight_type: str, head_type: str | None = None) -> None:
    kinds = {kind.name: kind for kind in TYPES_BY_ID.values()}
    shape = HybridShape(
        n_layers=n_layers, n_embd=5120, n_heads=24, n_kv_heads=4, head_dim=256, n_rot=64, sections=(11, 11, 10, 0),
        n_key_heads=16, n_value_heads=48, state=128, n_ff=17408, n_vocab=65536 if head_type is None else 248320,
        n_tokens=1024, ctx=262144, is_tied=head_type is None, weight_type=kinds[weight_type],
        head_type=None if head_type is None else kinds[head_type],
    )  # fmt: skip
    with mock.patch.object(random_hybrid, "random_tensor_bytes", repeated_rows):
        write_random_hybrid(path, shape)


def time_steps(session: Session, width: int, n_steps: int) -> float:
    """Seconds of a pass, the best quarter's mean: whatever else the machine does only adds."""
    spent = []
    for step in range(n_steps):
        tokens = [(step * 7 + i) % 1000 for i in range(width)]
        begin = time.perf_counter()
        session.forward(tokens, phase=Phase.DECODE)
        spent.append(time.perf_counter() - begin)
    best = sorted(spent)[: max(1, n_steps // 4)]
    return sum(best) / len(best)


def time_by_kernel(ranges: Sequence[tuple[float, float, str]], n_passes: int) -> tuple[Counter[str], Counter[str]]:
    """Time and launches of each name, of (begin, end, name) in order of their beginnings.

    A kernel may begin while the one before it ends: what counts is how much later than that one it ends. Nothing runs
    in what is named ``IDLE`` and ``BETWEEN``. The latter is behind the last kernel of a pass and before the first of
    the next, where the host has something to do; which these are is told by names that occur once in each pass.
    """
    counts = Counter(name for _, _, name in ranges)
    once = [name for _, _, name in ranges if counts[name] == n_passes]
    first, last = (once[0], once[-1]) if once else ("", "")
    spent = Counter[str]()
    before, is_between = ranges[0][0], False
    for begin, end, name in ranges:
        spent[BETWEEN if is_between else IDLE] += max(0.0, begin - before)
        spent[name] += max(0.0, end - max(begin, before))
        before = max(before, end)
        is_between = name == last or (is_between and name != first)
    return spent, counts


def kernel_table(session: Session, width: int, n_steps: int) -> list[str]:
    """Device microseconds and launches of a pass by kernel, longest first, as ``time_by_kernel`` has them."""
    import torch  # CUPTI is what is wanted of it

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        time_steps(session, width, n_steps)
    on_card = (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    ranges = sorted((event.time_range.start, event.time_range.end, event.name) for event in on_card)
    spent, counts = time_by_kernel(ranges, n_steps)
    whole = f"{sum(spent.values()) / n_steps:10.1f} us {sum(counts.values()) / n_steps:7.1f} of all, {width} rows"
    lines = (f"{us / n_steps:10.1f} us {counts[name] / n_steps:7.1f} {name}" for name, us in spent.most_common())
    return [whole, *lines]


def report(name: str, seconds: float, width: int, n_bytes: int) -> None:
    speed = f"{width / seconds:8.1f} tokens/s {n_bytes / seconds / 1e9:8.1f} GB/s"
    print(f"{name:<20} {seconds * 1e3:8.3f} ms a pass {speed}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--type", default="Q4_K")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], default="1,2,4,6,8,16,49")
    parser.add_argument("--head")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "wide.gguf"
        if not path.exists():
            begin = time.perf_counter()
            part = path.with_suffix(".part")
            write(part, options.layers, options.type, options.head)
            part.rename(path)
            print(f"wrote {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - begin:.1f} s", flush=True)
        measure(path, options)


def measure(path: Path, options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    ctx = options.tokens + 4096
    with Model.open(path, device=options.device, ctx_size=ctx, cache_type_k="q8_0", cache_type_v="q4_0") as model:
        print(f"opened in {time.perf_counter() - begin:.1f} s")
        config, weights = model.config, model.report.weight_bytes
        state = 0 if config.hybrid is None else len(config.hybrid.recurrent_layers) * config.hybrid.delta.state_bytes
        prompt = [token % 1000 for token in range(options.tokens)]
        with model.session() as session:
            begin = time.perf_counter()
            session.forward(prompt)
            spent = time.perf_counter() - begin
            print(f"prompt of {options.tokens} tokens: {options.tokens / spent:.0f} tokens/s")
            pages = options.tokens * model.plan.shape.column_bytes // 256
            for width in options.rows:
                seconds = time_steps(session, width, options.steps)
                report(f"resident, {width} rows", seconds, width, weights + 2 * state + pages)
            for width in (1, 6) if options.kernels else ():
                print("\n".join(kernel_table(session, width, 8)))
            layout = model.plan.phases[Phase.DECODE.value]
            floors = (layout.pool.floor_pages,) * layout.pool.n_layers
            model.place(Phase.DECODE, Placement(floors, min(64, layout.pool.n_slots - sum(floors)), layout.max_rows))
            for width in (1, 6):
                before = session.stats.streamed_bytes
                seconds = time_steps(session, width, options.steps)
                moved = (session.stats.streamed_bytes - before) // options.steps
                report(f"streamed, {width} rows", seconds, width, moved)


if __name__ == "__main__":
    main()
