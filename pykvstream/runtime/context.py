"""What a model remembers of one sequence: keys and values in pages and, on hybrids, recurrent state.

Both belong together: they are always at the same token. Keys and values can be cut anywhere; a state only within the
rows that its log still holds, or by an image or a snapshot that was taken before. Of a model that is cut every part
remembers its own layers.
Holds: ``Context``, ``PartContext``, ``Checkpoint``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.device import Device
from pykvstream.core.kv import Seq
from pykvstream.core.pager import Pager
from pykvstream.core.state import State
from pykvstream.errors import NotFound
from pykvstream.runtime.checkpoints import CheckpointStore, KeptStates
from pykvstream.runtime.hidden import HeadContext


class Checkpoint(NamedTuple):
    """The recurrent state behind ``n_tokens`` tokens, in host memory; None where it is that of no tokens."""

    n_tokens: int
    image: NDArray[np.uint8] | None


class PartContext:
    """One sequence in one part. ``state`` is None where that has no recurrent layers.

    ``kept``: snapshots of the state at earlier tokens of this very sequence. ``head``: what an MTP head knows of it.
    """

    def __init__(self, seq: Seq, state: State | None = None, head: HeadContext | None = None) -> None:
        self.seq = seq
        self.state = state
        self.head = head
        self.kept: KeptStates = {}
        if state is not None:
            state.attach(seq)

    @property
    def n_tokens(self) -> int:
        return self.seq.n_tokens

    def accept(self, n_rows: int) -> None:
        """The pass that has been run and committed counts for the state too."""
        if self.state is not None:
            self.state.accept(self.seq, n_rows)

    def settle(self, pager: Pager) -> None:
        """Bring both parts back to one token after a pass that failed, or an interrupt between the two.

        A pass that the state has not accepted is given up. A state that cannot follow a cut is begun anew, and the
        sequence with it: whoever knows the tokens runs them again.
        """
        if self.state is None:
            return
        info = self.state.info
        if info.open_rows:
            self.state.accept(self.seq, 0)
        if info.seq_id == 0:
            self._follow(pager, info.position)
            return
        n_tokens = min(self.n_tokens, info.position)
        self._cut(pager, n_tokens if self.can_keep(n_tokens) else 0)

    def _follow(self, pager: Pager, n_tokens: int) -> None:
        """Bring the sequence to a state that was put in place of another one."""
        if self.state is None:
            return
        if n_tokens > self.n_tokens:
            self._cut(pager, 0)
            return
        pager.truncate(self.seq, n_tokens)
        self.state.attach(self.seq)
        self._cut_head(n_tokens)

    def go_back(self, pager: Pager, store: CheckpointStore, n_tokens: int) -> None:
        """Go back to where a state is kept. After an error ``settle`` brings both parts to one token, here or there."""
        if self.state is None:
            return
        pager.publish_wait()  # the likeliest to fail, before anything has changed
        store.restore(self.kept, n_tokens, self.state)
        self._follow(pager, n_tokens)

    def can_keep(self, n_tokens: int) -> bool:
        """Whether the first ``n_tokens`` tokens can be kept and the others dropped."""
        return self.state is None or n_tokens == 0 or n_tokens >= self.state.info.folded_tokens

    def require_keep(self, n_tokens: int) -> None:
        """Raises ``NotFound`` where the state cannot follow."""
        if self.state is not None and not self.can_keep(n_tokens):
            raise NotFound(
                f"cannot go back to {n_tokens} tokens: the recurrent state holds {self.state.info.folded_tokens} tokens"
                f" and a log of the {self.state.info.pending_rows} behind them"
            )

    def truncate(self, pager: Pager, n_tokens: int) -> None:
        """Keep the first tokens. Raises ``NotFound``, and nothing has changed, where the state cannot follow."""
        self.require_keep(n_tokens)
        self._cut(pager, n_tokens)

    def _cut(self, pager: Pager, n_tokens: int) -> None:
        """Cut both; of what is that long already the state only takes note."""
        if n_tokens != self.n_tokens:
            pager.truncate(self.seq, n_tokens)
        self._cut_head(n_tokens)
        if self.state is None:
            return
        if n_tokens == 0:
            self.state.clear()
            self.state.attach(self.seq)
        else:
            self.state.truncate(self.seq, n_tokens)

    def _cut_head(self, n_tokens: int) -> None:
        if self.head is not None:
            self.head.truncate(n_tokens)

    def checkpoint(self) -> Checkpoint:
        """Take what ``restore`` needs."""
        n_tokens = self.n_tokens
        return Checkpoint(n_tokens, None if self.state is None or n_tokens == 0 else self.state.save())

    def restore(self, pager: Pager, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint of this sequence, whatever has been run since."""
        if self.state is None or checkpoint.image is None or self.can_keep(checkpoint.n_tokens):
            self._cut(pager, checkpoint.n_tokens)
            return
        pager.truncate(self.seq, checkpoint.n_tokens)
        self.state.load(checkpoint.image)
        self.state.attach(self.seq)
        self._cut_head(checkpoint.n_tokens)

    def fork(self, device: Device) -> PartContext:
        """A context with the same tokens: pages are shared until one of the two writes, the state is copied.

        It has no ``head``.
        """
        with ExitStack() as stack:
            seq = stack.enter_context(self.seq.fork())
            state = None
            if self.state is not None:
                state = stack.enter_context(State(device, self.state.layers, self.state.info.log_rows))
                self.state.copy_to(state)
            child = PartContext(seq, state)
            stack.pop_all()
            return child

    def check_integrity(self) -> None:
        """Recompute every invariant of the state, if it is not closed."""
        if self.state is not None and not self.state.closed:
            self.state.check_integrity()

    @property
    def closed(self) -> bool:
        return self.seq.closed

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self.state is not None:
            self.state.close()
        if self.head is not None:
            self.head.close()
        self.seq.close()


class Context:
    """One sequence of a target, part by part. Between two passes all are at the same token."""

    def __init__(self, parts: tuple[PartContext, ...]) -> None:
        self.parts = parts
        self.is_recurrent = any(part.state is not None for part in parts)
        """Whether there is recurrent state."""
        self.settled_at = -1
        """What the target had counted of changes when its parts were last known to be at one token, and whole."""

    @property
    def n_tokens(self) -> int:
        """Tokens that every part has."""
        first, *others = self.parts
        n_tokens = first.seq.n_tokens
        return min(n_tokens, *(part.seq.n_tokens for part in others)) if others else n_tokens

    @property
    def is_together(self) -> bool:
        """Whether all parts are at the same token."""
        return len({part.n_tokens for part in self.parts}) == 1

    @property
    def head(self) -> HeadContext | None:
        """What the MTP head knows of it, which is with the last part."""
        return self.parts[-1].head

    def can_keep(self, n_tokens: int) -> bool:
        """Whether the first ``n_tokens`` tokens can be kept and the others dropped."""
        return all(part.can_keep(n_tokens) for part in self.parts)

    def require_keep(self, n_tokens: int) -> None:
        """Raises ``NotFound`` where they cannot."""
        for part in self.parts:
            part.require_keep(n_tokens)

    def check_integrity(self) -> None:
        """Recompute every invariant of the states that are not closed."""
        for part in self.parts:
            part.check_integrity()

    @property
    def closed(self) -> bool:
        first, *others = self.parts
        return first.seq.known is None and all(part.seq.closed for part in others)
