"""What drafting brings: tokens per second with each drafter over those without, on a text that repeats itself.

    python tests/bench/drafting.py [--model demo] [--mtp] [--tokens 160] [--rounds 3] [--threads 2] [--cpu-time]

Three tasks: a text that is copied with one word changed, the same at temperature 0.7, and a text that does not repeat
itself. Every drafter has a model of its own, with drafts as long as it makes them and with ``auto``, and in each round
all of them and plain decoding answer side by side, a few tokens of each in turn. Printed are medians over the rounds:
the ratio to plain decoding, and which share that is of the limit, tokens per pass times the time of a plain pass over
that of one with a draft, all of them passes of that very answer. It ends with 1 where a text is not the plain one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pykvstream import Model, NgramSize, SamplingParams, Session, SpeculationParams
from pykvstream.speculation import DRAFTERS, HEAD_DRAFTER, ModSize
from pykvstream.speculation.params import AUTO
from pykvstream.speculation.stats import DraftStats
from tests.bench.turns import take_turns

TEXT = Path(__file__).resolve().parents[2] / "tools/demo_text.txt"
SIZES = {
    "ngram_simple": NgramSize(8, 16),
    "ngram_map_k": NgramSize(8, 16),
    "ngram_map_k4v": NgramSize(8, 16),
    "ngram_mod": ModSize(8, 4, 16),
}
COLD, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)


def tasks() -> dict[str, tuple[str, SamplingParams]]:
    """Names, prompts and settings."""
    text = TEXT.read_text(encoding="utf-8")[:1600]
    first = text.split()[20]
    copied = f"{text}\n\nThe same text with one word changed:\n\n{text[:200].replace(first, 'something')}"
    return {
        "copy, greedy": (copied, COLD),
        "copy, 0.7": (copied, WARM),
        "no repetition": (text[:1200], SamplingParams(temperature=1.0, top_k=0, min_p=0.02, repeat_penalty=1.3)),
    }


def choices(*, with_head: bool) -> dict[str, SpeculationParams | None]:
    """By name: nothing, each drafter alone with its own bound and with ``auto``, all of them either way."""
    names = (*DRAFTERS, HEAD_DRAFTER) if with_head else DRAFTERS
    made: dict[str, SpeculationParams | None] = {"none": None}
    for label, types in (*((name, (name,)) for name in names), ("all", names)):
        for suffix, n_max in (("", None), (", auto", AUTO)):
            made[label + suffix] = SpeculationParams(types=types, draft_n_max=n_max, **SIZES)  # type: ignore[arg-type]
    return made


class Watch:
    """Seconds in the passes of a session's decoding."""

    def __init__(self, session: Session, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        core = session._core
        core.step = self._timed(core.step)  # type: ignore[method-assign]

    def _timed(self, run: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **named: object) -> object:
            started = self._clock()
            rows = run(*args, **named)
            self.seconds += self._clock() - started
            return rows

        return timed


@dataclass(frozen=True)
class Told:
    """What a choice did in one round: seconds in all and in passes, tokens, and what its drafts were."""

    seconds: float
    in_passes: float
    tokens: tuple[int, ...]
    draft: DraftStats | None

    def ratio(self, plain: Told) -> float:
        return plain.seconds / self.seconds

    def share(self, plain: Told) -> float:
        return self.ratio(plain) * self.in_passes / plain.in_passes


def one_round(
    models: dict[str, Model],
    speculation: dict[str, SpeculationParams | None],
    prompt: str,
    params: SamplingParams,
    n_tokens: int,
    clock: Callable[[], float],
) -> dict[str, Told]:
    """All choices side by side."""
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(model.session(seed=1)) for name, model in models.items()}
        watches = {name: Watch(session, clock) for name, session in sessions.items()}
        pieces = {
            name: session.generate(
                prompt, max_tokens=n_tokens, params=params, ignore_eos=True, speculation=speculation[name]
            )
            for name, session in sessions.items()
        }
        seconds = take_turns(pieces, clock)
        return {
            name: Told(seconds[name], watches[name].seconds, session.tokens, session.stats.draft)
            for name, session in sessions.items()
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cpu-time", action="store_true", help="processor time: for a machine that others use too")
    parser.add_argument("--mtp", action="store_true", help="also by the MTP head of the model")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    speculation = choices(with_head=options.mtp)
    clock = time.process_time if options.cpu_time else time.perf_counter
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(
                Model.open(options.model, ctx_size=2048, threads=options.threads, ubatch_size=64, mtp=options.mtp)
            )
            for name in speculation
        }
        print(f"{options.model}, {options.threads} threads, {options.tokens} tokens, median of {options.rounds} rounds")
        for task, (prompt, params) in tasks().items():
            rounds = [
                one_round(models, speculation, prompt, params, options.tokens, clock) for _ in range(options.rounds)
            ]
            print(f"\n{task}")
            print(f"{'drafter':>20}{'tokens/s':>10}{'ratio':>7}{'of limit':>10}{'tokens/pass':>13}{'accepted':>16}")
            for name in speculation:
                ratio = statistics.median(told[name].ratio(told["none"]) for told in rounds)
                share = statistics.median(told[name].share(told["none"]) for told in rounds)
                rate = (options.tokens - 1) / statistics.median(told[name].seconds for told in rounds)
                draft = rounds[-1][name].draft
                n_passes = options.tokens - 1 if draft is None else sum(draft.depth_histogram)
                of = "" if draft is None else f"{draft.accepted} of {draft.proposed}"
                per_pass = (options.tokens - 1) / n_passes
                print(f"{name:>20}{rate:10.1f}{ratio:7.2f}{share:10.2f}{per_pass:13.2f}{of:>16}", flush=True)
            if any(told[name].tokens != told["none"].tokens for told in rounds for name in speculation):
                print("another text", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
