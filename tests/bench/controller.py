"""Choices of the controller beside fixed ones and beside no drafts, measured: three of the recorded answers.

    python tests/bench/controller.py [--tokens 1200] [--rounds 3] [--threads 1] [--cpu-time] [--answers NAME ...]

The answers are those of ``record_acceptance.py``, on demo-hybrid with its MTP head. Every choice has a model of its
own, and in each round all answer side by side, a few tokens of each in turn; printed are medians over the rounds of the
ratios within a round. The best fixed choice is known in hindsight only: it is the one with the lowest median. It ends
with 1 where a text differs from the plain one, or where the controller takes more than 1.05 times as long as the best
fixed choice or 1.03 times as long as no drafts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pykvstream import Model, SpeculationParams
from pykvstream.speculation import HEAD_DRAFTER
from pykvstream.speculation.params import AUTO
from tests.bench.record_acceptance import NGRAMS, TASKS, Task
from tests.bench.turns import take_turns

MEASURED = ("copy, warm", "prose, hot", "hot, then cold")
BOTH = (*NGRAMS.types, HEAD_DRAFTER)
CHOICES: dict[str, SpeculationParams | None] = {
    "none": None,
    **{f"ngrams {n or 'own'}": replace(NGRAMS, draft_n_max=n) for n in (4, 8, None)},
    **{f"head {n}": SpeculationParams(types=(HEAD_DRAFTER,), draft_n_max=n) for n in (1, 2, 3, 5, 8)},
    **{f"both {n}": replace(NGRAMS, types=BOTH, draft_n_max=n) for n in (3, 8)},
    AUTO: replace(NGRAMS, types=BOTH, draft_n_max=AUTO),
}


def answers(
    models: Mapping[str, Model], task: Task, n_tokens: int, clock: Callable[[], float]
) -> tuple[dict[str, float], set[tuple[int, ...]]]:
    """Seconds of an answer by each choice, without its prompt, and what was said."""
    seconds = dict.fromkeys(models, 0.0)
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(model.session(seed=1)) for name, model in models.items()}
        part: str | tuple[int, ...] = task.prompt()
        for params in task.parts:
            n = n_tokens // len(task.parts)
            pieces = {
                name: session.generate(part, max_tokens=n, params=params, ignore_eos=True, speculation=CHOICES[name])
                for name, session in sessions.items()
            }
            for name, took in take_turns(pieces, clock).items():
                seconds[name] += took
            part = ()
        return seconds, {session.tokens for session in sessions.values()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--answers", nargs="+", choices=TASKS, default=MEASURED)
    parser.add_argument("--cpu-time", action="store_true", help="processor time: for a machine that others use too")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    is_good = True
    with ExitStack() as stack:
        models = {
            choice: stack.enter_context(Model.open("demo-hybrid", ctx_size=4096, threads=options.threads, mtp=True))
            for choice in CHOICES
        }
        for name in options.answers:
            rounds: list[dict[str, float]] = []
            for _ in range(options.rounds):
                seconds, said = answers(models, TASKS[name], options.tokens, clock)
                rounds.append(seconds)
                is_good &= len(said) == 1
            ratios = {
                choice: statistics.median(seconds[choice] / seconds["none"] for seconds in rounds) for choice in CHOICES
            }
            best = min((choice for choice in CHOICES if choice != AUTO), key=lambda choice: ratios[choice])
            to_best = statistics.median(seconds[AUTO] / seconds[best] for seconds in rounds)
            is_good &= to_best <= 1.05 and ratios[AUTO] <= 1.03
            print(f"{name}: auto {to_best:.3f} of the best fixed choice ({best}), {ratios[AUTO]:.3f} of no drafts")
            print("  " + ", ".join(f"{choice} {ratio:.3f}" for choice, ratio in ratios.items()), flush=True)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
