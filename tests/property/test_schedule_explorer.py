"""Every legal order of the copies and the operations of a pass gives the logits of a run in which nothing is copied.

Small cases are enumerated to the end, larger ones sampled. One schedule runs twice: on the CPU with real bytes, and on
a trace device that asks for a fence between any two accesses that meet. The last part takes a fence out and lets the
enumeration find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.core.arena import Arena, Lease
from pykvstream.core.device import Device, DeviceFlag, Stream
from pykvstream.core.host import Host
from pykvstream.core.kv import KvLayer, record_layout
from pykvstream.core.ring import Demand, Ring
from pykvstream.core.span import Span, SpanPlan
from pykvstream.core.trace import TraceDevice, TraceFault
from pykvstream.errors import Busy, InvalidArgument
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.layout import Placement
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Blueprint, Phase, Target, TargetOptions
from tests.models import write_random_model
from tests.rigs import open_rig, tokens_of
from tests.schedules import Exploration, Run, Schedule, explore, replay, sample

CTX = 1024
UBATCH = 64
PAGE = 256
CPU_FLAGS = DeviceFlag.DEFERRED | DeviceFlag.POISON_RELEASED | DeviceFlag.STRICT_HISTORY
TRACE_FLAGS = DeviceFlag.DEFERRED | DeviceFlag.POISON_RELEASED
LIMIT = 25_000
Logits = npt.NDArray[np.float32]


# ---- a pass of a model ----


def model_path(folder: Path, n_layers: int) -> Path:
    path = folder / f"{n_layers}.gguf"
    if not path.exists():
        write_random_model(path, n_layers=n_layers, n_embd=32, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=32)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@dataclass
class Rig:
    """A model in the smallest arena on a deferred device, whatever its kind, and a session with some history."""

    device: Device
    target: Target
    session: TokenSession
    n_prompt: int
    ring_slots: int

    def reset(self) -> None:
        """The same state as ever: history complete, nothing resident, nothing under way."""
        prompt = tokens_of(1, self.n_prompt)
        if self.session.tokens[: self.n_prompt] == tuple(prompt):
            self.session.truncate(self.n_prompt)
        else:
            self.session.truncate(0)
            self.session.forward(prompt, logits="none")
        self.target.enter(Phase.PREFILL)
        layout = self.target.plan.phases[Phase.DECODE.value]
        floors = (layout.pool.floor_pages,) * layout.pool.n_layers
        self.target.place(Phase.DECODE, Placement(floors, self.ring_slots, layout.max_rows))
        self.device.drain()

    def run(self, schedule: Schedule, program: Callable[[TokenSession], Logits]) -> Logits:
        self.reset()
        self.device.set_chooser(schedule)
        try:
            found = program(self.session)
            self.session.fork().close()  # waits until history has what the program wrote
            return found
        finally:
            self.device.set_chooser(None)


@contextmanager
def open_deferred(path: Path, device: Device, n_prompt: int, ring_slots: int) -> Iterator[Rig]:
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile.open(path))
        stack.enter_context(device)
        options = TargetOptions(GgmlType.F16, GgmlType.F16, UBATCH, CTX)
        blueprint = Blueprint(file, ModelConfig.from_gguf(file), device, options)
        n_bytes = blueprint.plan(1 << 40).smallest_bytes + (ring_slots - 1) * blueprint.shape.slot_bytes
        target = Target(device, blueprint, n_bytes)
        stack.callback(target.close)
        session = TokenSession(target, CTX)
        stack.callback(session.close)
        session.forward(tokens_of(1, n_prompt), logits="none")
        yield Rig(device, target, session, n_prompt, ring_slots)


def resident_logits(path: Path, n_prompt: int, program: Callable[[TokenSession], Logits]) -> Logits:
    with open_rig(path, type_k=GgmlType.F16, type_v=GgmlType.F16, ubatch=UBATCH, ctx=CTX) as rig:
        session = rig.session()
        session.forward(tokens_of(1, n_prompt), logits="none")
        found = program(session)
        assert rig.streamed_bytes == 0
        session.close()
    return found


def one_token(session: TokenSession) -> Logits:
    return session.forward([5], phase=Phase.DECODE).copy()


def two_tokens(session: TokenSession) -> Logits:
    """The second pass begins with what the first has sent for."""
    return np.concatenate([session.forward([token], phase=Phase.DECODE) for token in (5, 6)])


def back_and_on(session: TokenSession) -> Logits:
    """A page that had been left is brought back before rows are written beside its own."""
    session.truncate(session.n_cached - 200)
    return session.forward([7, 8, 9], phase=Phase.DECODE, logits="all").copy()


def both_sides(streams: Rig, traced: Rig, expected: Logits, program: Callable[[TokenSession], Logits]) -> Run:
    """Run a schedule with real bytes, then the same one where every order is checked."""
    assert isinstance(traced.device, TraceDevice)
    device = traced.device

    def run(schedule: Schedule) -> None:
        np.testing.assert_array_equal(streams.run(schedule, program), expected, err_msg=schedule.text)
        again = Schedule(schedule.taken)
        device.reset()
        traced.run(again, program)
        assert (again.follows(), again.offers) == (True, schedule.offers), schedule.text
        assert device.hazards() == [], schedule.text

    return run


@contextmanager
def pair(folder: Path, n_layers: int, n_prompt: int, ring_slots: int,
         program: Callable[[TokenSession], Logits]) -> Iterator[tuple[Run, Rig]]:  # fmt: skip
    path = model_path(folder, n_layers)
    expected = resident_logits(path, n_prompt, program)
    with (
        open_deferred(path, Device(1, flags=CPU_FLAGS), n_prompt, ring_slots) as streams,
        open_deferred(path, TraceDevice(flags=TRACE_FLAGS), n_prompt, ring_slots) as traced,
    ):
        yield both_sides(streams, traced, expected, program), streams


SMALL = {
    "one layer, ring of one": (1, 600, 1, one_token),
    "two layers, ring of one": (2, 600, 1, one_token),
    "two layers, ring of two": (2, 600, 2, one_token),
    "a second pass": (1, 600, 1, two_tokens),
    "a page comes back": (1, 900, 1, back_and_on),
}
MANY_ORDERS = ("two layers, ring of two", "a second pass")
"""Hours under a sanitizer, which sees the same code in the others."""


MOST_ORDERS = MANY_ORDERS[1]
"""Takes minutes: `make deep` runs it."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.exhaustive] * (name in MANY_ORDERS) + [pytest.mark.slow] * (name == MOST_ORDERS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in SMALL])
def test_every_order_of_a_small_pass_gives_the_resident_bits(folder: Path, name: str) -> None:
    n_layers, n_prompt, ring_slots, program = SMALL[name]
    with pair(folder, n_layers, n_prompt, ring_slots, program) as (run, streams):
        found = explore(run, LIMIT)
        assert streams.target.pager_info.streamed_bytes > 0
    print(f"{name}: {found}")
    assert found == COUNTS[name]


