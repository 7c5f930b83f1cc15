/* attend_keys.h: K decoded with tokens in the lanes; included after vec_avx2.h or vec_avx512.h.
 *
 * One walk per type serves both uses: it stores a strip for a matrix product, or goes straight into the scores.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_KEYS_H
#define KVS_NATIVE_CPU_ATTEND_KEYS_H

#include "backends/cpu/attend_ops.h"
#include "backends/cpu/decode_body.h"

#define STRIP KVS_ATTEND_STRIP

/* What becomes of decoded K, V_GROUPS vectors of tokens wide: stored to a strip (n_queries 0), or multiplied into the
 * scores of up to V_FUSED queries. */
typedef struct k_sink {
    float *strip; /* value d of token vector g at strip + d * STRIP + g * V_WIDTH */
    const float *q;
    size_t q_stride;
    vf scores[V_GROUPS][V_FUSED];
} k_sink;

ALWAYS_INLINE void k_take(k_sink *sink, uint32_t n_queries, uint32_t group, uint32_t d, vf value)
{
    if (n_queries == 0) {
        v_store(sink->strip + (size_t)d * STRIP + group * V_WIDTH, value);
    }
#pragma GCC unroll 6
    for (uint32_t i = 0; i < n_queries; i++) {
        sink->scores[group][i] = v_fma(v_set1(sink->q[i * sink->q_stride + d]), value, sink->scores[group][i]);
    }
}

/* Scale, and minimum where the type has one, of one block of V_WIDTH tokens. A gather reads four bytes: past the last
 * scale of a plane without minima lie the V codes of the same record. */
ALWAYS_INLINE void k_scales(int32_t type, const kvs_attend_planes *k, uint32_t token, uint32_t block, vf out[2])
{
    const uint8_t *scales = k->scales + (size_t)token * k->scales_bytes;
    const uint32_t half = !has_low(type) && k->scales_bytes == 4 ? block % 2 : 0;
    const vi words = v_gather(scales + (size_t)(block - half) * (has_low(type) ? 4 : 2), k->scales_bytes);
    out[0] = v_low_f16(half == 0 ? words : v_shr(words, 16));
    out[1] = v_low_f16(v_shr(words, 16));
}

/* Values d.. that one dword of codes holds, of V_WIDTH tokens. */
ALWAYS_INLINE void k_take_floats(int32_t type, k_sink *sink, uint32_t n_queries, uint32_t group, uint32_t d, vi word)
{
    if (type == KVS_TYPE_F32) {
        k_take(sink, n_queries, group, d, v_as_float(word));
    } else if (type == KVS_TYPE_F16) {
        k_take(sink, n_queries, group, d, v_low_f16(word));
        k_take(sink, n_queries, group, d + 1, v_low_f16(v_shr(word, 16)));
    } else {
        k_take(sink, n_queries, group, d, v_as_float(v_shl(word, 16)));
        k_take(sink, n_queries, group, d + 1, v_as_float(v_and(word, 0xffff0000u)));
    }
}

ALWAYS_INLINE void k_walk_floats(int32_t type, uint32_t n_groups, uint32_t n_queries, const kvs_attend_planes *k,
                                 uint32_t token, uint32_t n_values, k_sink *sink)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const uint32_t per_word = type == KVS_TYPE_F32 ? 1 : 2;
    for (uint32_t d = 0; d < n_values; d += 4 * per_word, codes += 16) {
        vi words[V_GROUPS][4];
#pragma GCC unroll 2
        for (uint32_t g = 0; g < n_groups; g++) {
            v_transpose(codes + (size_t)g * V_WIDTH * k->codes_bytes, k->codes_bytes, words[g]);
        }
#pragma GCC unroll 4
        for (uint32_t w = 0; w < 4; w++) {
#pragma GCC unroll 2
            for (uint32_t g = 0; g < n_groups; g++) {
                k_take_floats(type, sink, n_queries, g, d + w * per_word, words[g][w]);
            }
        }
    }
}

/* Value `place` of a block, its codes being byte `i` of `word`; `upper` takes the high nibble. */
ALWAYS_INLINE vf k_value(int32_t type, vi word, vi bits, const vf scale[2], uint32_t i, bool upper, uint32_t place)
{
    if (type == KVS_TYPE_Q8_0) {
        return v_mul(scale[0], v_convert(v_byte(word, i)));
    }
    const vi quant = v_shr(word, 8 * i + (upper ? 4 : 0));
    if (has_high(type)) {
        const vi fifth = v_and(v_shl(v_shr(bits, place), 4), 16);
        return scaled(type, five_bits(type, v_or(v_and(quant, 15), fifth)), scale[0], scale[1]);
    }
    return scaled(type, nibble_value(type, quant), scale[0], scale[1]);
}

