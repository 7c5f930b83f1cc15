/* encode_reference.c: the plain encoders and decoders that define what the vector twins must produce.
 *
 * Order: a maximum or minimum keeps the first of equal values and never takes a NaN; products and sums are separate
 * float32 operations; the refit of IQ4_NL sums over values 0, 1, ... 31.
 */
#include "backends/cpu/encode.h"
#include "backends/cpu/encode_scale.h"

#include <math.h>

#define BLOCK 32u

/* Truncate to an integer of [0, high]; what no int32 holds, NaN included, is the lowest quant. */
static uint32_t quant_of(float value, uint32_t high)
{
    if (!(value >= 0.0f && value < 2147483648.0f)) {
        return 0;
    }
    uint32_t quant = (uint32_t)value;
    return quant < high ? quant : high;
}

/* The element of largest magnitude, with its sign. */
static float signed_peak(const float *x)
{
    float peak = 0.0f, amax = 0.0f;
    for (uint32_t i = 0; i < BLOCK; i++) {
        float magnitude = fabsf(x[i]);
        if (magnitude > amax) {
            amax = magnitude;
            peak = x[i];
        }
    }
    return peak;
}

static void store_nibbles(const uint32_t *quants, uint8_t *codes)
{
    for (uint32_t i = 0; i < BLOCK / 2; i++) {
        codes[i] = (uint8_t)((quants[i] & 15u) | (quants[i + BLOCK / 2] & 15u) << 4);
    }
}

static void store_high(const uint32_t *quants, uint8_t *high)
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < BLOCK; i++) {
        bits |= (quants[i] >> 4 & 1u) << i;
    }
    memcpy(high, &bits, sizeof bits);
}

static void encode_f32(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high, (void)scales;
    memcpy(codes, x, n * sizeof *x);
}

static void encode_f16(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i++) {
        kvs_put_u16(codes + 2 * i, kvs_f32_to_f16(x[i]));
    }
}

static void encode_bf16(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i++) {
        kvs_put_u16(codes + 2 * i, kvs_f32_to_bf16(x[i]));
    }
}

/* Half away from zero, without the double rounding of adding 0.5. */
static float round_away(float value)
{
    float magnitude = fabsf(value);
    float whole = truncf(magnitude);
    whole += truncf(2.0f * (magnitude - whole));
    return copysignf(whole, value);
}

static void encode_q8_0(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 32, scales += 2) {
        float d = fabsf(signed_peak(x)) / 127.0f;
        float inverse = kvs_inverse_scale(d);
        for (uint32_t i = 0; i < BLOCK; i++) {
            float quant = round_away(x[i] * inverse);
            codes[i] = quant >= -128.0f && quant <= 127.0f ? (uint8_t)(int8_t)quant : 0x80u;
        }
        kvs_put_scale(scales, d);
    }
}

static void encode_q4_0(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    uint32_t quants[BLOCK];
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, scales += 2) {
        float d = signed_peak(x) / -8.0f;
        float inverse = kvs_inverse_scale(d);
        for (uint32_t i = 0; i < BLOCK; i++) {
            quants[i] = quant_of(x[i] * inverse + 8.5f, 15);
        }
        store_nibbles(quants, codes);
        kvs_put_scale(scales, d);
    }
}

static void encode_q5_0(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    uint32_t quants[BLOCK];
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, high += 4, scales += 2) {
        float d = signed_peak(x) / -16.0f;
        float inverse = kvs_inverse_scale(d);
        for (uint32_t i = 0; i < BLOCK; i++) {
            quants[i] = quant_of(x[i] * inverse + 16.5f, 31);
        }
        store_nibbles(quants, codes);
        store_high(quants, high);
        kvs_put_scale(scales, d);
    }
}

/* Quants of the types with a minimum, which lie in [0, top]. */
static void quants_of_range(const float *x, uint32_t top, uint32_t *quants, uint8_t *scales)
{
    float low = INFINITY, peak = -INFINITY;
    for (uint32_t i = 0; i < BLOCK; i++) {
        low = x[i] < low ? x[i] : low;
        peak = x[i] > peak ? x[i] : peak;
    }
    float d = (peak - low) / (float)top;
    float inverse = kvs_inverse_scale(d);
    for (uint32_t i = 0; i < BLOCK; i++) {
        quants[i] = quant_of((x[i] - low) * inverse + 0.5f, top);
    }
    kvs_put_scale(scales, d);
    kvs_put_scale(scales + 2, low);
}

static void encode_q4_1(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    uint32_t quants[BLOCK];
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, scales += 4) {
        quants_of_range(x, 15, quants, scales);
        store_nibbles(quants, codes);
    }
}

