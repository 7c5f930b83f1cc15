/* hadamard.c: rotation of rows, and the plain twin. */
#include "backends/cpu/hadamard.h"
#include "kvstream/device.h"

#include <math.h>

void kvs_hadamard_block_reference(float *values, uint32_t block)
{
    for (uint32_t distance = 1; distance < block; distance *= 2) {
        for (uint32_t first = 0; first < block; first += 2 * distance) {
            for (uint32_t i = first; i < first + distance; i++) {
                const float a = values[i], b = values[i + distance];
                values[i] = a + b;
                values[i + distance] = a - b;
            }
        }
    }
    const float scale = (float)(1.0 / sqrt((double)block));
    for (uint32_t i = 0; i < block; i++) {
        values[i] *= scale;
    }
}

void kvs_hadamard_rows(uint32_t isa, float *values, uint64_t n_rows, uint64_t row_stride, uint32_t n_values,
                       uint32_t block)
{
    void (*rotate)(float *, uint32_t) = kvs_hadamard_block_reference;
#if defined(__x86_64__)
    if (isa >= KVS_ISA_AVX2 && block >= 8) {
        rotate = kvs_hadamard_block_avx2;
    }
#endif
    (void)isa;
    if (block == 0) {
        return;
    }
    for (uint64_t row = 0; row < n_rows; row++) {
        for (uint32_t first = 0; first < n_values; first += block) {
            rotate(values + row * row_stride + first, block);
        }
    }
}
