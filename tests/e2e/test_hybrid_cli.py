"""The command line on hybrids: what ``inspect`` and ``plan`` say of them, and that ``generate`` keeps to the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykvstream.cli import main
from tests.random_hybrid import Experts, HybridShape, write_random_hybrid

SHAPE = HybridShape(
    n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=300, n_mtp=1,
    experts=Experts(4, 2, 32, 32),
)  # fmt: skip
CHANNELS, VALUE_HEADS = 16 * (2 + 2 + 6), 6
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    write_random_hybrid(path, SHAPE)
    return str(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> tuple[int, str]:
        code = main(argv)
        return code, capsys.readouterr().out

    return call


def as_json(run: Run, *argv: str) -> Any:
    code, out = run(*argv, "--json")
    assert code == 0
    return json.loads(out)


def test_inspect_tells_layers_apart(run: Run, model: str) -> None:
    found = as_json(run, "inspect", model)["hybrid"]
    assert found["full_attention_layers"] == [3, 7] and found["recurrent_layers"] == [0, 1, 2, 4, 5, 6]
    assert found["mtp_blocks"] == [8] and found["experts"]["n_used"] == 2
    assert found["log_bytes_per_row"] == 6 * 4 * (CHANNELS + 2 * VALUE_HEADS)
    assert found["state_bytes"] == 6 * 4 * (VALUE_HEADS * 16 * 16 + 3 * CHANNELS)
    code, out = run("inspect", model)
    assert code == 0 and "full_attention_layers" in out and "[3, 7]" in out


def test_inspect_says_why_a_hybrid_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_hybrid(path, SHAPE, keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    assert "yarn" in as_json(run, "inspect", str(path))["hybrid"]["refused"]


def test_plan_counts_state_and_log(run: Run, model: str) -> None:
    plan = as_json(run, "plan", model, "-c", "1024")
    assert plan["layers"] == {"full attention": 2, "recurrent": 6, "mtp": 1} and plan["n_layers"] == 2
    assert plan["log_rows"] == 64 and plan["log_bytes"] == 2 * 64 * 6 * 4 * (CHANNELS + 2 * VALUE_HEADS)
    assert plan["state_bytes"] > plan["log_bytes"]
    parts = ("arena_bytes", "history_bytes", "weight_bytes", "state_bytes", "state_bytes", "checkpoint_bytes")
    assert plan["host"]["need_bytes"] == sum(plan[part] for part in parts) + plan["stage_bytes"]
    assert plan["checkpoint_slots"] == 32 and plan["checkpoint_bytes"] == 32 * 6 * 4 * (6 * 16 * 16 + 3 * CHANNELS)
    assert plan["stage_bytes"] == 2 * plan["checkpoint_bytes"] // 32 // 6
    none = as_json(run, "plan", model, "-c", "1024", "--checkpoint-mib", "0")
    assert none["checkpoint_slots"] == none["stage_bytes"] == 0
    saved = plan["checkpoint_bytes"] + plan["stage_bytes"]
    assert none["host"]["need_bytes"] == plan["host"]["need_bytes"] - saved
    code, out = run("plan", model, "-c", "1024")
    assert code == 0 and "recurrent state" in out and "2 full attention, 6 recurrent, 1 mtp" in " ".join(out.split())


def test_generate_runs_in_the_smallest_arena(run: Run, model: str) -> None:
    smallest = as_json(run, "plan", model, "-c", "1024")["smallest_arena_mib"]
    argv = ("generate", model, "-p", "hello " * 60, "-c", "1024", "-n", "8", "-s", "3", "--ignore-eos", "--no-progress")
    small = as_json(run, *argv, "--arena-mib", repr(smallest))
    assert small["logits_sha256"] == as_json(run, *argv)["logits_sha256"]
