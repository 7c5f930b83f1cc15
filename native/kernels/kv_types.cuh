/* kv_types.cuh: planes of page records, and their codes as numbers.
 *
 * Shapes: a record holds KV heads one after another; a head six planes of 256 rows: K codes, high bits, scales, then V's.
 * A row of 32 values is a block. An octet o (0 .. 3) of a block is its values 4o .. 4o + 3 and 16 + 4o .. 16 + 4o + 3: what one
 * word of nibbles holds. Source: include/kvstream/kv.h, native/backends/cpu/encode_reference.c.
 */
#ifndef KVS_KERNELS_KV_TYPES_CUH
#define KVS_KERNELS_KV_TYPES_CUH

#include "numeric.cuh"

#define KVS_PAGE_TOKENS 256u

/* Numbers of kvs_type. */
#define KVS_KV_F32 0
#define KVS_KV_F16 1
#define KVS_KV_Q4_0 2
#define KVS_KV_Q4_1 3
#define KVS_KV_Q5_0 6
#define KVS_KV_Q5_1 7
#define KVS_KV_Q8_0 8
#define KVS_KV_IQ4_NL 20
#define KVS_KV_BF16 30

/* Bytes of each plane per block, and how codes become numbers: code less `offset`, times the scale, plus the minimum. */
template <int TYPE> struct kvs_kv_traits {
    static constexpr bool is_float = TYPE == KVS_KV_F32 || TYPE == KVS_KV_F16 || TYPE == KVS_KV_BF16;
    static constexpr bool has_minimum = TYPE == KVS_KV_Q4_1 || TYPE == KVS_KV_Q5_1;
    static constexpr bool has_high = TYPE == KVS_KV_Q5_0 || TYPE == KVS_KV_Q5_1;
    static constexpr bool is_nibbles = !is_float && TYPE != KVS_KV_Q8_0;
    static constexpr kvs_u32 codes_bytes = TYPE == KVS_KV_F32 ? 128 : is_float ? 64 : is_nibbles ? 16 : 32;
    static constexpr kvs_u32 high_bytes = has_high ? 4 : 0;
    static constexpr kvs_u32 scales_bytes = is_float ? 0 : has_minimum ? 4 : 2;
    static constexpr kvs_u32 row_bytes = codes_bytes + high_bytes + scales_bytes;
    static constexpr int offset = TYPE == KVS_KV_Q8_0 || TYPE == KVS_KV_IQ4_NL ? 128
                                  : TYPE == KVS_KV_Q4_0                       ? 8
                                  : TYPE == KVS_KV_Q5_0                       ? 16
                                                                              : 0;
};

/* One side of a head whose rows hold DIM values. */
template <int TYPE, kvs_u32 DIM> struct kvs_kv_side {
    typedef kvs_kv_traits<TYPE> traits;
    static constexpr kvs_u32 n_blocks = DIM / 32;
    static constexpr kvs_u32 bytes = KVS_PAGE_TOKENS * n_blocks * traits::row_bytes;
    static constexpr kvs_u32 high_at = KVS_PAGE_TOKENS * n_blocks * traits::codes_bytes;
    static constexpr kvs_u32 scales_at = high_at + KVS_PAGE_TOKENS * n_blocks * traits::high_bytes;
};

/* Scale and minimum of a block; 1 and 0 where the type has none. */
struct kvs_kv_scale {
    float scale;
    float minimum;
};

template <int TYPE> __device__ inline kvs_kv_scale kvs_kv_scale_at(const kvs_u8 *at)
{
    kvs_kv_scale result = {1.0f, 0.0f};
    if (kvs_kv_traits<TYPE>::has_minimum) {
        const kvs_u32 both = *(const kvs_u32 *)at;
        result.scale = kvs_f16_to_f32(both & 0xffffu);
        result.minimum = kvs_f16_to_f32(both >> 16);
    } else if (!kvs_kv_traits<TYPE>::is_float) {
        result.scale = kvs_f16_to_f32(*(const kvs_u16 *)at);
    }
    return result;
}