COUNTS = {
    "one layer, ring of one": Exploration(90, True, 9),
    "two layers, ring of one": Exploration(1_120, True, 16),
    "two layers, ring of two": Exploration(14_460, True, 21),
    "a second pass": Exploration(21_030, True, 20),
    "a page comes back": Exploration(432, True, 12),
}
"""How many legal orders there are: another number means that the program, or what is offered, has changed."""


def a_conversation(session: TokenSession) -> Logits:
    """Prompt, decode, fork, write into the shared page, back, on."""
    found = [session.forward(tokens_of(2, 90), logits="last").copy()]
    found += [session.forward([token], phase=Phase.DECODE).copy() for token in (1, 2, 3)]
    child = session.fork()
    found.append(child.forward([4], phase=Phase.DECODE).copy())
    child.close()
    session.truncate(session.n_cached - 300)
    found += [session.forward([token], phase=Phase.DECODE).copy() for token in (5, 6)]
    return np.concatenate(found)


def test_sampled_orders_of_a_conversation_give_the_resident_bits(folder: Path) -> None:
    texts = set()
    with pair(folder, 3, 800, 2, a_conversation) as (run, _):
        for schedule in sample(run, range(60)):
            texts.add(schedule.text)
            assert len(schedule.taken) > 30
    assert len(texts) == 60


