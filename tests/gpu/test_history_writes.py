"""Rows that decoding writes to host history itself, with the bytes that copies bring there, without a card.

The library that stands in for the driver's runs kernels compiled for the host. What history holds is read from saved
sessions, and comes back through a ring. The prompt is the CPU's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, HOST_KERNELS, MODEL, Driver

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs cc")

OPEN = HOST_KERNELS + """
import ctypes, hashlib, os
from pykvstream.engine import Model
from pykvstream.errors import KvStreamError
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests.models import write_random_model
fake = ctypes.CDLL("libcuda.so.1")
path, talk, kept = host_folder / "model.gguf", host_folder / "talk.session", host_folder / "kept.session"
write_random_model(path, n_layers=2, n_embd=32, n_heads=2, n_kv_heads=2, head_dim=32, n_ff=32, n_vocab=320, seed=4)

def opened(settings="", device="cuda"):
    return Model.open(path, device=device + settings, ctx_size=2048, cache_type_k="q8_0", cache_type_v="q5_1")

with opened("", "cpu") as model, model.session() as session:
    session.forward([i * i % 319 for i in range(1010)])
    session.save(str(talk))

def step(session, width, token=3):
    rows = session.forward([(token + i) % 319 for i in range(width)], phase=Phase.DECODE, logits="all")
    return hashlib.sha256(rows.tobytes()).hexdigest()

def history(session):
    kept.unlink(missing_ok=True)
    session.save(str(kept))
    return hashlib.sha256(kept.read_bytes()).hexdigest()

def place(model, ring_slots):
    layout = model._target.plan.phases[Phase.DECODE.value]
    floors = (layout.pool.floor_pages,) * layout.pool.n_layers
    model._target.place(Phase.DECODE, Placement(floors, ring_slots, layout.max_rows))
"""

# One row at a time, drafts over the end of a page, what is taken back, a fork, and pages that come back.
BYTES = OPEN + """
def answer(settings):
    told = []
    with opened(settings) as model, model.load_session(str(talk)) as session:
        told += [step(session, width) for width in (1, 1, 1)]
        before = fake.fake_cuda_copies_2d()
        told += [step(session, width) for width in (6, 6, 6, 1)]
        told.append(history(session))
        session.truncate(len(session.tokens) - 9)
        told.append(step(session, 2, 77))
        told.append(history(session))
        copies = fake.fake_cuda_copies_2d() - before
        with session.fork() as child:
            told += [step(child, 3, 50), step(session, 3, 60), history(child), history(session)]
        place(model, 2)
        told += [step(session, 1) for _ in range(3)]
        assert session.stats.streamed_bytes > 0
        told.append(history(session))
        model.check_integrity()
        maps = model._target.parts[0].device.info.maps_history
    return told, copies, maps

for settings in os.environ["SETTINGS"].split(";"):
    told, copies, maps = answer(settings)
    print(maps, copies, *told)
"""


@pytest.mark.slow
def test_history_has_the_bytes_that_copies_bring(tmp_path_factory: pytest.TempPathFactory) -> None:
    driver = Driver.build(tmp_path_factory.mktemp("fake"))
    variables = {"FAKE_CUDA_KERNELS": "host", "FAKE_CUDA_ARCH": "80"}
    said = []
    for maps, settings in (("1", ",graphs=off;"), ("0", "")):
        text = driver.run(BYTES, **variables, FAKE_CUDA_MAPS=maps, SETTINGS=settings)
        lines = [line.split() for line in text.splitlines()]
        assert [line[0] for line in lines] == [str(maps == "1")] * len(settings.split(";"))
        assert all((line[1] == "0") == (maps == "1") for line in lines), lines
        said += [line[2:] for line in lines]
    assert all(line == said[0] for line in said) and len(set(said[0])) == len(said[0]) > 16


# A launch that fails after rows of some layers have been written: the pass is undone, and done again.
FAULT = OPEN + """
def answer(fails):
    with opened(",graphs=off") as model, model.load_session(str(talk)) as session:
        told = [step(session, 1), step(session, 1)]
        if fails:
            fake.fake_cuda_reset()
            os.environ["FAKE_CUDA_FAIL"] = f"cuLaunchKernelEx {fails} 700"
            try:
                step(session, 6, 99)
                print("no failure")
            except KvStreamError as error:
                print(type(error).__name__)
            del os.environ["FAKE_CUDA_FAIL"]
            model.check_integrity()
        told += [step(session, 6), step(session, 1), history(session)]
        return told

expected = answer(0)
print([answer(nth) == expected for nth in (5, 12, 17)])
"""


@pytest.mark.slow
def test_a_pass_that_fails_behind_its_first_rows_leaves_history_as_it_was(tmp_path: Path) -> None:
    said = Driver.build(tmp_path).run(FAULT, FAKE_CUDA_KERNELS="host", FAKE_CUDA_ARCH="80").splitlines()
    assert said == ["DeviceError"] * 3 + ["[True, True, True]"]


# Kernels that do nothing: what is copied, and when.
COPIES = MODEL + """
import ctypes
fake = ctypes.CDLL("libcuda.so.1")
with Model.open(path, device="cuda", ctx_size=1000, ubatch_size=128) as model, model.session() as session:
    counts = []
    for width in (128, 1, 1, 8, 100):
        phase = Phase.DECODE if width < 64 else Phase.PREFILL
        before = fake.fake_cuda_copies_2d()
        session.forward([1] * width, phase=phase)
        session._core._target.publish_wait()
        counts.append(fake.fake_cuda_copies_2d() - before)
    print(*(min(count, 1) for count in counts))
"""


@pytest.mark.parametrize(("maps", "expected"), [("1", "1 0 0 0 1"), ("0", "1 1 1 1 1"), ("2", "1 1 1 1 1")])
def test_copies_bring_what_prompts_write_and_nothing_of_decoding(tmp_path: Path, maps: str, expected: str) -> None:
    assert Driver.build(tmp_path).run(COPIES, FAKE_CUDA_MAPS=maps) == expected


def test_a_card_whose_kernels_do_not_reach_host_memory_is_listed_so(tmp_path: Path) -> None:
    driver = Driver.build(tmp_path)
    code = "from pykvstream.cli import main; raise SystemExit(main(['devices']))"
    assert "rows go to history by copies" not in driver.run(code)
    assert "kernels do not reach host memory: rows go to history by copies" in driver.run(code, FAKE_CUDA_MAPS="0")
