"""What the launcher of attention asks for: every page once and in order, within the scratch of the sealed tape."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.attend_case import GROUP, KV_TYPES, PAGE, PARAMS, PART_HEAD, PRODUCTS, PROMPT, STAGED, Layer, T

ROOT = Path(__file__).parents[2]
SCRATCH = 1 << 40
MOST = 4096


class Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_kv_heads", "head_dim_k", "head_dim_v")),
        *((name, ctypes.c_int32) for name in ("type_k", "type_v")),
        *((name, ctypes.c_uint32) for name in ("n_query_heads", "n_rows", "arch", "n_sm", "shared_bytes", "flags")),
        *((name, ctypes.c_uint64) for name in ("first_token", "scratch", "table_pages")),
    ]


class Noted(ctypes.Structure):
    _fields_ = [
        ("params", type(PARAMS.make("kvs_attend_params"))),
        ("grid", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("block", "shared_bytes", "is_products", "is_fold")),
        ("tiles", ctypes.c_int32),
        ("is_staged", ctypes.c_int32),
        ("is_prompt", ctypes.c_uint32),
    ]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the launcher")
    library = tmp_path_factory.mktemp("launches") / "launches.so"
    native = ("native/backends/cuda/launch_attend.c", "native/core/record.c", "native/base/types.c")
    sources = [str(Path(__file__).parent / "attend_launches.c"), *(str(ROOT / source) for source in native)]
    folders = [f"-I{ROOT / 'native'}", f"-I{ROOT / 'include'}"]
    options = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([compiler, *options, *folders, *sources, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.scratch_bytes.restype = ctypes.c_uint64
    return loaded


@dataclass(frozen=True)
class Asked:
    layer: Layer
    n_rows: int
    first_token: int
    arch: int
    n_sm: int
    shared_kib: int
    """That a block may have."""
    is_prompt: bool = False
    table_pages: int = 0
    """Of a recorded pass."""

    def flat(self, n_rows: int) -> Pass:
        layer = self.layer
        types = (layer.type_k.id, layer.type_v.id)
        heads = (layer.n_heads, n_rows, self.arch, self.n_sm, self.shared_kib << 10, int(self.is_prompt))
        rest = (self.first_token, SCRATCH, self.table_pages)
        return Pass(layer.n_kv_heads, layer.dim_k, layer.dim_v, *types, *heads, *rest)

    @property
    def n_pages(self) -> int:
        return (self.first_token + self.n_rows - 1) // PAGE + 1


def launches(launcher: ctypes.CDLL, asked: Asked, ends: list[int]) -> list[Noted]:
    notes = (Noted * MOST)()
    flat = asked.flat(asked.n_rows)
    n = launcher.note_launches(ctypes.byref(flat), (ctypes.c_uint64 * len(ends))(*ends), len(ends), notes)
    assert n > 0
    return list(notes[:n])


@st.composite
def passes(draw: st.DrawFn) -> tuple[Asked, list[int], int]:
    dims = st.sampled_from((32, 64, 96, 128, 160, 256))
    kinds = st.sampled_from(KV_TYPES)
    group = draw(st.sampled_from((1, 2, 3, 6, 16)))
    layer = Layer(draw(kinds), draw(kinds), draw(dims), draw(dims), draw(st.integers(1, 8)), group)
    n_rows = draw(st.one_of(st.integers(1, 70), st.sampled_from((256, 512, 2048))))
    first_token = draw(st.one_of(st.integers(0, 700), st.integers(0, 1 << 18)))
    arch, n_sm = draw(st.sampled_from((75, 80, 90, 120))), draw(st.sampled_from((1, 30, 132)))
    asked = Asked(layer, n_rows, first_token, arch, n_sm, draw(st.sampled_from((99, 163, 227))), draw(st.booleans()))
    # The last wave may name pages that no row sees.
    last = asked.n_pages + draw(st.integers(0, 2))
    inner = draw(st.lists(st.integers(1, last), max_size=6, unique=True))
    return asked, sorted({*inner, last}), n_rows + draw(st.integers(0, 100))


@given(drawn=passes())
def test_launches_take_every_page_once_and_stay_in_the_scratch(
    launcher: ctypes.CDLL, drawn: tuple[Asked, list[int], int]
) -> None:
    asked, ends, max_rows = drawn
    layer = asked.layer
    room = launcher.scratch_bytes(ctypes.byref(asked.flat(max_rows)))
    slot_bytes = asked.n_rows * layer.n_heads * (PART_HEAD + layer.dim_v) * 4
    notes = launches(launcher, asked, ends)
    next_page = 0
    for leaf, fold in zip(notes[::2], notes[1::2], strict=True):
        params = leaf.params
        assert (leaf.is_fold, fold.is_fold) == (0, 1) and bytes(leaf.params) == bytes(fold.params)
        assert params.page_begin == next_page < params.page_end
        assert params.is_first == (next_page == 0) and params.is_last == (params.page_end == asked.n_pages)
        next_page = params.page_end
        groups = -(-params.page_end // GROUP) - params.page_begin // GROUP
        assert leaf.grid[2] == (groups if params.is_grouped else params.page_end - params.page_begin)
        regions = sorted((start, start + n * slot_bytes) for start, n in (
            (params.groups, 1), (params.results, 1), (params.slots, leaf.grid[2])
        ))  # fmt: skip
        assert regions[0][0] >= SCRATCH and regions[-1][1] <= SCRATCH + room
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(regions))
        assert list(fold.grid) == [asked.n_rows * layer.n_heads, 1, 1] and fold.block == layer.dim_v
    assert next_page == asked.n_pages


@given(drawn=passes())
def test_launches_of_a_recorded_pass_are_those_of_any_pass_of_its_shape(
    launcher: ctypes.CDLL, drawn: tuple[Asked, list[int], int]
) -> None:
    """Over all pages that tables have room for, with nothing in them that tells two passes apart."""
    asked = replace(drawn[0], is_prompt=False)
    recorded = replace(asked, table_pages=-(-asked.n_pages // 64) * 64)
    other = replace(recorded, first_token=max(0, recorded.table_pages * PAGE - asked.n_rows))
    notes, others = (launches(launcher, each, [each.n_pages]) for each in (recorded, other))
    next_page = 0
    for note, same in zip(notes, others, strict=True):
        note.params.first_token = same.params.first_token
        assert bytes(note) == bytes(same) and note.params.step == 1
        assert note.params.page_begin == next_page
        if note.is_fold:
            next_page = note.params.page_end
        else:
            n_pages = note.params.page_end - note.params.page_begin
            assert note.grid[2] * (GROUP if note.params.is_grouped else 1) >= n_pages
    assert next_page == recorded.table_pages


@given(drawn=passes())
def test_tiles_cover_all_queries_with_the_shared_memory_they_need(
    launcher: ctypes.CDLL, drawn: tuple[Asked, list[int], int]
) -> None:
    asked, ends, _ = drawn
    layer = asked.layer
    leaf = launches(launcher, asked, ends)[0]
    is_tiled = asked.is_prompt and asked.arch == 90 and PROMPT.takes(layer)
    assert leaf.is_prompt == is_tiled and leaf.params.is_grouped >= is_tiled
    assert leaf.is_products == (not is_tiled and asked.arch >= 80 and PRODUCTS.takes(layer))
    tile = PROMPT.tile_of(0) if is_tiled else 8 * leaf.tiles if leaf.is_products else 8
    assert leaf.grid[0] == -(-asked.n_rows * layer.group // tile) and leaf.grid[1] == layer.n_kv_heads
    family = PROMPT if is_tiled else STAGED if leaf.is_staged else PRODUCTS
    assert leaf.shared_bytes == (family.shared_bytes(layer, tile) if is_tiled or leaf.is_products else 0)
    if leaf.is_products:
        # Beside it: maxima and sums of eight warps, factors, sums of queries and what they see.
        beside = tile * (64 + 12 + 8 + 8 + 4 * layer.dim_k // 32)
        assert tile in (8, 32, 40) and leaf.shared_bytes + beside <= asked.shared_kib << 10
        # A page is staged where there is room, with some to spare.
        assert leaf.is_staged or STAGED.shared_bytes(layer, tile) + tile * 160 > asked.shared_kib << 10
        assert (tile == 8) == (asked.n_rows * layer.group <= 8)


@pytest.mark.parametrize("dims", [(48, 64), (64, 48), (288, 64), (64, 512)])
def test_head_sizes_that_no_kernel_has_are_refused(launcher: ctypes.CDLL, dims: tuple[int, int]) -> None:
    asked = Asked(Layer(T.F16, T.F16, *dims), 1, 0, 90, 132, 227)
    assert launcher.scratch_bytes(ctypes.byref(asked.flat(1))) == 0
