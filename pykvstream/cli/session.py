"""From options to an open model, a prompt and interrupts: what ``generate`` and ``chat`` share.

Holds: ``open_model``, ``file_bytes``, ``open_session``, ``read_prompt``, ``read_text``, ``read_template``,
``read_tools``, ``params_for``, ``tracing``, ``Interrupt``.
"""

from __future__ import annotations

import glob
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from pykvstream.cli.drafting import DraftingOptions
from pykvstream.cli.options import GenerationOptions, ModelOptions, PromptOptions
from pykvstream.cli.render import loading, note
from pykvstream.engine import Model, Session
from pykvstream.errors import DeviceError, InvalidArgument, KvStreamError, NotFound
from pykvstream.locate import find_model
from pykvstream.sampling import SamplingParams
from pykvstream.text.chat import ChatTemplate
from pykvstream.text.tokenizer import MAX_TEXT_CHARS, Tokenizer

_MAX_PROMPT_BYTES = 4 * MAX_TEXT_CHARS
_MAX_TEMPLATE_BYTES = 1 << 22
STDIN = "-"
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def open_model(
    options: ModelOptions, progress: bool | None, drafting: DraftingOptions | None = None, *, needs_head: bool = False
) -> Model:
    """``Model.open`` with the flags of the command line. ``needs_head``: with the MTP head, whoever drafts."""
    head = drafting or DraftingOptions()
    with loading(options.model, file_bytes(options.model), progress) as (show, show_kernels):
        return Model.open(
            options.model,
            device=options.device,
            gpu_layers=options.gpu_layers,
            arena_mib=options.arena_mib,
            cpu_arena_mib=options.cpu_arena_mib,
            ctx_size=options.ctx_size,
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            ubatch_size=options.ubatch_size,
            threads=options.threads,
            kv_rotation=options.kv_rotation,
            checkpoint_mib=options.checkpoint_mib,
            mtp=needs_head or head.needs_head,
            mtp_file=head.mtp_file,
            kernels=options.kernels,
            wait_limit_s=options.wait_limit_s,
            progress=show,
            kernel_progress=show_kernels,
        )


@contextmanager
def tracing(model: Model, file: Path | None) -> Iterator[None]:
    """Record a timeline of the block into a file, where one was named; what found no room is said."""
    if file is None:
        yield
        return
    with model.trace(file) as timeline:
        yield
    if timeline.n_lost:
        note(f"timeline: {timeline.n_events} events are kept, {timeline.n_lost} that came later are not")


def file_bytes(name: str) -> int:
    """Bytes of a model's file, or of all its shards; 0 where there is no such file: opening says so."""
    try:
        where = find_model(name)
        siblings = _SHARD.sub(r"-[0-9][0-9][0-9][0-9][0-9]-of-\1.gguf", glob.escape(where.name))
        return sum(path.stat().st_size for path in where.parent.glob(siblings))
    except (KvStreamError, OSError):
        return 0


def open_session(model: Model, options: ModelOptions, generation: GenerationOptions) -> Session:
    """An empty session, or the saved one to go on with."""
    if generation.session_file is None:
        return model.session(seed=generation.seed)
    return model.load_session(generation.session_file, ctx_size=options.ctx_size)


def read_prompt(options: PromptOptions) -> str | None:
    """The prompt, None where none was given. Raises ``InvalidArgument`` naming the byte that is not UTF-8."""
    if options.file is None:
        return options.text
    text = read_text(options.file, "prompt file")
    return text.removesuffix("\n").removesuffix("\r")


def read_text(name: str, what: str) -> str:
    """A UTF-8 file, or standard input. Raises ``NotFound``, ``DeviceError``, or ``InvalidArgument`` with the byte."""
    return _read(name, what, _MAX_PROMPT_BYTES)


def read_template(model: Model, options: PromptOptions) -> ChatTemplate | None:
    """The template of ``--chat-template-file``; None is the model's own."""
    if options.template_file is None:
        return None
    return model.make_chat_template(_read(str(options.template_file), "chat template", _MAX_TEMPLATE_BYTES))


def read_tools(options: PromptOptions) -> list[Mapping[str, object]] | None:
    """The tools of ``--tools``, None where none were given. Raises ``InvalidArgument``."""
    if options.tools_file is None:
        return None
    text = _read(str(options.tools_file), "tools", _MAX_TEMPLATE_BYTES)
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list):
        raise InvalidArgument(f"tools {str(options.tools_file)!r}: need a JSON list of tools")
    return tools


def params_for(model: Model, options: GenerationOptions) -> SamplingParams:
    """The sampling parameters, with the tokens that end a repeated sequence."""
    if not options.params.has_dry or not options.dry_breakers:
        return options.params
    return replace(options.params, dry_breakers=breaker_tokens(model.tokenizer, options.dry_breakers))


def breaker_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens whose text has any of ``texts`` in it."""
    needles = [text.encode("utf-8", "surrogateescape") for text in texts if text]
    return tuple(
        token for token in range(tokenizer.n_vocab) if any(needle in tokenizer.token_bytes(token) for needle in needles)
    )


def _read(name: str, what: str, most: int) -> str:
    try:
        if name == STDIN:
            data = _at_most(sys.stdin.buffer, most)
        else:
            with Path(name).open("rb") as file:
                data = _at_most(file, most)
    except (FileNotFoundError, ValueError):
        raise NotFound(f"{what} {name!r}: no such file") from None
    except OSError as error:
        raise DeviceError(f"{what} {name!r}: {error.strerror}") from None
    if len(data) > most:
        raise InvalidArgument(f"{what} {name!r}: more than {most} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what} {name!r}: byte {error.start} is not UTF-8") from None


def _at_most(file: BinaryIO, most: int) -> bytes:
    # One byte more shows that there is more, without reading an endless device to its end.
    return file.read(most + 1)


class Interrupt:
    """Whether Ctrl-C was pressed while an answer was made."""

    def __init__(self, session: Session) -> None:
        self.pressed = False
        self._session = session

    def press(self) -> None:
        """Stop the answer. A second press while the first has not been obeyed interrupts as usual."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._session.cancel()

    def renew(self) -> None:
        """Cancel again: making a generation forgets a cancellation that came before it."""
        if self.pressed:
            self._session.cancel()


@contextmanager
def interruptible(session: Session) -> Iterator[Interrupt]:
    """Inside, Ctrl-C cancels the session in place of raising wherever the program happens to be."""
    interrupt = Interrupt(session)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(_: int, __: FrameType | None) -> None:
        interrupt.press()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
