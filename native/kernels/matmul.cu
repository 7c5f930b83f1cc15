/* matmul.cu: activations of 8 bits times quantized weights, with the integer matrix products of the hardware.
 *
 * Kernel matmul(kvs_matmul_params). Macros: KVS_T0, KVS_T1, KVS_T2 types of the parts (those of part 0 where there are fewer), KVS_TILES tiles of 8 rows to a
 * block (1, 2, 4, 8), KVS_SWIGLU 1: parts 0 and 1 are gate and up, KVS_EXPERTS 1: tiles belong to experts (KVS_TILES 1).
 * Grid: n_row_tiles * panels of all parts (with swiglu of part 0), row tiles fastest, so that neighbours in time read the same
 * panel. Block: 256. No dynamic shared memory. Architecture: 75.
 * Order, for every number of rows: warp w takes units w, w + 8, w + 16, ... of the panel; in it groups rise, and for each group
 * acc = fma(scale of weights * scale of activations, dot, acc), then, for types with a minimum m, acc = fma(m, scale of
 * activations * sum of codes, acc); types with 16 values to a scale do both halves in order. The eight sums are added in order
 * of the warps. Dots are exact, so nothing depends on which instruction forms them.
 * Twin: native/backends/cpu/matmul_reference.c, whose sum is one chain.
 */
#include "act_record.h"
#include "weight_params.h"
#include "weight_unit.cuh"

#define WARPS 8
#define ROWS 16 /* of a panel */
/* Adding an integer below 2^22 to the bits of 1.5 * 2^23 makes a float of it. */
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f

typedef float sums_t[KVS_TILES][4];

/* c += a b: c has rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next. */
static __device__ __forceinline__ void product_32(int (&c)[4], const unsigned int (&a)[4], uint2 b)
{
#ifndef __CUDACC__
    host_product(c, a, &b.x, 2);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
            : "r"(a[i]), "r"(i < 2 ? b.x : b.y));
    }
#endif
}

static __device__ __forceinline__ void product_16(int (&c)[4], unsigned int low_rows, unsigned int high_rows, unsigned int b)
{
#ifndef __CUDACC__
    const unsigned int a[2] = {low_rows, high_rows};
    host_product(c, a, &b, 1);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(low_rows), "r"(high_rows), "r"(b));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(low_rows), "r"(b));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[2]), "+r"(c[3])
        : "r"(high_rows), "r"(b));
#endif
}

/* What stands in the accumulator before a dot product: codes count from the offset. */
template <int TYPE> __device__ __forceinline__ void begin_dot(int (&c)[4], int first_count, int second_count)
{
    c[0] = c[2] = MAGIC_BITS - kvs_form_offset(TYPE) * first_count;
    c[1] = c[3] = MAGIC_BITS - kvs_form_offset(TYPE) * second_count;
}

__device__ __forceinline__ void add_dots(float (&sums)[4], const int (&c)[4], const float (&scale)[2], const float (&d)[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float dot = __fsub_rn(__int_as_float(c[i]), MAGIC);
        sums[i] = __fmaf_rn(__fmul_rn(scale[i / 2], d[i % 2]), dot, sums[i]);
    }
}

__device__ __forceinline__ void add_minima(float (&sums)[4], const float (&minimum)[2], const float (&d)[2], int first_count,
                                           int second_count)
{
    const float total[2] = {__fmul_rn(d[0], (float)first_count), __fmul_rn(d[1], (float)second_count)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums[i] = __fmaf_rn(minimum[i / 2], total[i % 2], sums[i]);
    }
}

/* Group j of a unit, by the record of one tile. */
template <int TYPE>
__device__ __forceinline__ void add_group(float (&sums)[4], const kvs_unit<TYPE> &unit, int j, const unsigned int (&a)[4],
                                          const unsigned char *record, unsigned int lane, bool has_slot)
{
    const uint2 b = has_slot ? *(const uint2 *)(record + 8 * lane) : make_uint2(0, 0);
    const int4 whole = *(const int4 *)(record + KVS_ACT_WHOLE_AT + lane % 4 * 16);
    const float d[2] = {__int_as_float(whole.x), __int_as_float(whole.y)};
    constexpr bool HAS_MINIMUM = kvs_form_minimum(TYPE) != KVS_FORM_NO_MINIMUM;
    int c[4];
    if constexpr (!kvs_form_is_halved(TYPE)) {
        const float scale[2] = {kvs_unit_scale<TYPE>(unit, j, 0, 0), kvs_unit_scale<TYPE>(unit, j, 0, 1)};
        begin_dot<TYPE>(c, whole.z, whole.w);
        product_32(c, a, b);
        add_dots(sums, c, scale, d);
        if constexpr (HAS_MINIMUM) {
            const float minimum[2] = {kvs_unit_minimum<TYPE>(unit, j, 0, 0), kvs_unit_minimum<TYPE>(unit, j, 0, 1)};
            add_minima(sums, minimum, d, whole.z, whole.w);
        }
    } else {
        const int4 halves = *(const int4 *)(record + KVS_ACT_HALVES_AT + lane % 4 * 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float scale[2] = {kvs_unit_scale<TYPE>(unit, j, half, 0), kvs_unit_scale<TYPE>(unit, j, half, 1)};
            const int first = half == 0 ? halves.x : halves.z, second = half == 0 ? halves.y : halves.w;
            begin_dot<TYPE>(c, first, second);
            product_16(c, a[2 * half], a[2 * half + 1], half == 0 ? b.x : b.y);
            add_dots(sums, c, scale, d);
            if constexpr (HAS_MINIMUM) {
                const float minimum[2] = {kvs_unit_minimum<TYPE>(unit, j, half, 0), kvs_unit_minimum<TYPE>(unit, j, half, 1)};
                add_minima(sums, minimum, d, first, second);
            }
        }
    }
}

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
                    add_group<TYPE>(sums[tile], unit, j, a, record + (unsigned long long)tile * tile_bytes + j * KVS_ACT_RECORD_BYTES,
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
    if (part == 0 || (part == 1 && KVS_T1 == KVS_T0) || (part == 2 && KVS_T2 == KVS_T0)) {
        sum_panel<KVS_T0>(sums, panel, records, n_groups, n_rows);
    } else if (part == 1 || KVS_T2 == KVS_T1) {
        sum_panel<KVS_T1>(sums, panel, records, n_groups, n_rows);
    } else {
        sum_panel<KVS_T2>(sums, panel, records, n_groups, n_rows);
    }
}

static __device__ unsigned int panel_bytes(unsigned int part, unsigned int n_groups)
{
    const int type = part == 0 ? KVS_T0 : part == 1 ? KVS_T1 : KVS_T2;
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
