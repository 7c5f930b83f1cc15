/* matmul.cu: few activations times quantized weights, with the integer matrix products of the hardware.
 *
 * Kernel matmul(kvs_matmul_narrow_params). Macros: KVS_T0 .. KVS_T3 types of the parts (of part 0 where there are fewer), KVS_ROWS rows
 * that there is room for (1, 8, 16; 8 with experts), KVS_KIND a sum of 1: parts 0 and 1, of one type, are gate and up, 2: tiles belong
 * to experts; KVS_PANELS that a block takes at a time (1; of several rows 1, 2), KVS_STAGES of a ring.
 * Grid: any; blocks take items in turn, n_row_tiles * (panels of all parts, by KVS_PANELS; with gate and up panels of part 0), row
 * tiles fastest. Gate and up of an item follow one another, or with two panels at a time come together. Block: 256, a warp to a slice.
 * Dynamic shared memory: for each warp KVS_STAGES stages of the largest part's (weight_ring.h), then for sums 512 * KVS_ROWS bytes for
 * each panel of an item, of one row twice, then the one row.
 * Architecture: 75; from 80 on weights arrive while the block computes, from 90 on they are asked for before the kernel ahead has ended.
 * Where the records of the rows (act_unit.cuh) are not there, each block forms what it needs of one row, or the first blocks form
 * them and all wait.
 * Order, for every number of rows: that of weight_product.cuh; the same as matmul_wide.cu.
 * Twin: native/backends/cpu/matmul_reference.c, whose sum is one chain.
 */
#include "act_record.h"
#include "act_unit.cuh"
#include "grid.cuh"
#include "latch.cuh"
#include "stages.cuh"
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
#define IS_ONE_ROW (KVS_ROWS == 1)
#define COLUMNS (IS_ONE_ROW ? 1 : 2)
#define RUNS (KVS_SWIGLU && KVS_PANELS == 1 ? 2 : 1) /* of an item, KVS_PANELS each */
#define VALUES (RUNS * KVS_PANELS * KVS_ROWS * ROWS) /* of an item, [panel][row][row of the panel] */
#define ROW_UNITS 5                                  /* of a row that each block forms for itself, 1,024 values each */
#define ROOMS (IS_ONE_ROW ? 2 : 1)                   /* for sums: of the item under way, and of the one that is being stored */

/* Of the records. */
static __device__ kvs_latch latch;

typedef float sums_t[KVS_PANELS][TILES][4];

#ifdef __CUDACC__
extern __shared__ uint4 dynamic_shared[];
#endif

static __device__ __forceinline__ constexpr unsigned int larger(unsigned int a, unsigned int b)
{
    return a > b ? a : b;
}

constexpr unsigned int STAGE_BYTES =
    larger(larger(kvs_stage_bytes(KVS_T0, KVS_PANELS), kvs_stage_bytes(KVS_T1, KVS_PANELS)),
           larger(kvs_stage_bytes(KVS_T2, KVS_PANELS), kvs_stage_bytes(KVS_T3, KVS_PANELS)));
constexpr unsigned int ROOM_AT = WARPS * KVS_STAGES * STAGE_BYTES;
constexpr unsigned int ROW_AT = ROOM_AT + ROOMS * WARPS * VALUES * 4;
constexpr bool HAS_HALVES = kvs_form_is_halved(KVS_T0) || kvs_form_is_halved(KVS_T1) || kvs_form_is_halved(KVS_T2) ||
                            kvs_form_is_halved(KVS_T3);
constexpr unsigned int GROUP_BYTES = kvs_row_group_bytes(HAS_HALVES);

static __device__ __forceinline__ unsigned char *ring_slot(unsigned int slot)
{
    return (unsigned char *)dynamic_shared + (threadIdx.x / 32 * KVS_STAGES + slot) * STAGE_BYTES;
}

static __device__ __forceinline__ float *sums_room(unsigned int turn, unsigned int slice)
{
    return (float *)((unsigned char *)dynamic_shared + ROOM_AT) + (turn % ROOMS * WARPS + slice) * VALUES;
}

static __device__ __forceinline__ unsigned char *row_room()
{
    return (unsigned char *)dynamic_shared + ROW_AT;
}

