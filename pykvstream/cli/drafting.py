"""Flags of drafting, and the files of ``ngram-cache``.

Holds: ``add_drafting``; ``drafting_options``, which refuses flags of a drafter that does not draft;
``speculation_for`` and ``keep_counts``, which read and write the files.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from pykvstream.cli.values import integer, probability
from pykvstream.errors import InvalidArgument, KvStreamError, NotFound
from pykvstream.runtime.ngram_file import check_ngram_file, load_ngram_counts, save_ngram_counts
from pykvstream.speculation import (
    HEAD_DRAFTER,
    SAMPLINGS,
    ModSize,
    NgramCounts,
    NgramSize,
    SpeculationParams,
    check_drafter,
)
from pykvstream.speculation.params import AUTO, MOST_DRAFTED, MOST_SIZE

_NONE = "none"
_OWN_BOUND = "own"
_OWN = "(default: the drafter's own)"
_SIZES = {
    "ngram-simple": ("size_n", "size_m"),
    "ngram-map-k": ("size_n", "size_m"),
    "ngram-map-k4v": ("size_n", "size_m", "min_hits"),
    "ngram-mod": ("n_match", "n_min", "n_max"),
}
"""The sizes of each drafter that are flags."""
_HELP = {
    "size_n": "tokens in a row that are looked for",
    "size_m": "tokens of a draft at most",
    "min_hits": "times that they must have been met",
    "n_match": "tokens in a row that are looked for",
    "n_min": "tokens of a draft at least",
    "n_max": "tokens of a draft at most",
}


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """``params`` are complete but for the counts that lie in the last two files; None drafts nothing."""

    params: SpeculationParams | None = None
    mtp_file: Path | None = None
    static_file: Path | None = None
    dynamic_file: Path | None = None

    @property
    def needs_head(self) -> bool:
        """Whether the model is to be opened with its MTP head."""
        return self.params is not None and HEAD_DRAFTER in self.params.types


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """Which drafters, and how they draft."""
    add = parser.add_argument_group("drafting").add_argument
    add("--spec-type", type=_types, default=(), metavar="NAME,NAME",
        help="draft tokens by ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache, or by the MTP"
        " head of the model, draft-mtp; none (default): do not. The text is the same")  # fmt: skip
    add("--spec-draft-n-max", "--draft-max", "--draft", dest="spec_draft_n_max", type=_n_max, metavar="N",
        help=f"tokens of any draft at most, 1 to {MOST_DRAFTED}; own: as each drafter has it;"
        " auto (default): decide who drafts and how far by what it brings")  # fmt: skip
    add("--spec-draft-n-min", "--draft-min", dest="spec_draft_n_min", type=integer(0, MOST_SIZE), metavar="N",
        help="shorter drafts are none (default 0)")  # fmt: skip
    add("--spec-draft-p-min", "--draft-p-min", dest="spec_draft_p_min", type=probability, metavar="P",
        help="draft-mtp drafts no token that has a lower probability among its ten best (default 0)")  # fmt: skip
    add("--mtp-file", type=Path, metavar="FILE", help="the MTP head of draft-mtp, where the model's file has none")
    add("--spec-draft-sampling", choices=SAMPLINGS,
        help="accept drafts that equal the choice (coupled, greedy), or by probability: then a seed gives another text"
        " of the same distribution (default coupled)")  # fmt: skip
    for name, sizes in _SIZES.items():
        for size in sizes:
            add(f"--spec-{name}-{size.replace('_', '-')}", type=integer(0 if size == "n_min" else 1, MOST_SIZE),
                metavar="N", help=f"{_HELP[size]} {_OWN}")  # fmt: skip
    add("--lookup-cache-static", "-lcs", dest="lookup_cache_static", type=Path, metavar="FILE",
        help="counts of a corpus for ngram-cache")  # fmt: skip
    add("--lookup-cache-dynamic", "-lcd", dest="lookup_cache_dynamic", type=Path, metavar="FILE",
        help="counts of earlier conversations for ngram-cache; this one is added at its end")  # fmt: skip


def _n_max(text: str) -> int | str:
    if text in (AUTO, _OWN_BOUND):
        return text
    try:
        return integer(1, MOST_DRAFTED)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {AUTO}, or {_OWN_BOUND}") from None


def _types(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    try:
        return () if names == (_NONE,) else SpeculationParams(types=tuple(map(check_drafter, names))).types
    except KvStreamError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def drafting_options(args: argparse.Namespace) -> DraftingOptions:
    """The options. Raises ``InvalidArgument`` for a flag whose drafter does not draft."""
    types: tuple[str, ...] = args.spec_type
    for flag in ("spec_draft_n_max", "spec_draft_n_min", "spec_draft_sampling"):
        if getattr(args, flag) is not None and not types:
            raise InvalidArgument(f"--{flag.replace('_', '-')} needs --spec-type")
    n_max = args.spec_draft_n_max
    if n_max is None and args.spec_draft_sampling != "probabilistic":
        n_max = AUTO
    sizes = {name: _size_of(args, name) for name in _SIZES}
    for name, given in sizes.items():
        if given and name not in types:
            raise InvalidArgument(f"--spec-{name}-{next(iter(given)).replace('_', '-')} needs --spec-type {name}")
    for flag in ("spec_draft_p_min", "mtp_file"):
        if getattr(args, flag) is not None and HEAD_DRAFTER not in types:
            raise InvalidArgument(f"--{flag.replace('_', '-')} needs --spec-type {HEAD_DRAFTER}")
    for flag in ("lookup_cache_static", "lookup_cache_dynamic"):
        if getattr(args, flag) is not None and "ngram-cache" not in types:
            raise InvalidArgument(f"--{flag.replace('_', '-')} needs --spec-type ngram-cache")
    if not types:
        return DraftingOptions()
    params = SpeculationParams(
        types=types,
        draft_n_max=None if n_max == _OWN_BOUND else n_max,
        draft_n_min=args.spec_draft_n_min or 0,
        draft_p_min=args.spec_draft_p_min or 0.0,
        draft_sampling=args.spec_draft_sampling or SAMPLINGS[0],
        ngram_simple=NgramSize(**sizes["ngram-simple"]),
        ngram_map_k=NgramSize(**sizes["ngram-map-k"]),
        ngram_map_k4v=NgramSize(**sizes["ngram-map-k4v"]),
        ngram_mod=ModSize(**sizes["ngram-mod"]),
    )
    return DraftingOptions(params, args.mtp_file, args.lookup_cache_static, args.lookup_cache_dynamic)


def _size_of(args: argparse.Namespace, name: str) -> dict[str, int]:
    """The fields of a drafter's sizes that were given."""
    found = {size: getattr(args, f"spec_{name}_{size}".replace("-", "_")) for size in _SIZES[name]}
    return {size: value for size, value in found.items() if value is not None}


def speculation_for(options: DraftingOptions) -> SpeculationParams | None:
    """The parameters with the counts of both files; the dynamic one may not be there yet. Raises ``FormatError``."""
    if options.params is None:
        return None
    static = None if options.static_file is None else load_ngram_counts(options.static_file)
    dynamic = None
    if options.dynamic_file is not None:
        check_ngram_file(options.dynamic_file)
        try:
            dynamic = load_ngram_counts(options.dynamic_file)
        except NotFound:
            dynamic = NgramCounts()
    return replace(options.params, static=static, dynamic=dynamic)


def keep_counts(options: DraftingOptions, speculation: SpeculationParams | None, counts: NgramCounts | None) -> None:
    """Add what a conversation counted to the dynamic file. Raises ``DeviceError``, and the file is as it was."""
    if options.dynamic_file is None or counts is None or speculation is None:
        return
    merged = NgramCounts() if speculation.dynamic is None else speculation.dynamic.copy()
    merged.merge(counts)
    save_ngram_counts(options.dynamic_file, merged)
