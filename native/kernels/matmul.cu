/* matmul.cu: few activations of 8 bits times quantized weights, with the integer matrix products of the hardware.
 *
 * Kernel matmul(kvs_matmul_params). Macros: KVS_T0 .. KVS_T3 types of the parts (of part 0 where there are fewer), KVS_ROWS rows that
 * there is room for (1, 8, 16; 8 with experts), KVS_KIND a sum of 1: parts 0 and 1, of one type, are gate and up, 2: tiles belong to
 * experts; KVS_PANELS that a block takes at a time (1, 2; with gate and up one of each), KVS_STAGES of a ring.
 * Grid: any; blocks take items in turn, n_row_tiles * (panels of all parts, with gate and up of part 0, by KVS_PANELS), row tiles
 * fastest. Block: 256, a warp to a slice. Dynamic shared memory: for each warp KVS_STAGES stages of the largest part's
 * (weight_ring.h), then 512 * KVS_PANELS * KVS_ROWS bytes for sums. Architecture: 75; from 80 on weights and activations arrive
 * while the block computes, from 90 on the first weights are asked for before the kernel ahead has ended.
 * Order, for every number of rows: that of weight_product.cuh; the same as matmul_wide.cu.
 * Twin: native/backends/cpu/matmul_reference.c, whose sum is one chain.
 */
#include "act_record.h"
#include "grid.cuh"
#include "weight_form.h"
#include "weight_params.h"
#include "weight_product.cuh"
#include "weight_ring.h"
#include "weight_unit.cuh"

#define KVS_SWIGLU (KVS_KIND & 1)
#define KVS_EXPERTS (KVS_KIND >> 1)
#define WARPS KVS_SLICES
#define THREADS (WARPS * 32)
#define ROWS 16 /* of a panel */
#define TILES (KVS_ROWS > KVS_ACT_TILE ? 2 : 1)
#define SLOTS (KVS_ROWS / TILES) /* of a tile */
#define COLUMNS (KVS_ROWS == 1 ? 1 : 2)
#define VALUES (KVS_PANELS * KVS_ROWS * ROWS) /* of an item, [panel][row][row of the panel] */
#define CHUNK 16

typedef float sums_t[KVS_PANELS][TILES][4];

#ifdef __CUDACC__
extern __shared__ uint4 dynamic_shared[];
#endif

static __device__ __forceinline__ constexpr unsigned int larger(unsigned int a, unsigned int b)
{
    return a > b ? a : b;
}

static __device__ __forceinline__ constexpr unsigned int stage_bytes(int type)
{
    return kvs_stage_bytes(type, KVS_PANELS, KVS_ROWS == 1);
}

constexpr unsigned int STAGE_BYTES =
    larger(larger(stage_bytes(KVS_T0), stage_bytes(KVS_T1)), larger(stage_bytes(KVS_T2), stage_bytes(KVS_T3)));

static __device__ __forceinline__ unsigned char *ring_slot(unsigned int slot)
{
    return (unsigned char *)dynamic_shared + (threadIdx.x / 32 * KVS_STAGES + slot) * STAGE_BYTES;
}

static __device__ __forceinline__ float *sums_room(unsigned int slice)
{
    return (float *)((unsigned char *)dynamic_shared + WARPS * KVS_STAGES * STAGE_BYTES) + slice * VALUES;
}

/* Weights are read once and go past the first-level cache, activations may stay there. */
template <bool IS_WEIGHT> static __device__ __forceinline__ void copy_chunk(unsigned char *to, const unsigned char *from)
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    const unsigned int at = (unsigned int)__cvta_generic_to_shared(to);
    if (IS_WEIGHT) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    }
#else
    *(uint4 *)to = *(const uint4 *)from;
#endif
}

static __device__ __forceinline__ void end_stage()
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* All stages but the last KVS_STAGES - 1 that were asked for have come. */
static __device__ __forceinline__ void wait_stage()
{
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(KVS_STAGES - 1) : "memory");
#endif
    __syncwarp();
}

