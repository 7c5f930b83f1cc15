"""``pykvstream generate``: one prompt, one answer.

Order: text goes to standard output as it becomes complete; everything else goes to standard error.
Holds: ``run``; ``logits_sha256`` is over float32 rows, little endian, row i the logits from which emitted token i
was chosen.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from pykvstream.cli.drafting import keep_counts, speculation_for
from pykvstream.cli.options import GenerateOptions
from pykvstream.cli.render import console, is_shown, note, prefilling, stats_table, summary
from pykvstream.cli.session import interruptible, open_model, params_for, read_prompt, read_template, read_tools
from pykvstream.engine import Model, Piece, Session
from pykvstream.sampling import SamplingParams
from pykvstream.speculation import SpeculationParams
from pykvstream.text.prompt import ChatPrompt

INTERRUPTED = 130
_CANCELLED = "cancelled"


@dataclass(slots=True)
class _Answer:
    """What was emitted, as it comes."""

    prompt: list[int] | ChatPrompt
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    streamed_before: int = 0

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.ids if isinstance(self.prompt, ChatPrompt) else self.prompt)

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
    with open_model(options.model, options.output.progress) as model:
        answer = _Answer(_encode(model, prompt, options))
        params = params_for(model, options.generation)
        with model.session(seed=options.generation.seed) as session:
            try:
                _stream(session, params, speculation, options, answer)
            finally:
                if answer.tokens and not options.output.json:
                    # What follows on a terminal, an error too, begins on a line of its own.
                    print(flush=True)
            _report(options, session, answer)
            keep_counts(drafting, speculation, session.ngram_counts)
            return INTERRUPTED if session.stop_reason == _CANCELLED else 0


def _stream(
    session: Session,
    params: SamplingParams,
    speculation: SpeculationParams | None,
    options: GenerateOptions,
    answer: _Answer,
) -> None:
    with interruptible(session) as interrupt:
        with prefilling(options.output.progress) as show:
            pieces = session.generate(
                answer.prompt,
                max_tokens=options.generation.n_predict,
                params=params,
                stop=options.generation.stop,
                ignore_eos=options.generation.ignore_eos,
                speculation=speculation,
                on_progress=show,
            )
            interrupt.renew()
            first = next(pieces, None)
        answer.streamed_before = session.stats.streamed_bytes
        for piece in chain([] if first is None else [first], pieces):
            answer.add(piece)
            if piece.text and not options.output.json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()


def _encode(model: Model, prompt: str, options: GenerateOptions) -> list[int] | ChatPrompt:
    given = options.prompt
    if given.raw:
        return model.tokenizer.encode(prompt, bos=True)
    messages = [{"role": "system", "content": given.system}] if given.system is not None else []
    return model.chat_prompt(
        [*messages, {"role": "user", "content": prompt}],
        template=read_template(model, given),
        tools=read_tools(given),
        reasoning=given.reasoning,
        variables=given.variables,
    )


def _parts(session: Session, answer: _Answer) -> dict[str, object]:
    """The answer taken apart, where the template is such that there are parts."""
    if not isinstance(answer.prompt, ChatPrompt) or answer.prompt.start is None or session.answer is None:
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
            **_parts(session, answer),
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
