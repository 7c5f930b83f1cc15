"""Images of kernels on disk: found again, and what is not whole counts as missing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import KernelKey, card_flags, kernel_sources, open_device
from pykvstream.core.device import DeviceFlag
from pykvstream.errors import InvalidArgument, Unsupported
from pykvstream.kernels import ImageCache
from pykvstream.kernels.cache import digest_of

KEY = KernelKey("matmul", (("KVS_T0", 8), ("KVS_TILES", 1)), 90)


def test_an_image_is_found_again(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "made" / "when needed")
    assert cache.load("abc") is None
    cache.store("abc", b"image")
    assert cache.load("abc") == b"image" and cache.load("abd") is None
    cache.store("abc", b"another")
    assert cache.load("abc") == b"another"
    assert [path.name for path in cache.folder.iterdir()] == ["abc.cubin"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "short"])
def test_a_damaged_image_counts_as_missing(tmp_path: Path, damage: str) -> None:
    cache = ImageCache(tmp_path)
    cache.store("abc", bytes(1000))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[500] ^= damage == "flipped"
    path.write_bytes({"cut": data[:-1], "flipped": data, "empty": b"", "short": data[:10]}[damage])
    assert cache.load("abc") is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = ImageCache(tmp_path / "file" / "folder")
    cache.store("abc", b"image")
    assert cache.load("abc") is None


def test_a_digest_tells_apart_whatever_an_image_is_made_of() -> None:
    others = [
        digest_of("source", KEY, "options"),
        digest_of("source!", KEY, "options"),
        digest_of("source", KEY, "other"),
        digest_of("source", KernelKey(KEY.source, KEY.macros, 89), "options"),
        digest_of("source", KernelKey(KEY.source, KEY.macros[:1], 90), "options"),
        digest_of("source", KernelKey(KEY.source, (("KVS_T0", 2), KEY.macros[1]), 90), "options"),
    ]
    assert len(set(others)) == len(others)


def test_the_library_holds_sources_without_includes() -> None:
    sources = kernel_sources()
    assert {"attend", "matmul", "kv_write", "delta"} <= set(sources)
    assert [name for name, text in sources.items() if "#include" in text or 'extern "C"' not in text] == []


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "CUDA", "cpu:0"])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="supported: cpu, cuda, cuda:N"):
        open_device(name)


@pytest.mark.parametrize("settings", ["", "early", "early=", "early=no", "early=off,early=on", "speed=on"])
def test_a_setting_of_a_card_that_is_not_known_is_refused(settings: str) -> None:
    with pytest.raises(InvalidArgument, match="supported, each once: early="):
        open_device(f"cuda:0,{settings}")


def test_settings_of_a_card_are_flags() -> None:
    assert card_flags("early=on") == DeviceFlag.NONE and card_flags("early=off") == DeviceFlag.NO_EARLY
