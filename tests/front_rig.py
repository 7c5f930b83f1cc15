"""The sampling front by itself: a tape that gathers rows which a pass brings, and finds the best of them.

Holds: ``FrontRig``, ``seal_front``, ``slow_front``.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.arena import Arena
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.device import Device, Isa
from pykvstream.core.tape import Binding, CancelFlag, Op, OpCode, RowKind, Tape, TensorKind
from pykvstream.runtime.opening import provide
from pykvstream.sampling import front_words

Rows = NDArray[np.float32]
Words = NDArray[np.uint32]
CHUNK, LANES, NONE = 8192, 256, 0xFFFFFFFF


def seal_front(device: Device, n_cols: int = 100, n_tokens: int = 100, n_best: int = 4) -> None:
    """Seal a tape with a front and nothing else."""
    with Tape(device, 8, 8) as tape:
        record_front(tape, n_cols, n_tokens, n_best)
        tape.seal()


def record_front(tape: Tape, n_cols: int, n_tokens: int, n_best: int, *, keeps_rows: bool = False) -> None:
    """Rows that a pass brings, gathered, and the best of them. ``keeps_rows``: the gathered ones are an output too."""
    given = tape.add_tensor(n_cols, kind=TensorKind.INPUT)
    rows = tape.add_tensor(n_cols, kind=TensorKind.OUTPUT if keeps_rows else TensorKind.WORK, rows=RowKind.OUT)
    words = tape.add_tensor(front_words(n_best), kind=TensorKind.OUTPUT, rows=RowKind.OUT)
    tape.add_op(Op(OpCode.GATHER, (given,), (rows,)))
    tape.add_op(Op(OpCode.FRONT, (rows,), (words,), u=(n_best, n_tokens)))


class FrontRig:
    """``n_tokens`` of ``n_cols`` columns, the ``n_best`` best.

    ``device``: another one than the CPU, which the rig closes. ``keeps_rows``: the first output is rows, for ``out``
    of ``run``.
    """

    def __init__(
        self,
        n_cols: int,
        n_tokens: int,
        n_best: int,
        *,
        max_rows: int = 8,
        threads: int = 1,
        isa: Isa = Isa.BEST,
        device: Device | None = None,
        keeps_rows: bool = False,
    ) -> None:
        self.n_words = front_words(n_best)
        self._keeps_rows = keeps_rows
        with ExitStack() as stack:
            device = stack.enter_context(Device(threads, isa=isa) if device is None else device)
            tape = stack.enter_context(Tape(device, max_rows, max_rows))
            record_front(tape, n_cols, n_tokens, n_best, keeps_rows=keeps_rows)
            workspace = max(tape.seal().workspace_bytes, 64)
            if isinstance(device, CudaDevice):
                provide(device)
            arena = stack.enter_context(Arena(device, -(-workspace // 64) * 64 + 4096))
            arena.begin()
            arena.reserve(1, workspace)
            arena.commit()
            lease = stack.enter_context(arena.acquire(1))
            self.binding = stack.enter_context(Binding(device, tape, arena, lease, None))
            self._handles = stack.pop_all()

    def run(self, rows: Rows, *, has_front: bool = True, out: Rows | None = None) -> Words:
        n = np.arange(len(rows), dtype=np.uint32)
        words = np.full((len(rows), self.n_words), 0xABABABAB, np.uint32)
        given = (np.ascontiguousarray(rows),)
        outputs = (out, words.view(np.float32)) if self._keeps_rows else (words.view(np.float32),)
        self.binding.run(n, n, outputs, CancelFlag(), inputs=given, has_front=has_front)
        return words

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.close()


def slow_front(row: Rows, n_tokens: int, n_best: int) -> tuple[list[int], list[float], int | None, float]:
    """Ids, logits, the first column that is no logit, and the logarithm of the sum, in one sort and float64."""
    bad = next((i for i, x in enumerate(row.tolist()) if not x < math.inf), None)
    if bad is not None:
        return [], [], bad, 0.0
    tokens = row[:n_tokens].astype(np.float64)
    ids = sorted(np.flatnonzero(tokens > -math.inf).tolist(), key=lambda i: (-tokens[i], i))[:n_best]
    if not ids:
        return [], [], None, 0.0
    peak = tokens.max()
    return ids, [float(row[i]) for i in ids], None, float(peak + math.log(math.fsum(np.exp(tokens - peak).tolist())))
