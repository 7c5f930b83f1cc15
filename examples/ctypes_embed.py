"""kvstream from Python with ctypes alone: what ``embed.c`` does, without the package and without a compiler.

    python examples/ctypes_embed.py build/prefix/lib/.../libkvstream.so.0

Five pages of one layer: three resident, two in host history that come through a ring. The attention of one
row is compared with a plain loop over what the codes mean; then everything is released in the wrong order.
"""

from __future__ import annotations

import ctypes as c
import math
import random
import sys
from collections.abc import Sequence

PAGE_TOKENS = 256
HEADS, HEAD_DIM = 1, 64
RESIDENT, STREAMED, TAIL_TOKENS = 2, 2, 77
N_PAGES = RESIDENT + STREAMED + 1
N_TOKENS = (N_PAGES - 1) * PAGE_TOKENS + TAIL_TOKENS
Q8_0, Q4_0 = 8, 2
OK, ECLOSED = 0, -7
POOL, RING = 1, 2
u32, u64 = c.c_uint32, c.c_uint64


class Layer(c.Structure):
    _fields_ = [(n, u32) for n in ("n_kv_heads", "head_dim_k", "head_dim_v", "flags")] + [
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
    ]


class Sized(c.Structure):
    """A struct that begins with its own size, which tells the library the caller's version of it."""

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=c.sizeof(self), **fields)


class DeviceDesc(Sized):
    _fields_ = [(n, u32) for n in ("struct_size", "flags", "backend", "n_threads")] + [
        ("schedule_seed", u64),
        ("isa", u32),
        ("ordinal", u32),
        ("failure", c.c_char_p),
        ("failure_bytes", u64),
        ("arch", u32),
        ("reserved", u32),
        ("wait_limit_ns", u64),
    ]


class RecordInfo(Sized):
    _fields_ = [
        ("struct_size", u32),
        ("version", u32),
        ("record_bytes", u64),
        ("head_bytes", u64),
        ("plane_offset_bytes", u64 * 6),
        ("plane_row_bytes", u32 * 6),
        ("rotation_k", u32),
        ("rotation_v", u32),
    ]


class Region(Sized):
    _fields_ = [("struct_size", u32), ("flags", u32)] + [
        (n, u64) for n in ("id", "offset_bytes", "size_bytes", "alignment_bytes")
    ]


class LeaseInfo(Sized):
    _fields_ = [("struct_size", u32), ("is_draining", u32)] + [
        (n, u64) for n in ("region_id", "epoch", "offset_bytes", "size_bytes", "address")
    ]


class RingDesc(Sized):
    _fields_ = [
        ("struct_size", u32),
        ("n_slots", u32),
        ("lease", c.c_void_p),
        ("offset_bytes", u64),
        ("slot_bytes", u64),
        ("run_limit_slots", u32),
        ("reserved", u32),
    ]


class Demand(c.Structure):
    _fields_ = [
        ("host", c.c_void_p),
        ("host_offset_bytes", u64),
        ("record_bytes", u64),
        ("n_pages", u32),
        ("layer", u32),
    ]


class Span(c.Structure):
    _fields_ = [
        ("token_begin", u64),
        ("n_tokens", u64),
        ("lease", c.c_void_p),
        ("offset_bytes", u64),
        ("stride_bytes", u64),
        ("executor", u32),
        ("reserved", u32),
    ]


class SpanDesc(Sized):
    _fields_ = [
        ("struct_size", u32),
        ("n_spans", u32),
        ("layer", c.POINTER(Layer)),
        ("spans", c.POINTER(Span)),
        ("active_tokens", u64),
        ("n_query_rows", u32),
        ("reserved", u32),
    ]


class AttendDesc(Sized):
    _fields_ = [
        ("struct_size", u32),
        ("n_query_heads", u32),
        ("plan", c.c_void_p),
        ("q", c.POINTER(c.c_float)),
        ("out", c.POINTER(c.c_float)),
        ("scale", c.c_float),
        ("reserved", u32),
    ]


