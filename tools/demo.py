"""The main job on a real model, and its proof: ``python tools/demo.py [--model FILE] [--max-tokens N]``.

Asks the demo model about a text of about 2,000 tokens, with an arena that holds a part of the history, and prints
the answer as it comes. Then the same question with everything resident. Every logit of both answers must be equal.

Units: the digest is SHA-256 over the float32 rows from which the emitted tokens were chosen, little endian.
Holds: exit status 0 only if history streamed in the first run, none in the second, and all bits were equal.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from pykvstream.engine import Model
from pykvstream.runtime.layout import ArenaPlan
from pykvstream.runtime.session import SessionStats
from pykvstream.sampling import SamplingParams

TEXT = Path(__file__).with_name("demo_text.txt")
QUESTION = "Why did the flame in the lamp of the lighthouse rise every nineteenth night? Answer in a few sentences."
CTX_TOKENS = 3072
UBATCH_ROWS = 128
CACHE_TYPES = {"cache_type_k": "q8_0", "cache_type_v": "q4_0"}
MIB = 1 << 20
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """What one answer was and what it cost."""

    n_prompt: int
    n_tokens: int
    sha256: str
    decode_streamed_bytes: int
    stats: SessionStats

    @property
    def streamed_bytes_per_token(self) -> float:
        return self.decode_streamed_bytes / max(1, self.n_tokens - 1)


def open_model(model: str, arena_bytes: int | None) -> Model:
    arena_mib = None if arena_bytes is None else arena_bytes / MIB
    return Model.open(model, arena_mib=arena_mib, ctx_size=CTX_TOKENS, ubatch_size=UBATCH_ROWS, **CACHE_TYPES)


def ask(model: Model, prompt: str, max_tokens: int, *, show: bool) -> Run:
    """Answer greedily; the first row comes from the prompt's passes, the others from decoding."""
    digest = hashlib.sha256()
    n_tokens = streamed_by_prompt = 0
    with model.session(ctx_size=CTX_TOKENS) as session:
        for piece in session.chat(prompt, max_tokens=max_tokens, params=GREEDY):
            if n_tokens == 0:
                streamed_by_prompt = session.stats.streamed_bytes
            n_tokens += 1
            digest.update(piece.logits.astype("<f4", copy=False).tobytes())
            if show:
                print(piece.text, end="", flush=True)
        stats = session.stats
        n_prompt = len(session.tokens) - n_tokens
    return Run(n_prompt, n_tokens, digest.hexdigest(), stats.streamed_bytes - streamed_by_prompt, stats)


def small_arena(plan: ArenaPlan, n_prompt: int) -> int:
    """Half of the history, but never less than works."""
    half = plan.shape.history_bytes(n_prompt) // 2
    return max(plan.smallest_bytes, half) // 64 * 64


def print_runs(streamed: Run, resident: Run) -> None:
    def row(name: str, *values: str) -> None:
        print(f"{name:<28}" + "".join(f"{value:>18}" for value in values))

    runs = (streamed, resident)
    row("", "streamed", "resident")
    row("arena", *(f"{run.stats.arena_bytes / MIB:.1f} MiB" for run in runs))
    row("history", *(f"{run.stats.history_bytes / MIB:.1f} MiB" for run in runs))
    row("streamed per token", *(f"{run.streamed_bytes_per_token / MIB:.2f} MiB" for run in runs))
    row("streamed in all", *(f"{run.stats.streamed_bytes / MIB:.1f} MiB" for run in runs))
    row("prompt", *(f"{run.stats.prefill_tokens_per_s:.1f} tokens/s" for run in runs))
    row("answer", *(f"{run.stats.decode_tokens_per_s:.1f} tokens/s" for run in runs))
    row("SHA-256 of all logits", *(run.sha256[:16] for run in runs))


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream a history through a small arena and compare every logit.")
    parser.add_argument("--model", default="demo", help="GGUF file (default: the demo model)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (default: %(default)s)")
    options = parser.parse_args()
    prompt = f"{TEXT.read_text(encoding='utf-8')}\n\n{QUESTION}"

    with open_model(options.model, None) as model:
        n_prompt = len(model.encode_chat([{"role": "user", "content": prompt}]))
        arena_bytes = small_arena(model.plan, n_prompt)
        print(f"a text of {n_prompt} tokens, an arena of {arena_bytes / MIB:.1f} MiB. {QUESTION}\n")
        with open_model(options.model, arena_bytes) as small:
            streamed = ask(small, prompt, options.max_tokens, show=True)
        print("\n\nthe same with everything resident ...\n")
        resident = ask(model, prompt, options.max_tokens, show=False)

    print_runs(streamed, resident)
    is_equal = streamed.sha256 == resident.sha256
    print(f"\nlogits: {streamed.n_tokens} rows, {'every bit equal' if is_equal else 'NOT EQUAL'}")
    did_stream = streamed.stats.streamed_bytes > 0 and resident.stats.streamed_bytes == 0
    if not did_stream:
        print("the comparison is void: history must stream in the first run alone", file=sys.stderr)
    return 0 if is_equal and did_stream else 1


if __name__ == "__main__":
    sys.exit(main())
