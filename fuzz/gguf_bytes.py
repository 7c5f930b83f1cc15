"""Byte-mutation fuzzer of the GGUF reader: ``python fuzz/gguf_bytes.py --seconds N --seed S``.

Mutates small valid files (bit flips, interesting integers, splices, moves, truncations), opens each and touches every
metadata value and tensor. ``mutation.py`` says what a failure is.
Holds: ``seeds``, ``exercise``, ``fuzz``.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import numpy as np
from mutation import Tally, main, mutate, run

from pykvstream.gguf import DECODABLE, GgmlType, GgufFile, GgufWriter, ValueType


def seeds() -> list[bytes]:
    """Valid files that together have every value type and every tensor type."""
    keys = GgufWriter(alignment=8)
    for kind in ValueType:
        if kind not in (ValueType.STRING, ValueType.ARRAY):
            value = True if kind is ValueType.BOOL else 1.0 if kind.is_float else 1
            keys.add(f"one {kind.name}", value, kind)
            keys.add_array(f"some {kind.name}", [value] * 3, kind)
    keys.add("text", "some text")
    keys.add_array("words", ["one", "", "drei \N{SNOWMAN}"], ValueType.STRING)
    tensors = GgufWriter()
    for dtype in GgmlType:
        tensors.add_tensor(dtype.name, bytes(dtype.block_bytes * 2), dtype, (dtype.block_values, 2))
    shard = GgufWriter()
    shard.add("split.no", 0, ValueType.UINT16)
    shard.add("split.count", 1, ValueType.UINT16)
    shard.add("split.tensors.count", 1, ValueType.INT32)
    shard.add_tensor("t", np.ones((2, 3, 4), np.float32))
    return [_image(writer) for writer in (keys, tensors, shard, GgufWriter())]


def _image(writer: GgufWriter) -> bytes:
    stream = io.BytesIO()
    writer.write(stream)
    return stream.getvalue()


def exercise(path: Path) -> None:
    """Open a file and look at all that it declares."""
    with GgufFile.open(path) as file:
        for key in file.metadata:
            value = file.metadata[key]
            if isinstance(value, np.ndarray):
                value.tolist()
            elif not isinstance(value, (int, float, str)):
                list(value)
        for name, info in file.tensors.items():
            file.tensor_data(name).max(initial=0)
            if info.type in DECODABLE:
                file.tensor_array(name)


def fuzz(seconds: float, seed: int) -> tuple[Tally, str | None]:
    """One file alone and one that says it is a shard."""
    files = seeds()

    def make(rng: random.Random) -> tuple[str, bytes]:
        return rng.choice(("m.gguf", "m-00001-of-00001.gguf")), mutate(rng, files)

    return run("gguf", make, exercise, seconds, seed)


if __name__ == "__main__":
    sys.exit(main("gguf_bytes", "the GGUF reader", fuzz))
