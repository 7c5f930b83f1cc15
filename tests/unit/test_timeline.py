"""Timelines: what they show is what the counters say, spans nest, and a file is written whole or not at all.

Units: microseconds in the file.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvstream import Model, NgramSize, SamplingParams, SpeculationParams
from pykvstream.cli import main
from pykvstream.errors import Busy, DeviceError, InvalidArgument
from pykvstream.runtime import timeline as timelines
from tests.property.test_drafting_promise import PROMPT, SHAPE
from tests.random_hybrid import HybridShape, write_random_hybrid

MTP = HybridShape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "n_mtp": 1})
GREEDY = SamplingParams(temperature=0.0)
DRAFTED = SpeculationParams(types=("ngram-simple", "draft-mtp"), ngram_simple=NgramSize(1, 6))
PASSES = ("prefill pass", "decode pass", "verify pass")
Event = dict[str, Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("timeline") / "hybrid.gguf"
    write_random_hybrid(where, MTP, 5)
    return where


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """In the smallest arena, so that pages stream."""
    options: dict[str, Any] = {"threads": 1, "ubatch_size": 64, "ctx_size": 2048, "mtp": True}
    with Model.open(path, **options) as wide:
        arena = wide.plan.smallest_bytes / 2**20
    with Model.open(path, arena_mib=arena, **options) as made:
        yield made


@dataclass(frozen=True)
class Recorded:
    """A file, and what the counters said of the same time."""

    events: list[Event]
    about: dict[str, Any]
    passes: int
    rounds: int
    drafted: int
    copied_bytes: int
    loaded_bytes: int


@pytest.fixture(scope="module")
def recorded(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two sessions that take turns, one of them drafting, over a history that streams."""
    where = tmp_path_factory.mktemp("recorded") / "trace.json"
    before = model._target.parts[-1].device.info
    with model.trace(where) as timeline, model.session(seed=1) as drafted, model.session(seed=2) as plain:
        drafts = drafted.generate(PROMPT * 12, max_tokens=40, params=GREEDY, ignore_eos=True, speculation=DRAFTED)
        others = plain.generate(PROMPT * 4, max_tokens=40, params=GREEDY, ignore_eos=True)
        for _ in zip(drafts, others, strict=True):
            pass
        plain.truncate(5)
        drafted.truncate(len(drafted.tokens))
        model._target.publish_wait()
        assert drafted.stats.streamed_bytes > 0, "nothing streams: the test shows less than it says"
        passes = drafted.stats.passes + plain.stats.passes
        draft = drafted.stats.draft
        assert draft is not None
        timeline.drain()
        after = model._target.parts[-1].device.info
    assert timeline.n_lost == 0
    read = json.loads(where.read_text())
    return Recorded(
        read["traceEvents"],
        read["otherData"],
        passes,
        sum(draft.depth_histogram),
        draft.rounds,
        after.copied_bytes - before.copied_bytes,
        after.loaded_bytes - before.loaded_bytes,
    )


def named(events: list[Event], *names: str) -> list[Event]:
    return [each for each in events if each["ph"] == "X" and each["name"] in names]


def nanoseconds(event: Event) -> tuple[int, int]:
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def test_every_event_has_what_viewers_ask_for(recorded: Recorded) -> None:
    named_tracks = {(each["pid"], each["tid"]) for each in recorded.events if each["name"] == "thread_name"}
    for event in recorded.events:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named_tracks
    assert recorded.about["lost_events"] == 0 and recorded.about["model"].endswith("hybrid.gguf")


def test_events_of_a_track_lie_inside_one_another_or_apart(recorded: Recorded) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in recorded.events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(nanoseconds(event))
    assert {process for process, _ in tracks} == {1, 2, 3}
    for (process, _), spans in tracks.items():
        open_ends: list[int] = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or (process == 1 and end <= open_ends[-1])
            open_ends.append(end)


def test_passes_drafts_and_rounds_are_those_of_the_counters(recorded: Recorded) -> None:
    events = recorded.events
    assert len(named(events, *PASSES)) == recorded.passes
    assert len(named(events, "verify pass")) == recorded.drafted > 0
    # Each row of a drafted session's rounds, and each of the plain one's.
    assert len(named(events, "round")) == recorded.rounds + 39
    assert len(named(events, "draft")) == recorded.rounds
    assert len(named(events, "draft step")) > 0 and len(named(events, "choose")) == 80


@pytest.mark.parametrize("part", ["open the pass", "replay", "close the pass"])
def test_each_pass_has_its_parts_inside_it(recorded: Recorded, part: str) -> None:
    whole = sorted(nanoseconds(each) for each in named(recorded.events, *PASSES, "draft step", "catch up"))
    parts = [nanoseconds(each) for each in named(recorded.events, part)]
    n_parts = dict.fromkeys(whole, 0)
    for begin, end in parts:
        around = [each for each in whole if each[0] <= begin and end <= each[1]]
        assert len(around) == 1
        n_parts[around[0]] += 1
    n_passes = len(named(recorded.events, *PASSES, "draft step"))
    assert sum(n_parts.values()) == len(parts) >= n_passes
    for each in named(recorded.events, *PASSES, "draft step"):
        assert n_parts[nanoseconds(each)] == 1


