"""The byte fuzzers run for a moment as plain tests; ``--seconds`` runs each for longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "fuzz"


@pytest.mark.parametrize("script", ["gguf_bytes.py", "saved_bytes.py"])
def test_mutated_files_open_or_are_refused(tmp_path: Path, script: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FUZZ / script), "--seconds", "2", "--seed", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    line = re.search(
        r"(\d+) runs, \d+ runs/s, (\d+) opened, (\d+) refused, seed 1: ok$", result.stdout.strip()
    )
    assert line is not None, result.stdout
    assert int(line[2]) > 0 and int(line[3]) > int(line[2]) // 2
    assert list(tmp_path.iterdir()) == []
