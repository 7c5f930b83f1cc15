/* decode_body.h: vector decoding of one row; included after vec_avx2.h or vec_avx512.h.
 *
 * A head row has a multiple of 16 values in the float types and of 32 in the others, so no vector is cut. */
#ifndef KVS_NATIVE_CPU_DECODE_BODY_H
#define KVS_NATIVE_CPU_DECODE_BODY_H

#include "backends/cpu/encode.h"

/* What a nibble stands for before scaling. */
static const float nibble_plain[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float nibble_centred[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

static void decode_f32(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high, (void)scales;
    memcpy(x, codes, n * sizeof *x);
}

static void decode_f16(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i += V_WIDTH) {
        v_store(x + i, v_load_f16(codes + 2 * i));
    }
}

static void decode_bf16(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high, (void)scales;
    for (uint32_t i = 0; i < n; i += V_WIDTH) {
        v_store(x + i, v_load_bf16(codes + 2 * i));
    }
}

static void decode_q8_0(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    for (; n != 0; n -= 32, codes += 32, scales += 2, x += 32) {
        vf d = v_set1_f16(scales);
        for (uint32_t i = 0; i < 32; i += V_WIDTH) {
            v_store(x + i, v_mul(d, v_convert(v_load_i8(codes + i))));
        }
    }
}

static inline void decode_scaled_nibbles(const float *values, const uint8_t *codes, const uint8_t *scales,
                                         uint32_t n, float *x)
{
    const v_table table = v_table16(values);
    for (; n != 0; n -= 32, codes += 16, scales += 2, x += 32) {
        vf d = v_set1_f16(scales);
        for (uint32_t i = 0; i < 16; i += V_WIDTH) {
            vi pair = v_load_u8(codes + i);
            v_store(x + i, v_mul(d, v_lookup(&table, pair)));
            v_store(x + i + 16, v_mul(d, v_lookup(&table, v_shr(pair, 4))));
        }
    }
}

static void decode_q4_0(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    decode_scaled_nibbles(nibble_centred, codes, scales, n, x);
}

static void decode_iq4_nl(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    decode_scaled_nibbles(kvs_iq4_nl_values, codes, scales, n, x);
}

static void decode_q4_1(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    (void)high;
    const v_table table = v_table16(nibble_plain);
    for (; n != 0; n -= 32, codes += 16, scales += 4, x += 32) {
        vf d = v_set1_f16(scales), low = v_set1_f16(scales + 2);
        for (uint32_t i = 0; i < 16; i += V_WIDTH) {
            vi pair = v_load_u8(codes + i);
            v_store(x + i, v_fma(d, v_lookup(&table, pair), low));
            v_store(x + i + 16, v_fma(d, v_lookup(&table, v_shr(pair, 4)), low));
        }
    }
}

/* Five-bit quants of values i.. and i + 16.. of a block. */
static inline void load_q5(const uint8_t *codes, const uint8_t *high, uint32_t i, vf out[2])
{
    uint32_t bits;
    memcpy(&bits, high, sizeof bits);
    vi pair = v_load_u8(codes + i);
    out[0] = v_convert(v_or(v_and(pair, 15), v_high_bits(bits >> i)));
    out[1] = v_convert(v_or(v_shr(pair, 4), v_high_bits(bits >> (i + 16))));
}

static void decode_q5_0(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    const vf centre = v_set1(16.0f);
    for (; n != 0; n -= 32, codes += 16, high += 4, scales += 2, x += 32) {
        vf d = v_set1_f16(scales);
        for (uint32_t i = 0; i < 16; i += V_WIDTH) {
            vf quants[2];
            load_q5(codes, high, i, quants);
            v_store(x + i, v_mul(d, v_sub(quants[0], centre)));
            v_store(x + i + 16, v_mul(d, v_sub(quants[1], centre)));
        }
    }
}

static void decode_q5_1(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)
{
    for (; n != 0; n -= 32, codes += 16, high += 4, scales += 4, x += 32) {
        vf d = v_set1_f16(scales), low = v_set1_f16(scales + 2);
        for (uint32_t i = 0; i < 16; i += V_WIDTH) {
            vf quants[2];
            load_q5(codes, high, i, quants);
            v_store(x + i, v_fma(d, quants[0], low));
            v_store(x + i + 16, v_fma(d, quants[1], low));
        }
    }
}

static inline kvs_decode_fn decode_select(int32_t type)
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

#endif
