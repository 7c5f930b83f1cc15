"""The GGUF reader on well-formed files: values, types, views, shards, lifetimes."""

from __future__ import annotations

import gc
import io
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pykvstream.errors import Closed, FormatError
from pykvstream.gguf import TYPES_BY_ID, GgmlType, GgufFile, GgufWriter, LazyStrings, ValueType


def write(folder: Path, writer: GgufWriter, name: str = "m.gguf") -> Path:
    path = folder / name
    writer.write(path)
    return path


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """A file with a value of every type."""
    w = GgufWriter()
    w.add("u8", 255, ValueType.UINT8)
    w.add("i8", -128, ValueType.INT8)
    w.add("u16", 65535, ValueType.UINT16)
    w.add("i16", -32768, ValueType.INT16)
    w.add("u32", 4294967295, ValueType.UINT32)
    w.add("i32", -2147483648, ValueType.INT32)
    w.add("u64", (1 << 64) - 1, ValueType.UINT64)
    w.add("i64", -(1 << 63), ValueType.INT64)
    w.add("f32", 0.1, ValueType.FLOAT32)
    w.add("f64", 0.1, ValueType.FLOAT64)
    w.add("yes", True)
    w.add("no", False)
    w.add("text", "ein Wörtchen \N{SNOWMAN}\0")
    w.add("nothing", "")
    w.add_array("tokens", ["a", "", "ĠÖl", "\U0001f600"], ValueType.STRING)
    w.add_array("ints", [1, -2, 3], ValueType.INT32)
    w.add_array("bytes", [0, 255], ValueType.UINT8)
    w.add_array("big", [1, (1 << 64) - 1], ValueType.UINT64)
    w.add_array("scores", [0.5, -1.5], ValueType.FLOAT32)
    w.add_array("flags", [True, False], ValueType.BOOL)
    w.add_array("empty", [], ValueType.INT32)
    w.add_array("no strings", [], ValueType.STRING)
    return write(tmp_path, w)


def test_scalars_become_python_values(rich: Path) -> None:
    with GgufFile.open(rich) as f:
        whole = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 4294967295, "i32": -2147483648}
        whole |= {"u64": (1 << 64) - 1, "i64": -(1 << 63)}
        for key, value in whole.items():
            assert f.metadata[key] == value and type(f.metadata[key]) is int
            assert f.get_int(key) == value
        assert f.get_float("f32") == float(np.float32(0.1)) and f.get_float("f64") == 0.1
        assert f.metadata["yes"] is True and f.get_bool("no") is False
        assert f.get_str("text") == "ein Wörtchen \N{SNOWMAN}\0" and f.metadata["nothing"] == ""
        assert (f.version, f.alignment, len(f.tensors)) == (3, 32, 0)


def test_arrays_become_read_only_views(rich: Path) -> None:
    with GgufFile.open(rich) as f:
        for key, values, dtype in (
            ("ints", [1, -2, 3], np.int32),
            ("bytes", [0, 255], np.uint8),
            ("scores", [0.5, -1.5], np.float32),
            ("flags", [True, False], np.bool_),
            ("empty", [], np.int32),
        ):
            array = f.metadata[key]
            assert isinstance(array, np.ndarray)
            assert array.tolist() == values and array.dtype == dtype and not array.flags.writeable
        assert f.get_ints("ints").dtype == np.int64 and f.get_floats("scores").tolist() == [0.5, -1.5]
        assert f.get_ints("empty").tolist() == []
        assert not f.get_ints("ints").flags.writeable and not f.get_floats("scores").flags.writeable


