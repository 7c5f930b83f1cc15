"""A whole model on a card that is not there.

The library that stands in for the driver's runs every kernel, compiled for the host, as the backend launches it. What
is left for a card to show is what its compiler and its hardware make of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, HOST_KERNELS, Driver

ANSWERS = HOST_KERNELS + """
import numpy as np
from pykvstream import SamplingParams
from pykvstream.engine import Model
from tests.models import write_random_model
from tests.property.test_drafting_promise import put
from tests.scripted_drafter import Scripted, half_right
path = host_folder / "model.gguf"
write_random_model(path, n_layers=2, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=64, n_vocab=700, seed=4)
N, PROMPT = 8, [1, 2, 3, 4, 5]

def answer(model, params, conversation=None, reads=True):
    with model.session(seed=3) as session:
        speculation = None if conversation is None else put(session, Scripted(conversation, half_right))
        pieces, stayed = [], 0
        for piece in session.generate(PROMPT, max_tokens=N, params=params, speculation=speculation, ignore_eos=True):
            stayed += callable(piece.row)
            pieces.append((piece.token, piece.logprob, piece.logits.tobytes() if reads else None))
        return pieces, session.tokens, stayed

params = SamplingParams(temperature=0.8)
with Model.open(path, threads=1, ctx_size=512, ubatch_size=64) as cpu:
    expected, conversation, _ = answer(cpu, params)
with Model.open(path, device="cuda", ctx_size=512, ubatch_size=64) as card:
    found, _, stayed = answer(card, params)
    print("stayed", stayed, [piece[0] for piece in found] == [piece[0] for piece in expected])
    rows, others = (np.stack([np.frombuffer(piece[2], np.float32) for piece in said]) for said in (found, expected))
    print("apart", np.abs(rows - others).max() < 1e-5 and np.abs(rows).max() > 1)
    with Model.open(path, device="cuda,graphs=off", ctx_size=512, ubatch_size=64) as singly:
        print("singly", answer(singly, params)[0] == found)
    unread, _, _ = answer(card, params, reads=False)
    print("unread", [piece[:2] for piece in unread] == [piece[:2] for piece in found])
    drafted, _, stayed = answer(card, params, conversation)
    print("drafted", stayed > 0, drafted == found)
    wide, _, stayed = answer(card, SamplingParams(top_k=0, temperature=0.8))
    print("top_k off", stayed, all(np.isfinite(piece[1]) for piece in wide))
    with card.session() as session:
        rows = session.forward([*PROMPT, 7], logits="all")
    print("all", rows.shape, np.abs(rows[4] - others[0]).max() < 1e-5)
    # The whole chain over whole rows, and its own sum.
    import pykvstream.sampling.sampler as sampler
    sampler.rows_needed_by = lambda params: "the test wants whole rows"
    whole, _, stayed = answer(card, params)
    print("whole", stayed, whole == found)
import pykvstream.sampling.front as front
sampler.rows_needed_by = front.rows_needed_by
with Model.open(path, device="cuda", gpu_layers=1, ctx_size=512, ubatch_size=64) as cut:
    found, _, stayed = answer(cut, params)
    print("cut", len(cut.parts), stayed, [piece[0] for piece in found] == [piece[0] for piece in expected])
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs cc")
def test_tokens_and_log_probabilities_are_the_same_whether_rows_come_along_or_stay(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    driver = Driver.build(tmp_path_factory.mktemp("fake"))
    said = driver.run(ANSWERS, FAKE_CUDA_KERNELS="host", FAKE_CUDA_ARCH="80").splitlines()
    assert said == ["stayed 7 True", "apart True", "singly True", "unread True", "drafted True True",
                    "top_k off 0 True", "all (6, 700) True", "whole 0 True", "cut 2 7 True"]  # fmt: skip


HYBRID = HOST_KERNELS + """
from pykvstream.engine import Model
from pykvstream.runtime.target import Phase
from tests.random_hybrid import HybridShape, write_random_hybrid
path = host_folder / "model.gguf"
write_random_hybrid(path, HybridShape(n_layers=2, interval=2, n_embd=128, n_heads=2, n_kv_heads=1, n_value_heads=2,
                                      n_ff=128, n_vocab=320))

def answer(device):
    with Model.open(path, device=device, ctx_size=512, ubatch_size=64) as model, model.session() as session:
        rows = [session.forward(list(range(40))).tobytes()]
        for width in (1, 1, 1, 2, 2, 2, 1):
            rows.append(session.forward([3, 9][:width], logits="all", phase=Phase.DECODE).tobytes())
        # A fork has its states elsewhere.
        with session.fork() as child:
            rows.append(child.forward([5], phase=Phase.DECODE).tobytes())
        rows.append(session.forward([7], phase=Phase.DECODE).tobytes())
        return rows

singly = answer("cuda,graphs=off")
print(len(set(singly)), answer("cuda") == singly)
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs cc")
def test_recorded_passes_of_a_hybrid_have_the_bits_of_single_ones(tmp_path: Path) -> None:
    variables = {"FAKE_CUDA_KERNELS": "host", "FAKE_CUDA_ARCH": "80", "FAKE_CUDA_COUNT": str(tmp_path / "count")}
    assert Driver.build(tmp_path).run(HYBRID, **variables) == "10 True"
    *_, made, launched, destroyed = map(int, (tmp_path / "count").read_text(encoding="ascii").split())
    assert made == destroyed == 2 and launched >= 5