def test_copies_add_up_to_what_the_device_counted(recorded: Recorded) -> None:
    loads, stores = named(recorded.events, "to the device"), named(recorded.events, "to history")
    assert loads and stores and named(recorded.events, "wait for copies")
    assert sum(each["args"]["bytes"] for each in loads) == recorded.loaded_bytes
    assert sum(each["args"]["bytes"] for each in loads + stores) == recorded.copied_bytes


def test_recording_changes_no_bit_and_ends(model: Model, tmp_path: Path) -> None:
    said = []
    for is_recorded in (False, True, False):
        with model.session(seed=3) as session:
            pieces = session.generate(PROMPT, max_tokens=9, speculation=DRAFTED)
            if is_recorded:
                with model.trace(tmp_path / "trace") as timeline:
                    said.append([piece.logits.tobytes() for piece in pieces])
                n_events = timeline.n_events
            else:
                said.append([piece.logits.tobytes() for piece in pieces])
    assert said[0] == said[1] == said[2]
    assert timeline.n_events == n_events > 0


def test_copies_that_overlap_stand_on_tracks_of_their_own() -> None:
    copies = [(0, 10, 1), (12, 20, 1), (5, 15, 1), (10, 11, 1), (15, 16, 1)]
    lanes = timelines._lanes(copies)
    assert [each[0] for each in copies] == [0, 5, 10, 12, 15]
    assert lanes == [0, 1, 0, 0, 1]


def test_what_finds_no_room_is_counted(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_EVENTS", 30)
    where = tmp_path / "trace"
    with model.trace(where) as timeline, model.session() as session:
        list(session.generate(PROMPT, max_tokens=5, params=GREEDY))
    read = json.loads(where.read_text())
    assert len([each for each in read["traceEvents"] if each["ph"] == "X"]) == timeline.n_events == 30
    assert read["otherData"]["lost_events"] == timeline.n_lost > 0


def test_the_file_is_there_when_the_block_raises(model: Model, tmp_path: Path) -> None:
    where = tmp_path / "trace"
    with pytest.raises(ZeroDivisionError), model.trace(where), model.session() as session:
        session.forward([1, 2])
        raise ZeroDivisionError
    assert len(named(json.loads(where.read_text())["traceEvents"], "prefill pass")) == 1


def test_a_failed_pass_says_so(model: Model, tmp_path: Path) -> None:
    where = tmp_path / "trace"
    with model.trace(where), model.session() as session:
        session.cancel()
        with pytest.raises(Exception, match="cancel"):
            session.forward([1, 2, 3])
    events = named(json.loads(where.read_text())["traceEvents"], "prefill pass")
    assert [each["args"].get("error") for each in events] == ["Cancelled"]


def test_one_timeline_at_a_time_and_closing_ends_it(path: Path, tmp_path: Path) -> None:
    where = tmp_path / "trace"
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=256) as model, model.trace(where):
        with pytest.raises(Busy, match="is being recorded"), model.trace(tmp_path / "other"):
            pass
        with model.session() as session:
            session.forward([1, 2])
        model.close()
    assert len(named(json.loads(where.read_text())["traceEvents"], "prefill pass")) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("name", ["", "a\0b", 7])
def test_what_is_no_path_is_refused(model: Model, name: object) -> None:
    with pytest.raises(InvalidArgument, match="under a path"), model.trace(name):  # type: ignore[arg-type]
        pass


def test_a_path_that_cannot_be_written_is_refused_before_the_block(model: Model, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be written: No such file"), model.trace(tmp_path / "none" / "f"):
        pytest.fail("the block has begun")
    with pytest.raises(InvalidArgument, match="no regular file"), model.trace(tmp_path):
        pytest.fail("the block has begun")


def test_a_full_disk_leaves_the_old_file(model: Model, tmp_path: Path) -> None:
    where = tmp_path / "trace"
    where.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(DeviceError, match=os.strerror(errno.EFBIG)), model.trace(where), model.session() as session:
            session.forward([1, 2, 3])
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("trace", b"old")]
    with model.session() as session:
        session.forward([1])


ARGV = ("--raw", "-p", PROMPT, "-n", "12", "--seed", "1", "-c", "256", "-ub", "64", "-t", "1", "--ignore-eos", "--json")


def test_generate_writes_a_timeline_and_hidden_rows(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, rows = tmp_path / "trace.json", tmp_path / "rows.npy"
    assert main(["generate", str(path), *ARGV, "--trace", str(trace), "--embeddings-nextn", str(rows)]) == 0
    told = json.loads(capsys.readouterr().out)
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(named(events, *PASSES)) == told["stats"]["passes"] == 11 + len(named(events, "prefill pass"))
    hidden = np.load(rows, allow_pickle=False)
    with Model.open(path, threads=1, ubatch_size=64, ctx_size=256, mtp=True) as model, model.session(seed=1) as session:
        list(session.generate(model.tokenizer.encode(PROMPT, bos=True), max_tokens=12, ignore_eos=True))
        expected = session.hidden_rows()
    assert hidden.dtype == np.float32 and hidden.tobytes() == expected.tobytes()
    assert hidden.shape == (told["prompt_tokens"] + 11, MTP.n_embd)


@pytest.mark.parametrize("flag", ["--trace", "--embeddings-nextn"])
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_opened(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "no-such-model", "-p", "hi", flag, str(tmp_path / "none" / "file")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err
