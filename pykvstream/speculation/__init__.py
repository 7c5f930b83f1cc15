"""Drafting: guesses how a text goes on, which one pass of the model then verifies together.

One subject a file: ``drafter`` (what all have in common), ``occurrences`` (an index of n-grams), ``simple``,
``mapped``, ``hashed``, ``cached`` with ``counts`` (the drafters), ``chain`` (several of them), ``params``, ``stats``.

Holds: everything here is a function of tokens alone; no guess changes a text. The drafter that is part of a model
belongs to the runtime.
"""

from pykvstream.speculation.cached import NgramCache
from pykvstream.speculation.chain import Chain, Window
from pykvstream.speculation.counts import NgramCounts
from pykvstream.speculation.drafter import NO_DRAFT, Draft, Drafter, GoesOn, StepDrafter, Weights
from pykvstream.speculation.hashed import NgramMod
from pykvstream.speculation.mapped import NgramMap
from pykvstream.speculation.params import (
    DRAFTERS,
    HEAD_DRAFTER,
    SAMPLINGS,
    ModSize,
    NgramSize,
    SpeculationParams,
    chain_of,
    check_drafter,
    make_drafters,
)
from pykvstream.speculation.simple import NgramSimple
from pykvstream.speculation.stats import DrafterStats, DraftStats

__all__ = [
    "DRAFTERS", "HEAD_DRAFTER", "NO_DRAFT", "SAMPLINGS", "Chain", "Draft", "DraftStats", "Drafter", "DrafterStats",
    "GoesOn", "ModSize", "NgramCache", "NgramCounts", "NgramMap", "NgramMod", "NgramSimple", "NgramSize",
    "SpeculationParams", "StepDrafter", "Weights", "Window", "chain_of", "check_drafter", "make_drafters",
]  # fmt: skip
