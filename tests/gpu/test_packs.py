"""Packs of kernels: written without a card, whole or not at all; read whole or not at all; refused by name."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import CudaPlanner, KernelKey
from pykvstream.errors import FormatError, NotFound, Unsupported
from pykvstream.kernels import Pack, pack_bytes
from tests.gpu.stand_in import COMPILER, MODEL, Driver

IMAGES = [(KernelKey("add", (), 90), b"one"), (KernelKey("norm", (("KVS_A", -3), ("KVS_B", 7)), 90), bytes(range(256)))]
TABLE_AT, ENTRY_BYTES = 96, 312


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    if COMPILER is None:
        pytest.skip("needs cc")
    return Driver.build(tmp_path_factory.mktemp("fake"))


def give(tmp_path: Path, data: bytes) -> int:
    path = tmp_path / "given.pack"
    path.write_bytes(data)
    with CudaPlanner(90) as device, Pack(path) as pack:
        return pack.give(device)


def sealed(data: bytes, n_images: int = len(IMAGES)) -> bytes:
    """The same with a digest of its table that is right."""
    table = data[TABLE_AT : TABLE_AT + n_images * ENTRY_BYTES]
    return data[:64] + hashlib.sha256(data[:64] + table).digest() + data[TABLE_AT:]


def test_a_pack_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = pack_bytes(IMAGES)
    assert give(tmp_path, data) == 0 and sealed(data) == data
    assert len(data) % 64 == 0 and pack_bytes(IMAGES + IMAGES) == data
    assert give(tmp_path, pack_bytes([])) == 0


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"X", "no pack of kernels"),
        (8, b"\x02", "version 2 of the format, this library reads version 1"),
        (12, b"\xff\xff", "says [0-9]+ bytes with 65535 kernels"),
        (16, b"\x00\x01", "says 256 bytes"),
        (40, b"????", "of other kernels, of an older or newer version"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path: Path, at: int, value: bytes, says: str) -> None:
    data = pack_bytes(IMAGES)
    with pytest.raises(FormatError, match=f"given.pack'.*{says}"):
        give(tmp_path, sealed(data[:at] + value + data[at + len(value) :]))


@pytest.mark.parametrize("n_bytes", [1, 95, 96, 400, 720, -1])
def test_a_cut_pack_is_refused(tmp_path: Path, n_bytes: int) -> None:
    with pytest.raises(FormatError):
        give(tmp_path, pack_bytes(IMAGES)[:n_bytes])


def test_any_flipped_byte_of_header_and_table_is_noticed(tmp_path: Path) -> None:
    data = pack_bytes(IMAGES)
    path = tmp_path / "given.pack"
    with CudaPlanner(90) as device:
        for at in random.Random(0).sample(range(TABLE_AT + 2 * ENTRY_BYTES), 200):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with Pack(path) as pack, pytest.raises(FormatError):
                pack.give(device)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (264, (0).to_bytes(8, "little")),
        (264, (1 << 40).to_bytes(8, "little")),
        (264, (65).to_bytes(8, "little")),
        (272, (1 << 64) - 64),
        (272, 0),
        (256, 9),
        (0, b"x" * 32),
    ],
)
def test_a_table_that_lies_is_refused_though_its_digest_is_right(tmp_path: Path, at: int, value: bytes | int) -> None:
    data = pack_bytes(IMAGES)
    size = 4 if at == 256 else 8
    new = value if isinstance(value, bytes) else value.to_bytes(size, "little")
    where = TABLE_AT + at
    with pytest.raises(FormatError, match="entry 0 of its table lies outside"):
        give(tmp_path, sealed(data[:where] + new + data[where + len(new) :]))


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.pack"):
        Pack(tmp_path / "nowhere.pack")
    (tmp_path / "empty.pack").write_bytes(b"")
    with pytest.raises(FormatError, match=r"empty\.pack"):
        Pack(tmp_path / "empty.pack")


def test_a_device_without_a_card_plans_and_refuses_the_rest() -> None:
    with pytest.raises(Unsupported, match="sm_61 is not supported, the oldest architecture is sm_75"):
        CudaPlanner(61)
    with CudaPlanner(120) as device:
        assert device.info.arch == 120 and device.kernels() == []


PACKED = MODEL + """
from pykvstream.cli import main
pack = Path(folder) / "kernels.pack"
def run(*arguments):
    code = main([str(each) for each in arguments])
    assert code == 0, code
