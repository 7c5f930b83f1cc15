"""The MTP head of a target at work: it catches up with what was said, then guesses what comes next, row by row.

Shapes: hidden rows float32 ``[n, n_embd]``, logits ``[n, n_vocab]``.
Units: positions in tokens. ``_bytes`` of copies since the head was made.
Order: tapes are bound by the phases of the target; the caller holds the target's turn and has entered a phase.
Holds: ``HeadBlueprint``, ``Head``. A row of the cache that was made of a draft is made anew from the trunk's hidden row
before anything is drafted behind it. Drafts change nothing but the cache behind the rows that are true.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.device import Device
from pykvstream.core.kv import Cache, KvLayer, record_layout
from pykvstream.core.pager import Pager, PagerInfo
from pykvstream.core.tape import Binding, CancelFlag, Tape
from pykvstream.graph import WeightSource, lower
from pykvstream.models import ModelConfig
from pykvstream.models.mtp import build_catch_up, build_step
from pykvstream.runtime.hidden import HeadContext, Rows
from pykvstream.runtime.layout import Placement

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


@dataclass(slots=True)
class HeadCounter:
    """What the head has run: passes of drafts, rows caught up with."""

    steps: int = 0
    caught_up: int = 0


class Head:
    """Cache and pager of the head, and the bindings that the active phase gives it."""

    def __init__(self, device: Device, blueprint: HeadBlueprint, placement: Placement) -> None:
        with ExitStack() as stack:
            self.cache = stack.enter_context(Cache(device, (blueprint.layer,)))
            self.pager = stack.enter_context(Pager(device, self.cache))
            self._handles = stack.pop_all()
        self.blueprint = blueprint
        self.placement = placement
        self.bindings: tuple[Binding, ...] = ()
        self.counter = HeadCounter()

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
        self.recover()
        if context.hidden.first > context.end and context.n_behind(n_tokens) > 0:
            context.restart(min(context.hidden.first, n_tokens))
        self._cut(context)
        while context.n_behind(n_tokens) > 0:
            begin = context.end
            n = min(context.n_behind(n_tokens), self.blueprint.rows)
            ids = np.array(tokens[begin : begin + n], np.uint32)
            hidden = np.concatenate([self._before(context, begin), context.hidden.between(begin, begin + n - 1)])
            self._run(1, context, ids, hidden, (), begin, cancel)
            context.n_true += n
            self.counter.caught_up += n
        # As many stay as a draft, or a truncation within the log of a recurrent state, goes back.
        context.hidden.drop_before(context.end - self.blueprint.rows - 1)

    def step(
        self, context: HeadContext, token: int, hidden: Rows, position: int, cancel: CancelFlag
    ) -> tuple[NDArray[np.float32], Rows]:
        """One row behind all others; logits of the token after it ``[n_vocab]``, and its hidden row ``[1, n_embd]``."""
        logits = np.empty((1, self.blueprint.n_vocab), np.float32)
        out = np.empty((1, self.blueprint.n_embd), np.float32)
        self._run(0, context, np.array([token], np.uint32), hidden, (logits, out), position, cancel)
        self.counter.steps += 1
        row: NDArray[np.float32] = logits[0]
        return row, out

    def pending(self, context: HeadContext, n_tokens: int) -> Rows:
        """The hidden row that goes with the token behind the first ``n_tokens``."""
        return self._before(context, n_tokens).copy()

    def _before(self, context: HeadContext, position: int) -> Rows:
        """The trunk's row of the token before a position; zeros before the first, and where it is not known."""
        row = context.hidden.at(position - 1)
        return np.zeros((1, self.blueprint.n_embd), np.float32) if row is None else row

    def _cut(self, context: HeadContext) -> None:
        """Drop what is behind the rows that are true."""
        if context.seq.info.committed_tokens > context.n_true:
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
        self.pager.begin(context.seq, n)
        try:
            self.bindings[which].run(ids, _NO_ROWS, outputs, cancel, positions=positions, inputs=inputs)
            self.pager.end(n)
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:
        """End a pass that a failure or an interrupt left open."""
        if self.pager.info.is_in_pass:
            self.pager.end(0)

    def fork(self, context: HeadContext) -> HeadContext:
        """What the head knows of a sequence that goes on alone."""
        self.recover()
        self.pager.publish_wait()
        return context.fork()

    def release(self, context: HeadContext) -> None:
        """Close what the head knows of a sequence, which may be closed already."""
        try:
            if not self.pager.closed:
                self.recover()
                self.pager.drop(context.seq)
        finally:
            context.close()

    def check_integrity(self) -> None:
        """Recompute every invariant of cache and pager."""
        self.cache.check_integrity()
        self.pager.check_integrity()

    def close(self) -> None:
        """Give cache and pager back. A second call does nothing."""
        self._handles.close()