def test_string_arrays_are_lazy_sequences(rich: Path) -> None:
    with GgufFile.open(rich) as f:
        tokens = f.get_strs("tokens")
        need = ["a", "", "ĠÖl", "\U0001f600"]
        assert isinstance(tokens, LazyStrings)
        assert list(tokens) == need and [tokens[i] for i in range(-4, 4)] == need * 2
        assert tokens[1:3] == ["", "ĠÖl"] and tokens[::-1] == need[::-1]
        assert tokens.raw(2) == "ĠÖl".encode() and tokens.raw(-1) == "\U0001f600".encode()
        assert "ĠÖl" in tokens and tokens.index("ĠÖl") == 2
        for outside in (4, -5):
            with pytest.raises(IndexError):
                tokens[outside]
        assert list(f.get_strs("no strings")) == []


def test_undecodable_string_gives_its_bytes_but_no_text(tmp_path: Path) -> None:
    w = GgufWriter()
    w.add_array("tokens", [b"ok", b"caf\xc3", b"ok"], ValueType.STRING)
    with GgufFile.open(write(tmp_path, w)) as f:
        tokens = f.get_strs("tokens")
        assert tokens.raw(1) == b"caf\xc3" and tokens[2] == "ok"
        with pytest.raises(FormatError, match="UTF-8") as caught:
            tokens[1]
        assert caught.value.key == "tokens"
        assert caught.value.offset == f.path.read_bytes().index(b"caf\xc3") + 3


GETTERS: dict[str, tuple[Callable[[GgufFile, str], object], set[str]]] = {
    "int": (GgufFile.get_int, {"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"}),
    "float": (GgufFile.get_float, {"f32", "f64"}),
    "bool": (GgufFile.get_bool, {"yes", "no"}),
    "str": (GgufFile.get_str, {"text", "nothing"}),
    "strs": (GgufFile.get_strs, {"tokens", "no strings"}),
    "ints": (GgufFile.get_ints, {"ints", "bytes", "empty"}),
    "floats": (GgufFile.get_floats, {"scores"}),
}


@pytest.mark.parametrize("name", GETTERS)
def test_typed_access_refuses_every_other_type_with_key_and_offset(rich: Path, name: str) -> None:
    getter, fitting = GETTERS[name]
    with GgufFile.open(rich) as f:
        for key in f.metadata:
            if key in fitting:
                getter(f, key)
                continue
            with pytest.raises(FormatError) as caught:
                getter(f, key)
            assert caught.value.key == key
            assert caught.value.offset == f.metadata.entry(key).offset


def test_missing_key_is_refused_unless_a_default_is_given(rich: Path) -> None:
    with GgufFile.open(rich) as f:
        for getter, _ in GETTERS.values():
            with pytest.raises(FormatError, match="required key is missing") as caught:
                getter(f, "absent")
            assert caught.value.key == "absent"
        assert f.get_int("absent", 7) == 7 and f.get_str("absent", None) is None
        assert f.get_ints("absent", None) is None and f.get_bool("absent", default=False) is False
        with pytest.raises(FormatError, match="value is STRING, need an integer"):
            f.get_int("text", 7)


def test_scores_declared_as_bytes_are_not_floats(tmp_path: Path) -> None:
    w = GgufWriter()
    w.add_array("tokenizer.ggml.scores", [1, 2], ValueType.UINT8)
    with GgufFile.open(write(tmp_path, w)) as f, pytest.raises(FormatError, match="array of UINT8"):
        f.get_floats("tokenizer.ggml.scores")


def test_per_block_integers_come_as_scalar_or_array(rich: Path) -> None:
    with GgufFile.open(rich) as f:
        assert f.get_ints("u8", count=3).tolist() == [255, 255, 255]
        assert f.get_ints("ints", count=3).tolist() == [1, -2, 3]
        with pytest.raises(FormatError, match="3 entries, need 4"):
            f.get_ints("ints", count=4)
        for key in ("u64", "big"):
            with pytest.raises(FormatError, match="18446744073709551615 is out of range"):
                f.get_ints(key, count=2)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(tmp_path: Path, version: int) -> None:
    w = GgufWriter(version=version)
    w.add_tensor("t", np.arange(4, dtype=np.float32))
    with GgufFile.open(write(tmp_path, w)) as f:
        assert f.version == version and f.tensor_array("t").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_tensors_lie_on_the_alignment(tmp_path: Path, alignment: int) -> None:
    w = GgufWriter(alignment=alignment)
    w.add_tensor("odd", np.arange(3, dtype=np.float32))
    w.add_tensor("next", np.arange(5, dtype=np.float32))
    path = write(tmp_path, w)
    with GgufFile.open(path) as f:
        assert f.alignment == alignment
        assert all(t.offset % alignment == 0 for t in f.tensors.values())
        info = f.tensors["next"]
        (last,) = struct.unpack_from("<f", path.read_bytes(), info.offset + 16)
        assert last == 4 and f.tensor_array("next")[4] == 4