template <int TYPE, kvs_u32 DIM>
__device__ inline kvs_kv_scale kvs_kv_load_scale(const kvs_u8 *side, kvs_u32 row, kvs_u32 block)
{
    typedef kvs_kv_side<TYPE, DIM> layout;
    return kvs_kv_scale_at<TYPE>(side + layout::scales_at + (row * layout::n_blocks + block) * kvs_kv_traits<TYPE>::scales_bytes);
}

template <int TYPE, kvs_u32 DIM>
__device__ inline const kvs_u8 *kvs_kv_codes_at(const kvs_u8 *side, kvs_u32 row, kvs_u32 block)
{
    return side + (row * kvs_kv_side<TYPE, DIM>::n_blocks + block) * kvs_kv_traits<TYPE>::codes_bytes;
}

template <int TYPE, kvs_u32 DIM>
__device__ inline kvs_u32 kvs_kv_load_high(const kvs_u8 *side, kvs_u32 row, kvs_u32 block)
{
    typedef kvs_kv_side<TYPE, DIM> layout;
    return kvs_kv_traits<TYPE>::has_high ? *(const kvs_u32 *)(side + layout::high_at + (row * layout::n_blocks + block) * 4)
                                         : 0u;
}

/* Four bits to bit 4 of four bytes. */
__device__ inline kvs_u32 kvs_spread_high(kvs_u32 bits)
{
    return (((bits & 15u) * 0x00204081u) & 0x01010101u) << 4;
}

/* Four entries of the IQ4_NL table, plus 128, for the four nibbles in the low half of `nibbles`. */
__device__ inline kvs_u32 kvs_iq4_nl_lookup(kvs_u32 nibbles)
{
    const kvs_u32 low = __byte_perm(0x3f2d1801u, 0x766a5d4fu, nibbles & 0x7777u);
    const kvs_u32 high = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, nibbles & 0x7777u);
    return __byte_perm(low, high, 0x3210u + ((nibbles & 0x8888u) >> 1));
}

/* An octet of integer codes as two words of bytes; `first` and `second` are the words of the two runs, equal for nibbles. */
template <int TYPE> __device__ inline void kvs_kv_octet_bytes(kvs_u32 first, kvs_u32 second, kvs_u32 high, kvs_u32 octet, kvs_u32 *bytes)
{
    if (TYPE == KVS_KV_Q8_0) {
        bytes[0] = first ^ 0x80808080u;
        bytes[1] = second ^ 0x80808080u;
    } else if (TYPE == KVS_KV_IQ4_NL) {
        const kvs_u32 begin = kvs_iq4_nl_lookup(first), end = kvs_iq4_nl_lookup(first >> 16);
        bytes[0] = __byte_perm(begin, end, 0x6420u);
        bytes[1] = __byte_perm(begin, end, 0x7531u);
    } else {
        bytes[0] = first & 0x0f0f0f0fu;
        bytes[1] = first >> 4 & 0x0f0f0f0fu;
        if (kvs_kv_traits<TYPE>::has_high) {
            bytes[0] |= kvs_spread_high(high >> (4 * octet));
            bytes[1] |= kvs_spread_high(high >> (16 + 4 * octet));
        }
    }
}

/* Codes 4 * quad .. 4 * quad + 3 of a block of nibbles, from word quad % 4. */
template <int TYPE> __device__ inline kvs_u32 kvs_kv_quad_bytes(kvs_u32 word, kvs_u32 high, kvs_u32 quad)
{
    if (TYPE == KVS_KV_IQ4_NL) {
        kvs_u32 bytes[2];
        kvs_kv_octet_bytes<TYPE>(word, word, high, quad % 4, bytes);
        return quad < 4 ? bytes[0] : bytes[1];
    }
    const kvs_u32 low = word >> (quad & 4u) & 0x0f0f0f0fu;
    return kvs_kv_traits<TYPE>::has_high ? low | kvs_spread_high(high >> (4 * quad)) : low;
}

