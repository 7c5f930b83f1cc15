"""Byte-mutation fuzzer of the GGUF reader: ``python fuzz/gguf_bytes.py --seconds N --seed S``.

Mutates small valid files (bit flips, interesting integers, splices, moves, truncations), opens each and
touches every metadata value and tensor. Anything but success or a ``KvStreamError``, a run of more than ten
seconds, a descriptor left open, or memory that grows by 64 MiB ends it with status 1; the file at fault is
written to the working directory.
Holds: ``mutate``, ``exercise``, ``run``.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import random
import resource
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pykvstream.errors import KvStreamError
from pykvstream.gguf import DECODABLE, GgmlType, GgufFile, GgufWriter, ValueType

SLOWEST_RUN_S = 10.0
MEMORY_BYTES = 64 << 20
INTERESTING = (0, 1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 127, 128, 255, 256, 65535, 65536)
HUGE = tuple(edge + step for edge in (1 << 31, 1 << 32, 1 << 62, 1 << 63) for step in (-1, 0, 1))


@dataclass(slots=True)
class Tally:
    """What became of the runs."""

    opened: int = 0
    refused: int = 0

    @property
    def runs(self) -> int:
        return self.opened + self.refused


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


def mutate(rng: random.Random, files: list[bytes]) -> bytes:
    """Return one of ``files`` with one to four changes."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        choice = rng.randrange(6)
        if choice == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            del data[at:]
        elif choice == 2:
            other = rng.choice(files)
            begin = rng.randrange(len(other))
            data[at:] = other[begin:]
        elif choice == 3:
            del data[at : at + rng.randrange(1, 16)]
        elif choice == 4:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            _overwrite(rng, data, at)
    return bytes(data)


def _overwrite(rng: random.Random, data: bytearray, at: int) -> None:
    size = rng.choice((1, 2, 4, 4, 8, 8, 8))
    value = rng.choice(INTERESTING + HUGE + (len(data), len(data) - at, rng.randrange(1 << 64)))
    data[at : at + size] = struct.pack("<Q", (-value if rng.random() < 0.2 else value) & (1 << 64) - 1)[:size]


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


def run(seconds: float, seed: int) -> tuple[Tally, str | None]:
    """Fuzz for ``seconds``; return the tally and what went wrong, if anything."""
    rng, files, tally = random.Random(seed), seeds(), Tally()
    before_bytes, before_open = _resident_peak_bytes(), _open_descriptors()
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            path = Path(folder) / rng.choice(("m.gguf", "m-00001-of-00001.gguf"))
            data = mutate(rng, files)
            path.write_bytes(data)
            begin = time.monotonic()
            try:
                exercise(path)
                tally.opened += 1
            except KvStreamError:
                tally.refused += 1
            except Exception as error:  # Whatever else the reader raises is the finding.
                return tally, f"{error!r}; the file is {_keep(data, seed, tally.runs)}"
            if time.monotonic() - begin > SLOWEST_RUN_S:
                return tally, f"slower than {SLOWEST_RUN_S} s; the file is {_keep(data, seed, tally.runs)}"
    gc.collect()
    grown, left = _resident_peak_bytes() - before_bytes, _open_descriptors() - before_open
    if grown > MEMORY_BYTES:
        return tally, f"resident memory grew by {grown} bytes, at most {MEMORY_BYTES}"
    return tally, f"{left} descriptors are still open" if left > 0 else None


def _keep(data: bytes, seed: int, number: int) -> Path:
    path = Path(f"gguf-failure-{seed}-{number}.gguf")
    path.write_bytes(data)
    return path


def _resident_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Byte-mutation fuzzer of the GGUF reader.")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to run")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same files")
    options = parser.parse_args()
    begin = time.monotonic()
    tally, failure = run(options.seconds, options.seed)
    rate = tally.runs / max(time.monotonic() - begin, 1e-9)
    verdict = "ok" if failure is None else f"FAILED: {failure}"
    print(
        f"gguf_bytes: {tally.runs} runs, {rate:.0f} runs/s, {tally.opened} opened, {tally.refused} refused, "
        f"seed {options.seed}: {verdict}"
    )
    return failure is not None


if __name__ == "__main__":
    sys.exit(main())
