/* delta_reference.c: the definition of delta_ops.h in plain C. */
#include "backends/cpu/delta_ops.h"
#include "backends/cpu/mathf.h"

#include <string.h>

static float fold_lanes(float *lanes)
{
    for (uint32_t width = KVS_DELTA_LANES / 2; width != 0; width /= 2) {
        for (uint32_t j = 0; j < width; j++) {
            lanes[j] = lanes[j] + lanes[j + width];
        }
    }
    return lanes[0];
}

static float dot(const float *a, const float *b, uint32_t n)
{
    float lanes[KVS_DELTA_LANES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        lanes[i % KVS_DELTA_LANES] = fmaf(a[i], b[i], lanes[i % KVS_DELTA_LANES]);
    }
    return fold_lanes(lanes);
}

/* Row t for one row of M; returns what the output of that row is, if it has one. */
static float step(const kvs_delta_recurrence *r, uint32_t t, float v, float *m)
{
    const uint32_t n = r->head_dim;
    const float *k = r->k + (uint64_t)t * n;
    const float d = r->beta[t] * fmaf(-r->decay[t], dot(m, k, n), v);
    for (uint32_t i = 0; i < n; i++) {
        m[i] = fmaf(d, k[i], r->decay[t] * m[i]);
    }
    return t < r->n_fold ? 0.0f : dot(m, r->q + (uint64_t)t * n, n);
}

static void recur(const kvs_delta_recurrence *r)
{
    const uint32_t n = r->head_dim;
    for (uint32_t j = 0; j < n; j++) {
        float m[KVS_DELTA_MAX_HEAD];
        memcpy(m, r->from + (uint64_t)j * n, n * sizeof *m);
        for (uint32_t t = 0; t <= r->n_rows; t++) {
            if (t == r->n_fold && r->folded != NULL) {
                memcpy(r->folded + (uint64_t)j * n, m, n * sizeof *m);
            }
            if (t == r->n_rows) {
                break;
            }
            const float o = step(r, t, r->v[(uint64_t)t * n + j], m);
            if (t >= r->n_fold) {
                r->out[(t - r->n_fold) * r->out_stride + j] = o;
            }
        }
        if (r->last != NULL) {
            memcpy(r->last + (uint64_t)j * n, m, n * sizeof *m);
        }
    }
}

static void convolve(const float *const *rows, const float *weights, uint32_t n_taps, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i++) {
        float sum = weights[i] * rows[0][i];
        for (uint32_t tap = 1; tap < n_taps; tap++) {
            sum = fmaf(weights[(uint64_t)tap * n + i], rows[tap][i], sum);
        }
        out[i] = kvs_siluf(sum);
    }
}

static void normalise(float *x, uint32_t n, float eps, float scale)
{
    const float factor = 1.0f / sqrtf(dot(x, x, n) + eps) * scale;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = x[i] * factor;
    }
}

static void multiply(const kvs_delta_product *p)
{
    for (uint32_t r = 0; r < p->n_rows; r++) {
        for (uint32_t n = 0; n < p->n_cols; n++) {
            float *c = &p->c[r * p->c_stride + n];
            float sum = p->keeps ? p->keep * *c : 0.0f;
            for (uint32_t s = 0; s < p->depth; s++) {
                sum = fmaf(p->a[r * p->a_row + s * p->a_step], p->b[s * p->b_stride + n], sum);
            }
            *c = sum;
        }
    }
}

static void accumulate(const float *factors, const float *rows, uint32_t n_rows, uint32_t n, float *x)
{
    for (uint32_t s = 0; s < n_rows; s++) {
        for (uint32_t i = 0; i < n; i++) {
            x[i] = fmaf(factors[s], rows[(uint64_t)s * n + i], x[i]);
        }
    }
}

static void exponential(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = kvs_expf(x[i]);
    }
}

static const kvs_delta_ops OPS = {.recur = recur,
                                  .convolve = convolve,
                                  .normalise = normalise,
                                  .multiply = multiply,
                                  .accumulate = accumulate,
                                  .exponential = exponential};

const kvs_delta_ops *kvs_delta_ops_reference(void)
{
    return &OPS;
}
