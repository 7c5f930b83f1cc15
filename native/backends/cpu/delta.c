/* delta.c: the rows of a head one after another, and what a pass leaves behind: convolution tail and log. */
#include "backends/cpu/delta.h"

#include "backends/cpu/delta_head.h"
#include "backends/cpu/mathf.h"
#include "base/internal.h"

#include <string.h>

#define MAX_TAPS 8u
#define PREFETCH_ROWS 4u    /* ahead of the one that is convolved */
#define PREFETCH_VALUES 16u /* a cache line */

static const kvs_delta_ops *ops_of(uint32_t isa)
{
#if defined(__x86_64__)
    if (isa >= KVS_ISA_AVX512) {
        return kvs_delta_ops_avx512();
    }
    if (isa == KVS_ISA_AVX2) {
        return kvs_delta_ops_avx2();
    }
#endif
    (void)isa;
    return kvs_delta_ops_reference();
}

static uint64_t worker_floats(const kvs_delta_layer *layer, uint32_t mode)
{
    const uint64_t dim = layer->head_dim, block = KVS_DELTA_BLOCK;
    const uint64_t rows = 3 * layer->conv_width * dim + 3 * block * dim + 2 * block + dim * dim;
    return mode == KVS_DELTA_CHUNKED ? rows + 2 * block * block + 2 * block * dim : rows;
}

uint64_t kvs_delta_scratch_bytes(const kvs_delta_layer *layer, uint32_t mode, uint32_t n_threads)
{
    return n_threads * worker_floats(layer, mode) * sizeof(float);
}

/* Every size is a multiple of 16 floats, so each part begins at a cache line where the scratch does. */
static kvs_delta_head head_of(const kvs_delta_job *job, const kvs_delta_ops *ops, uint32_t index, uint32_t worker)
{
    const kvs_delta_layer *layer = job->view->layer;
    const uint64_t dim = layer->head_dim, block = KVS_DELTA_BLOCK;
    kvs_delta_head head = {.job = job, .ops = ops, .index = index, .dim = layer->head_dim};
    head.weights = (float *)job->scratch + worker * worker_floats(layer, job->mode);
    head.q = head.weights + 3 * layer->conv_width * dim;
    head.k = head.q + block * dim;
    head.v = head.k + block * dim;
    head.beta = head.v + block * dim;
    head.decay = head.beta + block;
    head.matrix = head.decay + block;
    if (job->mode == KVS_DELTA_CHUNKED) {
        head.scores = head.matrix + dim * dim;
        head.mixing = head.scores + block * block;
        head.keys = head.mixing + block * block;
        head.updates = head.keys + block * dim;
    }
    return head;
}

/* ---- where rows lie ---- */

static const float *input_row(const kvs_delta_job *job, int64_t row)
{
    const kvs_delta_view *view = job->view;
    const int64_t channels = (int64_t)kvs_delta_channels(view->layer);
    if (row < 0) {
        return view->conv_in + (row + view->layer->conv_width - 1) * channels;
    }
    if (row < view->n_pending) {
        return view->log_in + (uint64_t)row * kvs_delta_log_values(view->layer);
    }
    return job->inputs + (row - view->n_pending) * channels;
}

/* First channel of the head's q, k or v. */
static uint64_t part_channel(const kvs_delta_head *head, uint32_t part)
{
    const kvs_delta_layer *layer = head->job->view->layer;
    const uint64_t in_part = part == 2 ? head->index : head->index % layer->n_key_heads;
    return ((uint64_t)part * layer->n_key_heads + in_part) * head->dim;
}

static void gates_of(const kvs_delta_head *head, uint32_t row, float *beta, float *alpha)
{
    const kvs_delta_job *job = head->job;
    const uint64_t n_heads = job->view->layer->n_value_heads;
    if (row < job->view->n_pending) {
        const float *gates = input_row(job, row) + kvs_delta_channels(job->view->layer);
        *beta = gates[head->index];
        *alpha = gates[n_heads + head->index];
        return;
    }
    const uint64_t at = (row - job->view->n_pending) * n_heads + head->index;
    *beta = job->beta[at];
    *alpha = job->alpha[at];
}

