/* numeric.cuh: numbers on the device, with the bits that the host's code gives them.
 *
 * Order: as native/backends/cpu/mathf.h and half.h state it; files that include this are compiled without contraction.
 */
#ifndef KVS_KERNELS_NUMERIC_CUH
#define KVS_KERNELS_NUMERIC_CUH

typedef unsigned char kvs_u8;
typedef unsigned short kvs_u16;
typedef unsigned int kvs_u32;
typedef unsigned long long kvs_u64;

#define KVS_FULL_WARP 0xffffffffu
#define KVS_NAN_BITS 0x7fc00000u
#define KVS_INFINITY_BITS 0x7f800000u

__device__ inline float kvs_exp(float x)
{
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = fmaf(x, 1.44269504f, 12582912.0f);
    const float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.693145752f, x);
    r = fmaf(n, -1.42860682e-6f, r);
    float p = fmaf(1.98412698e-4f, r, 1.38888889e-3f);
    p = fmaf(p, r, 8.33333333e-3f);
    p = fmaf(p, r, 4.16666667e-2f);
    p = fmaf(p, r, 1.66666667e-1f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* Two exact factors, so that results fade into subnormals with one rounding. */
    const kvs_u32 exponent = __float_as_uint(shifted) - 0x4b400000u;
    const kvs_u32 half = ((exponent + 256u) >> 1) - 128u;
    const kvs_u32 rest = exponent - half;
    return p * __uint_as_float((half + 127u) << 23) * __uint_as_float((rest + 127u) << 23);
}

__device__ inline float kvs_sigmoid(float x)
{
    return 1.0f / (1.0f + kvs_exp(-x));
}

__device__ inline float kvs_silu(float x)
{
    return x / (1.0f + kvs_exp(-x));
}

__device__ inline float kvs_bf16_to_f32(kvs_u32 half)
{
    return __uint_as_float(half << 16);
}

#ifdef __CUDACC__
__device__ inline float kvs_f16_to_f32(kvs_u32 half)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((kvs_u16)half));
    return value;
}
#else
__device__ inline float kvs_f16_to_f32(kvs_u32 half)
{
    const kvs_u32 sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) {
        return __uint_as_float(sign | KVS_INFINITY_BITS | (rest > 0x7c00u ? 0x00400000u : 0u) | (rest & 0x3ffu) << 13);
    }
    if (rest >= 0x0400u) {
        return __uint_as_float(sign | ((rest << 13) + 0x38000000u));
    }
    return __uint_as_float(sign | __float_as_uint((float)rest * 5.9604644775390625e-8f));
}
#endif

/* The conversion instruction would drop the payload of a NaN. */
__device__ inline kvs_u16 kvs_f32_to_f16(float value)
{
    const kvs_u32 bits = __float_as_uint(value);
    const kvs_u32 sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > KVS_INFINITY_BITS) {
        return (kvs_u16)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    }
    if (rest >= 0x477ff000u) { /* 65520 and more round to infinity */
        return (kvs_u16)(sign | 0x7c00u);
    }
    if (rest < 0x38800000u) {
        /* Below the smallest normal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits. */
        return (kvs_u16)(sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u));
    }
    return (kvs_u16)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13));
}

__device__ inline kvs_u16 kvs_f32_to_bf16(float value)
{
    const kvs_u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > KVS_INFINITY_BITS) {
        return (kvs_u16)(bits >> 16 | 0x40u);
    }
    return (kvs_u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Bytes 0 .. 3 of a word as floats, less `offset`: 2^23 + byte is an exact float whose low bits are the byte. */
__device__ inline void kvs_bytes_to_f32(kvs_u32 bytes, float offset, float *values)
{
    const float base = 8388608.0f + offset;
    values[0] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440u)) - base;
    values[1] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7441u)) - base;
    values[2] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7442u)) - base;
    values[3] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7443u)) - base;
}

#endif
