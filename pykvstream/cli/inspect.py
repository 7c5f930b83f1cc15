"""``pykvstream inspect``: what a GGUF file holds.

Holds: ``run``. Only the file is read: no tokenizer is built and no weight is touched, so that a vocabulary of 150,000
tokens takes well under a second, and any GGUF file can be shown, whether or not it is a model that runs.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from pykvstream.cli.options import InspectOptions
from pykvstream.cli.render import console, mib, printable
from pykvstream.errors import FormatError, NotFound, Unsupported
from pykvstream.gguf import GgufFile, LazyStrings, TensorInfo
from pykvstream.locate import find_model
from pykvstream.models import HYBRIDS, ModelConfig
from pykvstream.models.span import LayerSpan, cut

_LONGEST_TEXT = 72
_ARRAY_ITEMS = 4
_TOKENIZER = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_VOCABULARY = ("tokens", "merges", "scores", "token_type")


@dataclass(frozen=True, slots=True)
class TypeTotal:
    """All tensors of one type."""

    name: str
    n_tensors: int
    n_values: int
    n_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.n_values if self.n_values else 0.0


def run(options: InspectOptions) -> int:
    """Print what was asked for. Raises ``NotFound``, ``FormatError``."""
    with GgufFile.open(find_model(options.model)) as file:
        if options.template:
            _print_template(file)
        elif options.json:
            result = _as_json(file, options.tensors)
            if options.gpu_layers is not None:
                result["parts"] = part_weights(file, options.gpu_layers)
            print(json.dumps(result))
        else:
            _print_tables(file, options.tensors)
            if options.gpu_layers is not None:
                for name, part in part_weights(file, options.gpu_layers).items():
                    _print_pairs(console(sys.stdout), name, {key: str(value) for key, value in part.items()})
    return 0


def part_weights(file: GgufFile, gpu_layers: int | str) -> dict[str, dict[str, object]]:
    """Of a model that is cut: layers, tensors and bytes of the file that go to the CPU and to the device.

    Raises as ``ModelConfig.from_gguf`` and ``cut``. A tied embedding goes to both, like tensors that each part reads.
    """
    config = ModelConfig.from_gguf(file)
    told: dict[str, dict[str, object]] = {}
    for name, span in zip(("cpu", "device"), cut(config, gpu_layers), strict=True):
        if span is not None:
            tensors = [t for t in file.tensors.values() if _belongs(t.name, span, file)]
            told[name] = {
                "first_layer": span.begin,
                "last_layer": span.end - 1,
                "with_keys_and_values": len(span.attention_layers(config)),
                "tensors": len(tensors),
                "bytes": sum(t.nbytes for t in tensors),
            }
    return told


def _belongs(tensor: str, span: LayerSpan, file: GgufFile) -> bool:
    """Blocks behind the trunk are an MTP head's, which is with the last layers."""
    if tensor.startswith("blk."):
        block = int(tensor.split(".")[1])
        return block in span.layers or (span.is_last and block >= span.n_layers)
    if tensor.startswith("token_embd."):
        return span.is_first or "output.weight" not in file.tensors
    return span.is_last if tensor.startswith("output") else True


def type_totals(file: GgufFile) -> list[TypeTotal]:
    """Tensors by type, the most bytes first."""
    by_type: dict[str, list[TensorInfo]] = {}
    for tensor in file.tensors.values():
        by_type.setdefault(tensor.type.name, []).append(tensor)
    totals = [
        TypeTotal(name, len(infos), sum(t.n_values for t in infos), sum(t.nbytes for t in infos))
        for name, infos in by_type.items()
    ]
    return sorted(totals, key=lambda total: (-total.n_bytes, total.name))


def _sum(totals: list[TypeTotal]) -> TypeTotal:
    return TypeTotal(
        "all", sum(t.n_tensors for t in totals), sum(t.n_values for t in totals), sum(t.n_bytes for t in totals)
    )


