"""The recurrent layer's kernel against float64, however rows are cut into passes, accepted in part, and folded.

Shapes: a state is matrix [H][D values][D keys], the last taps - 1 convolution inputs, and rows of the newest pass
that wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.gpu.attend_case import STEP
from tests.gpu.weight_rig import FlatDelta, Floats, WeightRig
from tests.oracle.delta64 import consume, recurrent

LOGGED, CHUNKED = 0, 1


@dataclass(frozen=True)
class Shape:
    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        return self.head_dim * (2 * self.n_key_heads + self.n_value_heads)

    @property
    def log_values(self) -> int:
        return self.channels + 2 * self.n_value_heads


SHAPES = (Shape(1, 2, 16, 4), Shape(2, 2, 32, 2), Shape(1, 3, 64, 3), Shape(2, 4, 128, 4))


class Tables:
    """Weights of one layer, and inputs of many rows."""

    def __init__(self, shape: Shape, n_rows: int) -> None:
        rng = np.random.default_rng(3)

        def normal(*sizes: int, scale: float = 1.0) -> Floats:
            return (rng.standard_normal(sizes) * scale).astype(np.float32)

        self.shape = shape
        self.inputs = normal(n_rows, shape.channels)
        self.beta = normal(n_rows, shape.n_value_heads)
        self.alpha = normal(n_rows, shape.n_value_heads)
        self.conv = [normal(shape.channels, shape.conv_width, scale=0.5)]
        self.dt_bias = [normal(1, shape.n_value_heads) - 2]
        self.decay = [-np.exp(normal(1, shape.n_value_heads))]


@dataclass
class State:
    matrix: Floats
    conv: Floats
    log: Floats
    n_pending: int = 0


@dataclass
class Layer:
    """One layer on an engine, its state on the host between passes."""

    rig: WeightRig
    tables: Tables
    state: State = field(init=False)
    position: int = 0
    first_token: int = 0
    """Of row 0: where chunks begin is a matter of absolute positions."""
    is_recorded: bool = False
    """Logged passes find in memory what changes from pass to pass."""

    def __post_init__(self) -> None:
        shape = self.tables.shape
        dim = shape.head_dim
        self.state = State(
            np.zeros((shape.n_value_heads, dim, dim), np.float32),
            np.zeros((shape.conv_width - 1, shape.channels), np.float32),
            np.zeros((0, shape.log_values), np.float32),
        )

    def _flat(self, n_rows: int, mode: int, *, folds: bool) -> FlatDelta:
        shape, state, rig = self.tables.shape, self.state, self.rig
        flat = FlatDelta(mode=mode, folds=int(folds), n_rows=n_rows, n_pending=state.n_pending, norm_eps=1e-6)
        for name in ("n_key_heads", "n_value_heads", "head_dim", "conv_width"):
            setattr(flat, name, getattr(shape, name))
        flat.conv, flat.dt_bias, flat.decay = (
            rig.put(each[0]) for each in (self.tables.conv, self.tables.dt_bias, self.tables.decay)
        )
        flat.matrix_in, flat.conv_in, flat.log_in = (rig.put(each) for each in (state.matrix, state.conv, state.log))
        flat.matrix_out, flat.conv_out = rig.room(state.matrix.nbytes), rig.room(state.conv.nbytes)
        flat.log_out = rig.room(4 * n_rows * shape.log_values)
        return flat

    def _finish(self, flat: FlatDelta, log_rows: int, accepted: int) -> None:
        shape, engine = self.tables.shape, self.rig.engine
        self.rig.checked("run_delta", self._recorded(flat) if self.is_recorded and not flat.folds else flat)
        self.state = State(
            engine.download(flat.matrix_out, self.state.matrix.shape, np.float32),
            engine.download(flat.conv_out, self.state.conv.shape, np.float32),
            engine.download(flat.log_out, (log_rows, shape.log_values), np.float32),
            accepted,
        )

    def _recorded(self, flat: FlatDelta) -> FlatDelta:
        """The same pass, told nothing but where its words are."""
        told = FlatDelta.from_buffer_copy(flat)
        names = ("matrix_in", "conv_in", "log_in", "matrix_out", "conv_out", "log_out", "n_pending")
        words = STEP.make("kvs_step_delta", **{name: getattr(flat, name) for name in names})
        told.step = self.rig.put(np.frombuffer(bytes(words), np.uint8))
        for name in names:
            setattr(told, name, 1 << 20)
        return told

    def run(self, n_rows: int, mode: int, accept: int | None = None) -> Floats:
        """The next rows; of a logged pass the first `accept` stay."""
        rows = slice(self.position, self.position + n_rows)
        flat = self._flat(n_rows, mode, folds=False)
        flat.inputs, flat.beta, flat.alpha = (
            self.rig.put(each[rows]) for each in (self.tables.inputs, self.tables.beta, self.tables.alpha)
        )
        cols = self.tables.shape.n_value_heads * self.tables.shape.head_dim
        flat.out = self.rig.room(4 * n_rows * cols)
        flat.first_token = self.first_token + self.position
        n_bytes = ctypes.c_uint64()
        assert self.rig._launches.delta_scratch_bytes(ctypes.byref(flat), n_rows, ctypes.byref(n_bytes)) == 0
        flat.scratch = self.rig.room(n_bytes.value)
        accepted = n_rows if accept is None else accept
        log_rows = n_rows if mode == LOGGED else 0
        self._finish(flat, log_rows, accepted if mode == LOGGED else 0)
        self.position += accepted
        return self.rig.engine.download(flat.out, (n_rows, cols), np.float32)

    def fold(self) -> None:
        self._finish(self._flat(0, LOGGED, folds=True), 0, 0)


@pytest.fixture(params=["host", "cuda"])
def rig(request: pytest.FixtureRequest, launches: ctypes.CDLL) -> Iterator[WeightRig]:
    if request.param == "host":
        yield WeightRig(request.getfixturevalue("host"), launches)
        return
    cuda = request.getfixturevalue("device")
    yield WeightRig(cuda, launches)
    cuda.release()


def one_by_one(rig: WeightRig, tables: Tables, n_rows: int) -> tuple[Floats, Layer]:
    layer = Layer(rig, tables)
    return np.concatenate([layer.run(1, LOGGED) for _ in range(n_rows)]), layer


def n_rows_for(rig: WeightRig) -> int:
    return 11 if rig.engine.name == "host" else 140


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.head_dim}x{shape.conv_width}")
def test_chunked_and_logged_rows_are_near_float64(rig: WeightRig, shape: Shape) -> None:
    n_rows = n_rows_for(rig)
    tables = Tables(shape, n_rows)
    expected = recurrent(*consume(tables, 0, tables.inputs, tables.beta, tables.alpha)).reshape(n_rows, -1)
    tolerance = 2e-5 * np.abs(expected).max()
    for mode in (LOGGED, CHUNKED):
        out = Layer(rig, tables).run(n_rows, mode)
        assert np.abs(out - expected).max() <= tolerance


def test_recorded_rows_have_the_bits_of_single_ones(rig: WeightRig) -> None:
    tables = Tables(SHAPES[1], 11)
    single, recorded = Layer(rig, tables), Layer(rig, tables, is_recorded=True)
    for n_rows, accept in ((1, 1), (3, 2), (4, 0), (2, 2), (1, 1)):
        assert single.run(n_rows, LOGGED, accept).tobytes() == recorded.run(n_rows, LOGGED, accept).tobytes()
    for name in ("matrix", "conv", "log"):
        assert getattr(single.state, name).tobytes() == getattr(recorded.state, name).tobytes()


@pytest.mark.parametrize("cuts", [(1, 2, 5, 3), (8, 3), (3, 8), (9, 1, 1)])
def test_logged_rows_do_not_depend_on_how_passes_are_cut(rig: WeightRig, cuts: Sequence[int]) -> None:
    tables = Tables(SHAPES[1], 11)
    expected, plain = one_by_one(rig, tables, 11)
    layer = Layer(rig, tables)
    out = np.concatenate([layer.run(n, LOGGED) for n in cuts])
    assert out.tobytes() == expected.tobytes()
    plain.fold()
    layer.fold()
    assert layer.state.matrix.tobytes() == plain.state.matrix.tobytes()
    assert layer.state.conv.tobytes() == plain.state.conv.tobytes()


def test_rejected_rows_leave_nothing_behind(rig: WeightRig) -> None:
    tables = Tables(SHAPES[0], 16)
    expected, plain = one_by_one(rig, tables, 8)
    layer = Layer(rig, tables)
    taken = []
    for n_rows, accept in ((4, 2), (6, 0), (3, 3), (5, 1), (2, 2)):
        taken.append(layer.run(n_rows, LOGGED, accept)[:accept])
    assert np.concatenate(taken).tobytes() == expected.tobytes()
    layer.fold()
    plain.fold()
    assert layer.state.matrix.tobytes() == plain.state.matrix.tobytes()


def test_folding_early_keeps_the_bits_of_folding_in_the_next_pass(rig: WeightRig) -> None:
    tables = Tables(SHAPES[2], 9)
    first, second = Layer(rig, tables), Layer(rig, tables)
    first.run(5, LOGGED, 4)
    second.run(5, LOGGED, 4)
    second.fold()
    assert first.run(3, LOGGED).tobytes() == second.run(3, LOGGED).tobytes()


def test_a_chunked_pass_folds_pending_rows_first_and_leaves_the_state_of_plain_rows(rig: WeightRig) -> None:
    tables = Tables(SHAPES[0], 12)
    expected, plain = one_by_one(rig, tables, 10)
    layer = Layer(rig, tables)
    layer.run(3, LOGGED, 2)
    out = layer.run(8, CHUNKED)
    plain.fold()
    assert np.abs(out - expected[2:]).max() <= 2e-5 * np.abs(expected).max()
    assert np.abs(layer.state.matrix - plain.state.matrix).max() <= 2e-5 * np.abs(plain.state.matrix).max()
    assert layer.state.conv.tobytes() == plain.state.conv.tobytes()


@pytest.mark.parametrize("first_token", [0, 37])
def test_chunked_rows_are_near_float64_however_passes_are_cut_on_the_grid(rig: WeightRig, first_token: int) -> None:
    n_rows = 100 if rig.engine.name == "host" else 500
    tables = Tables(SHAPES[1], n_rows)
    whole = Layer(rig, tables, first_token=first_token)
    expected = whole.run(n_rows, CHUNKED)
    exact = recurrent(*consume(tables, 0, tables.inputs, tables.beta, tables.alpha)).reshape(n_rows, -1)
    assert np.abs(expected - exact).max() <= 2e-5 * np.abs(exact).max()
    ends = [end for end in range(64 - first_token, n_rows, 64)]
    for chosen in (ends, ends[1::3]):
        parts = Layer(rig, tables, first_token=first_token)
        begins = [0, *chosen]
        out = [parts.run(end - begin, CHUNKED) for begin, end in zip(begins, [*chosen, n_rows], strict=True)]
        assert np.concatenate(out).tobytes() == expected.tobytes()
        assert parts.state.matrix.tobytes() == whole.state.matrix.tobytes()
        assert parts.state.conv.tobytes() == whole.state.conv.tobytes()
    short = Layer(rig, tables, first_token=first_token).run(n_rows - 7, CHUNKED)
    assert short.tobytes() == expected[:-7].tobytes()


def test_the_log_holds_what_the_recurrence_consumed(rig: WeightRig) -> None:
    tables = Tables(SHAPES[1], 4)
    layer = Layer(rig, tables)
    layer.run(4, LOGGED)
    assert layer.state.log.tobytes() == np.hstack([tables.inputs, tables.beta, tables.alpha]).tobytes()
