"""The product's own schedule on a device that forgives nothing: no access without an order, whatever anything costs.

The model has the cache of SmolLM2-135M; nothing is computed, so a step of 364 operations takes a few milliseconds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvstream._ffi import lib
from pykvstream.core.device import HookPoint
from pykvstream.core.host import Host
from pykvstream.core.trace import TraceCosts, TraceStream, chrome_events
from pykvstream.errors import KvStreamError, Unsupported
from pykvstream.runtime.session import TokenSession
from pykvstream.runtime.target import Phase
from tests.rigs import random_placement
from tests.tracing import CTX_TOKENS, H200, SLOW_BUS, TraceRig, open_trace_rig, random_costs, write_demo_shape

ARENAS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
STEPS = 200
EIO: int = lib.KVS_EIO
PROMPT = 1_500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "thirty.gguf"
    write_demo_shape(path)
    return path


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "three.gguf"
    write_demo_shape(path, n_layers=3)
    return path


def run_schedule(path: Path, index: int, n_steps: int) -> None:
    costs = (H200, SLOW_BUS, TraceCosts())[index] if index < 3 else random_costs(index)
    with open_trace_rig(path, residency=ARENAS[index], costs=costs) as rig:
        rig.prefill(PROMPT)
        rig.device.set_costs(random_costs(100 + index))
        rig.decode(n_steps)
        report = rig.device.report
        assert rig.device.hazards() == []
        assert report.n_hazards == 0
        assert report.n_passes == n_steps + PROMPT // 128 + 1
        assert report.n_waves >= report.n_passes * 30
        assert report.bytes_in > 1 << 27 or index > 5


@pytest.mark.parametrize("index", range(len(ARENAS)))
def test_schedule_of_the_demo_has_no_hazard(demo_path: Path, index: int) -> None:
    run_schedule(demo_path, index, STEPS)


@pytest.mark.parametrize("index", range(len(ARENAS)))
def test_schedule_of_the_demo_shape_has_no_hazard(model: Path, index: int) -> None:
    run_schedule(model, index, STEPS // 4)


def drive(rig: TraceRig, rng: random.Random, n_actions: int) -> None:
    """What sessions do, in any order that is allowed."""
    sessions: list[TokenSession] = [rig.session]
    try:
        drive_sessions(rig, rng, n_actions, sessions)
    finally:
        for session in sessions[1:]:
            session.close()


def drive_sessions(rig: TraceRig, rng: random.Random, n_actions: int, sessions: list[TokenSession]) -> None:
    for _ in range(n_actions):
        session = rng.choice(sessions)
        action = rng.choice(("prefill", "decode", "decode", "truncate", "fork", "close", "place", "costs"))
        room = CTX_TOKENS - session.n_cached
        if action == "prefill" and room > 8:
            session.forward([1] * rng.randint(1, min(room, 600)), logits="none")
        elif action == "decode" and room > 8:
            for _ in range(rng.randint(1, 8)):
                session.forward([1], phase=Phase.DECODE, logits="none")
        elif action == "truncate":
            session.truncate(rng.randint(0, session.n_cached))
        elif action == "fork" and len(sessions) < 3:
            sessions.append(session.fork())
        elif action == "close" and session is not rig.session:
            sessions.remove(session)
            session.close()
        elif action == "place":
            rig.target.place(Phase.DECODE, random_placement(rig.target.plan, Phase.DECODE, rng))
        elif action == "costs":
            rig.device.set_costs(random_costs(rng.randrange(1 << 30)))
        assert rig.device.hazards() == []


@pytest.mark.parametrize("seed", range(12))
def test_sessions_that_do_anything_have_no_hazard(small_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    with open_trace_rig(small_model, residency=rng.choice((0.0, 0.05, 0.2)), costs=random_costs(seed)) as rig:
        drive(rig, rng, 40)
        assert rig.device.report.n_hazards == 0


class OneFault:
    """A hook that fails the k-th call at one point."""

    def __init__(self, rng: random.Random) -> None:
        self._point = rng.choice((HookPoint.COPY, HookPoint.COPY, HookPoint.OP, HookPoint.ALLOC))
        self._left = rng.randint(1, 400)

    def __call__(self, point: HookPoint, _index: int) -> int:
        self._left -= point is self._point
        return EIO if self._left == 0 and point is self._point else 0


@pytest.mark.parametrize("seed", range(8))
def test_failures_leave_no_hazard(small_model: Path, seed: int) -> None:
    rng = random.Random(seed)
    n_failed = 0
    with open_trace_rig(small_model, residency=rng.choice((0.0, 0.05, 0.2)), costs=random_costs(seed)) as rig:
        for _ in range(30):
            rig.device.set_hook(OneFault(rng))
            try:
                drive(rig, rng, 3)
            except KvStreamError:
                n_failed += 1
            finally:
                rig.device.set_hook(None)
            assert rig.device.hazards() == []
    assert n_failed > 0


@pytest.fixture
def streaming(small_model: Path) -> Iterator[TraceRig]:
    with open_trace_rig(small_model, residency=0.0) as rig:
        rig.prefill(PROMPT)
        rig.decode(20)
        yield rig


def test_causes_add_up_to_the_critical_path(streaming: TraceRig) -> None:
    passes = streaming.device.passes()
    assert len(passes) == streaming.device.report.n_passes
    for each in passes:
        work = each.latency_ns + each.weight_ns + each.page_ns + each.work_ns
        waits = each.load_wait_ns + each.ring_wait_ns + each.out_wait_ns
        assert work + waits + each.host_ns == each.span_ns
        assert each.overlap_ns <= each.in_busy_ns <= each.span_ns
        assert each.out_busy_ns <= each.span_ns
    assert sum(each.span_ns for each in passes) == streaming.device.report.span_ns


def test_copy_engine_is_never_idle_where_the_bus_is_the_limit(streaming: TraceRig) -> None:
    streaming.device.set_costs(TraceCosts(copy_in_bytes_per_s=1_000_000_000, op_ns=1))
    streaming.decode(2)
    streaming.device.reset()
    streaming.decode(20)
    report = streaming.device.report
    assert report.bytes_in > 20 * 1_000_000
    assert report.in_busy_ns >= 0.99 * report.span_ns


def test_events_of_one_stream_do_not_overlap(streaming: TraceRig) -> None:
    events = streaming.device.events()
    for stream in TraceStream:
        mine = [each for each in events if each.stream is stream]
        assert mine
        assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(mine))
    engine = sorted(
        (each for each in events if each.stream in (TraceStream.LOAD, TraceStream.RING)), key=lambda each: each.begin_ns
    )
    assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(engine))


def test_timeline_names_what_streams(streaming: TraceRig) -> None:
    found = chrome_events(streaming.device.events())
    assert {each["args"]["name"] for each in found if each["ph"] == "M"} == {"compute", "load", "ring", "out"}
    copies = [each for each in found if each["tid"] == int(TraceStream.RING) and each["ph"] == "X"]
    assert copies and all("slots" in each["args"] and "pages" in each["args"] for each in copies)


def test_same_costs_and_actions_give_the_same_times(small_model: Path) -> None:
    spans = []
    for _ in range(2):
        with open_trace_rig(small_model, residency=0.0, costs=random_costs(5)) as rig:
            rig.prefill(700)
            spans.append([each.span_ns for each in rig.device.passes()])
    assert spans[0] == spans[1]


def test_reset_forgets_reports_and_keeps_memory(streaming: TraceRig) -> None:
    streaming.device.reset()
    assert streaming.device.report.n_passes == 0 and streaming.device.events() == []
    streaming.decode(1)
    assert streaming.device.hazards() == [] and streaming.device.report.n_passes == 1


def test_trace_device_refuses_bytes_by_name(small_model: Path) -> None:
    with open_trace_rig(small_model) as rig, Host(rig.device, 4096) as host:
        with pytest.raises(Unsupported, match="trace device holds no bytes"):
            host.write(0, b"x")
        with pytest.raises(Unsupported, match="trace device holds no bytes"):
            host.read(0, 1)
