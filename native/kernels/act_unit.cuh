/* act_unit.cuh: rows of activations, normed and gated if so wished, as 8-bit codes with one scale to 32 values: 1,024 values of a row
 * by a block of 256 threads.
 *
 * Order: the sum of squares of a row is one chain of fused multiply-adds for each k modulo 1024, k rising, then the tree of
 * kvs_warp_sum over 32 of them side by side, and that tree over the 32 results; of a group, as in norm.cu, a chain a lane, k rising
 * by 32, then the tree. A gate multiplies behind the norm, as in glu.cu. Scale: largest magnitude / 127; code: round to nearest even
 * (x * (127 / largest)); a group below 1e-30 counts as zeros; one with a value that is no number has a NaN for its scale.
 * Twin: native/backends/cpu/act.c.
 */
#ifndef KVS_KERNELS_ACT_UNIT_CUH
#define KVS_KERNELS_ACT_UNIT_CUH

#include "act_record.h"
#include "weight_math.cuh"
#include "weight_params.h"

#define KVS_ACT_UNIT_THREADS 256
#define KVS_ACT_UNIT_VALUES 1024
#define KVS_ACT_LANE_VALUES (KVS_ACT_UNIT_VALUES / KVS_ACT_UNIT_THREADS)

static __device__ float act_factor(const kvs_act_params &p, float sum, unsigned int n)
{
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), p.eps)));
}

/* Four values from i on; behind k they are zeros. */
static __device__ __forceinline__ void act_load(float (&to)[KVS_ACT_LANE_VALUES], const float *from, unsigned int i, unsigned int k,
                                                bool is_aligned)
{
    if (is_aligned && i + KVS_ACT_LANE_VALUES <= k) {
        const float4 all = *(const float4 *)(from + i);
        to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
        return;
    }
#pragma unroll
    for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
        to[c] = i + c < k ? from[i + c] : 0.0f;
    }
}

static __device__ __forceinline__ bool act_is_aligned(const void *at)
{
    return (unsigned long long)at % sizeof(float4) == 0;
}

/* Of the whole row, from the sums of squares of its values modulo 1024. A thread has four chains side by side, so eight threads have what
 * the first tree adds. All threads come here. */
static __device__ float act_factor_of(const kvs_act_params &p, float (&sums)[KVS_ACT_LANE_VALUES])
{
    __shared__ float room[32];
    for (int width = 4; width != 0; width /= 2) {
#pragma unroll
        for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
            sums[c] = __fadd_rn(sums[c], __shfl_xor_sync(KVS_FULL_WARP, sums[c], width));
        }
    }
    if (threadIdx.x % 8 == 0) {
        room[threadIdx.x / 8] = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
    }
    __syncthreads();
    return act_factor(p, kvs_warp_sum(room[threadIdx.x % 32]), p.k);
}

static __device__ __forceinline__ void act_add_squares(float (&sums)[KVS_ACT_LANE_VALUES], const float (&value)[KVS_ACT_LANE_VALUES])
{
#pragma unroll
    for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
        sums[c] = __fmaf_rn(value[c], value[c], sums[c]);
    }
}

static __device__ float act_row_factor(const kvs_act_params &p, const float *x)
{
    const bool is_aligned = act_is_aligned(x);
    float sums[KVS_ACT_LANE_VALUES] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 5
    for (unsigned int i = threadIdx.x * KVS_ACT_LANE_VALUES; i < p.k; i += KVS_ACT_UNIT_VALUES) {
        float value[KVS_ACT_LANE_VALUES];
        act_load(value, x, i, p.k, is_aligned);
        act_add_squares(sums, value);
    }
    return act_factor_of(p, sums);
}

/* Of the group of the value first + 4 * threadIdx.x; groups of the block's values are dealt to warps. */
static __device__ float act_group_factor(const kvs_act_params &p, const float *x, unsigned int first)
{
    __shared__ float factors[KVS_ACT_UNIT_VALUES / 32];
    const unsigned int lane = threadIdx.x % 32;
    for (unsigned int group = threadIdx.x / 32; group < KVS_ACT_UNIT_VALUES / p.group; group += KVS_ACT_UNIT_THREADS / 32) {
        float sum = 0.0f;
        if (first + group * p.group < p.k) {
            for (unsigned int i = lane; i < p.group; i += 32) {
                const float value = x[first + group * p.group + i];
                sum = __fmaf_rn(value, value, sum);
            }
        }
        sum = kvs_warp_sum(sum);
        if (lane == 0) {
            factors[group] = act_factor(p, sum, p.group);
        }
    }
    __syncthreads();
    return factors[threadIdx.x * KVS_ACT_LANE_VALUES / p.group];
}

/* What a thread has of the codes of a group of 32 values, which eight threads form: those of values 4q .. 4q+3 of thread q, and what the
 * first thread has of all: the scale, and sums of the first and the last 16 codes. */
struct act_codes {
    unsigned int codes;
    float d;
    int low;
    int high;
};

