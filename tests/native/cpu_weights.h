/* cpu_weights.h: random weights in file layout and random numbers, for the native tests and benchmarks of the CPU kernels. */
#ifndef KVS_TESTS_CPU_WEIGHTS_H
#define KVS_TESTS_CPU_WEIGHTS_H

#include "backends/cpu/half.h"
#include "kvstream/device.h"

#include <stdbool.h>
#include <stdlib.h>

static const int weight_types[] = {
    KVS_TYPE_F32,     KVS_TYPE_F16,    KVS_TYPE_BF16,  KVS_TYPE_Q4_0,    KVS_TYPE_Q4_1,  KVS_TYPE_Q5_0,
    KVS_TYPE_Q5_1,    KVS_TYPE_Q8_0,   KVS_TYPE_Q2_K,  KVS_TYPE_Q3_K,    KVS_TYPE_Q4_K,  KVS_TYPE_Q5_K,
    KVS_TYPE_Q6_K,    KVS_TYPE_IQ1_S,  KVS_TYPE_IQ1_M, KVS_TYPE_IQ2_XXS, KVS_TYPE_IQ2_XS, KVS_TYPE_IQ2_S,
    KVS_TYPE_IQ3_XXS, KVS_TYPE_IQ3_S,  KVS_TYPE_IQ4_NL, KVS_TYPE_IQ4_XS, KVS_TYPE_MXFP4, KVS_TYPE_NVFP4};
#define N_WEIGHT_TYPES (sizeof weight_types / sizeof weight_types[0])

static inline uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Uniform in [-1, 1). */
static inline float random_float(uint64_t *state)
{
    return (float)(next_random(state) >> 40) * 0x1p-23f - 1.0f;
}

static inline void fill_floats(float *values, uint64_t n, uint64_t seed)
{
    for (uint64_t i = 0; i < n; i++) {
        values[i] = random_float(&seed);
    }
}

/* Where a block of a type keeps its float16 scale and minimum; -1: none. The scale of some types lies elsewhere: put_scale. */
static inline void half_places(int type, int *scale, int *minimum)
{
    *minimum = type == KVS_TYPE_Q4_1 || type == KVS_TYPE_Q5_1 || type == KVS_TYPE_Q4_K || type == KVS_TYPE_Q5_K ? 2
               : type == KVS_TYPE_Q2_K                                                                      ? 82
                                                                                                            : -1;
    *scale = type == KVS_TYPE_Q2_K ? 80 : type == KVS_TYPE_Q3_K ? 108 : type == KVS_TYPE_Q6_K ? 208 : 0;
}

static inline void put_half(uint8_t *bytes, float value)
{
    uint16_t half = kvs_f32_to_f16(value);
    memcpy(bytes, &half, 2);
}

/* Give a block of a quantized type the scale `half` (bits of a float16). Types with 8-bit scales get an ordinary one
 * made of some of its bits. */
static inline void put_scale(int type, uint8_t *block, uint16_t half)
{
    int scale, minimum;
    half_places(type, &scale, &minimum);
    if (type == KVS_TYPE_MXFP4) {
        block[0] = (uint8_t)(112 + (half >> 7 & 15)); /* 2^-16 to 2^-1 */
    } else if (type == KVS_TYPE_NVFP4) {
        block[half % 4] = (uint8_t)(half >> 7);
    } else if (type == KVS_TYPE_IQ1_M) {
        for (uint32_t i = 0; i < 4; i++) {
            block[49 + 2 * i] = (uint8_t)((block[49 + 2 * i] & 15u) | (half >> (4 * i) & 15u) << 4);
        }
    } else {
        memcpy(block + scale, &half, 2);
    }
}

/* A [n][k] matrix whose codes are random bits and whose scales and minima are small random numbers; free() it. */
static inline uint8_t *random_weights(int type, uint64_t k, uint64_t n, uint64_t seed)
{
    uint32_t values, bytes;
    kvs_type_block(type, &values, &bytes);
    const uint64_t n_blocks = n * k / values;
    uint8_t *weights = malloc(n_blocks * bytes);
    int scale, minimum;
    half_places(type, &scale, &minimum);
    for (uint64_t b = 0; b < n_blocks; b++) {
        uint8_t *block = weights + b * bytes;
        float value = random_float(&seed);
        if (type == KVS_TYPE_F32) {
            memcpy(block, &value, 4);
        } else if (type == KVS_TYPE_F16) {
            put_half(block, value);
        } else if (type == KVS_TYPE_BF16) {
            uint16_t half = kvs_f32_to_bf16(value);
            memcpy(block, &half, 2);
        } else {
            for (uint32_t i = 0; i < bytes; i++) {
                block[i] = (uint8_t)(next_random(&seed) >> 32);
            }
            put_scale(type, block, kvs_f32_to_f16(value * 0.01f));
            if (minimum >= 0) {
                put_half(block + minimum, random_float(&seed) * 0.01f);
            }
        }
    }
    return weights;
}

#endif
