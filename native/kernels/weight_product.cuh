/* weight_product.cuh: one group of quantized weights times one tile of activations.
 *
 * Order: acc = fma(scale of weights * scale of activations, dot, acc), then, for types with a minimum m, acc = fma(m, scale of
 * activations * sum of codes, acc); types with 16 values to a scale do both halves in order. Units of a panel are dealt to
 * KVS_SLICES slices in turn; groups of a slice add up in rising order, and slices in order. Dots are exact, so nothing depends
 * on which instruction forms them.
 */
#ifndef KVS_KERNELS_WEIGHT_PRODUCT_CUH
#define KVS_KERNELS_WEIGHT_PRODUCT_CUH

#include "act_record.h"
#include "weight_unit.cuh"

#define KVS_SLICES 8
/* Adding an integer below 2^22 to the bits of 1.5 * 2^23 makes a float of it. */
#define KVS_MAGIC_BITS 0x4b400000
#define KVS_MAGIC 12582912.0f

/* c += a b: c has rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next. Results have registers of their own, so that
 * what an accumulator begins with may be kept. */
__device__ __forceinline__ void kvs_product_32(int (&c)[4], const unsigned int (&a)[4], uint2 b)
{
#ifndef __CUDACC__
    host_product(c, a, &b.x, 2);
#elif __CUDA_ARCH__ >= 800
    int d[4];
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    c[0] = d[0], c[1] = d[1], c[2] = d[2], c[3] = d[3];
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
            : "r"(a[i]), "r"(i < 2 ? b.x : b.y));
    }
#endif
}

__device__ __forceinline__ void kvs_product_16(int (&c)[4], unsigned int low_rows, unsigned int high_rows, unsigned int b)
{
#ifndef __CUDACC__
    const unsigned int a[2] = {low_rows, high_rows};
    host_product(c, a, &b, 1);
#elif __CUDA_ARCH__ >= 800
    int d[4];
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(low_rows), "r"(high_rows), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
    c[0] = d[0], c[1] = d[1], c[2] = d[2], c[3] = d[3];
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
template <int TYPE> __device__ __forceinline__ void kvs_begin_dot(int (&c)[4], int first_count, int second_count)
{
    c[0] = c[2] = KVS_MAGIC_BITS - kvs_form_offset(TYPE) * first_count;
    c[1] = c[3] = KVS_MAGIC_BITS - kvs_form_offset(TYPE) * second_count;
}

/* COLUMNS: 1 leaves the second of a lane's two rows of activations alone. */
template <int COLUMNS>
__device__ __forceinline__ void kvs_add_dots(float (&sums)[4], const int (&c)[4], const float (&scale)[2], const float (&d)[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i % 2 < COLUMNS) {
            const float dot = __fsub_rn(__int_as_float(c[i]), KVS_MAGIC);
            sums[i] = __fmaf_rn(__fmul_rn(scale[i / 2], d[i % 2]), dot, sums[i]);
        }
    }
}

template <int COLUMNS>
__device__ __forceinline__ void kvs_add_minima(float (&sums)[4], const float (&minimum)[2], const float (&d)[2], int first_count,
                                               int second_count)
{
    const float total[2] = {__fmul_rn(d[0], (float)first_count), __fmul_rn(d[1], (float)second_count)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i % 2 < COLUMNS) {
            sums[i] = __fmaf_rn(minimum[i / 2], total[i % 2], sums[i]);
        }
    }
}

/* What a lane takes of a record. */
template <int TYPE> struct kvs_right {
    uint2 codes;
    int4 whole;
    int4 halves;
};

template <int TYPE>
__device__ __forceinline__ void kvs_load_right(kvs_right<TYPE> &right, const unsigned char *record, unsigned int lane, bool has_slot)
{
    right.codes = has_slot ? *(const uint2 *)(record + 8 * lane) : make_uint2(0, 0);
    right.whole = *(const int4 *)(record + KVS_ACT_WHOLE_AT + lane % 4 * 16);
    if constexpr (kvs_form_is_halved(TYPE)) {
        right.halves = *(const int4 *)(record + KVS_ACT_HALVES_AT + lane % 4 * 16);
    }
}

/* Group j of a unit, by what was loaded of one record. */
template <int TYPE, int COLUMNS, int N>
__device__ __forceinline__ void kvs_add_loaded(float (&sums)[4], const kvs_unit<TYPE> &unit, int j, const unsigned int (&a)[N][4],
                                               const kvs_right<TYPE> &right)
{
    const uint2 b = right.codes;
    const int4 whole = right.whole;
    const float d[2] = {__int_as_float(whole.x), __int_as_float(whole.y)};
    constexpr bool HAS_MINIMUM = kvs_form_minimum(TYPE) != KVS_FORM_NO_MINIMUM;
    int c[4];
    if constexpr (!kvs_form_is_halved(TYPE)) {
        const float scale[2] = {kvs_unit_scale<TYPE>(unit, j, 0, 0), kvs_unit_scale<TYPE>(unit, j, 0, 1)};
        kvs_begin_dot<TYPE>(c, whole.z, whole.w);
#pragma unroll
        for (int i = 0; i < N; i++) {
            kvs_product_32(c, a[i], b);
        }
        kvs_add_dots<COLUMNS>(sums, c, scale, d);
        if constexpr (HAS_MINIMUM) {
            const float minimum[2] = {kvs_unit_minimum<TYPE>(unit, j, 0, 0), kvs_unit_minimum<TYPE>(unit, j, 0, 1)};
            kvs_add_minima<COLUMNS>(sums, minimum, d, whole.z, whole.w);
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float scale[2] = {kvs_unit_scale<TYPE>(unit, j, half, 0), kvs_unit_scale<TYPE>(unit, j, half, 1)};
            const int first = half == 0 ? right.halves.x : right.halves.z, second = half == 0 ? right.halves.y : right.halves.w;
            kvs_begin_dot<TYPE>(c, first, second);
#pragma unroll
            for (int i = 0; i < N; i++) {
                kvs_product_16(c, a[i][2 * half], a[i][2 * half + 1], half == 0 ? b.x : b.y);
            }
            kvs_add_dots<COLUMNS>(sums, c, scale, d);
            if constexpr (HAS_MINIMUM) {
                const float minimum[2] = {kvs_unit_minimum<TYPE>(unit, j, half, 0), kvs_unit_minimum<TYPE>(unit, j, half, 1)};
                kvs_add_minima<COLUMNS>(sums, minimum, d, first, second);
            }
        }
    }
}

/* Group j of a unit, by the record of one tile. */
template <int TYPE>
__device__ __forceinline__ void kvs_add_group(float (&sums)[4], const kvs_unit<TYPE> &unit, int j, const unsigned int (&a)[4],
                                              const unsigned char *record, unsigned int lane, bool has_slot)
{
    kvs_right<TYPE> right;
    kvs_load_right<TYPE>(right, record, lane, has_slot);
    unsigned int left[1][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        left[0][i] = a[i];
    }
    kvs_add_loaded<TYPE, 2, 1>(sums, unit, j, left, right);
}

#endif
