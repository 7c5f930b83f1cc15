"""Keys that would change the mathematics: computed, or refused by name, in every architecture alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile, ValueType
from pykvstream.models import ModelConfig
from tests.models import write_random_model
from tests.random_hybrid import Experts, HybridShape, Value, write_random_hybrid

SMALL = HybridShape(n_layers=4, n_embd=64, head_dim=16, n_rot=8, sections=(2, 1, 1, 0), n_ff=96, state=16, n_vocab=300)
SHAPES = {"qwen35": SMALL, "qwen35moe": replace(SMALL, experts=Experts(4, 2, 32, 64))}
DENSE = ("llama", "qwen3")
ARCHITECTURES = (*DENSE, *SHAPES)
HEAD_DIM = 16


def config_of(path: Path, arch: str, keys: Mapping[str, int | float | bool | str]) -> ModelConfig:
    if arch in DENSE:
        write_random_model(path / "m.gguf", arch=arch, n_layers=1, keys=keys)
    else:
        values: dict[str, Value | None] = dict(keys)
        write_random_hybrid(path / "m.gguf", SHAPES[arch], keys=values)
    with GgufFile.open(path / "m.gguf") as file:
        return ModelConfig.from_gguf(file)


TYPE, FACTOR, OLD = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
SCALINGS: dict[str, tuple[dict[str, int | float | bool | str], float]] = {
    "nothing": ({}, 1.0),
    "factor alone": ({FACTOR: 4.0}, 0.25),
    "old key alone": ({OLD: 4.0}, 0.25),
    "both": ({FACTOR: 4.0, OLD: 2.0}, 0.25),
    "stated": ({TYPE: "linear", FACTOR: 8.0}, 0.125),
    "stated, old key": ({TYPE: "linear", OLD: 8.0}, 0.125),
    "none": ({TYPE: "none", FACTOR: 4.0}, 1.0),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_positions_are_scaled_by_the_factor_whether_or_not_a_type_is_stated(
    tmp_path: Path, arch: str, name: str
) -> None:
    keys, scale = SCALINGS[name]
    assert config_of(tmp_path, arch, keys).rope_scale == scale


@pytest.mark.parametrize("keys", [{TYPE: "linear"}, {FACTOR: 0.0}, {OLD: -1.0}, {TYPE: "linear", FACTOR: 0.0}])
def test_a_factor_that_is_missing_or_no_factor_is_refused(
    tmp_path: Path, keys: dict[str, int | float | bool | str]
) -> None:
    with pytest.raises(FormatError, match=r"rope\.scal"):
        config_of(tmp_path, "llama", keys)


OTHERS: dict[str, tuple[int | float | bool | str, ...]] = {
    "attention.sliding_window": (4096,),
    "attention.scale": (0.5,),
    "attention.causal": (False,),
    "attention.clamp_kqv": (8.0, "x"),
    "attention.max_alibi_bias": (8.0,),
    "attn_logit_softcapping": (50.0, float("nan")),
    "final_logit_softcapping": (30.0,),
    "logit_scale": (0.5,),
    "residual_scale": (0.22,),
    "embedding_scale": (12.0,),
    "rope.scaling.attn_factor": (1.2,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.1,),
    "rope.scaling.yarn_beta_fast": (16.0,),
    "use_parallel_residual": (True,),
}


@pytest.mark.parametrize("key", OTHERS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_another_mathematics_is_refused_by_its_key(tmp_path: Path, arch: str, key: str) -> None:
    for value in OTHERS[key]:
        with pytest.raises(Unsupported, match=rf"{arch}\.{key} .* is not supported; supported: "):
            config_of(tmp_path, arch, {key: value})


OF_EXPERTS = {"expert_gating_func": 2, "expert_weights_norm": False, "expert_group_count": 8}


@pytest.mark.parametrize("key", OF_EXPERTS)
def test_another_routing_is_refused_where_there_are_experts(tmp_path: Path, key: str) -> None:
    keys = {key: OF_EXPERTS[key]}
    with pytest.raises(Unsupported, match=rf"qwen35moe\.{key} "):
        config_of(tmp_path, "qwen35moe", keys)
    assert config_of(tmp_path, "llama", keys).architecture == "llama"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_computed_anyway_and_what_is_only_told_is_accepted(tmp_path: Path, arch: str) -> None:
    same: dict[str, int | float | bool | str] = {
        "attention.causal": True,
        "attention.scale": HEAD_DIM**-0.5,
        "attention.sliding_window": 0,
        "expert_gating_func": 1,
        "expert_weights_norm": True,
        "final_logit_softcapping": 0.0,
        "logit_scale": 1.0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.finetuned": False,
        "rope.scaling.original_context_length": 512,
        "use_parallel_residual": False,
        "never.heard_of": 7,
    }
    assert config_of(tmp_path, arch, same) == config_of(tmp_path, arch, {})


def test_a_list_is_accepted_when_each_of_it_is(tmp_path: Path) -> None:
    for values, is_refused in (([0, 0, 0, 0], False), ([0, 64, 0, 0], True)):
        keys: dict[str, Value | None] = {"attention.sliding_window": (values, ValueType.INT32)}
        write_random_hybrid(tmp_path / "m.gguf", SMALL, keys=keys)
        with GgufFile.open(tmp_path / "m.gguf") as file:
            if is_refused:
                with pytest.raises(Unsupported, match=r"sliding_window \[0, 64, 0, 0\]"):
                    ModelConfig.from_gguf(file)
            else:
                assert ModelConfig.from_gguf(file).architecture == "qwen35"


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 1.5, float("nan")])
def test_an_epsilon_that_is_no_small_number_is_refused_by_its_key(tmp_path: Path, epsilon: float) -> None:
    keys: dict[str, Value | None] = {"attention.layer_norm_rms_epsilon": epsilon}
    write_random_hybrid(tmp_path / "m.gguf", SMALL, keys=keys)
    with GgufFile.open(tmp_path / "m.gguf") as file, pytest.raises(FormatError, match="layer_norm_rms_epsilon"):
        ModelConfig.from_gguf(file)
