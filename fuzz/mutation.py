"""What the byte-mutation fuzzers share: changes to valid files, and the loop that judges what a reader makes of them.

A reader has failed that raises anything but a ``KvStreamError``, takes more than ten seconds for one file, leaves a
descriptor open or grows by 64 MiB; the file at fault is written to the working directory.
Holds: ``mutate``, ``Tally``, ``run``, ``main``.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pykvstream.errors import KvStreamError

SLOWEST_RUN_S = 10.0
MEMORY_BYTES = 64 << 20
INTERESTING = (0, 1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 127, 128, 255, 256, 65535, 65536)
HUGE = tuple(edge + step for edge in (1 << 31, 1 << 32, 1 << 62, 1 << 63) for step in (-1, 0, 1))

Make = Callable[[random.Random], tuple[str, bytes]]
"""Name and bytes of the next file."""


@dataclass(slots=True)
class Tally:
    """What became of the runs."""

    opened: int = 0
    refused: int = 0

    @property
    def runs(self) -> int:
        return self.opened + self.refused


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
            begin = rng.randrange(len(other) + 1)
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


def run(name: str, make: Make, read: Callable[[Path], None], seconds: float, seed: int) -> tuple[Tally, str | None]:
    """Let ``read`` meet new files for ``seconds``; return the tally and what went wrong, if anything."""
    rng, tally = random.Random(seed), Tally()
    before_bytes, before_open = _resident_peak_bytes(), _open_descriptors()
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            file_name, data = make(rng)
            path = Path(folder) / file_name
            path.write_bytes(data)
            begin = time.monotonic()
            try:
                read(path)
                tally.opened += 1
            except KvStreamError:
                tally.refused += 1
            except Exception as error:  # Whatever else a reader raises is the finding.
                return tally, f"{error!r}; the file is {_keep(name, data, seed, tally.runs)}"
            if time.monotonic() - begin > SLOWEST_RUN_S:
                return tally, f"slower than {SLOWEST_RUN_S} s; the file is {_keep(name, data, seed, tally.runs)}"
    gc.collect()
    grown, left = _resident_peak_bytes() - before_bytes, _open_descriptors() - before_open
    if grown > MEMORY_BYTES:
        return tally, f"resident memory grew by {grown} bytes, at most {MEMORY_BYTES}"
    return tally, f"{left} descriptors are still open" if left > 0 else None


def _keep(name: str, data: bytes, seed: int, number: int) -> Path:
    path = Path(f"{name}-failure-{seed}-{number}")
    path.write_bytes(data)
    return path


def _resident_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main(name: str, what: str, fuzz: Callable[[float, int], tuple[Tally, str | None]]) -> int:
    """Run from the command line; the exit status says whether something was found."""
    parser = argparse.ArgumentParser(description=f"Byte-mutation fuzzer of {what}.")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to run")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same files")
    options = parser.parse_args()
    begin = time.monotonic()
    tally, failure = fuzz(options.seconds, options.seed)
    rate = tally.runs / max(time.monotonic() - begin, 1e-9)
    verdict = "ok" if failure is None else f"FAILED: {failure}"
    print(
        f"{name}: {tally.runs} runs, {rate:.0f} runs/s, {tally.opened} opened, {tally.refused} refused, "
        f"seed {options.seed}: {verdict}"
    )
    return failure is not None