/* 16 bytes of codes: values d + 0..15 of a block, or all 32 of a block of nibbles. */
ALWAYS_INLINE void k_walk_unit(int32_t type, uint32_t n_groups, uint32_t n_queries, vi words[V_GROUPS][4],
                               const vi *bits, vf scale[V_GROUPS][2], uint32_t d, k_sink *sink)
{
    const uint32_t n_uppers = type == KVS_TYPE_Q8_0 ? 1 : 2;
#pragma GCC unroll 2
    for (uint32_t upper = 0; upper < n_uppers; upper++) {
        for (uint32_t w = 0; w < 4; w++) {
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t place = 16 * upper + 4 * w + i;
#pragma GCC unroll 2
                for (uint32_t g = 0; g < n_groups; g++) {
                    k_take(sink, n_queries, g, d + place,
                           k_value(type, words[g][w], bits[g], scale[g], i, upper != 0, place));
                }
            }
        }
    }
}

ALWAYS_INLINE void k_walk_blocks(int32_t type, uint32_t n_groups, uint32_t n_queries, const kvs_attend_planes *k,
                                 uint32_t token, uint32_t n_values, k_sink *sink)
{
    const uint8_t *codes = k->codes + (size_t)token * k->codes_bytes;
    const uint8_t *high = k->high + (size_t)token * k->high_bytes;
    vf scale[V_GROUPS][2];
    vi bits[V_GROUPS], words[V_GROUPS][4];
    for (uint32_t block = 0; block < n_values / 32; block++) {
#pragma GCC unroll 2
        for (uint32_t g = 0; g < n_groups; g++) {
            const uint8_t *row_high = high + (size_t)g * V_WIDTH * k->high_bytes + (size_t)block * 4;
            k_scales(type, k, token + g * V_WIDTH, block, scale[g]);
            bits[g] = has_high(type) ? v_gather(row_high, k->high_bytes) : v_as_int(v_zero());
        }
#pragma GCC unroll 2
        for (uint32_t half = 0; half < block_code_bytes(type) / 16; half++, codes += 16) {
#pragma GCC unroll 2
            for (uint32_t g = 0; g < n_groups; g++) {
                v_transpose(codes + (size_t)g * V_WIDTH * k->codes_bytes, k->codes_bytes, words[g]);
            }
            k_walk_unit(type, n_groups, n_queries, words, bits, scale, 32 * block + 16 * half, sink);
        }
    }
}

ALWAYS_INLINE void k_walk(int32_t type, uint32_t n_groups, uint32_t n_queries, const kvs_attend_planes *k,
                          uint32_t token, uint32_t n_values, k_sink *sink)
{
    if (is_float(type)) {
        k_walk_floats(type, n_groups, n_queries, k, token, n_values, sink);
    } else {
        k_walk_blocks(type, n_groups, n_queries, k, token, n_values, sink);
    }
}

/* Do `call(TYPE)` for the constant that equals `type`. */
#define FOR_EACH_TYPE(type, call)                                                                                      \
    switch (type) {                                                                                                    \
    case KVS_TYPE_F32:                                                                                                 \
        call(KVS_TYPE_F32);                                                                                            \
        break;                                                                                                         \
    case KVS_TYPE_F16:                                                                                                 \
        call(KVS_TYPE_F16);                                                                                            \
        break;                                                                                                         \
    case KVS_TYPE_BF16:                                                                                                \
        call(KVS_TYPE_BF16);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q8_0:                                                                                                \
        call(KVS_TYPE_Q8_0);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q4_0:                                                                                                \
        call(KVS_TYPE_Q4_0);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q4_1:                                                                                                \
        call(KVS_TYPE_Q4_1);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q5_0:                                                                                                \
        call(KVS_TYPE_Q5_0);                                                                                           \
        break;                                                                                                         \
    case KVS_TYPE_Q5_1:                                                                                                \
        call(KVS_TYPE_Q5_1);                                                                                           \
        break;                                                                                                         \
    default:                                                                                                           \
        call(KVS_TYPE_IQ4_NL);                                                                                         \
        break;                                                                                                         \
    }

/* K of V_WIDTH tokens from `token` on, tokens in the lanes: value d of them is one vector at strip + d * STRIP. */
static void decode_k(int32_t type, const kvs_attend_planes *k, uint32_t token, uint32_t n_values, float *strip)
{
    k_sink sink = {.strip = strip};
#define DECODE_K(constant) k_walk(constant, 1, 0, k, token, n_values, &sink)
    FOR_EACH_TYPE(type, DECODE_K)
#undef DECODE_K
}

#endif
