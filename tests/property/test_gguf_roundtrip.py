"""What the writer writes the reader reads: metadata of every type, tensors of every type and shape."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream.gguf import GgmlType, GgufFile, GgufWriter, LazyStrings, ValueType
from tests.examples import examples

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


def element(kind: ValueType) -> st.SearchStrategy[object]:
    if kind is ValueType.STRING:
        return TEXT
    if kind is ValueType.BOOL:
        return st.booleans()
    if kind.is_float:
        return st.floats(width=32 if kind is ValueType.FLOAT32 else 64, allow_nan=False)
    limits = np.iinfo(np.dtype(kind.dtype))
    return st.integers(int(limits.min), int(limits.max))


KINDS = st.sampled_from([kind for kind in ValueType if kind is not ValueType.ARRAY])
SCALARS = KINDS.flatmap(lambda kind: st.tuples(st.just(kind), element(kind)))
ARRAYS = KINDS.flatmap(lambda kind: st.tuples(st.just(kind), st.lists(element(kind), max_size=8)))
METADATA = st.dictionaries(
    NAMES.filter(lambda name: not name.startswith(("general.", "split."))), SCALARS | ARRAYS
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[GgmlType, tuple[int, ...], bytes]:
    kind = draw(st.sampled_from(list(GgmlType)))
    shape = (
        kind.block_values * draw(st.integers(1, 3)),
        *draw(st.lists(st.integers(1, 3), max_size=3)),
    )
    n_bytes = kind.row_bytes(shape[0]) * int(np.prod(shape[1:], dtype=int))
    return kind, shape, draw(st.randoms(use_true_random=False)).randbytes(n_bytes)


@settings(max_examples=examples(150), deadline=None)
@given(
    METADATA,
    st.dictionaries(NAMES, tensors(), max_size=4),
    st.sampled_from([8, 16, 32, 64, 256]),
    st.sampled_from([2, 3]),
)
def test_reader_returns_what_the_writer_was_given(
    metadata: dict[str, tuple[ValueType, object]],
    weights: dict[str, tuple[GgmlType, tuple[int, ...], bytes]],
    alignment: int,
    version: int,
) -> None:
    writer = GgufWriter(alignment=alignment, version=version)
    for key, (kind, value) in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value, kind)
        else:
            assert isinstance(value, (bool, int, float, str))
            writer.add(key, value, kind)
    for name, (dtype, shape, raw) in weights.items():
        writer.add_tensor(name, raw, dtype, shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer.write(path)
        with GgufFile.open(path) as file:
            assert (file.version, file.alignment) == (version, alignment)
            assert set(file.metadata) - {"general.alignment"} == set(metadata)
            for key, (kind, value) in metadata.items():
                check_value(file, key, kind, value)
            assert list(file.tensors) == list(weights)
            for name, (dtype, shape, raw) in weights.items():
                info = file.tensors[name]
                assert (info.type, info.shape, info.nbytes) == (dtype, shape, len(raw))
                assert info.offset % alignment == 0
                assert file.tensor_data(name).tobytes() == raw


def check_value(file: GgufFile, key: str, kind: ValueType, value: object) -> None:
    got = file.metadata[key]
    entry = file.metadata.entry(key)
    if not isinstance(value, list):
        assert entry.kind is kind
        assert got == value and type(got) is type(value)
        return
    assert entry.element is kind
    if kind is ValueType.STRING:
        assert isinstance(got, LazyStrings)
        assert list(got) == value
        assert [got.raw(i) for i in range(len(got))] == [text.encode() for text in value]
    else:
        assert isinstance(got, np.ndarray)
        assert got.tolist() == value and got.dtype == np.dtype(kind.dtype)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([GgmlType.F32, GgmlType.F16, GgmlType.BF16]),
    st.lists(st.integers(-256, 256), min_size=1, max_size=40),
)
def test_float_types_hold_small_integers_exactly(kind: GgmlType, values: list[int]) -> None:
    writer = GgufWriter()
    writer.add_tensor("t", np.array(values, np.float32), kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer.write(path)
        with GgufFile.open(path) as file:
            assert file.tensor_array("t").tolist() == values
