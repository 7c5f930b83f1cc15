"""Hybrids on a device that forgives nothing: the tape of a 27B, and one small enough to be driven through everything.

Files are outlines: the tensors of the model and no values, since nothing is computed.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.trace import TraceReport
from pykvstream.errors import NotFound
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase
from tests.tracing import CTX_TOKENS, H200, TraceRig, open_trace_rig, random_costs
from tools.hybrid_outline import OUTLINE_27B, Outline, write_outline

SMALL = replace(OUTLINE_27B, name="small", n_embd=256, n_layers=8, n_heads=4, n_kv_heads=2, n_ff=512, n_value_heads=16,
                n_vocab=512, ctx=4096)  # fmt: skip


def outline_file(folder: Path, outline: Outline) -> Path:
    path = folder / f"{outline.name}.gguf"
    write_outline(path, outline)
    return path


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outline_file(tmp_path_factory.mktemp("outline"), OUTLINE_27B)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outline_file(tmp_path_factory.mktemp("outline"), SMALL)


def test_an_outline_is_as_long_as_the_model_and_takes_no_room(big: Path) -> None:
    stat = big.stat()
    assert stat.st_size > 15_000_000_000
    assert stat.st_blocks * 512 < 1 << 20


def report_of(rig: TraceRig) -> TraceReport:
    assert rig.device.hazards() == []
    return rig.device.report


@pytest.mark.parametrize("residency", [0.0, 0.05, 0.3, 1.0])
def test_tape_of_a_27b_has_no_hazard(big: Path, residency: float) -> None:
    """Prompts of any length, steps, verify passes taken in part, forks and the way back, under costs of any machine."""
    rng = random.Random(int(residency * 100))
    with open_trace_rig(big, residency=residency, costs=H200) as rig:
        rig.prefill(1_500)
        rig.decode(3)
        rig.device.set_costs(random_costs(rng.randrange(1 << 30)))
        verify(rig.session, rng)
        child = rig.session.fork()
        child.forward([1] * 70, logits="none")
        rig.decode(2)
        child.close()
        rig.session.forward([1] * 130, logits="none")
        report = report_of(rig)
        assert report.n_hazards == 0 and report.n_passes > 15
        assert (rig.target.pager_info.streamed_bytes > 0) == (residency < 1)


def verify(session: TokenSession, rng: random.Random) -> None:
    """Draft, keep a part, and go on: what speculation does to the state's log."""
    for _ in range(4):
        n_rows = rng.randint(2, 8)
        before = session.n_cached
        session.forward([1] * n_rows, phase=Phase.DECODE, logits="all")
        session.truncate(before + rng.randint(0, n_rows))


def act(rig: TraceRig, rng: random.Random, sessions: list[TokenSession]) -> None:
    session = rng.choice(sessions)
    action = rng.choice(("prefill", "decode", "verify", "truncate", "fork", "close", "costs"))
    room = CTX_TOKENS - session.n_cached
    if action == "prefill" and room > 8:
        session.forward([1] * rng.randint(1, min(room, 400)), logits="none")
    elif action == "decode" and room > 8:
        for _ in range(rng.randint(1, 5)):
            session.forward([1], phase=Phase.DECODE, logits="none")
    elif action == "verify" and room > 40:
        verify(session, rng)
    elif action == "truncate":
        with suppress(NotFound):
            session.truncate(rng.randint(0, session.n_cached))
    elif action == "fork" and len(sessions) < 3:
        sessions.append(session.fork())
    elif action == "close" and session is not rig.session:
        sessions.remove(session)
        session.close()
    elif action == "costs":
        rig.device.set_costs(random_costs(rng.randrange(1 << 30)))


@pytest.mark.parametrize("seed", range(10))
def test_sessions_of_a_hybrid_that_do_anything_have_no_hazard(small: Path, seed: int) -> None:
    rng = random.Random(seed)
    with open_trace_rig(small, residency=rng.choice((0.0, 0.05, 0.2)), costs=random_costs(seed)) as rig:
        sessions = [rig.session]
        rig.prefill(900)
        for _ in range(40):
            act(rig, rng, sessions)
            assert report_of(rig).n_hazards == 0
        for session in sessions[1:]:
            session.close()
        assert rig.device.report.n_passes > 20
