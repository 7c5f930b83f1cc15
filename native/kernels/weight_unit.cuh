/* weight_unit.cuh: one unit of a panel (weight_form.h) in the registers of a warp, and its groups as operands of integer matrix
 * products. Everything is resolved for a constant type. */
#ifndef KVS_KERNELS_WEIGHT_UNIT_H
#define KVS_KERNELS_WEIGHT_UNIT_H

#include "weight_form.h"
#include "weight_math.cuh"

/* Words to a lane. Planes that a type lacks keep one that nothing reads. */
template <int TYPE> struct kvs_unit {
    static constexpr int GROUPS = kvs_form_unit_groups(TYPE);
    static constexpr int CODE_WORDS = kvs_form_code_bits(TYPE) * GROUPS / 2;
    static constexpr int HIGH_WORDS = kvs_form_has_shared_bit(TYPE)    ? 2
                                      : kvs_form_high_bits(TYPE) == 2 ? GROUPS
                                      : kvs_form_high_bits(TYPE) == 1 ? GROUPS / 2
                                                                      : 0;
    static constexpr int HALF_WORDS = kvs_form_halves(TYPE);
    static constexpr int MINIMUM_WORDS = kvs_form_minimum(TYPE) != KVS_FORM_NO_MINIMUM ? HALF_WORDS : 0;
    static constexpr int SUB_WORDS = kvs_form_subs(TYPE) / 2;
    static constexpr int SUBMINIMUM_WORDS = kvs_form_minimum(TYPE) == KVS_FORM_SUB_MINIMUM ? 4 : 0;
    unsigned int codes[CODE_WORDS];
    unsigned int high[HIGH_WORDS + 1];
    unsigned int scales[HALF_WORDS + 1];
    unsigned int minima[MINIMUM_WORDS + 1];
    unsigned int subs[SUB_WORDS + 1];
    unsigned int subminima[SUBMINIMUM_WORDS + 1];
};

/* Weights are read once: they must not push activations out of the first-level cache. IS_SHARED: they lie in shared memory. */
template <bool IS_SHARED> __device__ __forceinline__ void kvs_load_vector(unsigned int *to, const unsigned char *from)
{
    if constexpr (IS_SHARED) {
        const uint4 words = *(const uint4 *)from;
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
        return;
    }
#ifdef __CUDACC__
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "l"(from));
#else
    memcpy(to, from, 16);
#endif
}

template <bool IS_SHARED> __device__ __forceinline__ unsigned int kvs_load_word(const unsigned char *from)
{
    return IS_SHARED ? *(const unsigned int *)from : __ldg((const unsigned int *)from);
}

/* WORDS words to a lane, lanes side by side in vectors of at most 16 bytes. */
template <int WORDS, bool IS_SHARED>
__device__ __forceinline__ void kvs_load_lane(unsigned int *to, const unsigned char *plane, unsigned int lane)
{
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int v = 0; v < WORDS / 4; v++) {
            kvs_load_vector<IS_SHARED>(to + 4 * v, plane + 512 * v + 16 * lane);
        }
    } else {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            to[w] = kvs_load_word<IS_SHARED>(plane + 4 * (WORDS * lane + w));
        }
    }
}

/* WORDS words to a pair of rows, pairs side by side. */
template <int WORDS, bool IS_SHARED>
__device__ __forceinline__ void kvs_load_pair(unsigned int *to, const unsigned char *plane, unsigned int row)
{
    const unsigned char *from = plane + 4 * WORDS * row;
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (int v = 0; v < WORDS / 4; v++) {
            kvs_load_vector<IS_SHARED>(to + 4 * v, from + 16 * v);
        }
    } else if constexpr (WORDS == 2) {
        const uint2 both = IS_SHARED ? *(const uint2 *)from : __ldg((const uint2 *)from);
        to[0] = both.x;
        to[1] = both.y;
    } else if constexpr (WORDS == 1) {
        to[0] = kvs_load_word<IS_SHARED>(from);
    }
}