static __device__ __forceinline__ act_codes act_quantized(const float (&value)[KVS_ACT_LANE_VALUES])
{
    unsigned int largest = 0; /* magnitudes order as their bits do, NaNs on top */
#pragma unroll
    for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
        const unsigned int magnitude = __float_as_uint(value[c]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    for (int width = 4; width != 0; width /= 2) {
        const unsigned int other = __shfl_xor_sync(KVS_FULL_WARP, largest, width);
        largest = other > largest ? other : largest;
    }
    const float amax = __uint_as_float(largest);
    act_codes made = {0, 0.0f, 0, 0};
    float inverse = 0.0f;
    if (largest >= KVS_INFINITY_BITS) {
        made.d = __uint_as_float(0x7fc00000u);
    } else if (amax >= 1e-30f) {
        made.d = __fdiv_rn(amax, 127.0f);
        inverse = __fdiv_rn(127.0f, amax);
    }
#pragma unroll
    for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
        const int code = inverse != 0.0f ? __float2int_rn(__fmul_rn(value[c], inverse)) : 0;
        made.codes |= ((unsigned int)code & 255u) << (8 * c);
        made.low += code;
    }
    made.low += __shfl_xor_sync(KVS_FULL_WARP, made.low, 1);
    made.low += __shfl_xor_sync(KVS_FULL_WARP, made.low, 2);
    made.high = __shfl_xor_sync(KVS_FULL_WARP, made.low, 4);
    return made;
}

/* Into a record: 8 bytes to a lane from `codes` on, `whole` and `halves` those of the slot pair. */
static __device__ __forceinline__ void act_store(const act_codes &made, unsigned int in_pair, unsigned char *codes, unsigned char *whole,
                                                 unsigned char *halves)
{
    const unsigned int q = threadIdx.x % 8;
    *(unsigned int *)(codes + q % 4 * 8 + q / 4 * 4) = made.codes;
    if (q == 0) {
        ((float *)whole)[in_pair] = made.d;
        ((int *)whole)[in_pair + 2] = made.low + made.high;
    }
    if (q == 0 && halves != 0) {
        ((int *)halves)[in_pair] = made.low;
        ((int *)halves)[in_pair + 2] = made.high;
    }
}

static __device__ __forceinline__ unsigned int kvs_act_units(const kvs_act_params &p)
{
    return (p.n_groups * 32 + KVS_ACT_UNIT_VALUES - 1) / KVS_ACT_UNIT_VALUES;
}

/* Unit `unit` of a slot, from its row, to its records. All threads of the block come here; the norm of a row is formed anew for each
 * unit. */
static __device__ void kvs_act_unit(const kvs_act_params &p, unsigned int slot, unsigned int row, unsigned int unit)
{
    const float *x = (const float *)p.x + (unsigned long long)row * p.x_stride;
    const float *gate = p.gate != 0 ? (const float *)p.gate + (unsigned long long)row * p.x_stride : 0;
    const float *norm = (const float *)p.norm;
    const unsigned int first = unit * KVS_ACT_UNIT_VALUES, i = first + threadIdx.x * KVS_ACT_LANE_VALUES;
    float value[KVS_ACT_LANE_VALUES], scale[KVS_ACT_LANE_VALUES], opened[KVS_ACT_LANE_VALUES];
    act_load(value, x, i, p.k, act_is_aligned(x));
    if (norm != 0) {
        act_load(scale, norm, p.group != 0 ? i % p.group : i, p.group != 0 ? p.group : p.k, act_is_aligned(norm));
    }
    if (gate != 0) {
        act_load(opened, gate, i, p.k, act_is_aligned(gate));
    }
    if (norm != 0) {
        const float factor = p.group != 0 ? act_group_factor(p, x, first) : act_row_factor(p, x);
#pragma unroll
        for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
            value[c] = __fmul_rn(__fmul_rn(value[c], factor), scale[c]);
        }
    }
#pragma unroll
    for (unsigned int c = 0; c < KVS_ACT_LANE_VALUES; c++) {
        if (gate != 0) {
            value[c] = __fmul_rn(p.is_sigmoid ? kvs_sigmoid(opened[c]) : kvs_silu(opened[c]), value[c]);
        }
        if (i + c >= p.k) {
            value[c] = 0.0f;
        } else if (p.normed != 0) {
            ((float *)p.normed)[(unsigned long long)slot * p.k + i + c] = value[c];
        }
    }
    if (p.records != 0) {
        const act_codes made = act_quantized(value);
        const unsigned int in_tile = slot % KVS_ACT_TILE, pair_at = in_tile / 2 * 16;
        unsigned char *record = (unsigned char *)p.records +
                                ((unsigned long long)(slot / KVS_ACT_TILE) * p.n_groups + i / 32) * KVS_ACT_RECORD_BYTES;
        if (i < p.n_groups * 32) {
            act_store(made, in_tile % 2, record + in_tile * 32, record + KVS_ACT_WHOLE_AT + pair_at,
                      record + KVS_ACT_HALVES_AT + pair_at);
        }
    }
}

#endif
