"""Choices of the controller beside fixed ones and beside no drafts, measured: three of the recorded answers.

    python tests/bench/controller.py [--tokens 600] [--rounds 3] [--threads 1] [--cpu-time]

The answers are those of ``record_acceptance.py``, on demo-hybrid with its MTP head. In each round every choice runs in
turn; printed are medians over the rounds of the ratios within a round. The best fixed choice is known in hindsight
only: it is the one with the lowest median. It ends with 1 where a text differs from the plain one, or where the
controller takes more than 1.05 times as long as the best fixed choice or 1.03 times as long as no drafts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pykvstream import Model, SpeculationParams
from pykvstream.speculation import HEAD_DRAFTER
from pykvstream.speculation.params import AUTO
from tests.bench.record_acceptance import NGRAMS, TASKS, Task

MEASURED = ("copy, warm", "prose, hot", "hot, then cold")
BOTH = (*NGRAMS.types, HEAD_DRAFTER)
CHOICES: dict[str, SpeculationParams | None] = {
    "none": None,
    **{f"ngrams {n or 'own'}": replace(NGRAMS, draft_n_max=n) for n in (4, 8, None)},
    **{f"head {n}": SpeculationParams(types=(HEAD_DRAFTER,), draft_n_max=n) for n in (1, 2, 3, 5, 8)},
    **{f"both {n}": replace(NGRAMS, types=BOTH, draft_n_max=n) for n in (3, 8)},
    AUTO: replace(NGRAMS, types=BOTH, draft_n_max=AUTO),
}


def answer(
    model: Model, task: Task, n_tokens: int, choice: SpeculationParams | None, clock: Callable[[], float]
) -> tuple[float, tuple[int, ...]]:
    """Seconds of an answer without its prompt, and its tokens."""
    seconds = 0.0
    with model.session(seed=1) as session:
        part: str | tuple[int, ...] = task.prompt()
        for params in task.parts:
            n = n_tokens // len(task.parts)
            pieces = session.generate(part, max_tokens=n, params=params, ignore_eos=True, speculation=choice)
            next(pieces)
            started = clock()
            for _ in pieces:
                pass
            seconds += clock() - started
            part = ()
        return seconds, session.tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="processor time: for a machine that others use too")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    is_good = True
    with Model.open("demo-hybrid", ctx_size=4096, threads=options.threads, mtp=True) as model:
        for name in MEASURED:
            seconds: dict[str, list[float]] = {choice: [] for choice in CHOICES}
            for _ in range(options.rounds):
                tokens = set()
                for choice, speculation in CHOICES.items():
                    took, said = answer(model, TASKS[name], options.tokens, speculation, clock)
                    seconds[choice].append(took)
                    tokens.add(said)
                is_good &= len(tokens) == 1
            ratios = {
                choice: statistics.median(a / b for a, b in zip(taken, seconds["none"], strict=True))
                for choice, taken in seconds.items()
            }
            best = min((choice for choice in CHOICES if choice != AUTO), key=lambda choice: ratios[choice])
            to_best = statistics.median(a / b for a, b in zip(seconds[AUTO], seconds[best], strict=True))
            is_good &= to_best <= 1.05 and ratios[AUTO] <= 1.03
            print(f"{name}: auto {to_best:.3f} of the best fixed choice ({best}), {ratios[AUTO]:.3f} of no drafts")
            print("  " + ", ".join(f"{choice} {ratio:.3f}" for choice, ratio in ratios.items()), flush=True)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
