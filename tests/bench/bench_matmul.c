/* bench_matmul.c: speed of the matmuls of a 30-layer model of width 576 (Q4_1, head Q8_0), every layer with weights of its
 * own, so that a pass reads memory as a real one does.
 *
 * Usage: bench_matmul [threads [type number of the layers]]. Prints, for each instruction set and number of rows: tokens/s
 * of the matmuls alone (sum of the shortest time of each), GB/s of panels read (counted once a pass), GFLOP/s. Also the cost of an empty fork and join.
 */
#include "cpu_weights.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/matmul.h"

#include <stdio.h>
#include <time.h>

#define N_LAYERS 30u
#define WIDTH 576u
#define HIDDEN 1536u
#define VOCABULARY 49152u
#define MAX_ROWS 512u
#define SECONDS 1.0

typedef struct weights {
    int type;
    uint64_t k;
    uint64_t n;
    void *panels;
    uint64_t bytes;
} weights;

typedef struct layer {
    weights q, k, v, o, gate, up, down;
} layer;

typedef struct model {
    layer layers[N_LAYERS];
    weights head;
    uint64_t bytes;
    float norm[WIDTH];
    float *x, *hidden, *attended, *q, *key, *value, *logits;
    void *workspace;
    uint64_t workspace_bytes;
} model;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static weights make_weights(model *m, int type, uint64_t k, uint64_t n)
{
    weights made = {.type = type, .k = k, .n = n};
    uint8_t *rows = random_weights(type, k, n, m->bytes);
    if (kvs_panel_bytes(type, k, n, NULL, &made.bytes) != KVS_OK) {
        fprintf(stderr, "%s cannot hold rows of %llu values\n", kvs_type_name(type), (unsigned long long)k);
        exit(1);
    }
    made.panels = aligned_alloc(64, made.bytes);
    kvs_panel_pack(type, k, n, rows, made.panels, 0, kvs_panel_count(n));
    free(rows);
    m->bytes += made.bytes;
    return made;
}

static void make_model(model *m, int type)
{
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        m->layers[i] = (layer){make_weights(m, type, WIDTH, WIDTH),  make_weights(m, type, WIDTH, 192),
                               make_weights(m, type, WIDTH, 192),    make_weights(m, type, WIDTH, WIDTH),
                               make_weights(m, type, WIDTH, HIDDEN), make_weights(m, type, WIDTH, HIDDEN),
                               make_weights(m, type, HIDDEN, WIDTH)};
    }
    m->head = make_weights(m, KVS_TYPE_Q8_0, WIDTH, VOCABULARY);
    fill_floats(m->norm, WIDTH, 1);
    float **arrays[] = {&m->x, &m->attended, &m->q, &m->key, &m->value};
    for (uint32_t i = 0; i < 5; i++) {
        *arrays[i] = aligned_alloc(64, MAX_ROWS * WIDTH * sizeof(float));
        fill_floats(*arrays[i], MAX_ROWS * WIDTH, i);
    }
    m->hidden = aligned_alloc(64, MAX_ROWS * HIDDEN * sizeof(float));
    m->logits = aligned_alloc(64, 64 * VOCABULARY * sizeof(float));
    kvs_matmul_workspace_bytes(HIDDEN, MAX_ROWS, &m->workspace_bytes);
    m->workspace = aligned_alloc(64, m->workspace_bytes);
}

static kvs_matmul_part part(const weights *w, float *out)
{
    return (kvs_matmul_part){.type = w->type, .n = w->n, .panels = w->panels, .out = out, .out_stride = w->n};
}

static kvs_matmul_desc describe(const model *m, const weights *w, const float *x, uint32_t n_rows, float *out)
{
    return (kvs_matmul_desc){.part = {part(w, out)},
                             .n_parts = 1,
                             .n_rows = n_rows,
                             .k = w->k,
                             .x = x,
                             .x_stride = w->k,
                             .norm_eps = 1e-5f,
                             .workspace = m->workspace,
                             .workspace_bytes = m->workspace_bytes};
}

/* Shortest time of each matmul of a pass so far. Their sum is the time of a pass that nobody disturbed, which on a
 * shared machine no whole pass may be. */
typedef struct best_times {
    double s[4 * N_LAYERS + 1];
    uint32_t at;
} best_times;

static void run_timed(best_times *best, kvs_threads *threads, uint32_t isa, const kvs_matmul_desc *desc)
{
    const double start = now_s();
    kvs_matmul_run(threads, isa, desc);
    const double taken = now_s() - start;
    best->s[best->at] = taken < best->s[best->at] ? taken : best->s[best->at];
    best->at++;
}

