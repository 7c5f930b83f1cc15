"""Page records, and the cache of one model: sequences as lists of shared pages in host history.

Units: a page is ``PAGE_TOKENS`` token positions of one layer. Types are numbers of the GGUF format.
Source: ``include/kvstream/kv.h``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.status import check, make_struct
from pykvstream.errors import InvalidArgument, error_from_status

PAGE_TOKENS: int = lib.KVS_PAGE_TOKENS
RECORD_VERSION: int = lib.KVS_RECORD_VERSION

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class KvFlag(enum.IntFlag):
    """Which sides of a layer hold rotated values; see ``kvs_kv_flag``."""

    NONE = 0
    ROTATE_K = lib.KVS_KV_ROTATE_K
    ROTATE_V = lib.KVS_KV_ROTATE_V


class Plane(enum.IntEnum):
    """The parts of a head within a record, in the order in which they lie."""

    K_CODES = lib.KVS_PLANE_K_CODES
    K_HIGH = lib.KVS_PLANE_K_HIGH
    K_SCALES = lib.KVS_PLANE_K_SCALES
    V_CODES = lib.KVS_PLANE_V_CODES
    V_HIGH = lib.KVS_PLANE_V_HIGH
    V_SCALES = lib.KVS_PLANE_V_SCALES


class Side(enum.IntEnum):
    """Keys or values."""

    K = 0
    V = 1


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Geometry of one layer's cache."""

    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    type_k: int
    type_v: int
    flags: KvFlag = KvFlag.NONE

    def to_c(self) -> Any:
        """A ``kvs_kv_layer *`` of this geometry."""
        out = ffi.new("kvs_kv_layer *")
        out.n_kv_heads = self.n_kv_heads
        out.head_dim_k = self.head_dim_k
        out.head_dim_v = self.head_dim_v
        out.flags = int(self.flags)
        out.type_k = self.type_k
        out.type_v = self.type_v
        return out

    def head_dim(self, side: Side) -> int:
        """Values per head and token of one side."""
        return self.head_dim_k if side is Side.K else self.head_dim_v

    def type_of(self, side: Side) -> int:
        """Type number of one side."""
        return self.type_k if side is Side.K else self.type_v


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """Where everything lies in a record; planes in the order of ``Plane``, a rotation of 0 means none."""

    version: int
    record_bytes: int
    head_bytes: int
    plane_offset_bytes: tuple[int, ...]
    plane_row_bytes: tuple[int, ...]
    rotation_k: int
    rotation_v: int


def record_layout(layer: KvLayer) -> RecordInfo:
    """Compute a layer's record. Raises ``Unsupported`` for a type that cannot hold the head size."""
    info = make_struct("kvs_record_info")
    status = lib.kvs_record_layout(layer.to_c(), info)
    if status < 0:
        raise error_from_status(status, f"no page record for {layer}")
    return RecordInfo(
        version=info.version,
        record_bytes=info.record_bytes,
        head_bytes=info.head_bytes,
        plane_offset_bytes=tuple(info.plane_offset_bytes),
        plane_row_bytes=tuple(info.plane_row_bytes),
        rotation_k=info.rotation_k,
        rotation_v=info.rotation_v,
    )


def block_geometry(kind: int) -> tuple[int, int]:
    """``(values, bytes)`` of a block of a type as files hold it."""
    values = ffi.new("uint32_t *")
    n_bytes = ffi.new("uint32_t *")
    status = lib.kvs_type_block(kind, values, n_bytes)
    if status < 0:
        raise error_from_status(status, f"type {kind} has no blocks")
    return values[0], n_bytes[0]


def _require_bytes(name: str, array: Bytes, n_bytes: int) -> None:
    """C trusts these lengths, so a shorter or scattered array must not pass."""
    if array.dtype != np.uint8 or not array.flags.c_contiguous or array.nbytes != n_bytes:
        raise InvalidArgument(
            f"{name} must be {n_bytes} contiguous bytes, got {array.dtype}{list(array.shape)}"
        )


def _float_rows(name: str, array: Floats, cols: int) -> Floats:
    if array.dtype != np.float32 or array.ndim != 2 or array.shape[1] != cols:
        raise InvalidArgument(f"{name} must be float32 [rows, {cols}], got {array.dtype}{list(array.shape)}")
    return np.ascontiguousarray(array)


