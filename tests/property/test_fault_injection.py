"""Everything that the fault hook can make fail fails once, in a whole generation and in the loading of a model.

Afterwards the session keeps what it was given or says by name why it cannot go on, nothing is left behind, and the same
generation gives the very pieces, bit by bit, of a model that nothing has disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pykvstream.core.device import Device, HookPoint
from pykvstream.engine import Model, Session
from pykvstream.errors import Busy, DeviceError, HostMemoryError, KvStreamError
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.models import ModelConfig
from pykvstream.runtime.target import Blueprint, Target, TargetOptions
from tests.models import write_random_model
from tests.stack import HARD_FLAGS, Fault, assert_idle

CTX = 1024
UBATCH = 128
PROMPT = np.random.default_rng(21).integers(0, 250, 650).tolist()
MORE = "the end of it"
N_TOKENS = 5
LIMIT = 3_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults") / "model.gguf"
    write_random_model(made, n_layers=2, n_embd=32, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=32, ctx=CTX)
    return made


def load(path: Path, device: Device) -> Model:
    """A model in the smallest arena that works, on a device that is there before anything is read."""
    with ExitStack() as undo:
        file = undo.enter_context(GgufFile.open(path))
        options = TargetOptions(GgmlType.Q8_0, GgmlType.Q4_0, UBATCH, CTX)
        blueprint = Blueprint(file, ModelConfig.from_gguf(file), device, options)
        undo.callback(blueprint.close)
        target = Target(device, blueprint, blueprint.plan(1 << 40).smallest_bytes)
        undo.pop_all()
        return Model(path, file, target)


@dataclass(frozen=True)
class Said:
    """A generation, bit by bit."""

    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32]


def converse(session: Session) -> Said:
    """Two answers: a long prompt of tokens, then a text, which needs the tokenizer."""
    pieces = []
    for prompt in (PROMPT, MORE):
        pieces += [
            (piece.token, piece.logits.copy())
            for piece in session.generate(prompt, max_tokens=N_TOKENS, ignore_eos=True)
        ]
    return Said(tuple(token for token, _ in pieces), np.stack([logits for _, logits in pieces]))


@pytest.fixture(scope="module")
def expected(path: Path) -> Said:
    with Device(1, flags=HARD_FLAGS) as device, load(path, device) as model, model.session() as session:
        return converse(session)


def assert_same(found: Said, expected: Said) -> None:
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.logits, expected.logits)


def strike(device: Device, fault: Fault, action: Callable[[], object]) -> KvStreamError | None:
    """Run an action under a fault; what it raises, and what its copies leave to be heard later, is caught."""
    device.set_hook(fault)
    caught = None
    try:
        action()
    except KvStreamError as error:
        caught = error
    finally:
        with suppress(Busy, DeviceError):
            device.drain()
        device.set_hook(None)
    return caught


def named(point: HookPoint) -> type[KvStreamError]:
    """A lack of memory may also stop a copy from being queued, and then shows as a failed device."""
    return KvStreamError if point is HookPoint.ALLOC else DeviceError


@pytest.fixture
def device() -> Iterator[Device]:
    with Device(1, flags=HARD_FLAGS) as made:
        yield made


SMALLEST = {
    HookPoint.ALLOC: 80,
    HookPoint.COPY: 100,
    HookPoint.FENCE: 1,
    HookPoint.OP: 250,
    HookPoint.SUBMIT: 20,
    HookPoint.FILE: 1,
}
"""So many events of each kind there are at least: fewer would mean that the hook is no longer asked."""


def generate_under(path: Path, expected: Said, fault: Fault) -> tuple[KvStreamError | None, int]:
    """A generation under a fault, in a model of its own: its tokenizer is read then. Checks all that must hold
    afterwards; returns the error and how many objects a model has when its sessions have gone."""
    with Device(1, flags=HARD_FLAGS) as device, load(path, device) as model:
        with model.session() as session:
            caught = strike(device, fault, lambda: converse(session))
            assert_idle(model._target)
            session.truncate(0)
            assert_same(converse(session), expected)
        with model.session() as another:
            assert_same(converse(another), expected)
        n_objects = device.info.live_objects
        assert_idle(model._target)
        model._target.close()
        assert (device.info.live_objects, device.info.device_bytes) == (0, 0)
    return caught, n_objects


@pytest.mark.parametrize("point", HookPoint)
def test_a_generation_survives_each_fault(path: Path, expected: Said, point: HookPoint) -> None:
    n_raised = 0
    _, undisturbed = generate_under(path, expected, Fault(point, LIMIT))
    for k in range(LIMIT):
        fault = Fault(point, k)
        caught, n_objects = generate_under(path, expected, fault)
        assert n_objects == undisturbed
        if fault.fired == 0:
            break
        assert caught is None or isinstance(caught, named(point)), caught
        n_raised += caught is not None
    assert caught is None
    assert SMALLEST[point] <= k < LIMIT
    assert n_raised > 0
    print(f"{point.name}: {k} events, {n_raised} of them raised")


@pytest.mark.parametrize("point", HookPoint)
def test_a_model_that_cannot_be_loaded_is_refused_by_name_and_leaves_nothing(
    path: Path, expected: Said, device: Device, point: HookPoint
) -> None:
    n_raised = 0
    for k in range(LIMIT):
        made: list[Model] = []
        fault = Fault(point, k)
        caught = strike(device, fault, lambda: made.append(load(path, device)))  # noqa: B023
        if fault.fired == 0:
            break
        assert isinstance(caught, named(point))
        n_raised += 1
        assert made == []
        assert (device.info.live_objects, device.info.device_bytes, device.info.host_bytes) == (0, 0, 0)
    assert caught is None and k < LIMIT
    assert (n_raised > 0) == (point in (HookPoint.ALLOC, HookPoint.FILE))
    with made[0].session() as session:
        assert_same(converse(session), expected)
    made[0]._target.close()
    assert device.info.live_objects == 0


def test_a_session_that_cannot_be_made_leaves_nothing(path: Path, device: Device) -> None:
    with load(path, device) as model:
        before = device.info.live_objects
        for k in range(LIMIT):
            fault = Fault(HookPoint.ALLOC, k)
            made: list[Session] = []
            caught = strike(device, fault, lambda: made.append(model.session()))  # noqa: B023
            for session in made:
                session.close()
            assert device.info.live_objects == before
            if fault.fired == 0:
                break
            assert isinstance(caught, HostMemoryError)
        assert 1 <= k < LIMIT


def test_without_a_hook_nothing_is_counted(device: Device) -> None:
    seen: list[tuple[HookPoint, int]] = []
    device.before_file()

    def note(point: HookPoint, index: int) -> int:
        seen.append((point, index))
        return 0

    device.set_hook(note)
    device.before_file()
    device.set_hook(None)
    device.before_file()
    device.set_hook(note)
    device.before_file()
    assert seen == [(HookPoint.FILE, 0), (HookPoint.FILE, 1)]