def test_tensor_table_keeps_ne_order_and_arrays_have_rows_first(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 64, dtype=np.float32).reshape(2, 3, 64)
    w = GgufWriter()
    for kind in (GgmlType.F32, GgmlType.F16, GgmlType.Q8_0):
        w.add_tensor(kind.name, values, kind)
    with GgufFile.open(write(tmp_path, w)) as f:
        assert list(f.tensors) == ["F32", "F16", "Q8_0"]
        info = f.tensor("Q8_0")
        assert (info.shape, info.type, info.nbytes, info.shard) == ((64, 3, 2), GgmlType.Q8_0, 6 * 68, 0)
        assert info.n_values == 384
        np.testing.assert_array_equal(f.tensor_array("F32"), values)
        np.testing.assert_array_equal(f.tensor_array("F16"), values)
        assert f.tensor_array("Q8_0").shape == (2, 3, 64)
        assert np.abs(f.tensor_array("Q8_0") - values).max() <= 383 / 127
        with pytest.raises(FormatError, match="missing") as caught:
            f.tensor("absent")
        assert caught.value.key == "absent"


def test_type_without_codec_is_listed_and_its_bytes_are_readable(tmp_path: Path) -> None:
    raw = bytes(range(66))
    w = GgufWriter()
    w.add_tensor("t", raw, GgmlType.IQ2_XXS, (256,))
    with GgufFile.open(write(tmp_path, w)) as f:
        assert f.tensors["t"].type is GgmlType.IQ2_XXS and f.tensor_data("t").tobytes() == raw


def test_tensor_data_is_a_read_only_view_of_the_file(tmp_path: Path) -> None:
    w = GgufWriter()
    w.add_tensor("t", np.zeros(64, np.float32))
    path = write(tmp_path, w)
    with GgufFile.open(path) as f:
        data = f.tensor_data("t")
        assert not data.flags.writeable and data.base is not None
        with path.open("r+b") as stream:
            stream.seek(f.tensors["t"].offset)
            stream.write(b"\x2a")
        assert data[0] == 0x2A


def test_views_outlive_the_file_and_the_mapping_goes_with_the_last(rich: Path) -> None:
    f = GgufFile.open(rich)
    tokens, ints = f.get_strs("tokens"), f.metadata["ints"]
    assert isinstance(ints, np.ndarray) and isinstance(ints.base, np.ndarray)
    root = weakref.ref(ints.base)
    f.close()
    del f
    gc.collect()
    assert tokens[2] == "ĠÖl" and ints.tolist() == [1, -2, 3]
    del ints
    gc.collect()
    assert root() is not None and tokens[0] == "a"
    del tokens
    gc.collect()
    assert root() is None


def test_closed_file_refuses_tensor_data(tmp_path: Path) -> None:
    w = GgufWriter()
    w.add_tensor("t", np.zeros(4, np.float32))
    with GgufFile.open(write(tmp_path, w)) as f:
        pass
    f.close()
    with pytest.raises(Closed, match=r"m\.gguf"):
        f.tensor_data("t")


