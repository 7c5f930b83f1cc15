"""How often the MTP head is right on a text, through the engine: each draft before the one that it is chained on.

    python tests/bench/mtp_acceptance.py TEXT.txt[.xz] [--model demo-hybrid] [--ctx 1024] [--positions 500] [--parts 4]

At every position behind half a context of the text the head drafts, and one pass verifies: a draft is right where it
is the trunk's first choice, as in greedy decoding. Then the text goes on as it stands, whatever was drafted. Parts are
taken at even distances. What is printed is P(draft i is right | those before it were), with the number of cases.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pykvstream import Model, Session

DEPTH = 4


def drafts(session: Session, depth: int) -> list[int]:
    """The head's first choices, each made of the one before."""
    found: list[int] = []

    def choose(logits: NDArray[np.float32], position: int) -> int:
        found.append(int(logits.argmax()))
        return found[-1]

    session._core.draft(depth, choose)
    return found


def measure(session: Session, ids: list[int], n_prompt: int, depth: int) -> list[list[int]]:
    """For each index of a draft: cases in which all before it were right, and those in which it was too."""
    counts = [[0, 0] for _ in range(depth)]
    session.truncate(0)
    session.forward(ids[:n_prompt], logits="none")
    for token in ids[n_prompt:]:
        session._core.push(token)
        drafted = drafts(session, depth)
        chosen = session._core.verify(drafted).argmax(axis=1)
        for i, each in enumerate(drafted):
            counts[i][0] += 1
            if each != chosen[i]:
                break
            counts[i][1] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="demo-hybrid")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=500, help="of each part")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    opener = lzma.open if options.text.suffix == ".xz" else open
    with opener(options.text, "rt", encoding="utf-8") as file:
        text = file.read()
    n_prompt = options.ctx - options.positions - DEPTH
    total = [[0, 0] for _ in range(DEPTH)]
    with Model.open(options.model, ctx_size=options.ctx, mtp=True, threads=options.threads) as model:
        for part in range(options.parts):
            begin = part * len(text) // options.parts
            ids = model.tokenizer.encode(text[begin : begin + 12 * options.ctx])[: n_prompt + options.positions]
            with model.session() as session:
                for sums, found in zip(total, measure(session, ids, n_prompt, DEPTH), strict=True):
                    sums[0] += found[0]
                    sums[1] += found[1]
            shares = " ".join(f"{right / max(cases, 1):.3f} ({cases})" for cases, right in total)
            print(f"after part {part + 1}: {shares}", flush=True)
    print(json.dumps({"model": options.model, "given": [right / max(cases, 1) for cases, right in total]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