static const float *weight_values(const kvs_weight_view *weight)
{
    return (const float *)(uintptr_t)weight->address;
}

/* ---- what the recurrence consumes ---- */

static void load_weights(const kvs_delta_head *head)
{
    const uint32_t taps = head->job->view->layer->conv_width;
    const float *weights = weight_values(head->job->view->conv);
    for (uint32_t part = 0; part < 3; part++) {
        const float *from = weights + part_channel(head, part) * taps;
        float *to = head->weights + (uint64_t)part * taps * head->dim;
        for (uint32_t i = 0; i < head->dim; i++) {
            for (uint32_t tap = 0; tap < taps; tap++) {
                to[(uint64_t)tap * head->dim + i] = from[(uint64_t)i * taps + tap];
            }
        }
    }
}

static void convolve(const kvs_delta_head *head, uint32_t row, uint32_t part, float *out)
{
    const uint32_t taps = head->job->view->layer->conv_width;
    const float *rows[MAX_TAPS];
    for (uint32_t tap = 0; tap < taps; tap++) {
        rows[tap] = input_row(head->job, (int64_t)row - taps + 1 + tap) + part_channel(head, part);
    }
    head->ops->convolve(rows, head->weights + (uint64_t)part * taps * head->dim, taps, head->dim, out);
}

/* Inputs of the new rows lie far apart, so the cache is told which come next. */
static void prefetch_row(const kvs_delta_head *head, uint32_t row)
{
    const float *inputs = input_row(head->job, row);
    for (uint32_t part = 0; part < 3; part++) {
        for (uint32_t i = 0; i < head->dim; i += PREFETCH_VALUES) {
            __builtin_prefetch(inputs + part_channel(head, part) + i);
        }
    }
}

void kvs_delta_prepare(const kvs_delta_head *head, uint32_t begin, uint32_t end)
{
    const kvs_delta_view *view = head->job->view;
    const float eps = view->layer->norm_eps;
    const float scale = 1.0f / sqrtf((float)head->dim);
    const float bias = weight_values(view->dt_bias)[head->index];
    const float decay = weight_values(view->decay)[head->index];
    for (uint32_t row = begin; row < end; row++) {
        const uint64_t at = (uint64_t)(row - begin) * head->dim;
        float beta, alpha;
        if (row + PREFETCH_ROWS < end) {
            prefetch_row(head, row + PREFETCH_ROWS);
        }
        if (row >= view->n_pending) {
            convolve(head, row, 0, head->q + at);
            head->ops->normalise(head->q + at, head->dim, eps, scale);
        }
        convolve(head, row, 1, head->k + at);
        head->ops->normalise(head->k + at, head->dim, eps, 1.0f);
        convolve(head, row, 2, head->v + at);
        gates_of(head, row, &beta, &alpha);
        head->beta[row - begin] = kvs_sigmoidf(beta);
        head->decay[row - begin] = decay * kvs_softplusf(alpha + bias);
    }
}

/* ---- row by row ---- */

static float *matrix_of(const kvs_delta_head *head, float *matrices)
{
    return matrices + (uint64_t)head->index * head->dim * head->dim;
}

static void run_block(const kvs_delta_head *head, uint32_t begin, uint32_t end, kvs_delta_recurrence *r)
{
    const kvs_delta_job *job = head->job;
    const uint32_t n_pending = job->view->n_pending;
    kvs_delta_prepare(head, begin, end);
    for (uint32_t t = 0; t < end - begin; t++) {
        head->decay[t] = kvs_expf(head->decay[t]);
    }
    r->n_rows = end - begin;
    r->n_fold = begin >= n_pending ? 0 : (end < n_pending ? end : n_pending) - begin;
    r->out = end <= n_pending ? NULL
                              : job->out + (uint64_t)(begin + r->n_fold - n_pending) * r->out_stride +
                                    (uint64_t)head->index * head->dim;
    head->ops->recur(r);
}

