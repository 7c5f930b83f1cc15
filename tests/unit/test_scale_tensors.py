"""Files whose matrices have scales beside them: which tensors have a place, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pykvstream.core.device import Device
from pykvstream.errors import FormatError, Unsupported
from pykvstream.gguf import GgufFile
from pykvstream.models.config import ModelConfig
from pykvstream.models.tensors import check_tensors
from pykvstream.models.weights import FileWeights
from tests.models import write_random_model


def check_with(path: Path, name: str, values: list[float]) -> None:
    write_random_model(path, extra={name: values})
    with GgufFile.open(path) as file:
        check_tensors(file, ModelConfig.from_gguf(file))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.scale", "blk.1.ffn_down.scale", "output.scale", "blk.0.ffn_up.input_scale"]
)
def test_scales_of_matrices_have_a_place(tmp_path: Path, name: str) -> None:
    check_with(tmp_path / "m.gguf", name, [2.0])


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.scale", "token_embd.scale", "blk.2.attn_q.scale", "output_norm.input_scale", "scale"]
)
def test_scales_of_anything_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        check_with(tmp_path / "m.gguf", name, [2.0])


def test_scale_for_each_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.scale.*\(64,\)|\(64,\).*\(1,\)"):
        check_with(tmp_path / "m.gguf", "blk.0.attn_q.scale", [1.0] * 64)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scale_that_is_not_finite_is_refused_when_the_weight_is_loaded(tmp_path: Path, value: float) -> None:
    name = "blk.0.attn_q.scale"
    write_random_model(tmp_path / "m.gguf", extra={name: [value]})
    with GgufFile.open(tmp_path / "m.gguf") as file, Device(1) as device:
        weights = FileWeights(file, device)
        with pytest.raises(FormatError, match=name):
            weights.panels("blk.0.attn_q.weight")
        weights.close()
