"""Kernels that wait for the copies of their pages, and copies that wait for kernels, at once and without a card.

The library that stands in for the driver runs recordings in a thread of their own, kernels compiled for the host, a
block at a time: the fewest that a card may run at once. Copies wait for words in the copy thread. So an order that needs
a later block, or a pass that has not been launched, is a wait that never ends here. History comes from the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pykvstream._ffi._native")

from tests.gpu.stand_in import COMPILER, HOST_KERNELS, Driver

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs cc")]
VARIABLES = {"FAKE_CUDA_KERNELS": "host", "FAKE_CUDA_ARCH": "80", "FAKE_CUDA_ASYNC": "1", "FAKE_CUDA_SM": "1"}

OPEN = HOST_KERNELS + """
import itertools, time
from pykvstream.core.device import HookPoint
from pykvstream.engine import Model
from pykvstream.errors import DeviceError
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.target import Phase
from tests.models import write_random_model
path, talk = host_folder / "model.gguf", host_folder / "talk.session"
write_random_model(path, n_layers=2, n_embd=32, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=32, n_vocab=320,
                   seed=4, ctx=8192)

def opened(settings, device="cuda", **options):
    return Model.open(path, device=device + settings, ctx_size=8192, **options)

with opened("", "cpu", threads=1) as model, model.session() as session:
    session.forward([i * i % 319 for i in range(1900)])
    session.save(str(talk))

def place(model, ring_slots, n_more=0):
    layout = model._target.plan.phases[Phase.DECODE.value]
    pages = (layout.pool.floor_pages + n_more,) * layout.pool.n_layers
    model._target.place(Phase.DECODE, Placement(pages, ring_slots, layout.max_rows))

def step(session, width):
    return session.forward([3, 5, 7][:width], phase=Phase.DECODE, logits="all").tobytes()
"""

BITS = OPEN + """
def rows(settings, rings):
    told = []
    with opened(settings) as model:
        for ring_slots in rings:
            with model.load_session(str(talk)) as session:
                place(model, ring_slots, 0 if ring_slots < 9 else 2)
                told.append([step(session, width) for width in (1, 1, 1, 2, 2)])
                assert session.stats.streamed_bytes > 0
                model.check_integrity()
    return told

expected, = rows(",graphs=off", [5])
print(len(set(expected)))
print([told == expected for told in rows(",counters=on", [2, 9, 12])])
print([told == expected for told in rows(",counters=on,graphs=off", [2])])
"""


def test_passes_that_wait_on_the_device_have_the_bits_of_those_that_do_not(tmp_path: Path) -> None:
    count = tmp_path / "count"
    said = Driver.build(tmp_path).run(BITS, **VARIABLES, FAKE_CUDA_LATE_US="300", FAKE_CUDA_COUNT=str(count))
    assert said.splitlines() == ["5", "[True, True, True]", "[True]"]
    *_, launched, _ = map(int, count.read_text(encoding="ascii").split())
    assert launched == 3 + 5 + 3  # rings of 2 and 9 slots share recordings, whose blocks hold one page


FAULTS = OPEN + """
with opened(",counters=on", wait_limit_s=9) as model:
    device = model._target.parts[0].device
    with model.load_session(str(talk)) as session:
        place(model, 5)
        expected = [step(session, 1) for _ in range(5)]

    def attempt(hook, name):
        with model.load_session(str(talk)) as session:
            place(model, 5)
            told = [step(session, 1) for _ in range(3)]
            before = session.tokens
            device.set_hook(hook)
            try:
                told.append(step(session, 1))
                print(name, "nothing")
            except DeviceError as error:
                print(name, error)
                assert session.tokens == before
            device.set_hook(None)
            model.check_integrity()
            told += [step(session, 1) for _ in range(5 - len(told))]
            print(told == expected)

    copies = itertools.count(1)
    attempt(lambda point, index: -5 if point is HookPoint.COPY and next(copies) == 9 else 0, "failed:")
    is_held = iter([False] * 8 + [True])

    def hold(point, index):
        if point is HookPoint.COPY and next(is_held, False):
            time.sleep(4)
        return 0

    attempt(hold, "held:")
"""


def test_a_copy_that_fails_or_does_not_come_ends_a_pass_and_no_more(tmp_path: Path) -> None:
    said = Driver.build(tmp_path).run(FAULTS, **VARIABLES).splitlines()
    assert len(said) == 4 and said[1::2] == ["True"] * 2, said
    assert "gave up" in said[0] and "or its copy failed" in said[0]
    assert "gave up: a page that it waited for did not arrive within 3000 ms" in said[2]
