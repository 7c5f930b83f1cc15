/* decode_body.h: vector decoding; included after vec_avx2.h or vec_avx512.h.
 *
 * Everything is written once for a constant type and inlined. A head row has a multiple of 16 values in the float types
 * and of 32 in the others, so no vector is cut. Rows of a plane lie one after another, so several rows decode as one. */
#ifndef KVS_NATIVE_CPU_DECODE_BODY_H
#define KVS_NATIVE_CPU_DECODE_BODY_H

#include "backends/cpu/encode.h"

#include <stdbool.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* Blocks whose scales are converted together. */
#define SCALE_BATCH 16u

ALWAYS_INLINE bool is_float(int32_t type)
{
    return type == KVS_TYPE_F32 || type == KVS_TYPE_F16 || type == KVS_TYPE_BF16;
}

ALWAYS_INLINE bool has_low(int32_t type)
{
    return type == KVS_TYPE_Q4_1 || type == KVS_TYPE_Q5_1;
}

ALWAYS_INLINE bool has_high(int32_t type)
{
    return type == KVS_TYPE_Q5_0 || type == KVS_TYPE_Q5_1;
}

/* Of a block of the quantized types, or of 16 values of the float types. */
ALWAYS_INLINE uint32_t block_values(int32_t type)
{
    return is_float(type) ? 16 : 32;
}

ALWAYS_INLINE uint32_t block_code_bytes(int32_t type)
{
    return type == KVS_TYPE_F32 ? 64 : is_float(type) || type == KVS_TYPE_Q8_0 ? 32 : 16;
}

ALWAYS_INLINE uint32_t block_scales(int32_t type)
{
    return is_float(type) ? 0 : has_low(type) ? 2 : 1;
}

/* What the low four bits of each lane stand for. */
ALWAYS_INLINE vf nibble_value(int32_t type, vi index)
{
    if (type == KVS_TYPE_IQ4_NL) {
        const v_table table = v_table16(kvs_iq4_nl_values);
        return v_lookup(&table, index);
    }
    return v_nibble(index, has_low(type) ? 0 : 8);
}

ALWAYS_INLINE vf scaled(int32_t type, vf entry, vf d, vf low)
{
    return has_low(type) ? v_fma(d, entry, low) : v_mul(d, entry);
}

/* Five bits as what they stand for. */
ALWAYS_INLINE vf five_bits(int32_t type, vi quant)
{
    return has_low(type) ? v_convert(quant) : v_sub(v_convert(quant), v_set1(16.0f));
}

/* One block. shape: out [block_values / V_WIDTH] */
ALWAYS_INLINE void decode_block(int32_t type, const uint8_t *codes, const uint8_t *high, vf d, vf low, vf *out)
{
    uint32_t bits = 0;
    if (has_high(type)) {
        memcpy(&bits, high, sizeof bits);
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < block_values(type) / V_WIDTH; i++) {
        if (type == KVS_TYPE_F32) {
            out[i] = v_load((const float *)(const void *)(codes + 4 * i * V_WIDTH));
        } else if (type == KVS_TYPE_F16) {
            out[i] = v_load_f16(codes + 2 * i * V_WIDTH);
        } else if (type == KVS_TYPE_BF16) {
            out[i] = v_load_bf16(codes + 2 * i * V_WIDTH);
        } else if (type == KVS_TYPE_Q8_0) {
            out[i] = v_mul(d, v_convert(v_load_i8(codes + i * V_WIDTH)));
        } else {
            /* The first half of a block's values lies in the low nibbles. */
            const uint32_t half = i * V_WIDTH / 16, at = i * V_WIDTH % 16;
            vi quant = v_load_u8(codes + at);
            quant = half == 0 ? quant : v_shr(quant, 4);
            const vf entry =
                has_high(type) ? five_bits(type, v_or(v_and(quant, 15), v_high_bits(bits >> i * V_WIDTH)))
                               : nibble_value(type, quant);
            out[i] = scaled(type, entry, d, low);
        }
    }
}

static inline void convert_scales(const uint8_t *scales, uint32_t n, float *out)
{
    uint32_t i = 0;
    for (; i + V_WIDTH <= n; i += V_WIDTH) {
        v_store(out + i, v_load_f16(scales + 2 * i));
    }
    for (; i < n; i++) {
        out[i] = v_one_f16(scales + 2 * i);
    }
}

ALWAYS_INLINE void decode_values(int32_t type, const uint8_t *codes, const uint8_t *high, const uint8_t *scales,
                                 uint32_t n, float *x)
{
    const uint32_t n_scales = block_scales(type);
    float converted[2 * SCALE_BATCH];
    for (uint32_t left = n / block_values(type), batch; left != 0; left -= batch) {
        batch = left < SCALE_BATCH ? left : SCALE_BATCH;
        convert_scales(scales, batch * n_scales, converted);
        for (uint32_t block = 0; block < batch; block++) {
            vf out[32 / V_WIDTH];
            const vf d = v_set1(n_scales == 0 ? 1.0f : converted[block * n_scales]);
            const vf low = v_set1(n_scales < 2 ? 0.0f : converted[block * n_scales + 1]);
            decode_block(type, codes, high, d, low, out);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < block_values(type) / V_WIDTH; i++) {
                v_store(x + i * V_WIDTH, out[i]);
            }
            x += block_values(type);
            codes += block_code_bytes(type);
            high += has_high(type) ? 4 : 0;
        }
        scales += (size_t)batch * n_scales * 2;
    }
}

#define DECODE_OF(name, type)                                                                                          \
    static void decode_##name(const uint8_t *codes, const uint8_t *high, const uint8_t *scales, uint32_t n, float *x)  \
    {                                                                                                                  \
        decode_values(type, codes, high, scales, n, x);                                                                \
    }

DECODE_OF(f32, KVS_TYPE_F32)
DECODE_OF(f16, KVS_TYPE_F16)
DECODE_OF(bf16, KVS_TYPE_BF16)
DECODE_OF(q8_0, KVS_TYPE_Q8_0)
DECODE_OF(q4_0, KVS_TYPE_Q4_0)
DECODE_OF(q4_1, KVS_TYPE_Q4_1)
DECODE_OF(q5_0, KVS_TYPE_Q5_0)
DECODE_OF(q5_1, KVS_TYPE_Q5_1)
DECODE_OF(iq4_nl, KVS_TYPE_IQ4_NL)

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
