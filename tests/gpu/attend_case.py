"""Attention-side kernels on made-up histories: page records, launches cut anywhere, and float64 references.

Shapes: q [rows][query heads][head_dim_k], k and v [tokens][KV heads][head size], a record uint8 [KV heads][head bytes].
Pages lie scattered in one buffer, in no order, with gaps; everything that nobody has written is 0xff.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvstream.gguf import GgmlType, decode, encode
from tests.gpu.kernel_engine import Array, Engine, Parameters

PAGE = 256
PARAMS = Parameters("attend_params.h")
GROUP = PARAMS.numbers["KVS_CUDA_GROUP_PAGES"]
PLAIN_TILE = PARAMS.numbers["KVS_CUDA_TILE_QUERIES"]
PROMPT_TILE = 128
PART_HEAD = 4
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
T = GgmlType
KV_TYPES = (T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.IQ4_NL)
# Bytes of scales and high bits at the head of a file's block.
SCALES = {T.Q8_0: (2, 0), T.Q4_0: (2, 0), T.IQ4_NL: (2, 0), T.Q4_1: (4, 0), T.Q5_0: (2, 4), T.Q5_1: (4, 4)}


def planes_of(kind: GgmlType, values: Floats) -> list[Bytes]:
    """Codes, high bits and scales of rows [n][head size], each [n][bytes]."""
    coded = encode(kind, values)
    if kind not in SCALES:
        return [coded, coded[:, :0], coded[:, :0]]
    scales, high = SCALES[kind]
    blocks = coded.reshape(len(coded), -1, kind.block_bytes)
    parts = (blocks[..., scales + high :], blocks[..., scales : scales + high], blocks[..., :scales])
    return [np.ascontiguousarray(part).reshape(len(coded), -1) for part in parts]


def plane_bytes(kind: GgmlType, head_dim: int) -> list[int]:
    return [plane.shape[1] for plane in planes_of(kind, np.zeros((1, head_dim), np.float32))]


@dataclass(frozen=True)
class Layer:
    type_k: GgmlType
    type_v: GgmlType
    dim_k: int = 64
    dim_v: int = 64
    n_kv_heads: int = 2
    group: int = 1

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.group

    @property
    def macros(self) -> dict[str, int]:
        types = {"KVS_TYPE_K": self.type_k.id, "KVS_TYPE_V": self.type_v.id}
        return types | {"KVS_DIM_K": self.dim_k, "KVS_DIM_V": self.dim_v}

    @cached_property
    def rows(self) -> list[int]:
        """Bytes of a token's row in each of the six planes."""
        return plane_bytes(self.type_k, self.dim_k) + plane_bytes(self.type_v, self.dim_v)

    @property
    def record_bytes(self) -> int:
        return self.n_kv_heads * PAGE * sum(self.rows)

    def write(self, record: Bytes, first_row: int, k: Floats, v: Floats) -> None:
        """Rows [n][KV heads][head size] into a record, as the file formats encode them."""
        heads = record.reshape(self.n_kv_heads, PAGE * sum(self.rows))
        for head in range(self.n_kv_heads):
            at = 0
            coded = planes_of(self.type_k, k[:, head]) + planes_of(self.type_v, v[:, head])
            for width, plane in zip(self.rows, coded, strict=True):
                rows = heads[head, at : at + PAGE * width].reshape(PAGE, width)
                rows[first_row : first_row + len(k)] = plane
                at += PAGE * width


