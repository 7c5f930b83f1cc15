"""How fast the attention kernels read pages, by queries of a tile, on an idle card.

    python -m tests.bench.cuda_attend

Shapes: the 27B's layer, 4 KV heads of 256 with 6 query heads each, Q8_0 K and Q4_0 V. All pages hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from tests.gpu.attend_case import GROUP, PAGE, Case, Family, Layer, Run, T, launches
from tests.gpu.kernel_engine import CudaEngine

LAYER = Layer(T.Q8_0, T.Q4_0, 256, 256, 4, 6)
SLOTS = 128
MULTIPROCESSORS = 132
FAMILIES = (
    *(Family("attend_mma", tile) for tile in (8, 16, 32, 40)),
    *(Family("attend_mma", tile, is_staged=True) for tile in (8, 40)),
)
TRIED = tuple(
    Family("attend_mma", tile, (("KVS_AHEAD", ahead), ("KVS_K_UNROLL", unroll), ("KVS_BLOCKS", blocks)))
    for tile, all_blocks in ((8, (1, 2, 3)), (16, (1, 2)), (32, (1,)), (40, (1,)))
    for ahead in (0, 1)
    for unroll in (1, 2, 4)
    for blocks in all_blocks
)


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


def runs_of(n_pages: int, n_tiles: int, sm_blocks: int) -> list[Run]:
    """As the launcher cuts that has scratch: slots of pages where groups would leave multiprocessors without work."""
    is_grouped = -(-n_pages // GROUP) * 4 * n_tiles * 4 >= 3 * sm_blocks * MULTIPROCESSORS
    step = SLOTS * GROUP if is_grouped else SLOTS
    return [Run(at, min(at + step, n_pages), is_grouped) for at in range(0, n_pages, step)]


def microseconds(device: CudaEngine, case: Case, family: Family) -> float:
    sm_blocks = 2 if family.tile == 8 and not family.is_staged else 1
    runs = runs_of(case.n_pages, -(-case.n_rows * 6 // family.tile), sm_blocks)
    made = launches(replace(case, family=family), runs)
    return device.seconds(made.run, 10) * 1e6


def compile_all(device: CudaEngine, families: Iterable[Family]) -> None:
    wanted = [family.macros(LAYER, family.tile) for family in families]
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda macros: device.compile_ahead("attend_mma", macros), wanted))


def variant_figures(device: CudaEngine) -> Iterator[str]:
    compile_all(device, TRIED)
    for n_tokens, n_rows in ((8192, 1), (131072, 1), (131072, 6), (32768, 64)):
        case = repeated(device, n_tokens, n_rows)
        yield f"{n_tokens} tokens {n_rows} rows"
        for family in TRIED:
            time = microseconds(device, case, family)
            rate = case.n_pages * LAYER.record_bytes / time / 1e3
            yield f"    tile {family.tile} {[value for _, value in family.more]}: {time:.1f} us {rate:.0f} GB/s"
        device.release()


def tile_figures(device: CudaEngine) -> Iterator[str]:
    compile_all(device, FAMILIES)
    for n_tokens in (2048, 8192, 32768, 131072):
        for n_rows in (1, 2, 6, 8, 64, 512):
            case = repeated(device, n_tokens, n_rows)
            times = [microseconds(device, case, family) for family in FAMILIES]
            rate = case.n_pages * LAYER.record_bytes / min(times) / 1e3
            names = (f"{family.tile}{' staged' * family.is_staged}" for family in FAMILIES)
            shown = ", ".join(f"{name}: {time:.1f} us" for name, time in zip(names, times, strict=True))
            yield f"{n_tokens} tokens {n_rows} rows, queries of a tile {shown}; at best {rate:.0f} GB/s"
            device.release()


def main() -> None:
    for line in tile_figures(CudaEngine()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
