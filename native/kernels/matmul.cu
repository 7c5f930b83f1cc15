/* matmul.cu: activations of 8 bits times quantized weights, with the integer matrix products of the hardware.
 *
 * Kernel matmul(kvs_matmul_params). Macros: KVS_T0 .. KVS_T3 types of the parts (of part 0 where there are fewer), KVS_TILES
 * tiles of 8 rows to a block (1, 2), KVS_SWIGLU 1: parts 0 and 1 are gate and up, KVS_EXPERTS 1: tiles belong to experts
 * (KVS_TILES 1).
 * Grid: n_row_tiles * panels of all parts (with swiglu of part 0), row tiles fastest, so that neighbours in time read the same
 * panel. Block: 256. No dynamic shared memory. Architecture: 75.
 * Order, for every number of rows: that of weight_product.cuh, a slice to a warp; the same as matmul_wide.cu.
 * Twin: native/backends/cpu/matmul_reference.c, whose sum is one chain.
 */
#include "act_record.h"
#include "weight_params.h"
#include "weight_product.cuh"
#include "weight_unit.cuh"

#define WARPS KVS_SLICES
#define ROWS 16 /* of a panel */

typedef float sums_t[KVS_TILES][4];

/* The units of this warp. `records`: of the first tile; tiles behind n_rows are left alone. */
template <int TYPE>
__device__ __forceinline__ void sum_panel(sums_t &sums, const unsigned char *panel, const unsigned char *records,
                                          unsigned int n_groups, unsigned int n_rows)
{
    constexpr int GROUPS = kvs_unit<TYPE>::GROUPS;
    const unsigned int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned int n_units = (n_groups + GROUPS - 1) / GROUPS;
    const unsigned int tile_bytes = n_groups * KVS_ACT_RECORD_BYTES;
#pragma unroll
    for (int tile = 0; tile < KVS_TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[tile][i] = 0.0f;
        }
    }
#pragma unroll(GROUPS == 2 && KVS_TILES < 4 ? 4 : 1)
    for (unsigned int u = warp; u < n_units; u += WARPS) {
        kvs_unit<TYPE> unit;
        kvs_load_unit<TYPE>(unit, panel + (unsigned long long)u * kvs_form_unit_bytes(TYPE), lane);
        const unsigned char *record = records + (unsigned long long)u * GROUPS * KVS_ACT_RECORD_BYTES;
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            unsigned int a[4];
            kvs_unit_group<TYPE>(unit, j, lane, a);
#pragma unroll
            for (int tile = 0; tile < KVS_TILES; tile++) {
                if (tile == 0 || tile * KVS_ACT_TILE < n_rows) {
                    kvs_add_group<TYPE>(sums[tile], unit, j, a, record + (unsigned long long)tile * tile_bytes + j * KVS_ACT_RECORD_BYTES,
                                    lane, tile * KVS_ACT_TILE + lane / 4 < n_rows);
                }
            }
        }
    }
}

/* Parts of one type share its code. */
static __device__ __forceinline__ void sum_part(sums_t &sums, unsigned int part, const unsigned char *panel,
                                                const unsigned char *records, unsigned int n_groups, unsigned int n_rows)
{
    if (part == 0 || (part == 1 && KVS_T1 == KVS_T0) || (part == 2 && KVS_T2 == KVS_T0) || (part == 3 && KVS_T3 == KVS_T0)) {
        sum_panel<KVS_T0>(sums, panel, records, n_groups, n_rows);
    } else if (part == 1 || (part == 2 && KVS_T2 == KVS_T1) || (part == 3 && KVS_T3 == KVS_T1)) {
        sum_panel<KVS_T1>(sums, panel, records, n_groups, n_rows);
    } else if (part == 3 && KVS_T3 != KVS_T2) {
        sum_panel<KVS_T3>(sums, panel, records, n_groups, n_rows);
    } else {
        sum_panel<KVS_T2>(sums, panel, records, n_groups, n_rows);
    }
}

static __device__ unsigned int panel_bytes(unsigned int part, unsigned int n_groups)
{
    const int type = part == 0 ? KVS_T0 : part == 1 ? KVS_T1 : part == 2 ? KVS_T2 : KVS_T3;
    const unsigned int unit_groups = kvs_form_unit_groups(type);
    return (n_groups + unit_groups - 1) / unit_groups * kvs_form_unit_bytes(type);
}

