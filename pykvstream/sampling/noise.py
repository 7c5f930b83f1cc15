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

from pykvstream.errors import InvalidArgument
from pykvstream.sampling.elementary import fixed_log

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_WORD_MASK = np.uint64(_WORD)
_WORD_BITS = np.uint64(32)
# Blocks of this many counters keep the working arrays inside the second-level cache.
_BLOCK = 4096


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


def philox_round_keys(key: int) -> NDArray[np.uint64]:
    """Return the keys of the ten rounds, shape (10, 2, 1), second key word first."""
    low, high = key & _WORD, key >> 32
    keys = [((low + r * _WEYL[0]) & _WORD, (high + r * _WEYL[1]) & _WORD) for r in range(_ROUNDS)]
    return np.array(keys, dtype=np.uint64)[:, :, None]


def philox(counter: NDArray[np.uint64], round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the four output words of each counter; both have shape (4, n) and values below 2^32."""
    # Words 0 and 2 are multiplied, words 1 and 3 only mixed: as two rows each, a round is five array
    # operations.
    factors, mixed = counter[0::2], counter[1::2]
    for key in round_keys:
        product = _MULTIPLIERS * factors
        factors = (product >> _WORD_BITS)[::-1] ^ mixed
        factors ^= key
        product &= _WORD_MASK
        mixed = product[::-1]
    words: NDArray[np.uint64] = np.stack((factors[0], mixed[0], factors[1], mixed[1]))
    return words


def _uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return (r + 1/2) / 2^52 for the 52-bit r made of the top 26 bits of the first two words."""
    bits = ((words[0] >> np.uint64(6)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    result: NDArray[np.float64] = bits.astype(np.float64)
    result += 0.5
    result *= 2.0**-52
    return result


class Noise:
    """The random numbers of one seed."""

    __slots__ = ("_round_keys", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = check_u64("seed", seed)
        self._round_keys = philox_round_keys(self.seed)

    def _words(self, first: NDArray[np.int64], number: int, stream: _Stream) -> NDArray[np.uint64]:
        counter = np.empty((4, first.size), dtype=np.uint64)
        counter[0] = first
        counter[1:] = np.array([[number & _WORD], [number >> 32], [stream]], dtype=np.uint64)
        return philox(counter, self._round_keys)

    def gumbel(self, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a standard Gumbel number, -log(-log(u)), for each token at this position."""
        return self._gumbel(position, tokens, _Stream.GUMBEL)

    def draft_gumbel(self, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same for drafts that are drawn by noise of their own."""
        return self._gumbel(position, tokens, _Stream.DRAFT)

    def _gumbel(self, position: int, tokens: NDArray[np.int64], stream: _Stream) -> NDArray[np.float64]:
        result = np.empty(tokens.size, dtype=np.float64)
        for start in range(0, tokens.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            uniform = _uniform(self._words(tokens[block], position, stream))
            np.negative(fixed_log(-fixed_log(uniform)), out=result[block])
        return result

    def xtc_uniform(self, position: int) -> float:
        """Return the number that decides whether XTC applies at this position."""
        return float(_uniform(self._words(np.zeros(1, dtype=np.int64), position, _Stream.XTC))[0])

    def accept_uniform(self, position: int) -> float:
        """Return the number that decides whether the draft of this position is accepted by its probability."""
        return float(_uniform(self._words(np.zeros(1, dtype=np.int64), position, _Stream.ACCEPT))[0])

    def fork_seed(self, index: int) -> int:
        """Return the seed of fork number ``index``."""
        words = self._words(np.zeros(1, dtype=np.int64), index, _Stream.FORK)
        return int(words[0, 0]) | int(words[1, 0]) << 32


def fork_seed(seed: int, k: int) -> int:
    """Return the 64-bit seed of fork number ``k`` of a session whose seed is ``seed``."""
    return Noise(seed).fork_seed(check_u64("k", k))