template <int TYPE, bool IS_SHARED = false>
__device__ __forceinline__ void kvs_load_unit(kvs_unit<TYPE> &unit, const unsigned char *from, unsigned int lane)
{
    using u = kvs_unit<TYPE>;
    kvs_load_lane<u::CODE_WORDS, IS_SHARED>(unit.codes, from, lane);
    if constexpr (kvs_form_has_shared_bit(TYPE)) {
        kvs_load_pair<u::HIGH_WORDS, IS_SHARED>(unit.high, from + kvs_form_high_at(TYPE), lane / 4);
    } else {
        kvs_load_lane<u::HIGH_WORDS, IS_SHARED>(unit.high, from + kvs_form_high_at(TYPE), lane);
    }
    kvs_load_pair<u::HALF_WORDS, IS_SHARED>(unit.scales, from + kvs_form_scales_at(TYPE), lane / 4);
    kvs_load_pair<u::MINIMUM_WORDS, IS_SHARED>(unit.minima, from + kvs_form_minima_at(TYPE), lane / 4);
    kvs_load_pair<u::SUB_WORDS, IS_SHARED>(unit.subs, from + kvs_form_subs_at(TYPE), lane / 4);
    kvs_load_pair<u::SUBMINIMUM_WORDS, IS_SHARED>(unit.subminima, from + kvs_form_subminima_at(TYPE), lane / 4);
}

/* Four signed levels to a word. */
__device__ constexpr unsigned int kvs_levels4(int a, int b, int c, int d)
{
    return ((unsigned int)a & 255u) | ((unsigned int)b & 255u) << 8 | ((unsigned int)c & 255u) << 16 | ((unsigned int)d & 255u) << 24;
}

__device__ constexpr unsigned int kvs_table_word(int table, int word)
{
    constexpr unsigned int words[7][4] = {
        {0, 0, 0, 0},
        {kvs_levels4(-127, -104, -83, -65), kvs_levels4(-49, -35, -22, -10), kvs_levels4(1, 13, 25, 38),
         kvs_levels4(53, 69, 89, 113)},
        {kvs_levels4(0, 1, 2, 3), kvs_levels4(4, 6, 8, 12), kvs_levels4(0, -1, -2, -3), kvs_levels4(-4, -6, -8, -12)},
        {kvs_levels4(-7, 1, 9, 0), kvs_levels4(-9, -1, 7, 0), 0, 0},
        {kvs_levels4(8, 25, 43, 0), kvs_levels4(-8, -25, -43, 0), 0, 0},
        {kvs_levels4(4, 12, 20, 28), kvs_levels4(36, 44, 52, 62), kvs_levels4(-4, -12, -20, -28), kvs_levels4(-36, -44, -52, -62)},
        {kvs_levels4(1, 3, 5, 7), kvs_levels4(9, 11, 13, 15), kvs_levels4(-1, -3, -5, -7), kvs_levels4(-9, -11, -13, -15)},
    };
    return words[table][word];
}

/* Levels of eight nibbles: of nibbles 0..3 in `low`, of 4..7 in `high`. A table of 16 is two of 8, between which bit 3 chooses. */
template <int TABLE> __device__ __forceinline__ void kvs_look_up_nibbles(unsigned int nibbles, unsigned int &low, unsigned int &high)
{
    constexpr unsigned int t0 = kvs_table_word(TABLE, 0), t1 = kvs_table_word(TABLE, 1);
    constexpr unsigned int t2 = kvs_table_word(TABLE, 2), t3 = kvs_table_word(TABLE, 3);
    const unsigned int index = nibbles & 0x77777777u;
    const unsigned int choice = 0x32103210u | (nibbles & 0x88888888u) >> 1;
    low = __byte_perm(__byte_perm(t0, t1, index), __byte_perm(t2, t3, index), choice);
    high = __byte_perm(__byte_perm(t0, t1, index >> 16), __byte_perm(t2, t3, index >> 16), choice >> 16);
}

/* Bytes of two words by nibbles; 8 and more give the sign of the byte, 0 or -1, which __byte_perm does not. */
__device__ __forceinline__ unsigned int kvs_bytes_or_signs(unsigned int low, unsigned int high, unsigned int nibbles)
{
#ifdef __CUDACC__
    unsigned int bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(nibbles));
    return bytes;
#else
    return host_permute(low, high, nibbles);
#endif
}

/* The two halves of a table of 16 for products that are added up. A nibble of the other half gives the sign of a byte: what the
 * other half has there makes up for it. */
