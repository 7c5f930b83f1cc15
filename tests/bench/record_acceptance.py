"""Records for every token of real answers how many of a draft's tokens would have been right there.

    python tests/bench/record_acceptance.py OUT.json [--tokens 640] [--only NAME]

An answer is the same whatever is drafted, so one record says what any choice of drafter and depth would have brought:
``tests/replay.py`` plays choices through it. For each place of the answer three characters, in base 36: how many of
up to 8 tokens of the MTP head are right (``head``), how many an n-gram drafter proposes and how many of these are
right (``proposed``, ``right``; at most 16). ``head_sure`` and ``sure`` say how sure the drafter was of each token, in
36ths: 8 digits for each place, and one for each proposed token with a comma behind each place. With the records come
costs: seconds of a pass by its rows, of a draft's
step, and of beginning a draft; best times of this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pykvstream import Model, NgramSize, Phase, SamplingParams, Session, SpeculationParams
from pykvstream.runtime.mtp_drafter import sureness
from pykvstream.sampling import Sampler, SamplerState
from pykvstream.speculation import chain_of

ROOT = Path(__file__).resolve().parents[2]
DEPTH, LONGEST = 8, 16
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
NGRAMS = SpeculationParams(types=("ngram-simple", "ngram-cache"), ngram_simple=NgramSize(6, LONGEST))
COLD, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)
HOT = SamplingParams(temperature=1.0, top_k=0, min_p=0.02, repeat_penalty=1.2)


@dataclass(frozen=True)
class Task:
    """A prompt, and settings of each part of the answer."""

    prompt: Callable[[], str]
    parts: tuple[SamplingParams, ...]


def prose(n_chars: int) -> Callable[[], str]:
    return lambda: (ROOT / "tools/demo_text.txt").read_text(encoding="utf-8")[:n_chars]


def copied() -> str:
    text = prose(1600)()
    return f"{text}\n\nThe same text with one word changed:\n\n{text[:200]}"


def code(n_chars: int) -> Callable[[], str]:
    return lambda: (ROOT / "pykvstream/runtime/layout.py").read_text(encoding="utf-8")[:n_chars]


TASKS = {
    "copy, cold": Task(copied, (COLD,)),
    "copy, warm": Task(copied, (WARM,)),
    "prose, cold": Task(prose(1200), (COLD,)),
    "prose, warm": Task(prose(1200), (WARM,)),
    "prose, hot": Task(prose(1200), (HOT,)),
    "long prose, warm": Task(prose(5000), (WARM,)),
    "code, cold": Task(code(1500), (COLD,)),
    "code, warm": Task(code(1500), (WARM,)),
    "code, hot": Task(code(4000), (HOT,)),
    "cold, then hot": Task(copied, (COLD, HOT)),
    "hot, then cold": Task(prose(1000), (HOT, COLD)),
    "warm, cold, hot": Task(code(900), (WARM, COLD, HOT)),
}


def record(model: Model, task: Task, n_tokens: int) -> dict[str, str]:
    """One answer, then every place of it again."""
    prompt = model.tokenizer.encode(task.prompt())
    with model.session(seed=1) as session:
        part: Sequence[int] = prompt
        settings = []
        for params in task.parts:
            n = n_tokens // len(task.parts)
            for _ in session.generate(part, max_tokens=n, params=params, ignore_eos=True):
                settings.append(params)
            part = ()
        tokens = session.tokens
    head, proposed, right = [], [], []
    head_sure, sure = [], []
    chain = chain_of(NGRAMS, model.tokenizer.n_vocab)
    chain.begin(prompt)
    samplers = {id(params): Sampler(params, seed=1, n_vocab=model.tokenizer.n_vocab) for params in task.parts}
    for sampler in samplers.values():
        sampler.restore(SamplerState(1, tuple(prompt)))
    with model.session(seed=1) as session:
        session.forward(prompt, logits="none")
        for at, params in zip(range(len(prompt), len(tokens)), settings, strict=True):
            # The token at this place is known; a draft goes on behind it.
            session._core.push(tokens[at])
            chain.observe((tokens[at],))
            for sampler in samplers.values():
                sampler.accept(tokens[at])
            guessed, how_sure = drafts(session, samplers[id(params)])
            head.append(common(guessed, tokens[at + 1 :]))
            head_sure.append(digits(how_sure).ljust(DEPTH, "0"))
            window = chain.draft(LONGEST)
            draft = () if window is None else window.draft.tokens
            proposed.append(len(draft))
            sure.append(digits(() if window is None else window.draft.sure or (1.0,) * len(draft)))
            right.append(common(draft, tokens[at + 1 :]))
            if window is not None:
                window.n_taken = right[-1]
                chain.close(window)
            session._core.forward((), phase=Phase.DECODE)
    rows = {"head": head, "proposed": proposed, "right": right}
    told = {name: "".join(DIGITS[n] for n in row) for name, row in rows.items()}
    return {**told, "head_sure": "".join(head_sure), "sure": ",".join(sure)}


def drafts(session: Session, sampler: Sampler) -> tuple[list[int], list[float]]:
    """What the head drafts, and how sure it is of each."""
    found: list[int] = []
    sure: list[float] = []

    def choose(logits: NDArray[np.float32], position: int) -> int:
        token, candidates = sampler.pick(logits, position)
        found.append(token)
        sure.append(sureness(logits, token, candidates))
        return token

    session._core.draft(DEPTH, choose)
    return found, sure


def digits(sure: Sequence[float]) -> str:
    """36ths, rounded down."""
    return "".join(DIGITS[min(int(36 * each), 35)] for each in sure)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def costs(model: Model) -> dict[str, object]:
    """Best seconds of a pass by its rows, of one step of the head with its choice, and of catching up."""
    sampler = Sampler(WARM, seed=1, n_vocab=model.tokenizer.n_vocab)
    passes = dict.fromkeys(WIDTHS, 1e9)
    steps = {1: 1e9, 5: 1e9}
    with model.session() as session:
        session.forward(model.tokenizer.encode(prose(2000)()), logits="none")
        n_tokens = len(session.tokens)
        for _ in range(25):
            for width in WIDTHS:
                started = time.perf_counter()
                session.forward(list(range(100, 100 + width)), logits="all", phase=Phase.DECODE)
                passes[width] = min(passes[width], time.perf_counter() - started)
                session.truncate(n_tokens)
            for n in steps:
                session._core.push(100)
                started = time.perf_counter()
                session._core.draft(n, lambda logits, position: sampler.pick(logits, position)[0])
                steps[n] = min(steps[n], time.perf_counter() - started)
                session.truncate(n_tokens)
    step = (steps[5] - steps[1]) / 4
    return {"passes": passes, "step": step, "begin": max(steps[1] - step, 0.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--only")
    options = parser.parse_args()
    records = {}
    with Model.open("demo-hybrid", ctx_size=4096, threads=1, mtp=True) as model:
        found: dict[str, object] = {"model": "demo-hybrid", "costs": costs(model), "records": records}
        for name, task in TASKS.items():
            if options.only in (None, name):
                records[name] = record(model, task, options.tokens)
                print(name, len(records[name]["head"]), flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
