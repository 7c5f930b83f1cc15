"""The MTP head against the float64 forward: every row of a text, and drafts chained on drafts.

Units: logits have a deviation near 1; the bound is that of the trunk (model.md 10.3).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.core.tape import CancelFlag
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.runtime.hidden import HeadContext
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase
from tests.oracle.hybrid64 import Hybrid64, Mtp64
from tests.random_hybrid import Experts, HybridShape, write_random_hybrid
from tests.rigs import Rig, open_rig

N_TOKENS, DEPTH, CTX = 150, 3, 512
TOLERANCE = 1e-4
SHAPE = HybridShape(n_layers=4, n_mtp=1)
SHAPES = {
    "dense": SHAPE,
    "experts": replace(SHAPE, experts=Experts(n_experts=5, n_used=2)),
    "tied, scales": replace(SHAPE, is_tied=True, has_scales=True),
    "fused": replace(SHAPE, is_fused=True, experts=Experts(n_experts=5, n_used=2)),
}
OWN = ("shared_head_norm", "shared_head_head", "embed_tokens")
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


def own_tensors(shape: HybridShape) -> dict[str, Floats]:
    """What a head may have of its own: an embedding and an output."""
    rng = np.random.default_rng(9)
    block = f"blk.{shape.n_layers}.nextn."
    table = rng.standard_normal((shape.n_vocab, shape.n_embd)).astype(np.float32)
    out = (rng.standard_normal((shape.n_vocab, shape.n_embd)) * shape.n_embd**-0.5).astype(np.float32)
    return {block + "embed_tokens.weight": table, block + "shared_head_head.weight": out}


def model(folder: Path, name: str, *, has_own: bool = False, has_norm: bool = True) -> Path:
    path = folder / f"{name}-{has_own}-{has_norm}.gguf"
    if not path.exists():
        shape = SHAPES[name]
        tensors: dict[str, Floats | None] = dict(own_tensors(shape)) if has_own else {}
        if not has_norm:
            tensors[f"blk.{shape.n_layers}.nextn.shared_head_norm.weight"] = None
        write_random_hybrid(path, shape, 3, tensors=tensors)
    return path


def tokens() -> npt.NDArray[np.uint32]:
    return np.random.default_rng(1).integers(0, SHAPE.n_vocab, N_TOKENS).astype(np.uint32)


def known_of(session: TokenSession) -> HeadContext:
    known = session._context.head
    assert known is not None
    return known


def every_row(rig: Rig, n_prompt: int) -> tuple[Floats, Floats]:
    """Logits of each row from the trunk's true hidden rows, and of a chain behind the last one."""
    ids = tokens()
    target, cancel = rig.target, CancelFlag()
    assert target.head is not None
    found = []
    with closing(rig.session()) as session:
        session.forward(ids[:n_prompt], logits="none")
        if n_prompt < N_TOKENS:
            session.forward(ids[n_prompt:], logits="none", phase=Phase.DECODE)
        known = known_of(session)
        for position in range(N_TOKENS):
            target.head.catch_up(known, ids.tolist(), position, cancel)
            hidden = target.head.pending(known, position)
            logits, _ = target.head.step(known, int(ids[position]), hidden, position, cancel)
            found.append(logits)
        chain = []
        target.head.catch_up(known, ids.tolist(), N_TOKENS, cancel)
        token, hidden = 7, target.head.pending(known, N_TOKENS)
        for i in range(DEPTH):
            logits, hidden = target.head.step(known, token, hidden, N_TOKENS + i, cancel)
            chain.append(logits)
            token = int(logits.argmax())
    target.check_integrity()
    return np.stack(found), np.stack(chain)


def expected(path: Path) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    with GgufFile.open(path) as file:
        trunk = Hybrid64(file)
        ids = tokens()
        trunk(ids)
        hidden = np.concatenate([np.zeros((1, SHAPE.n_embd)), trunk.hidden])
        head = Mtp64(trunk)
        rows, _ = head(ids, hidden[:-1], 0)
        chain, token, last = [], 7, hidden[-1:]
        for i in range(DEPTH):
            logits, last = head([token], last, N_TOKENS + i)
            chain.append(logits[0])
            token = int(logits[0].argmax())
        return rows, np.stack(chain)