def test_open_and_refused_files_leave_no_descriptor(rich: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(rich.read_bytes()[:500])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(FormatError):
            GgufFile.open(bad)
        with GgufFile.open(rich) as f:
            list(f.metadata.values())
    del f
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def shard_set(folder: Path, n_shards: int) -> list[Path]:
    paths = []
    for index in range(n_shards):
        w = GgufWriter(alignment=64 if index == 1 else 32)
        w.add("split.no", index, ValueType.UINT16)
        w.add("split.count", n_shards, ValueType.UINT16)
        w.add("split.tensors.count", 2 * n_shards, ValueType.INT32)
        if index == 0:
            w.add("general.name", "a set")
        for letter in "ab":
            w.add_tensor(f"{letter}{index}", np.full(5, index, np.float32))
        paths.append(write(folder, w, f"m-{index + 1:05d}-of-{n_shards:05d}.gguf"))
    return paths


def test_any_shard_opens_the_whole_set(tmp_path: Path) -> None:
    paths = shard_set(tmp_path, 3)
    for path in paths:
        with GgufFile.open(path) as f:
            assert list(f.paths) == paths and f.path == paths[0]
            assert f.get_str("general.name") == "a set"
            assert list(f.tensors) == ["a0", "b0", "a1", "b1", "a2", "b2"]
            assert [t.shard for t in f.tensors.values()] == [0, 0, 1, 1, 2, 2]
            assert f.tensor_array("b2").tolist() == [2] * 5 and f.tensor_array("a1").tolist() == [1] * 5


def test_set_of_one_shard_opens_with_and_without_split_keys(tmp_path: Path) -> None:
    (path,) = shard_set(tmp_path, 1)
    with GgufFile.open(path) as f:
        assert list(f.tensors) == ["a0", "b0"]
    with GgufFile.open(write(tmp_path, GgufWriter(), "plain-00001-of-00001.gguf")) as f:
        assert len(f.tensors) == 0


def test_relative_and_string_paths_open(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rich.parent)
    with GgufFile.open(rich.name) as f:
        assert f.get_int("u8") == 255


def test_large_vocabulary_is_indexed_without_decoding(tmp_path: Path) -> None:
    n = 20000
    w = GgufWriter()
    w.add_array("tokens", [b"\xff" + str(i).encode() for i in range(n)], ValueType.STRING)
    with GgufFile.open(write(tmp_path, w)) as f:
        tokens = f.get_strs("tokens")
        assert len(tokens) == n and tokens.raw(n - 1) == b"\xff19999"
        with pytest.raises(FormatError):
            tokens[n - 1]


def test_type_numbers_are_distinct_and_complete() -> None:
    assert len(TYPES_BY_ID) == len(GgmlType) == 26
    assert TYPES_BY_ID[23] is GgmlType.IQ4_XS
    assert GgmlType.Q6_K.row_bytes(512) == 420


def test_writer_streams_to_a_binary_stream(rich: Path, tmp_path: Path) -> None:
    w = GgufWriter()
    w.add("k", 1)
    w.add_tensor("t", np.arange(64, dtype=np.float32), GgmlType.Q4_0)
    stream = io.BytesIO()
    w.write(stream)
    assert stream.getvalue() == write(tmp_path, w, "t.gguf").read_bytes()


def test_reader_agrees_with_the_public_gguf_package(rich: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the optional comparison needs the package gguf")
    w = GgufWriter()
    w.add_array("ints", [1, -2, 3], ValueType.INT32)
    w.add("name", "x")
    w.add_tensor("t", np.arange(64, dtype=np.float32).reshape(2, 32), GgmlType.Q8_0)
    path = write(tmp_path, w, "t.gguf")
    public = gguf.GGUFReader(path)
    with GgufFile.open(path) as f:
        (tensor,) = public.tensors
        assert (tensor.name, tensor.data_offset) == ("t", f.tensors["t"].offset)
        assert tensor.data.tobytes() == f.tensor_data("t").tobytes()
        assert public.fields["ints"].contents() == [1, -2, 3]
        assert public.fields["name"].contents() == "x"
