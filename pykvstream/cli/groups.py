"""Groups of flags that several commands share.

Holds: ``add_model``, ``add_device``, ``add_gpu_layers``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pykvstream.cli.options import DEFAULT_CACHE_TYPE, DEFAULT_UBATCH
from pykvstream.cli.values import arena, budget, gpu_layers, integer, positive, seconds


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    group = parser.add_argument_group("model")
    group.add_argument("model", nargs="?", metavar="MODEL",
                       help="demo, demo-hybrid, or a GGUF file, any shard of a set")  # fmt: skip
    group.add_argument("-m", "--model", dest="model_flag", metavar="MODEL", help="the same as a flag")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Context, arena, cache types, widths and threads."""
    group = parser.add_argument_group("context and memory")
    add = group.add_argument
    add("-c", "--ctx-size", type=integer(0), metavar="N",
        help="tokens of the conversation; 0 or left out: what the model was trained on")  # fmt: skip
    add("--shared-device-memory-mib", "--arena-mib", "--kv-stream-arena-mib", "--kv-stream-stage-mib", dest="arena_mib",
        type=arena, metavar="MIB",
        help="bound on device memory beside the weights; default: all of the context stays resident, as far as a"
        " quarter of the free memory allows")  # fmt: skip
    add("-ctk", "--cache-type-k", default=DEFAULT_CACHE_TYPE, metavar="TYPE", help="type of keys (default %(default)s)")
    add(
        "-ctv",
        "--cache-type-v",
        default=DEFAULT_CACHE_TYPE,
        metavar="TYPE",
        help="type of values (default %(default)s)",
    )
    add("--no-kv-rotation", dest="kv_rotation", action="store_false", help="store quantized keys and values unrotated")
    add("-ub", "--ubatch-size", type=positive(), default=DEFAULT_UBATCH, metavar="N",
        help="rows of a pass over the prompt (default %(default)s, at most 2048); on hybrids"
        " a multiple of 64")  # fmt: skip
    add("-b", "--batch-size", type=positive(), metavar="N",
        help="at least the ubatch size; changes nothing, since prompts run in passes of the ubatch size")  # fmt: skip
    add("--checkpoint-mib", type=budget, metavar="MIB",
        help="host memory for past states of hybrid models, so that conversations can go back; 0 keeps none (default:"
        " room for 32, but not more than 256 MiB)")  # fmt: skip
    add("-t", "--threads", type=integer(-1), default=0, metavar="N", help="compute threads (default: one per core)")
    add("--kernels", action="append", type=Path, default=[], metavar="FILE",
        help="a pack of kernels for the card, which `kernels pack` made; may be repeated (default: the cache, then the"
        " compiler)")  # fmt: skip
    add("-dev", "--device", default="cpu", metavar="NAME",
        help="cpu, cuda or cuda:N; `devices` lists them (default %(default)s)")  # fmt: skip
    add("--wait-limit", dest="wait_limit_s", type=seconds, metavar="S",
        help="the seconds that a wait for the card may take before it counts as lost (default: 60)")  # fmt: skip
    add_gpu_layers(group)
    add("--cpu-arena-mib", type=arena, metavar="MIB",
        help="arena of the layers that --gpu-layers leaves on the CPU; --arena-mib is then the device's (default: as"
        " without a card)")  # fmt: skip


def add_gpu_layers(group: argparse._ArgumentGroup, default: str | None = "all") -> None:
    """Where a model is cut."""
    group.add_argument(
        "-ngl", "--gpu-layers", "--n-gpu-layers", type=gpu_layers, default=default, metavar="N",
        help="the last N layers and the output run on the device, the others and the embedding on the CPU; 0: all on"
        " the CPU; all, or as many as there are: the whole model on the device"
        + (" (default all)" if default else "; shows what goes where"),
    )  # fmt: skip