class Library:
    """The functions of the shared library; a failure becomes an exception with the device's text."""

    def __init__(self, path: str) -> None:
        self._lib = c.CDLL(path)
        self._lib.kvs_status_name.restype = c.c_char_p
        self.device: c.c_void_p | None = None

    def __call__(self, name: str, *arguments: object) -> None:
        status = self.status(name, *arguments)
        if status != OK:
            text = c.create_string_buffer(512)
            if self.device is not None:
                self._lib.kvs_device_last_error(self.device, text, c.c_size_t(len(text)))
            raise RuntimeError(f"{name}: {self.name(status)}: {text.value.decode()}")

    def status(self, name: str, *arguments: object) -> int:
        return int(getattr(self._lib, f"kvs_{name}")(*arguments))

    def make(self, name: str, *arguments: object) -> c.c_void_p:
        """Call a constructor, whose last argument receives the handle."""
        handle = c.c_void_p()
        self(name, *arguments, c.byref(handle))
        return handle

    def release(self, kind: str, handle: c.c_void_p) -> None:
        function = getattr(self._lib, f"kvs_{kind}_release")
        function.restype = None
        function(handle)

    def name(self, status: int) -> str:
        return str(self._lib.kvs_status_name(status).decode())


def plain_attention(q: Sequence[float], history: History, scale: float) -> list[float]:
    """One row over all tokens, by the book."""
    rows = range(0, N_TOKENS * HEAD_DIM, HEAD_DIM)
    dots = (sum(a * b for a, b in zip(q, history.keys[at : at + HEAD_DIM], strict=True)) for at in rows)
    weights = [math.exp(scale * dot) for dot in dots]
    total = sum(weights)
    return [
        sum(w * history.values[at + i] for w, at in zip(weights, rows, strict=True)) / total
        for i in range(HEAD_DIM)
    ]


def lay_out(kvs: Library, arena: c.c_void_p, page_bytes: int) -> tuple[c.c_void_p, c.c_void_p]:
    """Divide the arena into a pool and a ring; returns a lease on each."""
    kvs("arena_begin", arena, u32(0))
    for region, pages in ((POOL, RESIDENT + 1), (RING, STREAMED)):
        kvs("arena_reserve", arena, c.byref(Region(id=region, size_bytes=pages * page_bytes)))
    kvs("arena_commit", arena)
    return kvs.make("arena_acquire", arena, u64(POOL)), kvs.make("arena_acquire", arena, u64(RING))


def address_of(kvs: Library, lease: c.c_void_p) -> int:
    info = LeaseInfo()
    kvs("lease_get_info", lease, c.byref(info))
    return int(info.address)


class History:
    """Random pages: their codes in host memory and, but for the streamed ones, in the pool."""

    def __init__(self, kvs: Library, layer: Layer, page_bytes: int, pool_address: int) -> None:
        self.host = kvs.make("host_create", kvs.device, u64(N_PAGES * page_bytes))
        self.keys: list[float] = []
        self.values: list[float] = []
        for page in range(N_PAGES):
            codes = self._encode(kvs, layer, c.create_string_buffer(page_bytes))
            kvs("host_write_wait", self.host, u64(page * page_bytes), codes, u64(page_bytes))
            if not RESIDENT <= page < RESIDENT + STREAMED:
                c.memmove(pool_address + min(page, RESIDENT) * page_bytes, codes, page_bytes)

    def _encode(self, kvs: Library, layer: Layer, codes: c.Array[c.c_char]) -> c.Array[c.c_char]:
        """Fill one page; what its codes mean is what the check attends to."""
        k, v = floats(PAGE_TOKENS * HEAD_DIM), floats(PAGE_TOKENS * HEAD_DIM)
        rows = (kvs.device, c.byref(layer), codes, u32(0), u32(PAGE_TOKENS), k, v)
        kvs("record_encode_rows", *rows)
        kvs("record_decode_rows", *rows)
        self.keys += k
        self.values += v
        return codes


