"""``pykvstream chat``: a conversation in the terminal, or over lines of standard input.

Order: answers go to standard output, everything else to standard error.
Holds: ``run``. Ctrl-C stops an answer and keeps the conversation; an error ends the turn, never the program.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pykvstream.cli.drafting import keep_counts, speculation_for
from pykvstream.cli.options import ChatOptions, require_utf8
from pykvstream.cli.outputs import check_outputs, models_of
from pykvstream.cli.render import ShownAnswer, console, is_shown, note, prefilling, stats_table, summary
from pykvstream.cli.session import (
    interruptible,
    open_model,
    open_session,
    params_for,
    read_prompt,
    read_template,
    tracing,
)
from pykvstream.engine import Model, Session
from pykvstream.errors import ContextFull, KvStreamError
from pykvstream.runtime.meter import SessionStats
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.timeline import check_timeline_path
from pykvstream.runtime.whole_file import replacing
from pykvstream.sampling import SamplingParams
from pykvstream.speculation import SpeculationParams
from pykvstream.text.chat import ChatTemplate
from pykvstream.text.prompt import ChatSetting

_PLAIN = ("/quit", "/exit", "/stats", "/clear", "/help")
"""Commands without an argument."""
_PROMPT = "> "
_MORE = ". "
_HELP = """\
/stats       counters of the session
/clear       forget the conversation and begin anew
/save FILE   write the conversation as Markdown
/save-session FILE
             write the conversation so that --session FILE goes on with it
/quit, /exit leave; so does Ctrl-D
/help        this list
A backslash at the end of a line continues the message on the next one.
A message that begins with // is sent with one slash less.
Ctrl-C stops an answer; what was said so far stays."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's words; ``note`` says what is special about an answer, such as that it was stopped."""

    role: str
    text: str
    note: str = ""
    reasoning: str = ""


@dataclass(slots=True)
class Conversation:
    """The state of the terminal: the session, and what has been said."""

    options: ChatOptions
    model: Model
    session: Session
    params: SamplingParams
    template: ChatTemplate | None
    speculation: SpeculationParams | None
    turns: list[Turn] = field(default_factory=list)

    def say(self, message: str) -> None:
        """Send a message and print the answer as it comes."""
        try:
            require_utf8("the message", message)
            self._answer(message)
        except ContextFull as error:
            note(f"{error}; /clear begins anew")
        except KvStreamError as error:
            note(f"error: {error}")

    def _answer(self, message: str) -> None:
        before = self.session.stats
        shown = ShownAnswer()
        n_tokens = 0
        try:
            for piece in self._pieces(message):
                n_tokens += 1
                shown.add(piece.deltas)
        finally:
            shown.end(n_tokens > 0)
            answer = self.session.answer
            if n_tokens and answer is not None:
                stopped = "" if self.session.stop_reason in ("eos", "stop") else self.session.stop_reason or "failed"
                said = Turn("assistant", answer.content, stopped, answer.reasoning)
                self.turns += [Turn("user", message), said]
        self._close_turn(n_tokens, before)

    def _pieces(self, message: str) -> Iterator[Piece]:
        with interruptible(self.session) as interrupt:
            with prefilling(self.options.output.progress) as show:
                pieces = self.session.chat(
                    message,
                    system=self.options.prompt.system,
                    reasoning=self.options.prompt.reasoning,
                    variables=self.options.prompt.variables,
                    max_tokens=self.options.generation.n_predict,
                    params=self.params,
                    stop=self.options.generation.stop,
                    template=self.template,
                    speculation=self.speculation,
                    on_progress=show,
                )
                interrupt.renew()
                first = next(pieces, None)
            if first is not None:
                yield first
                yield from pieces

    def _close_turn(self, n_tokens: int, before: SessionStats) -> None:
        reason = self.session.stop_reason
        if reason == "cancelled":
            note("[stopped]" if n_tokens else "[stopped before the answer; the message was not taken in]")
        elif reason == "context_full":
            used, size = len(self.session.tokens), self.session.ctx_size
            note(f"the context is full ({used} of {size} tokens); /clear begins anew, /save FILE keeps the text")
        elif reason == "length":
            note("[cut off by --n-predict]")
        if self.options.output.stats:
            self.show_stats()
        elif self.options.output.progress:
            name, seed = self.options.model.model, self.session.seed
            stats = self.session.stats
            per_token = (stats.streamed_bytes - before.streamed_bytes) / max(n_tokens, 1)
            n_prompt = stats.prefill_tokens - before.prefill_tokens
            note(summary(name, seed, reason, n_prompt, n_tokens, per_token, stats))

    def show_stats(self) -> None:
        note(f"{len(self.session.tokens)} of {self.session.ctx_size} tokens, seed {self.session.seed}")
        console(sys.stderr).print(stats_table(self.session.stats))

    def clear(self) -> None:
        self.session.truncate(0)
        self.turns.clear()
        note("the conversation is forgotten")

    def save(self, name: str) -> None:
        """Write the transcript; a failure leaves the old file whole."""
        if not name:
            note("/save needs a file name")
            return
        try:
            with replacing(Path(name).expanduser()) as file:
                file.write(self.markdown().encode(errors="replace"))
        except OSError as error:
            note(f"not saved: {name!r}: {error.strerror}")
        except (KvStreamError, ValueError, RuntimeError) as error:
            note(f"not saved: {error}")
        else:
            note(f"saved {len(self.turns)} turns to {name}")

    def save_session(self, name: str) -> None:
        """Write what ``--session`` goes on with; a failure leaves the old file whole."""
        if not name:
            note("/save-session needs a file name")
            return
        try:
            self.session.save(Path(name).expanduser())
        except (KvStreamError, RuntimeError) as error:
            note(f"not saved: {error}")
        else:
            note(f"saved {len(self.session.tokens)} tokens to {name}")

    def markdown(self) -> str:
        """The conversation so far."""
        parts = [f"# Conversation with {self.model.config.name or self.options.model.model}", ""]
        if self.options.prompt.system is not None:
            parts += ["## system", "", self.options.prompt.system, ""]
        for turn in self.turns:
            parts += [f"## {turn.role}" + (f" ({turn.note})" if turn.note else ""), ""]
            if turn.reasoning:
                parts += [*(f"> {line}".rstrip() for line in turn.reasoning.split("\n")), ""]
            parts += [turn.text, ""]
        return "\n".join(parts)


