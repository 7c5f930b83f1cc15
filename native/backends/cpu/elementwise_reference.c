/* elementwise_reference.c: the definition of the operations on rows, in plain C. */
#include "backends/cpu/elementwise_rows.h"
#include "backends/cpu/mathf.h"

#include <math.h>
#include <stddef.h>

#define LANES 16u

static float sum_squares(const float *x, uint64_t n)
{
    float lanes[LANES] = {0};
    for (uint64_t i = 0; i < n; i++) {
        lanes[i % LANES] = fmaf(x[i], x[i], lanes[i % LANES]);
    }
    for (uint32_t width = LANES / 2; width != 0; width /= 2) {
        for (uint32_t j = 0; j < width; j++) {
            lanes[j] = lanes[j] + lanes[j + width];
        }
    }
    return lanes[0];
}

static void rms_norm(const float *x, const float *weight, uint64_t n, float eps, float *out)
{
    const float factor = 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
    for (uint64_t i = 0; i < n; i++) {
        float scaled = x[i] * factor;
        out[i] = weight != NULL ? scaled * weight[i] : scaled;
    }
}

static void swiglu(const float *gate, const float *up, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = kvs_siluf(gate[i]) * up[i];
    }
}

static void sigmoid_glu(const float *gate, const float *up, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) {
        out[i] = kvs_sigmoidf(gate[i]) * up[i];
    }
}

static void add(const float *a, const float *b, uint64_t n, float *out)
{
    for (uint64_t i = 0; i < n; i++) {
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
    for (uint32_t i = 0; i < n_pairs; i++) {
        rotate(x[2 * i], x[2 * i + 1], table + 2 * i, out + 2 * i, out + 2 * i + 1);
    }
}

static void rope_halves(const float *x, const float *table, uint32_t n_pairs, float *out)
{
    for (uint32_t i = 0; i < n_pairs; i++) {
        rotate(x[i], x[n_pairs + i], table + 2 * i, out + i, out + n_pairs + i);
    }
}

const kvs_row_ops kvs_row_ops_reference = {
    .rms_norm = rms_norm,
    .swiglu = swiglu,
    .sigmoid_glu = sigmoid_glu,
    .add = add,
    .rope_pairs = rope_pairs,
    .rope_halves = rope_halves,
};
