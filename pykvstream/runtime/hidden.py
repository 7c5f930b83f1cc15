"""What the MTP head has to be told of one sequence: the trunk's hidden rows, and how far its own cache is true.

Shapes: hidden rows float32 ``[n, n_embd]``, by the position of their token.
Units: positions in tokens.
Order: the trunk's passes append; the head catches up before it drafts and lets rows go then. Of more than ``bound``
rows the oldest are dropped: a head that never drafts takes no more memory than that.
Holds: ``HiddenRows``, ``HeadContext``; ``HeadCounter`` and the ``HeadStats`` that it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.kv import Seq
from pykvstream.core.layer_lease import LayerLeaseInfo
from pykvstream.core.pager import Traffic

Rows = NDArray[np.float32]


class HiddenRows:
    """Rows of neighbouring positions, the newest ``bound`` of them."""

    def __init__(self, n_cols: int, bound: int) -> None:
        self.first = 0
        self.bound = bound
        self._rows = np.empty((0, n_cols), np.float32)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def end(self) -> int:
        """Behind the last position."""
        return self.first + len(self)

    def append(self, position: int, rows: Rows) -> None:
        """Rows from ``position`` on; where they do not follow the others, those are forgotten."""
        if position != self.end:
            self.clear(position)
        n_kept = min(len(self), max(self.bound - len(rows), 0))
        self.drop_before(self.end - n_kept)
        new = rows[-self.bound :]
        if self._end + len(new) > len(self._rows):
            self._move(len(self) + len(new))
        if n_kept == 0:
            self.first = position + len(rows) - len(new)
        self._rows[self._end : self._end + len(new)] = new
        self._end += len(new)

    def _move(self, n_rows: int) -> None:
        """To the front of an array with room for twice as many."""
        larger = np.empty((min(2 * n_rows, self.bound + n_rows), self._rows.shape[1]), np.float32)
        larger[: len(self)] = self._rows[self._begin : self._end]
        self._begin, self._end, self._rows = 0, len(self), larger

    def at(self, position: int) -> Rows | None:
        """One row ``[1, n_embd]``; None where it is not kept."""
        if not self.first <= position < self.end:
            return None
        return self.between(position, position + 1)

    def between(self, begin: int, end: int) -> Rows:
        """Rows of positions that are all kept; valid until the next change."""
        offset = self._begin - self.first
        return self._rows[offset + begin : offset + end]

    def drop_before(self, position: int) -> None:
        """Forget older rows."""
        n_dropped = min(max(position - self.first, 0), len(self))
        self._begin += n_dropped
        self.first += n_dropped

    def truncate(self, n_tokens: int) -> None:
        """Forget the rows of positions from ``n_tokens`` on."""
        if n_tokens < self.first:
            self.clear(n_tokens)
        self._end -= max(self.end - n_tokens, 0)

    def clear(self, position: int) -> None:
        """No row; the next one is that of ``position``."""
        self._begin = self._end = 0
        self.first = position

    def copy(self) -> HiddenRows:
        """The same rows in memory of their own."""
        child = HiddenRows(self._rows.shape[1], self.bound)
        child.append(self.first, self.between(self.first, self.end))
        return child


@dataclass(frozen=True, slots=True)
class HeadStats:
    """What the MTP head has run for a session, and what it took to have its pages on the device.

    ``steps``: rows that drafted. ``caught_up``: rows that only followed. ``leases``: rounds for which all pages were
    on the device at once; ``rounds_in_waves``: those for which they had no room. ``leased_bytes``: brought when a
    lease was taken, ``reused_pages``: there already. ``step_bytes``: brought while drafting, none of it under a lease.
    ``most_held_slots``: of a ring, under one lease.
    """

    steps: int
    caught_up: int
    leases: int
    rounds_in_waves: int
    leased_bytes: int
    reused_pages: int
    step_bytes: int
    most_held_slots: int


class HeadCounter:
    """Counts it."""

    def __init__(self) -> None:
        self.caught_up = self.rounds_in_waves = 0
        self._steps = self._leases = self._leased_bytes = self._reused_pages = 0
        self._step_bytes = self._most_held_slots = 0

    def add_step(self, before: Traffic, after: Traffic) -> None:
        """A row was drafted from; what its pager had copied before and behind it."""
        self._steps += 1
        self._step_bytes += after.loaded_bytes - before.loaded_bytes
        self._step_bytes += after.streamed_bytes - before.streamed_bytes

    def add_lease(self, lease: LayerLeaseInfo) -> None:
        """A lease was taken."""
        self._leases += 1
        self._leased_bytes += lease.populated_bytes
        self._reused_pages += lease.reused_pages
        self._most_held_slots = max(self._most_held_slots, lease.n_held_slots)

    @property
    def stats(self) -> HeadStats:
        """What was counted so far."""
        return HeadStats(
            self._steps,
            self.caught_up,
            self._leases,
            self.rounds_in_waves,
            self._leased_bytes,
            self._reused_pages,
            self._step_bytes,
            self._most_held_slots,
        )


class HeadContext:
    """The head's cache of one sequence: row r belongs to position ``base + r``; the first ``n_true`` rows were made of
    hidden rows of the trunk, those behind them of drafts.

    ``base`` is 0 but where hidden rows were lost before the head could catch up: then the head knows what came later.
    """

    def __init__(self, seq: Seq, n_embd: int, bound: int) -> None:
        self.seq = seq
        self.base = 0
        self.n_true = 0
        self.hidden = HiddenRows(n_embd, bound)
        self.counter = HeadCounter()
        self._kept: dict[int, Rows] = {}

    @property
    def end(self) -> int:
        """The first position that the head has not caught up with."""
        return self.base + self.n_true

    def n_behind(self, n_tokens: int) -> int:
        """Tokens between the head and the trunk."""
        return n_tokens - self.end

    def truncate(self, n_tokens: int) -> None:
        """The trunk went back to its first tokens. What the cache holds beyond is cut when the head next runs."""
        if n_tokens < self.base:
            self.restart(n_tokens)
        self.n_true = min(self.n_true, n_tokens - self.base)
        self.hidden.truncate(n_tokens)
        if n_tokens > 0 and len(self.hidden) == 0 and n_tokens in self._kept:
            self.hidden.append(n_tokens - 1, self._kept[n_tokens])

    def restart(self, base: int) -> None:
        """No row of the cache is true; the first will be that of ``base``."""
        self.base, self.n_true = base, 0

    def keep(self, n_tokens: int) -> None:
        """A state of the trunk is kept: the head goes on from there too."""
        row = self.hidden.at(n_tokens - 1)
        if row is not None:
            self.keep_row(n_tokens, row)

    def keep_row(self, n_tokens: int, row: Rows) -> None:
        """The hidden row of the last of the first tokens."""
        self._kept[n_tokens] = row.copy()

    def kept_row(self, n_tokens: int) -> Rows | None:
        """What was kept for a position."""
        return self._kept.get(n_tokens)

    def forget(self, beyond: int) -> None:
        """Tokens beyond a position are others now."""
        for at in [at for at in self._kept if at > beyond]:
            del self._kept[at]

    def fork(self) -> Self:
        """One that goes on alone; the cache's rows are in its history."""
        child = type(self)(self.seq.fork(), self.hidden.between(0, 0).shape[1], self.hidden.bound)
        child.base, child.n_true = self.base, self.n_true
        child.hidden = self.hidden.copy()
        child._kept = dict(self._kept)
        return child

    def close(self) -> None:
        """Give the history back. A second call does nothing."""
        self.seq.close()
