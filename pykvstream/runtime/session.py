"""One conversation as tokens: what is in the cache, what waits to enter it, and passes that fail without loss.

Shapes: logits are float32 ``[n, vocab rows]``.
Holds: ``TokenSession``.

A token that was chosen but not yet run is *pending*: it belongs to the conversation, and the next pass runs it first.
Tokens that were run and are no longer in the cache, since a recurrent state went back further than was asked, are
pending too: they are run again as they were run before, so that every bit comes back.
Tokens of a draft are run *ahead*: they are in the cache and not in the conversation, and whatever comes next first
drops those that were not said meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.pager import Forecast
from pykvstream.core.state import CHUNK_TOKENS
from pykvstream.core.tape import CancelFlag
from pykvstream.errors import Busy, Cancelled, Closed, ContextFull, InvalidArgument, Unsupported
from pykvstream.runtime.checkpoints import grid_point
from pykvstream.runtime.context import Context
from pykvstream.runtime.head import Head
from pykvstream.runtime.hidden import HeadContext
from pykvstream.runtime.layout import PAGE_TOKENS, require_callable, require_int
from pykvstream.runtime.meter import Meter, SessionStats
from pykvstream.runtime.rows import LogitRows, RowReader
from pykvstream.runtime.saving import Saved, load_context, save_context
from pykvstream.runtime.target import Call, Phase, Target, as_tokens
from pykvstream.runtime.timeline import Timeline
from pykvstream.sampling import Front
from pykvstream.text.transcript import Transcript

LogitsWanted = Literal["last", "all", "none"]

Chooser = Callable[[NDArray[np.float32], int], int | None]
"""``choose(logits, position)``: the token of a draft at a position, or None where the draft ends."""

ForwardProgress = Callable[[int, int], None]
"""``on_progress(done, total)`` after each pass: tokens run so far, and tokens of the whole call.

It may use other sessions; what would change its own, or close the model, raises ``Busy`` in it."""


_RAN = {phase: bytes([phase.value]) for phase in Phase}
_FIRST_ROW = np.zeros(1, np.uint32)
_MOST_ROWS = 2**32 - 1
_FIRST_ROW.setflags(write=False)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A draft that was run behind the first ``begin`` tokens of the conversation."""

    begin: int
    draft: tuple[int, ...]

    def n_kept(self, tokens: Sequence[int]) -> int:
        """Tokens that stay in the cache: those of the draft that were said, but never the last one of all."""
        said = zip(self.draft, tokens[self.begin :], strict=False)
        n_right = next((i for i, (drafted, token) in enumerate(said) if drafted != token), len(self.draft))
        return min(self.begin + n_right, len(tokens) - 1)