/* What a block works on. */
struct item_t {
    unsigned int part;
    unsigned int panel; /* the first */
    unsigned int first_row;
    unsigned int expert;
    bool is_used;
};

/* One stage of the slice of this warp of an item. */
struct cursor {
    unsigned int index; /* of the item */
    unsigned int turn;  /* items of this block before it */
    unsigned int stage;
    unsigned int n_stages;
    item_t item;
    const unsigned char *panels[KVS_PANELS];

    __device__ __forceinline__ unsigned int slice() const
    {
        /* With few units first slices have more: warps take turns. */
        return (threadIdx.x / 32 + turn * (KVS_SLICES / 2)) % KVS_SLICES;
    }
};

static __device__ __forceinline__ int type_of(unsigned int part)
{
    return part == 0 ? KVS_T0 : part == 1 ? KVS_T1 : part == 2 ? KVS_T2 : KVS_T3;
}

static __device__ __forceinline__ unsigned int n_units(int type, unsigned int n_groups)
{
    const unsigned int groups = kvs_form_unit_groups(type);
    return (n_groups + groups - 1) / groups;
}

static __device__ __forceinline__ unsigned int n_items_of(const kvs_matmul_params &p, unsigned int part)
{
    return KVS_SWIGLU ? p.part[part].n_panels : (p.part[part].n_panels + KVS_PANELS - 1) / KVS_PANELS;
}

static __device__ __forceinline__ item_t find_item(const kvs_matmul_params &p, unsigned int index)
{
    unsigned int at = index / p.n_row_tiles;
    item_t item = {0, 0, index % p.n_row_tiles * TILES * KVS_ACT_TILE, 0, true};
    while (!KVS_SWIGLU && item.part + 1 < p.n_parts && at >= n_items_of(p, item.part)) {
        at -= n_items_of(p, item.part);
        item.part++;
    }
    item.panel = KVS_SWIGLU ? at : at * KVS_PANELS;
    if (KVS_EXPERTS) {
        const unsigned int tile = item.first_row / KVS_ACT_TILE;
        item.is_used = tile < *(const unsigned int *)p.n_tiles_used;
        item.expert = item.is_used ? ((const unsigned int *)p.tile_experts)[tile] : 0;
    }
    return item;
}

/* Panel `i` of an item. One behind the last is the last once more: its sums are not stored. */
static __device__ __forceinline__ const unsigned char *find_panel(const kvs_matmul_params &p, const item_t &item, unsigned int i)
{
    const unsigned int part = KVS_SWIGLU ? i : item.part, last = p.part[part].n_panels - 1;
    const unsigned int wanted = KVS_SWIGLU ? item.panel : item.panel + i;
    const unsigned long long index = (unsigned long long)item.expert * (last + 1) + (wanted < last ? wanted : last);
    const int type = type_of(part);
    return (const unsigned char *)p.part[part].panels + index * n_units(type, p.n_groups) * kvs_form_unit_bytes(type);
}

/* To item `index`, or one behind it that has something for this warp; behind the last n_stages is 0. */
static __device__ __forceinline__ void seek(const kvs_matmul_params &p, cursor &c)
{
    for (c.stage = c.n_stages = 0; c.index < p.n_items; c.index += gridDim.x, c.turn++) {
        c.item = find_item(p, c.index);
        const int type = type_of(c.item.part);
        const unsigned int units = n_units(type, p.n_groups), slice = c.slice(), per_stage = kvs_stage_units(type);
        const unsigned int mine = units > slice && c.item.is_used ? (units - slice + KVS_SLICES - 1) / KVS_SLICES : 0;
        c.n_stages = (mine + per_stage - 1) / per_stage;
        if (c.n_stages != 0) {
#pragma unroll
            for (int panel = 0; panel < KVS_PANELS; panel++) {
                c.panels[panel] = find_panel(p, c.item, panel);
            }
            return;
        }
    }
}

static __device__ __forceinline__ void advance(const kvs_matmul_params &p, cursor &c)
{
    if (++c.stage >= c.n_stages && c.index < p.n_items) {
        c.index += gridDim.x;
        c.turn++;
        seek(p, c);
    }
}

