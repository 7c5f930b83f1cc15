"""Kernels of operations on rows: record bytes against the file formats and the host's encoder, numbers against float64.

Outputs begin as 0xff, so that what nobody writes shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pykvstream.gguf import GgmlType
from tests.gpu.attend_case import (
    KV_TYPES,
    PAGE,
    PARAMS,
    Engine,
    Floats,
    Layer,
    T,
    poison,
    same_bits,
    scattered,
    step_words,
)
from tests.gpu.kernel_engine import Array

MakeRows = Callable[[np.random.Generator, tuple[int, int]], Floats]


@pytest.fixture(params=["host", "cuda"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "host":
        yield request.getfixturevalue("host")
        return
    cuda = request.getfixturevalue("device")
    yield cuda
    cuda.release()


def ordinary(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    scale = np.exp(rng.normal(0, 4, (shape[0], 1)))
    return np.asarray(rng.standard_normal(shape) * scale, np.float32)


def tied(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Multiples of one step: quotients by the scale fall on and half way between codes."""
    levels = rng.choice((3, 7, 8, 15, 16, 31, 127, 254), (shape[0], 1))
    step = rng.choice((1.0, 0.5, 1.25, 1 / 3, 2.0**-20, 2.0**-115, 2.0**25), (shape[0], 1))
    values = rng.integers(-levels, levels + 1, shape) * step
    values[:, ::32] = levels * step
    values[:, 7::32] = -levels * step
    return np.asarray(values, np.float32)


