"""A covering sample of kernels compiles for every architecture: no card is needed, NVRTC is.

Each source, each weight type, each type of keys and of values, head sizes 64, 96, 128 and 256, passes of one row and of
many, recurrent layers, experts. What there is to cover is told by the tapes of models that need it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import kernel_sources
from pykvstream.errors import Unsupported
from pykvstream.gguf import DECODABLE
from pykvstream.kernels.nvrtc import compile_image, load_compiler
from pykvstream.runtime.catalogue import CACHE_TYPES, HEAD_SIZES, TYPES, catalogue, covering

ARCHITECTURES = (75, 80, 86, 89, 90, 120)


@pytest.mark.parametrize("arch", [75, 90])
def test_the_sample_has_everything_that_the_catalogue_is_made_of(arch: int) -> None:
    keys = catalogue(arch, is_sample=True)
    sample = covering(keys)
    assert 30 <= len(sample) <= 90 and len(set(sample)) == len(sample) and set(sample) <= set(keys)
    assert {key.source for key in sample} == {key.source for key in keys}
    assert {key.arch for key in sample} == {arch}

    def values(*names: str) -> set[int]:
        return {value for key in sample if key.source != "embed" for name, value in key.macros if name in names}

    caches = {TYPES[name].id for name in CACHE_TYPES}
    assert values("KVS_TYPE_K") == values("KVS_TYPE_V") == caches and set(HEAD_SIZES) <= values("KVS_DIM_K")
    assert values("KVS_T0", "KVS_T1", "KVS_T2", "KVS_T3") == {kind.id for kind in DECODABLE}
    heads = {dict(key.macros)["KVS_DIM_V"] for key in sample if key.source.startswith("attend")}
    assert heads == set(HEAD_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_sample_compiles(arch: int) -> None:
    try:
        core = load_compiler()
    except Unsupported as error:
        pytest.skip(str(error))
    keys = covering(catalogue(arch, is_sample=True))
    sources = kernel_sources()
    with ThreadPoolExecutor(2) as workers:
        images = list(workers.map(lambda key: compile_image(core, sources[key.source], key), keys))
    assert all(image[:4] == b"\x7fELF" for image in images)