@pytest.mark.parametrize("n_prompt", [150, 100, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_150_rows_and_a_chain_of_3_equal_the_float64_forward(folder: Path, name: str, n_prompt: int) -> None:
    path = model(folder, name)
    rows, chain = expected(path)
    with open_rig(path, ctx=CTX, ubatch=64, type_k=GgmlType.F32, type_v=GgmlType.F32, mtp=True) as rig:
        found, chained = every_row(rig, n_prompt)
    assert np.abs(found - rows).max() <= TOLERANCE
    assert np.abs(chained - chain).max() <= TOLERANCE
    assert rows.std() > 0.5


@pytest.mark.parametrize(("has_own", "has_norm"), [(True, True), (False, False), (True, False)])
def test_a_head_uses_its_own_tensors_where_it_has_them(folder: Path, has_own: bool, has_norm: bool) -> None:
    path = model(folder, "dense", has_own=has_own, has_norm=has_norm)
    rows, chain = expected(path)
    assert np.abs(rows - expected(model(folder, "dense"))[0]).max() > 0.1
    with open_rig(path, ctx=CTX, ubatch=64, type_k=GgmlType.F32, type_v=GgmlType.F32, mtp=True) as rig:
        found, chained = every_row(rig, N_TOKENS)
    assert np.abs(found - rows).max() <= TOLERANCE
    assert np.abs(chained - chain).max() <= TOLERANCE


def test_a_session_drafts_on_the_head_s_own_hidden_rows(folder: Path) -> None:
    path = model(folder, "dense")
    found: list[Floats] = []

    def choose(logits: Floats, position: int) -> int:
        assert position == N_TOKENS + 1 + len(found)
        found.append(logits.copy())
        return int(logits.argmax())

    with (
        open_rig(path, ctx=CTX, ubatch=64, type_k=GgmlType.F32, type_v=GgmlType.F32, mtp=True) as rig,
        closing(rig.session()) as session,
    ):
        session.forward(tokens(), logits="none")
        session.push(7)
        session.draft(DEPTH, choose)
        session.draft(0, choose)
    assert np.abs(np.stack(found) - expected(path)[1]).max() <= TOLERANCE


def test_a_head_beside_the_trunk_changes_no_bit_of_it(folder: Path) -> None:
    found = []
    for mtp in (False, True):
        with open_rig(model(folder, "dense"), ctx=CTX, ubatch=64, mtp=mtp) as rig, closing(rig.session()) as session:
            prompt = session.forward(tokens()[:100], logits="all")
            found.append(prompt.tobytes() + session.forward(tokens()[100:], logits="all", phase=Phase.DECODE).tobytes())
    assert found[0] == found[1]


def test_how_the_head_caught_up_changes_no_bit_of_a_draft(folder: Path) -> None:
    """Row by row with drafts in between, or in one go; streamed or resident: each row comes from true hidden rows."""
    found = set()
    for residency in (0.0, 1.0):
        with open_rig(model(folder, "dense"), ctx=2048, ubatch=64, mtp=True, residency=residency) as rig:
            found.add(every_row(rig, 100)[1].tobytes())
            with closing(rig.session()) as session:
                session.forward(tokens()[:100], logits="none")
                session.forward(tokens()[100:], logits="none", phase=Phase.DECODE)
                found.add(chain_of(rig, session))
    assert len(found) == 1


def chain_of(rig: Rig, session: TokenSession) -> bytes:
    head, known, cancel = rig.target.head, known_of(session), CancelFlag()
    assert head is not None
    n_tokens = session.n_cached
    head.catch_up(known, session.tokens, n_tokens, cancel)
    token, hidden, chain = 7, head.pending(known, n_tokens), []
    for i in range(DEPTH):
        logits, hidden = head.step(known, token, hidden, n_tokens + i, cancel)
        chain.append(logits)
        token = int(logits.argmax())
    return np.stack(chain).tobytes()
