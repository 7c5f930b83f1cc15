/* test_delta.c: the laws of the CPU's gated delta net: equal bits in every twin, thread count, cut into passes and place of
 * folding; near the recurrence in float64, row by row and in chunks. */
#include "check.h"
#include "cpu_weights.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/delta.h"

#include <math.h>
#include <string.h>

#define MAX_THREADS 3u
#define MOST_ROWS 200u

static kvs_threads *pools[MAX_THREADS + 1];

/* A layer with weights, and MOST_ROWS rows of inputs. */
typedef struct world {
    kvs_delta_layer layer;
    kvs_weight_view conv_view, bias_view, decay_view;
    float *conv, *bias, *decay, *inputs, *beta, *alpha;
    uint64_t channels, matrix, tail, log, heads, out;
} world;

static float *floats(uint64_t n, uint64_t seed)
{
    float *values = malloc((n == 0 ? 1 : n) * sizeof *values);
    fill_floats(values, n, seed);
    return values;
}

static world world_of(uint32_t n_key_heads, uint32_t ratio, uint32_t dim, uint32_t taps)
{
    world w = {.layer = {.n_key_heads = n_key_heads,
                         .n_value_heads = n_key_heads * ratio,
                         .head_dim = dim,
                         .conv_width = taps,
                         .norm_eps = 1e-6f}};
    w.channels = kvs_delta_channels(&w.layer);
    w.matrix = kvs_delta_matrix_values(&w.layer);
    w.tail = kvs_delta_conv_values(&w.layer);
    w.log = kvs_delta_log_values(&w.layer);
    w.heads = w.layer.n_value_heads;
    w.out = w.heads * dim;
    w.conv = floats(w.channels * taps, 1);
    w.bias = floats(w.heads, 2);
    w.decay = floats(w.heads, 3);
    for (uint64_t i = 0; i < w.heads; i++) {
        w.bias[i] -= 2.0f;
        w.decay[i] = -0.05f - 4.0f * fabsf(w.decay[i]) * (i % 3 == 0);
    }
    w.inputs = floats(MOST_ROWS * w.channels, 4);
    w.beta = floats(MOST_ROWS * w.heads, 5);
    w.alpha = floats(MOST_ROWS * w.heads, 6);
    for (uint64_t i = 0; i < MOST_ROWS * w.heads; i++) {
        w.beta[i] *= 3.0f;
        w.alpha[i] *= 4.0f;
    }
    w.conv_view.address = (uint64_t)(uintptr_t)w.conv;
    w.bias_view.address = (uint64_t)(uintptr_t)w.bias;
    w.decay_view.address = (uint64_t)(uintptr_t)w.decay;
    return w;
}

static void free_world(world *w)
{
    float *parts[] = {w->conv, w->bias, w->decay, w->inputs, w->beta, w->alpha};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        free(parts[i]);
    }
}

/* One sequence: the two sides that a state has, and outputs of all rows. */
typedef struct sequence {
    const world *w;
    float *matrix[2], *tail[2], *log[2], *out;
    uint32_t bank, side, n_pending, n_tokens;
    uint32_t isa, threads;
} sequence;

static sequence open_sequence(const world *w, uint32_t isa, uint32_t threads)
{
    sequence s = {.w = w, .isa = isa, .threads = threads};
    for (int side = 0; side < 2; side++) {
        s.matrix[side] = calloc(w->matrix, sizeof(float));
        s.tail[side] = calloc(w->tail, sizeof(float));
        s.log[side] = calloc(MOST_ROWS * w->log, sizeof(float));
    }
    s.out = calloc(MOST_ROWS * w->out, sizeof(float));
    return s;
}

static void close_sequence(sequence *s)
{
    for (int side = 0; side < 2; side++) {
        free(s->matrix[side]);
        free(s->tail[side]);
        free(s->log[side]);
    }
    free(s->out);
}

