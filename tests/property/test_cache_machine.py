"""The logical cache against a list model: tokens, shared pages, copy on write, publication, loading (P-LC).

Holds: ``CacheMachine``. The model knows sequences as lists of columns and columns as rows with holders; it
knows nothing of extents, which are checked by what they promise: live columns never overlap, neighbours in an
extent are adjacent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

pytest.importorskip("pykvstream._ffi._native")

from pykvstream.core.device import Device, DeviceFlag
from pykvstream.core.kv import PAGE_TOKENS, Cache, KvLayer, Seq
from pykvstream.errors import Busy, Closed, ContextFull, InvalidArgument, NotFound
from tests.alphabet import ScriptedMachine, u16
from tests.examples import examples

Q8_0 = 8
F16 = 1
LAYERS = (KvLayer(1, 32, 32, Q8_0, Q8_0), KvLayer(1, 16, 32, F16, Q8_0))


@dataclass(eq=False)
class Column:
    """One page of every layer. ``content`` holds the seed of each layer's bytes."""

    holders: int = 1
    waiting: int = 0
    published: int = 0
    loading: int = 0
    loaded: set[int] = field(default_factory=set)
    content: dict[int, int] = field(default_factory=dict)
    page_id: int | None = None

    @property
    def shared(self) -> bool:
        return self.holders + self.waiting > 1


@dataclass(eq=False)
class Model:
    """One sequence. ``source`` is a replaced page's (number, old column, rows)."""

    ctx: int
    committed: int = 0
    appended: int = 0
    pages: list[Column] = field(default_factory=list)
    source: tuple[int, Column, int] | None = None

    @property
    def open_rows(self) -> int:
        return self.appended - self.committed

    def rows_in(self, page: int, tokens: int) -> int:
        return min(max(tokens - page * PAGE_TOKENS, 0), PAGE_TOKENS)

    def drop_source(self) -> None:
        if self.source is not None:
            self.source[1].waiting -= 1
            self.source = None

    def forget_rows(self) -> None:
        if self.pages and not self.pages[-1].shared:
            last = self.pages[-1]
            last.published = min(last.published, self.rows_in(len(self.pages) - 1, self.committed))

    def append(self, n_tokens: int) -> None:
        self.forget_rows()
        rows = self.committed % PAGE_TOKENS
        if rows and self.pages[-1].shared:
            old = self.pages[-1]
            old.holders -= 1
            old.waiting += 1
            self.pages[-1] = Column()
            self.source = (len(self.pages) - 1, old, rows)
        self.appended = self.committed + n_tokens
        while len(self.pages) * PAGE_TOKENS < self.appended:
            self.pages.append(Column())

    def end_at(self, n_tokens: int) -> None:
        self.committed = self.appended = n_tokens
        while (len(self.pages) - 1) * PAGE_TOKENS >= n_tokens and self.pages:
            self.pages.pop().holders -= 1
        if self.source is not None:
            page, old, rows = self.source
            if page >= len(self.pages):
                self.drop_source()
            elif self.rows_in(page, n_tokens) <= rows:
                self.pages[page].holders -= 1
                self.pages[page] = old
                old.holders += 1
                self.drop_source()
        self.forget_rows()

    def release(self) -> None:
        self.end_at(0)
        self.drop_source()


def record_of(layer: int, seed: int, n_bytes: int) -> np.ndarray:
    return np.random.default_rng([layer, seed]).integers(0, 256, n_bytes, np.uint8)


WHO = st.integers(0, 59)
"""Which sequence, of as many as there are."""
ROWS = st.one_of(st.integers(1, 20), st.integers(200, 400))


FLAGS = [DeviceFlag.NONE, DeviceFlag.DEFERRED, DeviceFlag.STRICT_HISTORY]