def encode_rows(device: Device, layer: KvLayer, record: Bytes, first_row: int, k: Floats, v: Floats) -> None:
    """Encode rows of all heads into ``record`` from ``first_row`` on.

    Shapes: k ``[rows, n_kv_heads * head_dim_k]``, v ``[rows, n_kv_heads * head_dim_v]``, not rotated here.
    """
    _require_bytes("record", record, record_layout(layer).record_bytes)
    keys = _float_rows("k", k, layer.n_kv_heads * layer.head_dim_k)
    values = _float_rows("v", v, layer.n_kv_heads * layer.head_dim_v)
    if len(keys) != len(values):
        raise InvalidArgument(f"{len(keys)} rows of k and {len(values)} of v")
    status = lib.kvs_record_encode_rows(
        device.ptr,
        layer.to_c(),
        ffi.from_buffer("uint8_t[]", record, require_writable=True),
        first_row,
        len(keys),
        ffi.from_buffer("float[]", keys),
        ffi.from_buffer("float[]", values),
    )
    check(status, device.ptr)


def decode_rows(
    device: Device, layer: KvLayer, record: Bytes, first_row: int, n_rows: int
) -> tuple[Floats, Floats]:
    """The stored codes of rows as float values, k and v."""
    _require_bytes("record", record, record_layout(layer).record_bytes)
    k = np.empty((n_rows, layer.n_kv_heads * layer.head_dim_k), np.float32)
    v = np.empty((n_rows, layer.n_kv_heads * layer.head_dim_v), np.float32)
    status = lib.kvs_record_decode_rows(
        device.ptr,
        layer.to_c(),
        ffi.from_buffer("uint8_t[]", record),
        first_row,
        n_rows,
        ffi.from_buffer("float[]", k),
        ffi.from_buffer("float[]", v),
    )
    check(status, device.ptr)
    return k, v


def _row_block_bytes(layer: KvLayer, side: Side) -> int:
    values, n_bytes = block_geometry(layer.type_of(side))
    return layer.head_dim(side) // values * n_bytes


def unpack_rows(layer: KvLayer, record: Bytes, head: int, side: Side, first_row: int, n_rows: int) -> Bytes:
    """Rows of one head and side as the blocks that files hold. Shape: ``[n_rows, bytes per row]``."""
    _require_bytes("record", record, record_layout(layer).record_bytes)
    blocks = np.empty((n_rows, _row_block_bytes(layer, side)), np.uint8)
    status = lib.kvs_record_unpack_rows(
        layer.to_c(),
        ffi.from_buffer("uint8_t[]", record),
        head,
        int(side),
        first_row,
        n_rows,
        ffi.from_buffer("uint8_t[]", blocks),
    )
    if status < 0:
        raise error_from_status(
            status, f"rows {first_row} to {first_row + n_rows} of head {head} cannot be unpacked"
        )
    return blocks


def pack_rows(layer: KvLayer, record: Bytes, head: int, side: Side, first_row: int, blocks: Bytes) -> None:
    """The inverse of ``unpack_rows``."""
    _require_bytes("record", record, record_layout(layer).record_bytes)
    n_rows = len(blocks)
    _require_bytes("blocks", blocks, n_rows * _row_block_bytes(layer, side))
    status = lib.kvs_record_pack_rows(
        layer.to_c(),
        ffi.from_buffer("uint8_t[]", record, require_writable=True),
        head,
        int(side),
        first_row,
        n_rows,
        ffi.from_buffer("uint8_t[]", blocks),
    )
    if status < 0:
        raise error_from_status(
            status, f"rows {first_row} to {first_row + n_rows} of head {head} cannot be packed"
        )


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """State of a cache: bytes, live page columns (shared ones once), sequences."""

    n_layers: int
    max_record_bytes: int
    column_bytes: int
    n_pages: int
    n_sequences: int


@dataclass(frozen=True, slots=True)
class SeqInfo:
    """State of a sequence, in tokens, pages and bytes."""

    ctx_tokens: int
    committed_tokens: int
    appended_tokens: int
    generation: int
    n_pages: int
    n_shared_pages: int
    reserved_host_bytes: int
    seq_id: int
    n_rewrites: int


@dataclass(frozen=True, slots=True)
class PageInfo:
    """One page column, as one sequence and layer see it."""

    page_id: int
    n_holders: int
    published_rows: int
    host_offset_bytes: int
    extent_id: int