def refuse(*arguments):
    assert main([str(each) for each in arguments]) == 1
def no_compiler():
    raise __import__("pykvstream.errors").errors.Unsupported("no compiler for kernels: none here")
"""


def test_a_pack_serves_a_model_without_cache_or_compiler(fake: Driver) -> None:
    code = PACKED + """
run("kernels", "pack", path, "--arch", "sm_90,75", "-c", "1000", "-o", pack)
provider.default_folder = lambda: Path(tempfile.mkdtemp())
provider.load_compiler = no_compiler
run("kernels", "check", path, "-c", "1000", "--kernels", pack)
with Model.open(path, device="cuda", ctx_size=1000, kernels=pack) as model, model.session() as session:
    session.forward([1, 2, 3])
    print("ran")
"""
    first, *listed, last, ran = fake.run(code).splitlines()
    n_kernels = len(listed)
    assert int(first.split()[0]) > n_kernels > 10
    assert last.startswith(f"{n_kernels} kernels: {n_kernels} came from packs, 0 were at hand, 0 compiled")
    assert ran == "ran"


def test_what_a_pack_lacks_comes_from_elsewhere_or_is_refused_by_name(fake: Driver) -> None:
    code = PACKED + """
run("kernels", "pack", path, "--arch", "sm_90", "-c", "1000", "-o", pack)
run("kernels", "check", path, "-c", "1000", "-ctk", "q4_1", "--kernels", pack)
provider.default_folder = lambda: Path(tempfile.mkdtemp())
provider.load_compiler = no_compiler
try:
    Model.open(path, device="cuda", ctx_size=1000, cache_type_v="iq4_nl", kernels=[pack])
except KvStreamError as error:
    print(type(error).__name__, error)
"""
    *_, counts, refused = fake.run(code).splitlines()
    n_kernels, n_packed = int(counts.split()[0]), int(counts.split()[2])
    assert 0 < n_packed < n_kernels and f"{n_kernels - n_packed} compiled" in counts
    assert refused.startswith("Unsupported kernel ")
    for part in (
        "for sm_90 KVS_TYPE_K=8 KVS_TYPE_V=20",
        "kernels.pack'",
        "no compiler for kernels: none here",
        "kernels pack MODEL --arch sm_90 -o FILE",
    ):
        assert part in refused


def test_a_pack_with_a_damaged_image_gives_nothing(fake: Driver) -> None:
    code = PACKED + """
from pykvstream.core.cuda import CudaDevice
from pykvstream.runtime.target import Blueprint
run("kernels", "pack", path, "--arch", "sm_90", "-c", "1000", "-o", pack)
data = bytearray(pack.read_bytes())
data[-64] ^= 1
pack.write_bytes(data)
before = provider.Pack.give
def give(self, device):
    try:
        return before(self, device)
    finally:
        print(sum(has_image for _, has_image in device.kernels()), "given of", len(device.kernels()))
provider.Pack.give = give
refuse("kernels", "check", path, "-c", "1000", "--kernels", pack)
"""
    lines = fake.run(code).splitlines()
    assert lines[-1].startswith("0 given of ")


def test_a_pack_is_written_whole_or_not_at_all(fake: Driver) -> None:
    code = PACKED + """
import os
pack.write_bytes(b"before")
provider.compile_image = lambda core, source, key: (_ for _ in ()).throw(
    __import__("pykvstream.errors").errors.DeviceError("it does not compile"))
refuse("kernels", "pack", path, "--arch", "sm_90", "-c", "1000", "-o", pack)
print(pack.read_bytes(), sorted(os.listdir(folder)))
"""
    assert fake.run(code).splitlines()[-1] == "b'before' ['kernels.pack', 'model.gguf']"
