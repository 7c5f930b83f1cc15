"""Whoever gives the C interface nothing is refused by name, never followed: every function of every header, called with
no objects at all, and with a device alone.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from tests.meta.tree import Function, functions

FALLIBLE = [each for each in functions() if each.returns == "kvs_status"]
RELEASES = [each for each in functions() if "NULL is ignored" in each.comment and each.returns == "void"]
WITH_DEVICE = [each for each in FALLIBLE if each.parameters.startswith("kvs_device *device")]

# Nothing is what they are given to take something back, or to do nothing.
CONTENT = {"kvs_device_set_hook", "kvs_device_drain", "kvs_host_admit", "kvs_timeline_keep"}


def zeros(function: Function) -> list[Any]:
    """No object, no place for a result, and 0 for every number."""
    kinds = ffi.typeof(getattr(lib, function.name)).args
    return [ffi.NULL if kind.kind in ("pointer", "function") else 0 for kind in kinds]


@pytest.mark.parametrize("function", FALLIBLE, ids=lambda each: each.name)
def test_without_anything_it_is_refused(function: Function) -> None:
    status = getattr(lib, function.name)(*zeros(function))
    expected = {lib.KVS_EINVAL, lib.KVS_EUNSUPPORTED} if function.name == "kvs_type_block" else {lib.KVS_EINVAL}
    assert status in expected


@pytest.mark.parametrize("function", WITH_DEVICE, ids=lambda each: each.name)
def test_with_a_device_alone_it_is_refused_and_leaves_nothing(function: Function) -> None:
    with Device(1) as device:
        status = getattr(lib, function.name)(device.ptr, *zeros(function)[1:])
        assert device.info.live_objects == 0
    if function.name in CONTENT:
        assert status == lib.KVS_OK
    else:
        assert status in (lib.KVS_EINVAL, lib.KVS_EUNSUPPORTED)


@pytest.mark.parametrize("function", RELEASES, ids=lambda each: each.name)
def test_releasing_nothing_does_nothing(function: Function) -> None:
    getattr(lib, function.name)(*zeros(function))


def test_the_functions_are_those_of_the_headers() -> None:
    assert len(FALLIBLE) > 60 and len(WITH_DEVICE) > 10 and len(RELEASES) > 5