def _text(file: GgufFile, key: str) -> str | None:
    """A string of the metadata, whatever its bytes; None where the key is missing or holds something else."""
    if key not in file.metadata:
        return None
    entry = file.metadata.entry(key)
    if entry.element is not None or not isinstance(entry.value, LazyStrings):
        return None
    return entry.value.raw(0).decode("utf-8", "replace")


def _plain(file: GgufFile, key: str) -> object:
    """A value as JSON has it; arrays as their type, length and first items."""
    entry = file.metadata.entry(key)
    if isinstance(entry.value, LazyStrings):
        if entry.element is None:
            return _text(file, key)
        first: list[object] = [entry.value.raw(i).decode("utf-8", "replace") for i in _first(len(entry.value))]
        return {"type": entry.describe(), "length": len(entry.value), "first": first}
    if isinstance(entry.value, np.ndarray):
        items = [_finite(item) for item in entry.value[:_ARRAY_ITEMS].tolist()]
        return {"type": entry.describe(), "length": len(entry.value), "first": items}
    return _finite(entry.value)


def _first(length: int) -> range:
    return range(min(length, _ARRAY_ITEMS))


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(file: GgufFile, key: str) -> str:
    """A value on one line."""
    value = _plain(file, key)
    if isinstance(value, dict):
        items = ", ".join(_cut(item) if isinstance(item, str) else str(item) for item in value["first"])
        more = ", ..." if value["length"] > len(value["first"]) else ""
        return f"{value['length']:,} x {value['type'].removeprefix('array of ')}: [{items}{more}]"
    return _cut(value) if isinstance(value, str) else str(value)


def _cut(text: str) -> str:
    short = text[:_LONGEST_TEXT]
    shown = printable(short).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(short) == len(text) else f"{shown}... ({len(text):,} characters)"


def hybrid_summary(file: GgufFile) -> dict[str, object]:
    """Of a hybrid: which blocks attend, which recur, which are MTP heads, and bytes of recurrent state and log.

    Empty for other files; of a hybrid that is refused, why.
    """
    if _text(file, "general.architecture") not in HYBRIDS:
        return {}
    try:
        hybrid = ModelConfig.from_gguf(file).hybrid
    except (FormatError, Unsupported) as error:
        return {"refused": str(error)}
    if hybrid is None:
        return {}
    n_recurrent = len(hybrid.recurrent_layers)
    return {
        "full_attention_layers": list(hybrid.attention_layers),
        "recurrent_layers": list(hybrid.recurrent_layers),
        "mtp_blocks": list(hybrid.mtp_blocks),
        "state_bytes": n_recurrent * hybrid.delta.state_bytes,
        "log_bytes_per_row": n_recurrent * hybrid.delta.log_row_bytes,
        "experts": None if hybrid.experts is None else asdict(hybrid.experts),
    }


def _tokenizer(file: GgufFile) -> dict[str, object]:
    """What there is to say of the tokenizer without building it."""
    summary: dict[str, object] = {}
    for name in _VOCABULARY[:2]:
        if _TOKENIZER + name in file.metadata:
            entry = file.metadata.entry(_TOKENIZER + name)
            summary[f"n_{name}"] = len(entry.value) if isinstance(entry.value, LazyStrings) else None
    for key in file.metadata:
        name = key.removeprefix(_TOKENIZER)
        if name == key or name in _VOCABULARY:
            continue
        summary[name] = _plain(file, key)
        if name.endswith("_token_id"):
            summary[name.removesuffix("_id")] = _token(file, summary[name])
    template = _text(file, _TEMPLATE)
    summary["chat_template_characters"] = None if template is None else len(template)
    return summary


def _token(file: GgufFile, index: object) -> str | None:
    tokens = file.metadata.entry(_TOKENIZER + "tokens").value if _TOKENIZER + "tokens" in file.metadata else None
    if isinstance(tokens, LazyStrings) and isinstance(index, int) and 0 <= index < len(tokens):
        return tokens.raw(index).decode("utf-8", "replace")
    return None


