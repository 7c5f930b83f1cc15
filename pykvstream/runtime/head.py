"""The MTP head of a target at work: it catches up with what was said, then guesses what comes next, row by row.

Shapes: hidden rows float32 ``[n, n_embd]``, logits ``[n, n_vocab]``.
Units: positions in tokens. ``_bytes`` of copies since the head was made.
Order: tapes are bound by the phases of the target; the caller holds the target's turn and has entered a phase.
Drafting reads the whole history once per token: while it goes on, a lease keeps all pages on the device, in slots of
the trunk's ring where the head's own do not suffice, and the ring is whole again before a draft is verified. Where the
pages do not fit the head streams them in waves; no number depends on it.
Holds: ``HeadBlueprint``, ``Head``. A row of the cache that was made of a draft is made anew from the trunk's hidden row
before anything is drafted behind it. Drafts change nothing but the cache behind the rows that are true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.device import Device
from pykvstream.core.kv import Cache, KvLayer, record_layout
from pykvstream.core.layer_lease import LayerLease
from pykvstream.core.pager import Pager, PagerInfo
from pykvstream.core.tape import Binding, CancelFlag, Tape
from pykvstream.graph import WeightSource, lower
from pykvstream.models import ModelConfig
from pykvstream.models.mtp import build_catch_up, build_step
from pykvstream.runtime.hidden import HeadContext, Rows
from pykvstream.runtime.layout import Placement, pages_of

CATCH_UP_ROWS = 64
"""Widest pass that catches up."""
_NO_ROWS = np.empty(0, np.uint32)
_BOUND_BYTES = 64 << 20
_FEWEST_BOUND = 1024


def hidden_bound(n_embd: int) -> int:
    """Hidden rows of a sequence that are kept while the head does not draft."""
    return max(_BOUND_BYTES // (4 * n_embd), _FEWEST_BOUND)


class HeadBlueprint:
    """The head's tapes: one pass of a single row that drafts, and wide ones that only write keys and values."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: KvLayer, device: Device, ctx_tokens: int):
        record = record_layout(layer)
        rotation = record.rotation_k, record.rotation_v
        self.layer = layer
        self.n_embd, self.n_vocab = config.n_embd, config.n_vocab
        self.rows = min(CATCH_UP_ROWS, ctx_tokens)
        self.record_bytes = record.record_bytes
        with ExitStack() as stack:
            step = lower(build_step(config, weights, layer, rotation), weights, device, max_rows=1, max_out_rows=0)
            stack.callback(step.close)
            graph = build_catch_up(config, weights, layer, rotation)
            catch_up = lower(graph, weights, device, max_rows=self.rows, max_out_rows=0)
            self.tapes: tuple[Tape, Tape] = (step, catch_up)
            stack.pop_all()

    @property
    def workspace_bytes(self) -> int:
        """Of either tape."""
        return max(tape.info.workspace_bytes for tape in self.tapes)

    @property
    def bound(self) -> int:
        """Hidden rows of a sequence that are kept while the head does not draft."""
        return hidden_bound(self.n_embd)

    def host_bytes(self, ctx_tokens: int, page_tokens: int) -> int:
        """History of the full context, and hidden rows with the array that they move to."""
        n_pages = -(-ctx_tokens // page_tokens)
        return n_pages * self.record_bytes + 3 * min(self.bound, ctx_tokens) * 4 * self.n_embd

    def close(self) -> None:
        """Give the tapes back. A second call does nothing."""
        for tape in self.tapes:
            tape.close()


class Head:
    """Cache and pager of the head, and the bindings that the active phase gives it.

    ``trunk``: the pager whose ring lends slots while the head drafts.
    """

    def __init__(self, device: Device, blueprint: HeadBlueprint, placement: Placement, trunk: Pager) -> None:
        with ExitStack() as stack:
            self.cache = stack.enter_context(Cache(device, (blueprint.layer,)))
            self.pager = stack.enter_context(Pager(device, self.cache))
            self._handles = stack.pop_all()
        self.blueprint = blueprint
        self.placement = placement
        self.bindings: tuple[Binding, ...] = ()
        self._device = device
        self._trunk = trunk
        self._lease: LayerLease | None = None

    @property
    def pager_info(self) -> PagerInfo:
        return self.pager.info

    def context(self, ctx_tokens: int) -> HeadContext:
        """What the head knows of an empty sequence."""
        return HeadContext(self.cache.sequence(ctx_tokens), self.blueprint.n_embd, self.blueprint.bound)

    def catch_up(self, context: HeadContext, tokens: Sequence[int], n_tokens: int, cancel: CancelFlag) -> None:
        """Write the rows of the first ``n_tokens`` tokens that are not there yet; drafts behind them go.

        After an error the rows that were written are true.
        """
        self._recover_pass()
        self._prepare(context, n_tokens)
        while context.n_behind(n_tokens) > 0:
            begin = context.end
            n = min(context.n_behind(n_tokens), self.blueprint.rows)
            ids = np.array(tokens[begin : begin + n], np.uint32)
            hidden = np.concatenate([self._before(context, begin), context.hidden.between(begin, begin + n - 1)])
            self._run(1, context, ids, hidden, (), begin, cancel)
            context.n_true += n
            context.counter.caught_up += n
        # As many stay as a draft, or a truncation within the log of a recurrent state, goes back.
        context.hidden.drop_before(context.end - self.blueprint.rows - 1)

    @contextmanager
    def drafting(
        self, context: HeadContext, tokens: Sequence[int], n_tokens: int, n_drafts: int, cancel: CancelFlag
    ) -> Iterator[None]:
        """Catch up with the first ``n_tokens`` tokens, and have every page on the device until it ends, if they fit:
        up to ``n_drafts`` rows behind them can be made meanwhile.
        """
        self.recover()
        self._prepare(context, n_tokens)
        n_alone = n_tokens - self.blueprint.rows + n_drafts
        if context.n_behind(n_alone) > 0:
            self.catch_up(context, tokens, n_alone, cancel)
        self._prepare(context, n_tokens)
        try:
            self._take_lease(context, n_tokens - context.base + n_drafts)
            self.catch_up(context, tokens, n_tokens, cancel)
            yield
        finally:
            self.recover()

    def _take_lease(self, context: HeadContext, n_rows: int) -> None:
        lender, fits = self._lender(n_rows)
        if not fits:
            context.counter.rounds_in_waves += 1
            return
        self._lease = LayerLease(self._device)
        self._lease.acquire(self.pager, context.seq, n_rows, lender=lender)
        context.counter.add_lease(self._lease.info)

    def _lender(self, n_rows: int) -> tuple[Pager | None, bool]:
        """Whose ring lends the slots that are missing, and whether any can. A ring keeps a slot for itself."""
        n_missing = pages_of(n_rows) - self.placement.resident_pages[0]
        if n_missing <= 0:
            return None, True
        for pager in (self.pager, self._trunk):
            if n_missing < pager.info.ring_slots:
                return pager, True
        return None, False

    def step(
        self, context: HeadContext, token: int, hidden: Rows, position: int, cancel: CancelFlag
    ) -> tuple[NDArray[np.float32], Rows]:
        """One row behind all others; logits of the token after it ``[n_vocab]``, and its hidden row ``[1, n_embd]``."""
        logits = np.empty((1, self.blueprint.n_vocab), np.float32)
        out = np.empty((1, self.blueprint.n_embd), np.float32)
        before = self.pager.traffic
        self._run(0, context, np.array([token], np.uint32), hidden, (logits, out), position, cancel)
        context.counter.add_step(before, self.pager.traffic)
        row: NDArray[np.float32] = logits[0]
        return row, out

    def pending(self, context: HeadContext, n_tokens: int) -> Rows:
        """The hidden row that goes with the token behind the first ``n_tokens``."""
        return self._before(context, n_tokens).copy()

    def _before(self, context: HeadContext, position: int) -> Rows:
        """The trunk's row of the token before a position; zeros before the first, and where it is not known."""
        row = context.hidden.at(position - 1)
        return np.zeros((1, self.blueprint.n_embd), np.float32) if row is None else row

    def _prepare(self, context: HeadContext, n_tokens: int) -> None:
        """Begin anew where hidden rows were lost, and drop what is behind the rows that are true."""
        context.n_true = min(context.n_true, context.seq.n_tokens)  # a failed write may have cost some
        if context.hidden.first > context.end and context.n_behind(n_tokens) > 0:
            context.restart(min(context.hidden.first, n_tokens))
        if context.seq.n_tokens > context.n_true:
            self.pager.truncate(context.seq, context.n_true)

    def _run(
        self,
        which: int,
        context: HeadContext,
        ids: NDArray[np.uint32],
        hidden: Rows,
        outputs: tuple[NDArray[np.float32], ...],
        position: int,
        cancel: CancelFlag,
    ) -> None:
        n = len(ids)
        positions = np.arange(position, position + n, dtype=np.uint32)
        inputs = (np.ascontiguousarray(hidden),)
        try:
            self.pager.begin(context.seq, n)
            self.bindings[which].run(ids, _NO_ROWS, outputs, cancel, positions=positions, inputs=inputs)
            self.pager.end(n)
        except BaseException:
            self._recover_pass()
            raise

    def _recover_pass(self) -> None:
        if self.pager.is_in_pass:
            self.pager.end(0)

    def recover(self) -> None:
        """End a pass and give a lease back that a failure or an interrupt has left."""
        self._recover_pass()
        lease = self._lease
        if lease is not None:
            try:
                if not lease.closed:
                    lease.give_back()
            finally:
                # Forgotten last: where an interrupt strikes before, whoever comes next finds it and goes on.
                lease.close()
                self._lease = None

    def fork(self, context: HeadContext) -> HeadContext:
        """What the head knows of a sequence that goes on alone."""
        self.recover()
        self.pager.publish_wait()
        return context.fork()

    def release(self, context: HeadContext) -> None:
        """Close what the head knows of a sequence, which may be closed already."""
        try:
            if not (self.pager.closed or context.seq.closed):
                self.recover()
                self.pager.drop(context.seq)
        finally:
            context.close()

    def check_integrity(self) -> None:
        """Recompute every invariant of cache, pager and lease."""
        self.cache.check_integrity()
        self.pager.check_integrity()
        if self._lease is not None and not self._lease.closed:
            self._lease.check_integrity()

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._lease is not None:
            self._lease.close()
        self._handles.close()
