"""The parts of ``tools/gpu.sh``: what they look for is what is printed, they end in time, and go on where they were."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from tests.bench import shaped_file
from tests.bench.cuda_decode import report
from tests.gpu.long_promises import Judge

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_parts.py"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_parts", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_parts", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return module


def test_every_command_fits_into_nine_minutes_and_names_are_unique(tool: ModuleType) -> None:
    names = [part.name for part in tool.PARTS]
    assert len(set(names)) == len(names)
    for part in tool.PARTS:
        assert part.commands and all(0 < each.seconds <= 540 and each.figures for each in part.commands)


def test_figures_are_found_in_what_the_benches_print(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("resident", "streamed"):
        for rows in (1, 6):
            report(f"{kind}, {rows} rows", 0.0014, rows, 10**9)
    text = capsys.readouterr().out + "    1023.4 us    91.0 of all, 1 rows\n      12.0 us     2.0 idle\n"
    found = [tool.resident(6, "x"), tool.streamed(1, "x"), tool.launched(1, "x")]
    command = tool.Command(1, (), tuple(found))
    lines = tool.figures_of(tool.Part("some", "", (command,)), command, text)
    assert len(lines) == 3 and lines[0].startswith("some: resident, 6 rows: 1.400 ms a pass 4285.7 tokens/s")
    assert lines[2] == "some: on the card, copies too, 1 rows: 1023.4 us 91.0 | predicted x"


def test_every_line_of_long_promises_is_a_figure(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge()
    for said in ("a", "b"):
        judge.hear("model 4096", "512.0 MiB", said, "65 rows")
    command = tool.long(1, "MODEL")
    lines = tool.figures_of(tool.Part("long", "", (command,)), command, capsys.readouterr().out)
    assert [" same 65 rows" in line for line in lines] == [True, False] and "DIFFERENT" in lines[1]


def test_files_in_shapes_are_written_once(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.gguf"
    with mock.patch.dict(shaped_file.SHAPES, {"small": lambda to: to.write_bytes(b"x")}):
        assert shaped_file.main(["small", str(path)]) == 0 and path.read_bytes() == b"x"
    path.write_bytes(b"other")
    assert shaped_file.main(["small", str(path)]) == 0 and path.read_bytes() == b"other"
    command = tool.shaped(1, "small", path)
    lines = tool.figures_of(tool.Part("long", "", (command,)), command, capsys.readouterr().out)
    assert len(lines) == 2 and not any(tool.NOTHING in line for line in lines)


def test_what_is_done_is_not_run_again_and_what_says_nothing_is_not_done(tool: ModuleType, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'a').write('x'); print('figure 7')"
    good = tool.Part("good", "", (tool.Command(1, ("-c", code), (tool.Figure("n", r"figure (\d)", "7"),)),))
    mute = tool.Part("mute", "", (tool.Command(1, ("-c", code + " "), (tool.Figure("n", "nothing", "7"),)),))
    assert tool.carry_out([good], 60) == 0 and tool.carry_out([good], 60) == 0 and mark.read_text() == "x"
    assert tool.carry_out([mute], 60) == 1 and tool.carry_out([mute], 60) == 1 and mark.read_text() == "xxx"


def test_a_command_ends_with_the_time_that_is_left(tool: ModuleType) -> None:
    slow = tool.Command(1, ("-c", "import time; time.sleep(100)"), (tool.Figure("n", "x", ""),))
    assert tool.carry_out([tool.Part("slow", "", (slow,))], 2) == 3
    assert tool.carry_out([tool.Part("slow", "", (slow,))], 0) == 3
