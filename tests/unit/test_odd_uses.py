"""Odd seeds, paths and moments: refused by name where they are given, and nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pykvstream._ffi._native")

from pykvstream import Model, SamplingParams, load_ngram_counts, save_ngram_counts
from pykvstream.errors import FormatError, InvalidArgument
from pykvstream.gguf import GgufFile
from pykvstream.locate import find_model
from pykvstream.speculation import NgramCounts

SURROGATE = "\ud800"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model.open("demo-hybrid", ctx_size=512, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("seed", [1.5, True, "x", -1, 1 << 64, None, np.array([1])])
def test_a_seed_that_is_none_is_refused_where_it_is_given(model: Model, seed: Any) -> None:
    with pytest.raises(InvalidArgument, match="seed must be an integer"):
        model.session(seed=seed)
    with closing(model.session(seed=5)) as session:
        with pytest.raises(InvalidArgument, match="seed must be an integer"):
            session.seed = seed
        assert session.seed == 5


def test_a_seed_of_numpy_is_saved_like_any_other(model: Model, tmp_path: Path) -> None:
    with closing(model.session(seed=np.uint64(1 << 63))) as session:
        session.forward([1, 2, 3])
        session.save(tmp_path / "saved")
    with closing(model.load_session(tmp_path / "saved")) as session:
        assert session.seed == 1 << 63 and type(session.seed) is int


@pytest.mark.parametrize("n_rows", [0, -1, True, 1.5, 1 << 32, 10**30])
def test_a_pass_that_cannot_be_is_not_foretold(model: Model, n_rows: Any) -> None:
    with closing(model.session()) as session:
        session.forward([1, 2, 3])
        with pytest.raises(InvalidArgument, match="n_rows must be"):
            session.forecast(n_rows)
        assert session.forecast(1).active_pages > 0


def test_who_cancels_an_answer_that_has_ended_does_not_cancel_the_next_call(model: Model) -> None:
    with closing(model.session()) as session:
        for i, _ in enumerate(session.generate([5, 6], max_tokens=2, params=SamplingParams(), ignore_eos=True)):
            if i == 1:
                session.cancel()
        assert session.stop_reason == "length"
        session.truncate(3)
        assert session.forward([1]).shape[0] == 1


@pytest.mark.parametrize("wrong", [5, None, "x", b"x", {}])
def test_what_are_no_counts_replaces_no_file(wrong: Any, tmp_path: Path) -> None:
    path = tmp_path / "counts"
    save_ngram_counts(path, NgramCounts())
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match="counts must be NgramCounts"):
        save_ngram_counts(path, wrong)
    assert path.read_bytes() == before


def trace(model: Model) -> None:
    with model.trace(SURROGATE):
        raise AssertionError("nothing may run")


PATHS: dict[str, Callable[[Model], object]] = {
    "save": lambda model: model.session().save(SURROGATE),
    "load": lambda model: model.load_session(SURROGATE),
    "trace": trace,
    "counts": lambda model: save_ngram_counts(SURROGATE, NgramCounts()),
    "counts read": lambda model: load_ngram_counts(SURROGATE),
}


@pytest.mark.parametrize("use", PATHS)
def test_a_path_that_no_file_can_have_is_refused(model: Model, use: str) -> None:
    with pytest.raises(InvalidArgument, match="under a path"):
        PATHS[use](model)


@pytest.mark.parametrize("kernels", [None, 5, [5], {"a.pack"}])
def test_packs_are_paths(kernels: Any) -> None:
    with pytest.raises(InvalidArgument, match="kernels must be a path"):
        Model.open("demo-hybrid", kernels=kernels)


def test_of_a_broken_key_an_error_shows_the_beginning(tmp_path: Path) -> None:
    image = bytearray(find_model("demo-hybrid").read_bytes())
    at = image.index(b"general.architecture") - 8
    image[at + 1] = 128  # a key of 32,788 bytes
    path = tmp_path / "broken.gguf"
    path.write_bytes(image)
    with pytest.raises(FormatError) as raised:
        GgufFile.open(path)
    assert len(str(raised.value)) < 1000
