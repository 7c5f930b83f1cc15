"""One hash of logits on a card, however it launches: early or not, in graphs or not, resident or streamed.

    python -m tests.bench.card_hashes [--device cuda] [--model demo-hybrid] [--times 20] [--steps 64] [--cuts]
        [--settings ";,graphs=off"]

A kernel that reads what the one before it has not written yet is seen by no sanitizer and fails once in many passes:
here every setting decodes the same text many times, one row at a time and in verify widths. With ``--cuts`` the
model's layers are divided between CPU and card at three places instead: each cut promises itself alone.
Prints a line for each setting and ends with 1 where two hashes differ.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np

from pykvstream.engine import Model
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase

SETTINGS = ("", ",early=off", ",graphs=off", ",early=off,graphs=off")
PROMPT = 2500
WIDTHS = (1, 1, 1, 1, 6, 1, 3)


def digest(model: Model, n_steps: int) -> str:
    """Of all logits of a prompt's last row and of decode and verify passes behind it."""
    rng = np.random.default_rng(7)
    total = hashlib.sha256()
    with model.session() as session:
        n_vocab = model.config.n_vocab
        total.update(session.forward(rng.integers(0, n_vocab, PROMPT).tolist()).tobytes())
        for step in range(n_steps):
            tokens = rng.integers(0, n_vocab, WIDTHS[step % len(WIDTHS)]).tolist()
            total.update(session.forward(tokens, phase=Phase.DECODE, logits="all").tobytes())
    return total.hexdigest()[:16]


def stream(model: Model) -> None:
    """Of each layer on the card all but the pages that a pass needs at least go through a ring of 5."""
    for phase in Phase:
        layout = model.plan.phases[phase.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        model.place(phase, Placement(floors, min(5, layout.pool.n_slots - sum(floors)), layout.max_rows))


def opened(options: argparse.Namespace, settings: str, **more: object) -> Model:
    known = {"ctx_size": 4000, "cache_type_k": "q8_0", "cache_type_v": "q4_0"} | more
    return Model.open(options.model, device=options.device + settings, **known)  # type: ignore[arg-type]


def whole(options: argparse.Namespace) -> Iterator[tuple[str, Counter[str]]]:
    for settings in options.settings if options.device != "cpu" else SETTINGS[:1]:
        with opened(options, settings) as model:
            yield f"resident {settings or ',all on'}", Counter(
                digest(model, options.steps) for _ in range(options.times)
            )
            stream(model)
            yield f"streamed {settings or ',all on'}", Counter(
                digest(model, options.steps) for _ in range(max(1, options.times // 4))
            )


def cut(options: argparse.Namespace, n_layers: int) -> Iterator[tuple[str, Counter[str]]]:
    for settings in SETTINGS[:1] + SETTINGS[2:3] if options.device != "cpu" else SETTINGS[:1]:
        with opened(options, settings, gpu_layers=n_layers) as model:
            yield f"{n_layers} layers{settings} resident", Counter(digest(model, options.steps) for _ in range(3))
        arena = smallest_mib(options, n_layers)
        with opened(options, settings, gpu_layers=n_layers, arena_mib=arena) as model:
            yield f"{n_layers} layers{settings} in {arena:.1f} MiB", Counter(
                digest(model, options.steps) for _ in range(3)
            )


def smallest_mib(options: argparse.Namespace, n_layers: int) -> float:
    with opened(options, "", gpu_layers=n_layers) as model:
        return model.plan.smallest_bytes / 2**20 + 0.01


def is_one(found: Iterator[tuple[str, Counter[str]]]) -> bool:
    seen: set[str] = set()
    begin = time.perf_counter()
    for name, hashes in found:
        now = time.perf_counter()
        print(f"{name}: {len(hashes)} hash of {hashes.total()}: {' '.join(hashes)} ({now - begin:.1f} s)", flush=True)
        begin = now
        seen |= hashes.keys()
    return len(seen) == 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="demo-hybrid")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--settings", type=lambda text: text.split(";"), default=list(SETTINGS), help="apart by ;")
    options = parser.parse_args()
    if options.cuts:
        with Model.open(options.model, ctx_size=64) as model:
            n_layers = model.config.n_layers
        verdicts = [is_one(cut(options, n)) for n in sorted({1, n_layers // 4, n_layers // 2})]
    else:
        verdicts = [is_one(whole(options))]
    print("one hash" if all(verdicts) else "hashes differ", flush=True)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
