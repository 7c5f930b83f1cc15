"""``pykvstream generate``: one prompt, one answer, in a new conversation or behind a saved one.

Order: text goes to standard output as it becomes complete; everything else goes to standard error. Behind the answer
``--save-session`` and ``--embeddings-nextn`` write their files.
Holds: ``run``; ``logits_sha256`` is over float32 rows, little endian, row i the logits from which emitted token i
was chosen.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from pykvstream.cli.array_file import check_array_path, write_array
from pykvstream.cli.drafting import keep_counts, speculation_for
from pykvstream.cli.options import GenerateOptions
from pykvstream.cli.outputs import check_outputs, models_of
from pykvstream.cli.render import console, is_shown, note, prefilling, stats_table, summary
from pykvstream.cli.session import (
    interruptible,
    open_model,
    open_session,
    params_for,
    read_prompt,
    read_template,
    read_tools,
    tracing,
)
from pykvstream.engine import Session
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.session import ForwardProgress
from pykvstream.runtime.session_file import check_session_path
from pykvstream.runtime.timeline import check_timeline_path
from pykvstream.sampling import SamplingParams
from pykvstream.speculation import SpeculationParams

INTERRUPTED = 130
_CANCELLED = "cancelled"


@dataclass(slots=True)
class _Answer:
    """What was emitted, as it comes."""

    n_prompt: int = 0
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    streamed_before: int = 0

    def counting(self, show: ForwardProgress | None) -> ForwardProgress:
        """Progress that is shown, and from which the tokens of the prompt are known."""

        def count(done: int, total: int) -> None:
            self.n_prompt = total
            if show is not None:
                show(done, total)

        return count

    def add(self, piece: Piece) -> None:
        """Take in a piece now: its logits are gone with the next one."""
        self.digest.update(np.ascontiguousarray(piece.logits, dtype="<f4").tobytes())
        self.tokens.append(piece.token)
        self.texts.append(piece.text)

    def per_token(self, streamed_bytes: int) -> float:
        """Bytes streamed for each token after the first; the first one comes out of the prompt's pass."""
        return (streamed_bytes - self.streamed_before) / max(len(self.tokens) - 1, 1)


def run(options: GenerateOptions) -> int:
    """Answer; the exit code is 130 after Ctrl-C. Raises ``KvStreamError``."""
    prompt = read_prompt(options.prompt) or ""
    drafting = options.generation.drafting
    speculation = speculation_for(drafting)
    if options.save_file is not None:
        check_session_path(options.save_file)
    if options.output.trace_file is not None:
        check_timeline_path(options.output.trace_file)
    hidden_file = options.hidden_file
    if hidden_file is not None:
        check_array_path(hidden_file)
    check_outputs(
        {
            "--save-session": options.save_file,
            "--trace": options.output.trace_file,
            "--embeddings-nextn": hidden_file,
        },
        models_of(options.model.model, drafting.mtp_file),
    )
    with open_model(options.model, options.output.progress, drafting, needs_head=hidden_file is not None) as model:
        params = params_for(model, options.generation)
        answer = _Answer()
        with open_session(model, options.model, options.generation) as session:
            # The timeline is written last: a conversation is kept whether or not its timeline can be.
            with tracing(model, options.output.trace_file):
                try:
                    _stream(session, prompt, params, speculation, options, answer)
                finally:
                    if answer.tokens and not options.output.json:
                        # What follows on a terminal, an error too, begins on a line of its own.
                        print(flush=True)
                _report(options, session, answer)
                if options.save_file is not None:
                    session.save(options.save_file)
                if hidden_file is not None:
                    write_array(hidden_file, session.hidden_rows())
                keep_counts(drafting, speculation, session.ngram_counts)
            return INTERRUPTED if session.stop_reason == _CANCELLED else 0


def _stream(
    session: Session,
    prompt: str,
    params: SamplingParams,
    speculation: SpeculationParams | None,
    options: GenerateOptions,
    answer: _Answer,
) -> None:
    with interruptible(session) as interrupt:
        with prefilling(options.output.progress) as show:
            pieces = _pieces(session, prompt, params, speculation, options, answer.counting(show))
            interrupt.renew()
            first = next(pieces, None)
        answer.streamed_before = session.stats.streamed_bytes
        for piece in chain([] if first is None else [first], pieces):
            answer.add(piece)
            if piece.text and not options.output.json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()


def _pieces(
    session: Session,
    prompt: str,
    params: SamplingParams,
    speculation: SpeculationParams | None,
    options: GenerateOptions,
    show: ForwardProgress,
) -> Iterator[Piece]:
    given, wanted = options.prompt, options.generation
    if given.raw:
        is_new = not session.tokens
        return session.generate(
            session.model.tokenizer.encode(prompt, bos=is_new),
            max_tokens=wanted.n_predict,
            params=params,
            stop=wanted.stop,
            ignore_eos=wanted.ignore_eos,
            speculation=speculation,
            on_progress=show,
        )
    return session.chat(
        prompt,
        system=given.system,
        tools=read_tools(given),
        reasoning=given.reasoning,
        variables=given.variables,
        max_tokens=wanted.n_predict,
        params=params,
        stop=wanted.stop,
        ignore_eos=wanted.ignore_eos,
        template=read_template(session.model, given),
        speculation=speculation,
        on_progress=show,
    )


def _parts(session: Session) -> dict[str, object]:
    """The answer taken apart, where a template was used."""
    if session.answer is None:
        return {}
    calls = [
        {"name": call.name, "arguments": call.arguments, "is_complete": call.is_complete}
        for call in session.answer.tool_calls
    ]
    return {"reasoning": session.answer.reasoning, "content": session.answer.content, "tool_calls": calls}


def _report(options: GenerateOptions, session: Session, answer: _Answer) -> None:
    stats = session.stats
    if options.output.json:
        result = {
            "model": options.model.model,
            "seed": session.seed,
            "prompt_tokens": answer.n_prompt,
            "tokens": answer.tokens,
            "text": "".join(answer.texts),
            **_parts(session),
            "stop_reason": session.stop_reason,
            "logits_sha256": answer.digest.hexdigest(),
            "stats": stats.as_dict(),
        }
        print(json.dumps(result), flush=True)
    if is_shown(options.output.progress) or not (options.output.json or options.output.progress is False):
        per_token = answer.per_token(stats.streamed_bytes)
        note(summary(options.model.model, session.seed, session.stop_reason, stats.prefill_tokens,
                     len(answer.tokens), per_token, stats))  # fmt: skip
    if options.output.stats:
        console(sys.stderr).print(stats_table(stats))
