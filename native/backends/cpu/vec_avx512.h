/* vec_avx512.h: the vector operations that decode_body.h and attend_body.h are written in, 16 lanes. vec_avx2.h is the
 * same with 8. */
#ifndef KVS_NATIVE_CPU_VEC_AVX512_H
#define KVS_NATIVE_CPU_VEC_AVX512_H

#include <immintrin.h>

#define KVS_MATHF_AVX512
#include "backends/cpu/encode_scale.h"
#include "backends/cpu/mathf.h"

#define V_WIDTH 16u
#define V_PANEL 4u  /* vectors of a register tile */
#define V_GROUPS 2u /* token vectors that a fused score walks at once, to hide the latency of its chains */
#define V_FUSED 6u  /* queries of a page up to which nothing is stored decoded: their sums fit the registers */
#define V_MORE_WIDTHS(call, type) \
    case 4: \
        call(type, 4, leaf); \
        break; \
    case 5: \
        call(type, 5, leaf); \
        break; \
    case 6: \
        call(type, 6, leaf); \
        break;

typedef __m512 vf;
typedef __m512i vi;
typedef uint32_t v_u32 __attribute__((vector_size(64)));

static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf v_set1(float a) { return _mm512_set1_ps(a); }
static inline vf v_zero(void) { return _mm512_setzero_ps(); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
/* a where a > b, else b: a NaN in a never wins. */
static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf v_exp(vf a) { return kvs_expf_avx512(a); }
static inline vf v_silu(vf a) { return kvs_siluf_avx512(a); }

/* The first n lanes of a, `rest` in the others. */
static inline vf v_keep(vf a, vf rest, uint32_t n)
{
    const uint32_t first_n = n >= 16 ? 0xffffu : (1u << n) - 1u;
    return _mm512_mask_mov_ps(rest, (__mmask16)first_n, a);
}

/* A NaN as the one canonical NaN. */
static inline vf v_canonical(vf a)
{
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), v_set1(NAN));
}

static inline float v_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }

/* Sixteen lane sums, folded 8, 4, 2, 1. */
static inline float v_tree16(const vf *lanes)
{
    __m256 high = _mm512_extractf32x8_ps(lanes[0], 1);
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(lanes[0]), high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline vi v_and(vi a, uint32_t mask) { return (vi)((v_u32)a & mask); }
static inline vi v_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi v_shr(vi a, uint32_t n) { return (vi)((v_u32)a >> n); }
static inline vi v_shl(vi a, uint32_t n) { return (vi)((v_u32)a << n); }
static inline vi v_as_int(vf a) { return _mm512_castps_si512(a); }
static inline vf v_as_float(vi a) { return _mm512_castsi512_ps(a); }
static inline vf v_convert(vi a) { return _mm512_cvtepi32_ps(a); }

static inline vi v_load_i8(const uint8_t *p)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static inline vi v_load_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static inline vf v_load_f16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

static inline vf v_load_bf16(const uint8_t *p)
{
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)p);
    return v_as_float(v_shl(_mm512_cvtepu16_epi32(half), 16));
}

static inline float v_one_f16(const uint8_t *p)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(kvs_get_u16(p))));
}

/* Signed byte i of each lane: a byte dot product with one weight of 1. */
static inline vi v_byte(vi a, uint32_t i)
{
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi32((int)(1u << 8 * i)), a);
}

/* Low half of each lane as float16. */
static inline vf v_low_f16(vi a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }

/* table[low four bits of each lane] */
typedef vf v_table;
static inline v_table v_table16(const float *values) { return _mm512_loadu_ps(values); }
static inline vf v_lookup(const v_table *table, vi index) { return _mm512_permutexvar_ps(index, *table); }

/* Low four bits of each lane less `centre` (0 or 8): one lookup. */
static inline vf v_nibble(vi a, uint32_t centre)
{
    static const float plain[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const float centred[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const v_table table = v_table16(centre == 0 ? plain : centred);
    return v_lookup(&table, a);
}

/* 16 in the lanes whose bit is set. */
static inline vi v_high_bits(uint32_t bits)
{
    return _mm512_maskz_set1_epi32((__mmask16)bits, 16);
}

/* 32 bits of each of the rows p, p + stride, ... */
static inline vi v_gather(const uint8_t *p, uint32_t stride)
{
    if (stride == 4) {
        return _mm512_loadu_si512(p);
    }
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i offset = _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)stride));
    const __m256i low = _mm256_i32gather_epi32((const int *)(const void *)p, offset, 1);
    const __m256i high = _mm256_i32gather_epi32((const int *)(const void *)(p + 8 * (size_t)stride), offset, 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

static inline vi v_quarters(const uint8_t *p, uint64_t stride)
{
    __m512i a = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)p));
    a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(const void *)(p + 4 * stride)), 1);
    a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(const void *)(p + 8 * stride)), 2);
    return _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(const void *)(p + 12 * stride)), 3);
}

/* 16 bytes of each of the rows p, p + stride, ...: out[i] holds dword i, one row to a lane. */
static inline void v_transpose(const uint8_t *p, uint64_t stride, vi out[4])
{
    __m512i a = v_quarters(p, stride), b = v_quarters(p + stride, stride);
    __m512i c = v_quarters(p + 2 * stride, stride), d = v_quarters(p + 3 * stride, stride);
    __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    out[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
    out[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
    out[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
    out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

#endif