__device__ constexpr unsigned int kvs_half_table(int table, int word)
{
    unsigned int made = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned int mine = kvs_table_word(table, word) >> (8 * i) & 255u;
        const unsigned int other = kvs_table_word(table, (word + 2) % 4) >> (8 * i) & 255u;
        made |= (mine + (other >> 7) & 255u) << (8 * i);
    }
    return made;
}

/* Levels of eight nibbles as sums: those of nibbles below 8 and those of the others. */
template <int TABLE>
__device__ __forceinline__ void kvs_look_up_halves(unsigned int nibbles, unsigned int (&low)[2], unsigned int (&high)[2])
{
    constexpr unsigned int t0 = kvs_half_table(TABLE, 0), t1 = kvs_half_table(TABLE, 1);
    constexpr unsigned int t2 = kvs_half_table(TABLE, 2), t3 = kvs_half_table(TABLE, 3);
    const unsigned int turned = nibbles ^ 0x88888888u;
    low[0] = kvs_bytes_or_signs(t0, t1, nibbles);
    low[1] = kvs_bytes_or_signs(t2, t3, turned);
    high[0] = kvs_bytes_or_signs(t0, t1, nibbles >> 16);
    high[1] = kvs_bytes_or_signs(t2, t3, turned >> 16);
}

/* Levels of four bytes below 8. */
template <int TABLE> __device__ __forceinline__ unsigned int kvs_look_up_bytes(unsigned int bytes)
{
    constexpr unsigned int t0 = kvs_table_word(TABLE, 0), t1 = kvs_table_word(TABLE, 1);
    const unsigned int pairs = (bytes | bytes >> 4) & 0x00ff00ffu;
    return __byte_perm(t0, t1, (pairs | pairs >> 8) & 0xffffu);
}

/* Group j as the four registers of the left operand of a product of 16 x 32 by 32 x 8. */
template <int TYPE> __device__ __forceinline__ void kvs_unit_group(const kvs_unit<TYPE> &unit, int j, unsigned int lane, unsigned int (&a)[4])
{
    constexpr int TABLE = kvs_form_table(TYPE), BITS = kvs_form_code_bits(TYPE);
    if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = unit.codes[4 * j + i];
        }
    } else if constexpr (BITS == 4 && TABLE != KVS_FORM_NO_TABLE) {
        kvs_look_up_nibbles<TABLE>(unit.codes[2 * j], a[0], a[2]);
        kvs_look_up_nibbles<TABLE>(unit.codes[2 * j + 1], a[1], a[3]);
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = unit.codes[2 * j + i % 2] >> (i / 2 * 4) & 0x0f0f0f0fu;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = unit.codes[j] >> (2 * i) & 0x03030303u;
        }
    }
    if constexpr (kvs_form_high_bits(TYPE) == 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] |= (unit.high[j] >> (2 * i) & 0x03030303u) << BITS;
        }
    } else if constexpr (kvs_form_high_bits(TYPE) == 1) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] |= (unit.high[j / 2] >> (4 * (j % 2) + i) & 0x01010101u) << BITS;
        }
    } else if constexpr (kvs_form_has_shared_bit(TYPE)) {
        /* The octet of a lane's low codes is t / 2, that of its high ones 2 + t / 2. */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] |= (unit.high[i % 2] >> (4 * j + 2 * (i / 2) + lane % 4 / 2) & 1u) * 0x04040404u;
        }
    }
    if constexpr (BITS == 2 && TABLE != KVS_FORM_NO_TABLE) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = kvs_look_up_bytes<TABLE>(a[i]);
        }
    }
}

/* Left operands whose products add up to that of a group: one, or for tables of 16, where that costs less, two. */
template <int TYPE> struct kvs_left {
    static constexpr int N = kvs_form_code_bits(TYPE) == 4 && kvs_form_table(TYPE) != KVS_FORM_NO_TABLE ? 2 : 1;
    unsigned int a[N][4];
};

template <int TYPE>
__device__ __forceinline__ void kvs_unit_left(const kvs_unit<TYPE> &unit, int j, unsigned int lane, kvs_left<TYPE> &left)
{
    if constexpr (kvs_left<TYPE>::N == 1) {
        kvs_unit_group<TYPE>(unit, j, lane, left.a[0]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            unsigned int low[2], high[2];
            kvs_look_up_halves<kvs_form_table(TYPE)>(unit.codes[2 * j + i], low, high);
            left.a[0][i] = low[0], left.a[1][i] = low[1];
            left.a[0][i + 2] = high[0], left.a[1][i + 2] = high[1];
        }
    }
}

