"""A conversation whose history does not fit its arena: ``python examples/quickstart.py [MODEL.gguf]``."""

from __future__ import annotations

import sys
from pathlib import Path

from pykvstream import Model


def main(model_path: str = "demo") -> None:
    text = Path("tools/demo_text.txt").read_text(encoding="utf-8")
    with Model.open(model_path, arena_mib=9.5, ctx_size=4096, ubatch_size=64) as model, model.session() as session:
        for question in (f"{text}\nWhat is this text about?", "Say it in one sentence."):
            for piece in session.chat(question, max_tokens=40):
                print(piece.text, end="", flush=True)
            print()
        stats = session.stats
        print(f"{stats.history_bytes} bytes of history, an arena of {stats.arena_bytes} bytes,")
        print(f"{stats.streamed_bytes} bytes streamed, {stats.decode_tokens_per_s:.1f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
