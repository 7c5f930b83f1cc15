"""From trained weights to a GGUF file.

    python -m tools.train_demo_hybrid.export WEIGHTS_DIR OUT.gguf [--type Q8_0]

Source: spec of the GGUF names of ``qwen35``: norms as they multiply, ``ssm_a = -exp(a_log)``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from pykvstream.gguf import GgmlType, GgufWriter, ValueType
from tools.train_demo_hybrid.parts import read_tensors

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_NORMAL, _CONTROL = 1, 3


def add_keys(writer: GgufWriter, config: dict[str, Any]) -> None:
    writer.add("general.architecture", "qwen35")
    writer.add("general.name", "pykvstream demo hybrid")
    writer.add("general.license", "mit")
    sections = [*config["rope_sections"], 0]
    for key, value in {
        "block_count": config["n_layers"] + 1,
        "nextn_predict_layers": 1,
        "context_length": config["n_ctx"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": config["n_ff"],
        "attention.head_count": config["n_heads"],
        "attention.head_count_kv": config["n_kv_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["eps"],
        "full_attention_interval": config["interval"],
        "rope.dimension_count": config["n_rot"],
        "rope.freq_base": float(config["rope_base"]),
        "ssm.conv_kernel": config["conv_width"],
        "ssm.state_size": config["delta_dim"],
        "ssm.group_count": config["n_key_heads"],
        "ssm.time_step_rank": config["n_value_heads"],
        "ssm.inner_size": config["n_value_heads"] * config["delta_dim"],
    }.items():
        writer.add(f"qwen35.{key}", value)
    writer.add_array("qwen35.rope.dimension_sections", sections, ValueType.INT32)


def add_tokenizer(writer: GgufWriter, path: Path) -> None:
    said = json.loads(path.read_text())
    ids = {**said["model"]["vocab"], **{token["content"]: token["id"] for token in said["added_tokens"]}}
    special = {token["content"] for token in said["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]]
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", "qwen35")
    writer.add_array("tokenizer.ggml.tokens", tokens, ValueType.STRING)
    kinds = [_CONTROL if token in special else _NORMAL for token in tokens]
    writer.add_array("tokenizer.ggml.token_type", kinds, ValueType.INT32)
    writer.add_array("tokenizer.ggml.merges", merges, ValueType.STRING)
    writer.add("tokenizer.ggml.eos_token_id", ids["<|im_end|>"])
    writer.add("tokenizer.ggml.padding_token_id", ids["<|endoftext|>"])
    writer.add("tokenizer.ggml.add_bos_token", False)
    writer.add("tokenizer.chat_template", CHAT_TEMPLATE)


def gguf_name(name: str, n_layers: int) -> str:
    """The GGUF name of a parameter of ``model.Model``."""
    if name in ("token_embd.weight", "output_norm.weight"):
        return name
    parts = name.split(".")
    if parts[0] == "blocks":
        block, rest = parts[1], parts[2:]
    elif parts[1] == "block":
        block, rest = str(n_layers), parts[2:]
    else:
        return f"blk.{n_layers}.nextn.{'.'.join(parts[1:])}"
    leaf = ".".join(part for part in rest if part != "mixer")
    renamed = {"ssm_conv1d": "ssm_conv1d.weight", "ssm_dt": "ssm_dt.bias", "a_log": "ssm_a"}
    return f"blk.{block}.{renamed.get(leaf, leaf)}"


def export(folder: Path, out: Path, kind: GgmlType) -> None:
    config, tensors = read_tensors(folder)
    writer = GgufWriter()
    add_keys(writer, config)
    add_tokenizer(writer, folder / "tokenizer.json")
    for name, values in tensors.items():
        target = gguf_name(name, config["n_layers"])
        chosen = -np.exp(values) if target.endswith("ssm_a") else values
        is_plain = chosen.ndim == 1 or target.endswith("conv1d.weight")
        writer.add_tensor(target, np.ascontiguousarray(chosen), GgmlType.F32 if is_plain else kind)
    writer.write(out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q8_0")
    options = parser.parse_args()
    export(options.weights, options.out, GgmlType[options.type])


if __name__ == "__main__":
    main()
