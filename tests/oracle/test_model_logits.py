"""Logits of whole models against a forward pass in float64.

Tolerances, for logits of deviation 1 and two layers:
  F32, F16, BF16 weights, F32 history: float32 arithmetic throughout, so 1e-4 is generous.
  Quantized weights: activations are rounded to int8 per 32 values before each matrix, with a deviation of about
    amax / 127 / sqrt(12), 0.5 % of an activation; about ten roundings in a row add up to 1.1 % of a logit in the mean
    square. An oracle that rounds in the same way agrees to float32 accuracy until one value falls on the other side of
    a rounding boundary, which happens about once in thirty rows and then stays in the history.
  Quantized history: no elementwise bound is meaningful; the mean Kullback-Leibler divergence grows by four for each bit
    that a type lacks.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.gguf import DECODABLE, GgmlType, GgufFile
from pykvstream.runtime.target import Phase
from tests.models import write_random_model
from tests.oracle.forward64 import Forward64
from tests.rigs import KV_TYPES, open_rig, tokens_of

CTX = 1024
N_PREFILL, N_DECODE = 280, 40
ARCHS = ("llama", "qwen3")
FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
QUANTIZED = tuple(sorted(DECODABLE - set(FLOATS), key=lambda kind: kind.id))

# Mean divergence in nats that a history type may cost: about twice what a random model of two layers shows.
MEAN_KLD = {
    GgmlType.F32: 1e-11,
    GgmlType.F16: 1e-8,
    GgmlType.BF16: 5e-7,
    GgmlType.Q8_0: 5e-6,
    GgmlType.Q5_1: 2.5e-4,
    GgmlType.Q5_0: 3e-4,
    GgmlType.IQ4_NL: 1e-3,
    GgmlType.Q4_1: 1e-3,
    GgmlType.Q4_0: 1.2e-3,
}

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[np.float64]


class RoundedForward64(Forward64):
    """As the engine with quantized weights: activations are int8 per 32 values with one scale before each matrix."""

    __slots__ = ()

    def _project(self, x: Array, name: str) -> Array:
        blocks = x.reshape(-1, 32)
        scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
        codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0))
        return np.asarray((codes * scale).reshape(x.shape) @ self.weights[f"{name}.weight"].T)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logits")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's attention."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_embd: int = 256


SHAPE = Shape(4, 2, 64)


def model(folder: Path, arch: str, kind: GgmlType, shape: Shape = SHAPE, tied: bool = False) -> Path:
    path = folder / f"{arch}-{kind.name}-{shape.n_heads}-{shape.head_dim}-{shape.n_embd}-{tied}.gguf"
    if not path.exists():
        write_random_model(
            path,
            arch=arch,
            n_embd=shape.n_embd,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            n_ff=256,
            ctx=CTX,
            weight_type=kind,
            tied=tied,
        )
    return path


def engine_logits(path: Path, kv: GgmlType = GgmlType.F32, *, rotation: bool = True) -> Floats:
    """A prompt over one page, then decode passes over the beginning of the next."""
    tokens = tokens_of(1, N_PREFILL + N_DECODE)
    with (
        open_rig(path, ctx=CTX, ubatch=200, type_k=kv, type_v=kv, rotation=rotation) as rig,
        closing(rig.session()) as session,
    ):
        prompt = session.forward(tokens[:N_PREFILL], logits="all")
        answer = [session.forward(tokens[i : i + 4], logits="all", phase=Phase.DECODE)
                  for i in range(N_PREFILL, len(tokens), 4)]  # fmt: skip
    return np.concatenate((prompt, *answer))


def oracle_logits(path: Path, oracle: type[Forward64] = Forward64) -> Array:
    with GgufFile.open(path) as file:
        return oracle(file)(tokens_of(1, N_PREFILL + N_DECODE))


def mean_divergence(expected: Array, logits: Floats) -> float:
    def log_softmax(x: Array) -> Array:
        shifted = x - x.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

    p, q = log_softmax(expected), log_softmax(logits.astype(np.float64))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, Shape(3, 3, 32, 48), Shape(6, 1, 96, 80), Shape(2, 2, 128, 64)], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_float32_models_equal_the_float64_forward(models: Path, arch: str, shape: Shape, tied: bool) -> None:
    path = model(models, arch, GgmlType.F32, shape, tied)
    expected = oracle_logits(path)
    assert np.abs(engine_logits(path) - expected).max() <= 1e-4
    assert expected.std() > 0.3


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", [GgmlType.F16, GgmlType.BF16], ids=lambda kind: kind.name)
def test_half_precision_weights_cost_nothing_more(models: Path, arch: str, kind: GgmlType) -> None:
    path = model(models, arch, kind)
    assert np.abs(engine_logits(path) - oracle_logits(path)).max() <= 1e-4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_quantized_models_follow_the_float64_forward(models: Path, arch: str, kind: GgmlType) -> None:
    path = model(models, arch, kind)
    logits, expected = engine_logits(path), oracle_logits(path)
    error = logits - expected
    assert np.sqrt((error**2).mean()) <= 0.02 * expected.std()
    assert np.abs(error).max() <= 0.12 * expected.std()
    rounded = np.abs(logits - oracle_logits(path, RoundedForward64)).max(axis=1)
    assert rounded[:4].min() <= 1e-4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.NVFP4], ids=lambda kind: kind.name)
def test_scale_tensors_multiply_what_matrices_give(tmp_path: Path, arch: str, kind: GgmlType) -> None:
    """Weights divided by a power of two under a scale of the same power: every sum is the same number, shifted.

    The powers are below one, so that no 8-bit scale becomes subnormal.
    """
    logits = []
    for scale in (None, 0.25, 0.0625):
        path = tmp_path / f"{scale}.gguf"
        write_random_model(path, arch=arch, n_embd=128, n_ff=192, weight_type=kind, scale=scale)
        logits.append(engine_logits(path).tobytes())
    assert logits[0] == logits[1] == logits[2]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rotation", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kind: kind.name)
def test_a_history_type_costs_no_more_than_its_bits(models: Path, arch: str, kv: GgmlType, rotation: bool) -> None:
    path = model(models, arch, GgmlType.F32)
    logits, expected = engine_logits(path, kv, rotation=rotation), oracle_logits(path)
    assert mean_divergence(expected, logits) <= MEAN_KLD[kv]
    same_choice = (logits.argmax(axis=1) == expected.argmax(axis=1)).mean()
    assert same_choice >= (0.99 if kv in (*FLOATS, GgmlType.Q8_0) else 0.9)


def test_rotation_is_for_quantized_sides_alone(models: Path) -> None:
    path = model(models, "llama", GgmlType.F32)
    for kv in (GgmlType.F16, GgmlType.Q8_0):
        rotated, plain = engine_logits(path, kv), engine_logits(path, kv, rotation=False)
        assert (rotated.tobytes() == plain.tobytes()) is (kv is GgmlType.F16)
