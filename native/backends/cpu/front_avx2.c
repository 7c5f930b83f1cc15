/* front_avx2.c: the twin of the plain operations of front.c for AVX2. */
#include "backends/cpu/front.h"
#include "backends/cpu/mathf.h"

#include <immintrin.h>

#define WIDTH 8u

static uint64_t scan(const float *x, uint64_t n, float *largest)
{
    const __m256 infinity = _mm256_set1_ps(INFINITY);
    __m256 most = _mm256_set1_ps(-INFINITY);
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const int is_bad = _mm256_movemask_ps(_mm256_cmp_ps(v, infinity, _CMP_NLT_UQ));
        if (is_bad != 0) {
            return i + (uint64_t)__builtin_ctz((unsigned)is_bad);
        }
        most = _mm256_max_ps(most, v);
    }
    float lanes[WIDTH], found = -INFINITY;
    _mm256_storeu_ps(lanes, most);
    for (uint32_t j = 0; j < WIDTH; j++) {
        found = lanes[j] > found ? lanes[j] : found;
    }
    for (; i < n; i++) {
        if (!(x[i] < INFINITY)) {
            return i;
        }
        found = x[i] > found ? x[i] : found;
    }
    *largest = found;
    return n;
}

static void add_exps(const float *x, uint64_t n, float largest, double lanes[KVS_FRONT_LANES])
{
    const __m256 from = _mm256_set1_ps(largest);
    uint64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const __m256 e = kvs_expf_avx2(_mm256_sub_ps(_mm256_loadu_ps(x + i), from));
        double *at = lanes + i % KVS_FRONT_LANES;
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(e)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1));
        _mm256_storeu_pd(at, _mm256_add_pd(_mm256_loadu_pd(at), low));
        _mm256_storeu_pd(at + 4, _mm256_add_pd(_mm256_loadu_pd(at + 4), high));
    }
    for (; i < n; i++) {
        lanes[i % KVS_FRONT_LANES] += (double)kvs_expf(x[i] - largest);
    }
}

static uint64_t next_above(const float *x, uint64_t n, uint64_t from, float bound)
{
    const __m256 least = _mm256_set1_ps(bound);
    for (; from + WIDTH <= n; from += WIDTH) {
        const int is_above = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + from), least, _CMP_GT_OQ));
        if (is_above != 0) {
            return from + (uint64_t)__builtin_ctz((unsigned)is_above);
        }
    }
    while (from < n && !(x[from] > bound)) {
        from++;
    }
    return from;
}

const kvs_front_ops kvs_front_ops_avx2 = {.scan = scan, .add_exps = add_exps, .next_above = next_above};