/* Four halves in two words. */
template <int TYPE> __device__ inline void kvs_kv_halves(kvs_u32 first, kvs_u32 second, float *values)
{
    if (TYPE == KVS_KV_F16) {
        values[0] = kvs_f16_to_f32(first & 0xffffu);
        values[1] = kvs_f16_to_f32(first >> 16);
        values[2] = kvs_f16_to_f32(second & 0xffffu);
        values[3] = kvs_f16_to_f32(second >> 16);
    } else {
        values[0] = kvs_bf16_to_f32(first & 0xffffu);
        values[1] = kvs_bf16_to_f32(first >> 16);
        values[2] = kvs_bf16_to_f32(second & 0xffffu);
        values[3] = kvs_bf16_to_f32(second >> 16);
    }
}

/* The eight numbers of an octet before scale and minimum. `codes` is the block's first byte. */
template <int TYPE> __device__ inline void kvs_kv_load_octet(const kvs_u8 *codes, kvs_u32 high, kvs_u32 octet, float *values)
{
    if (TYPE == KVS_KV_F32) {
        const float4 first = *(const float4 *)(codes + 16 * octet), second = *(const float4 *)(codes + 64 + 16 * octet);
        values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
        values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
    } else if (kvs_kv_traits<TYPE>::is_float) {
        const uint2 first = *(const uint2 *)(codes + 8 * octet), second = *(const uint2 *)(codes + 32 + 8 * octet);
        kvs_kv_halves<TYPE>(first.x, first.y, values);
        kvs_kv_halves<TYPE>(second.x, second.y, values + 4);
    } else {
        const kvs_u32 first = *(const kvs_u32 *)(codes + 4 * octet);
        const kvs_u32 second = TYPE == KVS_KV_Q8_0 ? *(const kvs_u32 *)(codes + 16 + 4 * octet) : first;
        kvs_u32 bytes[2];
        kvs_kv_octet_bytes<TYPE>(first, second, high, octet, bytes);
        kvs_bytes_to_f32(bytes[0], (float)kvs_kv_traits<TYPE>::offset, values);
        kvs_bytes_to_f32(bytes[1], (float)kvs_kv_traits<TYPE>::offset, values + 4);
    }
}

/* Words that a block's codes take, and its four octets from them: wide loads, for a thread that reads a whole block. */
template <int TYPE> struct kvs_kv_block {
    static constexpr kvs_u32 n_words = kvs_kv_traits<TYPE>::codes_bytes / 4;
    kvs_u32 words[n_words];
    kvs_u32 high;

    __device__ inline void load(const kvs_u8 *codes, kvs_u32 high_bits)
    {
#pragma unroll
        for (kvs_u32 i = 0; i < n_words; i += 4) {
            const uint4 four = *(const uint4 *)(codes + 4 * i);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
        high = high_bits;
    }

    __device__ inline void octet(kvs_u32 o, float *values) const
    {
        if (TYPE == KVS_KV_F32) {
#pragma unroll
            for (kvs_u32 i = 0; i < 4; i++) {
                values[i] = __uint_as_float(words[(4 * o + i) % n_words]);
                values[4 + i] = __uint_as_float(words[(16 + 4 * o + i) % n_words]);
            }
        } else if (kvs_kv_traits<TYPE>::is_float) {
            kvs_kv_halves<TYPE>(words[(2 * o) % n_words], words[(2 * o + 1) % n_words], values);
            kvs_kv_halves<TYPE>(words[(8 + 2 * o) % n_words], words[(9 + 2 * o) % n_words], values + 4);
        } else {
            kvs_u32 bytes[2];
            kvs_kv_octet_bytes<TYPE>(words[o], words[(n_words - 4 + o) % n_words], high, o, bytes);
            kvs_bytes_to_f32(bytes[0], (float)kvs_kv_traits<TYPE>::offset, values);
            kvs_bytes_to_f32(bytes[1], (float)kvs_kv_traits<TYPE>::offset, values + 4);
        }
    }
};

#endif
