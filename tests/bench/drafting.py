"""What drafting brings: tokens per second with each drafter over those without, on a text that repeats itself.

    python tests/bench/drafting.py [--model demo] [--mtp] [--tokens 160] [--rounds 3] [--threads 2] [--cpu-time]

Three tasks: a text that is copied with one word changed, the same at temperature 0.7, and a text that does not repeat
itself. In each round every drafter and plain decoding run in turn, so that what disturbs the machine disturbs all
alike; what is printed is the median of the ratios of one round, and which share that is of what the passes alone
would allow. It ends with 1 where any text is not that of plain
decoding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pykvstream import Model, NgramSize, Phase, SamplingParams, Session, SpeculationParams
from pykvstream.speculation import DRAFTERS, HEAD_DRAFTER, ModSize
from pykvstream.speculation.params import AUTO

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


def speculation_of(types: tuple[str, ...]) -> SpeculationParams | None:
    """``auto`` among the names: a controller decides."""
    names = tuple(name for name in types if name != AUTO)
    n_max = AUTO if AUTO in types else None
    return SpeculationParams(types=names, draft_n_max=n_max, **SIZES) if types else None  # type: ignore[arg-type]


def answer(
    session: Session,
    prompt: str,
    params: SamplingParams,
    n_tokens: int,
    types: tuple[str, ...],
    clock: Callable[[], float],
) -> float:
    """Seconds from the first token to the last."""
    speculation = speculation_of(types)
    pieces = session.generate(
        prompt, max_tokens=n_tokens, params=params, ignore_eos=True, speculation=speculation
    )
    next(pieces)
    started = clock()
    for _ in pieces:
        pass
    return clock() - started


def row_seconds(model: Model, n_rows: int, prompt: str, clock: Callable[[], float]) -> float:
    """Median time of a decode pass of so many rows behind the prompt."""
    times = []
    with model.session() as session:
        session.forward(model.tokenizer.encode(prompt), logits="none")
        n_tokens = len(session.tokens)
        for _ in range(5):
            started = clock()
            session.forward([1000 + i for i in range(n_rows)], logits="all", phase=Phase.DECODE)
            times.append(clock() - started)
            session.truncate(n_tokens)
    return statistics.median(times)


def limit(histogram: tuple[int, ...], n_tokens: int, passes: dict[int, float]) -> float:
    """How much faster the passes alone are than one for each token: what drafts would bring if they cost nothing."""
    widths, seconds = list(passes), list(passes.values())
    took = sum(n * float(np.interp(1 + depth, widths, seconds)) for depth, n in enumerate(histogram))
    return n_tokens * passes[1] / took if took else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cpu-time", action="store_true", help="processor time: for a machine that others use too")
    parser.add_argument("--mtp", action="store_true", help="also by the MTP head of the model")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    names = (*DRAFTERS, HEAD_DRAFTER) if options.mtp else DRAFTERS
    kinds = ((), *((name,) for name in names), names, (*names, AUTO))
    clock = time.process_time if options.cpu_time else time.perf_counter
    with Model.open(
        options.model, ctx_size=2048, threads=options.threads, ubatch_size=64, mtp=options.mtp
    ) as model:
        print(f"{options.model}, {options.threads} threads, {options.tokens} tokens, median of {options.rounds} rounds")
        for task, (prompt, params) in tasks().items():
            passes = {n: row_seconds(model, n, prompt, clock) for n in (1, 4, 8, 17)}
            widths = " ".join(f"{n}: {seconds * 1e3:.1f} ms" for n, seconds in passes.items())
            print(f"\n{task} (rows of a pass: {widths})")
            print(f"{'drafter':>16}{'tokens/s':>10}{'ratio':>7}{'tokens/step':>13}{'accepted':>16}{'of limit':>10}")
            seconds: dict[tuple[str, ...], list[float]] = {types: [] for types in kinds}
            texts, told = {}, {}
            for _ in range(options.rounds):
                for types in kinds:
                    with model.session(seed=1) as session:
                        seconds[types].append(answer(session, prompt, params, options.tokens, types, clock))
                        texts[types] = session.tokens
                        told[types] = session.stats.draft
            for types in kinds:
                ratio = statistics.median(a / b for a, b in zip(seconds[()], seconds[types], strict=True))
                rate = (options.tokens - 1) / statistics.median(seconds[types])
                name = "none" if not types else types[0] if len(types) == 1 else AUTO if AUTO in types else "all"
                draft = told[types]
                n_steps = options.tokens - 1 if draft is None else sum(draft.depth_histogram)
                of = "" if draft is None else f"{draft.accepted} of {draft.proposed}"
                per_step = (options.tokens - 1) / n_steps
                most = 1.0 if draft is None else limit(draft.depth_histogram, options.tokens - 1, passes)
                share = "" if draft is None else f"{ratio / most:.2f}"
                print(f"{name:>16}{rate:10.1f}{ratio:7.2f}{per_step:13.2f}{of:>16}{share:>10}", flush=True)
                if texts[types] != texts[()]:
                    print(f"{name}: another text", file=sys.stderr)
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
