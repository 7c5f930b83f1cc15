"""Span plans: where the pages of one layer lie for one pass, in logical order.

Source: ``include/kvstream/span.h``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvstream._ffi import ffi, lib
from pykvstream.core.arena import Lease
from pykvstream.core.device import Device
from pykvstream.core.handle import Handle, new_cell
from pykvstream.core.kv import Floats, KvLayer
from pykvstream.core.status import check, make_struct
from pykvstream.errors import InvalidArgument


class Executor(enum.IntEnum):
    """Who attends to a span."""

    DEVICE = lib.KVS_EXECUTOR_DEVICE
    HOST = lib.KVS_EXECUTOR_HOST


@dataclass(frozen=True, slots=True)
class Span:
    """A run of pages at equal distances in one leased region."""

    token_begin: int
    n_tokens: int
    lease: Lease
    offset_bytes: int
    stride_bytes: int
    executor: int = Executor.DEVICE


@dataclass(frozen=True, slots=True)
class SpanPlanInfo:
    """What a plan covers; ``live_bytes`` counts whole pages."""

    n_spans: int
    active_tokens: int
    n_pages: int
    live_bytes: int
    n_query_rows: int
    n_claims: int


def _spans(spans: Sequence[Span]) -> Any:
    array = ffi.new("kvs_span[]", len(spans))
    for slot, span in zip(array, spans, strict=True):
        slot.token_begin = span.token_begin
        slot.n_tokens = span.n_tokens
        slot.lease = span.lease.ptr
        slot.offset_bytes = span.offset_bytes
        slot.stride_bytes = span.stride_bytes
        slot.executor = int(span.executor)
    return array


class SpanPlan(Handle):
    """A frozen exact partition of ``[0, active_tokens)``; the last ``n_query_rows`` of them ask.

    Keeps the leases of its spans until it is closed. Raises errors that name the span.
    """

    __slots__ = ("_device", "_layer")

    def __init__(
        self, device: Device, layer: KvLayer, spans: Sequence[Span], active_tokens: int, n_query_rows: int
    ) -> None:
        array = _spans(spans)
        c_layer = layer.to_c()
        desc = make_struct(
            "kvs_span_desc",
            n_spans=len(spans),
            layer=c_layer,
            spans=array,
            active_tokens=active_tokens,
            n_query_rows=n_query_rows,
        )
        cell = new_cell("span_plan")
        check(lib.kvs_span_plan_make(device.ptr, desc, cell), device.ptr)
        self._device = device.ptr
        self._layer = layer
        super().__init__(cell)

    @classmethod
    def of(cls, device: Device, layer: KvLayer, cell: Any) -> SpanPlan:
        """A plan that the core has put into a cell of its kind."""
        plan = cls.__new__(cls)
        plan._device = device.ptr
        plan._layer = layer
        Handle.__init__(plan, cell)
        return plan

    @property
    def info(self) -> SpanPlanInfo:
        info = make_struct("kvs_span_plan_info")
        check(lib.kvs_span_plan_get_info(self.ptr, info), self._device)
        return SpanPlanInfo(
            n_spans=info.n_spans,
            active_tokens=info.active_tokens,
            n_pages=info.n_pages,
            live_bytes=info.live_bytes,
            n_query_rows=info.n_query_rows,
            n_claims=info.n_claims,
        )

    def page_table(self) -> NDArray[np.uint64]:
        """Device address of each page, in logical order."""
        table = np.empty(self.info.n_pages, np.uint64)
        status = lib.kvs_span_plan_page_table(self.ptr, ffi.from_buffer("uint64_t[]", table), len(table))
        check(status, self._device)
        return table

    def attend(self, q: Floats, n_query_heads: int, scale: float) -> Floats:
        """Causal attention of the plan's query rows.

        Shapes: q ``[n_query_rows, n_query_heads * head_dim_k]``, result ``[.., n_query_heads * head_dim_v]``.
        """
        n_rows = self.info.n_query_rows
        if q.dtype != np.float32 or q.shape != (n_rows, n_query_heads * self._layer.head_dim_k):
            raise InvalidArgument(
                f"q must be float32 [{n_rows}, {n_query_heads * self._layer.head_dim_k}],"
                f" got {q.dtype}{list(q.shape)}"
            )
        queries = np.ascontiguousarray(q)
        out = np.empty((n_rows, n_query_heads * self._layer.head_dim_v), np.float32)
        desc = make_struct(
            "kvs_attend_desc",
            n_query_heads=n_query_heads,
            plan=self.ptr,
            q=ffi.from_buffer("float[]", queries),
            out=ffi.from_buffer("float[]", out),
            scale=scale,
        )
        check(lib.kvs_attend_run(self._device, desc), self._device)
        return out
