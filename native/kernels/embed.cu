/* embed.cu: rows of a table as the file holds them, decoded to float32.
 *
 * Kernel embed(kvs_embed_params). Macros: KVS_T0 type of the table.
 * Grid: (k / 256 rounded up, n_rows). Block: 256, a thread to a value. Architecture: 75.
 * Holds: a value is product of scale and code, rounded once, plus the minimum, rounded once. A token outside the table, which
 * the host has refused before, reads row 0.
 * Twin: kvs_embed_rows in native/backends/cpu/elementwise.c; formats: native/base/blocks.c.
 */
#define KVS_GRID_TABLE static __device__ const unsigned short
#include "grid.cuh"
#include "grids.h"
#include "weight_form.h"
#include "weight_math.cuh"
#include "weight_params.h"

/* A value: scale * code + minimum. */
struct value_t {
    float scale;
    int code;
    float minimum;
};

static __device__ unsigned int u16(const unsigned char *bytes)
{
    return (unsigned int)bytes[0] | (unsigned int)bytes[1] << 8;
}

static __device__ unsigned int u32(const unsigned char *bytes)
{
    return u16(bytes) | u16(bytes + 2) << 16;
}

static __device__ float half_at(const unsigned char *bytes)
{
    return kvs_f16_to_f32(u16(bytes));
}

