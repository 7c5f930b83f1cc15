"""Bad input gets a clear error and loses nothing: prompts, sizes, types, weights, and objects used in any order."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core import cuda
from pykvstream.core.device import Device
from pykvstream.engine import Model, Session
from pykvstream.errors import (
    Busy,
    Closed,
    ContextFull,
    HostMemoryError,
    InvalidArgument,
    KvStreamError,
    NoSpace,
    NotFound,
    NumericError,
    Unsupported,
)
from pykvstream.gguf import GgufFile
from pykvstream.runtime import opening
from pykvstream.runtime.admission import HostMemory
from pykvstream.runtime.target import Phase
from pykvstream.sampling import SamplingParams
from tests.models import write_random_model

N_VOCAB = 320
CTX = 1024
MIB = 1 << 20


def void(_: object) -> None:
    return None


def write(path: Path, **changes: Any) -> Path:
    write_random_model(
        path,
        **{"n_layers": 1, "n_embd": 64, "n_heads": 2, "n_kv_heads": 1, "n_ff": 64, "ctx": CTX, "seed": 1}
        | changes,
    )
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bad") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.open(path, arena_mib=8, threads=1, ubatch_size=64) as made:
        yield made


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    with model.session(ctx_size=64) as made:
        yield made


def ids(n: int) -> list[int]:
    return [(7 * i + 3) % 250 for i in range(n)]


class TestPrompts:
    @pytest.mark.parametrize("prompt", ["", []])
    def test_an_empty_prompt_of_an_empty_conversation_is_refused(self, session: Session, prompt: Any) -> None:
        with pytest.raises(InvalidArgument, match="empty"):
            next(iter(session.generate(prompt)))
        assert session.tokens == ()

    def test_no_tokens_are_refused(self, session: Session) -> None:
        with pytest.raises(InvalidArgument, match="no tokens"):
            session.forward([])

    def test_text_of_a_special_token_is_plain_text(self, model: Model, session: Session) -> None:
        list(session.generate("<|im_end|>", max_tokens=1))
        assert not set(session.tokens[:-1]) & set(model.tokenizer.eog_ids)

    def test_only_special_tokens_and_one_token_are_prompts(self, model: Model) -> None:
        for prompt in (sorted(model.tokenizer.eog_ids), [5]):
            with model.session() as session:
                list(session.generate(prompt, max_tokens=2, ignore_eos=True))
                assert session.tokens[: len(prompt)] == tuple(prompt)
                assert len(session.tokens) == len(prompt) + 2

    def test_a_prompt_that_fills_the_context_is_served_and_the_next_step_refused(
        self, session: Session
    ) -> None:
        last = session.forward(ids(64)).copy()
        for phase in Phase:
            with pytest.raises(ContextFull, match="64"):
                session.forward([1], phase=phase)
        assert session.tokens == tuple(ids(64))
        session.truncate(63)
        assert np.array_equal(session.forward([ids(64)[63]]), last)

    def test_generation_stops_where_the_context_ends(self, session: Session) -> None:
        pieces = list(session.generate(ids(60), ignore_eos=True, params=SamplingParams(temperature=0)))
        assert session.stop_reason == "context_full"
        assert len(pieces) == 4 and len(session.tokens) == 64, "no token is emitted that the context cannot hold"
        with pytest.raises(ContextFull):
            session.forward([1])
        session.truncate(10)
        assert len(list(session.generate((), max_tokens=3, ignore_eos=True))) == 3

    def test_a_second_generation_ends_the_first(self, session: Session) -> None:
        first, second = (session.generate(ids(4), ignore_eos=True) for _ in range(2))
        next(second)
        with pytest.raises(Busy, match="another generate"):
            next(first)
        assert next(second).token == session.tokens[-1]

    def test_a_callback_that_changes_the_conversation_is_refused(self, session: Session) -> None:
        session.forward(ids(3))
        with pytest.raises(Busy, match="on_progress"):
            session.forward(ids(4), on_progress=lambda done, total: void(session.forward([1])))
        assert session.tokens == tuple(ids(3))

    def test_threads_with_a_session_each_take_turns(self, model: Model) -> None:
        with model.session() as alone:
            expected = [piece.token for piece in alone.generate(ids(20), max_tokens=8, ignore_eos=True)]
        found: list[list[int]] = []

        def talk() -> None:
            with model.session() as own:
                found.append([piece.token for piece in own.generate(ids(20), max_tokens=8, ignore_eos=True)])

        threads = [threading.Thread(target=talk) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert found == [expected] * 4

    @pytest.mark.parametrize(
        "call",
        [
            lambda session: session.truncate(1.5),
            lambda session: session.forward(None),
            lambda session: session.forward(b"ab"),
            lambda session: session.forward([[1], [1, 2]]),
            lambda session: session.forward([1], phase="decode"),
            lambda session: session.generate([1], max_tokens=2.5),
            lambda session: session.generate([1], params={}),
            lambda session: session.generate(b"hi"),
            lambda session: session.generate(None),
            lambda session: session.generate("hi", on_progress=3),
            lambda session: session.forward({1, 2}),
            lambda session: session.forward({1: 2}),
            lambda session: session.forward([True, 5]),
            lambda session: session.forward(np.array([True])),
            lambda session: session.forward([1], logits=[]),
            lambda session: session.forward([1], on_progress=3),
            lambda session: session.chat(None),
            lambda session: session.model.make_chat_template(None),
            lambda session: Model.open(None),
            lambda session: Model.open(b"demo"),
            lambda session: Model.open(""),
            lambda session: Model.open("demo", kv_rotation="x"),
            lambda session: Model.open("demo", progress=3),
        ],
    )
    def test_an_argument_of_the_wrong_kind_is_named(self, session: Session, call: Callable[[Session], object]) -> None:
        with pytest.raises(InvalidArgument):
            call(session)
        assert session.tokens == ()

    def test_numbers_are_named_as_they_were_given(self, session: Session) -> None:
        with pytest.raises(InvalidArgument, match=f"token {2**64 - 1} at index 1"):
            session.forward(np.array([1, 2**64 - 1], np.uint64))
        with pytest.raises(InvalidArgument, match=f"token {2**70} at index 0"):
            session.forward([2**70])
        with pytest.raises(InvalidArgument, match=r"n_tokens must be an integer, got 1\.0"):
            session.truncate(1.0)  # type: ignore[arg-type]

    def test_a_prompt_too_long_is_refused_whole(self, session: Session) -> None:
        session.forward(ids(10))
        for call in (lambda: session.forward(ids(55)), lambda: next(iter(session.generate(ids(55))))):
            with pytest.raises(ContextFull, match=r"55 tokens after 10 .* 64"):
                call()
        assert session.tokens == tuple(ids(10))
        session.forward(ids(54))

    @pytest.mark.parametrize("bad", [-1, N_VOCAB, 2**32, 2**62])
    def test_a_token_outside_the_vocabulary_is_named(self, session: Session, bad: int) -> None:
        with pytest.raises(InvalidArgument, match=rf"{bad} at index 2 .* {N_VOCAB}"):
            session.forward([1, 2, bad])
        assert session.tokens == ()

    @pytest.mark.parametrize(
        "bad",
        [
            [1.5],
            [True],
            ["a"],
            [None],
            [2**70],
            [[1, 2]],
            np.zeros((2, 2), np.uint32),
            np.zeros(3, np.float32),
        ],
    )
    def test_what_is_no_list_of_tokens_is_refused(self, session: Session, bad: Any) -> None:
        with pytest.raises(InvalidArgument):
            session.forward(bad)
        session.forward([1])

    def test_truncation_beyond_the_tokens_is_refused(self, session: Session) -> None:
        session.forward(ids(5))
        for n in (-1, 6):
            with pytest.raises(InvalidArgument, match="5 tokens"):
                session.truncate(n)
        assert session.tokens == tuple(ids(5))


class TestLogits:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: np.empty((2, N_VOCAB), np.float32),
            lambda: np.empty((1, N_VOCAB + 1), np.float32),
            lambda: np.empty(N_VOCAB, np.float32),
            lambda: np.empty((1, N_VOCAB), np.float64),
            lambda: np.empty((1, 2 * N_VOCAB), np.float32)[:, ::2],
            lambda: [[0.0] * N_VOCAB],
        ],
    )
    def test_an_unfit_output_is_refused_before_anything_runs(
        self, session: Session, make: Callable[[], Any]
    ) -> None:
        with pytest.raises(InvalidArgument, match="out must be"):
            session.forward([1], out=make())
        assert session.tokens == ()

    def test_a_read_only_output_is_refused(self, session: Session) -> None:
        out = np.empty((1, N_VOCAB), np.float32)
        out.flags.writeable = False
        with pytest.raises(InvalidArgument, match="writable"):
            session.forward([1], out=out)

    def test_an_unknown_wish_is_refused(self, session: Session) -> None:
        wish: Any = "some"
        with pytest.raises(InvalidArgument, match="'some'"):
            session.forward([1], logits=wish)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_broken_weights_give_an_error_with_the_position_and_no_token(
        self, tmp_path: Path, value: float
    ) -> None:
        where = write(tmp_path / "model.gguf", n_embd=64)
        with GgufFile.open(where) as file:
            norm = file.tensor_data("output_norm.weight").tobytes()
        content = where.read_bytes()
        assert content.count(norm) == 1
        broken = np.frombuffer(norm, np.float32).copy()
        broken[3] = value
        where.write_bytes(content.replace(norm, broken.tobytes()))
        with Model.open(where, arena_mib=8, threads=1) as model, model.session() as session:
            with pytest.raises(NumericError, match="position 4"):
                next(iter(session.generate(ids(4))))
            assert session.tokens == tuple(ids(4))


class TestSizes:
    def test_an_arena_too_small_names_the_smallest_which_works(self, path: Path) -> None:
        with pytest.raises(NoSpace, match=r"need .* \((\d+) bytes\), have") as refusal:
            Model.open(path, arena_mib=0.01, threads=1)
        smallest = int(str(refusal.value).split("(")[1].split(" ")[0])
        with pytest.raises(NoSpace):
            Model.open(path, arena_mib=(smallest - 64) / MIB, threads=1)
        with Model.open(path, arena_mib=smallest / MIB, threads=1) as model, model.session() as session:
            session.forward(ids(900))

    @pytest.mark.parametrize("arena", [0, -1, float("nan"), float("inf")])
    def test_an_arena_that_is_no_size_is_refused(self, path: Path, arena: float) -> None:
        with pytest.raises(InvalidArgument, match="arena"):
            Model.open(path, arena_mib=arena, threads=1)

    def test_host_memory_too_small_for_the_whole_context_is_refused_with_both_numbers(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            opening, "host_memory_available", lambda: HostMemory(total=1 << 34, available=100_000)
        )
        with pytest.raises(HostMemoryError, match=r"\d+ bytes.*100000 bytes"):
            Model.open(path, arena_mib=8, threads=1)

    @pytest.mark.parametrize("ctx", [0, -1, CTX + 1, 2**40])
    def test_a_context_the_model_cannot_have_is_refused(self, path: Path, model: Model, ctx: int) -> None:
        with pytest.raises(InvalidArgument, match=str(ctx)):
            Model.open(path, arena_mib=8, ctx_size=ctx, threads=1)
        with pytest.raises(InvalidArgument, match=str(ctx)):
            model.session(ctx_size=ctx)

    @pytest.mark.parametrize("ctx", [1, 2, 255, 256, 257, 511, 512, 513, CTX])
    def test_contexts_next_to_page_boundaries_fill_to_the_last_token(self, path: Path, ctx: int) -> None:
        with (
            Model.open(path, arena_mib=2, ctx_size=ctx, ubatch_size=100, threads=1) as model,
            model.session() as session,
        ):
            first = session.forward(ids(ctx)[:-1], logits="none") if ctx > 1 else None
            assert first is None or first.shape == (0, N_VOCAB)
            assert np.isfinite(session.forward(ids(ctx)[-1:], phase=Phase.DECODE)).all()
            with pytest.raises(ContextFull, match=str(ctx)):
                session.forward([1])
            assert session.tokens == tuple(ids(ctx))
            model.check_integrity()

    @pytest.mark.parametrize("ubatch", [0, -5, 2049, 2**33])
    def test_a_ubatch_that_is_no_size_is_refused(self, path: Path, ubatch: int) -> None:
        with pytest.raises(InvalidArgument, match="ubatch"):
            Model.open(path, arena_mib=8, ubatch_size=ubatch, threads=1)

    def test_a_ubatch_wider_than_the_context_is_as_wide_as_that(self, path: Path) -> None:
        with Model.open(path, arena_mib=64, ubatch_size=2048, threads=1) as model:
            assert model.plan.phases[0].max_rows == CTX


class TestNames:
    @pytest.mark.parametrize("name", ["q9_0", "Q2_K", "", "i8"])
    def test_an_unknown_cache_type_is_named_with_the_known_ones(self, path: Path, name: str) -> None:
        for side in ("cache_type_k", "cache_type_v"):
            options: dict[str, Any] = {side: name}
            with pytest.raises(Unsupported, match="q8_0") as refusal:
                Model.open(path, arena_mib=8, threads=1, **options)
            assert repr(name) in str(refusal.value)

    def test_a_head_size_that_a_type_cannot_hold_is_refused_by_name(self, tmp_path: Path) -> None:
        where = write(tmp_path / "model.gguf", n_embd=96, n_heads=2, head_dim=48)
        for side in ("cache_type_k", "cache_type_v"):
            types: dict[str, Any] = {"cache_type_k": "f16", "cache_type_v": "f16", side: "q8_0"}
            with pytest.raises(Unsupported, match=r"48"):
                Model.open(where, arena_mib=8, threads=1, **types)
        with Model.open(where, arena_mib=8, threads=1, cache_type_k="f16", cache_type_v="f16") as model:
            assert model.config.head_dim_k == 48

    def test_an_unknown_device_and_a_missing_file_are_named(self, path: Path) -> None:
        with pytest.raises(Unsupported, match="tpu"):
            Model.open(path, device="tpu")
        with pytest.raises((NotFound, OSError), match="nowhere"):
            Model.open("/nowhere/model.gguf")


class CountingDevice(Device):
    """Notes what still lives on it when it is closed."""

    __slots__ = ()
    left: ClassVar[list[int]] = []

    def close(self) -> None:
        if not self.closed:
            self.left.append(self.info.live_objects)
        super().close()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setattr(cuda, "Device", CountingDevice)
    CountingDevice.left.clear()
    yield CountingDevice.left


class TestLife:
    def test_closing_in_any_order_gives_everything_back(self, path: Path) -> None:
        for order in itertools.permutations(range(3)):
            model = Model.open(path, arena_mib=8, threads=1)
            parent = model.session()
            parent.forward(ids(300))
            child = parent.fork()
            child.forward([1], phase=Phase.DECODE)
            things = (model, parent, child)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for i in order:
                    things[i].close()
                    things[i].close()
                del things, model, parent, child
                gc.collect()

    def test_every_use_after_close_is_refused(self, path: Path) -> None:
        model = Model.open(path, arena_mib=8, threads=1)
        session, other = model.session(), model.session()
        session.forward(ids(4))
        session.close()
        for use in (
            lambda: session.forward([1]),
            lambda: session.fork(),
            lambda: session.truncate(1),
            lambda: next(iter(session.generate([1]))),
            lambda: session.stats,
        ):
            with pytest.raises(Closed):
                use()
        other.forward(ids(4))
        model.close()
        for use in (lambda: other.forward([1]), lambda: model.session(), lambda: model.check_integrity()):
            with pytest.raises(Closed):
                use()
        other.close()

    def test_what_is_never_closed_says_so_and_hurts_nobody(self, path: Path) -> None:
        with Model.open(path, arena_mib=8, threads=1) as model:
            kept = model.session()
            expected = kept.forward(ids(300)).copy()
            with pytest.warns(ResourceWarning, match="Seq"):
                forgotten = model.session()
                forgotten.forward(ids(300))
                del forgotten
                gc.collect()
            model.check_integrity()
            kept.truncate(299)
            assert np.array_equal(kept.forward(ids(300)[299:]), expected)
            kept.close()
        with pytest.warns(ResourceWarning, match="Device"):
            Model.open(path, arena_mib=8, threads=1)
            gc.collect()

    def test_nothing_is_left_after_the_end_or_a_refusal(self, path: Path, left: list[int]) -> None:
        with Model.open(path, arena_mib=8, threads=1) as model, model.session() as session:
            session.forward(ids(300))
            session.fork().close()
        with pytest.raises(NoSpace):
            Model.open(path, arena_mib=0.01, threads=1)
        with pytest.raises(KvStreamError):
            Model.open(path, arena_mib=2.0**30, threads=1)
        assert left == [0, 0, 0]

    def test_two_hundred_lives_leave_no_memory_behind(self, path: Path, left: list[int]) -> None:
        sizes = []
        for _ in range(200):
            with Model.open(path, arena_mib=1, ctx_size=512, threads=1) as model, model.session() as session:
                session.forward(ids(8))
            sizes.append(resident_bytes())
        assert left == [0] * 200
        assert sizes[-1] - sizes[50] < 8 * MIB


def resident_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc/self/status to read the resident size from")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
