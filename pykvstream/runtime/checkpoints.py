"""Recurrent states of the past in host memory, so that a conversation can go back and run only what follows.

Units: positions in tokens: where chunks begin, on the grid of ``CHUNK_TOKENS`` or behind tokens that were decoded.
Order: the snapshot that was used least recently makes room; whoever held it finds it gone when it looks.
Holds: ``CheckpointStore``, ``Kept``, ``KeptStates``, ``checkpoint_slots``. A snapshot that nobody holds is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykvstream.core.bank import Bank, Snapshot
from pykvstream.core.device import Device
from pykvstream.core.state import CHUNK_TOKENS, DeltaLayer, State
from pykvstream.errors import InvalidArgument, NotFound

_DEFAULT_BYTES = 256 << 20
_DEFAULT_SLOTS = 32
_MOST_SLOTS = 1 << 16
_MOST_MIB = 2**40


@dataclass(eq=False, slots=True)
class Kept:
    """A snapshot that ``n_holders`` sequences may go back to; None once it made room for another."""

    snapshot: Snapshot | None
    n_holders: int = 1


KeptStates = dict[int, Kept]
"""What one sequence may go back to, by position. Those that made room stay listed until they are looked for."""


def grid_point(position: int) -> int:
    """The last place at or before ``position`` where chunks begin."""
    return position // CHUNK_TOKENS * CHUNK_TOKENS


def checkpoint_bytes_of(mib: float) -> int:
    """A budget given in MiB as bytes. Raises ``InvalidArgument`` out of range."""
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 <= mib < _MOST_MIB:
        raise InvalidArgument(f"a budget of {mib!r} MiB for checkpoints")
    return int(mib * 2**20)


def checkpoint_slots(slot_bytes: int, budget_bytes: int | None) -> int:
    """Snapshots of ``slot_bytes`` that a budget has room for; None is the default budget."""
    if budget_bytes is None:
        return min(_DEFAULT_BYTES // slot_bytes, _DEFAULT_SLOTS)
    return min(budget_bytes // slot_bytes, _MOST_SLOTS)


class CheckpointStore:
    """``n_slots`` snapshots for all sequences of a target; whoever uses it holds the target's turn."""

    def __init__(self, device: Device, layers: Sequence[DeltaLayer], n_slots: int) -> None:
        self._bank = Bank(device, layers, n_slots)
        self._free = list(reversed(range(n_slots)))
        self._used: dict[Kept, None] = {}

    @property
    def n_kept(self) -> int:
        """Snapshots that somebody holds."""
        return len(self._used)

    def capture(self, state: State, kept: KeptStates) -> None:
        """Keep a state as it stands. After an error there is no new snapshot."""
        position = state.info.position
        known = kept.get(position)
        if known is not None and known.snapshot is not None:
            self._touch(known)
            return
        self._bank.cancel()  # what an interrupt has left
        state.fold()
        if not self._free:
            self._evict(next(iter(self._used)))
        slot = self._free[-1]
        self._bank.capture(slot, state)
        self._bank.publish()
        made = Kept(self._bank.snapshot(slot))
        self._used[made] = None
        self._free.pop()
        kept[position] = made

    def newest(self, kept: KeptStates, n_tokens: int) -> int | None:
        """The last position up to ``n_tokens`` that can be gone back to."""
        return max((at for at, each in kept.items() if at <= n_tokens and each.snapshot is not None), default=None)

    def restore(self, kept: KeptStates, position: int, state: State) -> None:
        """Bring back what is kept at a position; the state belongs to no sequence then. It survives any error."""
        found = kept.get(position)
        if found is None or found.snapshot is None:
            raise NotFound(f"no checkpoint of the recurrent state at {position} tokens")
        self._bank.cancel()
        self._bank.restore(found.snapshot, state)
        self._touch(found)

    def share(self, kept: KeptStates) -> KeptStates:
        """The same for a fork."""
        shared = {at: each for at, each in kept.items() if each.snapshot is not None}
        for each in shared.values():
            each.n_holders += 1
        return shared

    def release(self, kept: KeptStates, beyond: int = -1) -> None:
        """Let go of what lies beyond a position: tokens there are others now."""
        for at in [at for at in kept if at > beyond]:
            each = kept.pop(at)
            each.n_holders -= 1
            if each.n_holders == 0 and each.snapshot is not None:
                self._evict(each)

    def _touch(self, kept: Kept) -> None:
        del self._used[kept]
        self._used[kept] = None

    def _evict(self, kept: Kept) -> None:
        snapshot, kept.snapshot = kept.snapshot, None
        del self._used[kept]
        if snapshot is not None:
            self._free.append(snapshot.slot)
            if not self._bank.closed:
                self._bank.drop(snapshot.slot)

    def check_integrity(self) -> None:
        """Recompute every invariant of the bank. Raises ``IntegrityError``."""
        self._bank.check_integrity()

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._bank.close()
