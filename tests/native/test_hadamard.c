/* test_hadamard.c: rotation is the orthonormal Walsh-Hadamard matrix, its own inverse, the same in each twin. */
#include "backends/cpu/backend.h"
#include "backends/cpu/hadamard.h"
#include "check.h"

#include <math.h>
#include <string.h>

#define MAX_BLOCK 1024u

static void fill(float *values, uint32_t n, uint32_t seed)
{
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
}

/* Entry (i, j) is (-1)^popcount(i & j) / sqrt(n). */
static void test_block_equals_the_matrix(void)
{
    for (uint32_t block = 2; block <= 256; block *= 2) {
        float values[256], original[256];
        double worst = 0.0;
        fill(original, block, block);
        memcpy(values, original, sizeof values);
        kvs_hadamard_block_reference(values, block);
        for (uint32_t i = 0; i < block; i++) {
            double sum = 0.0;
            for (uint32_t j = 0; j < block; j++) {
                const double sign = __builtin_popcount(i & j) % 2 == 0 ? 1.0 : -1.0;
                sum += sign * (double)original[j];
            }
            worst = fmax(worst, fabs(sum / sqrt((double)block) - (double)values[i]));
        }
        CHECK(worst < 1e-6);
    }
}

static void test_rotation_is_its_own_inverse_and_keeps_length(void)
{
    for (uint32_t block = 2; block <= MAX_BLOCK; block *= 2) {
        float values[MAX_BLOCK], original[MAX_BLOCK];
        double before = 0.0, after = 0.0, worst = 0.0;
        fill(original, block, 7 * block);
        memcpy(values, original, sizeof values);
        kvs_hadamard_rows(KVS_ISA_REFERENCE, values, 1, block, block, block);
        for (uint32_t i = 0; i < block; i++) {
            before += (double)original[i] * (double)original[i];
            after += (double)values[i] * (double)values[i];
        }
        CHECK(fabs(before - after) < 1e-5 * before);
        kvs_hadamard_rows(KVS_ISA_REFERENCE, values, 1, block, block, block);
        for (uint32_t i = 0; i < block; i++) {
            worst = fmax(worst, (double)fabsf(values[i] - original[i]));
        }
        CHECK(worst < 2e-6);
    }
}

static void test_twins_agree_and_blocks_are_separate(void)
{
    for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
        for (uint32_t block = 2; block <= MAX_BLOCK; block *= 2) {
            enum { N_ROWS = 3, N_VALUES = 2 * MAX_BLOCK, STRIDE = N_VALUES + 5 };
            static float values[N_ROWS * STRIDE], expected[N_ROWS * STRIDE];
            fill(values, N_ROWS * STRIDE, block + 1);
            memcpy(expected, values, sizeof values);
            kvs_hadamard_rows(isa, values, N_ROWS, STRIDE, N_VALUES, block);
            for (uint32_t row = 0; row < N_ROWS; row++) {
                for (uint32_t first = 0; first < N_VALUES; first += block) {
                    kvs_hadamard_block_reference(expected + row * STRIDE + first, block);
                }
            }
            CHECK(memcmp(values, expected, sizeof values) == 0); /* the gaps between rows too */
        }
    }
}

static void test_no_rotation_leaves_rows_alone(void)
{
    float values[64], expected[64];
    fill(values, 64, 5);
    memcpy(expected, values, sizeof values);
    kvs_hadamard_rows(kvs_cpu_isa_detect(), values, 1, 64, 64, 0);
    CHECK(memcmp(values, expected, sizeof values) == 0);
}

int main(void)
{
    test_block_equals_the_matrix();
    test_rotation_is_its_own_inverse_and_keeps_length();
    test_twins_agree_and_blocks_are_separate();
    test_no_rotation_leaves_rows_alone();
    return check_finish();
}
