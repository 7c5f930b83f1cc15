"""The promises at full length: long contexts, all arenas from the smallest on, wide passes, copies that begin late.

    python -m tests.gpu.long_promises MODEL... [--device cuda] [--contexts 4096,32768,98304] [--arenas smallest,512]
        [--widths 2,8,49] [--steps 64] [--late-steps 10000]

One line each: what was run, the hash of the logits of every step, what was streamed, how long it took. Within a model
and a context all hashes are one; what differs is named at the end, and the exit status is 1. With ``--late-steps``
copies and operations begin late at random instead, and histories are compared too. ``--device cpu`` does the same.
Order: the first run is the one with the largest arena, or without delays; the others must say what it says.
Holds: ``main``.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pykvstream.core.device import HookPoint
from pykvstream.engine import Model, Session
from pykvstream.errors import NoSpace
from pykvstream.runtime.target import Phase

LATE_SHARE = 0.01
MOST_LATE_S = 0.002
REPORT_EVERY = 1000
MIB = 2**20


@dataclass
class Said:
    """Hashes of what was computed: rows of logits in order, and at last the whole history in host memory."""

    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    n_rows: int = 0

    def hear(self, rows: np.ndarray) -> None:
        self.digest.update(rows.tobytes())
        self.n_rows += len(rows)

    @property
    def short(self) -> str:
        return self.digest.hexdigest()[:16]


class Judge:
    """Prints a line for each run, and remembers which did not say what the first of its kind said."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self.different: list[str] = []

    def hear(self, subject: str, how: str, said: str, detail: str) -> None:
        expected = self._first.setdefault(subject, said)
        verdict = "same" if said == expected else "DIFFERENT"
        print(f"{subject}  {how:<22} {said}  {verdict}  {detail}", flush=True)
        if said != expected:
            self.different.append(f"{subject}, {how}: {said} in place of {expected}")


def tokens_of(n_vocab: int, n_tokens: int) -> list[int]:
    drawn = np.random.default_rng(7).integers(0, min(n_vocab, 1000), n_tokens)
    return [int(token) for token in drawn]


def open_model(options: argparse.Namespace, path: str, context: int, arena_mib: float | None) -> Model:
    return Model.open(
        path,
        device=options.device,
        arena_mib=arena_mib,
        ctx_size=context,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
    )


def arenas_of(options: argparse.Namespace, path: str, context: int) -> list[tuple[str, float | None]]:
    """Names and sizes, first the recommended arena, which holds every page; only sizes that fit, and are smaller."""
    with open_model(options, path, context, None) as model:
        largest, smallest = model.plan.arena_bytes, model.plan.smallest_bytes
    chosen: list[tuple[str, float | None]] = [("resident", None)]
    for word in options.arenas:
        n_bytes = smallest if word == "smallest" else largest if word == "resident" else float(word) * MIB
        if smallest <= n_bytes < largest:
            chosen.append((f"{n_bytes / MIB:.1f} MiB", n_bytes / MIB))
    return chosen


def step(session: Session, tokens: Sequence[int], width: int, said: Said) -> None:
    """Run tokens in passes of ``width`` rows, each with its row of logits."""
    for begin in range(0, len(tokens), width):
        said.hear(session.forward(tokens[begin : begin + width], logits="all", phase=Phase.DECODE))


def answer(session: Session, last: np.ndarray, n_steps: int, said: Said) -> list[int]:
    """Greedy steps behind a row of logits; returns their tokens."""
    chosen: list[int] = []
    for _ in range(n_steps):
        chosen.append(int(last.argmax()))
        rows = session.forward(chosen[-1:], phase=Phase.DECODE)
        said.hear(rows)
        last = rows[-1].copy()
    return chosen


