"""Perplexity beside llama.cpp: the same model, the same chunks, the same KV types, both counted by the same rule.

    python tests/bench/compare_perplexity.py --llama-python /path/to/venv/bin/python [--chunks 16] [--ctx 512]

The other interpreter has ``llama-cpp-python``; only its tokenizer and its low-level decode, with logits for every
token of a chunk, are called. ``opticks.txt`` is the beginning of Isaac Newton's Opticks (fourth edition of 1730), in
the public domain. Both sides encode the text themselves; the token ids are compared first.
Source: llama.cpp, tools/perplexity/perplexity.cpp: chunks without overlap, predictions behind the middle of each.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEXT = Path(__file__).with_name("opticks.txt")
LARGEST_DIFFERENCE = 0.005
MOST_CHUNKS = 64


def llama_scores(model_path: str, text: str, ctx: int, n_chunks: int, threads: int) -> dict[str, Any]:
    """Token ids, and sum and number of -log p, by llama.cpp. Runs in the other interpreter."""
    import llama_cpp as L  # type: ignore[import-not-found]
    import numpy as np

    L.llama_backend_init()
    model = L.llama_model_load_from_file(model_path.encode(), L.llama_model_default_params())
    vocab = L.llama_model_get_vocab(model)
    n_vocab = L.llama_vocab_n_tokens(vocab)
    raw = text.encode()
    found = (L.llama_token * (len(raw) + 8))()
    n_tokens = L.llama_tokenize(vocab, raw, len(raw), found, len(found), True, False)
    ids = list(found[:n_tokens])
    params = L.llama_context_default_params()
    params.n_ctx = params.n_batch = ctx
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = 0  # f32: what is compared is the model, not the cache
    context = L.llama_init_from_model(model, params)
    total, n = 0.0, 0
    for begin in range(0, n_chunks * ctx, ctx):
        chunk = ids[begin : begin + ctx]
        if L.llama_vocab_get_add_bos(vocab):
            chunk[0] = L.llama_vocab_bos(vocab)
        L.llama_memory_clear(L.llama_get_memory(context), True)
        batch = L.llama_batch_init(ctx, 0, 1)
        batch.n_tokens = ctx
        for i, token in enumerate(chunk):
            batch.token[i], batch.pos[i] = token, i
            batch.seq_id[i][0], batch.n_seq_id[i], batch.logits[i] = 0, 1, 1
        if L.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        for i in range(ctx // 2, ctx - 1):
            row = np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (n_vocab,)).astype(np.float64)
            largest = row.max()
            total += float(np.log(np.exp(row - largest).sum()) + largest - row[chunk[i + 1]])
            n += 1
        L.llama_batch_free(batch)
    return {"version": L.__version__, "ids": ids, "nll": total, "n": n}


def own_result(model: str, text_file: Path, ctx: int, n_chunks: int, threads: int) -> dict[str, Any]:
    """What ``pykvstream eval ppl`` says."""
    command = [sys.executable, "-m", "pykvstream", "eval", "ppl", model, "--text", str(text_file), "-c", str(ctx),
               "--chunks", str(n_chunks), "-t", str(threads), "-ctk", "f32", "-ctv", "f32", "--json"]  # fmt: skip
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def compare(options: argparse.Namespace) -> int:
    from pykvstream import Model
    from pykvstream.locate import find_model

    path = str(find_model(options.model))
    text = options.text.read_text(encoding="utf-8")
    with Model.open(path, ctx_size=options.ctx, threads=1) as model:
        ids = model.tokenizer.encode(text, bos=True)
    own = own_result(options.model, options.text, options.ctx, options.chunks, options.threads)["summary"]
    command = [options.llama_python, __file__, "--worker", "--model", path, "--text", str(options.text)]
    command += ["--ctx", str(options.ctx), "--chunks", str(options.chunks), "--threads", str(options.threads)]
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=1200, check=False)
        if done.returncode != 0:
            log.seek(0)
            raise SystemExit(f"llama.cpp failed:\n{log.read()[-2000:]}")
    other = json.loads(done.stdout.splitlines()[-1])
    n = options.chunks * options.ctx
    if ids[:n] != other["ids"][:n] or own["tokens"] != other["n"]:
        raise SystemExit("the two sides do not have the same tokens")
    theirs = math.exp(other["nll"] / other["n"])
    difference = own["ppl"] / theirs - 1
    what = f"{options.chunks} chunks of {options.ctx}, {own['tokens']} predictions"
    print(f"{options.model}, {options.text.name}, {what}")
    print(f"pykvstream                 PPL {own['ppl']:.5f} +/- {own['error']:.5f}")
    print(f"llama-cpp-python {other['version']:9} PPL {theirs:.5f}")
    print(f"difference {100 * difference:+.4f} %, allowed {100 * LARGEST_DIFFERENCE:.1f} %")
    return 0 if abs(difference) <= LARGEST_DIFFERENCE else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if not 1 <= options.chunks <= MOST_CHUNKS:
        parser.error(f"--chunks from 1 to {MOST_CHUNKS}")
    if options.worker:
        text = options.text.read_text(encoding="utf-8")
        print(json.dumps(llama_scores(options.model, text, options.ctx, options.chunks, options.threads)))
        return 0
    if not options.llama_python:
        parser.error("--llama-python is needed")
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
