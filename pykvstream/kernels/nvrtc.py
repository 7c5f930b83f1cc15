"""The compiler of kernels: NVRTC through ``cuda.core``, which is imported when there is something to compile.

Holds: ``load_compiler``, ``has_compiler``, ``compile_image``. No card is needed to compile.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import TextIO

from pykvstream.core.cuda import KernelKey, kernel_options
from pykvstream.errors import DeviceError, Unsupported

_WHOLE = frozenset({90})
"""Architectures that are compiled for with all that they have, as nothing newer runs their images anyway."""


def load_compiler() -> ModuleType:
    """``cuda.core``, for ``compile_image``. Loaded before threads compile: its parts do not bear being imported by two.

    Raises ``Unsupported`` where it is not installed.
    """
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "Program"):
            return module
    raise Unsupported("no compiler for kernels: pip install 'pykvstream[cuda]'")


def has_compiler() -> bool:
    """Whether ``cuda.core`` is installed. It is not loaded."""
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        return False


def compile_image(core: ModuleType, source: str, key: KernelKey, log: TextIO | None = None) -> bytes:
    """A cubin. Raises ``Unsupported`` without NVRTC, ``DeviceError`` with what it says of a source. Any thread.

    ``log`` receives what the assembler says of registers and spills.
    """
    macros = [(name, str(value)) for name, value in key.macros]
    flags = kernel_options()
    options = core.ProgramOptions(
        arch=f"sm_{key.arch}{'a' if key.arch in _WHOLE else ''}",
        std=flags.pop("std"),
        define_macro=macros or None,
        ptxas_options=None if log is None else ["-v"],
        **{name: value == "1" for name, value in flags.items()},
    )
    try:
        program = core.Program(source, "c++", options)
        image = bytes(program.compile("cubin", logs=log).code)
        program.close()
    except Exception as error:
        # Which classes the packages raise changes with their version; that they are theirs is what counts.
        if type(error).__module__.partition(".")[0] != "cuda":
            raise
        if type(error).__name__ == "DynamicLibNotFoundError":
            raise Unsupported("no compiler for kernels: libnvrtc is missing, pip install 'pykvstream[cuda]'") from error
        raise DeviceError(f"kernel {key} does not compile: {error}") from error
    return image