/* A pass of n_rows of which `accepted` are kept, or folding (n_rows 0). */
static void run(sequence *s, uint32_t n_rows, uint32_t mode, uint32_t accepted)
{
    const world *w = s->w;
    const kvs_delta_view view = {.layer = &w->layer,
                                 .conv = &w->conv_view,
                                 .dt_bias = &w->bias_view,
                                 .decay = &w->decay_view,
                                 .matrix_in = s->matrix[s->bank],
                                 .conv_in = s->tail[s->bank],
                                 .log_in = s->log[s->side],
                                 .matrix_out = s->matrix[!s->bank],
                                 .conv_out = s->tail[!s->bank],
                                 .log_out = s->log[!s->side],
                                 .n_pending = s->n_pending};
    void *scratch = NULL;
    const uint64_t n_bytes = kvs_delta_scratch_bytes(&w->layer, mode, s->threads);
    CHECK(posix_memalign(&scratch, 64, n_bytes) == 0);
    memset(scratch, 0xff, n_bytes);
    memset(s->matrix[!s->bank], 0xff, w->matrix * sizeof(float));
    memset(s->tail[!s->bank], 0xff, w->tail * sizeof(float));
    memset(s->log[!s->side], 0xff, MOST_ROWS * w->log * sizeof(float));
    const uint64_t at = s->n_tokens;
    const kvs_delta_job job = {.view = &view,
                               .inputs = w->inputs + at * w->channels,
                               .beta = w->beta + at * w->heads,
                               .alpha = w->alpha + at * w->heads,
                               .out = s->out + at * w->out,
                               .n_rows = n_rows,
                               .mode = mode,
                               .first_token = at,
                               .scratch = scratch};
    kvs_delta_run(pools[s->threads], s->isa, &job);
    free(scratch);
    if (n_rows != 0 && accepted == 0) {
        return;
    }
    s->bank = !s->bank;
    s->side = mode == KVS_DELTA_LOGGED && n_rows != 0 ? !s->side : s->side;
    s->n_pending = mode == KVS_DELTA_LOGGED ? accepted : 0;
    s->n_tokens += accepted;
}

static void fold(sequence *s)
{
    run(s, 0, KVS_DELTA_LOGGED, 0);
}

static void run_whole(sequence *s, uint32_t n_rows, uint32_t mode)
{
    run(s, n_rows, mode, n_rows);
}

static bool same(const float *a, const float *b, uint64_t n)
{
    return memcmp(a, b, n * sizeof *a) == 0;
}

static bool same_state(const sequence *a, const sequence *b)
{
    return same(a->matrix[a->bank], b->matrix[b->bank], a->w->matrix) &&
           same(a->tail[a->bank], b->tail[b->bank], a->w->tail);
}

/* ---- float64 ---- */

static double silu64(double x)
{
    return x / (1.0 + exp(-x));
}

static void convolve64(const world *w, uint32_t row, uint64_t channel, uint32_t n, double *out)
{
    const uint32_t taps = w->layer.conv_width;
    for (uint32_t i = 0; i < n; i++) {
        double sum = 0;
        for (uint32_t tap = 0; tap < taps; tap++) {
            const int64_t at = (int64_t)row - taps + 1 + tap;
            sum += at < 0 ? 0.0
                          : (double)w->conv[(channel + i) * taps + tap] *
                                (double)w->inputs[(uint64_t)at * w->channels + channel + i];
        }
        out[i] = silu64(sum);
    }
}

static void unit64(double *x, uint32_t n, double eps, double scale)
{
    double sum = eps;
    for (uint32_t i = 0; i < n; i++) {
        sum += x[i] * x[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        x[i] *= scale / sqrt(sum);
    }
}

static void step64(const world *w, uint32_t row, uint32_t head, double *m, double *o)
{
    const uint32_t dim = w->layer.head_dim, key = head % w->layer.n_key_heads;
    double q[128], k[128], v[128];
    convolve64(w, row, (uint64_t)key * dim, dim, q);
    convolve64(w, row, ((uint64_t)w->layer.n_key_heads + key) * dim, dim, k);
    convolve64(w, row, (2 * (uint64_t)w->layer.n_key_heads + head) * dim, dim, v);
    unit64(q, dim, (double)w->layer.norm_eps, 1.0 / sqrt((double)dim));
    unit64(k, dim, (double)w->layer.norm_eps, 1.0);
    const double beta = 1.0 / (1.0 + exp(-(double)w->beta[row * w->heads + head]));
    const double step = log1p(exp((double)w->alpha[row * w->heads + head] + (double)w->bias[head]));
    const double decay = exp((double)w->decay[head] * step);
    for (uint32_t j = 0; j < dim; j++) {
        double sum = 0;
        for (uint32_t i = 0; i < dim; i++) {
            m[j * dim + i] *= decay;
            sum += m[j * dim + i] * k[i];
        }
        o[j] = 0;
        for (uint32_t i = 0; i < dim; i++) {
            m[j * dim + i] += beta * (v[j] - sum) * k[i];
            o[j] += m[j * dim + i] * q[i];
        }
    }
}

/* Largest difference from float64 over outputs and state, relative to the largest value of each. */
static double distance64(const sequence *s)
{
    const world *w = s->w;
    const uint32_t dim = w->layer.head_dim;
    double worst = 0, most_out = 0, most_state = 0, out_error = 0, state_error = 0;
    for (uint32_t head = 0; head < w->heads; head++) {
        double *m = calloc((uint64_t)dim * dim, sizeof *m), o[128];
        for (uint32_t row = 0; row < s->n_tokens; row++) {
            step64(w, row, head, m, o);
            for (uint32_t j = 0; j < dim; j++) {
                most_out = fmax(most_out, fabs(o[j]));
                out_error = fmax(out_error, fabs((double)s->out[row * w->out + head * dim + j] - o[j]));
            }
        }
        for (uint64_t i = 0; i < (uint64_t)dim * dim; i++) {
            most_state = fmax(most_state, fabs(m[i]));
            state_error = fmax(state_error, fabs((double)s->matrix[s->bank][(uint64_t)head * dim * dim + i] - m[i]));
        }
        free(m);
    }
    worst = fmax(out_error / most_out, s->n_pending == 0 ? state_error / most_state : 0);
    return worst;
}

/* ---- laws ---- */

static const uint32_t shapes[][4] = {{1, 1, 16, 4}, {2, 3, 32, 4}, {2, 1, 64, 2}, {3, 2, 128, 4}, {1, 2, 128, 8}};
#define N_SHAPES (sizeof shapes / sizeof shapes[0])

static world shape_world(size_t i)
{
    return world_of(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
}

static void test_rows_are_near_float64(void)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        for (uint32_t mode = KVS_DELTA_LOGGED; mode <= KVS_DELTA_CHUNKED; mode++) {
            world w = shape_world(i);
            sequence s = open_sequence(&w, kvs_cpu_isa_detect(), 2);
            run_whole(&s, MOST_ROWS, mode);
            if (mode == KVS_DELTA_LOGGED) {
                fold(&s);
            }
            const double distance = distance64(&s);
            if (!CHECK(distance < 5e-6)) {
                fprintf(stderr, "shape %zu, mode %u: %g\n", i, mode, distance);
            }
            close_sequence(&s);
            free_world(&w);
        }
    }
}

