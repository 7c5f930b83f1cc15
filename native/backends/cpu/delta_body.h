/* delta_body.h: delta_ops.h in the vector operations of vec_avx2.h or vec_avx512.h, which is included before. Functions that
 * take a number of vectors are compiled once for each head size, so that rows of M stay in registers where they fit. */
#include "backends/cpu/delta_ops.h"

#define V_LANES (KVS_DELTA_LANES / V_WIDTH) /* vectors that hold the lanes of a sum */
#define V_MOST (KVS_DELTA_MAX_HEAD / V_WIDTH)
#define INLINE static inline __attribute__((always_inline))

/* Rows of M that are taken through the pass together: their sums wait for one another's latency instead of for their own. */
#define V_TOGETHER 4u

INLINE void load_row(vf *m, const float *row, uint32_t n_vectors)
{
    for (uint32_t i = 0; i < n_vectors; i++) {
        m[i] = v_load(row + i * V_WIDTH);
    }
}

INLINE void store_row(const vf *m, float *row, uint32_t n_vectors)
{
    for (uint32_t i = 0; i < n_vectors; i++) {
        v_store(row + i * V_WIDTH, m[i]);
    }
}

/* sums[r] = m[r] b */
INLINE void dot_rows(const vf m[][V_MOST], const float *b, uint32_t n_rows, uint32_t n_vectors, float *sums)
{
    vf lanes[V_TOGETHER][V_LANES];
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t i = 0; i < V_LANES; i++) {
            lanes[r][i] = v_zero();
        }
    }
    for (uint32_t i = 0; i < n_vectors; i++) {
        const vf value = v_load(b + i * V_WIDTH);
        for (uint32_t r = 0; r < n_rows; r++) {
            lanes[r][i % V_LANES] = v_fma(m[r][i], value, lanes[r][i % V_LANES]);
        }
    }
    for (uint32_t r = 0; r < n_rows; r++) {
        sums[r] = v_tree16(lanes[r]);
    }
}

/* Row t of the pass for n_rows rows of M from row j on. */
INLINE void recur_step(const kvs_delta_recurrence *r, uint32_t t, uint32_t j, vf m[][V_MOST], uint32_t n_rows,
                       uint32_t n_vectors)
{
    const uint64_t at = (uint64_t)t * n_vectors * V_WIDTH;
    const float *k = r->k + at;
    const float beta = r->beta[t], decay = r->decay[t];
    const vf decays = v_set1(decay);
    float sums[V_TOGETHER];
    vf updates[V_TOGETHER];
    dot_rows(m, k, n_rows, n_vectors, sums);
    for (uint32_t i = 0; i < n_rows; i++) {
        updates[i] = v_set1(beta * fmaf(-decay, sums[i], r->v[at + j + i]));
    }
    for (uint32_t i = 0; i < n_vectors; i++) {
        const vf key = v_load(k + i * V_WIDTH);
        for (uint32_t row = 0; row < n_rows; row++) {
            m[row][i] = v_fma(updates[row], key, v_mul(decays, m[row][i]));
        }
    }
    if (t >= r->n_fold) {
        dot_rows(m, r->q + at, n_rows, n_vectors, r->out + (t - r->n_fold) * r->out_stride + j);
    }
}

INLINE void recur_vectors(const kvs_delta_recurrence *r, uint32_t n_rows, uint32_t n_vectors)
{
    const uint64_t n = (uint64_t)n_vectors * V_WIDTH;
    for (uint32_t j = 0; j < n; j += n_rows) {
        vf m[V_TOGETHER][V_MOST];
        for (uint32_t i = 0; i < n_rows; i++) {
            load_row(m[i], r->from + (j + i) * n, n_vectors);
        }
        for (uint32_t t = 0; t < r->n_fold; t++) {
            recur_step(r, t, j, m, n_rows, n_vectors);
        }
        for (uint32_t i = 0; i < n_rows && r->folded != NULL; i++) {
            store_row(m[i], r->folded + (j + i) * n, n_vectors);
        }
        for (uint32_t t = r->n_fold; t < r->n_rows; t++) {
            recur_step(r, t, j, m, n_rows, n_vectors);
        }
        for (uint32_t i = 0; i < n_rows && r->last != NULL; i++) {
            store_row(m[i], r->last + (j + i) * n, n_vectors);
        }
    }
}

static void recur(const kvs_delta_recurrence *r)
{
    switch (r->head_dim) {
    case 16:
        recur_vectors(r, 4, 16 / V_WIDTH);
        break;
    case 32:
        recur_vectors(r, 4, 32 / V_WIDTH);
        break;
    case 64:
        recur_vectors(r, 4, 64 / V_WIDTH);
        break;
    default:
        recur_vectors(r, V_WIDTH == 16 ? 4 : 2, 128 / V_WIDTH);
        break;
    }
}

