"""Token choice: from a row of logits to one token, the same token on every platform.

One subject a file: ``params`` (what the user sets), ``penalties`` (history and the logits it lowers),
``truncation`` (which candidates stay), ``noise`` (the counter-based generator), ``elementary`` (exp and log
from basic operations), ``logprobs`` (row checks and what is reported), ``rejection`` (drafts accepted by their
probability), ``sampler`` (the chain).

Holds: the token is a pure function of (parameters, accepted tokens, logits, seed, position). Nothing that
decides uses the platform's mathematics library or a sum whose order numpy may choose.
"""

from pykvstream.sampling.front import FRONT_BEST, Front, front_words, rows_needed_by
from pykvstream.sampling.logprobs import Choice, top_logprobs
from pykvstream.sampling.noise import fork_seed
from pykvstream.sampling.params import LogitBias, SamplingParams
from pykvstream.sampling.rejection import Distribution, distribution_of, overlap
from pykvstream.sampling.sampler import Sampler, SamplerState
from pykvstream.sampling.truncation import Candidates, top_candidates

__all__ = [
    "FRONT_BEST", "Candidates", "Choice", "Distribution", "Front", "LogitBias", "Sampler", "SamplerState",
    "SamplingParams", "distribution_of", "fork_seed", "front_words", "overlap", "rows_needed_by", "top_candidates",
    "top_logprobs",
]  # fmt: skip