@dataclass(frozen=True)
class Family:
    """A source of attention kernels; ``tile`` queries a block, by their number where it is 0."""

    source: str
    tile: int = 0
    more: tuple[tuple[str, int], ...] = ()
    is_staged: bool = False
    """Whether pages come to shared memory first."""

    def takes(self, layer: Layer) -> bool:
        if self.source == "attend_tile" and (layer.dim_k % 64 != 0 or layer.dim_v not in (64, 128, 256)):
            return False
        return self.source == "attend" or not {layer.type_k, layer.type_v} & {T.F32, T.BF16}

    def tile_of(self, n_queries: int) -> int:
        if self.source == "attend":
            return PLAIN_TILE
        if self.source == "attend_tile":
            return PROMPT_TILE
        return self.tile or (8 if n_queries <= 8 else 40)

    def macros(self, layer: Layer, tile: int) -> dict[str, int]:
        if self.source != "attend_mma":
            return layer.macros
        return layer.macros | {"KVS_TILES": tile // 8, "KVS_STAGED": int(self.is_staged)} | dict(self.more)

    def shared_bytes(self, layer: Layer, tile: int) -> int:
        if self.source == "attend":
            return 0
        if self.source == "attend_tile":
            return 384 * layer.dim_k + 128 * layer.dim_v + 1024
        blocks = layer.dim_v // 32
        splits = 8 if blocks == 1 else 4 if blocks == 2 else 2 if blocks <= 4 else 1
        return tile * 64 * (2 * layer.dim_k // 32 + 16) + tile * 128 * (splits - 1) * blocks + self.stage_bytes(layer)

    def stage_bytes(self, layer: Layer) -> int:
        """Of a page, with rows of K's codes a block of them apart, and of V's 16 bytes."""
        if not self.is_staged:
            return 0
        codes_of_block = plane_bytes(layer.type_k, 32)[0]
        return PAGE * (sum(layer.rows) + codes_of_block + 16)


PLAIN = Family("attend")
PRODUCTS = Family("attend_mma")
STAGED = Family("attend_mma", is_staged=True)
PROMPT = Family("attend_tile")
"""For rows of a prompt, where warpgroups multiply. Slots are of groups."""


def scattered(rng: np.random.Generator, n_pages: int, record_bytes: int) -> tuple[Bytes, list[int]]:
    """A poisoned buffer, and the offset of each page in it."""
    places = rng.permutation(2 * n_pages + 1)[:n_pages]
    return np.full((2 * n_pages + 1) * record_bytes, 0xFF, np.uint8), [int(place) * record_bytes for place in places]


@dataclass(frozen=True)
class Case:
    """Query rows at the end of a history that is on the engine. Row r is token first_token + r."""

    engine: Engine
    layer: Layer
    q: Floats
    k: Floats
    v: Floats
    table: int
    scale: float
    family: Family = PLAIN

    @property
    def n_tokens(self) -> int:
        return len(self.k)

    @property
    def n_rows(self) -> int:
        return len(self.q)

    @property
    def n_pages(self) -> int:
        return -(-self.n_tokens // PAGE)

    def rows(self, begin: int, end: int) -> Case:
        """A pass of some of the rows: later tokens stay in the pages, and nobody sees them."""
        kept = self.n_tokens - self.n_rows + end
        return replace(self, q=self.q[begin:end], k=self.k[:kept], v=self.v[:kept])


def make_case(engine: Engine, layer: Layer, n_tokens: int, n_rows: int, family: Family = PLAIN) -> Case:
    rng = np.random.default_rng([n_tokens, n_rows, layer.type_k.id, layer.type_v.id, layer.dim_k])
    k = rng.standard_normal((n_tokens, layer.n_kv_heads, layer.dim_k)).astype(np.float32)
    v = (rng.standard_normal((n_tokens, layer.n_kv_heads, layer.dim_v)) + 0.25).astype(np.float32)
    q = rng.standard_normal((n_rows, layer.n_heads, layer.dim_k)).astype(np.float32)
    memory, offsets = scattered(rng, -(-n_tokens // PAGE), layer.record_bytes)
    for page, offset in enumerate(offsets):
        tokens = slice(page * PAGE, (page + 1) * PAGE)
        layer.write(memory[offset : offset + layer.record_bytes], 0, k[tokens], v[tokens])
    base = engine.upload(memory)
    table = engine.upload(np.array([base + offset for offset in offsets], np.uint64))
    return Case(engine, layer, q, k, v, table, float(np.float32(1 / np.sqrt(layer.dim_k))), family)


STEP = Parameters("step_words.h")


def step_words(engine: Engine, first_token: int) -> int:
    """Where a recorded pass finds its words."""
    words = STEP.make("kvs_step_words", first_token=first_token)
    return engine.upload(np.frombuffer(bytes(words), np.uint8))


def poison(engine: Engine, n_floats: int) -> int:
    return engine.upload(np.full(n_floats, 0xFFFFFFFF, np.uint32))


@dataclass(frozen=True)
class Run:
    """Pages of one launch of both kernels, cut into slots of pages or of groups."""

    begin: int
    end: int
    is_grouped: bool

    @property
    def n_slots(self) -> int:
        return -(-self.end // GROUP) - self.begin // GROUP if self.is_grouped else self.end - self.begin


@dataclass(frozen=True)
class Launches:
    """The kernels as the launcher calls them, ready to run again and again."""

    case: Case
    steps: list[tuple[Any, tuple[int, int, int]]]
    out: int

    def run(self) -> None:
        case, layer, family = self.case, self.case.layer, self.case.family
        tile = family.tile_of(case.n_rows * layer.group)
        shared, macros = family.shared_bytes(layer, tile), family.macros(layer, tile)
        all_queries = (case.n_rows * layer.n_heads, 1, 1)
        for params, grid in self.steps:
            case.engine.run(family.source, "attend_leaf", macros, grid, 256, params, shared)
            case.engine.run(family.source, "attend_fold", macros, all_queries, layer.dim_v, params)

    def result(self) -> Floats:
        layer = self.case.layer
        return self.case.engine.download(self.out, (self.case.n_rows, layer.n_heads, layer.dim_v), np.float32)


def launches(case: Case, runs: Iterable[Run], *, is_recorded: bool = False, block: int = 0) -> Launches:
    """Recorded ones may go over more pages than there are, and are told nothing of what changes from pass to pass.
    ``block``: of the Walsh-Hadamard rotation behind it."""
    engine, layer = case.engine, case.layer
    runs = list(runs)
    n_queries = case.n_rows * layer.n_heads
    part = n_queries * (PART_HEAD + layer.dim_v)
    out = poison(engine, n_queries * layer.dim_v)
    fixed: dict[str, Any] = {
        "q": engine.upload(case.q),
        "out": out,
        "page_table": case.table,
        "slots": poison(engine, part * max(run.n_slots for run in runs)),
        "groups": poison(engine, part),
        "results": poison(engine, part),
        "first_token": 1 << 40 if is_recorded else case.n_tokens - case.n_rows,
        "step": step_words(engine, case.n_tokens - case.n_rows) if is_recorded else 0,
        "q_stride": layer.n_heads * layer.dim_k,
        "out_stride": layer.n_heads * layer.dim_v,
        "n_rows": case.n_rows,
        "n_query_heads": layer.n_heads,
        "n_kv_heads": layer.n_kv_heads,
        "scale": case.scale,
        "block": block,
        "block_scale": 1.0 if block == 0 else float(np.float32(1 / np.sqrt(block))),
    }
    n_tiles = -(-case.n_rows * layer.group // case.family.tile_of(case.n_rows * layer.group))
    steps = []
    for run in runs:
        params = PARAMS.make(
            "kvs_attend_params",
            page_begin=run.begin,
            page_end=run.end,
            is_grouped=run.is_grouped,
            is_first=run.begin == 0,
            is_last=not is_recorded and run.end == case.n_pages,
            **fixed,
        )
        steps.append((params, (n_tiles, layer.n_kv_heads, run.n_slots)))
    return Launches(case, steps, out)


def attend(case: Case, runs: Iterable[Run]) -> Floats:
    made = launches(case, runs)
    made.run()
    return made.result()


def attend_at_once(case: Case) -> Floats:
    return attend(case, [Run(0, case.n_pages, case.n_pages > GROUP)])


def stored(kind: GgmlType, rows: Floats) -> npt.NDArray[np.float64]:
    """Rows as the cache gives them back."""
    flat = rows.reshape(-1, rows.shape[-1])
    return decode(kind, encode(kind, flat)).astype(np.float64).reshape(rows.shape)


def attend64(case: Case) -> npt.NDArray[np.float64]:
    """Softmax attention of the stored rows in float64."""
    layer = case.layer
    k, v = stored(layer.type_k, case.k), stored(layer.type_v, case.v)
    out = np.empty((case.n_rows, layer.n_heads, layer.dim_v))
    for row in range(case.n_rows):
        seen = case.n_tokens - case.n_rows + row + 1
        for head in range(layer.n_heads):
            scores = k[:seen, head // layer.group] @ case.q[row, head].astype(np.float64) * case.scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[:seen, head // layer.group] / weights.sum()
    return out


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