/* Number i of PER_ROW 8-bit numbers of one of a pair of rows. */
template <int PER_ROW> __device__ __forceinline__ unsigned int kvs_sub(const unsigned int *words, int row, int i)
{
    const int at = row * PER_ROW + i;
    return words[at / 4] >> (8 * (at % 4)) & 255u;
}

/* The same as a float, times `whole`, which has at most 11 bits: 2^15 with the byte behind it, times `whole`, less what is too much of it. That is
 * (2^7 + 2^15) * whole at most, so both products and their difference are exact. */
template <int PER_ROW, bool IS_SIGNED>
__device__ __forceinline__ float kvs_sub_times(const unsigned int *words, int row, int i, float whole)
{
    const int at = row * PER_ROW + i;
    const unsigned int word = IS_SIGNED ? words[at / 4] ^ 0x80808080u : words[at / 4];
    const float above = __uint_as_float(__byte_perm(word, 0x47000000u, 0x7404u + (at % 4 << 4)));
    return __fmaf_rn(above, whole, -__fmul_rn(whole, IS_SIGNED ? 32896.0f : 32768.0f));
}

/* Half `i` of PER_ROW of one of a pair of rows. */
template <int PER_ROW> __device__ __forceinline__ float kvs_pair_half(const unsigned int *words, int row, int i)
{
    const int at = row * PER_ROW + i;
    return kvs_f16_to_f32(words[at / 2] >> (16 * (at % 2)) & 0xffffu);
}

/* Scale of half `half` of group j, row r + 8 * row; for types without halves of either. Exact. */
template <int TYPE> __device__ __forceinline__ float kvs_unit_scale(const kvs_unit<TYPE> &unit, int j, int half, int row)
{
    constexpr int SCALE = kvs_form_scale(TYPE), SUBS = kvs_form_subs(TYPE);
    if constexpr (SCALE == KVS_FORM_HALF) {
        return kvs_pair_half<2>(unit.scales, row, j);
    } else if constexpr (SCALE == KVS_FORM_E8M0) {
        return kvs_e8m0_half(kvs_sub<SUBS>(unit.subs, row, j));
    } else if constexpr (SCALE == KVS_FORM_UE4M3) {
        return kvs_ue4m3_half(kvs_sub<SUBS>(unit.subs, row, 2 * j + half));
    } else {
        constexpr float FACTOR = 1.0f / (1 << kvs_form_scale_shift(TYPE));
        constexpr bool IS_SIGNED = SCALE != KVS_FORM_SUB_U;
        const int at = kvs_form_is_halved(TYPE) ? 2 * j + half : j;
        float whole = kvs_pair_half<1>(unit.scales, row, 0);
        if constexpr (FACTOR != 1.0f) {
            whole = __fmul_rn(whole, FACTOR);
        }
        if constexpr (SCALE == KVS_FORM_NIBBLE2) {
            return __fmul_rn(whole, (float)(kvs_sub<SUBS>(unit.subs, row, at) & 15u));
        } else {
            return kvs_sub_times<SUBS, IS_SIGNED>(unit.subs, row, at, whole);
        }
    }
}

/* Minimum likewise, for types that have one. */
template <int TYPE> __device__ __forceinline__ float kvs_unit_minimum(const kvs_unit<TYPE> &unit, int j, int half, int row)
{
    constexpr int MINIMUM = kvs_form_minimum(TYPE);
    if constexpr (MINIMUM == KVS_FORM_HALF_MINIMUM) {
        return kvs_pair_half<2>(unit.minima, row, j);
    } else if constexpr (MINIMUM == KVS_FORM_SUB_MINIMUM) {
        return -kvs_sub_times<8, false>(unit.subminima, row, j, kvs_pair_half<1>(unit.minima, row, 0));
    } else {
        return -__fmul_rn(kvs_pair_half<1>(unit.minima, row, 0), (float)(kvs_sub<16>(unit.subs, row, 2 * j + half) >> 4));
    }
}

#endif