/* Several passes of each mode, with pending rows before chunks and chunks off the grid. */
static void run_story(sequence *s)
{
    run_whole(s, 70, KVS_DELTA_CHUNKED);
    run_whole(s, 5, KVS_DELTA_LOGGED);
    run(s, 8, KVS_DELTA_LOGGED, 3);
    run(s, 8, KVS_DELTA_LOGGED, 0);
    run_whole(s, 1, KVS_DELTA_LOGGED);
    run_whole(s, 50, KVS_DELTA_CHUNKED);
    run_whole(s, 66, KVS_DELTA_LOGGED);
    run_whole(s, 1, KVS_DELTA_LOGGED);
    fold(s);
}

static void test_twins_and_threads_are_equal(void)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        world w = shape_world(i);
        sequence expected = open_sequence(&w, KVS_ISA_REFERENCE, 1);
        run_story(&expected);
        for (uint32_t isa = KVS_ISA_REFERENCE; isa <= kvs_cpu_isa_detect(); isa++) {
            for (uint32_t threads = 1; threads <= MAX_THREADS; threads += 2) {
                sequence s = open_sequence(&w, isa, threads);
                run_story(&s);
                CHECK(s.n_tokens == 196 && same(s.out, expected.out, s.n_tokens * w.out));
                CHECK(same_state(&s, &expected));
                close_sequence(&s);
            }
        }
        close_sequence(&expected);
        free_world(&w);
    }
}

static void test_any_cut_of_logged_rows_is_equal(void)
{
    static const uint32_t cuts[] = {1, 2, 3, 7, 8, 63, 64, 65, 129, MOST_ROWS};
    world w = shape_world(1);
    sequence whole = open_sequence(&w, kvs_cpu_isa_detect(), 1);
    run_whole(&whole, MOST_ROWS, KVS_DELTA_LOGGED);
    fold(&whole);
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        for (int folds = 0; folds < 2; folds++) {
            sequence s = open_sequence(&w, kvs_cpu_isa_detect(), 2);
            while (s.n_tokens < MOST_ROWS) {
                const uint32_t left = MOST_ROWS - s.n_tokens;
                run_whole(&s, cuts[i] < left ? cuts[i] : left, KVS_DELTA_LOGGED);
                if (folds) {
                    fold(&s);
                }
            }
            fold(&s);
            CHECK(same(s.out, whole.out, MOST_ROWS * w.out) && same_state(&s, &whole));
            close_sequence(&s);
        }
    }
    close_sequence(&whole);
    free_world(&w);
}