class TokenSession:
    """A sequence of tokens on a target.

    Sessions of one target may be used by different threads: they take turns, call by call. ``cancel`` from any.
    After the target was closed everything but ``close`` raises ``Closed``, in a fork of the process ``Unsupported``.
    """

    def __init__(self, target: Target, ctx_tokens: int, context: Context | None = None) -> None:
        self._target = target
        self._ctx_tokens = ctx_tokens
        self._context = target.context(ctx_tokens) if context is None else context
        self._tokens: list[int] = []
        self._ran = bytearray()  # the phase in which each token was run
        self._chosen = bytearray()  # of these tokens: 1 for one that was chosen, and waited for the call that ran it
        self._cancel = CancelFlag()
        self._meter = Meter()
        self._ahead: _Ahead | None = None
        self._is_drafting = False  # with the MTP head, which then keeps up with long prompts
        self._call: Call | None = None
        self._fronts: NDArray[np.uint32] | None = None
        self._kept: RowReader | None = None
        self.number = target.number_session()

    @property
    def ctx_tokens(self) -> int:
        return self._ctx_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the conversation, pending ones included."""
        return tuple(self._tokens)

    @property
    def n_tokens(self) -> int:
        """How many these are."""
        return len(self._tokens)

    @property
    def n_cached(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return self._context.n_tokens

    @property
    def _n_kept(self) -> int:
        """The same without what was run ahead and has not been said."""
        return self.n_cached if self._ahead is None else min(self.n_cached, self._ahead.n_kept(self._tokens))

    def push(self, token: int) -> None:
        """Append a chosen token; the next pass runs it.

        Where one before it waits still, the rows of a draft were dropped that had told what follows: it is decoded as
        it was then, whatever comes next.
        """
        n_ran, n_tokens = len(self._ran), len(self._tokens)
        if n_ran < n_tokens:
            self._ran += _RAN[Phase.DECODE] * (n_tokens - n_ran)
            self._chosen += b"\1" * (n_tokens - n_ran)
        self._tokens.append(token)

    def rewind(self) -> Phase:
        """Make the last token pending, if it is not, so that the next pass yields its logits anew.

        Returns the phase of that pass: a token that was chosen and not run goes on as it would have.
        """
        with self._target.turn:
            self._reconcile()
            phase = Phase.DECODE
            n_tokens = len(self._tokens)
            if self._tokens and self.n_cached == n_tokens:
                is_prompt = not (self._is_decoded(n_tokens) or self._chosen[n_tokens - 1 :] == b"\1")
                phase = Phase.PREFILL if is_prompt else Phase.DECODE
                self._go_back(n_tokens - 1)
            return phase

    def cancel(self) -> None:
        """Stop the running pass, or the next one. Any thread."""
        self._cancel.set()

    def clear_cancel(self) -> None:
        """Forget a cancellation that nothing was there to obey."""
        self._cancel.clear()

    def obey_cancel(self) -> None:
        """Raises ``Cancelled`` once where ``cancel`` was called and no pass has obeyed it."""
        if self._cancel.is_set():
            self._cancel.clear()
            raise Cancelled("cancelled between two passes")

    @property
    def draft_room(self) -> int:
        """Tokens that a draft for ``verify`` may have: what one decode pass and the context hold beside the pending
        token; none where more than one is pending."""
        if len(self._tokens) - self._n_kept != 1:
            return 0
        return min(self._target.blueprint.tape(Phase.DECODE).max_rows - 1, self._ctx_tokens - len(self._tokens))

    def draft(self, n_max: int, choose: Chooser) -> float:
        """Let the MTP head guess up to ``n_max`` tokens behind the pending one, each of them chosen by ``choose``.

        Returns the seconds in which it caught up with rounds that had no draft: later drafts do not take them again.
        The conversation does not change, whatever fails. Raises ``Unsupported`` where the model has no head at work.
        """
        with self._target.turn:
            self._reconcile()
            head, known = self._head()
            self._is_drafting = True
            n_cached, n_left = self.n_cached, min(n_max, self.draft_room)
            if n_left < 1:
                return 0.0
            started = time.perf_counter()
            late_seconds = 0.0
            self._target.enter(Phase.DECODE)
            try:
                with ExitStack() as stack:
                    n_behind = known.n_behind(n_cached)
                    with self._target.span("catch up", rows=n_behind):
                        stack.enter_context(head.drafting(known, self._tokens, n_cached, n_left, self._cancel))
                    if n_behind > self._target.blueprint.tape(Phase.DECODE).max_rows:
                        late_seconds = time.perf_counter() - started
                    token: int | None = self._tokens[-1]
                    hidden = head.pending(known, n_cached)
                    for position in range(n_cached, n_cached + n_left):
                        if token is None:
                            break
                        with self._target.span("draft step", behind=position):
                            logits, hidden = head.step(known, token, hidden, position, self._cancel)
                        token = choose(logits, position + 1)
            except Cancelled:
                self._cancel.clear()
                self._target.require_open()
                raise
            finally:
                self._meter.seconds[Phase.DECODE] += time.perf_counter() - started
            return late_seconds

    @property
    def timeline(self) -> Timeline | None:
        """What is recorded at the moment, if anything is."""
        return self._target.timeline

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """For ``with``: what the calling thread does, where a timeline is recorded."""
        return self._target.span(name, **details)

    def hidden_rows(self) -> NDArray[np.float32]:
        """What the MTP head starts from: the rows of the newest tokens in the cache that are kept, ``[n, n_embd]``."""
        with self._target.turn:
            self._reconcile()
            _, known = self._head()
            return known.hidden.between(known.hidden.first, known.hidden.end).copy()

    def front(self, row: int, position: int) -> Front | None:
        """What was found of a row of the last call that asked for it, whose token stands at a position; None where the
        pass had no sampling front. Raises ``NumericError``."""
        return None if self._fronts is None else Front.of(self._fronts[row], position)

    def require_head(self) -> None:
        """Raises ``Unsupported`` where the model was opened without its MTP head."""
        self._head()

    def _head(self) -> tuple[Head, HeadContext]:
        if self._target.head is None or self._context.head is None:
            raise Unsupported("the MTP head is not at work: open the model with mtp=True")
        return self._target.head, self._context.head

    def verify(self, draft: Sequence[int]) -> NDArray[np.float32]:
        """Run the pending token and a draft behind it in one decode pass; logits ``[len(draft) + 1, vocab rows]``.

        The draft does not become part of the conversation. Of its rows those stay whose tokens are pushed until the
        next call. Raises ``InvalidArgument`` for more than ``draft_room``; after any error nothing has changed.
        """
        with self._target.turn:
            self._require_draft(draft)
            return self.step(draft).all()

    def step(
        self, draft: Sequence[int] = (), *, with_front: bool = False, may_keep: bool = False
    ) -> LogitRows:
        """Run the pending tokens, and a draft behind them as ``verify`` does: the row of the last, or one of each.

        ``with_front`` as in ``forward``. ``may_keep``: rows whose fronts are found may stay on the card.
        """
        with self._target.turn:
            if not draft:
                self._reconcile()
                return self._forward(
                    (), "last", Phase.DECODE, None, None, (), with_front=with_front, may_keep=may_keep
                )
            self._require_draft(draft)
            self._ahead = _Ahead(len(self._tokens), tuple(draft))
            return self._forward(
                draft, "all", Phase.DECODE, None, None, (), with_front=with_front, may_keep=may_keep
            )

    def _require_draft(self, draft: Sequence[int]) -> None:
        self._reconcile()
        if not 0 < len(draft) <= self.draft_room:
            raise InvalidArgument(f"a draft of {len(draft)} tokens; there is room for {self.draft_room}")

    def forward(
        self,
        token_ids: Sequence[int] | NDArray[np.uint32],
        *,
        logits: LogitsWanted = "last",
        phase: Phase = Phase.PREFILL,
        out: NDArray[np.float32] | None = None,
        on_progress: ForwardProgress | None = None,
        marks: Sequence[int] = (),
        with_front: bool = False,
    ) -> NDArray[np.float32]:
        """Run pending tokens and ``token_ids``; returns logits ``[m, vocab rows]``.

        ``logits="all"``: one row per token of ``token_ids`` (pending tokens have none); ``"last"``: one;
        ``"none"``: none. ``out``: C-contiguous float32 of that shape to write into. ``marks``: positions that the
        conversation may go back to, such as where a message begins; recurrent states are kept near them. With
        recurrent layers a prompt in several calls costs least in multiples of ``CHUNK_TOKENS``: a chunk that a call
        has begun is run again as a whole, from the newest state that is kept.
        ``with_front``: ``front`` then tells of each row, where decode passes have one.
        Raises ``ContextFull`` before anything runs; after any error the session is as it was before the call. (An
        interrupt that comes when the last pass has ended may leave all its tokens in place: ``tokens`` tells.)
        """
        if not isinstance(phase, Phase):
            raise InvalidArgument(f"phase must be a Phase, got {phase!r}")
        require_callable("on_progress", on_progress)
        with self._target.turn:
            self._reconcile()
            return self._forward(token_ids, logits, phase, out, on_progress, marks, with_front=with_front).all()

    def _forward(
        self,
        token_ids: Sequence[int] | NDArray[np.uint32],
        logits: LogitsWanted,
        phase: Phase,
        out: NDArray[np.float32] | None,
        on_progress: ForwardProgress | None,
        marks: Sequence[int],
        *,
        with_front: bool = False,
        may_keep: bool = False,
    ) -> LogitRows:
        self._await_anew(phase)
        n_cached = self._begin_of_chunk() if phase is Phase.PREFILL else self._context.n_tokens
        pending = self._tokens[n_cached:]
        if pending and len(token_ids) == 0 and isinstance(token_ids, tuple):
            ids = np.array(pending, np.uint32)
        else:
            ids = as_tokens(token_ids, self._target.n_vocab_rows)
            if pending:
                ids = np.concatenate([np.array(pending, np.uint32), ids])
        if ids.size == 0:
            raise InvalidArgument("no tokens to run")
        if n_cached + ids.size > self._ctx_tokens:
            raise ContextFull(
                f"{ids.size} tokens after {n_cached} do not fit the context of {self._ctx_tokens}"
            )
        if not isinstance(logits, str) or logits not in ("last", "all", "none"):
            raise InvalidArgument(f"logits must be 'last', 'all' or 'none', got {logits!r}")
        n_unseen = len(pending) if self._ahead is None else 0
        n_out = {"last": 1, "none": 0, "all": int(ids.size) - n_unseen}[logits]
        rows = _out_rows(out, n_out, self._target.n_vocab_rows)
        self._fronts = self._target.front_rows(phase, n_out) if with_front else None
        self._kept = None
        # A head that catches up behind a pass overwrites what that has left on the card.
        may_keep = may_keep and self._target.keeps_rows and not (self._is_drafting and self._ahead is None)
        first_out = int(ids.size) - n_out
        before = len(self._tokens)
        n_ran = len(self._ran)
        ends = self._ends(n_cached, n_cached + int(ids.size), phase, marks)
        self._target.blueprint.file.require_whole()
        outer = self._target.call
        if phase is Phase.PREFILL and n_cached < self.n_cached:
            self._target.go_back(self._context, n_cached)
        widest = Phase.PREFILL if Phase.PREFILL.value in self._ran[n_cached:] else phase
        checkpoint = self._target.checkpoint(self._context, widest, n_cached, int(ids.size))
        try:
            passes = self._passes(n_cached, ids, first_out, rows, phase, on_progress, ends, may_keep=may_keep)
            self._call = self._target.call = Call(threading.get_ident(), passes, self._cancel)
            for _ in passes:
                pass
        except BaseException as error:
            if isinstance(error, Cancelled):
                self._cancel.clear()
            del self._tokens[before:]
            self._forget(n_ran)
            self._target.restore(self._context, checkpoint)
            if isinstance(error, Cancelled):
                self._target.require_open()  # cancelled because the model closes
            raise
        finally:
            self._target.call = outer
        self._call = None
        if on_progress is None and not self._is_drafting:
            self._target.note_settled(self._context)
        return LogitRows(rows, self._kept)

    def _passes(
        self,
        position: int,
        ids: NDArray[np.uint32],
        first_out: int,
        rows: NDArray[np.float32],
        phase: Phase,
        on_progress: ForwardProgress | None,
        ends: frozenset[int],
        *,
        may_keep: bool,
    ) -> Generator[None, None, None]:
        n_before = len(self._tokens) if self._ahead is None else self._ctx_tokens
        done = 0
        while done < ids.size:
            # Anew for each pass: on_progress may have used another session.
            if done:
                self._target.require_open()
            now, n_left = self._next_phase(position, phase, int(ids.size) - done, ends)
            if now is Phase.PREFILL and (position in ends or self._is_decoded(position)):
                self._target.keep(self._context)
            self._target.enter(now)
            n = 1 if n_left == 1 else self._target.chunk_rows(now, position, n_left)
            first = max(first_out - done, 0)
            wanted = _FIRST_ROW if n == 1 and first == 0 else np.arange(first, n, dtype=np.uint32)
            begin = max(done - first_out, 0)
            before = self._target.traffic
            started = time.perf_counter()
            out: NDArray[np.float32] | None = rows[begin : begin + wanted.size]
            if now is not Phase.DECODE and wanted.size:
                self._fronts = None
            fronts = None if self._fronts is None else self._fronts[begin : begin + wanted.size]
            if may_keep and fronts is not None and wanted.size == len(rows):
                out = None
            given = (self._context, ids[done : done + n], wanted, out, self._cancel, None, fronts)
            if self._target.timeline is None:
                self._target.end(self._target.begin(*given))
            else:
                kind = "verify" if self._ahead is not None else now.name.lower()
                with self._target.span(f"{kind} pass", rows=n, behind=position):
                    self._target.run(*given)
            self._kept = self._target.kept_rows() if out is None else None
            self._meter.add(now, n, time.perf_counter() - started, before, self._target.traffic)
            done += n
            position += n
            if self._ahead is None:
                self._tokens[position - n : position] = ids[done - n : done].tolist()
                if self._is_drafting:
                    self._keep_up(position)
            self._note(position - n, position, now, n_before)
            if on_progress is not None:
                on_progress(done, int(ids.size))
            yield

    def _keep_up(self, n_tokens: int) -> None:
        """Of a long prompt hidden rows would be dropped before the head has seen them."""
        head, known = self._head()
        if known.n_behind(n_tokens) > known.hidden.bound // 2:
            with self._target.span("catch up", rows=known.n_behind(n_tokens)):
                head.catch_up(known, self._tokens, n_tokens, self._cancel)

    def _begin_of_chunk(self) -> int:
        """Where a prompt goes on: behind part of a chunk that a prompt has begun, from where the chunk begins.

        Then the chunk is taken as a whole, and the bits are those of a prompt that was never divided. Where the state
        is kept no more, everything behind the newest one that is kept is run again, the way it was run.
        """
        n_cached = self.n_cached
        if n_cached > len(self._ran) or not self._context.is_recurrent:
            return n_cached
        begin = max(grid_point(n_cached), self._ran.rfind(Phase.DECODE.value, 0, n_cached) + 1)
        return n_cached if begin == n_cached else self._target.newest_kept(self._context, begin) or 0

    def _is_decoded(self, n_tokens: int) -> bool:
        """Whether the last of the first tokens was decoded: the chunk that a prompt begins there is a short one."""
        return self._ran[n_tokens - 1 : n_tokens] == _RAN[Phase.DECODE]

    def _ends(self, n_cached: int, n_tokens: int, phase: Phase, marks: Sequence[int]) -> frozenset[int]:
        """Where passes end so that a state can be kept: on the grid before marks and before a prompt's last token."""
        lost = self._ran[n_cached:]
        if not (lost or marks or phase is not Phase.DECODE):
            return frozenset()
        if not (self._context.is_recurrent and self._target.keeps_states):
            return frozenset()
        runs = lost + bytes([phase.value]) * (n_tokens - n_cached - len(lost)) + bytes([Phase.DECODE.value])
        lasts = [n_cached + i for i in range(len(runs) - 1) if runs[i] < runs[i + 1]]
        return frozenset(grid_point(at) for at in (*lasts, *marks) if 0 < at < n_tokens)

    def _next_phase(self, position: int, phase: Phase, n_left: int, ends: frozenset[int]) -> tuple[Phase, int]:
        """How the token at a position is run, and how many rows may come along. What was run before is run alike."""
        lost = self._ran[position : position + n_left]
        if lost:
            first = lost[0]
            n_alike = next((i for i, each in enumerate(lost) if each != first), len(lost))
            now = Phase(first)
            if now is not phase or n_alike < len(lost):
                n_left = n_alike
            phase = now
        if phase is Phase.PREFILL:
            n_left = min([n_left, *(end - position for end in ends if end > position)])
        return phase, n_left

    def _note(self, begin: int, end: int, phase: Phase, n_before: int) -> None:
        """Tokens were run; those before ``n_before`` that had not been had been chosen, the others were given."""
        n_known = len(self._ran)
        if self._context.is_recurrent:
            self._meter.recomputed += max(min(n_known, end) - begin, 0)
        self._ran[begin:end] = _RAN[phase] * (end - begin)
        if end > n_known:
            n_chosen = min(max(n_before - n_known, 0), end - n_known)
            self._chosen += b"\1" * n_chosen + bytes(end - n_known - n_chosen)

    def _await_anew(self, phase: Phase) -> None:
        """Let tokens at the end wait again that were chosen, and run in another phase than this call's.

        A chosen token is run by the call that comes next, in its phase. Where everything behind it has been dropped,
        that call has never been: the bits must not tell that something was tried.
        """
        begin = n_tokens = len(self._tokens)
        if len(self._ran) < n_tokens:
            return
        if phase is Phase.DECODE:
            while begin > 0 and self._chosen[begin - 1] and not self._is_decoded(begin):
                begin -= 1
        elif n_tokens > 0 and self._chosen[n_tokens - 1] and self._is_decoded(n_tokens):
            begin -= 1
        if begin < n_tokens:
            if self.n_cached > begin:
                self._go_back(begin, or_begin_anew=True)
            self._forget(begin)

    def _go_back(self, n_tokens: int, *, or_begin_anew: bool = False) -> None:
        """Have at most ``n_tokens`` in the cache: just these, or where a state is kept, none of the first chunk's.

        Raises ``NotFound``, and nothing has changed, where that is not possible, unless all may be run again.
        """
        kept = None if self._context.can_keep(n_tokens) else self._target.newest_kept(self._context, n_tokens)
        if kept is not None:
            self._target.go_back(self._context, kept)
        elif self._context.can_keep(n_tokens):
            self._target.truncate(self._context, n_tokens)
        else:
            self._target.truncate(self._context, 0 if or_begin_anew or n_tokens < CHUNK_TOKENS else n_tokens)

    def _drop(self, n_tokens: int) -> None:
        """Forget what was said behind ``n_tokens`` tokens."""
        del self._tokens[n_tokens:]
        self._forget(n_tokens)

    def _forget(self, n_tokens: int) -> None:
        """Forget how tokens behind the first ones were run, and the states that this led to."""
        del self._ran[n_tokens:]
        del self._chosen[n_tokens:]
        self._target.forget(self._context, n_tokens)

    def _reconcile(self) -> None:
        """An interrupt or a failed write may have kept an earlier call from cleaning up: tokens decide what
        was said.
        """
        self.require_idle()
        self._target.recover(self._context)
        if self._ahead is not None:
            self._drop_ahead(self._ahead.n_kept(self._tokens))
        n_tokens = len(self._tokens)
        if self._context.n_tokens > n_tokens:
            # Tokens of which nothing is cached are pending: the next pass runs them again.
            self._go_back(n_tokens, or_begin_anew=True)
            self._forget(n_tokens)

    def _drop_ahead(self, n_tokens: int) -> None:
        """Forget of a draft what was not said. The rows are the newest ones, which a state's log still holds."""
        n_dropped = max(self.n_cached - n_tokens, 0)
        if n_dropped:
            self._go_back(n_tokens, or_begin_anew=True)
        self._meter.tokens[Phase.DECODE] -= n_dropped
        self._forget(n_tokens)
        self._ahead = None

    @property
    def turn(self) -> threading.RLock:
        """What is held by whoever changes the conversation in several steps."""
        return self._target.turn

    def require_idle(self) -> None:
        """Under ``turn``: raises ``Closed``, or ``Busy`` inside a call of this session."""
        self._target.require_open()
        if self._context.closed:
            raise Closed("the session is closed")
        if self._call is not None:
            self._require_no_call()

    def _require_no_call(self) -> None:
        if self._call is not None and self._call.is_at_work:
            raise Busy("on_progress cannot change the conversation that it is told about")

    def _require_open(self) -> None:
        self._target.require_open()
        if self._context.closed:
            raise Closed("the session is closed")

    def truncate(self, n_tokens: int, *, or_begin_anew: bool = False) -> None:
        """Keep the first ``n_tokens`` tokens of the conversation.

        A recurrent state goes back to the newest snapshot before them, and the next pass runs the tokens in between
        again. Raises ``NotFound``, and nothing has changed, where there is none; ``or_begin_anew`` runs all of them
        again instead.
        """
        require_int("n_tokens", n_tokens, None)
        with self._target.turn:
            self._reconcile()
            if not 0 <= n_tokens <= len(self._tokens):
                raise InvalidArgument(f"cannot keep {n_tokens} of {len(self._tokens)} tokens")
            if n_tokens < self.n_cached:
                self._go_back(n_tokens, or_begin_anew=or_begin_anew)
            self._drop(n_tokens)

    def fork(self) -> TokenSession:
        """A session with the same tokens; pages are shared until one of the two writes."""
        with self._target.turn:
            self._reconcile()
            child = TokenSession(self._target, self._ctx_tokens, self._target.fork(self._context))
            child._tokens = list(self._tokens)
            child._ran, child._chosen = bytearray(self._ran), bytearray(self._chosen)
            child._is_drafting = self._is_drafting
            return child

    def save(self, path: str | os.PathLike[str], seed: int, n_forks: int, transcript: Transcript) -> None:
        """Write the conversation and what belongs to it into a file; see ``save_context``."""
        with self._target.turn:
            self._reconcile()
            begin = self._begin_of_chunk()
            if begin < self.n_cached:
                # Whoever loads may keep no snapshots: what a prompt would go back to is the state in the file.
                self._target.go_back(self._context, begin)
            ran, chosen = bytes(self._ran), bytes(self._chosen)
            saved = Saved(self._ctx_tokens, self.tokens, seed, n_forks, transcript, ran, chosen)
            save_context(path, self._target, self._context, saved)

    @classmethod
    def load(
        cls, target: Target, path: str | os.PathLike[str], ctx_tokens: int | None
    ) -> tuple[TokenSession, Saved]:
        """A session out of a file, and what was saved with it; see ``load_context``."""
        with target.turn:
            target.require_open()
            saved, context = load_context(path, target, ctx_tokens)
            session = cls(target, saved.ctx_tokens, context)
            session._tokens = list(saved.tokens)
            session._ran, session._chosen = bytearray(saved.ran), bytearray(saved.chosen)
            return session, saved

    def forecast(self, n_rows: int) -> Forecast:
        """What a pass of ``n_rows`` more rows will find in the phase that ran last; nothing moves."""
        require_int("n_rows", n_rows)
        if n_rows > _MOST_ROWS:
            raise InvalidArgument(f"n_rows must be at most {_MOST_ROWS}")
        with self._target.turn:
            self.require_idle()
            return self._target.forecast(self._context, n_rows)

    @property
    def stats(self) -> SessionStats:
        """What this session has cost so far; waits for the call that is at work in another thread."""
        with self._target.turn:
            return self._stats()

    def _stats(self) -> SessionStats:
        self._require_open()
        info = self._target.pager_info
        n_prefilled = self._meter.tokens[Phase.PREFILL]
        n_decoded = self._meter.tokens[Phase.DECODE] - (self.n_cached - self._n_kept)
        return SessionStats(
            arena_bytes=self._target.arena_bytes,
            history_bytes=self._target.history_bytes(self._n_kept),
            page_tokens=PAGE_TOKENS,
            resident_pages=info.resident_pages,
            ring_slots=info.ring_slots,
            streamed_bytes=self._meter.streamed_bytes,
            loaded_bytes=self._meter.loaded_bytes,
            copies=self._meter.copies,
            passes=self._meter.passes,
            stall_ms=self._meter.stall_ns / 1e6,
            prefill_tokens=n_prefilled,
            decode_tokens=n_decoded,
            recomputed_tokens=self._meter.recomputed,
            prefill_tokens_per_s=self._meter.rate(Phase.PREFILL, n_prefilled),
            decode_tokens_per_s=self._meter.rate(Phase.DECODE, n_decoded),
            head=None if self._context.head is None else self._context.head.counter.stats,
        )

    def close(self) -> None:
        """Give the history back. A second call does nothing."""
        if self._target.is_forked:
            return
        with self._target.turn:
            self._require_no_call()
            if not self._context.closed:
                self._target.release(self._context)


def _out_rows(out: NDArray[np.float32] | None, n_rows: int, n_cols: int) -> NDArray[np.float32]:
    if out is None:
        return np.empty((n_rows, n_cols), dtype=np.float32)
    if not isinstance(out, np.ndarray):
        raise InvalidArgument(f"out must be a numpy array, got {type(out).__name__}")
    is_shaped = out.dtype == np.float32 and out.shape == (n_rows, n_cols)
    if not (is_shaped and out.flags.c_contiguous and out.flags.writeable):
        raise InvalidArgument(
            f"out must be writable C-contiguous float32 of shape {(n_rows, n_cols)}, got {out.dtype} {out.shape}"
        )
    return out
