"""Kernels of the weight side against float64, and a row against itself in other company.

Float64 references come from the numpy codecs of the file formats. Activations are quantized as kernels do it: what
is left is the order of float32 sums, whose error is bounded by the sum of magnitudes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from pykvstream.gguf import GgmlType
from pykvstream.gguf.codecs import DECODABLE, decode
from tests.gpu.kernel_engine import Engine
from tests.gpu.weight_rig import (
    STORE_ADD,
    SWIGLU,
    Doubles,
    Floats,
    Weight,
    WeightRig,
    quantized,
    seen_by,
    silu,
)

T = GgmlType
FLOAT_TYPES = (T.F32, T.F16, T.BF16)
TYPES = FLOAT_TYPES + tuple(sorted((kind for kind in DECODABLE if kind not in FLOAT_TYPES), key=lambda kind: kind.id))
ROW_COUNTS = (1, 2, 3, 5, 8, 17, 49, 64)
SMALL_BLOCK = 64 << 10
# Of the sum of magnitudes: float32 chains of some hundred terms.
SUM_TOLERANCE = 3e-6


@pytest.fixture(params=["host", "cuda"])
def rig(request: pytest.FixtureRequest, launches: ctypes.CDLL) -> Iterator[WeightRig]:
    if request.param == "host":
        yield WeightRig(request.getfixturevalue("host"), launches)
        return
    cuda = request.getfixturevalue("device")
    yield WeightRig(cuda, launches)
    cuda.release()


def is_small(engine: Engine) -> bool:
    """The host runs a kernel some ten thousand times slower."""
    return engine.name == "host"


def assert_near(out: Floats, weight: Weight, x: Doubles | Floats, scale: Doubles | float = 1.0) -> None:
    seen, values = seen_by(weight.kind, x), weight.values
    expected = seen @ values.T * scale
    # The minima of a type with an offset of its own cancel against its codes: magnitudes before that count.
    size = np.abs(seen) @ np.abs(values).T + np.abs(seen).sum(1, keepdims=True) * np.abs(values).max()
    assert (np.abs(out - expected) <= SUM_TOLERANCE * size * np.abs(scale) + 1e-30).all()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_embedded_rows_equal_the_file_decoder(rig: WeightRig, kind: GgmlType) -> None:
    table = rig.weight(kind, 512, 7, np.random.default_rng(kind.id), raw=True)
    tokens = [6, 0, 3, 3]
    out = rig.embed(table, tokens)
    expected = decode(kind, table.rows).reshape(7, 512)[tokens]
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_matmul_is_near_float64_and_rows_do_not_depend_on_their_company(rig: WeightRig, kind: GgmlType) -> None:
    rng = np.random.default_rng(kind.id)
    k, n = (256, 21) if is_small(rig.engine) else (2048 + 256, 200)
    k += kind.block_values if kind.block_values in (32, 64) else 0
    weight = rig.weight(kind, k, n, rng)
    counts = ROW_COUNTS if not is_small(rig.engine) else (1, 17) if kind in (T.Q4_0, T.Q6_K, T.IQ1_S) else (1, 3)
    x = rng.standard_normal((max(counts), k), np.float32)
    x[1] *= 1e4
    x[2, :40] = 0
    (widest,) = rig.matmul([weight], x)
    assert_near(widest, weight, x)
    for n_rows in counts:
        (out,) = rig.matmul([weight], x[:n_rows])
        assert out.tobytes() == widest[:n_rows].tobytes(), n_rows
    for row in range(0, len(x), 7):
        (alone,) = rig.matmul([weight], x[row : row + 1])
        assert alone.tobytes() == widest[row : row + 1].tobytes(), row


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q6_K, T.IQ4_NL, T.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [48, 128 * 81 + 16], ids=["apart", "whole"])
def test_matmul_of_many_rows_equals_single_ones(rig: WeightRig, kind: GgmlType, n: int) -> None:
    """With few outputs slices are taken apart, with many a block takes them all; a row alone takes one panel at a
    time, or two, of which the last has no second."""
    if is_small(rig.engine) and n > 48:
        pytest.skip("too many outputs for kernels on the host")
    rng = np.random.default_rng(5)
    k, n_rows = (512, 70) if is_small(rig.engine) else (1024, 300)
    weight = rig.weight(kind, k, n, rng)
    x = rng.standard_normal((n_rows, k), np.float32)
    (out,) = rig.matmul([weight], x)
    for row in (0, 63, 64, n_rows - 1):
        (alone,) = rig.matmul([weight], x[row : row + 1])
        assert alone.tobytes() == out[row : row + 1].tobytes(), row


@pytest.mark.parametrize("n_rows", [1, 3])
def test_blocks_that_take_turns_give_the_same_bits(rig: WeightRig, n_rows: int) -> None:
    """Warps change slices from turn to turn: on one multiprocessor a block has three turns, on 100 one."""
    rng = np.random.default_rng(47)
    parts = [rig.weight(T.Q4_0, 64 * 11, 16 * 5, rng), rig.weight(T.Q8_0, 64 * 11, 16 * 4, rng)]
    x = rng.standard_normal((n_rows, 64 * 11), np.float32)
    rig.set_multiprocessors(100)
    outs = rig.matmul(parts, x)
    (gated,) = rig.matmul(parts[1:] * 2, x, epilogue=SWIGLU)
    rig.set_multiprocessors(1)
    assert [out.tobytes() for out in rig.matmul(parts, x)] == [out.tobytes() for out in outs]
    assert rig.matmul(parts[1:] * 2, x, epilogue=SWIGLU)[0].tobytes() == gated.tobytes()


def test_many_rows_through_parts_and_swiglu_equal_single_ones(rig: WeightRig) -> None:
    rng = np.random.default_rng(37)
    k, n_rows = (256, 66) if is_small(rig.engine) else (1536, 700)
    parts = [rig.weight(T.Q4_K, k, 150, rng), rig.weight(T.Q5_1, k, 7, rng), rig.weight(T.IQ2_S, k, 33, rng)]
    parts.append(rig.weight(T.Q8_0, k, 21, rng))
    scales = np.array([0.25, -3.0], np.float32)
    pair = [rig.weight(T.Q6_K, k, 40, rng, scales), rig.weight(T.NVFP4, k, 40, rng)]
    x = rng.standard_normal((n_rows, k), np.float32)
    outs = rig.matmul(parts, x)
    (gated,) = rig.matmul(pair, x, epilogue=SWIGLU)
    for row in (0, 65, n_rows - 1):
        for out, alone in zip(outs, rig.matmul(parts, x[row : row + 1]), strict=True):
            assert alone.tobytes() == out[row : row + 1].tobytes(), row
        (alone,) = rig.matmul(pair, x[row : row + 1], epilogue=SWIGLU)
        assert alone.tobytes() == gated[row : row + 1].tobytes(), row


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16], ids=lambda kind: kind.name)
def test_float_matmul_takes_any_depth(rig: WeightRig, kind: GgmlType) -> None:
    rng = np.random.default_rng(7)
    for k in (1, 7, 37, 270):
        weight = rig.weight(kind, k, 9, rng)
        x = rng.standard_normal((3, k), np.float32)
        (out,) = rig.matmul([weight], x)
        assert_near(out, weight, x)


def test_parts_of_a_matmul_share_normed_rows(rig: WeightRig) -> None:
    rng = np.random.default_rng(11)
    k = 512
    weights = [rig.weight(T.Q4_K, k, 32, rng), rig.weight(T.F32, k, 5, rng), rig.weight(T.Q6_K, k, 19, rng)]
    x = rng.standard_normal((3, k), np.float32)
    norm = rng.standard_normal(k, np.float32)
    outs = rig.matmul(weights, x, norm=norm)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * norm
    for out, weight in zip(outs, weights, strict=True):
        # A value at a rounding edge of the codes may go to the other side: one code in one group.
        step = np.abs(normed).max() / 127 * np.abs(weight.values).max() * 2
        seen = seen_by(weight.kind, normed)
        size = np.abs(seen) @ np.abs(weight.values).T
        assert (np.abs(out - seen @ weight.values.T) <= SUM_TOLERANCE * 4 * size + step).all()


@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize(("group", "is_sigmoid"), [(64, False), (128, False), (0, True)])
def test_a_gated_input_has_the_bits_of_its_steps(
    rig: WeightRig, group: int, is_sigmoid: bool, is_prompt: bool
) -> None:
    rng = np.random.default_rng(41)
    k, n_rows = 512 + 768, 3
    weights = [rig.weight(T.Q4_K, k, 32, rng), rig.weight(T.F32, k, 5, rng)]
    x, gate = rng.standard_normal((2, n_rows, k), np.float32)
    norm = rng.standard_normal(group, np.float32) if group else None
    address, make, run = rig.put(x), rig.row_parameters.make, rig.engine.run
    if norm is not None:
        params = make(
            "kvs_norm_params", x=address, out=address, weight=rig.put(norm), n_groups=x.size // group, group=group,
            team=32, eps=1e-6,
        )  # fmt: skip
        run("norm", "rms_norm", {}, (-(-x.size // group // 8), 1, 1), 256, params)
    params = make(
        "kvs_glu_params", gate=rig.put(gate), up=address, out=address, n_values=x.size, cols=k,
        is_sigmoid=int(is_sigmoid),
    )  # fmt: skip
    run("glu", "glu", {}, (-(-x.size // 256), 1, 1), 256, params)
    stepwise = rig.matmul(weights, rig.engine.download(address, x.shape, np.float32), is_prompt=is_prompt)
    outs = rig.matmul(weights, x, norm=norm, gate=gate, is_sigmoid=is_sigmoid, is_prompt=is_prompt)
    for out, expected in zip(outs, stepwise, strict=True):
        assert out.tobytes() == expected.tobytes()


def test_scales_multiply_sums_and_outputs_are_added_to(rig: WeightRig) -> None:
    rng = np.random.default_rng(13)
    scales = np.array([0.3, -1.7, 1e-3], np.float32)
    for kind in (T.Q8_0, T.F16):
        weight = rig.weight(kind, 256, 42, rng, scales)
        x = rng.standard_normal((2, 256), np.float32)
        (plain,) = rig.matmul([weight], x)
        assert_near(plain, weight, x, np.repeat(scales, 14).astype(np.float64))
        residual = rng.standard_normal((2, 42), np.float32)
        (added,) = rig.matmul([weight], x, epilogue=STORE_ADD, residual=residual)
        assert added.tobytes() == (residual + plain).tobytes()


@pytest.mark.parametrize("kinds", [(T.Q4_0, T.Q4_0), (T.IQ4_XS, T.Q5_K), (T.F16, T.Q8_0), (T.BF16, T.BF16)])
def test_swiglu_of_two_weights(rig: WeightRig, kinds: tuple[GgmlType, GgmlType]) -> None:
    rng = np.random.default_rng(17)
    gate, up = (rig.weight(kind, 512, 40, rng) for kind in kinds)
    x = rng.standard_normal((9, 512), np.float32)
    (gated,), (upped,) = rig.matmul([gate], x), rig.matmul([up], x)
    (out,) = rig.matmul([gate, up], x, epilogue=SWIGLU)
    expected = silu(gated.astype(np.float64)) * upped
    assert np.allclose(out, expected, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("n_rows", [1, 8, 16])
def test_blocks_fit_into_little_shared_memory_with_the_same_bits(rig: WeightRig, n_rows: int) -> None:
    """A block of sm_75 has 64 KiB. Gate and up of Q6_K are the largest stages; of one row they take turns."""
    rng = np.random.default_rng(43)
    pair = [rig.weight(T.Q6_K, 2304, 40, rng), rig.weight(T.Q6_K, 2304, 40, rng)]
    x = rng.standard_normal((n_rows, 2304), np.float32)
    (expected,) = rig.matmul(pair, x, epilogue=SWIGLU)
    rig.set_shared_bytes(SMALL_BLOCK)
    n_before = len(rig.launched)
    (out,) = rig.matmul(pair, x, epilogue=SWIGLU)
    ((macros, shared),) = (each[1:] for each in rig.launched[n_before:] if each[0] == "matmul")
    assert shared <= SMALL_BLOCK and macros["KVS_ROWS"] == n_rows and macros["KVS_STAGES"] == (1 if n_rows == 16 else 2)
    assert out.tobytes() == expected.tobytes()


def test_a_value_that_is_no_number_reaches_every_output_of_its_row_and_no_other(rig: WeightRig) -> None:
    rng = np.random.default_rng(19)
    for kind in (T.Q4_0, T.Q4_1, T.Q3_K, T.MXFP4, T.F32):
        weight = rig.weight(kind, 256, 20, rng)
        x = rng.standard_normal((3, 256), np.float32)
        (clean,) = rig.matmul([weight], x)
        x[1, 100] = np.inf if kind is T.Q4_1 else np.nan
        (out,) = rig.matmul([weight], x)
        assert not np.isfinite(out[1]).any()
        assert out[::2].tobytes() == clean[::2].tobytes()


def experts64(
    weights: list[Weight], factors: list[Floats | None], x: Floats, router: Floats, n_chosen: int, factor: float
) -> Doubles:
    n_experts, n_embd = router.shape[1], x.shape[1]
    gate, up, down = (weight.values.reshape(n_experts, -1, weight.k) for weight in weights)
    scales = [np.ones(n_experts) if each is None else each.astype(np.float64) for each in factors]
    out = np.zeros((len(x), n_embd))
    for row in range(len(x)):
        logits = router[row].astype(np.float64)
        chosen = np.argsort(-logits, kind="stable")[:n_chosen]
        share = np.exp(logits - logits.max())
        share = share[chosen] / share.sum()
        share = share / max(share.sum(), 6.1e-5) * factor
        for weight, expert in zip(share, chosen, strict=True):
            seen = [seen_by(weights[i].kind, x[row]) for i in range(2)]
            g, u = gate[expert] @ seen[0] * scales[0][expert], up[expert] @ seen[1] * scales[1][expert]
            hidden = seen_by(weights[2].kind, (silu(g) * u).astype(np.float32))
            out[row] += weight * (down[expert] @ hidden) * scales[2][expert]
    return out


@pytest.mark.parametrize("kinds", [(T.Q4_0, T.Q4_0, T.Q8_0), (T.IQ3_S, T.Q4_K, T.F16), (T.BF16, T.Q8_0, T.Q6_K)])
@pytest.mark.parametrize("has_factors", [False, True])
def test_experts_are_near_float64_and_rows_do_not_depend_on_their_company(
    rig: WeightRig, kinds: tuple[GgmlType, GgmlType, GgmlType], has_factors: bool
) -> None:
    rng = np.random.default_rng(23)
    n_experts, n_chosen, n_embd, n_ff = (5, 2, 256, 256) if is_small(rig.engine) else (40, 6, 512, 256)
    n_rows = 5 if is_small(rig.engine) else 300
    sizes = ((n_embd, n_ff), (n_embd, n_ff), (n_ff, n_embd))
    weights = [rig.weight(kind, k, n * n_experts, rng) for kind, (k, n) in zip(kinds, sizes, strict=True)]
    factors = [rng.uniform(0.5, 2, n_experts).astype(np.float32) if has_factors else None for _ in range(3)]
    x = rng.standard_normal((n_rows, n_embd), np.float32)
    router = rng.standard_normal((n_rows, n_experts), np.float32)
    router[1, :] = router[1, 0]  # ties: lower numbers first
    out = rig.experts(weights, factors, x, router, n_chosen, 1.5)
    for row in {0, 1, n_rows - 1}:
        alone = rig.experts(weights, factors, x[row : row + 1], router[row : row + 1], n_chosen, 1.5)
        assert alone.tobytes() == out[row : row + 1].tobytes(), row
    few = slice(0, 4)
    expected = experts64(weights, factors, x[few], router[few], n_chosen, 1.5)
    # A code of the hidden values at a rounding edge may differ.
    assert (np.abs(out[few] - expected) <= 2e-3 * np.abs(expected).max(1, keepdims=True)).all()


def test_a_router_logit_that_is_no_number_is_chosen(rig: WeightRig) -> None:
    rng = np.random.default_rng(29)
    weights = [rig.weight(T.Q8_0, k, n * 4, rng) for k, n in ((64, 32), (64, 32), (32, 64))]
    x = rng.standard_normal((2, 64), np.float32)
    for place in range(4):
        router = rng.standard_normal((2, 4), np.float32)
        clean = rig.experts(weights, [None] * 3, x, router, 2, 1.0)
        router[0, place] = np.nan
        out = rig.experts(weights, [None] * 3, x, router, 2, 1.0)
        assert np.isnan(out[0]).all()
        assert out[1].tobytes() == clean[1].tobytes()


def test_quantized_reference_has_the_codes_of_the_kernel(rig: WeightRig) -> None:
    """An identity of Q8_0 gives back the quantized rows."""
    rng = np.random.default_rng(31)
    weight = rig.weight(T.Q8_0, 64, 64, rng)
    blocks = np.zeros((64 * 2, 34), np.uint8)
    blocks[:, 1] = 0x3C  # a scale of 1
    for i in range(64):
        blocks[2 * i + i // 32, 2 + i % 32] = 1
    formed = np.zeros(rig._launches.form_bytes(T.Q8_0.id, 64, 64), np.uint8)
    rows = blocks.reshape(-1)
    rig._launches.form(T.Q8_0.id, 64, 64, rows.ctypes.data, formed.ctypes.data)
    weight.address = rig.put(formed)
    x = (rng.standard_normal((8, 64)) * np.exp(rng.normal(0, 5, (8, 1)))).astype(np.float32)
    (out,) = rig.matmul([weight], x)
    assert np.array_equal(out, quantized(x).astype(np.float32))
