"""The random models of ``tests/models.py`` and their float64 forward pass, on which oracle tests rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pykvstream.gguf import DECODABLE, GgmlType, GgufFile
from tests.models import SMALLEST_VOCABULARY, byte_level_vocabulary, write_random_model
from tests.oracle.forward64 import Forward64, forward

ARCHITECTURES = ("llama", "qwen3")
KINDS = [kind for kind in GgmlType if kind in DECODABLE]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_same_arguments_give_the_same_bytes(tmp_path: Path, arch: str) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_model(tmp_path / name, arch=arch, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_of_every_weight_type_have_a_deviation_near_one(
    tmp_path: Path, arch: str, kind: GgmlType
) -> None:
    path = tmp_path / "m.gguf"
    for tied in (False, True):
        write_random_model(path, arch=arch, n_embd=256, n_ff=256, weight_type=kind, tied=tied)
        with GgufFile.open(path) as file:
            assert ("output.weight" in file.tensors) is not tied
            assert file.tensors["blk.1.ffn_down.weight"].type is kind
            logits = forward(file, np.arange(24))
        assert logits.shape == (24, 320)
        assert 0.7 < logits.std() < 1.5


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_oracle_gives_the_same_rows_in_pieces_and_after_truncation(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "m.gguf"
    write_random_model(path, arch=arch, n_layers=3, n_kv_heads=1, head_dim=24)
    tokens = np.random.default_rng(0).integers(0, 300, 40)
    with GgufFile.open(path) as file:
        whole = forward(file, tokens)
        model = Forward64(file)
        pieces = [model(tokens[:7]), model(tokens[7:8]), model(tokens[8:30])]
        model.truncate(11)
        pieces[2:] = [pieces[2][:3], model(tokens[11:])]
    np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_oracle_logits_depend_on_every_earlier_token_and_on_order(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "m.gguf"
    write_random_model(path, arch=arch)
    with GgufFile.open(path) as file:
        base = forward(file, [1, 2, 3, 4, 5])
        swapped = forward(file, [1, 3, 2, 4, 5])
        np.testing.assert_array_equal(base[0], swapped[0])
        assert np.abs(base[4] - swapped[4]).max() > 1e-3
        for changed in range(5):
            tokens = [1, 2, 3, 4, 5]
            tokens[changed] = 99
            assert np.abs(base[4] - forward(file, tokens)[4]).max() > 1e-3


def test_oracle_pairs_neighbours_for_llama_and_halves_for_qwen3(tmp_path: Path) -> None:
    x = np.zeros((1, 1, 16))
    x[..., 0] = 1
    for arch, partner in (("llama", 1), ("qwen3", 8)):
        write_random_model(tmp_path / arch, arch=arch)
        with GgufFile.open(tmp_path / arch) as file:
            rotated = Forward64(file)._rotate(x, np.array([1]))[0, 0]
        need = np.zeros(16)
        need[0], need[partner] = np.cos(1), np.sin(1)
        np.testing.assert_allclose(rotated, need, atol=1e-15)


@pytest.mark.parametrize("n_vocab", [SMALLEST_VOCABULARY, 262, 320, 1000])
def test_vocabulary_is_a_complete_byte_level_bpe(n_vocab: int) -> None:
    vocabulary = byte_level_vocabulary(n_vocab)
    assert len(set(vocabulary.tokens)) == len(vocabulary.tokens) == len(vocabulary.types) == n_vocab
    for merge in vocabulary.merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(vocabulary.tokens)
    assert vocabulary.types[vocabulary.id("<|im_start|>")] == 3
    assert all(len(token) == 1 for token in vocabulary.tokens[:256])


def test_vocabulary_too_small_for_bytes_and_control_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="need at least 259"):
        byte_level_vocabulary(258)