def floats(n: int) -> c.Array[c.c_float]:
    return (c.c_float * n)(*(random.uniform(-1, 1) for _ in range(n)))


def stream(kvs: Library, ring: c.c_void_p, host: c.c_void_p, page_bytes: int) -> int:
    """Bring the pages that are not resident; returns the device address of the first."""
    demand = Demand(host, RESIDENT * page_bytes, page_bytes, STREAMED, 0)
    first, address = u64(), u64()
    kvs("ring_submit", ring, c.byref(demand), u32(1), c.byref(first))
    kvs("ring_acquire_wait", ring, u64(first.value + STREAMED))
    kvs("ring_page_address", ring, first, c.byref(address))
    return address.value


def plan_of(spans: Sequence[tuple[int, int, c.c_void_p, int, int]], kvs: Library, layer: Layer) -> c.c_void_p:
    desc = SpanDesc(
        n_spans=len(spans),
        layer=c.pointer(layer),
        spans=(Span * len(spans))(*(Span(*span) for span in spans)),
        active_tokens=N_TOKENS,
        n_query_rows=1,
    )
    return kvs.make("span_plan_make", kvs.device, c.byref(desc))


def main(path: str) -> int:
    kvs = Library(path)
    kvs.device = device = kvs.make("device_create", c.byref(DeviceDesc(n_threads=1)))
    layer = Layer(HEADS, HEAD_DIM, HEAD_DIM, 0, Q8_0, Q4_0)
    record = RecordInfo()
    kvs("record_layout", c.byref(layer), c.byref(record))
    size = int(record.record_bytes)

    arena = kvs.make("arena_create", device, u64(8 * size), u64(64))
    pool, slots = lay_out(kvs, arena, size)
    history = History(kvs, layer, size, address_of(kvs, pool))
    ring_desc = RingDesc(n_slots=STREAMED, lease=slots, slot_bytes=size)
    ring = kvs.make("ring_create", device, c.byref(ring_desc))
    in_ring = stream(kvs, ring, history.host, size) - address_of(kvs, slots)
    spans = (
        (0, RESIDENT * PAGE_TOKENS, pool, 0, size),
        (RESIDENT * PAGE_TOKENS, STREAMED * PAGE_TOKENS, slots, in_ring, size),
        ((N_PAGES - 1) * PAGE_TOKENS, TAIL_TOKENS, pool, RESIDENT * size, size),
    )
    plan = plan_of(spans, kvs, layer)

    q, out, scale = floats(HEAD_DIM), (c.c_float * HEAD_DIM)(), HEAD_DIM**-0.5
    attend = AttendDesc(n_query_heads=HEADS, plan=plan, q=q, out=out, scale=scale)
    kvs("attend_run", device, c.byref(attend))
    worst = max(abs(a - b) for a, b in zip(out, plain_attention(list(q), history, scale), strict=True))
    print(f"{N_TOKENS} tokens, {STREAMED} of {N_PAGES} pages streamed: largest difference {worst:.1e}")

    kvs.release("arena", arena)
    refused = kvs.status("arena_acquire", arena, u64(POOL), c.byref(c.c_void_p()))
    print(f"after the arena's release a new lease gets {kvs.name(refused)}")
    kvs.release("device", device)
    kvs.device = None
    kinds = {"lease": (pool, slots), "host": (history.host,), "ring": (ring,), "span_plan": (plan,)}
    for kind, handles in kinds.items():
        for handle in handles:
            kvs.release(kind, handle)
    print("released everything in the wrong order: safe")
    return 0 if worst < 1e-5 and refused == ECLOSED else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: ctypes_embed.py LIBKVSTREAM")
    sys.exit(main(sys.argv[1]))
