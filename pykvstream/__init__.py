"""Exact long conversations on models whose key/value cache does not fit in device memory.

    from pykvstream import Model

    with Model.open("demo", arena_mib=16) as model, model.session(seed=1) as session:
        for piece in session.chat("Name three rivers."):
            print(piece.text, end="", flush=True)

The names below are the public Python interface; they are imported when first used, so that reading a file's metadata
(``pykvstream.gguf``) needs neither the native core nor the tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykvstream.engine import Model, Session
    from pykvstream.errors import KvStreamError
    from pykvstream.gguf import GgufFile
    from pykvstream.runtime.meter import SessionStats
    from pykvstream.runtime.ngram_file import load_ngram_counts, save_ngram_counts
    from pykvstream.runtime.pieces import Piece
    from pykvstream.runtime.target import Phase
    from pykvstream.sampling import SamplingParams
    from pykvstream.speculation import ModSize, NgramCounts, NgramSize, SpeculationParams
    from pykvstream.text.deltas import Answer
    from pykvstream.text.wishes import Reasoning

__all__ = [
    "Answer", "GgufFile", "KvStreamError", "ModSize", "Model", "NgramCounts", "NgramSize", "Phase", "Piece",
    "Reasoning", "SamplingParams", "Session", "SessionStats", "SpeculationParams", "load_ngram_counts",
    "save_ngram_counts",
]  # fmt: skip
__version__ = "0.1.0"

_HOME = {
    "Answer": "pykvstream.text.deltas",
    "GgufFile": "pykvstream.gguf",
    "KvStreamError": "pykvstream.errors",
    "ModSize": "pykvstream.speculation",
    "Model": "pykvstream.engine",
    "NgramCounts": "pykvstream.speculation",
    "NgramSize": "pykvstream.speculation",
    "Phase": "pykvstream.runtime.target",
    "Piece": "pykvstream.runtime.pieces",
    "Reasoning": "pykvstream.text.wishes",
    "SamplingParams": "pykvstream.sampling",
    "Session": "pykvstream.engine",
    "SessionStats": "pykvstream.runtime.meter",
    "SpeculationParams": "pykvstream.speculation",
    "load_ngram_counts": "pykvstream.runtime.ngram_file",
    "save_ngram_counts": "pykvstream.runtime.ngram_file",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
