"""How fast the attention kernels read their pages, as printed figures; nothing is judged here but the bits.

Shapes: the 27B's layer, 4 KV heads of 256 with 6 query heads each, Q8_0 K and Q4_0 V. All pages hold the same tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.attend_case import GROUP, PAGE, Case, Layer, Run, T, launches, same_bits
from tests.gpu.kernel_engine import CudaEngine

LAYER = Layer(T.Q8_0, T.Q4_0, 256, 256, 4, 6)
SLOTS = 64


@pytest.fixture(scope="module")
def device() -> CudaEngine:
    return CudaEngine()


def repeated(engine: CudaEngine, n_tokens: int, n_rows: int) -> Case:
    rng = np.random.default_rng(5)
    k = rng.standard_normal((PAGE, 4, 256)).astype(np.float32)
    v = rng.standard_normal((PAGE, 4, 256)).astype(np.float32)
    record = np.zeros(LAYER.record_bytes, np.uint8)
    LAYER.write(record, 0, k, v)
    n_pages = -(-n_tokens // PAGE)
    base = engine.upload(np.tile(record, n_pages))
    table = engine.upload(base + LAYER.record_bytes * np.arange(n_pages, dtype=np.uint64))
    q = rng.standard_normal((n_rows, 24, 256)).astype(np.float32)
    whole = (n_pages * PAGE, 4, 256)
    return Case(engine, LAYER, q, np.broadcast_to(k[:1], whole), np.broadcast_to(v[:1], whole), table, 0.0625)


def runs_of(n_pages: int, is_grouped: bool) -> list[Run]:
    step = SLOTS * GROUP if is_grouped else SLOTS
    return [Run(at, min(at + step, n_pages), is_grouped) for at in range(0, n_pages, step)]


@pytest.mark.parametrize("n_rows", [1, 2, 6, 8, 64])
@pytest.mark.parametrize("n_tokens", [2048, 8192, 32768, 131072])
def test_both_cuts_give_the_same_bits_at_their_own_speed(
    device: CudaEngine, capsys: pytest.CaptureFixture[str], n_tokens: int, n_rows: int
) -> None:
    case = repeated(device, n_tokens, n_rows)
    results = []
    for is_grouped in (False, True):
        made = launches(case, runs_of(case.n_pages, is_grouped))
        seconds = device.seconds(made.run, 3)
        results.append(made.result())
        rate = case.n_pages * LAYER.record_bytes / seconds / 1e9
        kind = "groups" if is_grouped else "pages"
        with capsys.disabled():
            print(f"\n{n_tokens:7d} tokens {n_rows:3d} rows in {kind:6s}: {seconds * 1e6:9.1f} us, {rate:7.1f} GB/s")
    device.release()
    assert same_bits(*results)
