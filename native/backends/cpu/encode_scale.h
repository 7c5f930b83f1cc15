/* encode_scale.h: what all encoders and decoders share: scales in memory, the IQ4_NL table and its refit. */
#ifndef KVS_NATIVE_CPU_ENCODE_SCALE_H
#define KVS_NATIVE_CPU_ENCODE_SCALE_H

#include "backends/cpu/half.h"

#include <float.h>

static const float kvs_iq4_nl_values[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f,
                                            -22.0f,  -10.0f,  1.0f,   13.0f,  25.0f,  38.0f,
                                            53.0f,   69.0f,   89.0f,  113.0f};

static inline void kvs_put_u16(uint8_t *bytes, uint16_t value)
{
    memcpy(bytes, &value, sizeof value);
}

static inline uint16_t kvs_get_u16(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static inline float kvs_get_f16(const uint8_t *bytes)
{
    return kvs_f16_to_f32(kvs_get_u16(bytes));
}

/* Processors differ in the sign of the NaN that inf - inf makes, so a scale that is NaN has one pattern. */
static inline void kvs_put_scale(uint8_t *bytes, float scale)
{
    kvs_put_u16(bytes, scale != scale ? 0x7e00u : kvs_f32_to_f16(scale));
}

/* A scale so small that its inverse overflows is stored as zero: its quants are zero too. */
static inline float kvs_inverse_scale(float scale)
{
    const float inverse = 1.0f / scale;
    return inverse > FLT_MAX || inverse < -FLT_MAX ? 0.0f : inverse;
}

/* The scale that minimises the squared error, weighted with the squares of the values, for the chosen entries. */
static inline float kvs_iq4_nl_refit(const float *x, const uint32_t *quants)
{
    float product = 0.0f, square = 0.0f;
    for (uint32_t i = 0; i < 32; i++) {
        float entry = kvs_iq4_nl_values[quants[i]];
        float weighted = x[i] * x[i] * entry;
        product += weighted * x[i];
        square += weighted * entry;
    }
    return square == 0.0f ? 0.0f : product / square;
}

#endif