static void convolve(const float *const *rows, const float *weights, uint32_t n_taps, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i += V_WIDTH) {
        vf sum = v_mul(v_load(weights + i), v_load(rows[0] + i));
        for (uint32_t tap = 1; tap < n_taps; tap++) {
            sum = v_fma(v_load(weights + (uint64_t)tap * n + i), v_load(rows[tap] + i), sum);
        }
        v_store(out + i, v_silu(sum));
    }
}

static void normalise(float *x, uint32_t n, float eps, float scale)
{
    vf lanes[V_LANES];
    for (uint32_t i = 0; i < V_LANES; i++) {
        lanes[i] = v_zero();
    }
    for (uint32_t i = 0; i < n; i += KVS_DELTA_LANES) {
        for (uint32_t j = 0; j < V_LANES; j++) {
            const vf value = v_load(x + i + j * V_WIDTH);
            lanes[j] = v_fma(value, value, lanes[j]);
        }
    }
    const vf factor = v_set1(1.0f / sqrtf(v_tree16(lanes) + eps) * scale);
    for (uint32_t i = 0; i < n; i += V_WIDTH) {
        v_store(x + i, v_mul(v_load(x + i), factor));
    }
}

/* A tile of c stays in registers over the whole depth. */
INLINE void multiply_tile(const kvs_delta_product *p, uint32_t row, uint32_t col, uint32_t n_rows, uint32_t n_vectors)
{
    vf sums[4][V_PANEL];
    const vf keep = v_set1(p->keep);
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t i = 0; i < n_vectors; i++) {
            const float *c = p->c + (row + r) * p->c_stride + col + i * V_WIDTH;
            sums[r][i] = p->keeps ? v_mul(keep, v_load(c)) : v_zero();
        }
    }
    const float *a = p->a + row * p->a_row;
    const float *b = p->b + col;
    for (uint32_t s = 0; s < p->depth; s++, a += p->a_step, b += p->b_stride) {
        for (uint32_t r = 0; r < n_rows; r++) {
            const vf factor = v_set1(a[r * p->a_row]);
            for (uint32_t i = 0; i < n_vectors; i++) {
                sums[r][i] = v_fma(factor, v_load(b + i * V_WIDTH), sums[r][i]);
            }
        }
    }
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t i = 0; i < n_vectors; i++) {
            v_store(p->c + (row + r) * p->c_stride + col + i * V_WIDTH, sums[r][i]);
        }
    }
}

INLINE void multiply_columns(const kvs_delta_product *p, uint32_t col, uint32_t n_vectors)
{
    uint32_t row = 0;
    for (; row + 4 <= p->n_rows; row += 4) {
        multiply_tile(p, row, col, 4, n_vectors);
    }
    for (; row < p->n_rows; row++) {
        multiply_tile(p, row, col, 1, n_vectors);
    }
}

static void multiply(const kvs_delta_product *p)
{
    uint32_t col = 0;
    for (; col + V_PANEL * V_WIDTH <= p->n_cols; col += V_PANEL * V_WIDTH) {
        multiply_columns(p, col, V_PANEL);
    }
    for (; col < p->n_cols; col += V_WIDTH) {
        multiply_columns(p, col, 1);
    }
}

INLINE void accumulate_vectors(const float *factors, const float *rows, uint32_t n_rows, uint32_t n_vectors, float *x)
{
    vf sums[V_MOST];
    load_row(sums, x, n_vectors);
    for (uint32_t s = 0; s < n_rows; s++, rows += n_vectors * V_WIDTH) {
        const vf factor = v_set1(factors[s]);
        for (uint32_t i = 0; i < n_vectors; i++) {
            sums[i] = v_fma(factor, v_load(rows + i * V_WIDTH), sums[i]);
        }
    }
    store_row(sums, x, n_vectors);
}

static void accumulate(const float *factors, const float *rows, uint32_t n_rows, uint32_t n, float *x)
{
    switch (n) {
    case 16:
        accumulate_vectors(factors, rows, n_rows, 16 / V_WIDTH, x);
        break;
    case 32:
        accumulate_vectors(factors, rows, n_rows, 32 / V_WIDTH, x);
        break;
    case 64:
        accumulate_vectors(factors, rows, n_rows, 64 / V_WIDTH, x);
        break;
    default:
        accumulate_vectors(factors, rows, n_rows, 128 / V_WIDTH, x);
        break;
    }
}

static void exponential(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += V_WIDTH) {
        v_store(x + i, v_exp(v_load(x + i)));
    }
}

static const kvs_delta_ops delta_ops = {.recur = recur,
                                        .convolve = convolve,
                                        .normalise = normalise,
                                        .multiply = multiply,
                                        .accumulate = accumulate,
                                        .exponential = exponential};
