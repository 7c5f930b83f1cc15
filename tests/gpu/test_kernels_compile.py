"""Every kernel that small models need compiles for every architecture: no card is needed, NVRTC is.

A covering sample: each weight type, each type of keys and of values, head sizes 64, 96, 128 and 256, passes of one row
and of many, a hybrid, experts. What they need is told by their tapes, on the library that stands in for the driver's.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.cuda import KernelKey, kernel_sources
from pykvstream.errors import Unsupported
from pykvstream.kernels.nvrtc import compile_image, load_compiler
from tests.gpu.stand_in import COMPILER, MODEL, Driver

ARCHITECTURES = (75, 80, 86, 89, 90, 120)

KEYS = MODEL + """
import json
from pykvstream.gguf import DECODABLE, GgmlType
from tests.models import write_random_model
from tests.random_hybrid import Experts
caches = ("q8_0", "q4_0", "f16", "bf16", "q4_1", "q5_1", "iq4_nl", "q5_0", "f32")
files = [path]
for i, kind in enumerate(sorted(DECODABLE, key=lambda kind: kind.id)):
    files.append(Path(folder) / kind.name)
    head = (64, 128, 256)[i % 3] if kind.block_values == 256 else (64, 96, 128, 256)[i % 4]
    write_random_model(files[-1], n_layers=1, n_embd=256, n_ff=256, head_dim=head, weight_type=kind)
files.append(Path(folder) / "experts")
write_random_hybrid(files[-1], HybridShape(n_layers=4, experts=Experts(), weight_type=GgmlType.Q8_0))
found = {}
for i, file in enumerate(files):
    k, v = caches[i % 9], caches[(i * 5 + 1) % 9]
    with Model.open(file, device="cuda", ctx_size=1000, cache_type_k=k, cache_type_v=v) as model:
        for key, _ in model._device.kernels():
            found[str(key)] = [key.source, key.macros, key.arch]
print(json.dumps(list(found.values())))
"""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs cc")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_needed_kernel_compiles(arch: int, tmp_path: Path) -> None:
    try:
        core = load_compiler()
    except Unsupported as error:
        pytest.skip(str(error))
    listed = json.loads(Driver.build(tmp_path).run(KEYS, FAKE_CUDA_ARCH=str(arch)))
    keys = [KernelKey(source, tuple((name, value) for name, value in macros), on) for source, macros, on in listed]
    assert len(keys) > 40 and {key.arch for key in keys} == {arch}
    sources = kernel_sources()
    with ThreadPoolExecutor(2) as workers:
        images = list(workers.map(lambda key: compile_image(core, sources[key.source], key), keys))
    assert all(image[:4] == b"\x7fELF" for image in images)