def run_arenas(options: argparse.Namespace, path: str, context: int, judge: Judge) -> None:
    """A prompt and greedy steps in every arena; in the first, the same tokens in passes of every width too."""
    subject = f"{Path(path).stem} {context}"
    chosen: list[int] = []
    for name, arena_mib in arenas_of(options, path, context):
        began = time.perf_counter()
        with open_model(options, path, context, arena_mib) as model, model.session() as session:
            prompt = tokens_of(model.config.n_vocab, context - options.steps - 1)
            said = Said()
            rows = session.forward(prompt)
            said.hear(rows)
            with session.fork() as behind:
                chosen = answer(session, rows[-1].copy(), options.steps, said)
                streamed = session.stats.streamed_bytes / 1e6
                spent = time.perf_counter() - began
                judge.hear(subject, name, said.short, f"{said.n_rows} rows, {streamed:.1f} MB streamed, {spent:.1f} s")
                for width in options.widths if arena_mib is None else ():
                    wide = Said()
                    wide.hear(rows)
                    with behind.fork() as child:
                        step(child, chosen, width, wide)
                    judge.hear(subject, f"{width} rows a pass", wide.short, f"{wide.n_rows} rows")
            model.check_integrity()


def late(seed: int) -> Callable[[HookPoint, int], int]:
    """A hook that lets copies and operations begin late, at random."""
    draw = random.Random(seed)

    def delay(point: HookPoint, index: int) -> int:
        if point in (HookPoint.COPY, HookPoint.OP) and draw.random() < LATE_SHARE:
            time.sleep(draw.random() * MOST_LATE_S)
        return 0

    return delay


def history_hash(session: Session) -> str:
    """Of the saved conversation: every page, state and token of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        session.save(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def run_late(options: argparse.Namespace, path: str, judge: Judge) -> None:
    """Greedy steps in the smallest arena, once as they come and once with delays; logits and history are compared.

    The conversation goes back to its beginning where the context ends, so that any number of steps fits.
    """
    context = options.contexts[0]
    with open_model(options, path, context, None) as model:
        smallest = model.plan.smallest_bytes / MIB
    for how, seed in (("as they come", None), ("late", 1)):
        said, n_done, round_ = Said(), 0, 0
        began = time.perf_counter()
        with open_model(options, path, context, smallest) as model:
            for part in model._target.parts:
                part.device.set_hook(None if seed is None else late(seed))
            while n_done < options.late_steps:
                with model.session(seed=1) as session:
                    n_prompt = min(context // 2, 1500) + 37 * round_ % 256
                    rows = session.forward(tokens_of(model.config.n_vocab, n_prompt))
                    n = min(options.late_steps - n_done, context - n_prompt - 1, REPORT_EVERY)
                    answer(session, rows[-1].copy(), n, said)
                    n_done, round_ = n_done + n, round_ + 1
                    streamed = session.stats.streamed_bytes / 1e6
                    subject = f"{Path(path).stem} {n_done} steps"
                    detail = f"{streamed:.1f} MB streamed by the last, {time.perf_counter() - began:.1f} s"
                    judge.hear(subject, how, f"{said.short} {history_hash(session)}", detail)
            for part in model._target.parts:
                part.device.set_hook(None)
            model.check_integrity()


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the promises at full length")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--contexts", type=numbers, default=[4096, 32768, 98304])
    parser.add_argument("--arenas", type=lambda text: text.split(","), default=["smallest", "512", "1024", "2240"])
    parser.add_argument("--widths", type=numbers, default=[2, 3, 4, 5, 6, 7, 8, 49])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--late-steps", type=int, default=0)
    parser.add_argument("--cache-type-k", default="q8_0")
    parser.add_argument("--cache-type-v", default="q4_0")
    options = parser.parse_args(argv)
    judge = Judge()
    for path in options.models:
        if options.late_steps:
            run_late(options, path, judge)
            continue
        for context in options.contexts:
            try:
                run_arenas(options, path, context, judge)
            except NoSpace as error:
                judge.different.append(f"{path} {context}: {error}")
    for line in judge.different:
        print(line, file=sys.stderr)
    return 1 if judge.different else 0


if __name__ == "__main__":
    sys.exit(main())
