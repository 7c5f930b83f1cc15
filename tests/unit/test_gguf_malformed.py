"""A generated corpus of malformed GGUF files: each is refused by name, with its offset, after allocating
little.

Holds: a builder that records where each field lies, the corpus made from it, and cases that need real files.
"""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest

from pykvstream.errors import FormatError, InvalidArgument, KvStreamError, NotFound
from pykvstream.gguf import GgmlType, GgufFile, GgufWriter, ValueType
from pykvstream.gguf.parse import MAX_STRINGS, MAX_TENSORS

LIMIT_BYTES = 64 << 20
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@dataclass
class Builder:
    """Appends named fields and remembers where each begins; ``fields`` maps a name to (offset, bytes)."""

    data: bytearray = field(default_factory=bytearray)
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)

    def put(self, name: str, raw: bytes) -> None:
        self.fields[name] = (len(self.data), len(raw))
        self.data += raw

    def header(self, n_tensors: int, n_keys: int) -> None:
        self.put("magic", b"GGUF")
        self.put("version", struct.pack("<I", 3))
        self.put("n_tensors", struct.pack("<Q", n_tensors))
        self.put("n_keys", struct.pack("<Q", n_keys))

    def key(self, name: str, kind: int, payload: bytes, element: int | None = None, n: int = 0) -> None:
        self.put(f"{name}/length", struct.pack("<Q", len(name)))
        self.put(f"{name}/name", name.encode())
        self.put(f"{name}/type", struct.pack("<I", kind))
        if element is not None:
            self.put(f"{name}/element", struct.pack("<I", element))
            self.put(f"{name}/count", struct.pack("<Q", n))
        self.put(f"{name}/value", payload)

    def tensor(self, name: str, shape: tuple[int, ...], kind: GgmlType, offset: int) -> None:
        self.put(f"{name}/length", struct.pack("<Q", len(name)))
        self.put(f"{name}/name", name.encode())
        self.put(f"{name}/n_dims", struct.pack("<I", len(shape)))
        for axis, extent in enumerate(shape):
            self.put(f"{name}/ne{axis}", struct.pack("<q", extent))
        self.put(f"{name}/type", struct.pack("<i", kind.id))
        self.put(f"{name}/offset", struct.pack("<Q", offset))


def valid() -> Builder:
    """A file with every value type and tensors of one to four dimensions; its last byte is tensor data."""
    b = Builder()
    b.header(n_tensors=4, n_keys=17)
    b.key("general.alignment", U32, struct.pack("<I", 64))
    for name, kind, layout, value in (
        ("u8", U8, "<B", 200),
        ("i8", I8, "<b", -3),
        ("u16", U16, "<H", 60000),
        ("i16", I16, "<h", -3),
        ("u32", U32, "<I", 1 << 31),
        ("i32", I32, "<i", -3),
        ("f32", F32, "<f", 1.5),
        ("flag", BOOL, "<B", 1),
        ("u64", U64, "<Q", 1 << 63),
        ("i64", I64, "<q", -3),
        ("f64", F64, "<d", 1.5),
    ):
        b.key(name, kind, struct.pack(layout, value))
    b.key("word", STRING, text(b"a word"))
    b.key("ints", ARRAY, struct.pack("<3i", 1, 2, 3), I32, 3)
    b.key("flags", ARRAY, b"\1\0\1", BOOL, 3)
    b.key("words", ARRAY, text(b"one") + text(b"") + text(b"three"), STRING, 3)
    b.key("scores", ARRAY, struct.pack("<2f", 0.5, 1), F32, 2)
    b.tensor("vector", (24,), GgmlType.F32, 0)
    b.tensor("matrix", (64, 2), GgmlType.Q8_0, 128)
    b.tensor("cube", (2, 2, 2), GgmlType.F16, 320)
    b.tensor("four", (256, 1, 1, 1), GgmlType.Q4_K, 384)
    b.put("padding", bytes(-len(b.data) % 64))
    b.put("data", bytes(384 + 144))
    return b


@dataclass(frozen=True)
class Case:
    name: str
    data: bytes
    message: str
    key: str | None = None


U32_EDGES = (13, 14, 255, 1 << 16, 1 << 31, (1 << 32) - 1)
U64_EDGES = (1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)


def replaced(name: str, raw: bytes) -> bytes:
    b = valid()
    at, size = b.fields[name]
    assert len(raw) == size, name
    b.data[at : at + size] = raw
    return bytes(b.data)


