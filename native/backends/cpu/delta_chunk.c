/* delta_chunk.c: rows in chunks. With G the running sum of the logarithms of the decay in a chunk and M its state at the
 * start, row t has
 *     d_t = beta_t (v_t - e^G_t M k_t) - sum over s < t of beta_t e^(G_t - G_s) (k_t k_s) d_s
 *     o_t = e^G_t M q_t + sum over s <= t of e^(G_t - G_s) (q_t k_s) d_s
 * and M becomes e^G_n M + sum of e^(G_n - G_s) d_s k_s^T.
 *
 * Holds: a row takes nothing from later ones, so a chunk that ends early gives its rows the same bits. G is float64: a small
 * step beside a large sum would be lost.
 * Source: Yang et al., "Gated Delta Networks", 2024.
 */
#include "backends/cpu/delta_head.h"

#include <string.h>

#define BLOCK KVS_DELTA_BLOCK

static void transpose(const float *from, uint64_t from_stride, uint32_t n_rows, uint32_t n_cols, float *to,
                      uint64_t to_stride)
{
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t c = 0; c < n_cols; c++) {
            to[c * to_stride + r] = from[r * from_stride + c];
        }
    }
}

static uint32_t round_lanes(uint32_t n)
{
    return (n + KVS_DELTA_LANES - 1) / KVS_DELTA_LANES * KVS_DELTA_LANES;
}

/* [n][n_cols] = rows [n][dim] times a matrix whose rows lie `stride` apart. */
static void multiply_rows(const kvs_delta_head *head, const float *rows, uint32_t n, const float *matrix, uint64_t stride,
                          uint32_t n_cols, float *out, uint64_t out_stride)
{
    const kvs_delta_product product = {.a = rows,
                                       .a_row = head->dim,
                                       .a_step = 1,
                                       .b = matrix,
                                       .b_stride = stride,
                                       .c = out,
                                       .c_stride = out_stride,
                                       .n_rows = n,
                                       .depth = head->dim,
                                       .n_cols = n_cols};
    head->ops->multiply(&product);
}

/* scores: q_t k_s e^(G_t - G_s) for s <= t; mixing: -beta_t k_t k_s e^(G_t - G_s) for s < t. */
static void weigh_rows(const kvs_delta_head *head, uint32_t n, const double *sums)
{
    memset(head->keys, 0, sizeof(float) * BLOCK * head->dim);
    transpose(head->k, head->dim, n, head->dim, head->keys, BLOCK);
    /* Behind the diagonal nothing is needed: each strip of rows ends with its own columns. */
    for (uint32_t t = 0; t < n; t += KVS_DELTA_LANES) {
        const uint32_t n_rows = n - t < KVS_DELTA_LANES ? n - t : KVS_DELTA_LANES;
        const uint64_t at = (uint64_t)t * head->dim;
        multiply_rows(head, head->q + at, n_rows, head->keys, BLOCK, t + KVS_DELTA_LANES, head->scores + t * BLOCK, BLOCK);
        multiply_rows(head, head->k + at, n_rows, head->keys, BLOCK, t + KVS_DELTA_LANES, head->mixing + t * BLOCK, BLOCK);
    }
    for (uint32_t t = 0; t < n; t++) {
        float decays[BLOCK] = {0};
        for (uint32_t s = 0; s < t; s++) {
            decays[s] = (float)(sums[t] - sums[s]);
        }
        head->ops->exponential(decays, round_lanes(t + 1));
        for (uint32_t s = 0; s <= t; s++) {
            head->scores[t * BLOCK + s] *= decays[s];
            head->mixing[t * BLOCK + s] *= -head->beta[t] * decays[s];
        }
    }
}

/* d of every row, each from those before it. */
static void solve_updates(const kvs_delta_head *head, uint32_t n, const float *from_start)
{
    const uint32_t dim = head->dim;
    multiply_rows(head, head->k, n, head->matrix, dim, dim, head->updates, dim);
    for (uint32_t t = 0; t < n; t++) {
        float *update = head->updates + (uint64_t)t * dim;
        const float *v = head->v + (uint64_t)t * dim;
        for (uint32_t j = 0; j < dim; j++) {
            update[j] = head->beta[t] * (v[j] - from_start[t] * update[j]);
        }
        head->ops->accumulate(head->mixing + t * BLOCK, head->updates, t, dim, update);
    }
}

static void write_outputs(const kvs_delta_head *head, uint32_t n, const float *from_start, float *out)
{
    const uint32_t dim = head->dim;
    const uint64_t stride = (uint64_t)head->job->view->layer->n_value_heads * dim;
    multiply_rows(head, head->q, n, head->matrix, dim, dim, out, stride);
    for (uint32_t t = 0; t < n; t++) {
        float *row = out + t * stride;
        for (uint32_t j = 0; j < dim; j++) {
            row[j] *= from_start[t];
        }
        head->ops->accumulate(head->scores + t * BLOCK, head->updates, t + 1, dim, row);
    }
}

/* The state behind the chunk. Keys are scaled in place: nobody needs them afterwards. */
static void advance(const kvs_delta_head *head, uint32_t n, const double *sums)
{
    const uint32_t dim = head->dim;
    float decays[BLOCK] = {0};
    for (uint32_t s = 0; s < n; s++) {
        decays[s] = (float)(sums[n - 1] - sums[s]);
    }
    float whole[KVS_DELTA_LANES] = {(float)sums[n - 1]};
    head->ops->exponential(decays, round_lanes(n));
    head->ops->exponential(whole, KVS_DELTA_LANES);
    for (uint32_t s = 0; s < n; s++) {
        for (uint32_t i = 0; i < dim; i++) {
            head->k[(uint64_t)s * dim + i] *= decays[s];
        }
    }
    const kvs_delta_product product = {.a = head->k,
                                       .a_row = 1,
                                       .a_step = dim,
                                       .b = head->updates,
                                       .b_stride = dim,
                                       .c = head->matrix,
                                       .c_stride = dim,
                                       .n_rows = dim,
                                       .depth = n,
                                       .n_cols = dim,
                                       .keep = whole[0],
                                       .keeps = true};
    head->ops->multiply(&product);
}

static void run_chunk(const kvs_delta_head *head, uint32_t begin, uint32_t n, float *out)
{
    double sums[BLOCK];
    float from_start[BLOCK] = {0};
    double sum = 0.0;
    kvs_delta_prepare(head, begin, begin + n);
    for (uint32_t t = 0; t < n; t++) {
        sum += (double)head->decay[t];
        sums[t] = sum;
        from_start[t] = (float)sum;
    }
    head->ops->exponential(from_start, round_lanes(n));
    weigh_rows(head, n, sums);
    solve_updates(head, n, from_start);
    write_outputs(head, n, from_start, out);
    advance(head, n, sums);
}

void kvs_delta_run_chunks(const kvs_delta_head *head)
{
    const kvs_delta_job *job = head->job;
    const uint32_t dim = head->dim;
    const uint64_t stride = (uint64_t)job->view->layer->n_value_heads * dim;
    float *state = job->view->matrix_out + (uint64_t)head->index * dim * dim;
    transpose(state, dim, dim, dim, head->matrix, dim);
    for (uint32_t row = 0; row < job->n_rows;) {
        const uint32_t room = BLOCK - (uint32_t)((job->first_token + row) % BLOCK);
        const uint32_t n = job->n_rows - row < room ? job->n_rows - row : room;
        run_chunk(head, job->view->n_pending + row, n, job->out + row * stride + (uint64_t)head->index * dim);
        row += n;
    }
    transpose(head->matrix, dim, dim, dim, state, dim);
}
