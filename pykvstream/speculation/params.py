"""What the user sets of drafting, checked once; the names are those of the flags.

Units: sizes in tokens.
Holds: ``SpeculationParams``, ``NgramSize``, ``ModSize``, ``DRAFTERS``, ``HEAD_DRAFTER``, ``SAMPLINGS``, ``chain_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Final, Literal

from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.speculation.cached import NgramCache
from pykvstream.speculation.chain import Chain
from pykvstream.speculation.controller import Controller
from pykvstream.speculation.counts import NgramCounts
from pykvstream.speculation.drafter import Drafter
from pykvstream.speculation.hashed import NgramMod
from pykvstream.speculation.mapped import NgramMap
from pykvstream.speculation.simple import NgramSimple

DRAFTERS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""In the order in which they are asked; behind them ``HEAD_DRAFTER``, which is part of a model."""
HEAD_DRAFTER = "draft-mtp"
SAMPLINGS = ("coupled", "greedy", "probabilistic")
MOST_DRAFTED = 8
AUTO: Final = "auto"
_ALL = (*DRAFTERS, HEAD_DRAFTER)
MOST_SIZE = 1024
_REFUSED = {
    "draft-simple": "there is no second model",
    "draft-eagle3": "there is no second model",
    "draft-dflash": "there is no second model",
    "draft-dspark": "there is no second model",
}


def check_drafter(name: object) -> str:
    """``name`` if there is such a drafter. Raises ``Unsupported`` with the reason, or ``InvalidArgument``."""
    if isinstance(name, str) and name in _ALL:
        return name
    known = ", ".join(_ALL)
    if isinstance(name, str) and name in _REFUSED:
        raise Unsupported(f"spec_type {name!r} is not supported: {_REFUSED[name]}; supported: {known}")
    raise InvalidArgument(f"spec_type {name!r} is no drafter; supported: {known}")


