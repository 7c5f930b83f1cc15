/* act_values.cuh: values of a row of activations as products take them: normed and gated if so wished. Blocks of KVS_ACT_THREADS.
 *
 * Order: act_unit.cuh states it.
 */
#ifndef KVS_KERNELS_ACT_VALUES_CUH
#define KVS_KERNELS_ACT_VALUES_CUH

#include "weight_math.cuh"
#include "weight_params.h"

#define KVS_ACT_THREADS 1024

static __device__ float factor_of(const kvs_act_params &p, float sum, unsigned int n)
{
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n), p.eps)));
}

static __device__ float row_factor(const kvs_act_params &p, const float *x)
{
    __shared__ float room[KVS_ACT_THREADS / 32];
    float sum = 0.0f;
#pragma unroll 8
    for (unsigned int i = threadIdx.x; i < p.k; i += KVS_ACT_THREADS) {
        sum = __fmaf_rn(x[i], x[i], sum);
    }
    sum = kvs_warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        room[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    return factor_of(p, kvs_warp_sum(room[threadIdx.x % 32]), p.k);
}

/* Of the group of value first + threadIdx.x; groups of the block's values are dealt to warps. All threads come here. */
static __device__ float group_factor(const kvs_act_params &p, const float *x, unsigned int first)
{
    __shared__ float factors[KVS_ACT_THREADS / 32];
    const unsigned int lane = threadIdx.x % 32;
    __syncthreads();
    for (unsigned int group = threadIdx.x / 32; group < KVS_ACT_THREADS / p.group; group += KVS_ACT_THREADS / 32) {
        float sum = 0.0f;
        if (first + group * p.group < p.k) {
            for (unsigned int i = lane; i < p.group; i += 32) {
                const float value = x[first + group * p.group + i];
                sum = __fmaf_rn(value, value, sum);
            }
        }
        sum = kvs_warp_sum(sum);
        if (lane == 0) {
            factors[group] = factor_of(p, sum, p.group);
        }
    }
    __syncthreads();
    return factors[threadIdx.x / p.group];
}

/* Value i of the row as the product takes it. */
static __device__ float value_of(const kvs_act_params &p, const float *x, const float *gate, float factor, unsigned int i)
{
    const float *norm = (const float *)p.norm;
    float value = x[i];
    if (norm != 0) {
        value = __fmul_rn(__fmul_rn(value, factor), norm[p.group != 0 ? i % p.group : i]);
    }
    if (gate != 0) {
        value = __fmul_rn(p.is_sigmoid ? kvs_sigmoid(gate[i]) : kvs_silu(gate[i]), value);
    }
    return value;
}

#endif
