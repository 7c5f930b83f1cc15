/* weight_math.cuh: small numbers, the softplus whose bits are ours (native/backends/cpu/mathf.h), and sums in one order, for
 * kernels of the weight side. */
#ifndef KVS_KERNELS_WEIGHT_MATH_H
#define KVS_KERNELS_WEIGHT_MATH_H

#include "numeric.cuh"

/* 2^(code - 128); the two smallest are subnormal. */
__device__ __forceinline__ float kvs_e8m0_half(unsigned int code)
{
    return __uint_as_float(code < 2 ? 0x00200000u << code : (code - 1) << 23);
}

/* Half of a float of 4 exponent and 3 mantissa bits: as bits of a float16 it stands for its value less 8 powers of two. */
__device__ __forceinline__ float kvs_ue4m3_half(unsigned int code)
{
    return kvs_f16_to_f32(code << 7) * 128.0f;
}

/* Natural logarithm of a finite number of at least 1. */
__device__ __forceinline__ double kvs_log_above_one(double x)
{
    unsigned long long bits = (unsigned long long)__double_as_longlong(x);
    double exponent = (double)(long long)(bits >> 52) - 1023.0;
    double m = __longlong_as_double((long long)((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1.0;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    double p = 1.0 / 21.0;
    for (int k = 19; k >= 1; k -= 2) {
        p = p * z + 1.0 / (double)k;
    }
    return exponent * 0.69314718055994530942 + 2.0 * s * p;
}

__device__ __forceinline__ float kvs_softplus(float x)
{
    if (!(x <= 20.0f)) {
        return x;
    }
    const double e = (double)kvs_exp(x);
    const double sum = 1.0 + e;
    return sum == 1.0 ? (float)e : (float)(kvs_log_above_one(sum) * (e / (sum - 1.0)));
}

/* The sum of a warp in every lane, by halves: one tree, whatever the lanes hold. */
__device__ __forceinline__ float kvs_warp_sum(float x)
{
    for (int width = 16; width != 0; width /= 2) {
        x = __fadd_rn(x, __shfl_xor_sync(KVS_FULL_WARP, x, width));
    }
    return x;
}

/* The sum of a block, whose threads are a multiple of 32, in every thread: warps in order. `room`: a float to a warp. */
__device__ __forceinline__ float kvs_block_sum(float x, float *room)
{
    x = kvs_warp_sum(x);
    if (threadIdx.x % 32 == 0) {
        room[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = room[0];
    for (unsigned int w = 1; w < blockDim.x / 32; w++) {
        sum = __fadd_rn(sum, room[w]);
    }
    return sum;
}

#endif