def run(options: ChatOptions) -> int:
    """Talk until the user leaves. Raises ``KvStreamError`` for what stands in the way of beginning."""
    first = read_prompt(options.prompt)
    speculation = speculation_for(options.generation.drafting)
    if options.output.trace_file is not None:
        check_timeline_path(options.output.trace_file)
        check_outputs({"--trace": options.output.trace_file}, models_of(options.model.model))
    with open_model(options.model, options.output.progress, options.generation.drafting) as model:
        template = read_template(model, options.prompt) or model.chat_template
        # What the template does not know is refused before anybody types.
        ChatSetting(template, None, options.prompt.reasoning, options.prompt.variables)
        params = params_for(model, options.generation)
        with open_session(model, options.model, options.generation) as session:
            conversation = Conversation(options, model, session, params, template, speculation)
            _greet(options, session)
            with tracing(model, options.output.trace_file):
                if first is not None:
                    _calmly(partial(conversation.say, first))
                for message in _messages():
                    if _calmly(partial(_obey, conversation, message)) is False:
                        break
            keep_counts(options.generation.drafting, speculation, session.ngram_counts)
    return 0


def _greet(options: ChatOptions, session: Session) -> None:
    if is_shown(options.output.progress):
        name, arena = options.model.model, session.stats.arena_bytes / (1 << 20)
        size = f"context {session.ctx_size} tokens, arena {arena:,.1f} MiB, seed {session.seed}"
        said = f", {len(session.tokens)} tokens said" if session.tokens else ""
        note(f"{name}: {size}{said}. /help lists the commands.")


def _calmly(turn: Callable[[], bool | None]) -> bool | None:
    """Take a turn; Ctrl-C between two steps, or pressed twice, ends the turn and not the conversation."""
    try:
        return turn()
    except KeyboardInterrupt:
        note("[stopped]")
        return None


def _obey(conversation: Conversation, message: str) -> bool:
    """Carry out a command or send a message; False to leave."""
    command, _, rest = message.strip().partition(" ")
    if not command:
        return True
    if not command.startswith("/") or command.startswith("//"):
        conversation.say(message[1:] if command.startswith("//") else message)
    elif rest.strip() and command in _PLAIN:
        note(f"{command} takes no argument")
    elif command in ("/quit", "/exit"):
        return False
    elif command == "/stats":
        conversation.show_stats()
    elif command == "/clear":
        conversation.clear()
    elif command == "/save":
        conversation.save(rest.strip())
    elif command == "/save-session":
        conversation.save_session(rest.strip())
    elif command == "/help":
        note(_HELP)
    else:
        note(f"no command {command}; /help lists them, //{command[1:]} sends it as text")
    return True


def _messages() -> Iterator[str]:
    """Messages until the end of input. Ctrl-C while one is typed drops it."""
    read = _reader()
    lines: list[str] = []
    while True:
        try:
            line = read(_MORE if lines else _PROMPT)
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /quit leaves)")
            lines.clear()
            continue
        if line is None:
            if lines:
                yield "\n".join(lines)
            return
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            message = "\n".join(lines)
            lines.clear()
            yield message


def _reader() -> Callable[[str], str | None]:
    """Reads a line, None at the end: with editing and history on a terminal, plainly elsewhere."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A byte that is no text is then refused with its message, by the tokenizer, and does not end the conversation.
        sys.stdin.reconfigure(errors="surrogateescape")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _read_plain
    if importlib.util.find_spec("readline") is not None:
        # Importing it is what gives ``input`` its line editing.
        importlib.import_module("readline")
    return _read_terminal


def _read_plain(_: str) -> str | None:
    data = sys.stdin.readline()
    return data.removesuffix("\n").removesuffix("\r") if data else None


def _read_terminal(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
