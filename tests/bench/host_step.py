"""What a decode step costs on the host, apart from the pass itself.

    python -m tests.bench.host_step [--layers 8] [--vocab 512] [--steps 400] [--top 12] [--driver cpu|stand-in]

A hybrid so small that computing is next to nothing decodes one row a pass: by ``Session.forward``, whose caller takes
the largest logit, and by ``Session.generate``, which chooses greedily out of the sampling front and hands out pieces.
``outside`` is a step without the C calls that run its pass; time of the processor is that of the calling thread.
With ``stand-in`` the device is the library that stands in for a card's driver; its kernels do nothing, so it shows
what is no driver's: the library's own work around each call.
Times come from runs that differ: plain, with every call into C timed, with calls of Python counted, and by cProfile.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pykvstream._ffi as native

RUNNING = ("kvs_binding_run", "kvs_binding_begin", "kvs_binding_end")
"""Calls in which a pass is computed."""
Step = Callable[[], None]


class TimedLib:
    """The library; calls are timed while ``is_on``. To be put in place before anything imports it."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.ns: dict[str, list[int]] = {}
        self.is_on = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lib, name)
        if not callable(found):
            self.__dict__[name] = found
            return found
        if not self.is_on:
            return found  # a destructor must be C's own, and those are looked up while nothing is timed

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return found(*arguments)
            finally:
                self.ns.setdefault(name, []).append(time.perf_counter_ns() - begin)

        return timed


LIB = TimedLib(native.lib)


def spent_us(step: Step, n_steps: int) -> list[float]:
    """Microseconds of each step."""
    spent = []
    for _ in range(n_steps):
        begin = time.perf_counter_ns()
        step()
        spent.append((time.perf_counter_ns() - begin) / 1e3)
    return spent


