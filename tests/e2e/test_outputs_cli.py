"""What commands write beside an answer: nothing that they read, nothing twice, and each whatever becomes of another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pykvstream.cli import generate, main
from pykvstream.engine import Model
from pykvstream.errors import DeviceError
from tests.models import write_random_model

QUICK = ("-p", "hello", "-t", "1", "-ub", "64", "-s", "4", "-n", "3")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "random.gguf"
    write_random_model(path, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=320, ctx=2048, seed=5)
    return path


@pytest.mark.parametrize("flag", ["--trace", "--embeddings-nextn", "--save-session"])
def test_no_output_replaces_the_model(model: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    link = model.parent / "link"
    link.symlink_to(model)
    for name in (model, link):
        assert main(["generate", str(model), *QUICK, flag, str(name)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and str(name) in err
    assert model.read_bytes() == before


def test_two_outputs_are_two_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = str(tmp_path / "same")
    assert main(["generate", str(model), *QUICK, "--trace", same, "--save-session", same]) == 1
    assert "--save-session and --trace would write the same file" in capsys.readouterr().err
    assert not os.path.exists(same)


def test_a_pack_replaces_no_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["kernels", "pack", str(model), "--arch", "sm_90", "-o", str(model)]) == 1
    assert "is the model" in capsys.readouterr().err and model.read_bytes() == before


def test_a_pack_in_no_folder_is_refused_by_its_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "pack", str(model), "--arch", "sm_90", "-o", "/nonexistent/folder/pack"]) == 1
    assert "'/nonexistent/folder/pack'" in capsys.readouterr().err


def test_nothing_reads_a_pack_without_a_card(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["kernels", "check", str(model), "--arch", "sm_90", "--kernels", "/nonexistent.pack"]
    assert main(argv) == 1
    assert "--kernels" in capsys.readouterr().err


def test_layers_that_stay_off_the_card_make_no_pack(model: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    assert main(["kernels", "pack", str(model), "--arch", "sm_90", "-ngl", "0", "-o", str(pack)]) == 1
    assert not pack.exists()


@pytest.mark.parametrize("flag", ["--trace", "--embeddings-nextn", "--save-session"])
def test_a_pipe_behind_a_link_is_refused_before_the_model_is_opened(flag: str) -> None:
    program = [sys.executable, "-m", "pykvstream", "generate", "nonexistent.gguf", *QUICK, flag, "/dev/stdout"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "regular file" in ended.stderr


def test_a_timeline_that_cannot_be_written_loses_no_conversation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def full(model: Model, file: Path | None) -> Iterator[None]:
        yield
        raise DeviceError("timeline 't': No space left on device")

    monkeypatch.setattr(generate, "tracing", full)
    session = tmp_path / "kept.session"
    assert main(["generate", str(model), *QUICK, "--save-session", str(session), "--trace", str(tmp_path / "t")]) == 1
    assert "No space left" in capsys.readouterr().err and session.stat().st_size > 0
