"""``pykvstream generate``: one prompt, one answer.

Order: text goes to standard output as it becomes complete; everything else goes to standard error.
Holds: ``run``; ``logits_sha256`` is over float32 rows, little endian, row i the logits from which emitted token i was chosen.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from pykvstream.cli.options import GenerateOptions
from pykvstream.cli.render import console, is_shown, note, prefilling, stats_table, summary
from pykvstream.cli.session import interruptible, open_model, params_for, read_prompt, read_template
from pykvstream.engine import Model, Piece, Session

INTERRUPTED = 130
_CANCELLED = "cancelled"


@dataclass(slots=True)
class _Answer:
    """What was emitted, as it comes."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    streamed_before: int = 0
    stop_reason: str | None = None

    def per_token(self, streamed_bytes: int) -> float:
        """Bytes streamed for each token after the first; the first one comes out of the prompt's pass."""
        return (streamed_bytes - self.streamed_before) / max(len(self.tokens) - 1, 1)


def run(options: GenerateOptions) -> int:
    """Answer; the exit code is 130 after Ctrl-C. Raises ``KvStreamError``."""
    prompt = read_prompt(options.prompt) or ""
    with open_model(options.model, options.output.progress) as model:
        ids = _encode(model, prompt, options)
        params = params_for(model, options.generation)
        with model.session(seed=options.generation.seed) as session, interruptible(session) as interrupt:
            answer = _Answer(len(ids))
            digest = hashlib.sha256()
            with prefilling(options.output.progress) as show:
                pieces = session.generate(
                    ids,
                    max_tokens=options.generation.n_predict,
                    params=params,
                    stop=options.generation.stop,
                    ignore_eos=options.generation.ignore_eos,
                    on_progress=show,
                )
                interrupt.renew()
                first = next(pieces, None)
            answer.streamed_before = session.stats.streamed_bytes
            for piece in chain([] if first is None else [first], pieces):
                digest.update(np.ascontiguousarray(piece.logits, dtype="<f4").tobytes())
                answer.tokens.append(piece.token)
                _emit(piece, answer, as_json=options.output.json)
            answer.stop_reason = session.stop_reason
            _finish(options, session, answer, digest.hexdigest())
    return INTERRUPTED if answer.stop_reason == _CANCELLED else 0


def _encode(model: Model, prompt: str, options: GenerateOptions) -> list[int]:
    if options.prompt.raw:
        return model.tokenizer.encode(prompt, bos=True)
    system = options.prompt.system
    messages = [{"role": "system", "content": system}] if system is not None else []
    return model.encode_chat(
        [*messages, {"role": "user", "content": prompt}], template=read_template(model, options.prompt)
    )


def _emit(piece: Piece, answer: _Answer, *, as_json: bool) -> None:
    answer.texts.append(piece.text)
    if piece.text and not as_json:
        sys.stdout.write(piece.text)
        sys.stdout.flush()


def _finish(options: GenerateOptions, session: Session, answer: _Answer, digest: str) -> None:
    stats = session.stats
    if options.output.json:
        result = {
            "model": options.model.model,
            "seed": session.seed,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "text": "".join(answer.texts),
            "stop_reason": answer.stop_reason,
            "logits_sha256": digest,
            "stats": stats.as_dict(),
        }
        print(json.dumps(result), flush=True)
    else:
        print(flush=True)
    if is_shown(options.output.progress) or not (options.output.json or options.output.progress is False):
        per_token = answer.per_token(stats.streamed_bytes)
        note(summary(options.model.model, session.seed, answer.stop_reason, len(answer.tokens), per_token, stats))
    if options.output.stats:
        console(sys.stderr).print(stats_table(stats))
