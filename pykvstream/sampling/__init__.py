"""Token choice: from a row of logits to one token, the same token on every platform.

One subject a file: ``params`` (what the user sets), ``penalties`` (history and the logits it lowers),
``truncation`` (which candidates stay), ``noise`` (the counter-based generator), ``elementary`` (exp and log
from basic operations), ``logprobs`` (row checks and what is reported), ``rejection`` (drafts accepted by their
probability), ``sampler`` (the chain).

Holds: the token is a pure function of (parameters, accepted tokens, logits, seed, position). Nothing that
decides uses the platform's mathematics library or a sum whose order numpy may choose.

The names below are imported when first used: parameters alone need no native core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykvstream.sampling.front import FRONT_BEST, Front, front_words, rows_needed_by
    from pykvstream.sampling.logprobs import Choice, token_logprobs, top_logprobs
    from pykvstream.sampling.noise import fork_seed
    from pykvstream.sampling.params import LogitBias, SamplingParams
    from pykvstream.sampling.rejection import Distribution, distribution_of, overlap
    from pykvstream.sampling.sampler import Sampler, SamplerState
    from pykvstream.sampling.truncation import Candidates, top_candidates

__all__ = [
    "FRONT_BEST", "Candidates", "Choice", "Distribution", "Front", "LogitBias", "Sampler", "SamplerState",
    "SamplingParams", "distribution_of", "fork_seed", "front_words", "overlap", "rows_needed_by", "token_logprobs",
    "top_candidates", "top_logprobs",
]  # fmt: skip

_HOME = {
    "FRONT_BEST": "pykvstream.sampling.front",
    "Candidates": "pykvstream.sampling.truncation",
    "Choice": "pykvstream.sampling.logprobs",
    "Distribution": "pykvstream.sampling.rejection",
    "Front": "pykvstream.sampling.front",
    "LogitBias": "pykvstream.sampling.params",
    "Sampler": "pykvstream.sampling.sampler",
    "SamplerState": "pykvstream.sampling.sampler",
    "SamplingParams": "pykvstream.sampling.params",
    "distribution_of": "pykvstream.sampling.rejection",
    "fork_seed": "pykvstream.sampling.noise",
    "front_words": "pykvstream.sampling.front",
    "overlap": "pykvstream.sampling.rejection",
    "rows_needed_by": "pykvstream.sampling.front",
    "token_logprobs": "pykvstream.sampling.logprobs",
    "top_candidates": "pykvstream.sampling.truncation",
    "top_logprobs": "pykvstream.sampling.logprobs",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
