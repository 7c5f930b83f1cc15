"""Models and conversations: what applications use.

    with Model.open("demo", arena_mib=16) as model, model.session(seed=1) as session:
        for piece in session.chat("Name three rivers."):
            print(piece.text, end="", flush=True)

``Model`` is what was loaded, with its device, arena and cache types. ``Session`` is one conversation that changes.
Sessions share the model, the arena and the pool.
Holds: ``Model``, ``Session``, ``Piece``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.pager import Forecast
from pykvstream.errors import Busy, Cancelled, InvalidArgument, Unsupported
from pykvstream.gguf import GgufFile
from pykvstream.kernels import KernelProgress
from pykvstream.locate import find_model
from pykvstream.models import ModelConfig
from pykvstream.runtime.admission import check_context
from pykvstream.runtime.catalogue import cache_type
from pykvstream.runtime.checkpoints import checkpoint_bytes_of
from pykvstream.runtime.drafting import Steps
from pykvstream.runtime.layout import ArenaPlan, Placement, require_callable, require_int
from pykvstream.runtime.meter import SessionStats
from pykvstream.runtime.mtp_drafter import MtpDrafter
from pykvstream.runtime.opening import Wish, open_target, packs_of
from pykvstream.runtime.part import PartReport
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.rows import Logits
from pykvstream.runtime.saving import Saved, weights_digest
from pykvstream.runtime.session import ForwardProgress, LogitsWanted, TokenSession
from pykvstream.runtime.target import MemoryReport, Phase, Progress, Target, TargetOptions, require_token_ids
from pykvstream.runtime.timeline import Timeline, check_timeline_path, write_timeline
from pykvstream.sampling import Sampler, SamplerState, SamplingParams, fork_seed
from pykvstream.sampling.noise import check_u64
from pykvstream.speculation import HEAD_DRAFTER, Chain, NgramCounts, SpeculationParams, chain_of
from pykvstream.text.chat import ChatTemplate, encode_chat, with_bos
from pykvstream.text.deltas import Answer, Delta
from pykvstream.text.detokenizer import StreamDecoder
from pykvstream.text.prompt import ChatPrompt, ChatSetting
from pykvstream.text.stops import StopMatcher
from pykvstream.text.tokenizer import Tokenizer
from pykvstream.text.transcript import Transcript, Turn
from pykvstream.text.wishes import Reasoning

DEFAULT_UBATCH = 256


class Model:
    """A model on a device. Made by ``Model.open``; closed by ``close`` or ``with``.

    It belongs to the process that opened it. After ``os.fork`` the child may drop it, but its threads are not there:
    sessions raise ``Unsupported`` and ``close`` does nothing. Open models after the fork.
    """

    def __init__(self, path: Path, file: GgufFile, target: Target, head_file: GgufFile | None = None) -> None:
        self.path = path
        self._file = file
        self._head_file = head_file
        self._target = target
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str = "cpu",
        gpu_layers: int | str = "all",
        arena_mib: float | None = None,
        cpu_arena_mib: float | None = None,
        ctx_size: int | None = None,
        cache_type_k: str = "q8_0",
        cache_type_v: str = "q8_0",
        ubatch_size: int = DEFAULT_UBATCH,
        threads: int = 0,
        kv_rotation: bool = True,
        checkpoint_mib: float | None = None,
        mtp: bool = False,
        mtp_file: str | os.PathLike[str] | None = None,
        kernels: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        wait_limit_s: float | None = None,
        progress: Progress | None = None,
        kernel_progress: KernelProgress | None = None,
    ) -> Self:
        """Load a GGUF file (or ``demo``, ``demo-hybrid``) and reserve its arena.

        ``arena_mib``: the bound on device memory beside the weights and, on hybrids, the recurrent state of each
        session; by default what keeps ``ctx_size`` tokens resident, but not more than a quarter of the memory that is
        free. On a card what keeps ``ctx_size`` tokens resident or, where that is more, what the card has free.
        ``device``: ``cpu``, ``cuda`` or ``cuda:N``, the driver's number of a card. Kernels that it needs come from
        ``kernels``, packs that ``pykvstream kernels pack`` made; others are compiled once and kept under the user's
        cache folder. ``kernel_progress(done, total)`` is called before the first is compiled and after each.
        ``wait_limit_s``: the seconds that any wait for a card may take, by default 60; past it calls raise
        ``DeviceError``, at once, until the card is found to have finished, and ``close`` does not wait for it.
        ``gpu_layers``: the last so many layers, and the output, run on ``device``, the others and the embedding on the
        CPU, in an arena of their own of ``cpu_arena_mib`` (by default as without a card); ``arena_mib`` is then the
        device's. ``"all"``, or as many as there are or more: the whole model on ``device``; 0: on the CPU.
        ``ctx_size``: the longest context of any session, by default the model's own.
        ``ubatch_size``: rows of a prompt pass. ``threads``: 0 for one per core.
        ``checkpoint_mib``: host memory for recurrent states of the past, which let a conversation of a hybrid model go
        back; by default room for 32 of them, but not more than 256 MiB; 0 keeps none.
        ``mtp``: with the MTP head of the file, for the drafter ``draft-mtp``: it takes memory as one more layer does.
        ``mtp_file``: with the head of a GGUF file that holds nothing else.
        ``progress(tensor name, bytes)`` is called for each weight that was loaded.

        The file stays mapped and must not change until ``close``. One that has been cut is refused with
        ``DeviceError`` by the next call; cutting it while a call reads it ends the process with SIGBUS.

        Raises ``NotFound``, ``FormatError``, ``Unsupported``, ``NoSpace`` (with the smallest arena that works) or
        ``HostMemoryError``.
        """
        for name, value in (("kv_rotation", kv_rotation), ("mtp", mtp)):
            if not isinstance(value, bool):
                raise InvalidArgument(f"{name} must be True or False, got {value!r}")
        require_callable("progress", progress)
        require_callable("kernel_progress", kernel_progress)
        packs = packs_of(kernels)
        where = find_model(path)
        file = GgufFile.open(where)
        head_file: GgufFile | None = None
        try:
            config = ModelConfig.from_gguf(file)
            ctx_tokens = config.n_ctx_train if ctx_size is None else ctx_size
            check_context(ctx_tokens, config.n_ctx_train)
            types = cache_type(cache_type_k), cache_type(cache_type_v)
            kept = None if checkpoint_mib is None else checkpoint_bytes_of(checkpoint_mib)
            if mtp_file is not None:
                head_file = GgufFile.open(find_model(mtp_file))
            with_head = mtp or head_file is not None
            options = TargetOptions(*types, ubatch_size, ctx_tokens, kv_rotation, checkpoint_bytes=kept, mtp=with_head)
            wish = Wish(
                device, threads, gpu_layers, arena_mib, cpu_arena_mib, packs, kernel_progress, wait_limit_s
            )
            target = open_target(file, config, options, wish, head_file, progress)
            return cls(where, file, target, head_file)
        except BaseException:
            for part in (file, head_file):
                if part is not None:
                    part.close()
            raise

    @property
    def config(self) -> ModelConfig:
        """What the file says about the model's shape."""
        return self._target.blueprint.config

    @property
    def plan(self) -> ArenaPlan:
        """How the arena is divided in each phase; of a model that is cut, the arena of ``device``."""
        return self._target.plan

    @property
    def report(self) -> MemoryReport:
        """Device bytes by owner, alike."""
        return self._target.report

    @property
    def parts(self) -> tuple[PartReport, ...]:
        """Where the layers are, with the plan and the bytes of each part: one, or two where the model is cut."""
        return tuple(part.told for part in self._target.parts)

    @cached_property
    def identity(self) -> str:
        """A digest of the model's shape, its tensor table and samples of every weight: what a measurement is about."""
        self._file.require_whole()
        return hashlib.sha256(f"{self.config!r} {weights_digest(self._file)}".encode()).hexdigest()

    def place(self, phase: Phase, *placements: Placement) -> None:
        """Divide a phase's pool as stated and enter the phase; no bit of any result changes. For measurements.

        One placement, or two where the model is cut. The division stays: of the decode pool the policy then decides no
        more. Raises ``NoSpace`` where the pool holds fewer pages, ``InvalidArgument`` for fewer than a pass writes.
        """
        with self._target.turn:
            self._target.require_open()
            self._target.place(phase, *placements)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary inside the file, read when first asked for."""
        self._target.before_file()
        self._file.require_whole()
        return Tokenizer.from_metadata(self._file.metadata, self.config.n_vocab)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template inside the file. Raises ``FormatError`` where there is none."""
        return self.make_chat_template(self._file.get_str("tokenizer.chat_template"))

    def make_chat_template(self, source: str) -> ChatTemplate:
        """A template of the caller's, with this model's special tokens."""
        tokenizer = self.tokenizer
        return ChatTemplate(source, tokenizer.bos_token or "", tokenizer.eos_token or "")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer. User text never becomes a special token."""
        return encode_chat(
            self.tokenizer,
            template or self.chat_template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning: Reasoning | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> ChatPrompt:
        """A conversation for ``Session.generate``, which then takes the answer apart and limits its reasoning.

        Raises ``Unsupported`` for what the template does not know.
        """
        setting = ChatSetting(template or self.chat_template, tools, reasoning or Reasoning(), variables)
        rendered = setting.render(messages)
        return setting.prompt(self.tokenizer, rendered, with_bos(self.tokenizer, rendered.encode(self.tokenizer)))

    def session(self, *, ctx_size: int | None = None, seed: int = 0) -> Session:
        """An empty conversation of up to ``ctx_size`` tokens (default: as the model was opened)."""
        ctx_tokens = self.plan.ctx_tokens if ctx_size is None else ctx_size
        return Session(self, TokenSession(self._target, ctx_tokens), seed)

    def load_session(self, path: str | os.PathLike[str], *, ctx_size: int | None = None) -> Session:
        """The conversation that ``Session.save`` wrote, ready to go on with the same bits.

        The arena may have another size; model, cache types and rotation must be those of the saved one. Of recurrent
        states that are kept to go back to, only the newest is in the file, and it takes room among the checkpoints.
        ``ctx_size``: by default as it had. A conversation that is longer, or planned for more than the model was
        opened with, raises ``InvalidArgument``.
        Raises ``NotFound``, ``DeviceError``, or ``FormatError`` naming section and offset of what is damaged or
        foreign; no session has changed then.
        """
        return Session._of(self, *TokenSession.load(self._target, path, ctx_size))

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Timeline]:
        """For ``with``: record what the model's sessions do, and write a timeline for Perfetto or Chrome at the end.

        It shows passes, copies, waits, drafts, steps of the MTP head, and the rounds of each session. What is yielded
        counts events; of more than ``MOST_EVENTS`` the first are kept. The file is written whole or not at all, also
        where the block raises.
        Raises ``Busy`` where one is being recorded; ``DeviceError`` or ``InvalidArgument`` for a path that cannot be
        written, before the block where that is known.
        """
        where = check_timeline_path(path)
        with self._target.turn:
            timeline = self._target.record()
        try:
            yield timeline
        finally:
            with self._target.turn:
                self._target.stop_recording()
            write_timeline(where, timeline, {"model": str(self.path)})

    def check_integrity(self) -> None:
        """Recompute every invariant of the core's objects. For tests."""
        self._target.check_integrity()

    def close(self) -> None:
        """Give everything back, now or when its sessions have been closed. A second call does nothing.

        A call at work in another thread is cancelled and waited for; whatever its sessions are asked from then on
        raises ``Closed``. Raises ``Busy`` inside a call, as from ``on_progress``. In a fork it does nothing.
        """
        if self._closed or self._target.is_forked:
            return
        self._target.stop()
        with self._target.turn:
            if not self._closed:
                self._closed = True
                self._target.close()
                for part in self._target.parts:
                    part.device.close()
                self._file.close()
                if self._head_file is not None:
                    self._head_file.close()

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a Model cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Session:
    """One conversation. Sessions of one model may be used by different threads: they take turns.

    Where they use one session, the last that changes it goes on, and the answer that was in the making raises ``Busy``.
    ``cancel`` may be called from any thread.
    """

    def __init__(self, model: Model, core: TokenSession, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.stop_reason: str | None = None
        self._core = core
        self._n_forks = 0
        self._generation: _Generation | None = None
        self._transcript = Transcript()
        self._speculation: SpeculationParams | None = None
        self._chain: Chain | None = None

    @property
    def seed(self) -> int:
        """What answers are drawn by, from 0 to 2^64 - 1; raises ``InvalidArgument`` for another. The next one obeys."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = check_u64("seed", seed)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the conversation."""
        return self._core.tokens

    @property
    def ctx_size(self) -> int:
        """Most tokens that this conversation can hold."""
        return self._core.ctx_tokens

    @property
    def stats(self) -> SessionStats:
        """Tokens, bytes and rates since the session was made; drafts since ``speculation`` last changed."""
        return replace(self._core.stats, draft=None if self._chain is None else self._chain.stats)

    def hidden_rows(self) -> NDArray[np.float32]:
        """What the MTP head drafts from: the trunk's normalised output rows of the newest tokens, ``[n, n_embd]``.

        All of them in a short conversation, else as many as are kept. Raises ``Unsupported`` for a model that was
        opened without ``mtp``.
        """
        return self._core.hidden_rows()

    @property
    def ngram_counts(self) -> NgramCounts | None:
        """What ``ngram-cache`` counted in this conversation; None where it does not draft."""
        return None if self._chain is None else self._chain.ngram_counts

    @property
    def answer(self) -> Answer | None:
        """The last answer of a chat, taken apart, as far as it has come; None where there was none."""
        return self._transcript.answer

    def forecast(self, n_rows: int) -> Forecast:
        """Pages that the next pass of ``n_rows`` rows finds on the device, and those that stream; nothing moves.

        For the phase that was entered last; before any, ``Busy``.
        """
        return self._core.forecast(n_rows)

    def forward(
        self,
        token_ids: Sequence[int] | NDArray[np.uint32],
        *,
        logits: LogitsWanted = "last",
        phase: Phase = Phase.PREFILL,
        out: NDArray[np.float32] | None = None,
        on_progress: ForwardProgress | None = None,
    ) -> NDArray[np.float32]:
        """Append tokens and run the model over them; see ``TokenSession.forward``."""
        with self._core.turn:
            self._core.require_idle()
            self._generation = None
            self._transcript.forget()
            return self._core.forward(token_ids, logits=logits, phase=phase, out=out, on_progress=on_progress)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` tokens; an answer in the making ends, its iterator raises ``Busy``."""
        with self._core.turn:
            self._core.truncate(n_tokens)
            self._generation = None
            self._transcript.forget()

    def fork(self) -> Session:
        """A conversation that goes on from here on its own, with a seed derived from this one's."""
        with self._core.turn:
            child = Session(self.model, self._core.fork(), fork_seed(self.seed, self._n_forks + 1))
            self._n_forks += 1
            child._transcript = self._transcript.copy()
            child._speculation = self._speculation
            if self._chain is not None and self._speculation is not None:
                head = MtpDrafter(child._core, self._speculation)
                child._chain = self._chain.fork({head.name: head})
            return child

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation into a file that ``Model.load_session`` reads: history, tokens, seed and messages.

        An answer in the making is saved as far as it has come. Sampling parameters are not part of it.
        Raises ``DeviceError`` when it cannot be written, ``InvalidArgument`` for messages that JSON cannot hold; a file
        of that name is as it was then.
        """
        with self._core.turn:
            self._core.save(path, self.seed, self._n_forks, self._transcript)

    @classmethod
    def _of(cls, model: Model, core: TokenSession, saved: Saved) -> Self:
        session = cls(model, core, saved.seed)
        session._n_forks = saved.n_forks
        session._transcript = saved.transcript
        return session

    def cancel(self) -> None:
        """Stop the answer that is being generated, from any thread; the conversation stays usable.

        While nothing runs it stops the next ``forward``; ``generate`` starts afresh.
        """
        self._core.cancel()

    def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt = (),
        *,
        max_tokens: int = -1,
        params: SamplingParams | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        speculation: SpeculationParams | None = None,
        on_progress: ForwardProgress | None = None,
    ) -> Iterator[Piece]:
        """Append a prompt and yield the continuation, one piece per token.

        ``prompt``: text, token ids, or what ``Model.chat_prompt`` made; an answer to that comes with ``deltas``.
        ``max_tokens`` below 0: until the model or the context ends.
        ``stop``: strings that end the text (they are not part of it).
        ``speculation``: drafts several tokens for each pass; the text is the same, see ``SpeculationParams``.
        ``on_progress(done, total)`` is called after each pass over the prompt.
        Afterwards ``stop_reason`` says why it ended: ``eos``, ``stop``, ``length``, ``context_full`` or
        ``cancelled``. Dropping the iterator early keeps what was emitted; a second ``generate`` ends the first, which
        then raises ``Busy``.
        Raises ``NumericError`` (with the position) instead of emitting a token from broken logits.
        """
        with self._core.turn:
            self._core.require_idle()
            chat = None
            if isinstance(prompt, ChatPrompt):
                chat, ids = Turn((), len(self.tokens), prompt), list(prompt.ids)
            elif isinstance(prompt, str):
                ids = self.model.tokenizer.encode(prompt)
            else:
                ids = list(require_token_ids(prompt))
            generation = self._generation_of(chat, params, stop, max_tokens, ignore_eos, speculation, on_progress)
            self._transcript.forget()
            return generation.run(ids)

    def chat(
        self,
        message: str | Sequence[Mapping[str, object]],
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning: Reasoning | None = None,
        variables: Mapping[str, object] | None = None,
        max_tokens: int = -1,
        params: SamplingParams | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        template: ChatTemplate | None = None,
        speculation: SpeculationParams | None = None,
        on_progress: ForwardProgress | None = None,
    ) -> Iterator[Piece]:
        """Say something and yield the answer, its parts in ``Piece.deltas`` and, as a whole, in ``answer``.

        ``message``: the user's words, or messages, such as the results of tools. ``system`` counts in the first
        message only. ``tools``, ``reasoning`` and ``variables`` (more variables of the template) hold for this turn:
        give them each time. Where the template leaves out earlier thinking, the conversation goes back to where it
        began, unless ``reasoning`` says to preserve it.
        Raises ``Unsupported`` for what the template does not know; see ``generate`` for the rest.
        """
        if not isinstance(message, str | Sequence):
            raise InvalidArgument(f"message must be text or a sequence of messages, got {type(message).__name__}")
        for name, given, kind in (
            ("template", template, ChatTemplate),
            ("reasoning", reasoning, Reasoning),
            ("variables", variables, Mapping),
        ):
            if given is not None and not isinstance(given, kind):
                raise InvalidArgument(f"{name} must be {kind.__name__}, got {type(given).__name__}")
        turn = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        setting = ChatSetting(template or self.model.chat_template, tools, reasoning or Reasoning(), variables)
        tokenizer = self.model.tokenizer
        with self._core.turn:
            self._core.require_idle()
            tokens = self.tokens
            if tokens or self._transcript.is_behind:
                chat = self._transcript.next(tokenizer, tokens, turn, setting)
            else:
                first: list[Mapping[str, object]] = [] if system is None else [{"role": "system", "content": system}]
                chat = self._transcript.first(tokenizer, [*first, *turn], setting)
            generation = self._generation_of(chat, params, stop, max_tokens, ignore_eos, speculation, on_progress)
            if chat.n_kept < len(tokens):
                self._core.truncate(chat.n_kept, or_begin_anew=True)
                self._transcript.cut()
            return generation.run(chat.prompt.ids)

    def _generation_of(
        self,
        chat: Turn | None,
        params: SamplingParams | None,
        stop: Sequence[str],
        max_tokens: int,
        ignore_eos: bool,
        speculation: SpeculationParams | None,
        on_progress: ForwardProgress | None,
    ) -> _Generation:
        """An answer that takes the place of the one in the making, which stays where the arguments are refused."""
        require_int("max_tokens", max_tokens, None)
        require_callable("on_progress", on_progress)
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidArgument(f"params must be SamplingParams, got {type(params).__name__}")
        chain = self._chain_of(speculation)
        by_probability = speculation is not None and speculation.is_probabilistic
        steps = Steps(self._core, chain, by_probability=by_probability)
        made = _Generation(
            self, self._core, chat, params or SamplingParams(), stop, max_tokens, ignore_eos, steps, on_progress
        )
        self._speculation, self._chain = speculation, chain
        self.stop_reason = None
        self._core.clear_cancel()
        self._generation = made
        return made

    def _chain_of(self, speculation: SpeculationParams | None) -> Chain | None:
        """The drafters that know this conversation, or new ones where other ones are wanted."""
        if speculation is None or speculation == self._speculation:
            return None if speculation is None else self._chain
        if not isinstance(speculation, SpeculationParams):
            raise InvalidArgument(f"speculation must be SpeculationParams, got {type(speculation).__name__}")
        head = None
        if HEAD_DRAFTER in speculation.types:
            self._core.require_head()
            head = MtpDrafter(self._core, speculation)
        return chain_of(speculation, self.model.tokenizer.n_vocab, head)

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a Session cannot be copied or pickled; fork() makes a conversation that goes on alone")

    def close(self) -> None:
        """Give the history back. A second call does nothing."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Generation:
    """One answer in the making."""

    def __init__(
        self,
        session: Session,
        core: TokenSession,
        chat: Turn | None,
        params: SamplingParams,
        stop: Sequence[str],
        max_tokens: int,
        ignore_eos: bool,
        steps: Steps,
        on_progress: ForwardProgress | None,
    ) -> None:
        tokenizer = session.model.tokenizer
        self._session = session
        self._core = core
        self._chat = chat
        self._limit = chat.prompt.limit() if chat is not None else None
        self._sampler = Sampler(params, seed=session.seed, n_vocab=tokenizer.n_vocab)
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopMatcher(stop)
        self._eog = frozenset() if ignore_eos else frozenset(tokenizer.eog_ids)
        self._max_tokens = max_tokens
        self._steps = steps
        self._on_progress = on_progress

    def run(self, ids: Sequence[int]) -> Iterator[Piece]:
        pieces = self._pieces(ids)
        while True:
            # Whoever comes while a step is taken waits; between two steps the conversation may change hands.
            with self._core.turn:
                self._core.require_idle()
                if self._session._generation is not self:
                    raise Busy("another generate() or a change of the session came between; this one cannot go on")
                piece = self._next(pieces)
                if piece is None:
                    # Who cancels an answer that has just ended does not mean the next call.
                    self._core.clear_cancel()
                    return
            yield piece

    def _next(self, pieces: Iterator[Piece]) -> Piece | None:
        try:
            return next(pieces, None)
        except Cancelled:
            self._session.stop_reason = "cancelled"
            if self._chat is not None:
                self._session._transcript.finish()
            return None

    def _pieces(self, ids: Sequence[int]) -> Iterator[Piece]:
        if not ids and not self._core.tokens:
            raise InvalidArgument("an empty prompt in an empty conversation")
        marks = self._chat.marks(self._session.model.tokenizer) if self._chat is not None else ()
        logits: Logits = self._prefill(ids, marks)
        if self._chat is not None:
            self._session._transcript.begin(self._chat)
        n_emitted = 0
        while True:
            if n_emitted == self._max_tokens:
                self._session.stop_reason = "length"
            elif self._core.n_tokens == self._core.ctx_tokens:
                self._session.stop_reason = "context_full"
            if self._session.stop_reason is not None:
                return
            piece = self._emit(logits, n_emitted + 1 == self._max_tokens)
            n_emitted += 1
            n_left = self._core.ctx_tokens - self._core.n_tokens
            if self._max_tokens >= 0:
                n_left = min(n_left, self._max_tokens - n_emitted)
            is_going_on = self._session.stop_reason is None and n_left > 0
            if not is_going_on:
                self._steps.end()
            yield piece
            if is_going_on:
                logits = self._steps.logits(n_left)

    def _prefill(self, ids: Sequence[int], marks: Sequence[int]) -> NDArray[np.float32]:
        """Logits for the first token."""
        phase = Phase.PREFILL if ids else self._core.rewind()
        has_front, progress = self._sampler.rows_needed_by is None, self._on_progress
        logits = self._core.forward(ids, phase=phase, on_progress=progress, marks=marks, with_front=has_front)
        self._sampler.restore(SamplerState(seed=self._session.seed, tokens=self._core.tokens))
        self._steps.begin(self._sampler, may_force=self._limit is not None)
        row: NDArray[np.float32] = logits[0]
        return row

    def _emit(self, logits: Logits, is_last: bool) -> Piece:
        position = self._core.n_tokens
        is_last = is_last or position + 1 == self._core.ctx_tokens
        forced = self._limit.forced() if self._limit is not None else None
        if forced is None:
            choice = self._steps.choose(self._sampler, logits, position)
        else:
            choice = self._steps.score(self._sampler, forced, logits, position)
        self._sampler.accept(choice.token)
        self._core.push(choice.token)
        self._steps.take(choice.token)
        text = self._text_of(choice.token, is_last)
        return Piece(choice.token, text, choice.logprob, logits, self._deltas_of(text, is_last))

    def _text_of(self, token: int, is_last: bool) -> str:
        """The text that a token completes; decides whether the answer ends with it."""
        if token in self._eog:
            self._session.stop_reason = "eos"
            return self._flush()
        readable = self._decoder.push(token)
        if self._limit is not None:
            self._limit.spend(readable, is_whole=self._decoder.is_whole)
        text, stopped = self._stops.push(readable)
        if stopped:
            self._session.stop_reason = "stop"
        return text + self._flush() if is_last and not stopped else text

    def _deltas_of(self, text: str, is_last: bool) -> tuple[Delta, ...]:
        """The parts of an answer that became certain, all of them with its last token."""
        if self._chat is None:
            return ()
        transcript = self._session._transcript
        deltas = transcript.add(text)
        return (*deltas, *transcript.finish()) if is_last or self._session.stop_reason is not None else deltas

    def _flush(self) -> str:
        """Text that was held back: an unfinished character, the beginning of a stop string."""
        tail, stopped = self._stops.push(self._decoder.flush())
        return tail if stopped else tail + self._stops.flush()
