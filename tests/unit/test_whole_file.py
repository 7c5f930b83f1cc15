"""A file is replaced whole or not at all, and nothing but a file is replaced."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pykvstream.errors import InvalidArgument
from pykvstream.runtime.whole_file import replacing


@pytest.fixture
def careless() -> Iterator[None]:
    """A umask that lets everybody in."""
    before = os.umask(0)
    yield
    os.umask(before)


def write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(str(path))


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


MAKERS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "link": link_to_a_pipe,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    MAKERS[kind](tmp_path / "name")
    before = sorted((each.name, each.lstat().st_ino) for each in tmp_path.iterdir())
    with pytest.raises(InvalidArgument, match="is not a regular file"):
        write(tmp_path / "name", b"new")
    assert sorted((each.name, each.lstat().st_ino) for each in tmp_path.iterdir()) == before


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_stays_one_and_its_target_is_replaced(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if is_there:
        (folder / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("elsewhere/target")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (folder / "target").read_bytes() == b"new"
    assert [each.name for each in folder.iterdir()] == ["target"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "link"]


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o666, 0o640])
def test_a_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(mode)
    write(tmp_path / "file", b"new")
    assert mode_of(tmp_path / "file") == mode and (tmp_path / "file").read_bytes() == b"new"


def test_a_new_file_is_for_its_owner_alone(tmp_path: Path, careless: None) -> None:
    write(tmp_path / "file", b"new")
    assert mode_of(tmp_path / "file") == 0o600


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]