def few(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    palette = np.array([0.0, 1.0, -1.0, 1e-8, -1e-30, 1e8, -1e8, 65504.0, -65520.0, 0.5, 1.5], np.float32)
    rows = np.stack([rng.choice(palette[rng.integers(0, len(palette), 3)], shape[1]) for _ in range(shape[0])])
    rows[0] = 0.0
    return np.asarray(rows, np.float32)


def broken(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Values that are no numbers among ordinary ones, and blocks of nothing else."""
    rows = rng.standard_normal(shape).astype(np.float32)
    bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F812345, 0x80000000], np.uint32)
    hit = rng.random(shape) < 0.02
    rows.view(np.uint32)[hit] = rng.choice(bits, int(hit.sum()))
    rows.view(np.uint32)[0] = 0x7FC00000
    rows.view(np.uint32)[1, :32] = 0xFF800000
    return rows


def write_on_engine(
    engine: Engine, layer: Layer, first_token: int, k: Floats, v: Floats, *, is_recorded: bool = False
) -> list[Array]:
    """All records that the rows touch, poisoned before."""
    n_pages = (first_token + len(k) - 1) // PAGE + 1
    memory, offsets = scattered(np.random.default_rng(first_token), n_pages, layer.record_bytes)
    base = engine.upload(memory)
    params = PARAMS.make(
        "kvs_kv_write_params",
        k=engine.upload(k),
        v=engine.upload(v),
        page_table=engine.upload(np.array([base + offset for offset in offsets], np.uint64)),
        first_token=1 << 40 if is_recorded else first_token,
        step=step_words(engine, first_token) if is_recorded else 0,
        k_stride=k.shape[1],
        v_stride=v.shape[1],
        n_rows=len(k),
        n_kv_heads=layer.n_kv_heads,
    )
    engine.run("kv_write", "kv_write", layer.macros, (len(k), layer.n_kv_heads, 1), 256, params)
    written = engine.download(base, memory.shape, np.uint8)
    untouched = np.ones(len(written), bool)
    for offset in offsets:
        untouched[offset : offset + layer.record_bytes] = False
    assert (written[untouched] == 0xFF).all(), "bytes outside the pages were written"
    return [written[offset : offset + layer.record_bytes] for offset in offsets]


def expected_records(layer: Layer, first_token: int, k: Floats, v: Floats) -> list[Array]:
    """As the numpy encoders of the file formats have it."""
    n_pages = (first_token + len(k) - 1) // PAGE + 1
    records = [np.full(layer.record_bytes, 0xFF, np.uint8) for _ in range(n_pages)]
    for row in range(len(k)):
        page, at = divmod(first_token + row, PAGE)
        one_k = k[row : row + 1].reshape(1, layer.n_kv_heads, layer.dim_k)
        one_v = v[row : row + 1].reshape(1, layer.n_kv_heads, layer.dim_v)
        layer.write(records[page], at, one_k, one_v)
    return records


def layers_of(kind: GgmlType) -> list[Layer]:
    other = KV_TYPES[(KV_TYPES.index(kind) + 4) % len(KV_TYPES)]
    return [Layer(kind, other, 96, 64, 2), Layer(other, kind, 64, 256, 1)]


@pytest.mark.parametrize("rows", [ordinary, tied, few], ids=lambda rows: rows.__name__)
@pytest.mark.parametrize("kind", KV_TYPES, ids=lambda kind: kind.name)
def test_records_hold_the_bytes_of_the_file_formats(engine: Engine, kind: GgmlType, rows: MakeRows) -> None:
    rng = np.random.default_rng(kind.id)
    for layer in layers_of(kind):
        k = rows(rng, (20, layer.n_kv_heads * layer.dim_k))
        v = rows(rng, (20, layer.n_kv_heads * layer.dim_v))
        for is_recorded in (False, True):
            records = write_on_engine(engine, layer, 250, k, v, is_recorded=is_recorded)
            for record, expected in zip(records, expected_records(layer, 250, k, v), strict=True):
                assert np.array_equal(record, expected)


@pytest.mark.parametrize("kind", KV_TYPES, ids=lambda kind: kind.name)
def test_broken_rows_become_the_bytes_of_the_host(engine: Engine, kind: GgmlType) -> None:
    """NaN and infinite values: the file formats do not define them, the host's encoder does."""
    pytest.importorskip("pykvstream._ffi._native", reason="the native core is not built", exc_type=ImportError)
    from pykvstream.core.device import Device
    from pykvstream.core.kv import KvLayer, encode_rows

    rng = np.random.default_rng(kind.id)
    with Device(1) as cpu:
        for layer in layers_of(kind):
            k = broken(rng, (12, layer.n_kv_heads * layer.dim_k))
            v = broken(rng, (12, layer.n_kv_heads * layer.dim_v))
            (record,) = write_on_engine(engine, layer, 5, k, v)
            expected = np.full(layer.record_bytes, 0xFF, np.uint8)
            geometry = KvLayer(layer.n_kv_heads, layer.dim_k, layer.dim_v, layer.type_k.id, layer.type_v.id)
            encode_rows(cpu, geometry, expected, 5, k, v)
            assert np.array_equal(record, expected)


def rotated(values: Floats, block: int) -> Floats:
    """Butterflies at distance 1, 2, 4, ..., in float32."""
    x = values.reshape(-1, block).copy()
    distance = 1
    while distance < block:
        pairs = x.reshape(len(x), -1, 2, distance)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
        distance *= 2
    return (x * np.float32(1 / np.sqrt(block))).reshape(values.shape)


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024])
def test_rotation_has_the_bits_of_the_butterflies(engine: Engine, block: int) -> None:
    values = np.random.default_rng(block).standard_normal((11, block)).astype(np.float32)
    address = engine.upload(values)
    scale = float(np.float32(1 / np.sqrt(block)))
    params = PARAMS.make("kvs_hadamard_params", values=address, n_blocks=11, scale=scale)
    engine.run("hadamard", "hadamard", {"KVS_BLOCK": block}, (2, 1, 1), 256, params)
    assert same_bits(engine.download(address, values.shape, np.float32), rotated(values, block))