/* What a block works on. */
struct item_t {
    unsigned int part;
    unsigned int panel; /* the first */
    unsigned int first_row;
    unsigned int expert;
    bool is_used;
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

/* Stages of a slice. */
static __device__ __forceinline__ unsigned int n_stages(int type, unsigned int n_groups, unsigned int slice)
{
    const unsigned int units = n_units(type, n_groups), per_stage = kvs_stage_units(type) * KVS_SLICES;
    return units > slice ? (units - slice + per_stage - 1) / per_stage : 0;
}

/* With few units first slices have more: warps take turns. */
static __device__ __forceinline__ unsigned int slice_of(unsigned int turn)
{
    return (threadIdx.x / 32 + turn * (KVS_SLICES / 2)) % KVS_SLICES;
}

static __device__ __forceinline__ unsigned int n_items_of(const kvs_matmul_params &p, unsigned int part)
{
    return KVS_SWIGLU ? p.part[part].n_panels : (p.part[part].n_panels + KVS_PANELS - 1) / KVS_PANELS;
}

static __device__ __forceinline__ item_t find_item(const kvs_matmul_params &p, unsigned int index)
{
    unsigned int at = IS_ONE_ROW ? index : index / p.n_row_tiles;
    item_t item = {0, 0, IS_ONE_ROW ? 0 : index % p.n_row_tiles * TILES * KVS_ACT_TILE, 0, true};
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

/* What a warp asks for next: stages of its slices, run after run, item after item. */
struct feeder {
    unsigned int index; /* of the item */
    unsigned int turn;  /* items of this block before it */
    unsigned int run;
    unsigned int part;
    unsigned int n_left; /* stages of the run; 0: nothing is left at all */
    unsigned int unit;   /* the first of the next stage */
    const unsigned char *panels[KVS_PANELS];

    /* To the run under way, or one behind it that has something for this warp. */
    __device__ __forceinline__ void seek(const kvs_matmul_params &p)
    {
        for (n_left = 0; index < p.n_items; step()) {
            const item_t item = find_item(p, index);
            part = item.part;
            unit = slice_of(turn);
            n_left = item.is_used ? n_stages(type_of(item.part), p.n_groups, unit) : 0;
            if (n_left != 0) {
#pragma unroll
                for (int panel = 0; panel < KVS_PANELS; panel++) {
                    panels[panel] = find_panel(p, item, RUNS == 1 ? panel : run);
                }
                return;
            }
        }
    }

    __device__ __forceinline__ void step()
    {
        run = run + 1 < RUNS ? run + 1 : 0;
        if (run == 0) {
            index += gridDim.x;
            turn++;
        }
    }

    __device__ __forceinline__ void feed(const kvs_matmul_params &p, ring<KVS_STAGES> &stages, unsigned int slot);
};

template <int TYPE> struct stage_of {
    static constexpr int GROUPS = kvs_unit<TYPE>::GROUPS;
    static constexpr unsigned int UNITS = kvs_stage_units(TYPE);
    static constexpr unsigned int UNIT_BYTES = kvs_form_unit_bytes(TYPE);
    static constexpr unsigned int WHOLE_AT = 32;
    static constexpr unsigned int HALVES_AT = WHOLE_AT + 16;

    static __device__ __forceinline__ void fetch(const kvs_matmul_params &p, feeder &f, ring<KVS_STAGES> &stages, unsigned int slot)
    {
        const unsigned int last = n_units(TYPE, p.n_groups);
        const unsigned int n = UNITS == 1 ? 1 : (last - f.unit + KVS_SLICES - 1) / KVS_SLICES;
        stages.template fetch<UNITS, UNIT_BYTES>(ring_slot(slot), f.panels, f.unit, KVS_SLICES, n < UNITS ? n : UNITS, slot);
        f.unit += KVS_SLICES * UNITS;
    }

    /* The one row for all columns: only the first is anybody's. */
    static __device__ __forceinline__ void load_one_row(kvs_right<TYPE> &right, const unsigned char *group)
    {
        right.codes = *(const uint2 *)(group + threadIdx.x % 4 * 8);
        right.whole = *(const int4 *)(group + WHOLE_AT);
        if constexpr (kvs_form_is_halved(TYPE)) {
            right.halves = *(const int4 *)(group + HALVES_AT);
        }
    }

    /* One unit of each panel. `row`: its first group of the one row. `records`: of its first group and the first tile; tiles behind
     * n_rows are left alone. */
    static __device__ __forceinline__ void add_units(const kvs_matmul_params &p, sums_t &sums, const unsigned char *stage,
                                                     const unsigned char *row, const unsigned char *records, unsigned int n_rows)
    {
        const unsigned int lane = threadIdx.x % 32;
        kvs_unit<TYPE> unit[KVS_PANELS];
#pragma unroll
        for (int panel = 0; panel < KVS_PANELS; panel++) {
            kvs_load_unit<TYPE, true>(unit[panel], stage + panel * UNITS * UNIT_BYTES, lane);
        }
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            kvs_right<TYPE> right[TILES];
            if constexpr (IS_ONE_ROW) {
                load_one_row(right[0], row + j * GROUP_BYTES);
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

    /* All stages of a run. */
    static __device__ __forceinline__ void add_run(const kvs_matmul_params &p, feeder &fed, ring<KVS_STAGES> &stages, sums_t &sums,
                                                   unsigned int slice, unsigned int first_row)
    {
        const unsigned int last = n_units(TYPE, p.n_groups);
        const unsigned char *records =
            (const unsigned char *)p.records + (unsigned long long)(first_row / KVS_ACT_TILE) * p.n_groups * KVS_ACT_RECORD_BYTES;
#pragma unroll 1
        for (unsigned int unit = slice; unit < last;) {
            const unsigned int slot = stages.wait();
            const unsigned char *stage = ring_slot(slot);
#pragma unroll 1
            for (unsigned int i = 0; i < UNITS && unit < last; i++, unit += KVS_SLICES) {
                add_units(p, sums, stage + i * UNIT_BYTES, row_room() + unit * GROUPS * GROUP_BYTES,
                          records + (unsigned long long)unit * GROUPS * KVS_ACT_RECORD_BYTES, p.n_rows - first_row);
            }
            __syncwarp();
            fed.feed(p, stages, slot);
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

/* The next stage to a slot, if there is one. */
__device__ __forceinline__ void feeder::feed(const kvs_matmul_params &p, ring<KVS_STAGES> &stages, unsigned int slot)
{
    if (n_left != 0) {
        BY_TYPE(part, fetch(p, *this, stages, slot))
        if (--n_left == 0) {
            step();
            seek(p);
        }
    }
    stages.end_stage();
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

static __device__ __forceinline__ float fold_slices(unsigned int turn, unsigned int value)
{
    float sum = sums_room(turn, 0)[value];
#pragma unroll
    for (int slice = 1; slice < KVS_SLICES; slice++) {
        sum = __fadd_rn(sum, sums_room(turn, slice)[value]);
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
static __device__ __forceinline__ void store(const kvs_matmul_params &p, const item_t &item, unsigned int turn, unsigned int value)
{
    const unsigned int row = item.first_row + value / ROWS % KVS_ROWS;
    const unsigned int column = (item.panel + value / (ROWS * KVS_ROWS)) * ROWS + value % ROWS;
    const kvs_matmul_part_params &part = p.part[item.part];
    if (row >= p.n_rows || column >= part.n) {
        return;
    }
    float *out = (float *)part.out + (unsigned long long)row * part.out_stride + column;
    float y = scaled(p, item, item.part, column, fold_slices(turn, value));
    if (KVS_SWIGLU) {
        y = __fmul_rn(kvs_silu(y), scaled(p, item, 1, column, fold_slices(turn, value + KVS_ROWS * ROWS)));
    } else if (p.epilogue == KVS_STORE_ADD) {
        y = __fadd_rn(*out, y);
    }
    *out = y;
}

/* The whole of an item, whose sums are in their room: all warps come here together. */
static __device__ __forceinline__ void store_item(const kvs_matmul_params &p, const item_t &item, unsigned int turn)
{
    __syncthreads();
    /* Few values are one warp's, each time another's. */
    constexpr unsigned int N = KVS_SWIGLU ? VALUES / 2 : VALUES;
    const unsigned int first = (threadIdx.x + turn * 32) % THREADS;
    for (unsigned int value = first; value < N && item.is_used; value += THREADS) {
        store(p, item, turn, value);
    }
    if (ROOMS == 1) {
        __syncthreads();
    }
}

/* The first blocks form records, each in its turn; on a host, whose blocks follow one another, the first one all. */
static __device__ __forceinline__ void form_records(const kvs_matmul_narrow_params &p)
{
    const unsigned int units = kvs_act_units(p.rows), n_parts = units * p.rows.n_slots;
#ifdef __CUDACC__
    const unsigned int first = blockIdx.x, step = gridDim.x;
#else
    const unsigned int first = blockIdx.x == 0 ? 0 : n_parts, step = 1;
#endif
    for (unsigned int part = first; part < n_parts; part += step) {
        kvs_act_unit(p.rows, part / units, part / units, part % units);
        kvs_latch_open(&latch);
    }
    kvs_latch_wait(&latch, n_parts);
}

/* The one row, from its values, which each block takes for itself: norms without gates, of rows that are not long. Nobody waits for
 * another block, and what it costs is less than that. */
static __device__ __forceinline__ bool is_formed_apart(const kvs_act_params &p)
{
    return IS_ONE_ROW && p.records != 0 && p.gate == 0 && p.group == 0 && p.n_groups * 32 <= ROW_UNITS * KVS_ACT_UNIT_VALUES;
}

static __device__ __forceinline__ void form_row(const kvs_act_params &p)
{
    const float *x = (const float *)p.x, *norm = (const float *)p.norm;
    const bool is_aligned = act_is_aligned(x) && act_is_aligned(norm);
    float value[ROW_UNITS][KVS_ACT_LANE_VALUES], scale[ROW_UNITS][KVS_ACT_LANE_VALUES];
#pragma unroll
    for (unsigned int unit = 0; unit < ROW_UNITS; unit++) {
        act_load(value[unit], x, unit * KVS_ACT_UNIT_VALUES + threadIdx.x * KVS_ACT_LANE_VALUES, p.k, is_aligned);
    }
#pragma unroll
    for (unsigned int unit = 0; unit < ROW_UNITS && norm != 0; unit++) {
        act_load(scale[unit], norm, unit * KVS_ACT_UNIT_VALUES + threadIdx.x * KVS_ACT_LANE_VALUES, p.k, is_aligned);
    }
    float factor = 1.0f;
    if (norm != 0) {
        float sums[KVS_ACT_LANE_VALUES] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (unsigned int unit = 0; unit < ROW_UNITS; unit++) {
            act_add_squares(sums, value[unit]);
        }
        factor = act_factor_of(p, sums);
    }
#pragma unroll
    for (unsigned int unit = 0; unit < ROW_UNITS; unit++) {
        const unsigned int i = unit * KVS_ACT_UNIT_VALUES + threadIdx.x * KVS_ACT_LANE_VALUES;
        if (unit * KVS_ACT_UNIT_VALUES >= p.n_groups * 32) {
            break;
        }
#pragma unroll
        for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
            if (norm != 0) {
                value[unit][c] = i + c < p.k ? __fmul_rn(__fmul_rn(value[unit][c], factor), scale[unit][c]) : 0.0f;
            }
            if (p.normed != 0 && blockIdx.x == 0 && i + c < p.k) {
                ((float *)p.normed)[i + c] = value[unit][c];
            }
        }
        const act_codes made = act_quantized(value[unit]);
        unsigned char *group = row_room() + i / 32 * GROUP_BYTES;
        if (i < p.n_groups * 32) {
            act_store(made, 0, group, group + 32, HAS_HALVES ? group + 48 : 0);
        }
    }
    __syncthreads();
}

/* The one row, from its records. */
static __device__ __forceinline__ void keep_row(const kvs_matmul_params &p)
{
    constexpr unsigned int CHUNKS = GROUP_BYTES / 16;
    for (unsigned int i = threadIdx.x; i < p.n_groups * CHUNKS; i += THREADS) {
        const unsigned int group = i / CHUNKS, chunk = i % CHUNKS;
        const unsigned int at = chunk < 2 ? chunk * 16 : chunk == 2 ? KVS_ACT_WHOLE_AT : KVS_ACT_HALVES_AT;
        *(uint4 *)(row_room() + i * 16) = *(const uint4 *)((const unsigned char *)p.records +
                                                           (unsigned long long)group * KVS_ACT_RECORD_BYTES + at);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, KVS_ROWS > KVS_ACT_TILE ? 1 : IS_ONE_ROW ? 3 : 2)
    matmul(const kvs_matmul_narrow_params narrow)
{
    const kvs_matmul_params &p = narrow.product;
    kvs_let_next_begin();
    if (KVS_EXPERTS) {
        kvs_wait_for_previous();
    }
    ring<KVS_STAGES> stages;
    stages.begin();
    feeder fed = {blockIdx.x, 0, 0};
    fed.seek(p);
#pragma unroll 1
    for (unsigned int slot = 0; slot < KVS_STAGES; slot++) {
        fed.feed(p, stages, slot);
    }
    kvs_wait_for_previous();
    if (is_formed_apart(narrow.rows)) {
        form_row(narrow.rows);
    } else {
        if (narrow.rows.records != 0) {
            form_records(narrow);
        }
        if (IS_ONE_ROW) {
            keep_row(p);
        }
    }
    for (unsigned int index = blockIdx.x, turn = 0; index < p.n_items; index += gridDim.x, turn++) {
        const item_t item = find_item(p, index);
        const unsigned int slice = slice_of(turn);
#pragma unroll 1
        for (unsigned int run = 0; run < RUNS; run++) {
            sums_t sums = {};
            if (item.is_used) {
                BY_TYPE(item.part, add_run(p, fed, stages, sums, slice, item.first_row))
            }
            put_sums(sums_room(turn, slice) + run * KVS_PANELS * KVS_ROWS * ROWS, sums);
        }
        store_item(p, item, turn);
    }
}