static void encode_q5_1(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    uint32_t quants[BLOCK];
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, high += 4, scales += 4) {
        quants_of_range(x, 31, quants, scales);
        store_nibbles(quants, codes);
        store_high(quants, high);
    }
}

static void encode_iq4_nl(const float *x, uint32_t n, uint8_t *codes, uint8_t *high, uint8_t *scales)
{
    (void)high;
    uint32_t quants[BLOCK];
    for (; n != 0; n -= BLOCK, x += BLOCK, codes += 16, scales += 2) {
        float inverse = kvs_inverse_scale(signed_peak(x) / -127.0f);
        for (uint32_t i = 0; i < BLOCK; i++) {
            /* The number of midpoints at or below the value: a value in the middle takes the upper entry. */
            float scaled = x[i] * inverse;
            quants[i] = 0;
            for (uint32_t entry = 0; entry < 15; entry++) {
                quants[i] += scaled >= 0.5f * (kvs_iq4_nl_values[entry] + kvs_iq4_nl_values[entry + 1]);
            }
        }
        store_nibbles(quants, codes);
        kvs_put_scale(scales, kvs_iq4_nl_refit(x, quants));
    }
}

static void decode_f32(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high, (void)scales;
    memcpy(x, codes, n * sizeof *x);
}

static void decode_f16(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvs_get_f16(codes + 2 * i);
    }
}

static void decode_bf16(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvs_bf16_to_f32(kvs_get_u16(codes + 2 * i));
    }
}

static void decode_q8_0(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvs_get_f16(scales + i / BLOCK * 2) * (float)(int8_t)codes[i];
    }
}

static uint32_t nibble_at(const uint8_t *codes, uint32_t i)
{
    const uint8_t *block = codes + i / BLOCK * 16;
    uint32_t place = i % BLOCK;
    return place < 16 ? block[place] & 15u : block[place - 16] >> 4;
}

static uint32_t high_bit_at(const uint8_t *high, uint32_t i)
{
    uint32_t bits;
    memcpy(&bits, high + i / BLOCK * 4, sizeof bits);
    return (bits >> i % BLOCK & 1u) << 4;
}

static void decode_q4_0(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvs_get_f16(scales + i / BLOCK * 2) * ((float)nibble_at(codes, i) - 8.0f);
    }
}

static void decode_iq4_nl(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvs_get_f16(scales + i / BLOCK * 2) * kvs_iq4_nl_values[nibble_at(codes, i)];
    }
}

static void decode_q4_1(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *scale = scales + i / BLOCK * 4;
        x[i] = fmaf(kvs_get_f16(scale), (float)nibble_at(codes, i), kvs_get_f16(scale + 2));
    }
}

static void decode_q5_0(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t quant = nibble_at(codes, i) | high_bit_at(high, i);
        x[i] = kvs_get_f16(scales + i / BLOCK * 2) * ((float)quant - 16.0f);
    }
}

static void decode_q5_1(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *scale = scales + i / BLOCK * 4;
        uint32_t quant = nibble_at(codes, i) | high_bit_at(high, i);
        x[i] = fmaf(kvs_get_f16(scale), (float)quant, kvs_get_f16(scale + 2));
    }
}

kvs_encode_fn kvs_encode_select_reference(int32_t type)
{
    switch (type) {
    case KVS_TYPE_F32:
        return encode_f32;
    case KVS_TYPE_F16:
        return encode_f16;
    case KVS_TYPE_BF16:
        return encode_bf16;
    case KVS_TYPE_Q8_0:
        return encode_q8_0;
    case KVS_TYPE_Q4_0:
        return encode_q4_0;
    case KVS_TYPE_Q4_1:
        return encode_q4_1;
    case KVS_TYPE_Q5_0:
        return encode_q5_0;
    case KVS_TYPE_Q5_1:
        return encode_q5_1;
    case KVS_TYPE_IQ4_NL:
        return encode_iq4_nl;
    default:
        return NULL;
    }
}

kvs_decode_fn kvs_decode_select_reference(int32_t type)
{
    switch (type) {
    case KVS_TYPE_F32:
        return decode_f32;
    case KVS_TYPE_F16:
        return decode_f16;
    case KVS_TYPE_BF16:
        return decode_bf16;
    case KVS_TYPE_Q8_0:
        return decode_q8_0;
    case KVS_TYPE_Q4_0:
        return decode_q4_0;
    case KVS_TYPE_Q4_1:
        return decode_q4_1;
    case KVS_TYPE_Q5_0:
        return decode_q5_0;
    case KVS_TYPE_Q5_1:
        return decode_q5_1;
    case KVS_TYPE_IQ4_NL:
        return decode_iq4_nl;
    default:
        return NULL;
    }
}
