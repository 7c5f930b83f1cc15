"""An interpolated Kneser-Ney model of characters: what the demo hybrid has to beat on held-out text.

    python -m tools.train_demo_hybrid.kneser_ney CORPUS [--order 5] [--held-out-bytes N]

``CORPUS`` is the folder that ``tools.train_demo_hybrid.corpus`` wrote: the model counts ``train.txt.xz`` and is asked
for ``held_out.txt.xz``. Characters are bytes, so that nothing is outside the alphabet; the zero byte between
documents is a character like any other, but predicting it is not counted.
Order: of the longest context the counts are those of the text; of each shorter one, the number of different characters
in front, which is what makes it Kneser-Ney. One discount D = n1 / (n1 + 2 n2) for each order. The mass that a
context's discounts free goes to the next shorter context, and of the shortest one to all 256 characters alike.
Source: Kneser and Ney 1995; Chen and Goodman 1998, section 4.1.6 (the interpolated form).
Shapes: n-grams are packed into uint64, the last character lowest, in ascending order; so are their contexts.
Holds: ``KneserNey``.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MOST_ORDER = 7
_ALPHABET = 256
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class _Order:
    """N-grams of one length with their counts; contexts with the sum of counts and the number of followers."""

    grams: NDArray[np.uint64]
    counts: NDArray[np.float64]
    contexts: NDArray[np.uint64]
    totals: NDArray[np.float64]
    followers: NDArray[np.float64]
    discount: float

    @classmethod
    def of(cls, grams: NDArray[np.uint64], counts: NDArray[np.int64]) -> _Order:
        contexts, begins = np.unique(grams >> np.uint64(8), return_index=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        return cls(
            grams=grams,
            counts=counts.astype(np.float64),
            contexts=contexts,
            totals=np.add.reduceat(counts, begins).astype(np.float64),
            followers=np.diff(np.append(begins, len(grams))).astype(np.float64),
            discount=once / (once + 2 * twice) if once else 0.0,
        )

    def interpolated(self, asked: NDArray[np.uint64], lower: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of the last character of each n-gram, given that of the next shorter context."""
        at, is_known = _find(self.contexts, asked >> np.uint64(8))
        where, is_seen = _find(self.grams, asked)
        counts = np.where(is_seen, self.counts[where], 0.0)
        freed = self.discount * self.followers[at]
        mixed = (np.maximum(counts - self.discount, 0.0) + freed * lower) / self.totals[at]
        return np.where(is_known, mixed, lower)


def _find(known: NDArray[np.uint64], asked: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Where each is among the known ones, and whether it is there at all."""
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return at, known[at] == asked


def packed(text: NDArray[np.uint8], length: int) -> NDArray[np.uint64]:
    """The n-gram that ends at each position from ``length - 1`` on."""
    n = len(text) - length + 1
    grams = np.zeros(n, np.uint64)
    for i in range(length):
        grams <<= np.uint64(8)
        grams |= text[i : i + n]
    return grams


class KneserNey:
    """Counts of a text; ``order`` characters make the longest n-gram."""

    def __init__(self, text: bytes, order: int = 5) -> None:
        if not 1 <= order <= MOST_ORDER or len(text) < order:
            raise SystemExit(f"an order of {order}: need 1 to {MOST_ORDER}, and as many characters of text")
        self._order = order
        data = np.frombuffer(bytes(order - 1) + text, np.uint8)
        grams, counts = np.unique(packed(data, order), return_counts=True)
        self._orders = [_Order.of(grams, counts)]
        for length in range(order - 1, 0, -1):
            shorter = grams & np.uint64((1 << 8 * length) - 1)
            grams, counts = np.unique(shorter, return_counts=True)
            self._orders.append(_Order.of(grams, counts))

    def probabilities(self, text: bytes) -> NDArray[np.float64]:
        """Of each character of a text, given those before it; in front of it lies what is in front of every text."""
        data = np.frombuffer(bytes(self._order - 1) + text, np.uint8)
        found = np.empty(len(text))
        for begin in range(0, len(text), _BLOCK):
            end = min(begin + _BLOCK, len(text))
            grams = packed(data[begin : end + self._order - 1], self._order)
            p = np.full(end - begin, 1 / _ALPHABET)
            for length, order in enumerate(reversed(self._orders), 1):
                p = order.interpolated(grams & np.uint64((1 << 8 * length) - 1), p)
            found[begin:end] = p
        return found

    def bits_per_byte(self, text: bytes) -> float:
        """Mean of -log2 p over all characters but the ends of documents."""
        is_counted = np.frombuffer(text, np.uint8) != 0
        return float(-np.log2(self.probabilities(text)[is_counted]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--held-out-bytes", type=int, default=None, help="only so many from the beginning")
    options = parser.parse_args()
    train, held_out = (
        lzma.decompress((options.corpus / f"{name}.txt.xz").read_bytes()) for name in ("train", "held_out")
    )
    model = KneserNey(train, options.order)
    part = held_out[: options.held_out_bytes]
    print(f"order {options.order}, {len(train)} bytes of training text: {model.bits_per_byte(part):.4f} bits per byte"
          f" over {len(part)} held-out bytes")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
