"""Conversations on a card: what happens beside them, before them and after them changes no bit of what they say."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream import Model, Session, SpeculationParams
from pykvstream.core.cuda import CudaDevice
from pykvstream.core.device import DeviceFlag, HookPoint
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase, Target
from pykvstream.speculation import HEAD_DRAFTER
from tests.property.test_drafting_promise import CHAINS, PROMPT, SHAPE, listen
from tests.property.test_layer_lease_promise import PROMPT as HISTORY
from tests.property.test_layer_lease_promise import WAYS, divide, draft
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.rigs import open_rig, tight_placement
from tests.stack import Stack

MTP = HybridShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "n_mtp": 1})
CTX = 3000
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("card") / "hybrid.gguf"
    write_random_hybrid(where, MTP, 5)
    return where


def steps(session: Session | TokenSession, n_vocab: int, n_tokens: int = 1100, n_steps: int = 12) -> Logits:
    """Logits of a prompt's last row and of what is chosen behind it."""
    tokens = np.random.default_rng(3).integers(0, n_vocab, n_tokens).tolist()
    rows = [session.forward(tokens).copy().reshape(-1)]
    for _ in range(n_steps):
        rows.append(session.forward([int(rows[-1].argmax())], phase=Phase.DECODE).copy().reshape(-1))
    return np.stack(rows)


def place_tightly(target: Target) -> None:
    for phase in Phase:
        target.place(phase, tight_placement(target.plan, phase))


@pytest.mark.parametrize("n_max", [1, 3, 8])
@pytest.mark.parametrize("params", CHAINS)
def test_drafts_of_the_head_change_no_answer(card: str, path: Path, n_max: int, params: str) -> None:
    told = SpeculationParams(types=(HEAD_DRAFTER,), draft_n_max=n_max)
    with Model.open(path, device=card, ctx_size=CTX, mtp=True) as model:
        with model.session(seed=7) as plain, model.session(seed=7) as drafted:
            for prompt in (PROMPT, " And then?"):
                expected = listen(plain, prompt, 40, CHAINS[params], ignore_eos=True)
                assert listen(drafted, prompt, 40, CHAINS[params], told, ignore_eos=True) == expected
            assert drafted.stats.draft is not None and drafted.stats.draft.rounds > 5
        model.check_integrity()


def test_where_the_pages_of_the_head_lie_changes_no_guess(card: str, path: Path) -> None:
    """All resident, in slots borrowed from a ring, or in waves: the same choices by the same logits."""
    found = []
    for way in WAYS.values():
        with Model.open(path, device=card, ctx_size=2048, mtp=True) as model:
            divide(Stack(model, model._target.parts[-1].device, model._target), way)
            with model.session(seed=3) as session:
                session.forward(HISTORY)
                found.append([draft(session) for _ in range(4)])
                stats = session.stats.head
                assert stats is not None and stats.most_held_slots == (way.n_held or 0)
                assert (stats.step_bytes == 0) == (way.n_held is not None)
                session.forward([5, 6], phase=Phase.DECODE)
            model.check_integrity()
    assert all(each == found[0] for each in found)


def test_nobody_reads_a_page_that_was_released(card: str, path: Path) -> None:
    """Released pages are filled with NaN: a copy that comes too late, or a slot given back too early, shows."""
    with open_rig(path, ctx=CTX, card=CudaDevice()) as rig, closing(rig.session()) as session:
        expected = steps(session, rig.target.n_vocab_rows)
    poisoned = CudaDevice(flags=DeviceFlag.POISON_RELEASED)
    with open_rig(path, ctx=CTX, card=poisoned) as rig, closing(rig.session()) as session:
        place_tightly(rig.target)
        assert steps(session, rig.target.n_vocab_rows).tobytes() == expected.tobytes()
        assert rig.streamed_bytes > 0


@pytest.mark.parametrize("seed", range(3))
def test_delays_change_nothing(card: str, path: Path, seed: int) -> None:
    """Copies and operations that begin late, at random."""
    draw = random.Random(seed)

    def delay(point: HookPoint, index: int) -> int:
        if point in (HookPoint.COPY, HookPoint.OP) and draw.random() < 0.05:
            time.sleep(draw.random() * 0.004)
        return 0

    with open_rig(path, ctx=CTX, card=CudaDevice()) as rig, closing(rig.session()) as session:
        expected = steps(session, rig.target.n_vocab_rows)
    with open_rig(path, ctx=CTX, card=CudaDevice()) as rig, closing(rig.session()) as session:
        place_tightly(rig.target)
        rig.device.set_hook(delay)
        assert steps(session, rig.target.n_vocab_rows).tobytes() == expected.tobytes()
        rig.device.set_hook(None)
        assert rig.streamed_bytes > 0


def test_a_saved_conversation_goes_on_with_the_same_bits(card: str, path: Path, tmp_path: Path) -> None:
    with Model.open(path, device=card, ctx_size=CTX) as model:
        with model.session() as session:
            steps(session, model.config.n_vocab)
            session.save(tmp_path / "saved")
            expected = session.forward([1, 2, 3]).tobytes()
        with model.load_session(tmp_path / "saved") as session:
            assert session.forward([1, 2, 3]).tobytes() == expected
        model.check_integrity()


def test_forks_share_pages_and_part(card: str, path: Path) -> None:
    with Model.open(path, device=card, ctx_size=CTX) as model, model.session() as session:
        steps(session, model.config.n_vocab)
        with session.fork() as child:
            one = child.forward([5], phase=Phase.DECODE).tobytes()
            assert session.forward([5], phase=Phase.DECODE).tobytes() == one
            parted = child.forward([6], phase=Phase.DECODE).tobytes()
            assert session.forward([7], phase=Phase.DECODE).tobytes() != parted
        model.check_integrity()
