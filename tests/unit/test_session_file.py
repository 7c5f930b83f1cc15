"""A saved session goes on with the same bits wherever it is loaded; a damaged file is refused whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections import UserList
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import pytest

from pykvstream.core.device import HookPoint
from pykvstream.engine import Session
from pykvstream.errors import DeviceError, FormatError, InvalidArgument, KvStreamError, NotFound
from pykvstream.runtime import saving, session_file
from pykvstream.runtime.pieces import Piece
from pykvstream.runtime.session_file import HEADER_BYTES, SECTIONS, VERSION
from pykvstream.runtime.target import Phase
from pykvstream.sampling import SamplingParams
from pykvstream.text.transcript import Transcript
from tests.models import write_random_model
from tests.random_hybrid import HybridShape, write_random_hybrid
from tests.rigs import tokens_of
from tests.stack import Fault, Stack, open_stack

HYBRID = HybridShape(
    n_layers=4, interval=2, n_embd=64, head_dim=64, n_rot=8, sections=(2, 1, 1), n_ff=96, state=16, n_vocab=300
)
N_VOCAB = 300
CTX = 600
LENGTHS = (1, 255, 256, 257, 512, 599)
PAIRS = (("Q8_0", "Q4_0"), ("F16", "F16"), ("F32", "BF16"), ("Q5_1", "IQ4_NL"))
WARM = SamplingParams(temperature=0.9, top_k=40, repeat_penalty=1.1)
HEAD, ENTRY = session_file._HEAD, session_file._ENTRY


@pytest.fixture(scope="module", params=("dense", "hybrid"))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(made, request.param)
    return made


def write_model(path: Path, kind: str, seed: int = 2) -> None:
    if kind == "hybrid":
        write_random_hybrid(path, HYBRID, seed)
    else:
        write_random_model(path, arch="qwen3", head_dim=64, n_vocab=N_VOCAB, seed=seed)


@pytest.fixture
def stack(path: Path) -> Iterator[Stack]:
    with open_stack(path, ctx_size=CTX) as made:
        yield made


def talk(session: Session, n: int, n_answer: int = 5) -> None:
    """``n`` tokens in the end, the last of them pending."""
    n_answer = min(n_answer, n - 1)
    for _ in session.generate(tokens_of(1, n - n_answer, N_VOCAB).tolist(), max_tokens=n_answer, params=WARM,
                              ignore_eos=True):  # fmt: skip
        pass
    assert len(session.tokens) == n


def going_on(session: Session, prompt: tuple[int, ...] = (5, 6, 7), n: int = 9) -> tuple[list[int], str]:
    """What a session says next, and the digest of the logits."""
    digest = hashlib.sha256()
    tokens = []
    room = session.ctx_size - len(session.tokens)
    for piece in session.generate(prompt[:room], max_tokens=n, params=WARM, ignore_eos=True):
        digest.update(piece.logits.tobytes())
        tokens.append(piece.token)
    if not tokens:
        session.truncate(len(session.tokens) // 256 * 256 if session.model.config.hybrid is None else 0)
        digest.update(session.forward([3, 4], logits="all").tobytes())
    return tokens, digest.hexdigest()


def saved_bytes(stack: Stack, folder: Path, n: int = 300) -> bytes:
    with closing(stack.model.session(seed=4)) as session:
        talk(session, n)
        session.save(folder / "s")
    data = (folder / "s").read_bytes()
    (folder / "s").unlink()
    return data


@pytest.mark.parametrize("n", LENGTHS)
def test_loaded_session_goes_on_with_the_same_bits_in_another_arena(path: Path, tmp_path: Path, n: int) -> None:
    with open_stack(path, ctx_size=CTX) as small, closing(small.model.session(seed=9)) as session:
        talk(session, n)
        session.save(tmp_path / "s")
        tokens, expected = session.tokens, going_on(session)
    with (
        open_stack(path, ctx_size=CTX, extra_slots=40, n_threads=2) as large,
        closing(large.model.load_session(tmp_path / "s")) as loaded,
    ):
        assert (loaded.tokens, loaded.seed, loaded.ctx_size) == (tokens, 9, CTX)
        assert going_on(loaded) == expected


@pytest.mark.parametrize("n_before", [1, 7, 20])
def test_an_answer_saved_in_the_making_goes_on_as_if_it_had_not_stopped(
    stack: Stack, tmp_path: Path, n_before: int
) -> None:
    def row(piece: Piece) -> tuple[int, bytes]:
        return piece.token, piece.logits.tobytes()

    with closing(stack.model.session(seed=6)) as session:
        prompt = tokens_of(1, 100, N_VOCAB).tolist()
        whole = session.generate(prompt, max_tokens=24, params=WARM, ignore_eos=True)
        rows = [row(piece) for piece in islice(whole, n_before)]
        session.save(tmp_path / "s")
        rows += [row(piece) for piece in whole]
    assert len(rows) == 24
    with closing(stack.model.load_session(tmp_path / "s")) as loaded:
        assert len(loaded.tokens) == 100 + n_before
        rest = loaded.generate((), max_tokens=24 - n_before, params=WARM, ignore_eos=True)
        assert [row(piece) for piece in rest] == rows[n_before:]


@pytest.mark.parametrize("name", ["README.md", "a link"])
def test_a_file_that_is_no_session_is_not_replaced(stack: Stack, tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_bytes(b"# words")
    (tmp_path / "a link").symlink_to(tmp_path / "README.md")
    with closing(stack.model.session()) as session:
        session.forward([1, 2, 3])
        with pytest.raises(InvalidArgument, match="no saved session, and stays"):
            session.save(tmp_path / name)
        assert (tmp_path / "README.md").read_bytes() == b"# words"
        for begin in (b"", b"KVSS"):
            (tmp_path / "README.md").write_bytes(begin)
            session.save(tmp_path / name)
            stack.model.load_session(tmp_path / name).close()


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_of_cache_types_comes_back(path: Path, tmp_path: Path, pair: tuple[str, str]) -> None:
    with open_stack(path, ctx_size=CTX, cache_types=pair) as stack, closing(stack.model.session(seed=1)) as session:
        talk(session, 300)
        session.save(tmp_path / "s")
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            assert going_on(loaded) == going_on(session)
            loaded.save(tmp_path / "t")
        session.save(tmp_path / "s")
        assert (tmp_path / "t").read_bytes() == (tmp_path / "s").read_bytes()


@pytest.mark.parametrize("n_kept", [9, 11, 13, 70, 74, 330, 333])
def test_a_prompt_behind_part_of_a_chunk_goes_on_with_the_same_bits(
    stack: Stack, tmp_path: Path, n_kept: int
) -> None:
    """Then a recurrent model takes the whole chunk again, as it was run before."""
    n_prompt = {9: 9, 11: 9, 13: 9, 70: 70, 74: 70}.get(n_kept, 329)
    with closing(stack.model.session()) as session:
        session.forward(tokens_of(1, n_prompt, N_VOCAB), logits="none")
        for token in (11, 12, 13, 14, 15):
            session.forward([token], logits="none", phase=Phase.DECODE)
        session.save(tmp_path / "s")
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            rows = []
            for each in (loaded, session):
                each.truncate(n_kept)
                rows.append(each.forward([5, 6, 7], logits="all").tobytes())
            assert rows[0] == rows[1]


def test_empty_session_comes_back_empty(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(seed=3)) as session:
        session.save(tmp_path / "s")
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            assert loaded.tokens == ()
            assert going_on(loaded) == going_on(session)


def test_full_context_comes_back_full(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(seed=3)) as session:
        talk(session, CTX)
        session.save(tmp_path / "s")
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            assert loaded.tokens == session.tokens
            assert list(loaded.generate(max_tokens=3)) == []
            assert loaded.stop_reason == "context_full"
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            assert going_on(loaded) == going_on(session)


def test_conversation_goes_into_another_context_where_it_fits(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(ctx_size=400)) as session:
        talk(session, 300)
        session.save(tmp_path / "s")
        expected = going_on(session)
    with closing(stack.model.load_session(tmp_path / "s", ctx_size=500)) as loaded:
        assert loaded.ctx_size == 500
        assert going_on(loaded) == expected
    for size in (299, CTX + 1, 0, True):
        with pytest.raises(InvalidArgument):
            stack.model.load_session(tmp_path / "s", ctx_size=size)


@pytest.mark.parametrize("n", [256, 300])
def test_forks_are_saved_each_with_what_it_said(stack: Stack, tmp_path: Path, n: int) -> None:
    """Shared pages, and a private page whose first rows came from a shared one."""
    with closing(stack.model.session(seed=8)) as parent:
        talk(parent, n)
        with closing(parent.fork()) as child, closing(parent.fork()) as still:
            going_on(child)
            going_on(parent, (9, 8))
            for name, session in (("parent", parent), ("child", child), ("still", still)):
                session.save(tmp_path / name)
            for name, session in (("parent", parent), ("child", child), ("still", still)):
                with closing(stack.model.load_session(tmp_path / name)) as loaded:
                    assert (loaded.tokens, loaded.seed) == (session.tokens, session.seed)
                    with closing(loaded.fork()) as grandchild, closing(session.fork()) as other:
                        assert grandchild.seed == other.seed
                    assert going_on(loaded) == going_on(session)


def test_fork_whose_first_pass_failed_is_saved(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(seed=8)) as parent:
        talk(parent, 300)
        with closing(parent.fork()) as child:
            child.cancel()
            with pytest.raises(KvStreamError):
                child.forward([1, 2, 3])
            child.save(tmp_path / "s")
            with closing(stack.model.load_session(tmp_path / "s")) as loaded:
                assert going_on(loaded) == going_on(child)


def test_nothing_behind_the_last_token_is_saved(tmp_path: Path) -> None:
    """What was cut off is not told, and the same conversation gives the same file."""
    write_model(tmp_path / "m", "dense")
    with (
        open_stack(tmp_path / "m", ctx_size=CTX) as stack,
        closing(stack.model.session()) as once,
        closing(stack.model.session()) as again,
    ):
        once.forward(tokens_of(1, 100, N_VOCAB))
        again.forward(tokens_of(1, 100, N_VOCAB))
        again.forward(tokens_of(7, 90, N_VOCAB))
        again.truncate(100)
        once.save(tmp_path / "once")
        again.save(tmp_path / "again")
    assert (tmp_path / "once").read_bytes() == (tmp_path / "again").read_bytes()


def test_messages_of_a_chat_come_back(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(seed=2)) as session:
        list(session.chat("Hello é", system="Be kind.", max_tokens=6, params=WARM))
        session.save(tmp_path / "s")
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            assert loaded._transcript.dump() == session._transcript.dump()
            assert loaded._transcript.dump()["messages"]
            answers = [
                [piece.token for piece in each.chat("More?", max_tokens=6, params=WARM)] for each in (loaded, session)
            ]
            assert answers[0] == answers[1]
            assert loaded.tokens == session.tokens


def test_messages_that_json_cannot_hold_are_refused_by_name(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(seed=2)) as session:
        message = {"role": "user", "content": "Hi", "more": MappingProxyType({"list": UserList("ab")})}
        list(session.chat([message], max_tokens=2))
        session.save(tmp_path / "s")
        with closing(stack.model.load_session(tmp_path / "s")) as loaded:
            said = loaded._transcript.dump()["messages"]
            assert isinstance(said, list) and said[0]["more"] == {"list": ["a", "b"]}
        message["more"] = b"changed after it was said"
        with pytest.raises(InvalidArgument, match="messages"):
            session.save(tmp_path / "t")
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"messages": None, "is_behind": 1, "is_thinking": False},
        {"messages": {}, "is_behind": False, "is_thinking": False},
        {"messages": ["hi"], "is_behind": False, "is_thinking": False},
        {"is_behind": False, "is_thinking": False},
    ],
)
def test_transcript_is_made_only_from_what_one_can_have_written(found: dict[str, object]) -> None:
    assert Transcript.of(found) is None


def refused(stack: Stack, path: Path, data: bytes) -> FormatError:
    """The error of a file, which changed nothing."""
    path.write_bytes(data)
    before = stack.device.info.live_objects
    with pytest.raises(FormatError) as caught:
        stack.model.load_session(path)
    assert caught.value.offset is not None and 0 <= caught.value.offset <= len(data)
    assert any(f": {section}: " in str(caught.value) for section in ("header", *SECTIONS))
    assert stack.device.info.live_objects == before
    return caught.value


def entries_of(data: bytes) -> list[tuple[bytes, int, int, bytes]]:
    return [ENTRY.unpack_from(data, HEAD.size + i * ENTRY.size) for i in range(len(SECTIONS))]


def positions_of(data: bytes) -> list[int]:
    """Every byte of the header, some of each section, and random ones."""
    chosen = set(range(HEADER_BYTES))
    for _, offset, n_bytes, _ in entries_of(data):
        chosen |= {offset, offset + n_bytes // 2, offset + n_bytes - 1} if n_bytes else set()
    chosen |= set(random.Random(1).sample(range(len(data)), 200))
    return sorted(chosen)


def test_a_damaged_byte_anywhere_is_noticed_and_changes_nothing(stack: Stack, tmp_path: Path) -> None:
    data = saved_bytes(stack, tmp_path)
    sections = {name.rstrip(b"\0").decode(): (at, at + n) for name, at, n, _ in entries_of(data)}
    with closing(stack.model.session(seed=1)) as other, closing(stack.model.session(seed=1)) as twin:
        talk(other, 280)
        talk(twin, 280)
        for position in positions_of(data):
            broken = bytearray(data)
            broken[position] ^= 1 << position % 8
            error = refused(stack, tmp_path / "s", bytes(broken))
            for name, (begin, end) in sections.items():
                if begin <= position < end:
                    assert (error.offset, f": {name}: " in str(error)) == (begin, True)
        assert going_on(other) == going_on(twin)
    (tmp_path / "s").write_bytes(data)
    stack.model.load_session(tmp_path / "s").close()


def test_a_file_cut_anywhere_or_longer_is_refused(stack: Stack, tmp_path: Path) -> None:
    data = saved_bytes(stack, tmp_path)
    bounds = {0, 1, 8, HEAD.size, HEADER_BYTES, len(data), *(at for _, at, _, _ in entries_of(data))}
    for bound in sorted({b + d for b in bounds for d in (-1, 0, 1) if 0 <= b + d < len(data)}):
        refused(stack, tmp_path / "s", data[:bound])
    refused(stack, tmp_path / "s", data + b"\0")


def sealed(data: bytes, changes: dict[str, Callable[[bytes], bytes]]) -> bytes:
    """The file with sections replaced, and every digest as it must be then."""
    parts, at = [], HEADER_BYTES
    body = b""
    for name, offset, n_bytes, _ in entries_of(data):
        part = data[offset : offset + n_bytes]
        change = changes.get(name.rstrip(b"\0").decode())
        part = part if change is None else change(part)
        parts.append(session_file._Entry(at, len(part), hashlib.blake2b(part, digest_size=16).digest()))
        body += part
        at += len(part)
    return session_file._header(parts, at) + body


def resealed_header(data: bytes, at: int, value: bytes) -> bytes:
    """The file with header bytes replaced, and the seal as it must be then."""
    head = data[:at] + value + data[at + len(value) : HEADER_BYTES - 16]
    return head + hashlib.blake2b(head, digest_size=16).digest() + data[HEADER_BYTES:]


def setting(**values: object) -> dict[str, Callable[[bytes], bytes]]:
    return {"setting": lambda part: json.dumps(json.loads(part) | values).encode()}


def test_sealed_file_that_says_what_cannot_be_is_refused(stack: Stack, tmp_path: Path) -> None:
    data = saved_bytes(stack, tmp_path)
    assert sealed(data, {}) == data
    forged: list[dict[str, Callable[[bytes], bytes]]] = [
        {"setting": lambda part: b"[" * 100_000},
        {"setting": lambda part: b"[]"},
        {"setting": lambda part: b"\xff{}"},
        {"setting": lambda part: b"{}"},
        {"setting": lambda part: part + b" " * (1 << 20)},
        {"messages": lambda part: b"{}"},
        {"messages": lambda part: b""},
        {"tokens": lambda part: part[:-4] + N_VOCAB.to_bytes(4, "little")},
        {"tokens": lambda part: part[:-4]},
        {"kept": lambda part: b"" if part else b"\0"},
        {"kept": lambda part: part[:-1] if part else b"\0"},
        {"pages": lambda part: part[:-1]},
        {"pages": lambda part: b""},
        {"state": lambda part: b"" if part else b"\0"},
        {"state": lambda part: part[:-1] if part else b"\0"},
        {"state": lambda part: part[:40] + bytes(len(part) - 40) if part else b"\0" * 99},
        {"state": lambda part: bytes(1 << 24)},
    ]
    forged += [setting(**{key: value}) for key in ("ctx_tokens", "n_tokens", "n_cached", "seed", "n_forks", "kept")
               for value in (-1, 1 << 64, "1", None, True, 1.0)]  # fmt: skip
    forged += [setting(n_cached=301), setting(n_cached=0), setting(n_cached=10), setting(model=None), setting(model={})]
    if stack.model.config.hybrid is not None:
        forged += [setting(ran=value) for value in (None, [-1], [True], [1.0], [301], [299, 2], [5], "300")]
    for changes in forged:
        refused(stack, tmp_path / "s", sealed(data, changes))


def test_sealed_header_that_does_not_fit_the_file_is_refused(stack: Stack, tmp_path: Path) -> None:
    data = saved_bytes(stack, tmp_path)
    assert resealed_header(data, 0, data[:8]) == data
    for at, value in (
        (12, (4).to_bytes(4, "little")),
        (16, (1 << 50).to_bytes(8, "little")),
        (HEAD.size, b"pages"),
        (HEAD.size + 16, (0).to_bytes(8, "little")),
        (HEAD.size + 24, (1 << 63).to_bytes(8, "little")),
        (HEAD.size + 5 * ENTRY.size + 24, (0).to_bytes(8, "little")),
    ):
        refused(stack, tmp_path / "s", resealed_header(data, at, value))


def test_version_of_the_future_is_refused_by_its_number(stack: Stack, tmp_path: Path) -> None:
    data = saved_bytes(stack, tmp_path)
    for version in (0, VERSION + 1, (1 << 32) - 1):
        forged = resealed_header(data, 8, version.to_bytes(4, "little"))
        error = refused(stack, tmp_path / "s", forged)
        assert f"version {version}" in str(error)
        assert str(refused(stack, tmp_path / "s", forged[:40])) == str(error)


def test_a_file_that_only_claims_to_be_long_takes_no_memory(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved_bytes(stack, tmp_path)
    taken = []
    read = session_file.SectionReader._read

    def spy(self: session_file.SectionReader, offset: int, n_bytes: int, section: str) -> session_file.Bytes:
        taken.append(n_bytes)
        return read(self, offset, n_bytes, section)

    monkeypatch.setattr(session_file.SectionReader, "_read", spy)
    length = 1 << 40
    for i, name in enumerate(SECTIONS):
        entries, at = [], HEADER_BYTES
        for k, (_, _, n_bytes, digest) in enumerate(entries_of(data)):
            n_bytes = length if k == i else n_bytes
            entries.append(session_file._Entry(at, n_bytes, digest))
            at += n_bytes
        with (tmp_path / "s").open("wb") as file:
            file.write(session_file._header(entries, at))
            for (_, offset, n_bytes, _), entry in zip(entries_of(data), entries, strict=True):
                file.seek(entry.offset)
                file.write(data[offset : offset + n_bytes])
            file.truncate(at)
        with pytest.raises(FormatError, match=name):
            stack.model.load_session(tmp_path / "s")
        assert sum(taken) < 1 << 26


@pytest.mark.parametrize("change", ["weights", "architecture", "types", "rotation"])
def test_session_of_another_model_or_cache_is_refused(path: Path, tmp_path: Path, change: str) -> None:
    with open_stack(path, ctx_size=CTX) as stack:
        data = saved_bytes(stack, tmp_path)
        is_hybrid = stack.model.config.hybrid is not None
    other = path
    types = ("Q8_0", "Q8_0") if change == "types" else ("Q8_0", "Q4_0")
    if change in ("weights", "architecture"):
        other = tmp_path / "other.gguf"
        write_model(other, "hybrid" if is_hybrid == (change == "weights") else "dense", 3)
    elif change == "rotation":
        data = sealed(data, {"setting": lambda part: part.replace(b'"flags": 3', b'"flags": 0')})
    with open_stack(other, ctx_size=CTX, cache_types=types) as stack:
        error = refused(stack, tmp_path / "s", data)
        wanted = "saved with K q8_0, V q4_0; this model was opened with K q8_0, V q8_0"
        assert (wanted if change == "types" else "another model or cache") in str(error)


def test_what_is_no_file_is_refused(stack: Stack, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        stack.model.load_session(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(FormatError, match="regular"):
            stack.model.load_session(tmp_path / name)
    with pytest.raises(InvalidArgument):
        stack.model.load_session("a\0b")
    with closing(stack.model.session()) as session, pytest.raises(DeviceError):
        session.save(tmp_path / "none" / "s")


def test_a_write_that_fails_anywhere_leaves_the_old_file(stack: Stack, tmp_path: Path) -> None:
    with closing(stack.model.session(seed=5)) as session, closing(stack.model.session(seed=5)) as twin:
        talk(session, 300)
        talk(twin, 300)
        session.save(tmp_path / "s")
        old = (tmp_path / "s").read_bytes()
        list(session.generate([1], max_tokens=2, params=WARM))
        list(twin.generate([1], max_tokens=2, params=WARM))
        n_failed = 0
        while True:
            with stack.fault(Fault(HookPoint.FILE, n_failed)) as fault:
                if fault_free(session, tmp_path / "s"):
                    break
            assert fault.fired == 1
            assert (tmp_path / "s").read_bytes() == old
            assert [each.name for each in tmp_path.iterdir()] == ["s"]
            n_failed += 1
        assert n_failed > 5
        assert (tmp_path / "s").read_bytes() != old
        assert going_on(session) == going_on(twin)


def fault_free(session: Session, path: Path) -> bool:
    try:
        session.save(path)
    except DeviceError:
        return False
    return True


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_system_that_refuses_leaves_the_old_file(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "s").write_bytes(b"KVSSAVED, old")
    with closing(stack.model.session(seed=5)) as session:
        talk(session, 10)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(DeviceError, match="space"):
                session.save(tmp_path / "s")
        assert (tmp_path / "s").read_bytes() == b"KVSSAVED, old"
        assert [each.name for each in tmp_path.iterdir()] == ["s"]
        session.save(tmp_path / "s")
        stack.model.load_session(tmp_path / "s").close()


@pytest.mark.parametrize("point", [HookPoint.FILE, HookPoint.ALLOC, HookPoint.COPY])
def test_a_load_that_fails_anywhere_leaves_nothing_behind(stack: Stack, tmp_path: Path, point: HookPoint) -> None:
    (tmp_path / "s").write_bytes(saved_bytes(stack, tmp_path))
    with closing(stack.model.session(seed=1)) as other:
        talk(other, 280)
        before = stack.device.info.live_objects
        n_failed = n_elsewhere = 0
        while True:
            with stack.fault(Fault(point, n_failed)) as fault:
                try:
                    loaded = stack.model.load_session(tmp_path / "s")
                except fault.error:
                    assert fault.fired == 1
                    n_failed += 1
                else:
                    if fault.fired == 0:
                        break
                    # The copy that failed was one that the other session still had under way.
                    loaded.close()
                    n_elsewhere += 1
                    assert n_elsewhere < 100
            assert stack.device.info.live_objects == before
            stack.target.check_integrity()
        assert n_failed > 0
        with closing(loaded):
            assert fault.fired == 0
            assert len(going_on(loaded)[0]) == 9


def test_digest_of_the_weights_sees_a_tensor_changed_at_either_end(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "dense")
    data = bytearray((tmp_path / "m").read_bytes())

    def digest() -> str:
        (tmp_path / "m").write_bytes(data)
        with saving.GgufFile.open(tmp_path / "m") as file:
            return saving.weights_digest(file)

    with saving.GgufFile.open(tmp_path / "m") as file:
        info = file.tensor("blk.1.ffn_down.weight")
    own = digest()
    for position in (info.offset, info.offset + info.nbytes - 1, info.offset + info.nbytes // 2):
        data[position] ^= 1
        assert digest() != own
        data[position] ^= 1
    assert digest() == own