static void test_rejected_rows_leave_nothing(void)
{
    world w = shape_world(1);
    sequence plain = open_sequence(&w, kvs_cpu_isa_detect(), 1), s = open_sequence(&w, kvs_cpu_isa_detect(), 1);
    for (uint32_t i = 0; s.n_tokens < 60; i++) {
        const uint32_t accepted = i % 5;
        run(&s, 4 + i % 3, KVS_DELTA_LOGGED, accepted);
        for (uint32_t row = 0; row < accepted; row++) {
            run_whole(&plain, 1, KVS_DELTA_LOGGED);
        }
        CHECK(s.n_tokens == plain.n_tokens && same(s.out, plain.out, s.n_tokens * w.out));
    }
    fold(&s);
    fold(&plain);
    CHECK(same_state(&s, &plain));
    close_sequence(&s);
    close_sequence(&plain);
    free_world(&w);
}

static void test_chunks_on_the_grid_are_equal_however_passes_are_cut(void)
{
    static const uint32_t cuts[] = {64, 128, 192};
    world w = shape_world(3);
    sequence whole = open_sequence(&w, kvs_cpu_isa_detect(), 1);
    run_whole(&whole, 192, KVS_DELTA_CHUNKED);
    for (size_t i = 0; i < 3; i++) {
        sequence s = open_sequence(&w, kvs_cpu_isa_detect(), 1);
        while (s.n_tokens < 192) {
            const uint32_t left = 192 - s.n_tokens;
            run_whole(&s, cuts[i] < left ? cuts[i] : left, KVS_DELTA_CHUNKED);
        }
        CHECK(same(s.out, whole.out, 192 * w.out) && same_state(&s, &whole));
        close_sequence(&s);
    }
    close_sequence(&whole);
    free_world(&w);
}

static void test_a_short_chunk_gives_its_rows_the_bits_of_a_full_one(void)
{
    world w = shape_world(1);
    sequence whole = open_sequence(&w, kvs_cpu_isa_detect(), 1);
    run_whole(&whole, 128, KVS_DELTA_CHUNKED);
    for (uint32_t n = 1; n < 64; n += 9) {
        sequence s = open_sequence(&w, kvs_cpu_isa_detect(), 1);
        run_whole(&s, 64 + n, KVS_DELTA_CHUNKED);
        CHECK(same(s.out, whole.out, (64 + n) * w.out));
        close_sequence(&s);
    }
    close_sequence(&whole);
    free_world(&w);
}

static void test_chunks_equal_the_recurrence_within_rounding(void)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        world w = shape_world(i);
        sequence chunked = open_sequence(&w, kvs_cpu_isa_detect(), 1), rows = open_sequence(&w, kvs_cpu_isa_detect(), 1);
        run_whole(&chunked, 150, KVS_DELTA_CHUNKED);
        run_whole(&rows, 150, KVS_DELTA_LOGGED);
        double most = 0, error = 0;
        for (uint64_t at = 0; at < 150 * w.out; at++) {
            most = fmax(most, fabs((double)rows.out[at]));
            error = fmax(error, fabs((double)rows.out[at] - (double)chunked.out[at]));
        }
        CHECK(error <= 1e-5 * most);
        close_sequence(&chunked);
        close_sequence(&rows);
        free_world(&w);
    }
}

/* A no number stays in its channels and in the rows behind it. */
static void test_a_later_row_cannot_reach_an_earlier_one(void)
{
    for (uint32_t mode = KVS_DELTA_LOGGED; mode <= KVS_DELTA_CHUNKED; mode++) {
        world w = shape_world(1);
        sequence clean = open_sequence(&w, kvs_cpu_isa_detect(), 1), s = open_sequence(&w, kvs_cpu_isa_detect(), 1);
        run_whole(&clean, 100, mode);
        for (uint64_t i = 0; i < w.channels; i++) {
            w.inputs[77 * w.channels + i] = NAN;
        }
        w.alpha[77 * w.heads] = w.beta[77 * w.heads] = INFINITY;
        run_whole(&s, 100, mode);
        CHECK(same(s.out, clean.out, 77 * w.out));
        CHECK(isnan(s.out[77 * w.out]));
        close_sequence(&clean);
        close_sequence(&s);
        free_world(&w);
    }
}

int main(void)
{
    for (uint32_t i = 1; i <= MAX_THREADS; i++) {
        pools[i] = kvs_threads_create(i);
    }
    test_rows_are_near_float64();
    test_twins_and_threads_are_equal();
    test_any_cut_of_logged_rows_is_equal();
    test_rejected_rows_leave_nothing();
    test_chunks_on_the_grid_are_equal_however_passes_are_cut();
    test_a_short_chunk_gives_its_rows_the_bits_of_a_full_one();
    test_chunks_equal_the_recurrence_within_rounding();
    test_a_later_row_cannot_reach_an_earlier_one();
    for (uint32_t i = 1; i <= MAX_THREADS; i++) {
        kvs_threads_destroy(pools[i]);
    }
    return check_finish();
}
