"""KV records against the numpy encoders of the file formats, byte for byte.

Weights of every type stand in ``test_weight_types``. Rows: ordinary ones, and hostile ones made of few values, so that
extremes of both signs tie, codes lie half way between two levels, and whole blocks are zero, tiny or beyond float16. No
row mixes zeros of both signs: which of them is the minimum is not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvstream.core.device import Device, Isa
from pykvstream.core.kv import PAGE_TOKENS, KvLayer, Side, decode_rows, encode_rows, record_layout, unpack_rows
from pykvstream.errors import Unsupported
from pykvstream.gguf import GgmlType, decode, encode
from tests.rigs import KV_TYPES

N_HEADS, HEAD_K, HEAD_V = 2, 96, 64
Floats = npt.NDArray[np.float32]
MakeRows = Callable[[np.random.Generator, tuple[int, int]], Floats]


@pytest.fixture(scope="module", params=[Isa.REFERENCE, Isa.AVX2, Isa.AVX512], ids=lambda isa: isa.name)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    try:
        made = Device(1, isa=request.param)
    except Unsupported as refusal:
        pytest.skip(str(refusal))
    with made:
        yield made


def ordinary(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    scale = np.exp(rng.normal(0, 4, (shape[0], 1)))
    return np.asarray(rng.standard_normal(shape) * scale, np.float32)


def tied(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Multiples of one step: quotients by the scale fall on and half way between codes."""
    levels = rng.choice((3, 7, 8, 15, 16, 31, 127, 254), (shape[0], 1))
    step = rng.choice((1.0, 0.5, 1.25, 1 / 3, 2.0**-20, 2.0**-115, 2.0**25), (shape[0], 1))
    values = rng.integers(-levels, levels + 1, shape) * step
    sign = np.where(rng.random((shape[0], 1)) < 0.5, -1.0, 1.0)
    values[:, ::32] = sign * levels * step
    values[:, 7::32] = -sign * levels * step
    return np.asarray(values, np.float32)


def few(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    palette = np.array([0.0, 1.0, -1.0, 1e-8, -1e-30, 1e8, -1e8, 65504.0, -65520.0, 0.5, 1.5], np.float32)
    rows = rng.choice(palette[rng.integers(0, len(palette), 3)], shape)
    rows[0] = 0.0
    return np.asarray(rows, np.float32)


def encoded(device: Device, layer: KvLayer, first_row: int, k: Floats, v: Floats) -> npt.NDArray[np.uint8]:
    record = np.full(record_layout(layer).record_bytes, 0xA5, np.uint8)
    encode_rows(device, layer, record, first_row, k, v)
    return record


def assert_rows_equal_files(device: Device, layer: KvLayer, first_row: int, k: Floats, v: Floats) -> None:
    """Unpacked blocks are the numpy encoder's, decoded values are the numpy decoder's."""
    record = encoded(device, layer, first_row, k, v)
    decoded = decode_rows(device, layer, record, first_row, len(k))
    for side, kind_id, rows, values in zip(Side, (layer.type_k, layer.type_v), (k, v), decoded, strict=True):
        kind = next(kind for kind in KV_TYPES if kind.id == kind_id)
        width = layer.head_dim(side)
        for head in range(layer.n_kv_heads):
            columns = slice(head * width, (head + 1) * width)
            expected = encode(kind, rows[:, columns])
            blocks = unpack_rows(layer, record, head, side, first_row, len(rows))
            unequal = np.flatnonzero((blocks != expected).any(axis=1))
            assert unequal.size == 0, f"{kind.name} {side.name}: row {unequal[0]} is {rows[unequal[0], columns]}"
            back = decode(kind, expected).reshape(len(rows), width)
            np.testing.assert_array_equal(
                np.ascontiguousarray(values[:, columns]).view(np.uint32), back.view(np.uint32)
            )


@pytest.mark.parametrize("kind", KV_TYPES, ids=lambda kind: kind.name)
def test_encoders_write_the_bytes_of_the_file_formats(device: Device, kind: GgmlType) -> None:
    """Each type on either side, the other side of another type."""
    rng = np.random.default_rng(kind.id)
    other = KV_TYPES[(KV_TYPES.index(kind) + 4) % len(KV_TYPES)]
    for type_k, type_v in ((kind, other), (other, kind)):
        layer = KvLayer(N_HEADS, HEAD_K, HEAD_V, type_k.id, type_v.id)
        for rows in (ordinary, tied):
            k = rows(rng, (PAGE_TOKENS, N_HEADS * HEAD_K))
            v = rows(rng, (PAGE_TOKENS, N_HEADS * HEAD_V))
            assert_rows_equal_files(device, layer, 0, k, v)


@given(
    kinds=st.tuples(st.sampled_from(KV_TYPES), st.sampled_from(KV_TYPES)),
    first_row=st.integers(0, PAGE_TOKENS - 1),
    n_rows=st.integers(1, 5),
    rows=st.sampled_from((ordinary, tied, few)),
    seed=st.integers(0, 2**32 - 1),
)
def test_hostile_rows_anywhere_in_a_page_equal_the_file_formats(
    device: Device,
    kinds: tuple[GgmlType, GgmlType],
    first_row: int,
    n_rows: int,
    rows: MakeRows,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    n_rows = min(n_rows, PAGE_TOKENS - first_row)
    layer = KvLayer(N_HEADS, HEAD_K, HEAD_V, kinds[0].id, kinds[1].id)
    k = rows(rng, (n_rows, N_HEADS * HEAD_K))
    v = rows(rng, (n_rows, N_HEADS * HEAD_V))
    assert_rows_equal_files(device, layer, first_row, k, v)
