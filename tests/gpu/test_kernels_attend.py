"""The attention kernels against float64, and their bits against themselves: other neighbours, cuts and places.

Tolerance: float32 sums of a few hundred products of numbers around 1, folded over pages: 2e-6 of the largest value;
1e-5 by matrix products, whose sums are cut off, not rounded.
Order: cases on the host run the same source with few tokens, so that a machine without a GPU checks the arithmetic too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest

from tests.gpu.attend_case import (
    GROUP,
    KV_TYPES,
    PAGE,
    PARAMS,
    PLAIN,
    PRODUCTS,
    STAGED,
    Case,
    Engine,
    Family,
    Layer,
    Run,
    T,
    attend,
    attend64,
    attend_at_once,
    launches,
    make_case,
    same_bits,
)
from tests.gpu.kernel_engine import CudaEngine

WIDTHS = (1, 2, 3, 5, 8, 17, 49, 64)
DIMS = (64, 96, 128, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
ALL_PAIRS = list(product(KV_TYPES, KV_TYPES))
# Every type on either side, each with two head sizes.
FEW_PAIRS = [(KV_TYPES[i], KV_TYPES[(i + 4) % len(KV_TYPES)]) for i in range(len(KV_TYPES))]


@dataclass(frozen=True)
class Rig:
    engine: Engine
    is_small: bool


@pytest.fixture(params=["host", "cuda"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "host":
        yield Rig(request.getfixturevalue("host"), True)
        return
    engine = request.getfixturevalue("device")
    yield Rig(engine, False)
    engine.release()


@pytest.fixture(params=[PLAIN, PRODUCTS, STAGED], ids=("attend", "attend_mma", "staged"))
def family(request: pytest.FixtureRequest) -> Family:
    kernels: Family = request.param
    return kernels


def assert_close(case: Case) -> None:
    if not case.family.takes(case.layer):
        pytest.skip("codes that are not exact as halves are for the plain kernels")
    error = np.abs(attend_at_once(case) - attend64(case)).max()
    most = np.abs(case.v).max() * (2e-6 if case.family == PLAIN else 1e-5)
    assert error <= most, f"{error}, at most {most}"


@pytest.mark.parametrize("index", range(len(FEW_PAIRS)), ids=lambda i: "-".join(kind.name for kind in FEW_PAIRS[i]))
def test_attention_equals_float64_for_every_type(rig: Rig, family: Family, index: int) -> None:
    type_k, type_v = FEW_PAIRS[index]
    layer = Layer(type_k, type_v, DIMS[index % 4], DIMS[(index + index // 4) % 4], 2, GROUPS[index])
    assert_close(make_case(rig.engine, layer, 600 if rig.is_small else 5000, 2, family))


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_attention_equals_float64_for_every_pair(device: CudaEngine, family: Family, pair: tuple[T, T]) -> None:
    index = ALL_PAIRS.index(pair)
    layer = Layer(*pair, DIMS[index % 4], DIMS[index % 4], 2, GROUPS[index % len(GROUPS)])
    assert_close(make_case(device, layer, 1500, 3, family))
    device.release()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
def test_attention_equals_float64_for_every_head_size_and_group(
    device: CudaEngine, family: Family, dim: int, group: int
) -> None:
    assert_close(make_case(device, Layer(T.Q8_0, T.Q4_0, dim, dim, 2, group), 3000, 5, family))
    device.release()


@pytest.mark.parametrize("n_tokens", [1, 2, 255, 256, 257, 512, 513])
def test_attention_of_short_histories_equals_float64(rig: Rig, family: Family, n_tokens: int) -> None:
    assert_close(make_case(rig.engine, Layer(T.Q8_0, T.Q4_0, 64, 64, 1, 3), n_tokens, min(n_tokens, 3), family))


def test_attention_of_a_prefill_tile_equals_float64(device: CudaEngine, family: Family) -> None:
    assert_close(make_case(device, Layer(T.Q8_0, T.Q4_0, 256, 256, 2, 6), 2700, 300, family))
    device.release()


@pytest.mark.parametrize("pair", [(T.Q8_0, T.Q4_0), (T.F16, T.Q5_1), (T.Q4_1, T.IQ4_NL), (T.BF16, T.F32)], ids=str)
def test_rows_have_the_bits_of_single_rows(rig: Rig, family: Family, pair: tuple[T, T]) -> None:
    """Rows that cross a page boundary, in every width, with three query heads to a KV head."""
    if not family.takes(Layer(*pair)):
        pytest.skip("codes that are not exact as halves are for the plain kernels")
    widths = (1, 3, 8) if rig.is_small else WIDTHS
    n_tokens = 2 * PAGE + 4 if rig.is_small else 2500
    whole = make_case(rig.engine, Layer(*pair, 64, 96, 1, 3), n_tokens, max(widths), family)
    single = [attend_at_once(whole.rows(row, row + 1)) for row in range(whole.n_rows)]
    for width in widths:
        for begin in range(0, whole.n_rows - width + 1, max(1, whole.n_rows // 3)):
            together = attend_at_once(whole.rows(begin, begin + width))
            assert same_bits(together, np.concatenate(single[begin : begin + width])), (width, begin)


def cuts(rng: np.random.Generator, n_pages: int) -> list[Run]:
    """Waves cut anywhere, each in slots of pages or of groups."""
    n_inner = rng.integers(0, n_pages)
    inner = rng.choice(np.arange(1, n_pages), n_inner, replace=False) if n_pages > 1 else np.zeros(0, int)
    bounds = [0, *sorted(int(at) for at in inner), n_pages]
    return [Run(a, b, bool(rng.integers(2))) for a, b in pairwise(bounds)]


def test_any_cut_gives_the_same_bits(rig: Rig, family: Family) -> None:
    n_tokens = 18 * PAGE + 7 if rig.is_small else 41 * PAGE + 7
    layer = Layer(T.Q8_0, T.Q4_0, 32, 32, 1, 2) if rig.is_small else Layer(T.Q8_0, T.Q4_0, 256, 256, 2, 6)
    case = make_case(rig.engine, layer, n_tokens, 3, family)
    assert_close(case)
    expected = attend_at_once(case)
    pages = [Run(page, page + 1, False) for page in range(case.n_pages)]
    groups = [Run(at, min(at + GROUP, case.n_pages), True) for at in range(0, case.n_pages, GROUP)]
    rng = np.random.default_rng(3)
    drawn = [cuts(rng, case.n_pages) for _ in range(2 if rig.is_small else 40)]
    for runs in ([Run(0, case.n_pages, False)], pages, groups, *drawn):
        assert same_bits(attend(case, runs), expected), runs


@pytest.mark.parametrize("n_pages", [1, 7, 8, 9, 17])
def test_recorded_launches_have_the_bits_of_single_ones(rig: Rig, family: Family, n_pages: int) -> None:
    """Over as many pages as tables have room for, however many there are; launches may lie behind the last page."""
    layer = Layer(T.Q8_0, T.Q4_0, 32, 32, 1, 2) if rig.is_small else Layer(T.Q8_0, T.Q4_0, 256, 256, 2, 6)
    case = make_case(rig.engine, layer, n_pages * PAGE - 3, 3, family)
    expected = attend_at_once(case)
    rng = np.random.default_rng(n_pages)
    one_launch = [[Run(0, 24, False)], [Run(0, 24, True)]]
    for runs in (*one_launch, cuts(rng, 24), [Run(at, at + GROUP, at % 2 == 0) for at in range(0, 24, GROUP)]):
        made = launches(case, runs, is_recorded=True)
        for _ in range(2):
            made.run()
            assert same_bits(made.result(), expected), runs


@pytest.mark.parametrize("dim, block", [(64, 64), (64, 8), (96, 32), (256, 256), (256, 64)])
def test_rotated_attention_has_the_bits_of_a_rotation_behind_it(
    rig: Rig, family: Family, dim: int, block: int
) -> None:
    layer = Layer(T.Q8_0, T.Q4_0, dim, dim, 1, 3)
    case = make_case(rig.engine, layer, PAGE + 40, 2, family)
    runs = [Run(0, 1, False), Run(1, 2, False)]
    steps, rotated = launches(case, runs), launches(case, runs, block=block)
    steps.run()
    rotated.run()
    if block >= 32:
        scale = float(np.float32(1 / np.sqrt(block)))
        n_blocks = steps.result().size // block
        params = PARAMS.make("kvs_hadamard_params", values=steps.out, n_blocks=n_blocks, scale=scale)
        rig.engine.run("hadamard", "hadamard", {"KVS_BLOCK": block}, (-(-n_blocks // 8), 1, 1), 256, params)
        assert same_bits(rotated.result(), steps.result())
    else:
        signs = np.array([[(-1) ** (i & j).bit_count() for i in range(block)] for j in range(block)])
        expected = steps.result().reshape(-1, block).astype(np.float64) @ signs / np.sqrt(block)
        np.testing.assert_allclose(rotated.result().reshape(-1, block), expected, rtol=1e-5, atol=1e-6)


def test_places_of_pages_do_not_matter(rig: Rig, family: Family) -> None:
    layer = Layer(T.Q5_0, T.Q8_0, 64, 64, 1, 2)
    first = make_case(rig.engine, layer, 700, 2, family)
    table = rig.engine.download(first.table, (first.n_pages,), np.uint64)
    moved = [
        rig.engine.upload(rig.engine.download(int(address), (layer.record_bytes,), np.uint8)) for address in table[::-1]
    ]
    second = replace(first, table=rig.engine.upload(np.array(moved[::-1], np.uint64)))
    assert same_bits(attend_at_once(first), attend_at_once(second))


def test_a_broken_row_reaches_those_who_see_it_and_nobody_else(rig: Rig, family: Family) -> None:
    """The last of four rows is stored as NaN: the rows before it do not see it, and its own answer is NaN."""
    layer = Layer(T.F16, T.F16, 64, 64, 1, 2)
    good = make_case(rig.engine, layer, 300, 4, family)
    table = rig.engine.download(good.table, (2,), np.uint64)
    record = rig.engine.download(int(table[1]), (layer.record_bytes,), np.uint8)
    nan = np.full((1, 1, 64), np.nan, np.float32)
    layer.write(record, 299 - PAGE, nan, nan)
    table[1] = rig.engine.upload(record)
    bad = replace(good, table=rig.engine.upload(table))
    expected, out = attend_at_once(good), attend_at_once(bad)
    assert same_bits(out[:3], expected[:3])
    assert np.array_equal(out[3].view(np.uint32), np.full_like(out[3], np.nan).view(np.uint32))


def test_neither_the_size_of_tiles_nor_a_stage_matters(rig: Rig) -> None:
    case = make_case(rig.engine, Layer(T.Q8_0, T.Q4_0, 256, 256, 1, 6), 600 if rig.is_small else 2500, 9, PRODUCTS)
    families = [Family("attend_mma", tile, is_staged=staged) for tile in (8, 16, 32, 40) for staged in (False, True)]
    first, *others = (attend_at_once(replace(case, family=each)) for each in families)
    assert all(same_bits(first, other) for other in others)
