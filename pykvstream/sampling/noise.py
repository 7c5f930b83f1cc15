"""Random numbers without state: each is a function of (seed, position, token, stream).

A draft that looks at position p and the verify pass that looks at it later read the same noise, in whatever
order and however often they ask: this is what makes drafting invisible in the text.

Units: seeds and positions are unsigned 64-bit numbers; uniforms are multiples of 2^-53 in the open interval
(0, 1).
Order: counter words are token, position (low, high), stream; key words are the seed (low, high).
Source: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011).
Holds: the noise of a token does not depend on which other tokens are asked for.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.noise import noise_gumbel, noise_uniform, noise_words
from pykvstream.errors import InvalidArgument

_ONE = np.zeros(1, dtype=np.int64)


class _Stream(IntEnum):
    GUMBEL = 0
    XTC = 1
    FORK = 2
    ACCEPT = 3
    DRAFT = 4


def check_u64(name: str, value: int) -> int:
    """Return ``value`` if it is an integer that fits 64 unsigned bits."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << 64:
        raise InvalidArgument(f"{name} must be an integer from 0 to 2^64 - 1, got {value!r}")
    return int(value)


class Noise:
    """The random numbers of one seed."""

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = check_u64("seed", seed)

    def gumbel(self, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a standard Gumbel number, -log(-log(u)), for each token at this position."""
        return noise_gumbel(self.seed, position, _Stream.GUMBEL, tokens)

    def draft_gumbel(self, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same for drafts that are drawn by noise of their own."""
        return noise_gumbel(self.seed, position, _Stream.DRAFT, tokens)

    def xtc_uniform(self, position: int) -> float:
        """Return the number that decides whether XTC applies at this position."""
        return float(noise_uniform(self.seed, position, _Stream.XTC, _ONE)[0])

    def accept_uniform(self, position: int) -> float:
        """Return the number that decides whether the draft of this position is accepted by its probability."""
        return float(noise_uniform(self.seed, position, _Stream.ACCEPT, _ONE)[0])

    def fork_seed(self, index: int) -> int:
        """Return the seed of fork number ``index``."""
        words = noise_words(self.seed, index, _Stream.FORK, _ONE)[0]
        return int(words[0]) | int(words[1]) << 32


def fork_seed(seed: int, k: int) -> int:
    """Return the 64-bit seed of fork number ``k`` of a session whose seed is ``seed``."""
    return Noise(seed).fork_seed(check_u64("k", k))
