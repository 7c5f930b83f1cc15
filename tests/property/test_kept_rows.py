"""Rows of logits that stay where they were computed, while tokens are chosen out of their sampling fronts.

The device is the CPU behind a binding that does what a card's does: it hands out no output that has no memory, keeps it
until the next pass of the device, and says so of one that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, Reasoning, SamplingParams
from pykvstream.core.tape import Binding
from pykvstream.errors import InvalidArgument, Stale
from pykvstream.runtime.part import Part
from pykvstream.runtime.rows import LogitRows
from pykvstream.runtime.target import Phase
from pykvstream.sampling import FRONT_BEST, Front, Sampler
from tests.front_rig import FrontRig
from tests.models import write_random_model
from tests.property.test_drafting_promise import PROMPT, Said, listen, put
from tests.property.test_front import SETTINGS
from tests.property.test_mtp_promise import MTP, speculation
from tests.qwen_template import QWEN
from tests.random_hybrid import write_random_hybrid
from tests.scripted_drafter import Scripted, half_right
from tests.unit.test_reasoning_budget import ASK

VOCAB = 700


class Keeping:
    """What was done to outputs since ``start``: bytes of logits that were handed out with a pass, and fetched."""

    def __init__(self, n_vocab: int = VOCAB) -> None:
        self.handed = self.fetched = self.kept = 0
        self._n_vocab = n_vocab
        self._number = 0
        self._newest: tuple[np.ndarray, ...] = ()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def keeping(call: Any) -> Any:
            def keep(binding: Binding, tokens: Any, out_rows: Any, outputs: Any, *rest: Any, **named: Any) -> None:
                self._number += 1
                self._newest = ()
                room = tuple(
                    np.full((len(out_rows), self._n_vocab), np.nan, np.float32) if each is None else each
                    for each in outputs
                )
                call(binding, tokens, out_rows, room, *rest, **named)
                self._newest = room
                self.handed += sum(each.nbytes for each in outputs[:1] if each is not None)
                self.kept += sum(each.nbytes for each, given in zip(room, outputs, strict=True) if given is None)

            return keep

        def read_output(binding: Binding, number: int, output: int, first_row: int, rows: np.ndarray) -> None:
            if number != self._number:
                raise Stale(f"pass {number}, the newest is {self._number}")
            rows[:] = self._newest[output][first_row : first_row + len(rows)]
            self.fetched += rows.nbytes

        for name in ("run", "begin"):
            patch.setattr(Binding, name, keeping(getattr(Binding, name)))
        patch.setattr(Binding, "read_output", read_output)
        patch.setattr(Binding, "newest_pass", property(lambda binding: self._number))
        patch.setattr(Part, "keeps_rows", True)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeping]:
    made = Keeping()
    made.install(monkeypatch)
    yield made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model.gguf"
    write_random_model(made, n_heads=2, n_kv_heads=1, head_dim=32, n_vocab=VOCAB, seed=4)
    return made


def answer(path: Path, params: SamplingParams, said: Said | None = None) -> Said:
    """Every piece with its logits, drafted where there is an answer to draft from."""
    with Model.open(path, threads=1, ctx_size=512, ubatch_size=64) as model, model.session(seed=3) as session:
        speculation = None if said is None else put(session, Scripted(said.conversation, half_right))
        return listen(session, PROMPT, 30, params, speculation, ignore_eos=True)


PARAMS = {**SETTINGS, "top_k off": SamplingParams(top_k=0), "sigma": SamplingParams(top_n_sigma=1.0)}


@pytest.mark.parametrize("is_drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", ["default", "greedy", "penalties", "xtc", "top_k off", "sigma"])
def test_answers_and_logits_are_those_of_rows_that_were_handed_out(path: Path, name: str, is_drafted: bool) -> None:
    plain = answer(path, PARAMS[name])
    keeping = Keeping()
    with pytest.MonkeyPatch.context() as patch:
        keeping.install(patch)
        assert answer(path, PARAMS[name], plain if is_drafted else None) == plain
    # Every piece was asked for its logits: each row that stayed was fetched once, and no other one.
    if "off" in name or name == "sigma":
        assert keeping.kept == keeping.fetched == 0
    else:
        assert keeping.fetched == 29 * VOCAB * 4 and keeping.handed == VOCAB * 4, "the prompt's row has no front"
        assert (keeping.kept > keeping.fetched) == is_drafted, "rows behind a wrong draft are not fetched"


def test_nobody_fetches_what_nobody_reads(path: Path, keeping: Keeping) -> None:
    with Model.open(path, threads=1, ctx_size=512, ubatch_size=64) as model, model.session(seed=3) as session:
        assert len(list(session.generate(PROMPT, max_tokens=20, ignore_eos=True))) == 20
        assert (keeping.handed, keeping.fetched, keeping.kept) == (VOCAB * 4, 0, 19 * VOCAB * 4)
        # Whoever asks for rows has them.
        for phase in Phase:
            assert np.isfinite(session.forward([1, 2, 3], logits="all", phase=phase)).all()
        session._core.push(4)
        assert np.isfinite(session._core.verify([5, 6])).all()
        # Of what was pending nobody is told a row.
        assert (keeping.handed, keeping.fetched) == ((1 + 6 + 3) * VOCAB * 4, 0)


def test_a_row_that_another_pass_has_overwritten_is_said_to_be_gone(path: Path, keeping: Keeping) -> None:
    with Model.open(path, threads=1, ctx_size=512, ubatch_size=64) as model:
        with model.session(seed=3) as session, model.session() as other:
            pieces = session.generate(PROMPT, max_tokens=8, ignore_eos=True)
            first, second = next(pieces), next(pieces)
            assert np.isfinite(second.logits).all()
            other.forward([1, 2])
            assert np.isfinite(first.logits).all() and np.isfinite(second.logits).all()
            third = next(pieces)
            other.forward([3], phase=Phase.DECODE)
            with pytest.raises(Stale):
                _ = third.logits
            other.forward([4], phase=Phase.PREFILL)
            with pytest.raises(Stale, match="left the phase"):
                _ = third.logits
            # Choosing does not need it: the answer goes on, and is the one without a neighbour.
            rest = [piece.token for piece in pieces]
        with model.session(seed=3) as session:
            alone = [piece.token for piece in session.generate(PROMPT, max_tokens=8, ignore_eos=True)]
        assert [first.token, second.token, third.token, *rest] == alone


def test_rows_of_which_nothing_was_found_are_asked_for_by_name() -> None:
    sampler = Sampler(SamplingParams(), seed=1, n_vocab=VOCAB)
    for ask in (sampler.choose, sampler.distribution, lambda row, at: sampler.score(3, row, at)):
        with pytest.raises(InvalidArgument, match="position 5: what is asked for needs the whole row"):
            ask(None, 5)
    with FrontRig(VOCAB, VOCAB, FRONT_BEST) as rig:
        row = np.arange(VOCAB, dtype=np.float32)
        front = Front.of(rig.run(row[None])[0], 5)
    assert sampler.score(VOCAB - 1, None, 5, front) == sampler.score(VOCAB - 1, row, 5, front)
    with pytest.raises(InvalidArgument, match="position 5: what is asked for needs the whole row"):
        sampler.score(0, None, 5, front)


def test_a_row_is_brought_once() -> None:
    asked = []

    def read(i: int, rows: np.ndarray) -> None:
        asked.append(i)
        rows[:] = i + 1

    rows = LogitRows(np.zeros((2, 3), np.float32), read)
    late = rows.at(1)
    assert callable(late) and late().tolist() == late().tolist() == [2, 2, 2] and not callable(rows.at(1))
    assert rows.all().tolist() == [[1, 1, 1], [2, 2, 2]] and len(rows) == 2 and asked == [1, 0]


def test_answers_with_tokens_that_may_be_forced_have_their_rows(tmp_path: Path, keeping: Keeping) -> None:
    """What is forced may not be among the best, and the rows of a draft could be gone by then."""
    path = tmp_path / "model.gguf"
    write_random_model(path, n_layers=1, n_embd=64, n_heads=2, n_kv_heads=1, n_ff=64, ctx=1024, n_vocab=VOCAB, seed=3)
    with Model.open(path, threads=1, ubatch_size=64) as model:
        kept = []
        for reasoning in (Reasoning(), Reasoning(budget=4)):
            with model.session(seed=7) as session:
                template = model.make_chat_template(QWEN)
                prompt = model.chat_prompt(ASK, template=template, reasoning=reasoning)
                keeping.kept = 0
                assert len(list(session.generate(prompt, max_tokens=20, ignore_eos=True))) == 20
                kept.append(keeping.kept > 0)
    assert kept == [True, False] and keeping.fetched == 0


def test_rows_that_a_head_would_overwrite_are_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head catches up behind a pass of the model; before one that verifies its draft it has done."""
    hybrid = tmp_path / "hybrid.gguf"
    write_random_hybrid(hybrid, MTP, 5)
    keeping = Keeping(MTP.n_vocab)

    def answer_of_head() -> Said:
        model = Model.open(hybrid, threads=1, ubatch_size=64, ctx_size=1024, mtp=True)
        with model, model.session(seed=7) as session:
            return listen(session, PROMPT, 40, SamplingParams(), speculation(), ignore_eos=True)

    plain = answer_of_head()
    keeping.install(monkeypatch)
    assert answer_of_head() == plain
    assert keeping.kept >= keeping.fetched > 0


def test_a_plain_pass_that_a_head_may_catch_up_behind_hands_its_row_out(tmp_path: Path, keeping: Keeping) -> None:
    path = tmp_path / "hybrid.gguf"
    write_random_hybrid(path, MTP, 5)
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=1024, mtp=True) as model:
        has_stayed = []
        for chosen in (None, speculation()):
            with model.session(seed=7) as session:
                list(session.generate(PROMPT, max_tokens=6, speculation=chosen, ignore_eos=True))
                has_stayed.append(callable(session._core.step(with_front=True, may_keep=True).at(0)))
                # Without a front nothing may stay.
                session._core.push(3)
                assert not callable(session._core.step(may_keep=True).at(0))
    assert has_stayed == [True, False]
