"""Chats on hybrids whose template drops earlier thinking: they go back, and only what has changed is run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvstream import Model
from pykvstream.core.state import CHUNK_TOKENS
from pykvstream.engine import Session
from pykvstream.errors import HostMemoryError
from pykvstream.runtime.admission import HostMemory
from pykvstream.sampling import SamplingParams
from tests.qwen_template import QWEN
from tests.random_hybrid import HybridShape, write_random_hybrid

SHAPE = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=320
)
GREEDY = SamplingParams(temperature=0.0)
N_ANSWER = 100


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chat") / "model.gguf"
    write_random_hybrid(made, SHAPE, 5)
    return made


def ask(model: Model, session: Session, text: str) -> int:
    """Ask something; returns where the answer begins."""
    pieces = session.chat(
        text, system="Be brief. " * 20, template=model.make_chat_template(QWEN), max_tokens=N_ANSWER, params=GREEDY
    )
    n_answer = sum(1 for _ in pieces)
    return len(session.tokens) - n_answer


LONG = "a question " * 40


@pytest.mark.parametrize(("checkpoint_mib", "text"), [(None, LONG), (None, "short"), (0, LONG)])
def test_a_turn_that_drops_thinking_goes_back_and_loses_nothing(
    path: Path, checkpoint_mib: float | None, text: str
) -> None:
    options = {"threads": 1, "ubatch_size": 64, "ctx_size": 2048, "checkpoint_mib": checkpoint_mib}
    with Model.open(path, arena_mib=16, **options) as model, model.session() as session:
        n_prompt = ask(model, session, text)
        before, said = session.stats, session.tokens
        n_tokens = ask(model, session, "And then?")
        recomputed = session.stats.recomputed_tokens - before.recomputed_tokens
        assert session.tokens[: len(said)] != said, "the thinking stays: nothing was gone back over"
        assert 0 < recomputed <= (CHUNK_TOKENS if checkpoint_mib is None else n_prompt)
        tokens = session.tokens[:n_tokens]
        with session.fork() as warm, model.session() as cold:
            warm._core.truncate(n_tokens, or_begin_anew=True)
            assert warm.forward([1]).tobytes() == cold.forward([*tokens, 1]).tobytes()


def test_the_budget_counts_before_anything_is_allocated(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"arena_mib": 16, "threads": 1, "ubatch_size": 64, "ctx_size": 2048}
    with Model.open(path, checkpoint_mib=0, **options) as model:
        blueprint = model._target.blueprint
        need = blueprint.host_bytes(model.plan.arena_bytes)
        assert not model._target.keeps_states
    memory = HostMemory(total=need, available=need)
    monkeypatch.setattr("pykvstream.runtime.opening.host_memory_available", lambda: memory)
    Model.open(path, checkpoint_mib=0, **options).close()
    for mib in (None, 1):
        with pytest.raises(HostMemoryError, match="host memory"):
            Model.open(path, checkpoint_mib=mib, **options)