static __device__ int level(int table, unsigned int place)
{
    constexpr signed char levels[7][16] = {
        {0},
        {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
        {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
        {-7, 1, 9, 0, -9, -1, 7, 0},
        {8, 25, 43, 0},
        {4, 12, 20, 28, 36, 44, 52, 62},
        {1, 3, 5, 7, 9, 11, 13, 15},
    };
    return levels[table][place];
}

/* Nibble e of a block whose first half lies in the low nibbles. */
static __device__ unsigned int split_nibble(const unsigned char *bytes, unsigned int e, unsigned int half)
{
    return e < half ? bytes[e] & 15u : bytes[e - half] >> 4;
}

static __device__ value_t legacy_value(const unsigned char *block, unsigned int e)
{
    const bool has_minimum = KVS_T0 == KVS_W_Q4_1 || KVS_T0 == KVS_W_Q5_1;
    const bool has_high = KVS_T0 == KVS_W_Q5_0 || KVS_T0 == KVS_W_Q5_1;
    const unsigned char *rest = block + (has_minimum ? 4 : 2);
    if (KVS_T0 == KVS_W_Q8_0) {
        return {half_at(block), (signed char)rest[e], 0.0f};
    }
    unsigned int code = split_nibble(rest + (has_high ? 4 : 0), e, 16);
    if (has_high) {
        code |= (u32(rest) >> e & 1u) << 4;
    }
    const int value = KVS_T0 == KVS_W_IQ4_NL ? level(KVS_FORM_IQ4, code) : (int)code - kvs_form_offset(KVS_T0);
    return {half_at(block), value, has_minimum ? half_at(block + 2) : 0.0f};
}

static __device__ value_t small_float_value(const unsigned char *block, unsigned int e)
{
    if (KVS_T0 == KVS_W_MXFP4) {
        return {kvs_e8m0_half(block[0]), level(KVS_FORM_FP4, split_nibble(block + 1, e, 16)), 0.0f};
    }
    const unsigned int part = e / 16;
    const unsigned int scale = block[part] == 0x7f ? 0 : block[part] & 0x7f;
    return {kvs_ue4m3_half(scale), level(KVS_FORM_FP4, split_nibble(block + 4 + 8 * part, e % 16, 8)), 0.0f};
}

/* Code e of 64 bytes with four of two bits: halves of 32 bytes, each giving four runs of 32 codes. */
static __device__ unsigned int crumb(const unsigned char *bytes, unsigned int e)
{
    return bytes[e / 128 * 32 + e % 32] >> (2 * (e / 32 % 4)) & 3u;
}

static __device__ value_t q2_k_value(const unsigned char *block, unsigned int e)
{
    const unsigned int sub = block[e / 16];
    return {__fmul_rn(half_at(block + 80), (float)(sub & 15u)), (int)crumb(block + 16, e),
            -__fmul_rn(half_at(block + 82), (float)(sub >> 4))};
}

static __device__ value_t q3_k_value(const unsigned char *block, unsigned int e)
{
    const unsigned char *packed = block + 96;
    const unsigned int s = e / 16;
    const unsigned int low = s < 8 ? packed[s] & 15u : packed[s - 8] >> 4;
    const unsigned int high = packed[8 + s % 4] >> (2 * (s / 4)) & 3u;
    const unsigned int code = crumb(block + 32, e) | (block[e % 32] >> (e / 32) & 1u) << 2;
    return {__fmul_rn(half_at(block + 108), (float)((int)(low | high << 4) - 32)), (int)code - 4, 0.0f};
}

/* Q4_K and Q5_K. */
static __device__ value_t q45_k_value(const unsigned char *block, unsigned int e)
{
    const unsigned char *packed = block + 4;
    const unsigned int g = e / 32, b = g % 4;
    const unsigned int scale = g < 4 ? packed[b] & 63u : (packed[b + 8] & 15u) | packed[b] >> 6 << 4;
    const unsigned int minimum = g < 4 ? packed[b + 4] & 63u : packed[b + 8] >> 4 | packed[b + 4] >> 6 << 4;
    const unsigned char *nibbles = block + (KVS_T0 == KVS_W_Q5_K ? 48 : 16);
    unsigned int code = split_nibble(nibbles + 32 * (e / 64), e % 64, 32);
    if (KVS_T0 == KVS_W_Q5_K) {
        code |= (block[16 + e % 32] >> g & 1u) << 4;
    }
    return {__fmul_rn(half_at(block), (float)scale), (int)code, -__fmul_rn(half_at(block + 2), (float)minimum)};
}

static __device__ value_t q6_k_value(const unsigned char *block, unsigned int e)
{
    const unsigned int code = split_nibble(block + e / 128 * 64, e % 128, 64) | crumb(block + 128, e) << 4;
    return {__fmul_rn(half_at(block + 208), (float)(signed char)block[192 + e / 16]), (int)code - 32, 0.0f};
}

static __device__ value_t iq4_xs_value(const unsigned char *block, unsigned int e)
{
    const unsigned int b = e / 32;
    const unsigned int low = block[4 + b / 2] >> (4 * (b % 2)) & 15u;
    const int sub = (int)(low | (u16(block + 2) >> (2 * b) & 3u) << 4) - 32;
    return {__fmul_rn(half_at(block), (float)sub), level(KVS_FORM_IQ4, split_nibble(block + 8 + 16 * b, e % 32, 16)), 0.0f};
}

/* Scale of files' number n, and its place in the list of levels with its sign. */
static __device__ value_t grid_value(float scale, unsigned int n, unsigned int place, unsigned int is_negative)
{
    const float factor = 1.0f / (float)(1 << kvs_form_scale_shift(KVS_T0));
    const int value = level(kvs_form_table(KVS_T0), place);
    return {__fmul_rn(__fmul_rn(scale, factor), (float)(2 * n + 1)), is_negative ? -value : value, 0.0f};
}

/* Bit i of eight signs, of which the eighth makes the number of minus signs even. */
static __device__ unsigned int even_sign(unsigned int code, unsigned int i)
{
    return i < 7 ? code >> i & 1u : __popc(code & 127u) & 1u;
}

/* Place i of an entry, so many bits each. */
static __device__ unsigned int place_of(const unsigned short entry, unsigned int i, unsigned int bits)
{
    return (unsigned int)entry >> (bits * i) & ((1u << bits) - 1u);
}

static __device__ value_t iq2_value(const unsigned char *block, unsigned int e)
{
    const unsigned int octet = e / 8, i = e % 8, l = octet % 4;
    const float scale = half_at(block);
    if (KVS_T0 == KVS_W_IQ2_XXS) {
        const unsigned char *indices = block + 2 + 8 * (e / 32);
        const unsigned int aux = u32(indices + 4);
        return grid_value(scale, aux >> 28, place_of(kvs_grid_iq2_xxs[indices[l]], i, 2), even_sign(aux >> (7 * l) & 127u, i));
    }
    if (KVS_T0 == KVS_W_IQ2_XS) {
        const unsigned int code = u16(block + 2 + 2 * octet);
        return grid_value(scale, block[66 + e / 32] >> (4 * (e / 16 % 2)) & 15u, place_of(kvs_grid_iq2_xs[code & 511u], i, 2),
                          even_sign(code >> 9, i));
    }
    const unsigned int high = block[66 + octet / 4] >> (2 * l) & 3u;
    return grid_value(scale, block[74 + e / 32] >> (4 * (e / 16 % 2)) & 15u,
                      place_of(kvs_grid_iq2_s[block[2 + octet] | high << 8], i, 2), block[34 + octet] >> i & 1u);
}

static __device__ value_t iq3_value(const unsigned char *block, unsigned int e)
{
    const unsigned int octet = e / 8, i = e % 8, l = octet % 4;
    const unsigned char *pair = block + 2 + 2 * octet;
    unsigned int index = pair[i / 4];
    if (KVS_T0 == KVS_W_IQ3_XXS) {
        const unsigned int aux = u32(block + 66 + 4 * (e / 32));
        return grid_value(half_at(block), aux >> 28, place_of(kvs_grid_iq3_xxs[index], i % 4, 4) & 7u,
                          even_sign(aux >> (7 * l) & 127u, i));
    }
    index |= (block[66 + octet / 4] >> (2 * l + i / 4) & 1u) << 8;
    return grid_value(half_at(block), block[106 + e / 64] >> (4 * (e / 32 % 2)) & 15u,
                      place_of(kvs_grid_iq3_s[index], i % 4, 4) & 7u, block[74 + octet] >> i & 1u);
}

static __device__ value_t iq1_value(const unsigned char *block, unsigned int e)
{
    const unsigned int octet = e / 8, i = e % 8;
    if (KVS_T0 == KVS_W_IQ1_S) {
        const unsigned int high = u16(block + 34 + 2 * (e / 32));
        const unsigned int index = block[2 + octet] | (high >> (3 * (octet % 4)) & 7u) << 8;
        return grid_value(half_at(block), high >> 12 & 7u, place_of(kvs_grid_iq1_s[index], i, 2) + (high >> 15) * 4, 0);
    }
    unsigned int scale = 0;
    for (unsigned int w = 0; w < 4; w++) {
        scale |= u16(block + 48 + 2 * w) >> 12 << (4 * w);
    }
    const unsigned int s = e / 16;
    const unsigned int high = block[32 + octet / 2] >> (4 * (octet % 2)) & 15u;
    const unsigned int place = place_of(kvs_grid_iq1_s[block[octet] | (high & 7u) << 8], i, 2) + (high >> 3) * 4;
    return grid_value(kvs_f16_to_f32(scale), u16(block + 48 + 2 * (s / 4)) >> (3 * (s % 4)) & 7u, place, 0);
}

/* Bytes and values of a block of the type. */
static __device__ constexpr unsigned int block_values()
{
    return kvs_form_is_super(KVS_T0) ? 256 : KVS_T0 == KVS_W_NVFP4 ? 64 : 32;
}

static __device__ value_t block_value(const unsigned char *block, unsigned int e)
{
    switch (KVS_T0) {
    case KVS_W_Q2_K:
        return q2_k_value(block, e);
    case KVS_W_Q3_K:
        return q3_k_value(block, e);
    case KVS_W_Q4_K:
    case KVS_W_Q5_K:
        return q45_k_value(block, e);
    case KVS_W_Q6_K:
        return q6_k_value(block, e);
    case KVS_W_IQ4_XS:
        return iq4_xs_value(block, e);
    case KVS_W_IQ2_XXS:
    case KVS_W_IQ2_XS:
    case KVS_W_IQ2_S:
        return iq2_value(block, e);
    case KVS_W_IQ3_XXS:
    case KVS_W_IQ3_S:
        return iq3_value(block, e);
    case KVS_W_IQ1_S:
    case KVS_W_IQ1_M:
        return iq1_value(block, e);
    case KVS_W_MXFP4:
    case KVS_W_NVFP4:
        return small_float_value(block, e);
    default:
        return legacy_value(block, e);
    }
}

static __device__ float row_value(const unsigned char *row, unsigned int i, const kvs_embed_params &p)
{
    if (KVS_T0 == KVS_W_F32) {
        return ((const float *)row)[i];
    }
    if (KVS_T0 == KVS_W_F16) {
        return kvs_f16_to_f32(u16(row + 2 * i));
    }
    if (KVS_T0 == KVS_W_BF16) {
        return kvs_bf16_to_f32(u16(row + 2 * i));
    }
    const unsigned int block_bytes = p.row_bytes / (p.k / block_values());
    const value_t value = block_value(row + (unsigned long long)(i / block_values()) * block_bytes, i % block_values());
    const float product = __fmul_rn(value.scale, (float)value.code);
    return kvs_form_minimum(KVS_T0) != KVS_FORM_NO_MINIMUM ? __fadd_rn(product, value.minimum) : product;
}

extern "C" __global__ void __launch_bounds__(256) embed(const kvs_embed_params p)
{
    kvs_let_next_begin();
    kvs_wait_for_previous();
    const unsigned int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.k) {
        return;
    }
    const unsigned int token = ((const unsigned int *)p.tokens)[blockIdx.y];
    const unsigned char *row = (const unsigned char *)p.table + (unsigned long long)(token < p.n_table_rows ? token : 0) * p.row_bytes;
    ((float *)p.out)[(unsigned long long)blockIdx.y * p.out_stride + i] = row_value(row, i, p);
}
