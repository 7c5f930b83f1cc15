"""Speed beside llama.cpp, on the same machine in the same run: the demo model, the same KV types, the same threads.

    python tests/bench/compare_llama.py --llama-python /path/to/venv/bin/python [--pairs 5] [--threads 2]

The other interpreter has ``llama-cpp-python`` (``pip install llama-cpp-python``); only its low-level decode is
called. Both sides run as fresh processes in turn, A B A B, so that a drifting machine drifts for both; medians and
ratios are printed.
Units: tokens per second. Decode: 48 single tokens behind 128. Prompt: 512 tokens at once. Wide: one pass of
64 rows with all logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, BEHIND, DECODE, WIDE = 512, 128, 48, 64
REPEATS = 3


def token_ids() -> list[int]:
    """The same arbitrary tokens on both sides."""
    state, ids = 12345, []
    for _ in range(1024):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(100 + state % 40000)
    return ids


Run = Callable[[list[int], bool], None]


def measure(reset: Callable[[], None], prompt: Run, step: Run) -> dict[str, float]:
    """Best of a few repeats inside one process; ``run(tokens, all_logits)`` appends tokens."""
    ids = token_ids()
    best = {"decode": 0.0, "prompt": 0.0, "wide": 0.0}
    for _ in range(REPEATS):
        reset()
        started = time.perf_counter()
        prompt(ids[:PROMPT], False)
        best["prompt"] = max(best["prompt"], PROMPT / (time.perf_counter() - started))
        reset()
        prompt(ids[:BEHIND], False)
        step(ids[BEHIND : BEHIND + 1], False)
        started = time.perf_counter()
        for i in range(DECODE):
            step(ids[BEHIND + 1 + i : BEHIND + 2 + i], False)
        best["decode"] = max(best["decode"], DECODE / (time.perf_counter() - started))
        started = time.perf_counter()
        step(ids[:WIDE], True)
        best["wide"] = max(best["wide"], WIDE / (time.perf_counter() - started))
    return best


def run_ours(model_path: str, threads: int) -> dict[str, float]:
    from pykvstream import Model, Phase

    with Model.open(model_path, ctx_size=2048, ubatch_size=PROMPT, threads=threads, cache_type_k="q8_0",
                    cache_type_v="q8_0") as model, model.session() as session:  # fmt: skip
        return measure(
            lambda: session.truncate(0),
            lambda ids, all_logits: void(session.forward(ids, logits="all" if all_logits else "last")),
            lambda ids, all_logits: void(
                session.forward(ids, logits="all" if all_logits else "last", phase=Phase.DECODE)
            ),
        )


def void(_: object) -> None:
    return None


def run_llama(model_path: str, threads: int) -> dict[str, float]:
    import llama_cpp as L  # type: ignore[import-not-found]

    L.llama_backend_init()
    model = L.llama_model_load_from_file(model_path.encode(), L.llama_model_default_params())
    params = L.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 2048, PROMPT, PROMPT
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = 8  # q8_0
    params.flash_attn_type = 1
    context = L.llama_init_from_model(model, params)
    print(f"llama-cpp-python {L.__version__}: {L.llama_print_system_info().decode().strip()}", file=sys.stderr)
    position = 0

    def reset() -> None:
        nonlocal position
        L.llama_memory_clear(L.llama_get_memory(context), True)
        position = 0

    def run(ids: list[int], all_logits: bool) -> None:
        nonlocal position
        batch = L.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, position + i
            batch.seq_id[i][0], batch.n_seq_id[i] = 0, 1
            batch.logits[i] = 1 if all_logits or i == len(ids) - 1 else 0
        if L.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        L.llama_get_logits_ith(context, len(ids) - 1)
        L.llama_batch_free(batch)
        position += len(ids)

    return measure(reset, run, run)


def one(interpreter: str, side: str, model_path: str, threads: int) -> dict[str, float]:
    command = [interpreter, str(Path(__file__)), "--worker", side, "--model", model_path, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stderr[-2000:]}")
    for line in done.stderr.splitlines():
        if line.startswith("llama-cpp-python") and not one.__dict__.setdefault("said", False):
            one.__dict__["said"] = True
            print(line)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="")
    parser.add_argument("--worker", choices=("ours", "llama"))
    options = parser.parse_args()
    if options.worker:
        work = run_ours if options.worker == "ours" else run_llama
        print(json.dumps(work(options.model, options.threads)))
        return 0
    if not options.llama_python:
        parser.error("--llama-python is needed")
    from pykvstream.locate import find_model

    path = str(options.model or find_model("demo"))
    rows: list[tuple[dict[str, float], dict[str, float]]] = []
    for pair in range(options.pairs):
        ours = one(sys.executable, "ours", path, options.threads)
        llama = one(options.llama_python, "llama", path, options.threads)
        rows.append((ours, llama))
        print(f"pair {pair + 1}: " + "  ".join(f"{k} {ours[k]:.1f}/{llama[k]:.1f}" for k in ours), flush=True)
    print(f"{'':8}{'ours':>10}{'llama.cpp':>12}{'ratio':>8}   (medians of {len(rows)} pairs, tokens/s)")
    for key in rows[0][0]:
        a, b = statistics.median(r[0][key] for r in rows), statistics.median(r[1][key] for r in rows)
        ratio = statistics.median(r[0][key] / r[1][key] for r in rows)
        print(f"{key:8}{a:10.1f}{b:12.1f}{ratio:8.2f}")
    wide = statistics.median(r[0]["wide"] / r[0]["decode"] for r in rows)
    print(f"64-row pass against single rows, ours: {wide:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
