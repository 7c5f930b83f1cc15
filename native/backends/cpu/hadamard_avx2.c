/* hadamard_avx2.c: butterflies on eight lanes, the operations of the plain twin. */
#include "backends/cpu/hadamard.h"

#include <immintrin.h>
#include <math.h>

/* Distances 1, 2, 4: a lane whose partner lies above it becomes sum, the partner difference. */
static __m256 rotate_lanes(__m256 x)
{
    __m256 partner = _mm256_permute_ps(x, 0xb1);
    x = _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), 0xaa);
    partner = _mm256_permute_ps(x, 0x4e);
    x = _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), 0xcc);
    partner = _mm256_permute2f128_ps(x, x, 0x01);
    return _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), 0xf0);
}

void kvs_hadamard_block_avx2(float *values, uint32_t block)
{
    for (uint32_t i = 0; i < block; i += 8) {
        _mm256_storeu_ps(values + i, rotate_lanes(_mm256_loadu_ps(values + i)));
    }
    for (uint32_t distance = 8; distance < block; distance *= 2) {
        for (uint32_t first = 0; first < block; first += 2 * distance) {
            for (uint32_t i = first; i < first + distance; i += 8) {
                const __m256 a = _mm256_loadu_ps(values + i), b = _mm256_loadu_ps(values + i + distance);
                _mm256_storeu_ps(values + i, _mm256_add_ps(a, b));
                _mm256_storeu_ps(values + i + distance, _mm256_sub_ps(a, b));
            }
        }
    }
    const __m256 scale = _mm256_set1_ps((float)(1.0 / sqrt((double)block)));
    for (uint32_t i = 0; i < block; i += 8) {
        _mm256_storeu_ps(values + i, _mm256_mul_ps(_mm256_loadu_ps(values + i), scale));
    }
}
