"""``pykvstream kernels check``: what a model needs on a card, compiled or found before it is opened.

Holds: ``run``. No weight is read, so that this is the long part of a first start and nothing else.
"""

from __future__ import annotations

import json
import time

from pykvstream.cli.options import KernelsOptions, ModelOptions
from pykvstream.core.cuda import CudaDevice, KernelKey, open_device
from pykvstream.engine import cache_type
from pykvstream.gguf import GgufFile
from pykvstream.kernels import provide_kernels
from pykvstream.locate import find_model
from pykvstream.models import ModelConfig
from pykvstream.runtime.admission import check_context
from pykvstream.runtime.target import Blueprint, TargetOptions


def run(options: KernelsOptions) -> int:
    """Print the list. Raises ``Unsupported`` naming a kernel that nobody has."""
    began = time.monotonic()
    keys, n_found, n_compiled = provide(options.model)
    spent = time.monotonic() - began
    if options.json:
        listed = [{"source": key.source, "macros": dict(key.macros), "arch": key.arch} for key in keys]
        print(json.dumps({"kernels": listed, "found": n_found, "compiled": n_compiled}))
        return 0
    for key in keys:
        print(key)
    print(f"{len(keys)} kernels: {n_found} were at hand, {n_compiled} compiled, {spent:.1f} s")
    return 0


def provide(options: ModelOptions) -> tuple[list[KernelKey], int, int]:
    """The keys of a model with these options; how many images came from disk, and how many were compiled."""
    with GgufFile.open(find_model(options.model)) as file, open_device(options.device, options.threads) as device:
        config = ModelConfig.from_gguf(file)
        ctx_tokens = config.n_ctx_train if options.ctx_size is None else options.ctx_size
        check_context(ctx_tokens, config.n_ctx_train)
        types = cache_type(options.cache_type_k), cache_type(options.cache_type_v)
        target = TargetOptions(*types, options.ubatch_size, ctx_tokens, options.kv_rotation)
        Blueprint(file, config, device, target, declared=True).close()
        if not isinstance(device, CudaDevice):
            return [], 0, 0
        n_found, n_compiled = provide_kernels(device)
        return [key for key, _ in device.kernels()], n_found, n_compiled
