"""``pykvstream kernels``: what models need on cards, compiled or found before they are opened, or written into a pack.

Holds: ``run``. No weight is read, so that this is the long part of a first start and nothing else. With architectures
no card is needed either.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

from pykvstream.cli.options import KernelsOptions, ModelOptions
from pykvstream.cli.outputs import check_outputs
from pykvstream.cli.render import compiling, mib
from pykvstream.core.cuda import CudaPlanner, KernelKey, open_device
from pykvstream.core.device import Device
from pykvstream.errors import DeviceError, InvalidArgument
from pykvstream.gguf import GgufFile
from pykvstream.kernels import collect_images, pack_bytes
from pykvstream.locate import find_model
from pykvstream.models import ModelConfig
from pykvstream.models.span import cut
from pykvstream.runtime.admission import check_context
from pykvstream.runtime.catalogue import cache_type, catalogue, kernel_keys
from pykvstream.runtime.opening import provide
from pykvstream.runtime.target import TargetOptions
from pykvstream.runtime.whole_file import check_replaceable, replacing


def run(options: KernelsOptions) -> int:
    """Print the list. Raises ``Unsupported`` naming a kernel that nobody has."""
    began = time.monotonic()
    if options.archs and any(model.kernels for model in options.models):
        raise InvalidArgument("--kernels is given to a card; with --arch there is none, and nobody would read it")
    if options.output is not None:
        _check_output(options)
    if options.archs:
        keys = _needed(options)
        with compiling(options.progress) as show:
            made, n_compiled = collect_images(keys, progress=show)
        n_found, n_packed = len(made) - n_compiled, 0
    else:
        keys, made, n_packed, n_found, n_compiled = _provide(options)
    if options.output is not None and not keys:
        raise InvalidArgument("no layer is on a card, so there is no kernel to pack")
    n_bytes = 0 if options.output is None else _write(options, [(key, made[key]) for key in keys])
    spent = time.monotonic() - began
    if options.json:
        listed = [{"source": key.source, "macros": dict(key.macros), "arch": key.arch} for key in keys]
        counts = {"packed": n_packed, "found": n_found, "compiled": n_compiled, "pack_bytes": n_bytes}
        print(json.dumps({"kernels": listed, **counts}))
        return 0
    if options.output is None:
        for key in keys:
            print(key)
    packed = f"{n_packed} came from packs, " if n_packed else ""
    written = "" if options.output is None else f"; {options.output}: {mib(n_bytes)}"
    print(f"{len(keys)} kernels: {packed}{n_found} were at hand, {n_compiled} compiled, {spent:.1f} s{written}")
    return 0


def _check_output(options: KernelsOptions) -> None:
    """Raises ``DeviceError``, ``InvalidArgument`` for what ``_write`` could not or must not write."""
    assert options.output is not None
    check_outputs({"-o": options.output}, [find_model(model.model) for model in options.models])
    try:
        check_replaceable(options.output)
    except OSError as error:
        raise DeviceError(f"pack of kernels {str(options.output)!r}: cannot be written: {error.strerror}") from None


def _needed(options: KernelsOptions) -> list[KernelKey]:
    """What the models need on every architecture, and the catalogue where all of it is asked for."""
    found: dict[KernelKey, None] = {}
    for arch in options.archs:
        with CudaPlanner(arch) as device:
            for model in options.models:
                found |= dict.fromkeys(_keys_of(model, device))
        if options.has_all:
            found |= dict.fromkeys(catalogue(arch))
    return list(found)


def _keys_of(model: ModelOptions, device: Device) -> list[KernelKey]:
    """What a model with these options needs, its MTP head too where the file has one."""
    with GgufFile.open(find_model(model.model)) as file:
        config = ModelConfig.from_gguf(file)
        ctx_tokens = config.n_ctx_train if model.ctx_size is None else model.ctx_size
        check_context(ctx_tokens, config.n_ctx_train)
        types = cache_type(model.cache_type_k), cache_type(model.cache_type_v)
        has_head = config.hybrid is not None and len(config.hybrid.mtp_blocks) == 1
        target = TargetOptions(*types, model.ubatch_size, ctx_tokens, model.kv_rotation, mtp=has_head)
        _, on_device = cut(config, model.gpu_layers)
        return [] if on_device is None else kernel_keys(file, config, device, target, span=on_device)


def _provide(options: KernelsOptions) -> tuple[list[KernelKey], dict[KernelKey, bytes], int, int, int]:
    """What the one model needs on the device of its options, given to it as opening would."""
    model = options.models[0]
    with ExitStack() as stack:
        device = stack.enter_context(open_device(model.device, model.threads, model.wait_limit_s))
        keys = _keys_of(model, device)
        with compiling(options.progress) as show:
            came = provide(device, model.kernels, show)
        return keys, {}, came.n_packed, came.n_found, came.n_compiled


def _write(options: KernelsOptions, images: list[tuple[KernelKey, bytes]]) -> int:
    """Write the pack, whole or not at all; returns its bytes."""
    assert options.output is not None
    data = pack_bytes(images)
    try:
        with replacing(options.output, is_public=True) as file:
            file.write(data)
    except OSError as error:
        raise DeviceError(f"pack of kernels {str(options.output)!r}: {error.strerror}") from None
    return len(data)
