/* mathf.h: transcendental functions whose bits are ours: one sequence of float32 operations, written in C and once per
 * vector width, so that no platform's library decides a token.
 *
 * exp: x = n ln 2 + r with |r| <= ln 2 / 2; the series of e^r to degree 7 (truncation 5e-9) by fused multiply-add; 2^n as
 * two exact factors, so that results fade into subnormals with one rounding and overflow to infinity. Error below 1 ulp;
 * exp(0) is exactly 1; a NaN stays a NaN.
 * silu(x) = x / (1 + exp(-x)); sigmoid(x) = 1 / (1 + exp(-x)).
 * softplus(x) = log(1 + exp(x)), x itself above 20: the logarithm in float64, its argument's rounding undone by the quotient.
 */
#ifndef KVS_NATIVE_CPU_MATHF_H
#define KVS_NATIVE_CPU_MATHF_H

#include "backends/cpu/half.h"

#include <math.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define KVS_EXP_LOW (-104.0f) /* below: 0 after rounding */
#define KVS_EXP_HIGH 89.0f    /* above: infinity */
#define KVS_EXP_LOG2E 1.44269504f
#define KVS_EXP_LN2_HIGH 0.693145752f /* 15 significant bits: its product with n is exact */
#define KVS_EXP_LN2_LOW 1.42860682e-6f
#define KVS_EXP_SHIFT 12582912.0f /* 1.5 * 2^23: adding it rounds to nearest even integers */
#define KVS_EXP_SHIFT_BITS 0x4b400000u
#define KVS_EXP_C7 1.98412698e-4f
#define KVS_EXP_C6 1.38888889e-3f
#define KVS_EXP_C5 8.33333333e-3f
#define KVS_EXP_C4 4.16666667e-2f
#define KVS_EXP_C3 1.66666667e-1f

static inline float kvs_expf(float x)
{
    x = x < KVS_EXP_LOW ? KVS_EXP_LOW : x;
    x = x > KVS_EXP_HIGH ? KVS_EXP_HIGH : x;
    float shifted = fmaf(x, KVS_EXP_LOG2E, KVS_EXP_SHIFT);
    float n = shifted - KVS_EXP_SHIFT;
    float r = fmaf(n, -KVS_EXP_LN2_HIGH, x);
    r = fmaf(n, -KVS_EXP_LN2_LOW, r);
    float p = fmaf(KVS_EXP_C7, r, KVS_EXP_C6);
    p = fmaf(p, r, KVS_EXP_C5);
    p = fmaf(p, r, KVS_EXP_C4);
    p = fmaf(p, r, KVS_EXP_C3);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* 256 is added before halving, so that the unsigned shift rounds down for negative n as well. */
    uint32_t exponent = kvs_f32_bits(shifted) - KVS_EXP_SHIFT_BITS;
    uint32_t half = ((exponent + 256u) >> 1) - 128u;
    uint32_t rest = exponent - half;
    return p * kvs_f32_from_bits((half + 127u) << 23) * kvs_f32_from_bits((rest + 127u) << 23);
}

static inline float kvs_siluf(float x)
{
    return x / (1.0f + kvs_expf(-x));
}

static inline float kvs_sigmoidf(float x)
{
    return 1.0f / (1.0f + kvs_expf(-x));
}

/* Natural logarithm of a finite number of at least 1: 2 atanh((m - 1) / (m + 1)) of m in [0.7, 1.42], to degree 21. */
static inline double kvs_log_above_one(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    double exponent = (double)(int64_t)(bits >> 52) - 1023.0;
    bits = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(0x3ff0000000000000);
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1.0;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    double p = 1.0 / 21.0;
    for (int k = 19; k >= 1; k -= 2) {
        p = p * z + 1.0 / (double)k;
    }
    return exponent * 0.69314718055994530942 + 2.0 * s * p;
}

static inline float kvs_softplusf(float x)
{
    if (!(x <= 20.0f)) {
        return x;
    }
    const double e = (double)kvs_expf(x);
    const double sum = 1.0 + e;
    return sum == 1.0 ? (float)e : (float)(kvs_log_above_one(sum) * (e / (sum - 1.0)));
}

#if defined(__AVX2__) && defined(__FMA__)
static inline __m256 kvs_expf_avx2(__m256 x)
{
    /* The bound comes first: max and min give the second operand when one is a NaN. */
    x = _mm256_max_ps(_mm256_set1_ps(KVS_EXP_LOW), x);
    x = _mm256_min_ps(_mm256_set1_ps(KVS_EXP_HIGH), x);
    __m256 shift = _mm256_set1_ps(KVS_EXP_SHIFT);
    __m256 one = _mm256_set1_ps(1.0f);
    __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(KVS_EXP_LOG2E), shift);
    __m256 n = _mm256_sub_ps(shifted, shift);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVS_EXP_LN2_HIGH), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVS_EXP_LN2_LOW), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(KVS_EXP_C7), r, _mm256_set1_ps(KVS_EXP_C6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVS_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVS_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVS_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i exponent = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(shift));
    __m256i half = _mm256_srai_epi32(exponent, 1);
    __m256i rest = _mm256_sub_epi32(exponent, half);
    __m256i bias = _mm256_set1_epi32(127);
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(p, first), second);
}

static inline __m256 kvs_siluf_avx2(__m256 x)
{
    __m256 negative = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), kvs_expf_avx2(negative)));
}

static inline __m256 kvs_sigmoidf_avx2(__m256 x)
{
    __m256 one = _mm256_set1_ps(1.0f);
    __m256 negative = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_div_ps(one, _mm256_add_ps(one, kvs_expf_avx2(negative)));
}
#endif

#if defined(__AVX512F__)
static inline __m512 kvs_expf_avx512(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(KVS_EXP_LOW), x);
    x = _mm512_min_ps(_mm512_set1_ps(KVS_EXP_HIGH), x);
    __m512 shift = _mm512_set1_ps(KVS_EXP_SHIFT);
    __m512 one = _mm512_set1_ps(1.0f);
    __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(KVS_EXP_LOG2E), shift);
    __m512 n = _mm512_sub_ps(shifted, shift);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVS_EXP_LN2_HIGH), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVS_EXP_LN2_LOW), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(KVS_EXP_C7), r, _mm512_set1_ps(KVS_EXP_C6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVS_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVS_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVS_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i exponent = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(shift));
    __m512i half = _mm512_srai_epi32(exponent, 1);
    __m512i rest = _mm512_sub_epi32(exponent, half);
    __m512i bias = _mm512_set1_epi32(127);
    __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23));
    __m512 second = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(rest, bias), 23));
    return _mm512_mul_ps(_mm512_mul_ps(p, first), second);
}

static inline __m512 kvs_siluf_avx512(__m512 x)
{
    __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    __m512 negative = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), sign));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), kvs_expf_avx512(negative)));
}
#endif

#endif