def _check(name: str, value: object, least: int, most: int, others: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise InvalidArgument(f"{name} must be an integer from {least} to {most}{others}, got {value!r}")


@dataclass(frozen=True, slots=True)
class NgramSize:
    """``size_n`` tokens are looked for, up to ``size_m`` are drafted; ``min_hits`` of ``ngram-map-k4v`` alone."""

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1

    def __post_init__(self) -> None:
        for name, value in (("size_n", self.size_n), ("size_m", self.size_m), ("min_hits", self.min_hits)):
            _check(name, value, 1, MOST_SIZE)


@dataclass(frozen=True, slots=True)
class ModSize:
    """``n_match`` tokens are looked for, ``n_min`` to ``n_max`` are drafted."""

    n_match: int = 24
    n_min: int = 48
    n_max: int = 64

    def __post_init__(self) -> None:
        _check("n_match", self.n_match, 1, MOST_SIZE)
        _check("n_max", self.n_max, 1, MOST_SIZE)
        _check("n_min", self.n_min, 0, self.n_max)


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Which drafters, and how their drafts are judged.

    ``types``: asked in the order of ``DRAFTERS``, then ``draft-mtp``, whatever their order here; the first that drafts
    is taken.
    ``draft_n_max``: cuts every draft; None leaves each drafter its own bound, and ``auto`` decides round by round who
    drafts and how far, by what has been right and what it costs. ``draft_n_min``: shorter drafts are none.
    ``draft_p_min``: ``draft-mtp`` ends a draft before a token that it is less sure of, among its ten best.
    ``draft_sampling``: ``coupled`` and ``greedy`` accept what would have been chosen anyway, so that the text is that
    without drafting; for drafters that follow the text they are one. ``probabilistic`` accepts by probability: the same
    distribution of texts, but another text for a seed. ``static``, ``dynamic``: counts of ``ngram-cache``.
    """

    types: tuple[str, ...] = ()
    draft_n_max: int | Literal["auto"] | None = None
    draft_n_min: int = 0
    draft_p_min: float = 0.0
    draft_sampling: str = "coupled"
    ngram_simple: NgramSize = field(default_factory=NgramSize)
    ngram_map_k: NgramSize = field(default_factory=NgramSize)
    ngram_map_k4v: NgramSize = field(default_factory=NgramSize)
    ngram_mod: ModSize = field(default_factory=ModSize)
    static: NgramCounts | None = None
    dynamic: NgramCounts | None = None

    def __post_init__(self) -> None:
        if isinstance(self.types, str) or not isinstance(self.types, Iterable):
            raise InvalidArgument(f"types must be a sequence of names, got {self.types!r}")
        for name, size, kind in (
            ("ngram_simple", self.ngram_simple, NgramSize),
            ("ngram_map_k", self.ngram_map_k, NgramSize),
            ("ngram_map_k4v", self.ngram_map_k4v, NgramSize),
            ("ngram_mod", self.ngram_mod, ModSize),
        ):
            if not isinstance(size, kind):
                raise InvalidArgument(f"{name} must be {kind.__name__}, got {size!r}")
        names = [check_drafter(name) for name in self.types]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"types names a drafter twice: {', '.join(names)}")
        object.__setattr__(self, "types", tuple(sorted(names, key=_ALL.index)))
        if self.draft_n_max not in (None, AUTO):
            _check("draft_n_max", self.draft_n_max, 1, MOST_DRAFTED, f", {AUTO!r} or None")
        if self.is_auto and self.is_probabilistic:
            raise InvalidArgument(
                "draft_n_max 'auto' decides by the clock, and a text by probabilistic drafts depends on their length:"
                " give a number"
            )
        _check("draft_n_min", self.draft_n_min, 0, self.most_drafted or MOST_SIZE)
        p_min = self.draft_p_min
        if isinstance(p_min, bool) or not isinstance(p_min, Real) or not 0.0 <= p_min <= 1.0:
            raise InvalidArgument(f"draft_p_min must be a number from 0 to 1, got {p_min!r}")
        if self.draft_sampling not in SAMPLINGS:
            raise InvalidArgument(f"draft_sampling must be one of {', '.join(SAMPLINGS)}, got {self.draft_sampling!r}")
        for name, counts in (("static", self.static), ("dynamic", self.dynamic)):
            if counts is not None and not isinstance(counts, NgramCounts):
                raise InvalidArgument(f"{name} must be NgramCounts, got {type(counts).__name__}")
            if counts is not None and "ngram-cache" not in self.types:
                raise InvalidArgument(f"{name} counts need the drafter ngram-cache")

    @property
    def is_auto(self) -> bool:
        """Whether a controller decides how far drafts go."""
        return self.draft_n_max == AUTO

    @property
    def most_drafted(self) -> int | None:
        """What cuts every draft; None where nothing does."""
        return None if self.draft_n_max is None or isinstance(self.draft_n_max, str) else self.draft_n_max

    @property
    def is_probabilistic(self) -> bool:
        """Whether drafts are accepted by their probability."""
        return self.draft_sampling == "probabilistic"


def chain_of(params: SpeculationParams, n_vocab: int, head: Drafter | None = None) -> Chain:
    """Drafters of an empty text, ``head`` behind them. Raises ``InvalidArgument`` for counts of another vocabulary."""
    for name, counts in (("static", params.static), ("dynamic", params.dynamic)):
        if counts is not None and counts.largest_token() >= n_vocab:
            raise InvalidArgument(
                f"{name} counts name token {counts.largest_token()}, the vocabulary has {n_vocab} tokens"
            )

    def make() -> list[Drafter]:
        return make_drafters(params) if head is None else [*make_drafters(params), head]

    drafters = make()
    if not params.is_auto:
        return Chain(drafters, params.most_drafted, params.draft_n_min, make=make)
    controller = Controller(tuple(drafter.name for drafter in drafters), frozenset((HEAD_DRAFTER,)))
    return Chain(drafters, None, params.draft_n_min, controller, {HEAD_DRAFTER: MOST_DRAFTED}, make)


def make_drafters(params: SpeculationParams) -> list[Drafter]:
    """New drafters of an empty text, in the order in which they are asked, without that of a model."""
    simple, k, k4v, mod = params.ngram_simple, params.ngram_map_k, params.ngram_map_k4v, params.ngram_mod
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram-simple": lambda: NgramSimple(simple.size_n, simple.size_m),
        "ngram-map-k": lambda: NgramMap(k.size_n, k.size_m),
        "ngram-map-k4v": lambda: NgramMap(k4v.size_n, k4v.size_m, k4v.min_hits),
        "ngram-mod": lambda: NgramMod(mod.n_match, mod.n_min, mod.n_max),
        "ngram-cache": lambda: NgramCache(params.static, params.dynamic),
    }
    return [makers[name]() for name in params.types if name in makers]
