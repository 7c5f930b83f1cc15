"""Ten steps of training on a very small hybrid: the loss falls, everything learns, and the engine runs what came out.

Skipped, by name, where PyTorch is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="training the demo hybrid needs torch (the extra [train])")
pytest.importorskip("pykvstream._ffi._native")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pykvstream import Model
from pykvstream.gguf import GgmlType
from tools.train_demo_hybrid import export, train
from tools.train_demo_hybrid.model import Config
from tools.train_demo_hybrid.model import Model as TorchModel
from tools.train_demo_hybrid.tokens import SPECIAL

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CONFIG = Config(
    n_vocab=len(SPECIAL) + len(BYTES), n_embd=64, n_layers=4, n_ff=96, n_heads=2, n_kv_heads=1, n_key_heads=2,
    n_value_heads=2, n_ctx=256,
)  # fmt: skip
WIDTH, STEPS = 96, 10


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Compiling takes longer than ten steps do, and so small a model has no work for a second thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):
        yield
    torch.set_num_threads(n_threads)


def rows_of(seed: int) -> tuple[object, object]:
    """Tokens that repeat, and weights that differ."""
    pattern = np.random.default_rng(seed).integers(len(SPECIAL), CONFIG.n_vocab, (4, 12))
    tokens = torch.from_numpy(np.tile(pattern, WIDTH // 12))
    return tokens, torch.from_numpy(np.where(np.arange(WIDTH) % 3 == 0, 4, 1) * np.ones((4, 1), np.int64))


def trained() -> tuple[TorchModel, list[list[float]], set[str]]:
    """The model behind ten steps, the three losses of each, and the parameters that stayed as they were."""
    torch.manual_seed(1)
    model = TorchModel(CONFIG)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tools = train.optimizers(model)
    found = []
    for _ in range(STEPS):
        trunk, mtp, chain = train.losses(model, *rows_of(1))
        (trunk + train.MTP_WEIGHT * mtp + train.CHAIN_WEIGHT * chain).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        found.append([float(each.detach()) for each in (trunk, mtp, chain)])
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    return model, found, still


def write_tokenizer(path: Path) -> None:
    """Single bytes behind the special tokens, as the real one begins."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *BYTES))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path))


def test_ten_steps_lower_every_loss_and_move_every_parameter() -> None:
    _, found, still = trained()
    first, last = found[0], found[-1]
    assert np.isfinite(found).all()
    assert all(end < 0.9 * begin for begin, end in zip(first, last, strict=True)), (first, last)
    assert still == set()


def test_the_same_seed_makes_the_same_ten_steps() -> None:
    assert trained()[1] == trained()[1]


def test_the_engine_runs_what_was_trained(tmp_path: Path) -> None:
    model, _, _ = trained()
    train.write_weights(model, tmp_path, CONFIG)
    write_tokenizer(tmp_path / "tokenizer.json")
    assert json.loads((tmp_path / "model.json").read_text())["config"]["n_embd"] == CONFIG.n_embd
    config, tensors = train.read_weights(tmp_path)
    assert config == CONFIG
    model.load_state_dict(tensors)  # what was written is rounded to bf16
    tokens, _ = rows_of(2)
    with torch.no_grad():
        hidden, _ = model(tokens[:1])
        expected = model.logits(hidden)[0].numpy()
    export.export(tmp_path, tmp_path / "small.gguf", GgmlType.F32)
    with (
        Model.open(tmp_path / "small.gguf", ctx_size=128, ubatch_size=64, threads=1, cache_type_k="f32",
                   cache_type_v="f32") as engine,
        engine.session() as session,
    ):  # fmt: skip
        got = session.forward(tokens[0].tolist(), logits="all")
    # Two implementations sum in other orders; logits have a deviation of about 1.
    assert np.abs(got - expected).max() < 2e-3 * max(1.0, float(np.abs(expected).max()))