#define VALUES (KVS_TILES * 4 * 32) /* sums of a block, [tile][register][lane] */

typedef float room_t[WARPS][VALUES];

static __device__ void put_sums(room_t &room, const sums_t &sums)
{
#pragma unroll
    for (int tile = 0; tile < KVS_TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            room[threadIdx.x / 32][(tile * 4 + i) * 32 + threadIdx.x % 32] = sums[tile][i];
        }
    }
    __syncthreads();
}

static __device__ float fold_warps(const room_t &room, unsigned int value)
{
    float sum = room[0][value];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        sum = __fadd_rn(sum, room[w][value]);
    }
    return sum;
}

/* What a block works on. */
struct place {
    unsigned int part;
    unsigned int panel;
    unsigned int first_row;
    unsigned int expert;
};

static __device__ float scaled(const kvs_matmul_params &p, const place &at, unsigned int part, unsigned int column, float sum)
{
    const float *scales = (const float *)p.part[part].scales;
    if (scales == 0) {
        return sum;
    }
    return __fmul_rn(sum, scales[KVS_EXPERTS ? at.expert : column / p.part[part].scale_run]);
}

static __device__ const unsigned char *find_panel(const kvs_matmul_params &p, const place &at, unsigned int part)
{
    const unsigned long long index = (unsigned long long)at.expert * p.part[part].n_panels + at.panel;
    return (const unsigned char *)p.part[part].panels + index * panel_bytes(part, p.n_groups);
}

/* Value `value` of the block goes where its row and column say; `up` with swiglu alone. */
static __device__ void store(const kvs_matmul_params &p, const place &at, unsigned int value, float sum, float up)
{
    const unsigned int lane = value % 32, i = value / 32 % 4, tile = value / 128;
    const unsigned int row = at.first_row + tile * KVS_ACT_TILE + lane % 4 * 2 + i % 2;
    const unsigned int column = at.panel * ROWS + lane / 4 + i / 2 * 8;
    const kvs_matmul_part_params &part = p.part[at.part];
    if (row >= p.n_rows || column >= part.n) {
        return;
    }
    float *out = (float *)part.out + (unsigned long long)row * part.out_stride + column;
    float y = scaled(p, at, at.part, column, sum);
    if (KVS_SWIGLU) {
        y = __fmul_rn(kvs_silu(y), scaled(p, at, 1, column, up));
    } else if (p.epilogue == KVS_STORE_ADD) {
        y = __fadd_rn(*out, y);
    }
    *out = y;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) matmul(const kvs_matmul_params p)
{
    __shared__ room_t room;
    place at = {0, blockIdx.x / p.n_row_tiles, blockIdx.x % p.n_row_tiles * KVS_TILES * KVS_ACT_TILE, 0};
    if (KVS_EXPERTS) {
        if (at.first_row / KVS_ACT_TILE >= *(const unsigned int *)p.n_tiles_used) {
            return;
        }
        at.expert = ((const unsigned int *)p.tile_experts)[at.first_row / KVS_ACT_TILE];
    }
    while (!KVS_SWIGLU && at.panel >= p.part[at.part].n_panels) {
        at.panel -= p.part[at.part].n_panels;
        at.part++;
    }
    const unsigned char *records = (const unsigned char *)p.records + (unsigned long long)(at.first_row / KVS_ACT_TILE) *
                                                                          p.n_groups * KVS_ACT_RECORD_BYTES;
    const unsigned int n_rows = p.n_rows - at.first_row;
    sums_t sums;
    sum_part(sums, at.part, find_panel(p, at, at.part), records, p.n_groups, n_rows);
    put_sums(room, sums);
#if KVS_SWIGLU
    constexpr int MINE = (VALUES + WARPS * 32 - 1) / (WARPS * 32);
    float gate[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const unsigned int value = i * WARPS * 32 + threadIdx.x;
        gate[i] = value < VALUES ? fold_warps(room, value) : 0.0f;
    }
    __syncthreads();
    sum_part(sums, 1, find_panel(p, at, 1), records, p.n_groups, n_rows);
    put_sums(room, sums);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const unsigned int value = i * WARPS * 32 + threadIdx.x;
        if (value < VALUES) {
            store(p, at, value, gate[i], fold_warps(room, value));
        }
    }
#else
    for (unsigned int value = threadIdx.x; value < VALUES; value += WARPS * 32) {
        store(p, at, value, fold_warps(room, value), 0.0f);
    }
#endif
}
