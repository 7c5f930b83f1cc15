"""What hybrid files may say, in how many ways, and what is refused by name before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pykvstream.core.device import Device
from pykvstream.errors import FormatError, KvStreamError, Unsupported
from pykvstream.gguf import GgmlType, GgufFile, ValueType
from pykvstream.models import ModelConfig
from pykvstream.models.hybrid_config import DeltaSize
from pykvstream.models.tensors import check_tensors, selections
from pykvstream.models.weights import FileWeights
from tests.random_hybrid import Experts, HybridShape, Value, write_random_hybrid

SMALL = HybridShape(n_layers=4, n_embd=64, head_dim=16, n_rot=8, sections=(2, 1, 1, 0), n_ff=96, state=16, n_vocab=300)
WITH_MTP = replace(SMALL, n_mtp=1)
WITH_EXPERTS = replace(SMALL, experts=Experts(4, 2, 32, 64), n_mtp=1)

VARIANTS = {
    "plain": SMALL,
    "mtp": WITH_MTP,
    "experts": WITH_EXPERTS,
    "fused": replace(WITH_MTP, is_fused=True),
    "fused experts": replace(WITH_EXPERTS, is_fused=True),
    "scales": replace(WITH_MTP, has_scales=True),
    "scales of fused experts": replace(WITH_EXPERTS, has_scales=True, is_fused=True),
    "short dt": replace(SMALL, has_short_dt=True),
    "lists": replace(WITH_MTP, lists_heads=True, lists_recurrent=True, widths=(96, 64, 32, 96, 64)),
    "tied, cut vocabulary": replace(SMALL, is_tied=True, n_tokens=280),
    "three sections": replace(SMALL, sections=(2, 1, 1)),
}


@contextmanager
def opened(path: Path) -> Iterator[tuple[GgufFile, ModelConfig]]:
    with GgufFile.open(path) as file:
        config = ModelConfig.from_gguf(file)
        check_tensors(file, config)
        yield file, config


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_understood(tmp_path: Path, name: str) -> None:
    shape = VARIANTS[name]
    write_random_hybrid(tmp_path / "m.gguf", shape)
    with opened(tmp_path / "m.gguf") as (_, config):
        assert config.hybrid is not None
        assert config.attention_layers == (3,)
        assert config.hybrid.recurrent_layers == (0, 1, 2)
        assert (config.n_layers, config.hybrid.n_mtp_blocks) == (4, shape.n_mtp)
        assert (config.n_heads, config.n_kv_heads, config.n_vocab) == (4, 2, 300)
        assert config.hybrid.rope_sections == (2, 1, 1)
        assert config.hybrid.n_ff == (shape.widths or () if shape.experts else shape.widths or (96,) * shape.n_blocks)
        assert config.hybrid.delta.channels == 16 * (2 + 2 + 6)


def test_flags_override_the_interval(tmp_path: Path) -> None:
    keys: dict[str, Value | None] = {
        "full_attention_interval": 2,
        "attention.recurrent_layers": ([True, True, True, False, False], ValueType.BOOL),
    }
    write_random_hybrid(tmp_path / "m.gguf", WITH_MTP, keys=keys)
    with opened(tmp_path / "m.gguf") as (_, config):
        assert config.attention_layers == (3,)


def test_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    missing = ("rope.freq_base", "full_attention_interval", "attention.head_count_kv", "rope.dimension_count")
    shape = replace(SMALL, n_kv_heads=4, n_rot=16, sections=(3, 3, 2, 0))
    write_random_hybrid(tmp_path / "m.gguf", shape, keys=dict.fromkeys(missing))
    with opened(tmp_path / "m.gguf") as (_, config):
        assert (config.rope_base, config.n_kv_heads, config.n_rot) == (10000.0, 4, 16)
        assert config.attention_layers == (3,)


def test_sizes_of_the_state_are_those_of_the_largest_model() -> None:
    size = DeltaSize(n_key_heads=16, n_value_heads=48, head_dim=128, conv_width=4)
    assert size.state_bytes == 3 * 2**20 + 120 * 2**10
    assert size.log_row_bytes == 41_344


def ints(*values: int) -> Value:
    return values, ValueType.INT32


CONTRADICTIONS: dict[str, tuple[HybridShape, dict[str, Value | None], type[KvStreamError], str]] = {
    "inner size": (SMALL, {"ssm.inner_size": 80}, FormatError, "ssm.inner_size"),
    "value heads": (SMALL, {"ssm.time_step_rank": 5, "ssm.inner_size": 80}, FormatError, "ssm.time_step_rank"),
    "state size": (SMALL, {"ssm.state_size": 24, "ssm.inner_size": 144}, Unsupported, "ssm.state_size 24"),
    "kernel": (SMALL, {"ssm.conv_kernel": 9}, Unsupported, "ssm.conv_kernel 9"),
    "no kernel": (SMALL, {"ssm.conv_kernel": None}, FormatError, "ssm.conv_kernel"),
    "sections": (SMALL, {"rope.dimension_sections": ints(2, 2, 1, 0)}, FormatError, "dimension_sections"),
    "two sections": (SMALL, {"rope.dimension_sections": ints(2, 2)}, FormatError, "dimension_sections"),
    "fourth section": (SMALL, {"rope.dimension_sections": ints(2, 1, 0, 1)}, Unsupported, "fourth section"),
    "no sections": (SMALL, {"rope.dimension_sections": None}, FormatError, "dimension_sections"),
    "yarn": (SMALL, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, Unsupported, "'yarn'"),
    "interval": (SMALL, {"full_attention_interval": 0}, FormatError, "full_attention_interval"),
    "no attention": (SMALL, {"full_attention_interval": 5}, Unsupported, "without full attention"),
    "flags": (
        SMALL,
        {"attention.recurrent_layers": ([True, False], ValueType.BOOL)},
        FormatError,
        "recurrent_layers",
    ),
    "flag of an mtp block": (
        WITH_MTP,
        {"attention.recurrent_layers": ([True, True, True, False, True], ValueType.BOOL)},
        FormatError,
        "recurrent_layers",
    ),
    "heads": (SMALL, {"attention.head_count_kv": ints(2, 2, 2, 0)}, FormatError, "head_count_kv"),
    "mtp blocks": (SMALL, {"nextn_predict_layers": 4}, FormatError, "nextn_predict_layers"),
    "mtp tensors": (replace(SMALL, interval=2), {"nextn_predict_layers": 1}, FormatError, "blk.3.nextn"),
    "dense with experts": (SMALL, {"expert_count": 4}, Unsupported, "with experts"),
    "experts used": (WITH_EXPERTS, {"expert_used_count": 5}, FormatError, "expert_used_count"),
    "no experts": (WITH_EXPERTS, {"expert_count": None}, FormatError, "expert_count"),
    "expert width": (WITH_EXPERTS, {"expert_feed_forward_length": 64}, FormatError, "exps"),
    "width": (SMALL, {"feed_forward_length": ints(96, 96, 64, 96)}, FormatError, "blk.2.ffn"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_by_name(tmp_path: Path, name: str) -> None:
    shape, keys, error, words = CONTRADICTIONS[name]
    write_random_hybrid(tmp_path / "m.gguf", shape, keys=keys)
    with pytest.raises(error, match=words), opened(tmp_path / "m.gguf"):
        pass


VECTOR = np.ones(64, np.float32)
TENSORS = {
    "missing": (SMALL, {"blk.1.ssm_a": None}, FormatError, "blk.1.ssm_a"),
    "missing bias": (SMALL, {"blk.0.ssm_dt.bias": None}, FormatError, "blk.0.ssm_dt.bias"),
    "two biases": (SMALL, {"blk.0.ssm_dt": np.ones(6, np.float32)}, Unsupported, "blk.0.ssm_dt.bias"),
    "shape": (SMALL, {"blk.3.attn_q_norm.weight": VECTOR}, FormatError, "blk.3.attn_q_norm.weight"),
    "unknown": (SMALL, {"blk.3.attn_sinks.weight": VECTOR}, Unsupported, "blk.3.attn_sinks.weight"),
    "fused and apart": (
        replace(SMALL, is_fused=True),
        {"blk.3.attn_q.weight": np.ones((128, 64), np.float32)},
        Unsupported,
        "blk.3.attn_q.weight",
    ),
    "mtp in a file without": (SMALL, {"blk.4.nextn.enorm.weight": VECTOR}, Unsupported, "blk.4.nextn.enorm"),
    "mtp tensor": (WITH_MTP, {"blk.4.nextn.enorm.weight": None}, FormatError, "blk.4.nextn.enorm"),
    "scale of the embedding": (SMALL, {"token_embd.scale": VECTOR[:1]}, Unsupported, "token_embd.scale"),
    "scale of two": (SMALL, {"blk.3.attn_q.scale": VECTOR[:2]}, FormatError, "blk.3.attn_q.scale"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_out_of_place_is_refused_by_name(tmp_path: Path, name: str) -> None:
    shape, tensors, error, words = TENSORS[name]
    write_random_hybrid(tmp_path / "m.gguf", shape, tensors=tensors)
    with pytest.raises(error, match=words), opened(tmp_path / "m.gguf"):
        pass


def test_a_lone_mtp_head_is_no_model(tmp_path: Path) -> None:
    trunk = [f"blk.{i}.attn_norm.weight" for i in range(4)]
    write_random_hybrid(tmp_path / "mtp-m.gguf", WITH_MTP, tensors=dict.fromkeys(trunk))
    with pytest.raises(Unsupported, match="holds only the MTP head"), opened(tmp_path / "mtp-m.gguf"):
        pass


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q8_0], ids=lambda kind: kind.name)
def test_selected_rows_are_those_of_the_parts(tmp_path: Path, kind: GgmlType) -> None:
    """Fused or not, each part has the same bytes; query and gate alternate head by head."""
    apart = replace(WITH_EXPERTS, weight_type=kind)
    write_random_hybrid(tmp_path / "apart.gguf", apart)
    write_random_hybrid(tmp_path / "fused.gguf", replace(apart, is_fused=True))
    with opened(tmp_path / "apart.gguf") as (file, config), opened(tmp_path / "fused.gguf") as (fused, _):
        names = selections(fused, config)
        assert set(names) >= {"blk.3.attn_k.weight", "blk.4.attn_v.weight", "blk.0.ffn_up_exps.weight"}
        for name in names:
            assert selected(fused, config, name) == selected(file, config, name), name
        heads = file.tensor_array("blk.3.attn_q.weight").reshape(4, 2, 16, 64)
        expected = heads[:, 1].tobytes() if kind is GgmlType.F32 else None
        assert expected is None or selected(file, config, "blk.3.attn_q.gate") == expected


def selected(file: GgufFile, config: ModelConfig, name: str) -> bytes:
    parts = selections(file, config)
    with Device(1) as device:
        return FileWeights(file, device, selections=parts)._bytes(name, parts.get(name)).tobytes()


def test_a_declared_selection_reads_nothing(tmp_path: Path) -> None:
    write_random_hybrid(tmp_path / "m.gguf", replace(WITH_EXPERTS, is_fused=True))
    with opened(tmp_path / "m.gguf") as (file, config), Device(1) as device:
        declared, loaded = (
            FileWeights(file, device, declared=flag, selections=selections(file, config)) for flag in (True, False)
        )
        for name in ("blk.3.attn_q.query", "blk.3.attn_k.weight", "blk.0.ffn_gate_exps.weight"):
            sizes = [weights.panels(name).device_bytes for weights in (declared, loaded)]
            assert declared.shape(name) == loaded.shape(name)
            assert sizes[0] == sizes[1] > 0
        declared.close()
        loaded.close()
