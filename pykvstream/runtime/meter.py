"""What a session has cost: passes counted as they end, and the figures that are told of them.

Units: bytes, pages, tokens, seconds while counting, milliseconds where told.
Holds: ``Meter``, ``SessionStats``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pykvstream.core.pager import Traffic
from pykvstream.runtime.blueprint import Phase
from pykvstream.runtime.hidden import HeadStats
from pykvstream.speculation.stats import DraftStats


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Counters of one session since it was made; bytes, pages, milliseconds, tokens per second.

    ``resident_pages`` and ``ring_slots`` are the pool's, which the sessions of a model share. Tokens count each time
    they are run: again after a truncation, and also where the call failed later on. ``recomputed_tokens``: of all
    these, the ones that were run only to bring a recurrent state back. Tokens of drafts count where they were right;
    ``draft`` tells of all of them, where there was drafting, ``head`` what the MTP head ran, where it is at work.
    ``passes``: over the model, without those of an MTP head.
    """

    arena_bytes: int
    history_bytes: int
    page_tokens: int
    resident_pages: int
    ring_slots: int
    streamed_bytes: int
    loaded_bytes: int
    copies: int
    passes: int
    stall_ms: float
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    head: HeadStats | None = None
    draft: DraftStats | None = None

    def as_dict(self) -> dict[str, object]:
        """All figures by name, derived ones too; under ``draft`` and ``head`` those of drafting, if there was any."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Meter:
    """Adds up what passes cost, by phase."""

    def __init__(self) -> None:
        self.tokens = {phase: 0 for phase in Phase}
        self.seconds = {phase: 0.0 for phase in Phase}
        self.streamed_bytes = 0
        self.loaded_bytes = 0
        self.copies = 0
        self.passes = 0
        self.stall_ns = 0
        self.recomputed = 0

    def add(self, phase: Phase, n_tokens: int, seconds: float, before: Traffic, after: Traffic) -> None:
        """Count a pass: its time, and the traffic from before it to behind it."""
        self.tokens[phase] += n_tokens
        self.passes += 1
        self.seconds[phase] += seconds
        self.streamed_bytes += after.streamed_bytes - before.streamed_bytes
        self.loaded_bytes += after.loaded_bytes - before.loaded_bytes
        self.copies += after.copies - before.copies
        self.stall_ns += after.stall_ns - before.stall_ns

    def rate(self, phase: Phase, n_tokens: int) -> float:
        """Tokens per second of a phase, of the tokens that count; 0 before its first pass."""
        return n_tokens / self.seconds[phase] if self.seconds[phase] > 0 else 0.0
