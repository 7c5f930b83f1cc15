/* half.h: float16 and bfloat16 to and from float32, as the hardware does it: round to nearest even, NaNs quieted with
 * sign and upper payload kept. */
#ifndef KVS_NATIVE_CPU_HALF_H
#define KVS_NATIVE_CPU_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t kvs_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float kvs_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float kvs_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = half & 0x7fffu;
    if (rest >= 0x7c00u) {
        uint32_t quiet = rest > 0x7c00u ? 0x00400000u : 0u;
        return kvs_f32_from_bits(sign | 0x7f800000u | quiet | (rest & 0x3ffu) << 13);
    }
    if (rest >= 0x0400u) {
        return kvs_f32_from_bits(sign | ((rest << 13) + 0x38000000u));
    }
    /* Subnormal: an integer times 2^-24, exact in float32. */
    return kvs_f32_from_bits(sign | kvs_f32_bits((float)rest * 0x1p-24f));
}

static inline uint16_t kvs_f32_to_f16(float value)
{
    uint32_t bits = kvs_f32_bits(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    }
    if (rest >= 0x477ff000u) { /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (rest < 0x38800000u) {
        /* Below the smallest normal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits. */
        float sum = kvs_f32_from_bits(rest) + 0.5f;
        return (uint16_t)(sign | (kvs_f32_bits(sum) - 0x3f000000u));
    }
    uint32_t odd = rest >> 13 & 1u;
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + odd) >> 13));
}

/* 2^(code - 128); the two smallest are subnormal. */
static inline float kvs_e8m0_half_to_f32(uint8_t code)
{
    return kvs_f32_from_bits(code < 2 ? 0x00200000u << code : (uint32_t)(code - 1) << 23);
}

/* Half of the float of 4 exponent bits (bias 7) and 3 mantissa bits in the low 7 bits. All 128 codes are numbers. As bits
 * of a float16 the code stands for its value less 8 powers of two. */
static inline float kvs_ue4m3_half_to_f32(uint8_t code)
{
    return kvs_f16_to_f32((uint16_t)(code << 7)) * 128.0f;
}

static inline float kvs_bf16_to_f32(uint16_t half)
{
    return kvs_f32_from_bits((uint32_t)half << 16);
}

static inline uint16_t kvs_f32_to_bf16(float value)
{
    uint32_t bits = kvs_f32_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(bits >> 16 | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#endif