def _as_json(file: GgufFile, with_tensors: bool) -> dict[str, object]:
    totals = type_totals(file)
    result: dict[str, object] = {
        "files": [str(path) for path in file.paths],
        "version": file.version,
        "alignment": file.alignment,
        "metadata": {key: _plain(file, key) for key in file.metadata},
        "hybrid": hybrid_summary(file) or None,
        "tokenizer": _tokenizer(file),
        "tensors": {
            "count": len(file.tensors),
            "bytes": sum(total.n_bytes for total in totals),
            "types": [
                {"type": t.name, "count": t.n_tensors, "values": t.n_values, "bytes": t.n_bytes,
                 "bits_per_weight": t.bits_per_weight}
                for t in totals
            ],
        },
    }  # fmt: skip
    if with_tensors:
        result["tensor_list"] = [_tensor(t) for t in file.tensors.values()]
    return result


def _tensor(t: TensorInfo) -> dict[str, object]:
    return {
        "name": t.name,
        "type": t.type.name,
        "shape": list(t.shape),
        "bytes": t.nbytes,
        "offset": t.offset,
        "shard": t.shard,
    }


def _print_template(file: GgufFile) -> None:
    template = _text(file, _TEMPLATE)
    if template is None:
        raise NotFound("the file has no chat template (key 'tokenizer.chat_template')")
    print(printable(template) if sys.stdout.isatty() else template)


def _print_tables(file: GgufFile, with_tensors: bool) -> None:
    out = console(sys.stdout)
    names = ", ".join(printable(str(path)) for path in file.paths)
    out.print(f"{names}: GGUF version {file.version}, alignment {file.alignment}", soft_wrap=True)
    _print_pairs(out, "metadata", {key: _shown(file, key) for key in file.metadata if not key.startswith("tokenizer.")})
    hybrid = {name: _cut(str(value)) for name, value in hybrid_summary(file).items() if value not in (None, [])}
    _print_pairs(out, "hybrid", hybrid)
    out.print(_types_table(type_totals(file)))
    if with_tensors:
        out.print(_tensor_table(file))
    tokenizer = {name: _cut(str(value)) for name, value in _tokenizer(file).items() if value is not None}
    _print_pairs(out, "tokenizer", tokenizer)
    template = _text(file, _TEMPLATE)
    if template is not None:
        out.print(f"chat template: {_cut(template)}", soft_wrap=True)
        out.print("(--template prints it whole)")


def _print_pairs(out: Console, title: str, pairs: dict[str, str]) -> None:
    if not pairs:
        return
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(printable(name), value)
    out.print(table)


def _types_table(totals: list[TypeTotal]) -> Table:
    table = Table(title="tensors", title_justify="left", show_footer=bool(totals))
    whole = _sum(totals)
    cells = (
        ("type", whole.name), ("tensors", f"{whole.n_tensors:,}"), ("values", f"{whole.n_values:,}"),
        ("size", mib(whole.n_bytes)), ("bits per weight", f"{whole.bits_per_weight:.2f}"),
    )  # fmt: skip
    for heading, footer in cells:
        table.add_column(heading, footer, justify="left" if heading == "type" else "right")
    for t in totals:
        table.add_row(t.name, f"{t.n_tensors:,}", f"{t.n_values:,}", mib(t.n_bytes), f"{t.bits_per_weight:.2f}")
    return table


def _tensor_table(file: GgufFile) -> Table:
    table = Table(title="every tensor", title_justify="left")
    for heading in ("name", "type", "shape", "bytes", "offset"):
        table.add_column(heading, justify="right" if heading in ("bytes", "offset") else "left", no_wrap=True)
    for t in file.tensors.values():
        shape = " x ".join(str(n) for n in t.shape)
        table.add_row(printable(t.name), t.type.name, shape, f"{t.nbytes:,}", f"{t.offset:,}")
    return table
