"""What the user sets of the sampling chain, checked once.

Units: temperatures divide logits; biases, penalties and multipliers are in logits; windows are in tokens, -1
for the whole history and 0 for none; probabilities are from 0 to 1.
Holds: a ``SamplingParams`` that exists is valid, immutable and hashable. The bounds of 10^6 are far outside
any use and keep every sum of the chain finite.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import cast

from pykvstream.errors import InvalidArgument

_LARGEST = 1e6
_LARGEST_COUNT = 2**31 - 1

_REAL_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (-_LARGEST, _LARGEST),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-_LARGEST, _LARGEST),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "repeat_penalty": (1.0 / _LARGEST, _LARGEST),
    "frequency_penalty": (-_LARGEST, _LARGEST),
    "presence_penalty": (-_LARGEST, _LARGEST),
    "dry_multiplier": (0.0, _LARGEST),
    "dry_base": (1.0, _LARGEST),
}
_COUNT_RANGES: dict[str, tuple[int, int]] = {
    "top_k": (-_LARGEST_COUNT, _LARGEST_COUNT),
    "penalty_last_n": (-1, _LARGEST_COUNT),
    "dry_allowed_length": (1, _LARGEST_COUNT),
    "dry_last_n": (-1, _LARGEST_COUNT),
}


def _checked_real(name: str, value: object, low: float, high: float) -> float:
    # Compared as it is: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= cast(float, value) <= high:
        raise InvalidArgument(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def _checked_count(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidArgument(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return int(value)


class LogitBias(Mapping[int, float]):
    """An immutable map from token id to what is added to its logit; minus infinity suppresses the token."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, float] | None = None) -> None:
        if items is not None and not isinstance(items, Mapping):
            raise InvalidArgument(f"logit_bias must map token ids to numbers, got {type(items).__name__}")
        checked: dict[int, float] = {}
        for token, bias in (items or {}).items():
            name = f"logit_bias[{token!r}]"
            key = _checked_count(f"{name}: token id", token, 0, _LARGEST_COUNT)
            is_suppressed = isinstance(bias, Real) and bias == -math.inf
            checked[key] = -math.inf if is_suppressed else _checked_real(name, bias, -_LARGEST, _LARGEST)
        self._items = dict(sorted(checked.items()))

    def __getitem__(self, token: int) -> float:
        return self._items[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return f"LogitBias({self._items!r})"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings of the chain; ``pykvstream.sampling.sampler`` states the order in which they apply.

    Off values: ``temperature <= 0`` is greedy, ``top_k <= 0``, ``top_p = 1``, ``min_p = 0``,
    ``typical_p = 1``, ``top_n_sigma <= 0``, ``xtc_probability = 0``, ``repeat_penalty = 1``, the other
    penalties 0, ``dry_multiplier = 0``. ``dry_breakers`` are token ids: only who holds the tokenizer can
    name them.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=LogitBias)

    def __post_init__(self) -> None:
        for name, (low, high) in _REAL_RANGES.items():
            object.__setattr__(self, name, _checked_real(name, getattr(self, name), low, high))
        for name, (least, most) in _COUNT_RANGES.items():
            object.__setattr__(self, name, _checked_count(name, getattr(self, name), least, most))
        if isinstance(self.dry_breakers, str) or not isinstance(self.dry_breakers, Collection):
            raise InvalidArgument(f"dry_breakers must be token ids, got {type(self.dry_breakers).__name__}")
        breakers = {_checked_count("dry_breakers", token, 0, _LARGEST_COUNT) for token in self.dry_breakers}
        object.__setattr__(self, "dry_breakers", tuple(sorted(breakers)))
        object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit after bias and penalties is taken."""
        return self.temperature <= 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether repetition, frequency or presence can change a logit."""
        values = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.penalty_last_n != 0 and values != (1.0, 0.0, 0.0)

    @property
    def has_dry(self) -> bool:
        """Whether DRY can change a logit."""
        return self.dry_last_n != 0 and self.dry_multiplier > 0.0
