"""Keys and values of one conversation and the state of another never meet: every way of mixing them is refused.

A state knows the sequence that it belongs to, its position and how often what lies before that was rewritten. What is
refused has changed nothing: both conversations go on with the bits of undisturbed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.tape import CancelFlag
from pykvstream.errors import Busy, InvalidArgument, KvStreamError, Stale
from pykvstream.runtime.context import Context, PartContext
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.rigs import Rig, open_rig, tokens_of

SHAPE = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=32, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=300,
    ctx=4096,
)  # fmt: skip
N_TOKENS = 300


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    path = tmp_path_factory.mktemp("identity") / "model.gguf"
    write_random_hybrid(path, SHAPE, 4)
    with open_rig(path, residency=0.3, ubatch=128, ctx=1024) as made:
        yield made


def said(rig: Rig, seed: int) -> TokenSession:
    session = rig.session()
    session.forward(tokens_of(seed, N_TOKENS), logits="none")
    return session


def step(rig: Rig, seq_of: Context, state_of: Context, phase: Phase = Phase.DECODE) -> NDArray[np.float32]:
    """One row behind the keys and values of one context and the state of another."""
    part = object.__new__(PartContext)
    part.seq, part.state, part.head, part.kept = seq_of.parts[0].seq, state_of.parts[0].state, None, {}
    mixed = Context((part,))
    out = np.zeros((1, rig.target.n_vocab_rows), np.float32)
    rig.target.enter(phase)
    rig.target.run(mixed, np.array([5], np.uint32), np.array([0], np.uint32), out, CancelFlag())
    return out


def as_undisturbed(rig: Rig, seed: int) -> bytes:
    with closing(said(rig, seed)) as session:
        return session.forward([7], phase=Phase.DECODE).tobytes()


@pytest.mark.parametrize("phase", Phase)
def test_state_of_another_conversation_is_refused(rig: Rig, phase: Phase) -> None:
    with closing(said(rig, 1)) as one, closing(said(rig, 2)) as two:
        with pytest.raises(Stale):
            step(rig, one._context, two._context, phase)
        assert (one.n_cached, two.n_cached) == (N_TOKENS, N_TOKENS)
        assert one.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 1)
        assert two.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 2)


def test_state_of_a_fork_is_refused_though_its_tokens_are_the_same(rig: Rig) -> None:
    with closing(said(rig, 1)) as one, closing(one.fork()) as fork:
        with pytest.raises(Stale):
            step(rig, one._context, fork._context)
        assert one.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 1)
        assert fork.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 1)


def test_state_is_refused_when_its_own_sequence_was_rewritten_behind_its_back(rig: Rig) -> None:
    """As many tokens as before, but others."""
    with closing(said(rig, 1)) as one:
        context = one._context
        rig.target.parts[-1].pager.truncate(context.parts[0].seq, N_TOKENS - 10)
        rig.target.parts[-1].pager.begin(context.parts[0].seq, 10)
        rig.target.parts[-1].pager.end(10)
        assert context.n_tokens == N_TOKENS
        with pytest.raises(Stale):
            step(rig, context, context)
        one.truncate(0)
        one.forward(tokens_of(1, N_TOKENS), logits="none")
        assert one.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 1)


def test_accept_and_attach_refuse_another_sequence(rig: Rig) -> None:
    with closing(said(rig, 1)) as one, closing(rig.session()) as short:
        state = one._context.parts[0].state
        assert state is not None
        short.forward(tokens_of(2, 10), logits="none")
        refused: list[Callable[[], None]] = [
            lambda: state.accept(short._context.parts[0].seq, 1),
            lambda: state.truncate(short._context.parts[0].seq, 10),
            lambda: state.attach(short._context.parts[0].seq),
        ]
        for call in refused:
            before = state.info
            with pytest.raises((Stale, Busy, InvalidArgument)):
                call()
            assert state.info == before
        assert one.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 1)


def test_snapshot_of_another_conversation_is_refused_or_leaves_a_state_that_no_one_owns(rig: Rig) -> None:
    """Restoring takes the state away from its sequence, so that nobody can go on with it by mistake."""
    store = rig.target.parts[0].checkpoints
    assert store is not None
    with closing(said(rig, 1)) as one, closing(said(rig, 2)) as two:
        at = max(two._context.parts[0].kept)
        state = one._context.parts[0].state
        assert state is not None and at == max(one._context.parts[0].kept)
        store.restore(two._context.parts[0].kept, at, state)
        with pytest.raises(KvStreamError):
            step(rig, one._context, one._context)
        one.truncate(0)
        one.forward(tokens_of(1, N_TOKENS), logits="none")
        assert one.forward([7], phase=Phase.DECODE).tobytes() == as_undisturbed(rig, 1)