def python_calls(step: Step, n_steps: int) -> float:
    """Calls of Python functions in a step."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    for _ in range(n_steps):
        step()
    sys.setprofile(None)
    return counted / n_steps - 1


def largest(step: Step, n_steps: int, n_lines: int) -> list[str]:
    """Where the profiler saw most time, by function."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(n_steps):
        step()
    profile.disable()
    rows = sorted(pstats.Stats(profile).stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
    lines = []
    for (path, line, name), (_, n_calls, own, whole, _) in rows[:n_lines]:
        where = f"{Path(path).stem}:{line} " if line else ""
        lines.append(
            f"    {own / n_steps * 1e6:7.1f} us, {whole / n_steps * 1e6:7.1f} with callees,"
            f" {n_calls / n_steps:5.1f} calls  {where}{name}"
        )
    return lines


def measure(name: str, step: Step, n_steps: int, n_lines: int) -> None:
    """Print what there is to say of a step."""
    spent_us(step, 40)
    gc.collect()
    begin = time.thread_time_ns()
    plain = sorted(spent_us(step, n_steps))
    own = (time.thread_time_ns() - begin) / n_steps / 1e3
    LIB.ns.clear()
    LIB.is_on = True
    timed = median(spent_us(step, n_steps))
    LIB.is_on = False
    passes = sorted(sum(ns) / 1e3 for ns in zip(*(LIB.ns[call] for call in RUNNING if call in LIB.ns), strict=True))
    n_best = max(1, n_steps // 4)
    best, inside = sum(plain[:n_best]) / n_best, sum(passes[:n_best]) / n_best
    print(f"{name}: {best:.1f} us a step (best quarter), median {median(plain):.1f}, of the processor {own:.1f}")
    print(f"  outside the pass {best - inside:.1f} us, in the median of a timed run {timed - median(passes):.1f}")
    print(f"  Python calls {python_calls(step, n_steps):.1f}")
    n_calls = sum(len(ns) for ns in LIB.ns.values()) / n_steps
    print(f"  calls into C {n_calls:.1f}, medians:")
    for call, ns in sorted(LIB.ns.items(), key=lambda item: -median(item[1]))[:n_lines]:
        print(f"    {median(ns) / 1e3:7.1f} us {len(ns) / n_steps:5.1f} {call}")
    print("  largest, by cProfile, which makes calls dearer:")
    print("\n".join(largest(step, n_steps, n_lines)))


def imitate_kernels(folder: Path) -> None:
    """Images are kernels that do nothing; what a front would have found is put in its place."""
    import numpy as np

    from pykvstream.kernels import provider
    from pykvstream.runtime import session
    from pykvstream.sampling import Front
    from tests.gpu.kernel_engine import kernels_of

    def compile_image(core: object, source: object, key: Any) -> bytes:
        library = folder / f"{abs(hash(key))}.so"
        text = "".join(
            f"unsigned int host_{name}_bytes = 1;\n"
            f"void host_{name}(const void *params, const unsigned int *grid, unsigned int n_threads)\n"
            "{ (void)params; (void)grid; (void)n_threads; }\n"
            for name in kernels_of(key.source)
        )
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
        subprocess.run(command, input=text, text=True, check=True)
        return str(library).encode() + bytes(1)

    vars(provider).update(
        load_compiler=lambda: None, compile_image=compile_image, default_folder=lambda: folder / "images"
    )
    words = np.zeros(260, np.uint32)
    words[:128] = np.arange(128)
    words[256:258] = 128, 0xFFFFFFFF
    words[258:].view(np.float64)[0] = 512.0

    class Imitated(Front):
        @classmethod
        def of(cls, given: object, position: int) -> Front:
            return Front.of(words, position)

    vars(session).update(Front=Imitated)


def bench(folder: Path, options: argparse.Namespace) -> None:
    from pykvstream.engine import Model
    from pykvstream.runtime.target import Phase
    from tests.random_hybrid import HybridShape, write_random_hybrid

    path = folder / "model.gguf"
    n_tokens = 8 * options.steps + 400
    ctx = 4096 if options.ctx is None else options.ctx
    shape = HybridShape(
        n_layers=options.layers, interval=4, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_value_heads=2, n_ff=64,
        n_rot=16, n_vocab=options.vocab, ctx=max(ctx, n_tokens),
    )  # fmt: skip
    write_random_hybrid(path, shape)
    if options.driver != "cpu":
        imitate_kernels(folder)
    device = "cpu" if options.driver == "cpu" else "cuda" + options.settings
    with Model.open(path, device=device, ctx_size=max(ctx, n_tokens), ubatch_size=64, threads=1) as model:
        with model.session() as session:
            row = session.forward(list(range(100)))

            def forward() -> None:
                nonlocal row
                row = session.forward([int(row[0].argmax())], phase=Phase.DECODE)

            measure("forward", forward, options.steps, options.top)
        with model.session() as session:
            pieces = generate(session, n_tokens - 200)

            def generate_one() -> None:
                next(pieces)

            measure("generate", generate_one, options.steps, options.top)


def generate(session: Any, n_tokens: int) -> Iterator[Any]:
    from pykvstream import SamplingParams

    greedy = SamplingParams(temperature=0.0)
    pieces: Iterator[Any] = session.generate(
        list(range(100)), max_tokens=n_tokens, params=greedy, ignore_eos=True
    )
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--ctx", type=int)
    parser.add_argument("--driver", choices=("cpu", "stand-in"), default="cpu")
    parser.add_argument("--settings", default="", help="behind the name of the stand-in's card, as ',graphs=off'")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.driver == "stand-in" and "FAKE_CUDA_KERNELS" not in os.environ:
            from tests.gpu.stand_in import Driver

            Driver.build(Path(folder))
            variables = {"LD_LIBRARY_PATH": folder, "FAKE_CUDA_KERNELS": "host", "FAKE_CUDA_ARCH": "80"}
            command = [sys.executable, "-m", "tests.bench.host_step", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=os.environ | variables, check=False).returncode)
        bench(Path(folder), options)


native.lib = LIB
if __name__ == "__main__":
    main()
