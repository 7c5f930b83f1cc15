"""Promises 2 and 7: neither the width of a pass nor the number of threads changes a bit; reuse changes none either.

Units: widths in rows of a decode pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvstream.core.device import Device, Isa
from pykvstream.errors import Unsupported
from pykvstream.gguf import DECODABLE, GgmlType
from pykvstream.runtime.target import DECODE_ROWS, Phase
from tests.examples import examples
from tests.models import write_random_model
from tests.rigs import Rig, open_rig, tokens_of

WIDTHS = (1, 2, 3, 5, 8, 17, DECODE_ROWS)
WEIGHTS = tuple(sorted(DECODABLE, key=lambda kind: kind.id))
N_PROMPT = 480
"""So that the rows behind it lie in two pages."""
N_ROWS = DECODE_ROWS
CTX = 1024


def available_isas() -> Iterator[Isa]:
    for isa in (Isa.REFERENCE, Isa.AVX2, Isa.AVX512):
        try:
            Device(1, isa=isa).close()
        except Unsupported:
            continue
        yield isa


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("width")


def model(folder: Path, kind: GgmlType, arch: str = "llama") -> Path:
    """A model whose matrices have uneven numbers of rows, so that no panel is full everywhere."""
    path = folder / f"{arch}-{kind.name}.gguf"
    if not path.exists():
        n_embd = 256 if kind.block_values > 32 else 96
        write_random_model(
            path,
            arch=arch,
            n_embd=n_embd,
            n_heads=n_embd // 32,
            n_kv_heads=1,
            head_dim=64 if kind.block_values > 32 else 96,
            n_ff=n_embd,
            n_vocab=263,
            ctx=CTX,
            weight_type=kind,
        )
    return path


def decode_in_passes(rig: Rig, width: int) -> npt.NDArray[np.float32]:
    """Logits of the ``N_ROWS`` tokens behind a prompt, run in passes of ``width`` rows."""
    rows = []
    with closing(rig.session()) as session:
        session.forward(tokens_of(1, N_PROMPT), logits="none")
        tokens = tokens_of(2, N_ROWS)
        for first in range(0, N_ROWS, width):
            rows.append(session.forward(tokens[first : first + width], logits="all", phase=Phase.DECODE))
    return np.concatenate(rows)


def assert_same_bits(rows: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], what: str) -> None:
    unequal = np.flatnonzero((rows.view(np.uint32) != expected.view(np.uint32)).any(axis=1))
    assert unequal.size == 0, f"{what}: {unequal.size} of {len(rows)} rows differ, the first is {unequal[0]}"


@pytest.mark.parametrize("kind", WEIGHTS, ids=lambda kind: kind.name)
def test_no_width_and_no_instruction_set_changes_a_bit(models: Path, kind: GgmlType) -> None:
    expected = None
    for isa in available_isas():
        with open_rig(model(models, kind), ctx=CTX, isa=isa) as rig:
            for width in (1, 3, 8, 17, DECODE_ROWS):
                rows = decode_in_passes(rig, width)
                assert np.isfinite(rows).all()
                expected = rows if expected is None else expected
                assert_same_bits(rows, expected, f"{isa.name}, width {width}")


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kv", [GgmlType.F32, GgmlType.Q8_0, GgmlType.Q4_1], ids=lambda kind: kind.name)
def test_no_width_threads_or_fusion_changes_a_bit(models: Path, arch: str, kv: GgmlType) -> None:
    expected = None
    for threads in (1, 2, 3):
        for fused in (True, False):
            path = model(models, GgmlType.Q4_1, arch)
            with open_rig(path, ctx=CTX, type_k=kv, type_v=kv, threads=threads, fused=fused) as rig:
                for width in WIDTHS:
                    rows = decode_in_passes(rig, width)
                    expected = rows if expected is None else expected
                    assert_same_bits(rows, expected, f"{threads} threads, fused {fused}, width {width}")


def test_a_row_does_not_feel_the_other_rows_of_its_pass(models: Path) -> None:
    """Rows behind it are other tokens, absent, or dropped again: the bits stay."""
    with open_rig(model(models, GgmlType.Q4_0), ctx=CTX) as rig, closing(rig.session()) as session:
        session.forward(tokens_of(1, N_PROMPT), logits="none")
        draft = tokens_of(2, 9)
        alone = session.forward(draft[:1], logits="all", phase=Phase.DECODE)
        for seed in range(5):
            session.truncate(N_PROMPT)
            others = tokens_of(10 + seed, 1 + 12 * seed)
            rows = session.forward(np.concatenate((draft[:1], others)), logits="all", phase=Phase.DECODE)
            assert_same_bits(rows[:1], alone, f"{len(others)} other rows")


def test_output_rows_that_are_left_out_change_no_other(models: Path) -> None:
    with open_rig(model(models, GgmlType.Q5_1), ctx=CTX, ubatch=128) as rig, closing(rig.session()) as session:
        tokens = tokens_of(3, 700)
        every = session.forward(tokens, logits="all")
        session.truncate(0)
        assert_same_bits(session.forward(tokens, logits="last"), every[-1:], "last row alone")


@pytest.mark.parametrize("ubatch", [32, 100, 256, 512])
@settings(max_examples=examples(8), deadline=None)
@given(
    n_prompt=st.integers(2, 1000),
    share=st.floats(0, 1),
    residency=st.sampled_from((0.0, 0.3, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_warm_prefill_equals_a_cold_one(
    models: Path, ubatch: int, n_prompt: int, share: float, residency: float, seed: int
) -> None:
    """A prefix kept from another conversation, cut anywhere, gives the logits of a prompt run from its beginning."""
    path = model(models, GgmlType.Q4_1)
    prompt = tokens_of(seed, n_prompt)
    n_kept = min(int(share * n_prompt), n_prompt - 1)
    with open_rig(path, ctx=CTX, ubatch=ubatch, residency=residency) as rig:
        with closing(rig.session()) as session:
            cold = session.forward(prompt, logits="all")
        with closing(rig.session()) as session:
            other = np.concatenate((prompt[:n_kept], tokens_of(seed + 1, 1000 - n_kept)))
            session.forward(other, logits="none")
            session.truncate(n_kept)
            warm = session.forward(prompt[n_kept:], logits="all")
        rig.target.check_integrity()
    assert_same_bits(warm, cold[n_kept:], f"{n_kept} of {n_prompt} tokens reused")
