"""Build step: make the C source of the extension module from the fenced regions of the public headers.

Holds: ``main(callbacks.h, header..., output)``. The text between ``/* cffi:begin */`` and ``/* cffi:end */`` of
each header, in the order given, is the cffi definition: the interface is stated once.
Source: cffi, "API mode, out-of-line".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

FENCE = re.compile(r"/\* cffi:begin \*/(.*?)/\* cffi:end \*/", re.DOTALL)


CELLS = (
    "arena", "bank", "binding", "buffer", "cache", "coordinator", "device", "fence", "host", "layer_lease", "lease",
    "pager", "ring", "seq", "span_plan", "state", "tape", "weight",
)  # fmt: skip
"""Kinds of objects: each gets a C function that releases what a cell holds, uninterrupted."""


def drop_signature(kind: str) -> str:
    return f"void kvs_py_drop_{kind}(kvs_{kind} **cell)"


def drop_source(kind: str) -> str:
    return f"static {drop_signature(kind)} {{ kvs_{kind}_release(*cell); }}"


OWNERS = """
static void kvs_py_drop_owner(void *user)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DecRef((PyObject *)user);
    PyGILState_Release(state);
}

static void kvs_py_drop_capsule(void *capsule)
{
    if (PyCapsule_IsValid((PyObject *)capsule, "dltensor")) {
        kvs_lent_release(PyCapsule_GetPointer((PyObject *)capsule, "dltensor"));
    }
}
"""
"""Ends of what is shared with other libraries: an object that owned adopted memory, a tensor that nobody took."""


def fenced(path: Path) -> str:
    regions = FENCE.findall(path.read_text(encoding="utf-8"))
    if not regions:
        raise SystemExit(f"{path}: no region between cffi:begin and cffi:end")
    return "\n".join(regions)


def main(arguments: list[str]) -> None:
    *headers, output = map(Path, arguments)
    ffi = FFI()
    ffi.set_source("pykvstream._ffi._native", "\n".join(['#include "kvstream.h"', *map(drop_source, CELLS), OWNERS]))
    callbacks, *public = headers
    ffi.cdef("\n".join(fenced(path) for path in public))
    ffi.cdef(fenced(callbacks))
    ffi.cdef("\n".join(f"{drop_signature(kind)};" for kind in CELLS))
    ffi.cdef("void kvs_py_drop_owner(void *user); void kvs_py_drop_capsule(void *capsule);")
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main(sys.argv[1:])