static void run_layer(const model *m, const layer *l, best_times *best, kvs_threads *threads, uint32_t isa,
                      uint32_t n_rows)
{
    kvs_matmul_desc qkv = describe(m, &l->q, m->x, n_rows, m->q);
    qkv.n_parts = 3;
    qkv.part[1] = part(&l->k, m->key);
    qkv.part[2] = part(&l->v, m->value);
    qkv.norm_weight = m->norm;
    run_timed(best, threads, isa, &qkv);
    kvs_matmul_desc o = describe(m, &l->o, m->attended, n_rows, m->x);
    o.epilogue = KVS_EPILOGUE_ADD;
    run_timed(best, threads, isa, &o);
    kvs_matmul_desc gate_up = describe(m, &l->gate, m->x, n_rows, m->hidden);
    gate_up.n_parts = 2;
    gate_up.part[1] = part(&l->up, NULL);
    gate_up.norm_weight = m->norm;
    gate_up.epilogue = KVS_EPILOGUE_SWIGLU;
    run_timed(best, threads, isa, &gate_up);
    kvs_matmul_desc down = describe(m, &l->down, m->hidden, n_rows, m->x);
    down.epilogue = KVS_EPILOGUE_ADD;
    run_timed(best, threads, isa, &down);
}

/* Logits for every row of a verify pass, for the last row of a prefill. */
static void run_pass(const model *m, best_times *best, kvs_threads *threads, uint32_t isa, uint32_t n_rows)
{
    best->at = 0;
    kvs_threads_begin(threads);
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        run_layer(m, &m->layers[i], best, threads, isa, n_rows);
    }
    kvs_matmul_desc head = describe(m, &m->head, m->x, n_rows <= 64 ? n_rows : 1, m->logits);
    head.norm_weight = m->norm;
    run_timed(best, threads, isa, &head);
    kvs_threads_end(threads);
}

static void measure(const model *m, kvs_threads *threads, uint32_t isa, uint32_t n_rows)
{
    best_times times;
    for (uint32_t i = 0; i < 4 * N_LAYERS + 1; i++) {
        times.s[i] = 1e9;
    }
    const double end = now_s() + SECONDS;
    do {
        fill_floats(m->x, (uint64_t)n_rows * WIDTH, 1);
        run_pass(m, &times, threads, isa, n_rows);
    } while (now_s() < end);
    double best = 0;
    for (uint32_t i = 0; i < 4 * N_LAYERS + 1; i++) {
        best += times.s[i];
    }
    const double layer_flops = 2.0 * N_LAYERS * WIDTH * (2 * WIDTH + 2 * 192 + 3 * HIDDEN);
    const double head_flops = 2.0 * WIDTH * VOCABULARY;
    const double flops = layer_flops * n_rows + head_flops * (n_rows <= 64 ? n_rows : 1);
    printf("isa %u rows %3u: %8.2f ms %8.1f tokens/s %6.1f GB/s %7.1f GFLOP/s\n", isa, n_rows, best * 1e3, n_rows / best,
           (double)m->bytes / best / 1e9, flops / best / 1e9);
}

static void do_nothing(void *argument, uint32_t index, uint32_t worker)
{
    (void)argument;
    (void)index;
    (void)worker;
}

static void measure_fork_join(kvs_threads *threads)
{
    enum { RUNS = 20000 };
    kvs_threads_begin(threads);
    const double start = now_s();
    for (int i = 0; i < RUNS; i++) {
        kvs_threads_run(threads, 16, do_nothing, NULL);
    }
    printf("fork and join of 16 empty tasks: %.2f us\n", (now_s() - start) / RUNS * 1e6);
    kvs_threads_end(threads);
}

int main(int argc, char **argv)
{
    const uint32_t n_threads = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
    const int type = argc > 2 ? atoi(argv[2]) : KVS_TYPE_Q4_1;
    static const uint32_t row_counts[] = {1, 2, 4, 8, 64, 512};
    static model m;
    kvs_threads *threads = kvs_threads_create(n_threads);
    make_model(&m, type);
    printf("%s, %u threads, %.1f MB of panels\n", kvs_type_name(type), n_threads, (double)m.bytes / 1e6);
    measure_fork_join(threads);
    for (uint32_t isa = KVS_ISA_AVX2; isa <= kvs_cpu_isa_detect(); isa++) {
        for (size_t i = 0; i < sizeof row_counts / sizeof row_counts[0]; i++) {
            measure(&m, threads, isa, row_counts[i]);
        }
    }
    kvs_threads_destroy(threads);
    return 0;
}