template <int TYPE> struct stage_of {
    static constexpr int GROUPS = kvs_unit<TYPE>::GROUPS;
    static constexpr unsigned int UNITS = kvs_stage_units(TYPE);
    static constexpr unsigned int UNIT_BYTES = kvs_form_unit_bytes(TYPE);
    static constexpr unsigned int WEIGHT_BYTES = kvs_stage_weight_bytes(TYPE, KVS_PANELS);
    static constexpr unsigned int CHUNKS = kvs_stage_record_chunks(TYPE);
    static constexpr unsigned int WHOLE_AT = 32;
    static constexpr unsigned int HALVES_AT = WHOLE_AT + 16;

    static __device__ __forceinline__ unsigned int unit(const cursor &c, unsigned int i)
    {
        return c.slice() + KVS_SLICES * (c.stage * UNITS + i);
    }

    static __device__ __forceinline__ void fetch_weights(const kvs_matmul_params &p, const cursor &c, unsigned char *to)
    {
        const unsigned int last = n_units(TYPE, p.n_groups);
#pragma unroll
        for (int panel = 0; panel < KVS_PANELS; panel++) {
            const unsigned char *from = c.panels[panel];
#pragma unroll
            for (unsigned int i = 0; i < UNITS; i++) {
                const unsigned int u = unit(c, i);
#pragma unroll
                for (unsigned int at = 0; at < UNIT_BYTES; at += 32 * CHUNK) {
                    const unsigned int mine = at + threadIdx.x % 32 * CHUNK;
                    if (u < last && mine < UNIT_BYTES) {
                        copy_chunk<true>(to + (panel * UNITS + i) * UNIT_BYTES + mine, from + (unsigned long long)u * UNIT_BYTES + mine);
                    }
                }
            }
        }
    }

    /* Of the one row. */
    static __device__ __forceinline__ void fetch_records(const kvs_matmul_params &p, const cursor &c, unsigned char *to)
    {
        constexpr unsigned int N = UNITS * GROUPS * CHUNKS;
        const unsigned int last = n_units(TYPE, p.n_groups);
#pragma unroll
        for (unsigned int first = 0; first < N; first += 32) {
            const unsigned int at = first + threadIdx.x % 32, group = at / CHUNKS, bytes = at % CHUNKS * CHUNK;
            const unsigned int u = unit(c, group / GROUPS);
            const unsigned int in_record = bytes < WHOLE_AT    ? bytes
                                           : bytes < HALVES_AT ? bytes - WHOLE_AT + KVS_ACT_WHOLE_AT
                                                               : bytes - HALVES_AT + KVS_ACT_HALVES_AT;
            if (at < N && u < last) {
                const unsigned long long record = u * GROUPS + group % GROUPS;
                copy_chunk<false>(to + WEIGHT_BYTES + at * CHUNK,
                                  (const unsigned char *)p.records + record * KVS_ACT_RECORD_BYTES + in_record);
            }
        }
    }

    /* The one row for all columns: only the first is anybody's. */
    static __device__ __forceinline__ void load_one_row(kvs_right<TYPE> &right, const unsigned char *staged)
    {
        right.codes = *(const uint2 *)(staged + threadIdx.x % 4 * 8);
        right.whole = *(const int4 *)(staged + WHOLE_AT);
        if constexpr (kvs_form_is_halved(TYPE)) {
            right.halves = *(const int4 *)(staged + HALVES_AT);
        }
    }

    /* One unit of each panel. `records`: of its first group and the first tile; tiles behind n_rows are left alone. */
    static __device__ __forceinline__ void add_units(const kvs_matmul_params &p, sums_t &sums, const unsigned char *stage,
                                                     unsigned int i, const unsigned char *records, unsigned int n_rows)
    {
        const unsigned int lane = threadIdx.x % 32;
        kvs_unit<TYPE> unit[KVS_PANELS];
#pragma unroll
        for (int panel = 0; panel < KVS_PANELS; panel++) {
            kvs_load_unit<TYPE, true>(unit[panel], stage + (panel * UNITS + i) * UNIT_BYTES, lane);
        }
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            kvs_right<TYPE> right[TILES];
            if constexpr (KVS_ROWS == 1) {
                load_one_row(right[0], stage + WEIGHT_BYTES + (i * GROUPS + j) * CHUNKS * CHUNK);
            } else {
#pragma unroll
                for (unsigned int tile = 0; tile < TILES; tile++) {
                    if (tile == 0 || tile * KVS_ACT_TILE < n_rows) {
                        kvs_load_right<TYPE>(right[tile], records + (tile * p.n_groups + j) * KVS_ACT_RECORD_BYTES, lane,
                                             tile * KVS_ACT_TILE + lane / 4 < n_rows);
                    }
                }
            }
#pragma unroll
            for (int panel = 0; panel < KVS_PANELS; panel++) {
                kvs_left<TYPE> left;
                kvs_unit_left<TYPE>(unit[panel], j, lane, left);
#pragma unroll
                for (unsigned int tile = 0; tile < TILES; tile++) {
                    if (tile == 0 || tile * KVS_ACT_TILE < n_rows) {
                        kvs_add_loaded<TYPE, COLUMNS, kvs_left<TYPE>::N>(sums[panel][tile], unit[panel], j, left.a, right[tile]);
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void add_stage(const kvs_matmul_params &p, const cursor &c, sums_t &sums, const unsigned char *stage)
    {
        const unsigned int last = n_units(TYPE, p.n_groups);
        const unsigned char *records = (const unsigned char *)p.records + (unsigned long long)(c.item.first_row / KVS_ACT_TILE) *
                                                                              p.n_groups * KVS_ACT_RECORD_BYTES;
#pragma unroll 1
        for (unsigned int i = 0; i < UNITS && unit(c, i) < last; i++) {
            add_units(p, sums, stage, i, records + (unsigned long long)unit(c, i) * GROUPS * KVS_ACT_RECORD_BYTES,
                      p.n_rows - c.item.first_row);
        }
    }
};

/* Parts of one type share its code. */
#define BY_TYPE(PART, CALL)                                                                                            \
    if ((PART) == 0 || type_of(PART) == KVS_T0) {                                                                      \
        stage_of<KVS_T0>::CALL;                                                                                        \
    } else if ((PART) == 1 || type_of(PART) == KVS_T1) {                                                               \
        stage_of<KVS_T1>::CALL;                                                                                        \
    } else if ((PART) == 2 || type_of(PART) == KVS_T2) {                                                               \
        stage_of<KVS_T2>::CALL;                                                                                        \
    } else {                                                                                                           \
        stage_of<KVS_T3>::CALL;                                                                                        \
    }

static __device__ __forceinline__ void fetch_weights(const kvs_matmul_params &p, const cursor &c, unsigned int slot)
{
    if (c.stage < c.n_stages) {
        BY_TYPE(c.item.part, fetch_weights(p, c, ring_slot(slot)))
    }
}

static __device__ __forceinline__ void fetch_records(const kvs_matmul_params &p, const cursor &c, unsigned int slot)
{
    if (KVS_ROWS == 1 && c.stage < c.n_stages) {
        BY_TYPE(c.item.part, fetch_records(p, c, ring_slot(slot)))
    }
    end_stage();
}

static __device__ __forceinline__ void put_sums(float *to, const sums_t &sums)
{
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll
    for (int panel = 0; panel < KVS_PANELS; panel++) {
#pragma unroll
        for (unsigned int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned int slot = lane % 4 * 2 + i % 2;
                if (slot < SLOTS) {
                    to[(panel * KVS_ROWS + tile * SLOTS + slot) * ROWS + lane / 4 + i / 2 * 8] = sums[panel][tile][i];
                }
            }
        }
    }
}

static __device__ __forceinline__ float fold_slices(unsigned int value)
{
    float sum = sums_room(0)[value];
#pragma unroll
    for (int slice = 1; slice < KVS_SLICES; slice++) {
        sum = __fadd_rn(sum, sums_room(slice)[value]);
    }
    return sum;
}

static __device__ float scaled(const kvs_matmul_params &p, const item_t &item, unsigned int part, unsigned int column, float sum)
{
    const float *scales = (const float *)p.part[part].scales;
    if (scales == 0) {
        return sum;
    }
    return __fmul_rn(sum, scales[KVS_EXPERTS ? item.expert : column / p.part[part].scale_run]);
}

/* Value `value` of an item goes where its row and column say; with gate and up those of the second panel belong to the first's. */
static __device__ __forceinline__ void store(const kvs_matmul_params &p, const item_t &item, unsigned int value)
{
    const unsigned int row = item.first_row + value / ROWS % KVS_ROWS;
    const unsigned int column = (item.panel + value / (ROWS * KVS_ROWS)) * ROWS + value % ROWS;
    const kvs_matmul_part_params &part = p.part[item.part];
    if (row >= p.n_rows || column >= part.n) {
        return;
    }
    float *out = (float *)part.out + (unsigned long long)row * part.out_stride + column;
    float y = scaled(p, item, item.part, column, fold_slices(value));
    if (KVS_SWIGLU) {
        y = __fmul_rn(kvs_silu(y), scaled(p, item, 1, column, fold_slices(value + KVS_ROWS * ROWS)));
    } else if (p.epilogue == KVS_STORE_ADD) {
        y = __fadd_rn(*out, y);
    }
    *out = y;
}

/* The whole of an item: all warps come here together. */
static __device__ __forceinline__ void store_item(const kvs_matmul_params &p, const cursor &at, const sums_t &sums)
{
    const item_t item = find_item(p, at.index);
    __syncthreads();
    put_sums(sums_room(at.slice()), sums);
    __syncthreads();
    /* Few values are one warp's, each time another's. */
    constexpr unsigned int N = KVS_SWIGLU ? KVS_ROWS * ROWS : VALUES;
    const unsigned int first = (threadIdx.x + at.turn * 32) % THREADS;
    for (unsigned int value = first; value < N && item.is_used; value += THREADS) {
        store(p, item, value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, KVS_ROWS > KVS_ACT_TILE ? 1 : KVS_PANELS == 1 && KVS_ROWS == 1 ? 3 : 2) matmul(const kvs_matmul_params p)
{
    kvs_let_next_begin();
    if (KVS_EXPERTS) {
        kvs_wait_for_previous();
    }
    cursor fetched;
    fetched.index = blockIdx.x;
    fetched.turn = 0;
    seek(p, fetched);
    cursor used = fetched;
#pragma unroll 1
    for (unsigned int slot = 0; slot < KVS_STAGES; slot++) {
        fetch_weights(p, fetched, slot);
        advance(p, fetched);
    }
    kvs_wait_for_previous();
    fetched = used;
#pragma unroll 1
    for (unsigned int slot = 0; slot < KVS_STAGES; slot++) {
        fetch_records(p, fetched, slot);
        advance(p, fetched);
    }
    unsigned int slot = 0;
    cursor at;
    at.turn = 0;
    for (at.index = blockIdx.x; at.index < p.n_items; at.index += gridDim.x, at.turn++) {
        sums_t sums;
#pragma unroll
        for (int panel = 0; panel < KVS_PANELS; panel++) {
#pragma unroll
            for (unsigned int tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[panel][tile][i] = 0.0f;
                }
            }
        }
#pragma unroll 1
        while (used.index == at.index && used.stage < used.n_stages) {
            wait_stage();
            BY_TYPE(used.item.part, add_stage(p, used, sums, ring_slot(slot)))
            __syncwarp();
            fetch_weights(p, fetched, slot);
            fetch_records(p, fetched, slot);
            advance(p, fetched);
            advance(p, used);
            slot = slot + 1 < KVS_STAGES ? slot + 1 : 0;
        }
        store_item(p, at, sums);
    }
}
