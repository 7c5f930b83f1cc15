/* elementwise_avx2.c: the twin of elementwise_reference.c for AVX2. What does not fill a vector goes through masks or
 * through scalar code with the same operations. */
#include "backends/cpu/elementwise_rows.h"
#include "backends/cpu/mathf.h"

#include <immintrin.h>
#include <math.h>
#include <stddef.h>

#define WIDTH 8u

/* Lanes 0..count-1 of a vector; count may exceed the width. */
static __m256i lane_mask(uint64_t count)
{
    int n = count < WIDTH ? (int)count : (int)WIDTH;
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static float sum_squares(const float *x, uint64_t n)
{
    __m256 low = _mm256_setzero_ps(); /* lanes 0..7 */
    __m256 high = _mm256_setzero_ps();
    uint64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        __m256 a = _mm256_loadu_ps(x + i);
        __m256 b = _mm256_loadu_ps(x + i + WIDTH);
        low = _mm256_fmadd_ps(a, a, low);
        high = _mm256_fmadd_ps(b, b, high);
    }
    /* A masked lane adds +0 to a sum that is +0 or positive: its bits stay. */
    if (i < n) {
        __m256 a = _mm256_maskload_ps(x + i, lane_mask(n - i));
        low = _mm256_fmadd_ps(a, a, low);
    }
    if (i + WIDTH < n) {
        __m256 b = _mm256_maskload_ps(x + i + WIDTH, lane_mask(n - i - WIDTH));
        high = _mm256_fmadd_ps(b, b, high);
    }
    __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static void rms_norm(const float *x, const float *weight, uint64_t n, float eps, float *out)
{
    const float factor = 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
    const __m256 factors = _mm256_set1_ps(factor);
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), factors);
        _mm256_storeu_ps(out + i, weight != NULL ? _mm256_mul_ps(scaled, _mm256_loadu_ps(weight + i)) : scaled);
    }
    for (; i < n; i++) {
        float scaled = x[i] * factor;
        out[i] = weight != NULL ? scaled * weight[i] : scaled;
    }
}

static void swiglu(const float *gate, const float *up, uint64_t n, float *out)
{
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        __m256 activated = kvs_siluf_avx2(_mm256_loadu_ps(gate + i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(activated, _mm256_loadu_ps(up + i)));
    }
    for (; i < n; i++) {
        out[i] = kvs_siluf(gate[i]) * up[i];
    }
}

static void sigmoid_glu(const float *gate, const float *up, uint64_t n, float *out)
{
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        __m256 activated = kvs_sigmoidf_avx2(_mm256_loadu_ps(gate + i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(activated, _mm256_loadu_ps(up + i)));
    }
    for (; i < n; i++) {
        out[i] = kvs_sigmoidf(gate[i]) * up[i];
    }
}

static void add(const float *a, const float *b, uint64_t n, float *out)
{
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    }
    for (; i < n; i++) {
        out[i] = a[i] + b[i];
    }
}

static void rotate(float a, float b, const float *cos_sin, float *first, float *second)
{
    *first = fmaf(a, cos_sin[0], -(b * cos_sin[1]));
    *second = fmaf(a, cos_sin[1], b * cos_sin[0]);
}

static void rope_pairs(const float *x, const float *table, uint32_t n_pairs, float *out)
{
    uint32_t i = 0;
    for (; i + 4 <= n_pairs; i += 4) {
        __m256 v = _mm256_loadu_ps(x + 2 * i);
        __m256 cos_sin = _mm256_loadu_ps(table + 2 * i);
        __m256 a = _mm256_moveldup_ps(v);
        __m256 b = _mm256_movehdup_ps(v);
        /* Even lanes: a cos - b sin; odd lanes: a sin + b cos. */
        __m256 second = _mm256_mul_ps(b, _mm256_permute_ps(cos_sin, 0xb1));
        _mm256_storeu_ps(out + 2 * i, _mm256_fmaddsub_ps(a, cos_sin, second));
    }
    for (; i < n_pairs; i++) {
        rotate(x[2 * i], x[2 * i + 1], table + 2 * i, out + 2 * i, out + 2 * i + 1);
    }
}

static void rope_halves(const float *x, const float *table, uint32_t n_pairs, float *out)
{
    uint32_t i = 0;
    for (; i + WIDTH <= n_pairs; i += WIDTH) {
        __m256 first = _mm256_loadu_ps(table + 2 * i);
        __m256 second = _mm256_loadu_ps(table + 2 * i + WIDTH);
        /* The shuffle takes even or odd lanes of each 128-bit half; the permutation orders the halves. */
        __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0x88));
        __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0xdd));
        __m256 cosines = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
        __m256 sines = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
        __m256 a = _mm256_loadu_ps(x + i);
        __m256 b = _mm256_loadu_ps(x + n_pairs + i);
        _mm256_storeu_ps(out + i, _mm256_fmsub_ps(a, cosines, _mm256_mul_ps(b, sines)));
        _mm256_storeu_ps(out + n_pairs + i, _mm256_fmadd_ps(a, sines, _mm256_mul_ps(b, cosines)));
    }
    for (; i < n_pairs; i++) {
        rotate(x[i], x[n_pairs + i], table + 2 * i, out + i, out + n_pairs + i);
    }
}

const kvs_row_ops kvs_row_ops_avx2 = {
    .rms_norm = rms_norm,
    .swiglu = swiglu,
    .sigmoid_glu = sigmoid_glu,
    .add = add,
    .rope_pairs = rope_pairs,
    .rope_halves = rope_halves,
};