def truncations() -> Iterator[Case]:
    b = valid()
    for name, (at, size) in b.fields.items():
        every = range(at, at + size)
        for cut in every if name.endswith("/value") else {every[0], every[size // 2], every[-1]}:
            if 0 < cut < len(b.data):
                yield Case(
                    f"cut at {cut} in {name}", bytes(b.data[:cut]), "truncated|needs|leaves|not a GGUF"
                )


def headers() -> Iterator[Case]:
    for magic in (b"FUGG", b"gguf", b"GGML", b"ggjt", b"\0\0\0\0", b"PK\3\4"):
        yield Case(f"magic {magic!r}", replaced("magic", magic), "not a GGUF file")
    for version in (0, 1, 4, 255, 0xFFFFFFFF):
        yield Case(f"version {version}", replaced("version", struct.pack("<I", version)), "GGUF version")
    for version in (2, 3):
        yield Case(f"big-endian {version}", replaced("version", struct.pack(">I", version)), "big-endian")
    for count in U64_EDGES:
        raw = struct.pack("<Q", count)
        yield Case(f"{count} tensors", replaced("n_tensors", raw), "tensors, at most")
        yield Case(f"{count} keys", replaced("n_keys", raw), "keys, at most")
    for count in (1000, 5000):
        yield Case(f"{count} tensors", replaced("n_tensors", struct.pack("<Q", count)), "truncated")
        yield Case(f"{count} keys", replaced("n_keys", struct.pack("<Q", count)), "truncated")
    yield Case("one key too many", replaced("n_keys", struct.pack("<Q", 18)), "tensor name")
    yield Case("one tensor too many", replaced("n_tensors", struct.pack("<Q", 5)), "tensor name of 0 bytes")


def lengths_and_types() -> Iterator[Case]:
    b = valid()
    for name, (_, size) in b.fields.items():
        owner, _, what = name.rpartition("/")
        if what == "length":
            for value in (0, 65536, *U64_EDGES):
                yield Case(
                    f"{name} {value}",
                    replaced(name, struct.pack("<Q", value)),
                    f"of {value} bytes, need 1 to",
                )
        if what == "count":
            for value in U64_EDGES:
                yield Case(f"{name} {value}", replaced(name, struct.pack("<Q", value)), "truncated", owner)
        if what in ("type", "element") and b.fields.get(f"{owner}/n_dims") is None:
            for value in U32_EDGES:
                yield Case(
                    f"{name} {value}", replaced(name, struct.pack("<I", value)), f"unknown .* {value}", owner
                )
        if what == "element":
            yield Case(f"{name} nested", replaced(name, struct.pack("<I", ARRAY)), "array of arrays", owner)
        if what == "name":
            yield Case(f"{name} not UTF-8", replaced(name, b"\xff" * size), "not UTF-8")
            yield Case(f"{name} with NUL", replaced(name, b"\0" * size), "NUL")
    for value in U64_EDGES:
        word = struct.pack("<Q", value) + b"a word"
        yield Case(f"word of {value} bytes", replaced("word/value", word), "needs", "word")
        words = struct.pack("<Q", 3) + b"one" + struct.pack("<QQ", 0, value) + b"three"
        yield Case(
            f"last of words of {value} bytes", replaced("words/value", words), "string 2 of 3 needs", "words"
        )


def values() -> Iterator[Case]:
    for value in (2, 128, 255):
        yield Case(f"bool {value}", replaced("flag/value", bytes([value])), f"bool is {value}", "flag")
        yield Case(
            f"bools {value}", replaced("flags/value", bytes([1, 0, value])), f"bool is {value}", "flags"
        )
    alignment = "general.alignment"
    for value in (0, 1, 2, 4, 3, 24, 33, 63, 65, (1 << 32) - 1):
        raw = struct.pack("<I", value)
        yield Case(f"alignment {value}", replaced(f"{alignment}/value", raw), f"alignment {value}", alignment)
    for kind in (I32, F32):
        raw = struct.pack("<I", kind)
        yield Case(f"alignment of type {kind}", replaced(f"{alignment}/type", raw), "need UINT32", alignment)
    yield Case(
        "alignment beyond the file", replaced(f"{alignment}/value", struct.pack("<I", 1 << 31)), "leaves"
    )
    yield Case("duplicate key", replaced("i8/name", b"u8"), "duplicate key", "u8")
    yield Case("duplicate tensor", replaced("matrix/name", b"vector"), "duplicate tensor", "vector")


def tensors() -> Iterator[Case]:
    for n_dims in (0, 5, 255, 1 << 31, (1 << 32) - 1):
        raw = struct.pack("<I", n_dims)
        yield Case(f"{n_dims} dimensions", replaced("matrix/n_dims", raw), f"{n_dims} dimensions", "matrix")
    for name, n in (("vector", 1), ("matrix", 2), ("cube", 3), ("four", 4)):
        for axis in range(n):
            for extent in (0, -1, -(1 << 63)):
                raw = struct.pack("<q", extent)
                yield Case(
                    f"{name} ne{axis} {extent}", replaced(f"{name}/ne{axis}", raw), f"is {extent}", name
                )
            for extent in (1 << 20, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 256):
                raw = struct.pack("<q", extent)
                yield Case(
                    f"{name} ne{axis} {extent}", replaced(f"{name}/ne{axis}", raw), "leaves the file", name
                )
    b = valid()
    for axis in range(3):
        at, _ = b.fields[f"cube/ne{axis}"]
        b.data[at : at + 8] = struct.pack("<q", 1 << 32)
    yield Case("product that wraps to zero", bytes(b.data), "leaves the file", "cube")
    for extent in (1, 31, 33, 63, 65):
        yield Case(
            f"rows of {extent}", replaced("matrix/ne0", struct.pack("<q", extent)), "whole Q8_0", "matrix"
        )
    for extent in (32, 255, 257):
        yield Case(f"rows of {extent}", replaced("four/ne0", struct.pack("<q", extent)), "whole Q4_K", "four")
    for kind in (4, 5, 24, 28, 31, 38, 41, 255, -1, -(1 << 31), (1 << 31) - 1):
        raw = struct.pack("<i", kind)
        yield Case(f"tensor type {kind}", replaced("vector/type", raw), f"tensor type {kind}", "vector")
    for offset in (1, 4, 8, 32, 63, 65, (1 << 64) - 1):
        raw = struct.pack("<Q", offset)
        yield Case(
            f"offset {offset}", replaced("vector/offset", raw), "no multiple of the alignment", "vector"
        )
    for offset in (512, 1 << 20, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 64):
        raw = struct.pack("<Q", offset)
        yield Case(f"offset {offset}", replaced("matrix/offset", raw), "leaves the file", "matrix")
    for offset in (0, 64, 192, 256):
        raw = struct.pack("<Q", offset)
        yield Case(f"cube at {offset}", replaced("cube/offset", raw), "overlaps")
    yield Case("two tensors at one place", replaced("four/offset", struct.pack("<Q", 320)), "overlaps")


def corpus() -> Mapping[str, Case]:
    """All cases by name; equal bytes count once."""
    cases: dict[bytes, Case] = {}
    for make in (truncations, headers, lengths_and_types, values, tensors):
        for case in make():
            cases.setdefault(case.data, case)
    named = {case.name: case for case in cases.values()}
    assert len(named) == len(cases)
    return named


CORPUS = corpus()


def touch(file: GgufFile) -> None:
    """Look at everything a file declares."""
    for key in file.metadata:
        value = file.metadata[key]
        if not isinstance(value, (int, float, str)):
            list(value)
    for name in file.tensors:
        bytes(file.tensor_data(name)[-1:])


def refusal(path: Path) -> tuple[KvStreamError, int]:
    """Open and touch a file that must be refused; return the error and the peak of allocated bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(KvStreamError) as caught, GgufFile.open(path) as file:
            touch(file)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_corpus_has_two_hundred_cases_made_from_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "valid.gguf"
    path.write_bytes(valid().data)
    with GgufFile.open(path) as file:
        touch(file)
        assert len(file.metadata) == 17
        assert list(file.tensors) == ["vector", "matrix", "cube", "four"]
    assert len(CORPUS) >= 200


@pytest.mark.parametrize("name", CORPUS)
def test_malformed_file_is_refused_with_offset_and_key(tmp_path: Path, name: str) -> None:
    case = CORPUS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(case.data)
    error, peak = refusal(path)
    assert isinstance(error, FormatError)
    assert re.search(case.message, str(error)), str(error)
    assert error.offset is not None and 0 <= error.offset <= len(case.data)
    assert f"offset {error.offset}" in str(error)
    if case.key is not None:
        assert error.key == case.key and repr(case.key) in str(error)
    assert peak < LIMIT_BYTES


@pytest.mark.parametrize("raw", [b"\xff word", b"a w\xc3", b"\xed\xa0\x80abc", b"\xf8\x88\x80\x80\x80a"])
def test_string_that_is_not_utf8_is_refused_on_access(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(replaced("word/value", text(raw.ljust(6, b"x")[:6])))
    error, _ = refusal(path)
    assert isinstance(error, FormatError)
    assert error.key == "word" and "UTF-8" in str(error)


def sparse(path: Path, head: bytes, n_bytes: int) -> Path:
    path.write_bytes(head)
    os.truncate(path, n_bytes)
    return path


def test_counts_that_a_huge_file_could_hold_are_refused_before_allocating(tmp_path: Path) -> None:
    size = 1 << 40
    head = b"GGUF" + struct.pack("<I", 3)
    array = struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<II", ARRAY, STRING)
    for name, data, message in (
        ("tensors", head + struct.pack("<QQ", 1 << 33, 0), "8589934592 tensors, at most"),
        ("keys", head + struct.pack("<QQ", 0, 1 << 33), "8589934592 keys, at most"),
        ("strings", head + array + struct.pack("<Q", 1 << 36), "more than 2097152 strings"),
        (
            "one string",
            head + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IQ", STRING, 1 << 39),
            "string of 549755813888 bytes, at most",
        ),
    ):
        error, peak = refusal(sparse(tmp_path / f"{name}.gguf", data, size))
        assert isinstance(error, FormatError) and message in str(error)
        assert peak < 1 << 20


def test_the_largest_tables_within_the_limits_stay_below_64_mib(tmp_path: Path) -> None:
    # A string costs its end in an int64 array and nothing else, so that a part of them stands for all.
    n_strings, n_tensors = 1 << 16, MAX_TENSORS
    b = Builder()
    b.header(n_tensors, 1)
    b.key("words", ARRAY, bytes(8 * n_strings), STRING, n_strings)
    rows = [
        text(f"{i:08d}{'x' * 112}".encode()) + struct.pack("<IqqqqiQ", 4, 300, 300, 300, 300 + i, 0, i << 40)
        for i in range(n_tensors)
    ]
    path = tmp_path / "large.gguf"
    path.write_bytes(bytes(b.data) + b"".join(rows))
    error, peak = refusal(path)
    assert "leaves the file" in str(error)
    assert peak + 8 * (MAX_STRINGS - n_strings) < LIMIT_BYTES


def test_names_beyond_their_budget_are_refused(tmp_path: Path) -> None:
    b = Builder()
    b.header(0, 70)
    for i in range(70):
        b.key(f"{i:02d}" + "x" * 65000, U8, b"\0")
    path = tmp_path / "names.gguf"
    path.write_bytes(b.data)
    error, peak = refusal(path)
    assert "keys and names need more than" in str(error)
    assert peak < LIMIT_BYTES


def test_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        GgufFile.open(tmp_path / "absent.gguf")
    with pytest.raises(NotFound):
        GgufFile.open("nul\0byte.gguf")
    with pytest.raises(FormatError, match="is a directory"):
        GgufFile.open(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(FormatError, match="is empty"):
        GgufFile.open(tmp_path / "empty.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        GgufFile.open(tmp_path / "pipe.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        GgufFile.open("/dev/zero")


SHARD_KEYS = {
    "split.no": ValueType.UINT16,
    "split.count": ValueType.UINT16,
    "split.tensors.count": ValueType.INT32,
}


def write_shard(
    folder: Path,
    number: int,
    count: int,
    tensor: str,
    changed: Mapping[str, int | None] = MappingProxyType({}),
) -> Path:
    """Write shard ``number`` (from 1) of ``count``; ``changed`` replaces or, with None, leaves out split
    keys.
    """
    values = {"no": number - 1, "count": count, "tensors.count": count, **changed}
    writer = GgufWriter()
    for name, value in values.items():
        key = f"split.{name}"
        if value is not None:
            writer.add(key, value, SHARD_KEYS[key])
    writer.add_tensor(tensor, [[1.0, 2.0]])
    path = folder / f"m-{number:05d}-of-{count:05d}.gguf"
    writer.write(path)
    return path


def test_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    first, last = write_shard(tmp_path, 1, 3, "a"), write_shard(tmp_path, 3, 3, "c")
    for path in (first, last):
        with pytest.raises(FormatError, match=r"shard is missing: .*m-00002-of-00003"):
            GgufFile.open(path)
    first.unlink()
    with pytest.raises(FormatError, match=r"shard is missing: .*m-00001-of-00003"):
        GgufFile.open(last)


@pytest.mark.parametrize(
    ("number", "changed", "key"),
    [
        (1, {"count": 3}, "split.count"),
        (2, {"count": 3}, "split.count"),
        (1, {"count": 0}, "split.count"),
        (1, {"count": None}, "split.count"),
        (2, {"count": None}, "split.count"),
        (1, {"no": 1}, "split.no"),
        (2, {"no": 0}, "split.no"),
        (2, {"no": 7}, "split.no"),
        (1, {"no": None}, "split.no"),
        (2, {"no": None}, "split.no"),
        (1, {"tensors.count": 3}, "split.tensors.count"),
        (1, {"tensors.count": -1}, "split.tensors.count"),
    ],
)
def test_shard_whose_keys_disagree_is_refused(
    tmp_path: Path, number: int, changed: dict[str, int | None], key: str
) -> None:
    paths = [write_shard(tmp_path, n, 2, f"t{n}", changed if n == number else {}) for n in (1, 2)]
    with pytest.raises(FormatError) as caught:
        GgufFile.open(paths[0])
    assert caught.value.key == key


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, 2, "same")
    with pytest.raises(FormatError, match="again in m-00002-of-00002") as caught:
        GgufFile.open(write_shard(tmp_path, 2, 2, "same"))
    assert caught.value.key == "same"


def test_damage_in_a_later_shard_names_the_shard(tmp_path: Path) -> None:
    first, second = write_shard(tmp_path, 1, 2, "a"), write_shard(tmp_path, 2, 2, "b")
    second.write_bytes(second.read_bytes()[:60])
    with pytest.raises(FormatError, match=r"m-00002-of-00002\.gguf: truncated") as caught:
        GgufFile.open(first)
    assert caught.value.offset is not None


def test_shards_share_the_limits_of_one_file(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, 2, "a")
    second = write_shard(tmp_path, 2, 2, "b")
    b = Builder()
    b.header(MAX_TENSORS, 0)
    sparse(second, bytes(b.data), 1 << 24)
    with pytest.raises(FormatError, match=f"declares {MAX_TENSORS} tensors, at most {MAX_TENSORS - 1}"):
        GgufFile.open(second)


def test_shard_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1, 2, "a").rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match="says 2 shards, its name says 1"):
        GgufFile.open(path)


@pytest.mark.parametrize("count", [600, 99999])
def test_more_shards_than_can_be_mapped_are_refused(tmp_path: Path, count: int) -> None:
    writer = GgufWriter()
    writer.add("split.count", count)
    path = tmp_path / f"m-00001-of-{count:05d}.gguf"
    writer.write(path)
    with pytest.raises(FormatError, match=f"{count} shards, need 1 to"):
        GgufFile.open(path)


def test_writer_refuses_what_would_not_read_back() -> None:
    writer = GgufWriter()
    writer.add("k", 1)
    for refused in (
        lambda: writer.add("k", 2),
        lambda: writer.add("x", 256, ValueType.UINT8),
        lambda: writer.add("x", 1.5, ValueType.UINT8),
        lambda: writer.add("x", "1", ValueType.UINT8),
        lambda: writer.add("x", 1, ValueType.STRING),
        lambda: writer.add_tensor("t", b"\0" * 8),
        lambda: writer.add_tensor("t", b"\0" * 8, GgmlType.F32, (3,)),
        lambda: writer.add_tensor("t", [[1.0, 2.0]], GgmlType.Q8_0),
        lambda: writer.add_tensor("t", [], GgmlType.F32),
        lambda: writer.add("x", 1, ValueType.ARRAY),
        lambda: writer.add("x", 2, ValueType.BOOL),
        lambda: writer.add("x", 1e39, ValueType.FLOAT32),
        lambda: writer.add_array("x", [], ValueType.ARRAY),
        lambda: writer.add_array("x", [1, -1], ValueType.UINT64),
        lambda: writer.add_array("x", ["1", 1], ValueType.STRING),
        lambda: GgufWriter(alignment=48),
    ):
        with pytest.raises(InvalidArgument):
            refused()
