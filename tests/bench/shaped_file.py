"""Random files in the shapes of known models, for machines where the models are not.

    python -m tests.bench.shaped_file small|27b FILE

``small``: SmolLM2-135M, Q8_0. ``27b``: a hybrid of 64 layers, IQ4_XS, with a head of Q6_K, 15.4 GB. A file that is
there is left alone; one that is not appears whole. Holds: ``main``, ``SHAPES``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pykvstream.gguf import TYPES_BY_ID
from tests.bench.cuda_decode import write as write_wide
from tests.models import write_random_model

Q8_0 = next(kind for kind in TYPES_BY_ID.values() if kind.name == "Q8_0")


def write_small(path: Path) -> None:
    write_random_model(
        path, n_layers=30, n_embd=576, n_heads=9, n_kv_heads=3, n_ff=1536, n_vocab=49152, ctx=131072,
        weight_type=Q8_0, tied=True,
    )  # fmt: skip


SHAPES: dict[str, Callable[[Path], None]] = {
    "small": write_small,
    "27b": lambda path: write_wide(path, 64, "IQ4_XS", "Q6_K"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="random files in the shapes of known models")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(argv)
    begin = time.perf_counter()
    if not options.file.exists():
        part = options.file.with_suffix(".part")
        SHAPES[options.shape](part)
        part.rename(options.file)
    size = options.file.stat().st_size / 1e9
    print(f"{options.shape}: {size:.2f} GB, {time.perf_counter() - begin:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
