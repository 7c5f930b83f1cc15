/* act_avx2.c: the twin of act.c for AVX2. */
#include "backends/cpu/act.h"

#include "backends/cpu/half.h"

#include <immintrin.h>

static uint32_t largest_bits(const __m256 x[4])
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m[4];
    for (int i = 0; i < 4; i++) {
        m[i] = _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude);
    }
    __m256i top = _mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3]));
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(t);
}

static int32_t sum_lanes(__m128i v)
{
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1));
    return _mm_cvtsi128_si32(v);
}

static void quantize_group(const float *values, kvs_act_group *group)
{
    __m256 x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_loadu_ps(values + 8 * i);
    }
    uint32_t largest = largest_bits(x);
    float amax = kvs_f32_from_bits(largest);
    float d = 0.0f;
    float inverse = 0.0f;
    if (largest >= KVS_FLOAT_INF_BITS) {
        d = kvs_f32_from_bits(0x7fc00000u);
    } else if (amax >= KVS_ACT_LEAST) {
        d = amax / 127.0f;
        inverse = 127.0f / amax;
    }
    __m256i q[4];
    if (inverse != 0.0f) {
        __m256 factor = _mm256_set1_ps(inverse);
        for (int i = 0; i < 4; i++) {
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], factor));
        }
    } else {
        q[0] = q[1] = q[2] = q[3] = _mm256_setzero_si256();
    }
    __m256i first = _mm256_add_epi32(q[0], q[1]);
    __m256i second = _mm256_add_epi32(q[2], q[3]);
    int32_t count[2] = {
        sum_lanes(_mm_add_epi32(_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1))),
        sum_lanes(_mm_add_epi32(_mm256_castsi256_si128(second), _mm256_extracti128_si256(second, 1)))};
    /* Packing works within 128-bit halves; the permutation puts the words back in order. */
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_store_si256((__m256i *)group->codes, packed);
    group->d = d;
    group->sum = d * (float)(count[0] + count[1]);
    group->half_sum[0] = d * (float)count[0];
    group->half_sum[1] = d * (float)count[1];
    group->negative_count = -(count[0] + count[1]);
    group->negative_half_count[0] = -count[0];
    group->negative_half_count[1] = -count[1];
    group->padding = 0;
}

void kvs_act_quantize_avx2(const float *x, uint64_t k, kvs_act_group *groups, uint32_t stride)
{
    for (uint64_t g = 0; g < k / 32; g++) {
        quantize_group(x + g * 32, groups + g * stride);
    }
}