/* Rows 0 to n_rows - 1, in blocks. Float32 through memory is exact, so no bit depends on the blocks. */
static void run_rows(const kvs_delta_head *head, uint32_t n_rows)
{
    const kvs_delta_view *view = head->job->view;
    float *folded = matrix_of(head, view->matrix_out);
    kvs_delta_recurrence r = {.head_dim = head->dim,
                              .q = head->q,
                              .k = head->k,
                              .v = head->v,
                              .beta = head->beta,
                              .decay = head->decay,
                              .from = view->matrix_in + (uint64_t)head->index * head->dim * head->dim,
                              .out_stride = (uint64_t)view->layer->n_value_heads * head->dim};
    uint32_t begin = 0;
    do {
        const uint32_t end = n_rows - begin < KVS_DELTA_BLOCK ? n_rows : begin + KVS_DELTA_BLOCK;
        r.folded = begin == 0 || begin < view->n_pending ? folded : NULL;
        r.last = end < n_rows && end > view->n_pending ? head->matrix : NULL;
        run_block(head, begin, end, &r);
        r.from = end <= view->n_pending ? folded : head->matrix;
        begin = end;
    } while (begin < n_rows);
}

/* ---- what is left behind ---- */

/* The channels that this head writes: q and k belong to the first value head of their key head. */
static void copy_channels(const kvs_delta_head *head, const float *from, float *to)
{
    const bool is_first = head->index < head->job->view->layer->n_key_heads;
    for (uint32_t part = is_first ? 0 : 2; part < 3; part++) {
        const uint64_t channel = part_channel(head, part);
        memcpy(to + channel, from + channel, head->dim * sizeof *to);
    }
}

/* Inputs of the last rows before `end`. */
static void write_tail(const kvs_delta_head *head, uint32_t end)
{
    const kvs_delta_view *view = head->job->view;
    const uint32_t n_tail = view->layer->conv_width - 1;
    for (uint32_t i = 0; i < n_tail; i++) {
        copy_channels(head, input_row(head->job, (int64_t)end - n_tail + i),
                      view->conv_out + i * kvs_delta_channels(view->layer));
    }
}

static void write_log(const kvs_delta_head *head)
{
    const kvs_delta_job *job = head->job;
    const kvs_delta_layer *layer = job->view->layer;
    for (uint32_t row = 0; row < job->n_rows; row++) {
        float *to = job->view->log_out + row * kvs_delta_log_values(layer);
        float *gates = to + kvs_delta_channels(layer);
        copy_channels(head, input_row(job, (int64_t)job->view->n_pending + row), to);
        gates_of(head, job->view->n_pending + row, &gates[head->index], &gates[layer->n_value_heads + head->index]);
    }
}

struct run {
    const kvs_delta_job *job;
    const kvs_delta_ops *ops;
};

static void run_head(void *argument, uint32_t index, uint32_t worker)
{
    const struct run *run = argument;
    const kvs_delta_job *job = run->job;
    const uint32_t n_pending = job->view->n_pending;
    const kvs_delta_head head = head_of(job, run->ops, index, worker);
    load_weights(&head);
    if (job->mode == KVS_DELTA_CHUNKED) {
        run_rows(&head, n_pending);
        kvs_delta_run_chunks(&head);
        write_tail(&head, n_pending + job->n_rows);
    } else {
        run_rows(&head, n_pending + job->n_rows);
        write_tail(&head, n_pending);
        write_log(&head);
    }
}

void kvs_delta_run(kvs_threads *threads, uint32_t isa, const kvs_delta_job *job)
{
    struct run run = {.job = job, .ops = ops_of(isa)};
    kvs_threads_run(threads, job->view->layer->n_value_heads, run_head, &run);
}