# ---- one fence less ----


@dataclass(frozen=True)
class RingScene:
    """A ring of two slots, four pages of history, and what attention over each page alone gives."""

    device: Device
    lease: Lease
    host: Host
    layer: KvLayer
    record_bytes: int

    def attend(self, slot: int) -> Logits:
        span = Span(0, PAGE, self.lease, slot * self.record_bytes, self.record_bytes)
        with SpanPlan(self.device, self.layer, [span], PAGE, 1) as plan:
            return plan.attend(np.ones((1, 32), np.float32), 1, 0.2)


N_PAGES = 4
N_SLOTS = 2
Order = Callable[[RingScene, Ring], Sequence[Logits]]


@contextmanager
def ring_scene(device: Device) -> Iterator[RingScene]:
    layer = KvLayer(1, 32, 32, GgmlType.F32.id, GgmlType.F32.id)
    n_bytes = record_layout(layer).record_bytes
    with ExitStack() as stack:
        stack.enter_context(device)
        arena = stack.enter_context(Arena(device, N_SLOTS * n_bytes))
        arena.begin()
        arena.reserve(1, N_SLOTS * n_bytes)
        arena.commit()
        lease = stack.enter_context(arena.acquire(1))
        host = stack.enter_context(Host(device, N_PAGES * n_bytes))
        if isinstance(device, TraceDevice):
            device.mark_history(host, 0, N_PAGES * n_bytes)
        else:
            values = np.random.default_rng(3).standard_normal(N_PAGES * n_bytes // 4, np.float32)
            host.write(0, values.view(np.uint8))
        yield RingScene(device, lease, host, layer, n_bytes)


def in_order(scene: RingScene, ring: Ring) -> Sequence[Logits]:
    found = []
    for page in range(N_PAGES):
        ring.acquire(page + 1)
        found.append(scene.attend(page % N_SLOTS))
        ring.consume(page + 1)
    return found


def one_wait_short(scene: RingScene, ring: Ring) -> Sequence[Logits]:
    """Page 2 is read when page 1 has arrived."""
    found = []
    for page in range(N_PAGES):
        ring.acquire(page + 1 if page != 2 else page)
        found.append(scene.attend(page % N_SLOTS))
        ring.acquire(page + 1)
        ring.consume(page + 1)
    return found


def consumed_too_early(scene: RingScene, ring: Ring) -> Sequence[Logits]:
    """The slot of page 1 is given back before it is read."""
    found = []
    for page in range(N_PAGES):
        ring.acquire(page + 1)
        if page == 1:
            ring.consume(page + 1)
        found.append(scene.attend(page % N_SLOTS))
        ring.consume(page + 1)
    return found


def run_ring(scene: RingScene, schedule: Schedule, order: Order) -> Sequence[Logits]:
    with Ring(scene.device, scene.lease, N_SLOTS, scene.record_bytes, run_limit_slots=1) as ring:
        scene.device.set_chooser(schedule)
        try:
            ring.submit([Demand(scene.host, 0, scene.record_bytes, N_PAGES)])
            return order(scene, ring)
        finally:
            scene.device.set_chooser(None)


def wrong_schedules(scene: RingScene, order: Order) -> tuple[list[str], Exploration]:
    """The schedules under which an order of calls reads something else than the right one does."""
    expected = run_ring(scene, Schedule(), in_order)
    wrong: list[str] = []

    def run(schedule: Schedule) -> None:
        found = run_ring(scene, schedule, order)
        if not np.array_equal(found, expected):
            wrong.append(schedule.text)

    return wrong, explore(run, LIMIT)


def traced_hazards(order: Order) -> tuple[list[str], Exploration]:
    """The schedules under which a trace device finds a hazard."""
    wrong: list[str] = []
    with ring_scene(TraceDevice(flags=DeviceFlag.DEFERRED)) as scene:
        device = scene.device
        assert isinstance(device, TraceDevice)

        def run(schedule: Schedule) -> None:
            device.reset()
            run_ring(scene, schedule, order)
            if device.hazards():
                wrong.append(schedule.text)

        return wrong, explore(run, LIMIT)


def test_a_ring_in_right_order_is_right_under_every_schedule() -> None:
    with ring_scene(Device(1, flags=CPU_FLAGS)) as scene:
        wrong, found = wrong_schedules(scene, in_order)
    assert (wrong, found.is_complete) == ([], True)
    assert found.n_schedules > 50
    assert traced_hazards(in_order) == ([], found)


@pytest.mark.parametrize("order", [one_wait_short, consumed_too_early])
def test_a_fence_that_is_missing_is_found_by_some_schedules_with_bytes_and_by_all_on_a_trace(order: Order) -> None:
    """Without marks in released memory: a wrong order shows only where a copy really comes between."""
    with ring_scene(Device(1, flags=DeviceFlag.DEFERRED)) as scene:
        wrong, found = wrong_schedules(scene, order)
        assert found.is_complete
        assert 0 < len(wrong) < found.n_schedules
        expected = run_ring(scene, Schedule(), in_order)
        outcomes: list[bool] = []

        def run(schedule: Schedule) -> None:
            outcomes.append(np.array_equal(run_ring(scene, schedule, order), expected))

        replay(run, wrong[0])
        assert outcomes == [False]
    hazards, traced = traced_hazards(order)
    assert traced == found
    assert len(hazards) == traced.n_schedules


def test_a_ring_that_nobody_consumes_stands_still_under_every_schedule() -> None:
    with ring_scene(Device(1, flags=CPU_FLAGS)) as scene:

        def never_consumed(scene: RingScene, ring: Ring) -> Sequence[Logits]:
            ring.acquire(N_SLOTS)
            with pytest.raises(Busy):
                ring.acquire(N_SLOTS + 1)
            return []

        found = explore(lambda schedule: check_empty(run_ring(scene, schedule, never_consumed)), LIMIT)
    assert found.is_complete and found.n_schedules > 1


def check_empty(found: Sequence[Logits]) -> None:
    assert list(found) == []


@pytest.mark.parametrize("fault", [TraceFault.DROP_GATE, TraceFault.EARLY_GATE, TraceFault.DROP_WAIT])
def test_a_fence_taken_out_of_a_pass_is_found_by_some_schedule(folder: Path, fault: TraceFault) -> None:
    path = model_path(folder, 2)
    n_found = 0
    with open_deferred(path, TraceDevice(flags=TRACE_FLAGS), 600, 1) as rig:
        device = rig.device
        assert isinstance(device, TraceDevice)

        def run(schedule: Schedule) -> None:
            nonlocal n_found
            rig.reset()
            device.reset()
            device.plant(fault)
            try:
                rig.run(schedule, one_token)
            finally:
                device.plant(TraceFault.NONE)
            n_found += bool(device.hazards())

        explore(run, 300)
    assert n_found > 0


# ---- choosers ----


def test_an_answer_that_is_not_offered_means_the_first_that_is() -> None:
    with ring_scene(Device(1, flags=CPU_FLAGS)) as scene:
        expected = run_ring(scene, Schedule(), in_order)
        for answer in (Stream.FREE, 31, 32, 0xFFFFFFFF):
            with Ring(scene.device, scene.lease, N_SLOTS, scene.record_bytes) as ring:
                scene.device.set_chooser(lambda _offered, answer=answer: answer)
                ring.submit([Demand(scene.host, 0, scene.record_bytes, N_PAGES)])
                np.testing.assert_array_equal(in_order(scene, ring), expected)
                scene.device.set_chooser(None)


def test_a_device_that_is_not_deferred_has_no_chooser() -> None:
    with Device(1) as device, pytest.raises(InvalidArgument, match="not deferred"):
        device.set_chooser(Schedule())
