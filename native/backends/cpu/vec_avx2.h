/* vec_avx2.h: the vector operations that decode_body.h and attend_body.h are written in, 8 lanes. vec_avx512.h is the
 * same with 16. */
#ifndef KVS_NATIVE_CPU_VEC_AVX2_H
#define KVS_NATIVE_CPU_VEC_AVX2_H

#include <immintrin.h>

#define KVS_MATHF_AVX2
#include "backends/cpu/encode_scale.h"
#include "backends/cpu/mathf.h"

#define V_WIDTH 8u
#define V_PANEL 2u  /* vectors of a register tile */
#define V_GROUPS 1u /* token vectors that a fused score walks at once */
#define V_FUSED 3u  /* queries of a page up to which nothing is stored decoded: their sums fit the registers */
#define V_MORE_WIDTHS(call, type)

typedef __m256 vf;
typedef __m256i vi;
typedef uint32_t v_u32 __attribute__((vector_size(32)));

static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf v_set1(float a) { return _mm256_set1_ps(a); }
static inline vf v_zero(void) { return _mm256_setzero_ps(); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
/* a where a > b, else b: a NaN in a never wins. */
static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf v_exp(vf a) { return kvs_expf_avx2(a); }
static inline vf v_silu(vf a) { return kvs_siluf_avx2(a); }

/* The first n lanes of a, `rest` in the others. */
static inline vf v_keep(vf a, vf rest, uint32_t n)
{
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
    return _mm256_blendv_ps(rest, a, _mm256_castsi256_ps(keep));
}

/* A NaN as the one canonical NaN. */
static inline vf v_canonical(vf a)
{
    return _mm256_blendv_ps(a, v_set1(NAN), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline float v_reduce_max(vf a)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* Sixteen lane sums, folded 8, 4, 2, 1. */
static inline float v_tree16(const vf *lanes)
{
    __m256 eight = _mm256_add_ps(lanes[0], lanes[1]);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline vi v_and(vi a, uint32_t mask) { return (vi)((v_u32)a & mask); }
static inline vi v_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi v_shr(vi a, uint32_t n) { return (vi)((v_u32)a >> n); }
static inline vi v_shl(vi a, uint32_t n) { return (vi)((v_u32)a << n); }
static inline vi v_as_int(vf a) { return _mm256_castps_si256(a); }
static inline vf v_as_float(vi a) { return _mm256_castsi256_ps(a); }
static inline vf v_convert(vi a) { return _mm256_cvtepi32_ps(a); }

static inline vi v_load_i8(const uint8_t *p)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

static inline vi v_load_u8(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

static inline vf v_load_f16(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static inline vf v_load_bf16(const uint8_t *p)
{
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)p);
    return v_as_float(v_shl(_mm256_cvtepu16_epi32(half), 16));
}

static inline float v_one_f16(const uint8_t *p)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(kvs_get_u16(p))));
}

/* Signed byte i of each lane. */
static inline vi v_byte(vi a, uint32_t i)
{
    return _mm256_srai_epi32(v_shl(a, 24 - 8 * i), 24);
}

/* Low half of each lane as float16. */
static inline vf v_low_f16(vi a)
{
    __m256i low = v_and(a, 0xffffu);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

/* table[low four bits of each lane] */
typedef struct v_table {
    vf low;
    vf high;
} v_table;
static inline v_table v_table16(const float *values)
{
    return (v_table){_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
}
static inline vf v_lookup(const v_table *table, vi index)
{
    vf low = _mm256_permutevar8x32_ps(table->low, index);
    vf high = _mm256_permutevar8x32_ps(table->high, index);
    return _mm256_blendv_ps(low, high, v_as_float(v_shl(index, 28)));
}

/* Low four bits of each lane less `centre` (0 or 8). */
static inline vf v_nibble(vi a, uint32_t centre)
{
    return v_convert(_mm256_sub_epi32(v_and(a, 15), _mm256_set1_epi32((int)centre)));
}

/* 16 in the lanes whose bit is set. */
static inline vi v_high_bits(uint32_t bits)
{
    __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane_bit), lane_bit);
    return v_and(set, 16);
}

/* 32 bits of each of the rows p, p + stride, ... */
static inline vi v_gather(const uint8_t *p, uint32_t stride)
{
    if (stride == 4) {
        return _mm256_loadu_si256((const __m256i *)(const void *)p);
    }
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i offset = _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)stride));
    return _mm256_i32gather_epi32((const int *)(const void *)p, offset, 1);
}

static inline vi v_halves(const uint8_t *p, uint64_t stride)
{
    __m256i a = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_inserti128_si256(a, _mm_loadu_si128((const __m128i *)(const void *)(p + 4 * stride)), 1);
}

/* 16 bytes of each of the rows p, p + stride, ...: out[i] holds dword i, one row to a lane. */
static inline void v_transpose(const uint8_t *p, uint64_t stride, vi out[4])
{
    __m256i a = v_halves(p, stride), b = v_halves(p + stride, stride);
    __m256i c = v_halves(p + 2 * stride, stride), d = v_halves(p + 3 * stride, stride);
    __m256i ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
    __m256i cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
    out[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
    out[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
    out[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
    out[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
}

#endif
