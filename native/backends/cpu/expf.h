/* expf.h: the exponential function of the CPU backend: one sequence of float32 operations, the same bits in each twin.
 *
 * Units: e^x, error below one unit in the last place. exp(0) is exactly 1; below KVS_EXPF_LOW the result is +0 (no
 * subnormal results), above KVS_EXPF_HIGH infinity; NaN stays NaN.
 * Order: n = round(x * log2(e)); r = x - n * ln(2) in two parts; Horner; n added to the exponent field.
 */
#ifndef KVS_NATIVE_CPU_EXPF_H
#define KVS_NATIVE_CPU_EXPF_H

#include "backends/cpu/half.h"

#include <math.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define KVS_EXPF_LOW (-87.33f)
#define KVS_EXPF_HIGH 88.72f
#define KVS_EXPF_LOG2E 0x1.715476p+0f
#define KVS_EXPF_ROUND 12582912.0f /* 1.5 * 2^23: adding it leaves an integer in the low bits */
#define KVS_EXPF_LN2_HIGH 0x1.62e400p-1f
#define KVS_EXPF_LN2_LOW 0x1.7f7d1cp-20f
#define KVS_EXPF_C2 0x1.fffffcp-2f
#define KVS_EXPF_C3 0x1.555490p-3f
#define KVS_EXPF_C4 0x1.5558f4p-5f
#define KVS_EXPF_C5 0x1.123a6cp-7f
#define KVS_EXPF_C6 0x1.6a2350p-10f

static inline float kvs_expf(float x)
{
    if (x < KVS_EXPF_LOW) {
        return 0.0f;
    }
    if (x > KVS_EXPF_HIGH) {
        return INFINITY;
    }
    float shifted = fmaf(x, KVS_EXPF_LOG2E, KVS_EXPF_ROUND);
    float n = shifted - KVS_EXPF_ROUND;
    float r = fmaf(n, -KVS_EXPF_LN2_HIGH, x);
    r = fmaf(n, -KVS_EXPF_LN2_LOW, r);
    float p = fmaf(KVS_EXPF_C6, r, KVS_EXPF_C5);
    p = fmaf(p, r, KVS_EXPF_C4);
    p = fmaf(p, r, KVS_EXPF_C3);
    p = fmaf(p, r, KVS_EXPF_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    if (x != x) {
        return x;
    }
    return kvs_f32_from_bits(kvs_f32_bits(p) + (kvs_f32_bits(shifted) << 23));
}

#if defined(__AVX2__) && defined(__FMA__)
static inline __m256 kvs_expf_avx2(__m256 x)
{
    __m256 round = _mm256_set1_ps(KVS_EXPF_ROUND);
    __m256 one = _mm256_set1_ps(1.0f);
    __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(KVS_EXPF_LOG2E), round);
    __m256 n = _mm256_sub_ps(shifted, round);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVS_EXPF_LN2_HIGH), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVS_EXPF_LN2_LOW), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(KVS_EXPF_C6), r, _mm256_set1_ps(KVS_EXPF_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVS_EXPF_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVS_EXPF_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVS_EXPF_C2));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i scale = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), scale));
    __m256 low = _mm256_cmp_ps(x, _mm256_set1_ps(KVS_EXPF_LOW), _CMP_LT_OQ);
    __m256 high = _mm256_cmp_ps(x, _mm256_set1_ps(KVS_EXPF_HIGH), _CMP_GT_OQ);
    y = _mm256_andnot_ps(low, y);
    y = _mm256_blendv_ps(y, _mm256_set1_ps(INFINITY), high);
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
#endif

#if defined(__AVX512F__)
static inline __m512 kvs_expf_avx512(__m512 x)
{
    __m512 round = _mm512_set1_ps(KVS_EXPF_ROUND);
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(KVS_EXPF_LOG2E), round);
    __m512 n = _mm512_sub_ps(shifted, round);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVS_EXPF_LN2_HIGH), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVS_EXPF_LN2_LOW), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(KVS_EXPF_C6), r, _mm512_set1_ps(KVS_EXPF_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVS_EXPF_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVS_EXPF_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVS_EXPF_C2));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i scale = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    __m512 y = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), scale));
    __mmask16 low = _mm512_cmp_ps_mask(x, _mm512_set1_ps(KVS_EXPF_LOW), _CMP_LT_OQ);
    __mmask16 high = _mm512_cmp_ps_mask(x, _mm512_set1_ps(KVS_EXPF_HIGH), _CMP_GT_OQ);
    y = _mm512_mask_mov_ps(y, low, _mm512_setzero_ps());
    y = _mm512_mask_mov_ps(y, high, _mm512_set1_ps(INFINITY));
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}
#endif

#endif
