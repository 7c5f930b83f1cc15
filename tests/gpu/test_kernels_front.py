"""The sampling front's kernels: the words that the CPU's operation finds, bit for bit, and those of a sort in float64.

Rows: random, with ties and zeros of both signs, of one value, short of finite logits, with columns that are no tokens,
sorted so that one thread or a few have all of the best; and broken ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.device import Isa
from pykvstream.sampling import FRONT_BEST, Front
from tests.examples import examples
from tests.front_rig import CHUNK, NONE, FrontRig, Rows, slow_front
from tests.gpu.kernel_engine import Engine
from tests.gpu.weight_rig import WeightRig

LANES = 256


@pytest.fixture(scope="module", params=["host", "cuda"])
def rig(request: pytest.FixtureRequest) -> Iterator[WeightRig]:
    name = "host" if request.param == "host" else "device"
    engine: Engine = request.getfixturevalue(name)
    yield WeightRig(engine, request.getfixturevalue("launches"))


def rows_of(n_cols: int, n_tokens: int, seed: int) -> Rows:
    """One of each kind."""
    rng = np.random.default_rng(seed)
    rows = np.empty((9, n_cols), np.float32)
    rows[0] = rng.standard_normal(n_cols) * 3
    rows[1] = np.round(rng.standard_normal(n_cols) * 4) / 4  # ties, and zeros of both signs
    rows[2] = -7.25
    rows[3] = np.where(rng.random(n_cols) < 0.5, 0.0, -0.0)
    rows[4] = rng.standard_normal(n_cols) * 300  # exponentials that fade into subnormals and 0
    rows[4, rng.random(n_cols) < 0.9] = -np.inf
    rows[5] = -np.inf
    rows[5, rng.integers(0, n_tokens, 3)] = [1.0, -3e38, 1.0]
    rows[6] = np.arange(n_cols, dtype=np.float32) * (-1 if seed % 2 else 1)
    # Half of the lanes have what is large: they fill the room, and the last chunk has fewer.
    rows[7] = rng.standard_normal(n_cols) + 100.0 * (np.arange(n_cols) % LANES < FRONT_BEST - 1)
    rows[8] = -np.inf
    rows[:, n_tokens:] = 1e30
    return rows


def words_of_cpu(rows: Rows, n_tokens: int, n_best: int, isa: Isa) -> np.ndarray:
    with FrontRig(rows.shape[1], n_tokens, n_best, isa=isa, max_rows=len(rows)) as cpu:
        return cpu.run(rows)


SHAPES = [
    (1, 1), (127, 127), (128, 128), (129, 129), (300, 129), (CHUNK, CHUNK), (CHUNK + 1, CHUNK),
    (2 * CHUNK + 777, 2 * CHUNK + 700),
]  # fmt: skip
WIDE = [(151_936, 151_669), (248_320, 248_077), (262_144, 262_144)]


def check(rig: WeightRig, rows: Rows, n_tokens: int, n_best: int = FRONT_BEST) -> None:
    found = rig.front(rows, n_tokens, n_best)
    for isa in (Isa.REFERENCE, Isa.BEST):
        assert found.tobytes() == words_of_cpu(rows, n_tokens, n_best, isa).tobytes()
    for row, words in zip(rows, found, strict=True):
        ids, _, bad, log_sum = slow_front(row, n_tokens, n_best)
        n_found, tail = len(ids), words[2 * n_best :]
        assert tail[1] == (NONE if bad is None else bad)
        if bad is not None:
            assert words[n_best] == row[bad].view(np.uint32) and not words[:n_best].any() and not tail[0]
            continue
        assert tail[0] == n_found and words[:n_found].tolist() == ids
        values = words[n_best : n_best + n_found]
        assert values.tolist() == np.array(row[ids]).view(np.uint32).tolist() if ids else not tail[2:].any()
        assert not words[n_found:n_best].any() and not words[n_best + n_found : 2 * n_best].any()
        if ids:
            # Each exponential is within 2e-7 of its own, and sums in float64 add nothing to that.
            assert Front.of(words, 0).log_sum_exp == pytest.approx(log_sum, abs=4e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_are_those_of_the_cpu(rig: WeightRig, shape: tuple[int, int]) -> None:
    check(rig, rows_of(*shape, seed=shape[1]), shape[1])


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_words_of_wide_rows_are_those_of_the_cpu(rig: WeightRig, shape: tuple[int, int]) -> None:
    rows = rows_of(*shape, seed=1)
    check(rig, rows[[0, 1, 6, 7]] if rig.engine.name == "host" else rows, shape[1])


def test_broken_rows_are_told_by_their_first_column(rig: WeightRig) -> None:
    n_cols, n_tokens = 2 * CHUNK + 777, 2 * CHUNK + 700
    rows = np.repeat(rows_of(n_cols, n_tokens, 3)[:1], 7, axis=0)
    rows[:, n_cols - 1] = np.nan
    for row, at in zip(rows, (0, CHUNK - 1, CHUNK, n_tokens - 1, n_tokens, 300, n_cols - 1), strict=True):
        row[at] = np.nan if at % 2 else np.inf
    rows[5, [40, 9000]] = [-np.nan, np.inf]
    check(rig, rows, n_tokens)


@pytest.mark.parametrize("n_best", [1, 2, 40, 127])
def test_fewer_of_the_best_are_found_too(rig: WeightRig, n_best: int) -> None:
    check(rig, rows_of(CHUNK + 900, CHUNK + 899, n_best), CHUNK + 899, n_best)


def test_rows_do_not_touch_whatever_their_number_and_the_room(rig: WeightRig) -> None:
    rows = np.concatenate([rows_of(300, 290, seed) for seed in range(8)])[:64]
    rows[17, 3] = np.nan
    together = rig.front(rows, 290, FRONT_BEST)
    assert together.tobytes() == words_of_cpu(rows, 290, FRONT_BEST, Isa.BEST).tobytes()
    for n in (1, 2, 5):
        assert rig.front(rows[16 : 16 + n], 290, FRONT_BEST, max_rows=64).tobytes() == together[16 : 16 + n].tobytes()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rows, int, int]:
    """Few values, so that ties fall everywhere; runs of one lane; any share masked."""
    n_cols = draw(st.one_of(st.integers(1, 700), st.integers(CHUNK - 2, CHUNK + 300)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = rng.standard_normal(n_cols) * draw(st.sampled_from([0.01, 4.0, 90.0]))
    row = np.round(row, draw(st.sampled_from([0, 1, 9])))
    row[:: draw(st.sampled_from([1, 3, 255, 256, 257]))] += draw(st.sampled_from([0.0, 1e3]))
    row[rng.random(n_cols) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = -np.inf
    row = row.astype(np.float32)
    if draw(st.integers(0, 9)) == 0:
        row[draw(st.integers(0, n_cols - 1))] = draw(st.sampled_from([np.nan, np.inf]))
    return row[None], draw(st.integers(1, n_cols)), draw(st.sampled_from([1, 7, FRONT_BEST]))


@settings(max_examples=examples(30), deadline=None)
@given(cases())
def test_words_of_any_row_are_those_of_the_cpu(rig: WeightRig, case: tuple[Rows, int, int]) -> None:
    check(rig, *case)