@pytest.mark.parametrize("is_recorded", [False, True], ids=["single", "recorded"])
@pytest.mark.parametrize("n_axes", [0, 1, 3], ids=["rows", "positions", "three axes"])
def test_rope_table_equals_float64_far_out(engine: Engine, n_axes: int, is_recorded: bool) -> None:
    rng = np.random.default_rng(n_axes)
    n_rows, n_rotary, base, factor, section = 7, 64, 1e6, 0.25, (11, 11)
    positions = rng.integers(0, 1 << 18, (max(n_axes, 1), n_rows)).astype(np.uint32)
    divisors = rng.uniform(0.5, 8, n_rotary // 2).astype(np.float32)
    first_token = 262_100
    table = poison(engine, n_rows * n_rotary)
    params = PARAMS.make(
        "kvs_rope_table_params",
        table=table,
        positions=0 if n_axes == 0 else engine.upload(positions),
        divisors=engine.upload(divisors),
        first_token=1 << 40 if is_recorded else first_token,
        step=step_words(engine, first_token) if is_recorded else 0,
        base=base,
        factor=factor,
        n_rows=n_rows,
        n_rotary=n_rotary,
        n_axes=max(n_axes, 1),
        section=(0, *section),
    )
    engine.run("rope_table", "rope_table", {}, (n_rows, 1, 1), 64, params)
    pair = np.arange(n_rotary // 2)
    axis = np.where((n_axes == 3) & (pair % 3 != 0) & (pair < 33), pair % 3, 0)
    at = first_token + np.arange(n_rows)[:, None] if n_axes == 0 else positions[axis].T
    angles = at * (base ** (-2.0 * pair / n_rotary) / divisors.astype(np.float64) * factor)
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    found = engine.download(table, (n_rows, n_rotary // 2, 2), np.float32)
    # Half a unit in the last place of float32 below 1, and the angle's own float64 rounding.
    np.testing.assert_allclose(found, expected, rtol=0, atol=6e-8)


@pytest.mark.parametrize("is_halves", [0, 1], ids=["pairs", "halves"])
def test_rope_turns_the_first_values_of_each_head(engine: Engine, is_halves: int) -> None:
    rng = np.random.default_rng(is_halves)
    n_rows, n_heads, width, n_rotary = 5, 3, 64, 48
    values = rng.standard_normal((n_rows, n_heads, width)).astype(np.float32)
    angles = rng.uniform(-4, 4, (n_rows, 1, n_rotary // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    address = engine.upload(values)
    params = PARAMS.make(
        "kvs_rope_params",
        values=address,
        table=engine.upload(table),
        n_rows=n_rows,
        n_heads=n_heads,
        head_values=width,
        n_rotary=n_rotary,
        is_halves=is_halves,
    )
    engine.run("rope", "rope", {}, (n_rows, 1, 1), 256, params)
    expected = values.astype(np.float64)
    first = np.arange(n_rotary // 2) if is_halves else np.arange(0, n_rotary, 2)
    second = first + n_rotary // 2 if is_halves else first + 1
    a, b = expected[..., first], expected[..., second]
    c, s = table[..., 0].astype(np.float64), table[..., 1].astype(np.float64)
    expected[..., first], expected[..., second] = a * c - b * s, a * s + b * c
    found = engine.download(address, values.shape, np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert same_bits(found[..., n_rotary:], values[..., n_rotary:])


def norm_on_engine(engine: Engine, x: Floats, weight: Floats | None) -> Floats:
    group = x.shape[-1]
    out = poison(engine, x.size)
    params = PARAMS.make(
        "kvs_norm_params",
        x=engine.upload(x),
        out=out,
        weight=0 if weight is None else engine.upload(weight),
        n_groups=x.size // group,
        group=group,
        team=32 if group <= 512 else 256,
        eps=1e-6,
    )
    per_block = 256 // (32 if group <= 512 else 256)
    engine.run("norm", "rms_norm", {}, (-(-x.size // group // per_block), 1, 1), 256, params)
    return engine.download(out, x.shape, np.float32)


@pytest.mark.parametrize("group", [64, 96, 256, 576, 5120])
def test_norm_equals_float64_and_rows_do_not_touch(engine: Engine, group: int) -> None:
    rng = np.random.default_rng(group)
    x = rng.standard_normal((13, group)).astype(np.float32)
    weight = rng.uniform(0.5, 2, group).astype(np.float32)
    found = norm_on_engine(engine, x, weight)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + np.float64(np.float32(1e-6))) * weight
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)
    for row in (0, 5, 12):
        assert same_bits(norm_on_engine(engine, x[row : row + 1], weight), found[row : row + 1])
    np.testing.assert_allclose(norm_on_engine(engine, x, None), expected / weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_one_gate", [0, 1], ids=["gates", "one gate"])
@pytest.mark.parametrize("is_sigmoid", [0, 1], ids=["silu", "sigmoid"])
def test_glu_equals_float64(engine: Engine, is_sigmoid: int, is_one_gate: int) -> None:
    rng = np.random.default_rng(is_sigmoid)
    gate = (rng.standard_normal((6, 1 if is_one_gate else 77)) * 20).astype(np.float32)
    up = rng.standard_normal((6, 77)).astype(np.float32)
    out = poison(engine, up.size)
    params = PARAMS.make(
        "kvs_glu_params",
        gate=engine.upload(gate),
        up=engine.upload(up),
        out=out,
        n_values=up.size,
        cols=77,
        is_sigmoid=is_sigmoid,
        is_one_gate=is_one_gate,
    )
    engine.run("glu", "glu", {}, (2, 1, 1), 256, params)
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    expected = (sigmoid if is_sigmoid else gate * sigmoid) * up
    np.testing.assert_allclose(engine.download(out, up.shape, np.float32), expected, rtol=5e-7, atol=1e-30)


@pytest.mark.parametrize("case", [(256, 256, 1, 1), (96, 32, 0, 1), (64, 0, 1, 1), (64, 64, 0, 0)])
@pytest.mark.parametrize("heads", [(3,), (4, 2), (3, 1, 2)], ids=["alone", "with keys", "with keys and values"])
def test_turning_has_the_bits_of_its_steps(
    engine: Engine, case: tuple[int, int, int, int], heads: tuple[int, ...]
) -> None:
    """Norm, rope and Walsh-Hadamard of up to three parts in one kernel, and in one each."""
    width, block, is_halves, has_norm = case
    if len(heads) == 3 and block == 0:
        heads = heads[:2]  # values are never rotated then
    rng = np.random.default_rng(width + block)
    n_rows, n_rotary = 3, width // 4 * 2
    parts = [rng.standard_normal((n_rows, n, width)).astype(np.float32) for n in heads]
    weights = [rng.standard_normal(width).astype(np.float32) for _ in heads]
    angles = rng.uniform(-4, 4, (n_rows, n_rotary // 2))
    table = engine.upload(np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))
    scale = 1.0 if block == 0 else float(np.float32(1 / np.sqrt(block)))
    turned = [engine.upload(x) for x in parts]
    params = PARAMS.make(
        "kvs_turn_params", table=table, n_rows=n_rows, n_rotary=n_rotary, is_halves=is_halves, eps=1e-6, scale=scale
    )
    for i, n_heads in enumerate(heads):
        part = params.parts[i]
        part.values, part.n_heads, part.is_rotated = turned[i], n_heads, int(i < 2)
        part.weight = engine.upload(weights[i]) if has_norm and i < 2 else 0
    grid = (-(-n_rows * sum(heads) // 8), 1, 1)
    engine.run("turn", "turn", {"KVS_HEAD": width, "KVS_BLOCK": block}, grid, 256, params)
    for i, x in enumerate(parts):
        steps = engine.upload(norm_on_engine(engine, x, weights[i]) if has_norm and i < 2 else x)
        if i < 2:
            params = PARAMS.make(
                "kvs_rope_params", values=steps, table=table, n_rows=n_rows, n_heads=heads[i], head_values=width,
                n_rotary=n_rotary, is_halves=is_halves,
            )  # fmt: skip
            engine.run("rope", "rope", {}, (n_rows, 1, 1), 256, params)
        if block:
            n_blocks = x.size // block
            params = PARAMS.make("kvs_hadamard_params", values=steps, n_blocks=n_blocks, scale=scale)
            engine.run("hadamard", "hadamard", {"KVS_BLOCK": block}, (-(-n_blocks // 8), 1, 1), 256, params)
        assert same_bits(engine.download(turned[i], x.shape, np.float32), engine.download(steps, x.shape, np.float32))


def test_add_and_gather_move_rows(engine: Engine) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((9, 300)).astype(np.float32) for _ in range(2))
    total = engine.upload(a)
    params = PARAMS.make("kvs_glu_params", up=engine.upload(b), out=total, n_values=a.size)
    engine.run("add", "add", {}, (11, 1, 1), 256, params)
    assert same_bits(engine.download(total, a.shape, np.float32), a + b)
    rows = np.array([0, 3, 8], np.uint32)
    out = poison(engine, 3 * 300)
    fields = {"in": engine.upload(a), "out": out, "rows": engine.upload(rows), "n_rows": 3, "cols": 300}
    params = PARAMS.make("kvs_gather_params", **fields)
    engine.run("gather", "gather", {}, (3, 2, 1), 256, params)
    assert same_bits(engine.download(out, (3, 300), np.float32), a[rows])


def test_every_cache_type_is_tried() -> None:
    assert T.IQ4_NL in KV_TYPES and len(KV_TYPES) == 9