class Cache(Handle):
    """The history of sequences whose layers have the given geometry.

    Raises ``Unsupported`` naming the layer whose type or head size has no record.
    """

    __slots__ = ("_device", "layers", "records")

    def __init__(self, device: Device, layers: Sequence[KvLayer]) -> None:
        array = ffi.new("kvs_kv_layer[]", len(layers))
        for i, layer in enumerate(layers):
            array[i] = layer.to_c()[0]
        cell = new_cell("cache")
        check(lib.kvs_cache_create(device.ptr, array, len(layers), cell), device.ptr)
        self._device = device.ptr
        self.layers = tuple(layers)
        self.records = tuple(map(record_layout, layers))
        super().__init__(cell)

    @property
    def device_ptr(self) -> Any:
        """The ``kvs_device *`` that keeps the texts of failures, closed or not."""
        return self._device

    @property
    def info(self) -> CacheInfo:
        info = make_struct("kvs_cache_info")
        check(lib.kvs_cache_get_info(self.ptr, info), self._device)
        return CacheInfo(
            n_layers=info.n_layers,
            max_record_bytes=info.max_record_bytes,
            column_bytes=info.column_bytes,
            n_pages=info.n_pages,
            n_sequences=info.n_sequences,
        )

    def sequence(self, ctx_tokens: int) -> Seq:
        """An empty sequence with address space for ``ctx_tokens``."""
        cell = new_cell("seq")
        check(lib.kvs_seq_create(self.ptr, ctx_tokens, cell), self._device)
        return Seq(self, cell)

    def check_integrity(self) -> None:
        """Recompute every invariant. Raises ``IntegrityError``."""
        check(lib.kvs_cache_check_integrity(self.ptr), self._device)


class Seq(Handle):
    """One sequence: a list of pages, committed tokens, and rows that are open until ``commit``.

    Made by ``Cache.sequence`` and ``fork``.
    """

    __slots__ = ("_cache", "_device", "_now")

    def __init__(self, cache: Cache, cell: Any) -> None:
        self._cache = cache
        self._device = cache.device_ptr
        self._now = make_struct("kvs_seq_info")  # for what is read several times a token: making one takes longer
        super().__init__(cell)

    def _check(self, status: int) -> None:
        check(status, self._device)

    @property
    def cache(self) -> Cache:
        """The cache whose layers this sequence has."""
        return self._cache

    @property
    def n_tokens(self) -> int:
        """Committed tokens: what ``info`` says of them, at less cost."""
        status = lib.kvs_seq_get_info(self.known or self.ptr, self._now)
        if status < 0:
            self._check(status)
        n_tokens: int = self._now.committed_tokens
        return n_tokens

    @property
    def info(self) -> SeqInfo:
        info = make_struct("kvs_seq_info")
        self._check(lib.kvs_seq_get_info(self.ptr, info))
        return SeqInfo(
            ctx_tokens=info.ctx_tokens,
            committed_tokens=info.committed_tokens,
            appended_tokens=info.appended_tokens,
            generation=info.generation,
            n_pages=info.n_pages,
            n_shared_pages=info.n_shared_pages,
            reserved_host_bytes=info.reserved_host_bytes,
            seq_id=info.seq_id,
            n_rewrites=info.n_rewrites,
        )

    def fork(self) -> Self:
        """A sequence with the same committed tokens; pages are shared. Raises ``Busy`` with open rows."""
        cell = new_cell("seq")
        self._check(lib.kvs_seq_fork(self.ptr, cell))
        return type(self)(self._cache, cell)

    def append(self, n_tokens: int) -> None:
        """Open rows at the end. Raises ``ContextFull`` with rows needed and left."""
        self._check(lib.kvs_seq_append(self.ptr, n_tokens))

    def commit(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` open rows, drop the others."""
        self._check(lib.kvs_seq_commit(self.ptr, n_tokens))

    def truncate(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` tokens. What a pager knows is truncated through the pager."""
        self._check(lib.kvs_seq_truncate(self.ptr, n_tokens))

    def page(self, layer: int, page: int) -> PageInfo:
        """One page. Raises ``NotFound`` behind the last."""
        info = make_struct("kvs_page_info")
        self._check(lib.kvs_seq_get_page(self.ptr, layer, page, info))
        return PageInfo(
            page_id=info.page_id,
            n_holders=info.n_holders,
            published_rows=info.published_rows,
            host_offset_bytes=info.host_offset_bytes,
            extent_id=info.extent_id,
        )

    def _record_bytes(self, layer: int) -> int:
        if not 0 <= layer < len(self._cache.records):
            raise InvalidArgument(f"layer {layer} of {len(self._cache.records)}")
        return self._cache.records[layer].record_bytes

    def read_page(self, layer: int, page: int) -> Bytes:
        """A whole record out of host history. Raises ``NotFound`` when none of its rows is published."""
        record = np.empty(self._record_bytes(layer), np.uint8)
        self._check(lib.kvs_seq_read_page_wait(self.ptr, layer, page, ffi.from_buffer("uint8_t[]", record)))
        return record

    def write_page(self, layer: int, page: int, record: Bytes, rows: int) -> None:
        """Load a saved record; its column counts as published when every layer was written."""
        _require_bytes("record", record, self._record_bytes(layer))
        data = ffi.from_buffer("uint8_t[]", record)
        self._check(lib.kvs_seq_write_page_wait(self.ptr, layer, page, data, rows))
