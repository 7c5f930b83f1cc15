/* bench_attend.c: time of attention over one layer, for rows x tokens x type pairs, and whether the twins agree.
 *
 * Usage: bench_attend [threads [rows tokens]]. The geometry is the demo model's: 9 query and 3 KV heads of 64. `ms/30` is the time of
 * 30 such layers in one pass, GB/s counts the bytes of the visible pages once, GFLOP/s both products. A working set of
 * 30 layers is walked in turn, so that pages come from memory as they do in a model. */
#include "../native/attend_scene.h"

#include <stdio.h>
#include <time.h>

#define N_LAYERS 30u

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of one pass over all layers: the smallest of several. */
static double time_pass(const scene *s, kvs_threads *threads, uint32_t isa, uint64_t *const *tables, float *out)
{
    kvs_attend_job job = scene_job(s, threads, 0, s->n_rows, out);
    double best = 1e9, spent = 0.0;
    kvs_threads_begin(threads);
    for (int round = 0; round < 40 && spent < 0.6; round++) {
        const double start = now();
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            job.page_table = tables[layer];
            kvs_attend_begin(&job);
            kvs_attend_wave(threads, isa, &job, 0, s->n_pages);
            kvs_attend_finish(threads, isa, &job);
        }
        const double seconds = now() - start;
        best = seconds < best ? seconds : best;
        spent += seconds;
    }
    kvs_threads_end(threads);
    free(job.state);
    return best;
}

static void bench(kvs_threads *threads, int32_t type_k, int32_t type_v, uint32_t n_rows, uint64_t n_tokens)
{
    const kvs_kv_layer layer = {
        .n_kv_heads = 3, .head_dim_k = 64, .head_dim_v = 64, .type_k = type_k, .type_v = type_v};
    scene s = scene_make(layer, 3, n_rows, n_tokens);
    const size_t bytes = s.n_pages * s.record.record_bytes;
    uint8_t *copies[N_LAYERS];
    uint64_t *tables[N_LAYERS];
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        copies[i] = scene_alloc(bytes);
        tables[i] = scene_alloc(s.n_pages * sizeof *tables[i]);
        memcpy(copies[i], s.pages, bytes);
        for (uint64_t page = 0; page < s.n_pages; page++) {
            tables[i][page] = (uint64_t)(uintptr_t)(copies[i] + page * s.record.record_bytes);
        }
    }
    const size_t out_bytes = n_rows * scene_out_row(&s) * sizeof(float);
    float *first = scene_alloc(out_bytes), *out = scene_alloc(out_bytes);
    const double visible = (double)n_tokens - 0.5 * (double)(n_rows - 1);
    const double flops = 4.0 * 64.0 * 9.0 * n_rows * visible * N_LAYERS;
    for (uint32_t isa = KVS_ISA_AVX2; isa <= kvs_cpu_isa_detect(); isa++) {
        const double seconds = time_pass(&s, threads, isa, tables, isa == KVS_ISA_AVX2 ? first : out);
        const bool equal = isa == KVS_ISA_AVX2 || memcmp(first, out, out_bytes) == 0;
        printf("%-6s %-6s rows %3u tokens %5llu isa %u: ms/30 %8.2f  GB/s %6.2f  GFLOP/s %7.1f  twins %s\n",
               kvs_type_name(type_k), kvs_type_name(type_v), n_rows, (unsigned long long)n_tokens, isa, 1e3 * seconds,
               1e-9 * (double)bytes * N_LAYERS / seconds, 1e-9 * flops / seconds, equal ? "equal" : "DIFFER");
    }
    for (uint32_t i = 0; i < N_LAYERS; i++) {
        free(copies[i]);
        free(tables[i]);
    }
    free(first);
    free(out);
    scene_free(&s);
}

int main(int n_arguments, char **arguments)
{
    static const int32_t PAIRS[][2] = {{KVS_TYPE_Q8_0, KVS_TYPE_Q4_0},
                                       {KVS_TYPE_Q8_0, KVS_TYPE_Q8_0},
                                       {KVS_TYPE_F16, KVS_TYPE_F16},
                                       {KVS_TYPE_Q5_1, KVS_TYPE_IQ4_NL}};
    static const uint32_t ROWS[] = {1, 8, 64, 512};
    static const uint64_t TOKENS[] = {1000, 3000, 6000};
    kvs_threads *threads = kvs_threads_create(n_arguments > 1 ? (uint32_t)atoi(arguments[1]) : 2);
    for (size_t p = 0; p < sizeof PAIRS / sizeof PAIRS[0]; p++) {
        if (n_arguments > 3) {
            bench(threads, PAIRS[p][0], PAIRS[p][1], (uint32_t)atoi(arguments[2]), (uint64_t)atoi(arguments[3]));
        }
        for (size_t r = 0; r < 4; r++) {
            for (size_t t = 0; t < 3 && n_arguments < 4; t++) {
                bench(threads, PAIRS[p][0], PAIRS[p][1], ROWS[r], TOKENS[t]);
            }
        }
    }
    kvs_threads_destroy(threads);
    return 0;
}
