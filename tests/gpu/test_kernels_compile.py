"""Every kernel that small models need compiles for every architecture: no card is needed, NVRTC is.

What they need is told by their tapes, on the library that stands in for the driver's.
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
from pykvstream.gguf import TYPES_BY_ID
from tests.models import write_random_model
from tests.random_hybrid import Experts
kinds = {kind.name: kind for kind in TYPES_BY_ID.values()}
files = [path]
for name in ("Q8_0", "Q4_K", "MXFP4"):
    files.append(Path(folder) / name)
    write_random_model(files[-1], n_embd=256, n_ff=256, head_dim=128, weight_type=kinds[name])
files.append(Path(folder) / "experts")
write_random_hybrid(files[-1], HybridShape(n_layers=4, experts=Experts(), weight_type=kinds["Q8_0"]))
found = {}
types = [("q8_0", "q4_0"), ("f16", "bf16"), ("q4_1", "q5_1"), ("iq4_nl", "q5_0"), ("f32", "q8_0")]
for file, (k, v) in zip(files, types):
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