class CacheMachine(ScriptedMachine):
    target = "cache"

    @initialize(
        flags=st.sampled_from(FLAGS),
        ctx=st.integers(600, 1100),
        n_tokens=st.integers(1, 600),
    )
    def open(self, flags: DeviceFlag, ctx: int, n_tokens: int) -> None:
        self.device = Device(1, flags=flags)
        self.cache = Cache(self.device, LAYERS)
        self.live: list[tuple[Seq, Model]] = []
        self.closed: list[Seq] = []
        self.seen_ids: dict[int, Column] = {}
        self.generations: dict[int, int] = {}
        self.seeds = 0
        self.act("CREATE", FLAGS.index(flags), *u16(ctx))
        self.create(ctx)
        self.extend(0, n_tokens, n_tokens)

    def pick(self, who: int) -> tuple[Seq, Model]:
        return self.live[who % len(self.live)]

    def create(self, ctx: int) -> None:
        self.live.append((self.cache.sequence(ctx), Model(ctx)))

    @rule(ctx=st.one_of(st.integers(1, 1100), st.sampled_from([255, 256, 257, 512])))
    def create_another(self, ctx: int) -> None:
        with pytest.raises(InvalidArgument):
            self.cache.sequence(0)
        if len(self.live) < 5:
            self.act("CREATE", *u16(ctx))
            self.create(ctx)

    @rule(who=WHO)
    def fork(self, who: int) -> None:
        self.act("FORK", who)
        seq, model = self.pick(who)
        if model.open_rows or model.source is not None:
            with pytest.raises(Busy):
                seq.fork()
            return
        if len(self.live) >= 5:
            return
        child = Model(model.ctx, model.committed, model.appended, list(model.pages))
        for column in child.pages:
            column.holders += 1
        self.live.append((seq.fork(), child))

    def append(self, who: int, n_tokens: int) -> bool:
        self.act("APPEND", who, *u16(n_tokens))
        seq, model = self.pick(who)
        expected: type[Exception] | None = None
        if n_tokens == 0:
            expected = InvalidArgument
        elif model.open_rows:
            expected = Busy
        elif model.committed + n_tokens > model.ctx:
            expected = ContextFull
        if expected is not None:
            with pytest.raises(expected):
                seq.append(n_tokens)
            return False
        seq.append(n_tokens)
        model.append(n_tokens)
        return True

    @rule(who=WHO, n_tokens=st.one_of(st.integers(0, 3), ROWS))
    def open_rows(self, who: int, n_tokens: int) -> None:
        self.append(who, n_tokens)

    @rule(who=WHO, n_kept=st.integers(0, 400))
    def commit(self, who: int, n_kept: int) -> None:
        self.act("COMMIT", who, *u16(n_kept))
        seq, model = self.pick(who)
        if n_kept > model.open_rows:
            with pytest.raises(InvalidArgument):
                seq.commit(n_kept)
            n_kept = model.open_rows
        seq.commit(n_kept)
        model.end_at(model.committed + n_kept)

    @rule(who=WHO, n_tokens=ROWS, n_kept=st.integers(0, 400))
    def extend(self, who: int, n_tokens: int, n_kept: int) -> None:
        if self.append(who, n_tokens):
            seq, model = self.pick(who)
            self.act("COMMIT", who, *u16(min(n_kept, n_tokens)))
            seq.commit(min(n_kept, n_tokens))
            model.end_at(model.committed + min(n_kept, n_tokens))

    @rule(who=WHO, back=st.one_of(st.integers(-1, 20), st.integers(0, 600)))
    def truncate(self, who: int, back: int) -> None:
        self.act("TRUNCATE", who, *u16(back & 0xFFFF))
        seq, model = self.pick(who)
        if back < 0:
            with pytest.raises(InvalidArgument):
                seq.truncate(model.committed + 1)
        else:
            n_tokens = max(model.committed - back, 0)
            seq.truncate(n_tokens)
            model.end_at(n_tokens)

    @rule(who=WHO)
    def release(self, who: int) -> None:
        self.act("RELEASE", who)
        seq, model = self.pick(who)
        if len(self.live) > 1:
            seq.close()
            seq.close()
            model.release()
            self.live.remove((seq, model))
            self.closed.append(seq)
        for dead in self.closed:
            with pytest.raises(Closed):
                dead.append(1)
            with pytest.raises(Closed):
                dead.fork()

    def write(self, who: int, page: int, layer: int, rows: int) -> None:
        self.act("WRITE", who, page, layer, *u16(rows))
        seq, model = self.pick(who)
        self.seeds += 1
        record = record_of(layer, self.seeds, self.cache.records[layer].record_bytes)
        limit = model.rows_in(page, model.committed)
        column = model.pages[page]
        if rows == 0 or rows > limit or column.shared:
            with pytest.raises(InvalidArgument if rows == 0 or rows > limit else Busy):
                seq.write_page(layer, page, record, rows)
            return
        seq.write_page(layer, page, record, rows)
        if not column.loaded:
            column.page_id = None  # other bytes, another page
        column.content[layer] = self.seeds
        column.published = 0
        if column.loaded and column.loading != rows:
            column.loaded.clear()
        column.loading = rows
        column.loaded.add(layer)
        if len(column.loaded) == len(LAYERS):
            column.published = rows
            column.loaded.clear()
            if model.source is not None and model.source[0] == page:
                model.drop_source()

    @rule(who=WHO, page=st.integers(0, 9), layer=st.integers(0, 1), rows=st.integers(0, 300))
    def write_one_layer(self, who: int, page: int, layer: int, rows: int) -> None:
        _, model = self.pick(who)
        if model.pages:
            self.write(who, page % len(model.pages), layer, rows)

    @rule(who=WHO)
    def load(self, who: int) -> None:
        _, model = self.pick(who)
        for page in range(len(model.pages)):
            for layer in range(len(LAYERS)):
                self.write(who, page, layer, model.rows_in(page, model.committed))

    @rule(who=WHO)
    def read_all(self, who: int) -> None:
        self.act("READ", who)
        seq, model = self.pick(who)
        for layer, record in enumerate(self.cache.records):
            with pytest.raises(NotFound):
                seq.read_page(layer, len(model.pages))
            for page, column in enumerate(model.pages):
                if min(column.published, model.rows_in(page, model.appended)) == 0:
                    with pytest.raises(NotFound):
                        seq.read_page(layer, page)
                    continue
                expected = record_of(layer, column.content[layer], record.record_bytes)
                assert np.array_equal(seq.read_page(layer, page), expected)

    @invariant()
    def counts_agree(self) -> None:
        self.cache.check_integrity()
        columns = {id(c) for _, model in self.live for c in model.pages}
        columns |= {id(model.source[1]) for _, model in self.live if model.source is not None}
        info = self.cache.info
        assert info.n_sequences == len(self.live)
        assert info.n_pages == len(columns)
        for seq, model in self.live:
            state = seq.info
            assert (state.committed_tokens, state.appended_tokens) == (model.committed, model.appended)
            assert state.ctx_tokens == model.ctx
            assert state.n_pages == len(model.pages)
            assert state.n_shared_pages == sum(column.holders > 1 for column in model.pages)
            assert state.generation >= self.generations.get(id(seq), 0)
            self.generations[id(seq)] = state.generation

    @invariant()
    def pages_agree(self) -> None:
        places: dict[tuple[int, int, int], int] = {}
        for seq, model in self.live:
            previous = None
            for number, column in enumerate(model.pages):
                for layer in range(len(LAYERS)):
                    page = seq.page(layer, number)
                    assert page.n_holders == column.holders
                    assert page.published_rows == min(column.published, model.rows_in(number, model.appended))
                    if column.page_id is None:
                        assert page.page_id not in self.seen_ids
                        column.page_id = page.page_id
                        self.seen_ids[page.page_id] = column
                    assert page.page_id == column.page_id
                    place = (page.extent_id, layer, page.host_offset_bytes)
                    assert places.setdefault(place, page.page_id) == page.page_id
                    if layer == 0:
                        if previous is not None and previous.extent_id == page.extent_id:
                            step = self.cache.records[0].record_bytes
                            assert page.host_offset_bytes == previous.host_offset_bytes + step
                        previous = page

    def teardown(self) -> None:
        self.report_script()
        if not hasattr(self, "device"):
            return
        for seq, _ in self.live:
            seq.close()
        self.cache.close()
        assert self.device.info.live_objects == 0
        assert self.device.info.host_bytes == 0
        self.device.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(80), stateful_step_count=50, deadline=None)
