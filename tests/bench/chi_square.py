"""Draws by rejection against the distribution of the target: chi-square, and how many drafts stay.

    python tests/bench/chi_square.py [--draws 1000000] [--seed 1]

Draws are shared out among the cases. Of each: what is emitted at that many positions, its chi-square against the
exact distribution with the probability of a larger one, the share of drafts that stayed beside sum(min(p, q)), and
beside both the share that the coupled choice would have kept. The state is one: its distribution is made once, each
draw is the rest of ``Sampler.judge``, and every hundredth is compared with the whole. Ends with 1 where a probability
is below 1 in 10,000.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pykvstream.sampling import Distribution, Sampler, SamplingParams

N_VOCAB = 24
MASK = {3: -math.inf, 7: -math.inf}


@dataclass(frozen=True)
class Case:
    """``is_drawn``: drafts are drawn from what the draft's own logits say, else they are its first choice."""

    name: str
    params: SamplingParams
    is_drawn: bool
    history: tuple[int, ...] = ()


SHARP, WHOLE = SamplingParams(temperature=0.7), SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PENALTIES = SamplingParams(temperature=0.7, repeat_penalty=1.3, presence_penalty=0.4)
CASES = (
    Case("argmax drafts, 0.7", SHARP, False),
    Case("argmax drafts, 1.0, all tokens", WHOLE, False),
    Case("drawn drafts, 0.7", SHARP, True),
    Case("drawn drafts, 1.0, all tokens", WHOLE, True),
    Case("drawn, penalties", PENALTIES, True, (1, 5, 5)),
    Case("drawn, a mask", SamplingParams(temperature=1.0, logit_bias=MASK), True),
    Case("argmax, penalties and a mask", replace(PENALTIES, logit_bias=MASK), False, (2, 2)),
)


def dense(d: Distribution) -> NDArray[np.float64]:
    full = np.zeros(N_VOCAB)
    full[d.ids] = d.weights
    return full


def tail(chi_square: float, n_free: int) -> float:
    """The probability of a larger value, by the cube root that is nearly normal (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * n_free)
    z = ((chi_square / n_free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def run(case: Case, n_draws: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(N_VOCAB) * 1.5).astype(np.float32)
    guessed = (logits + rng.standard_normal(N_VOCAB)).astype(np.float32)
    sampler = Sampler(case.params, seed=seed, n_vocab=N_VOCAB)
    for token in case.history:
        sampler.accept(token)
    p, q = sampler.distribution(logits, 0), sampler.distribution(guessed, 0)
    best = int(q.ids[q.weights.argmax()])
    drawn_from = q if case.is_drawn else Distribution.certain(best)
    counts = np.zeros(N_VOCAB, np.int64)
    n_stayed = n_coupled = 0
    for position in range(n_draws):
        drafted = sampler.draw_draft(q, position) if case.is_drawn else best
        token = sampler.settle(p, drawn_from, drafted, position)
        if position % 100 == 0:
            assert token == sampler.judge(logits, position, drafted, q if case.is_drawn else None).token
        counts[token] += 1
        n_stayed += token == drafted
        if position % 10 == 0:
            draft = sampler.choose(guessed, position).token if case.is_drawn else best
            n_coupled += draft == sampler.choose(logits, position).token
    expected = dense(p) * n_draws
    is_there = expected > 0
    assert counts[~is_there].sum() == 0
    chi_square = float(((counts - expected)[is_there] ** 2 / expected[is_there]).sum())
    probability = tail(chi_square, int(is_there.sum()) - 1)
    bound = float(np.minimum(dense(p), dense(q)).sum()) if case.is_drawn else p.of(best)
    stayed, coupled = n_stayed / n_draws, n_coupled / (n_draws // 10)
    print(
        f"{case.name:30} {n_draws:8} draws  chi-square {chi_square:6.1f} of {int(is_there.sum()) - 1:2}"
        f"  p {probability:.3f}  stayed {stayed:.4f}  sum(min) {bound:.4f}  coupled {coupled:.3f}",
        flush=True,
    )
    return probability


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    n_each = -(-options.draws // len(CASES))
    return int(min(run(case, n_each, options.seed + i) for i, case in enumerate(CASES)) < 1e-4)


if __name__ == "__main__":
    sys.exit(main())
