"""Byte-mutation fuzzer of what a session leaves on disk: ``python fuzz/saved_bytes.py --seconds N --seed S``.

Saved sessions of the demo hybrid, and n-gram counts. A session file is changed as it lies, or inside its sections with
every digest made right again: the damage that no digest shows. What loads must be whole and able to go on; what is
refused must leave a conversation that lives beside it the logits it had. ``mutation.py`` says what else a failure is.
Holds: ``Saved``, ``reseal``, ``fuzz``.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
from mutation import Tally, main, mutate, run

from pykvstream import Model
from pykvstream.errors import KvStreamError
from pykvstream.runtime.ngram_file import load_ngram_counts
from pykvstream.speculation import NgramCounts

HEAD = struct.Struct("<8sIIQ")
ENTRY = struct.Struct("<16sQQ16s")
CTX = 700
PROMPT = 300


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def parts_of(data: bytes) -> list[tuple[bytes, bytes]]:
    """Name and bytes of each section of a valid file."""
    n = HEAD.unpack_from(data)[2]
    entries = [ENTRY.unpack_from(data, HEAD.size + i * ENTRY.size) for i in range(n)]
    return [(name, data[at : at + n_bytes]) for name, at, n_bytes, _ in entries]


def reseal(data: bytes, parts: list[tuple[bytes, bytes]]) -> bytes:
    """The file with these sections, and every length and digest as it must be then."""
    magic, version, _, _ = HEAD.unpack_from(data)
    at = HEAD.size + len(parts) * ENTRY.size + 16
    table = b""
    for name, part in parts:
        table += ENTRY.pack(name, at, len(part), digest(part))
        at += len(part)
    head = HEAD.pack(magic, version, len(parts), at) + table
    return head + digest(head) + b"".join(part for _, part in parts)


class Saved:
    """A model with one conversation that nothing may touch, and valid files to change."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model = model
        self.witness = model.session(seed=1)
        self.witness.forward([5, 6, 7])
        self.expected = self._next_logits()
        self.sessions = []
        for i, n in enumerate((1, PROMPT)):
            with closing(model.session(seed=i)) as session:
                session.forward(np.arange(n, dtype=np.uint32) % 97, logits="none")
                session.save(folder / "s")
                self.sessions.append((folder / "s").read_bytes())
        counts = NgramCounts()
        for i in range(60):
            counts.add((i % 7, i % 5), i % 3)
        self.counts = [counts.to_bytes(), NgramCounts().to_bytes()]

    def _next_logits(self) -> bytes:
        found = self.witness.forward([8], logits="all").tobytes()
        self.witness.truncate(3)
        return found

    def _live(self) -> int:
        return sum(part.device.info.live_objects for part in self.model._target.parts)

    def make(self, rng: random.Random) -> tuple[str, bytes]:
        choice = rng.randrange(4)
        if choice == 0:
            return "counts", mutate(rng, self.counts)
        if choice == 1:
            return "session", mutate(rng, self.sessions)
        whole = rng.choice(self.sessions)
        parts = parts_of(whole)
        i = rng.randrange(len(parts))
        parts[i] = (parts[i][0], mutate(rng, [part for _, part in parts_of(rng.choice(self.sessions))][i : i + 1]))
        return "session", reseal(whole, parts)

    def read(self, path: Path) -> None:
        if path.name == "counts":
            counts = load_ngram_counts(path)
            if NgramCounts.from_bytes(counts.to_bytes(), "again").to_bytes() != counts.to_bytes():
                raise AssertionError("counts do not survive being written and read")
            return
        before = self._live()
        try:
            with closing(self.model.load_session(path)) as session:
                self.model.check_integrity()
                if len(session.tokens) < session.ctx_size:
                    session.forward([1, 2])
        except KvStreamError:
            self._check(before)
            raise
        self._check(before)

    def _check(self, before: int) -> None:
        self.model.check_integrity()
        if self._live() != before:
            raise AssertionError(f"{self._live()} objects live, not {before}")
        if self._next_logits() != self.expected:
            raise AssertionError("another conversation changed")


def fuzz(seconds: float, seed: int) -> tuple[Tally, str | None]:
    """Change, load, and look at what lives beside it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Model.open("demo-hybrid", ctx_size=CTX, threads=1)) as model,
    ):
        saved = Saved(model, Path(folder))
        return run("saved", saved.make, saved.read, seconds, seed)


if __name__ == "__main__":
    sys.exit(main("saved_bytes", "saved sessions and n-gram counts", fuzz))
