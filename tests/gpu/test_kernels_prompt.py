"""Attention of a prompt's rows by warpgroups: against float64, and its bits against themselves, where cards have them.

Tolerance: queries, K, V and weights are rounded to halves, 2^-11 of each; of a weighted mean that is at most some 2^-10
of the largest value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.gpu.attend_case import (
    GROUP,
    KV_TYPES,
    PAGE,
    PROMPT,
    Case,
    Floats,
    Layer,
    Run,
    T,
    attend,
    attend64,
    make_case,
    same_bits,
)
from tests.gpu.kernel_engine import CudaEngine

TYPES = tuple(kind for kind in KV_TYPES if kind not in (T.F32, T.BF16))
LAYER = Layer(T.Q8_0, T.Q4_0, 256, 256, 2, 6)


@pytest.fixture(scope="module")
def engine() -> CudaEngine:
    made = CudaEngine()
    if made.arch != 90:
        pytest.skip("no warpgroups that multiply here")
    return made


@pytest.fixture
def device(engine: CudaEngine) -> Iterator[CudaEngine]:
    yield engine
    engine.release()


def whole(case: Case) -> Floats:
    return attend(case, [Run(0, case.n_pages, True)])


def assert_close(case: Case) -> None:
    error = np.abs(whole(case) - attend64(case)).max()
    most = np.abs(case.v).max() * 2**-10
    assert error <= most, f"{error}, at most {most}"


@pytest.mark.parametrize("index", range(len(TYPES)), ids=lambda i: TYPES[i].name)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 64), (64, 256)])
def test_prompt_attention_equals_float64(device: CudaEngine, index: int, dims: tuple[int, int]) -> None:
    layer = Layer(TYPES[index], TYPES[(index + 3) % len(TYPES)], *dims, 2, (1, 2, 3, 6)[index % 4])
    assert_close(make_case(device, layer, 2500, 70, PROMPT))


@pytest.mark.parametrize("n_tokens", [1, 2, 63, 64, 65, 255, 256, 257, 513])
def test_prompt_attention_of_short_histories_equals_float64(device: CudaEngine, n_tokens: int) -> None:
    assert_close(make_case(device, LAYER, n_tokens, n_tokens, PROMPT))


def test_rows_of_a_prompt_have_the_bits_of_other_passes(device: CudaEngine) -> None:
    case = make_case(device, LAYER, 9 * PAGE + 200, 500, PROMPT)
    expected = whole(case)
    for begin, end in ((0, 1), (0, 64), (17, 145), (64, 500), (499, 500)):
        assert same_bits(whole(case.rows(begin, end)), expected[begin:end]), (begin, end)


def test_any_cut_of_a_prompt_gives_the_same_bits(device: CudaEngine) -> None:
    case = make_case(device, LAYER, 41 * PAGE + 7, 30, PROMPT)
    expected = whole(case)
    rng = np.random.default_rng(3)
    cuts = [list(range(1, case.n_pages)), list(range(GROUP, case.n_pages, GROUP))]
    cuts += [sorted(rng.choice(np.arange(1, case.n_pages), n, replace=False).tolist()) for n in (1, 2, 5, 9)]
    for inner in cuts:
        runs = [Run(a, b, True) for a, b in pairwise([0, *inner, case.n_pages])]
        assert same_bits(attend(case, runs), expected), inner


def test_a_broken_row_of_a_prompt_reaches_those_who_see_it_and_nobody_else(device: CudaEngine) -> None:
    layer = Layer(T.F16, T.F16, 64, 64, 1, 2)
    good = make_case(device, layer, 300, 4, PROMPT)
    table = device.download(good.table, (2,), np.uint64)
    record = device.download(int(table[1]), (layer.record_bytes,), np.uint8)
    nan = np.full((1, 1, 64), np.nan, np.float32)
    layer.write(record, 298 - PAGE, nan, nan)
    table[1] = device.upload(record)
    bad = replace(good, table=device.upload(table))
    expected, out = whole(good), whole(bad)
    assert same_bits(out[:2], expected[:2])
    assert np.isnan(out[2:]).all()
