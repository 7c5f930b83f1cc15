"""Logits of whole hybrids against a forward pass in float64.

Tolerance: float32 arithmetic throughout and logits of deviation 1; eight layers cost 1e-5 in the median row and 3e-5 at
most. A head of a recurrent layer whose output nearly cancels is amplified by the norm behind it: there a change of half
a unit in the last place of the embedding moves logits by up to 5e-5. The seed is one without such a row.
Quantized weights: an expert that another one nearly ties with may be chosen by the rounding of activations, so that
rows are judged by their median.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.core.tape import CancelFlag
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.runtime.target import Phase
from tests.oracle.hybrid64 import Hybrid64
from tests.random_hybrid import Experts, HybridShape, write_random_hybrid
from tests.rigs import Rig, open_rig, tokens_of

N_TOKENS, CTX = 150, 512
TOLERANCE = 1e-4
SEED = 4
SPLITS = (1, 3, 63, 64, 65, 150)
DENSE = HybridShape()
ROUTED = HybridShape(experts=Experts())
KINDS = {"dense": DENSE, "experts": ROUTED}

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.uint32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def model(folder: Path, shape: HybridShape) -> Path:
    path = folder / f"{abs(hash(shape))}.gguf"
    if not path.exists():
        write_random_hybrid(path, shape, SEED)
    return path


def tokens(n: int = N_TOKENS) -> npt.NDArray[np.uint32]:
    return tokens_of(3, n, 512)


def apart(n: int = N_TOKENS) -> Positions:
    """Positions that differ on the three axes."""
    rows = np.arange(n)
    return np.stack((rows // 2, rows % 13, rows % 7)).astype(np.uint32)


_EXPECTED: dict[tuple[Path, bool], Array] = {}


def expected(path: Path, *, is_apart: bool = False) -> Array:
    key = path, is_apart
    if key not in _EXPECTED:
        with GgufFile.open(path) as file:
            _EXPECTED[key] = Hybrid64(file)(tokens(), apart() if is_apart else None)
    return _EXPECTED[key]


def cuts(n_tokens: int, split: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + split, n_tokens)) for begin in range(0, n_tokens, split)]


def open_hybrid(path: Path, *, ubatch: int = 64, fused: bool = True, kv: GgmlType = GgmlType.F32) -> Rig:
    return open_rig(path, ctx=CTX, ubatch=ubatch, type_k=kv, type_v=kv, fused=fused)


def logits_of(rig: Rig, parts: Sequence[tuple[int, int, Phase]]) -> Floats:
    ids = tokens()
    with closing(rig.session()) as session:
        found = [session.forward(ids[begin:end], logits="all", phase=phase) for begin, end, phase in parts]
    return np.concatenate(found)


def prefill(
    path: Path, split: int = N_TOKENS, *, fused: bool = True, ubatch: int = 64, kv: GgmlType = GgmlType.F32
) -> Floats:
    with open_hybrid(path, fused=fused, ubatch=ubatch, kv=kv) as rig:
        return logits_of(rig, [(*cut, Phase.PREFILL) for cut in cuts(N_TOKENS, split)])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_parts_equal_the_float64_forward(folder: Path, kind: str, split: int) -> None:
    path = model(folder, KINDS[kind])
    assert np.abs(prefill(path, split) - expected(path)).max() <= TOLERANCE
    assert expected(path).std() > 0.5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_on_three_axes_equal_the_float64_forward(folder: Path, kind: str, split: int) -> None:
    path = model(folder, KINDS[kind])
    assert np.abs(expected(path, is_apart=True) - expected(path)).max() > 0.1
    with open_hybrid(path) as rig:
        found = passes_at(rig, split)
    assert np.abs(found - expected(path, is_apart=True)).max() <= TOLERANCE


def passes_at(rig: Rig, split: int) -> Floats:
    """Passes of up to ``split`` rows, cut at the grid of chunks as prompts are, with positions of their own."""
    ids, positions = tokens(), apart()
    out = np.empty((N_TOKENS, rig.target.n_vocab_rows), np.float32)
    context = rig.target.context(CTX)
    rig.target.enter(Phase.PREFILL)
    begin = 0
    while begin < N_TOKENS:
        n = rig.target.chunk_rows(Phase.PREFILL, begin, min(split, N_TOKENS - begin))
        rows = np.arange(n, dtype=np.uint32)
        where = np.ascontiguousarray(positions[:, begin : begin + n])
        rig.target.run(context, ids[begin : begin + n], rows, out[begin : begin + n], CancelFlag(), where)
        begin += n
    rig.target.release(context)
    return out


@pytest.mark.parametrize("n_prompt", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_behind_a_prompt_equals_the_float64_forward(
    folder: Path, kind: str, width: int, n_prompt: int
) -> None:
    path = model(folder, KINDS[kind])
    parts = [(0, n_prompt, Phase.PREFILL)] if n_prompt else []
    parts += [(n_prompt + a, n_prompt + b, Phase.DECODE) for a, b in cuts(N_TOKENS - n_prompt, width)]
    with open_hybrid(path) as rig:
        assert np.abs(logits_of(rig, parts) - expected(path)).max() <= TOLERANCE


def test_the_width_of_a_decode_pass_changes_no_bit(folder: Path) -> None:
    found = []
    for width in (1, 4, 64):
        with open_hybrid(model(folder, DENSE)) as rig:
            found.append(logits_of(rig, [(*cut, Phase.DECODE) for cut in cuts(N_TOKENS, width)]).tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kv", [GgmlType.F32, GgmlType.Q8_0], ids=["kept as they are", "kept rotated"])
@pytest.mark.parametrize("kind", KINDS)
def test_fusing_operations_changes_no_bit(folder: Path, kind: str, kv: GgmlType) -> None:
    path = model(folder, KINDS[kind])
    assert prefill(path, kv=kv).tobytes() == prefill(path, fused=False, kv=kv).tobytes()


SMALL = replace(DENSE, n_layers=4, n_mtp=1)
SMALL_ROUTED = replace(SMALL, experts=Experts(n_experts=5, n_used=2))


@pytest.mark.parametrize("shape", [SMALL, SMALL_ROUTED], ids=["dense", "experts"])
def test_fused_tensors_give_the_bits_of_their_parts(folder: Path, shape: HybridShape) -> None:
    found = {prefill(model(folder, replace(shape, is_fused=is_fused))).tobytes() for is_fused in (False, True)}
    assert len(found) == 1


WAYS = {
    "scales": replace(SMALL, has_scales=True),
    "scales of fused experts": replace(SMALL_ROUTED, has_scales=True, is_fused=True),
    "scaled routing": replace(SMALL, experts=Experts(weight_scale=1.7)),
    "short dt, tied": replace(SMALL, has_short_dt=True, is_tied=True),
    "lists": replace(SMALL, lists_heads=True, lists_recurrent=True, widths=(512, 256, 128, 384, 512)),
    "every layer attends": replace(SMALL, interval=1, n_layers=2),
    "equal heads": replace(SMALL, n_value_heads=2, state=64),
    "other taps": replace(SMALL, conv=2, state=16),
    "large heads": replace(SMALL, state=128, n_key_heads=1, n_value_heads=2, head_dim=128),
    "all of a head turns": replace(SMALL, n_rot=64, sections=(11, 11, 10)),
    "default base": replace(SMALL, rope_base=None),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_say_it_equals_the_float64_forward(folder: Path, way: str) -> None:
    path = model(folder, WAYS[way])
    assert np.abs(prefill(path, ubatch=128) - expected(path)).max() <= TOLERANCE
    parts = [(0, 70, Phase.PREFILL), *((70 + a, 70 + b, Phase.DECODE) for a, b in cuts(80, 7))]
    with open_hybrid(path) as rig:
        assert np.abs(logits_of(rig, parts) - expected(path)).max() <= TOLERANCE


@pytest.mark.parametrize("kv", [GgmlType.Q8_0, GgmlType.F16], ids=lambda kind: kind.name)
def test_a_rotated_history_is_undone_before_the_gate(folder: Path, kv: GgmlType) -> None:
    """A gate applied to rotated values would be off by the order of a logit, not by a quantization step."""
    path = model(folder, DENSE)
    with open_hybrid(path, kv=kv) as rig:
        error = logits_of(rig, [(0, N_TOKENS, Phase.PREFILL)]) - expected(path)
    assert np.sqrt((error**2).mean()) <= 0.02


@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q4_K, GgmlType.IQ4_XS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("experts", [None, Experts(n_experts=4, n_used=2, n_ff=256, n_ff_shared=256)], ids=str)
def test_quantized_hybrids_follow_the_float64_forward(folder: Path, kind: GgmlType, experts: Experts | None) -> None:
    shape = replace(SMALL, weight_type=kind, n_value_heads=8, experts=experts, is_fused=True)
    path = model(folder, shape)
    error = np.sqrt(((prefill(path) - expected(path)) ** 2).mean(axis=1))
    assert np.median(error) <= 0.03 * expected(path).std()
