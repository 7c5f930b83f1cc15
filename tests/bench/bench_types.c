/* bench_types.c: what binds the matmul of each weight type: the bytes of its panels, or their dot products.
 *
 * Usage: bench_types [threads [type number]]. For each type and instruction set, with one row and with eight: values of
 * the weight per second with panels that stay in the second-level cache (the dot product's own rate), and with panels
 * that come from memory, there with GB/s of panels too. A pass is timed in parts, and the shortest time of each part
 * counts: on a shared machine no whole pass may be undisturbed.
 */
#include "cpu_weights.h"

#include "backends/cpu/backend.h"
#include "backends/cpu/matmul.h"

#include <stdio.h>
#include <sys/mman.h>
#include <time.h>

#define K 2048u
#define CACHED_VALUES (1u << 20) /* to a thread: half a megabyte of 4-bit codes */
#define MEMORY_BYTES (192u << 20)
#define PART_BYTES (4u << 20)
#define MAX_PARTS 64u
#define MAX_ROWS 8u
#define SECONDS 0.6

typedef struct matrix {
    int type;
    uint64_t n;
    uint64_t bytes;
    void *panels;
} matrix;

typedef struct scene {
    kvs_threads *threads;
    uint32_t n_threads;
    float *x;
    float *out;
    void *workspace;
    uint64_t workspace_bytes;
} scene;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* As the backend keeps weights. */
static void *huge_pages(uint64_t bytes)
{
    const uint64_t page = (uint64_t)2 << 20;
    void *memory = aligned_alloc(page, (bytes + page - 1) / page * page);
#if defined(MADV_HUGEPAGE)
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

/* Rows repeat a few random ones: what is measured does not depend on the values. */
static matrix make_matrix(int type, uint64_t n)
{
    enum { DISTINCT = 64 };
    uint32_t block_values, block_bytes;
    matrix made = {.type = type, .n = n};
    kvs_type_block(type, &block_values, &block_bytes);
    const uint64_t part_bytes = (uint64_t)DISTINCT * K / block_values * block_bytes;
    uint64_t panel_bytes;
    kvs_panel_bytes(type, K, DISTINCT, &panel_bytes, NULL);
    uint8_t *rows = random_weights(type, K, DISTINCT, part_bytes);
    made.bytes = kvs_panel_count(n) * panel_bytes;
    made.panels = huge_pages(made.bytes);
    const uint64_t n_distinct = kvs_panel_count(DISTINCT);
    kvs_panel_pack(type, K, DISTINCT, rows, made.panels, 0, n_distinct);
    for (uint64_t p = n_distinct; p < kvs_panel_count(n); p++) {
        memcpy((uint8_t *)made.panels + p * panel_bytes, (uint8_t *)made.panels + p % n_distinct * panel_bytes,
               panel_bytes);
    }
    free(rows);
    return made;
}

/* Time of one part of the matrix: n values of the output, from `panels` on. */
static double time_part(const scene *s, int type, const uint8_t *panels, uint64_t n, uint32_t isa, uint32_t n_rows)
{
    const kvs_matmul_desc desc = {
        .part = {{.type = type, .n = n, .panels = panels, .out = s->out, .out_stride = n}},
        .n_parts = 1,
        .n_rows = n_rows,
        .k = K,
        .x = s->x,
        .x_stride = K,
        .workspace = s->workspace,
        .workspace_bytes = s->workspace_bytes,
    };
    const double start = now_s();
    kvs_matmul_run(s->threads, isa, &desc);
    return now_s() - start;
}

static double best_time(const scene *s, const matrix *w, uint32_t isa, uint32_t n_rows)
{
    const uint64_t n_panels = kvs_panel_count(w->n);
    const uint64_t panel_bytes = w->bytes / n_panels;
    const uint64_t part_panels = PART_BYTES / panel_bytes;
    double best[MAX_PARTS];
    uint32_t n_parts;
    for (uint32_t i = 0; i < MAX_PARTS; i++) {
        best[i] = 1e9;
    }
    const double end = now_s() + SECONDS;
    kvs_threads_begin(s->threads);
    do {
        n_parts = 0;
        for (uint64_t panel = 0; panel < n_panels; panel += part_panels) {
            const uint64_t n = 16 * (n_panels - panel < part_panels ? n_panels - panel : part_panels);
            const uint8_t *panels = (const uint8_t *)w->panels + panel * panel_bytes;
            const double taken = time_part(s, w->type, panels, n, isa, n_rows);
            best[n_parts] = taken < best[n_parts] ? taken : best[n_parts];
            n_parts++;
        }
    } while (now_s() < end);
    kvs_threads_end(s->threads);
    double total = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        total += best[i];
    }
    return total;
}

static void measure_type(const scene *s, int type)
{
    uint64_t panel_bytes;
    kvs_panel_bytes(type, K, 16, &panel_bytes, NULL);
    const double bits = 8.0 * (double)panel_bytes / (16.0 * K);
    const matrix cached = make_matrix(type, (uint64_t)CACHED_VALUES * s->n_threads / K);
    const matrix streamed = make_matrix(type, MEMORY_BYTES / panel_bytes * 16);
    for (uint32_t isa = KVS_ISA_AVX2; isa <= kvs_cpu_isa_detect(); isa++) {
        printf("%-8s %5.2f bits  isa %u:", kvs_type_name(type), bits, isa);
        for (uint32_t n_rows = 1; n_rows <= MAX_ROWS; n_rows *= MAX_ROWS) {
            const double at_rest = best_time(s, &cached, isa, n_rows);
            const double moving = best_time(s, &streamed, isa, n_rows);
            printf("  rows %u: cached %6.1f G/s, memory %6.1f G/s %5.1f GB/s", n_rows,
                   (double)(cached.n * K * n_rows) / at_rest / 1e9, (double)(streamed.n * K * n_rows) / moving / 1e9,
                   (double)streamed.bytes / moving / 1e9);
        }
        printf("\n");
        fflush(stdout);
    }
    free(cached.panels);
    free(streamed.panels);
}

int main(int argc, char **argv)
{
    const uint32_t n_threads = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
    const int only = argc > 2 ? atoi(argv[2]) : -1;
    const uint64_t widest = 16 * (MEMORY_BYTES / 4096); /* rows of the smallest panels, and more */
    scene s = {.threads = kvs_threads_create(n_threads), .n_threads = n_threads};
    kvs_matmul_workspace_bytes(K, MAX_ROWS, &s.workspace_bytes);
    s.workspace = aligned_alloc(64, s.workspace_bytes);
    s.x = aligned_alloc(64, MAX_ROWS * K * sizeof(float));
    s.out = aligned_alloc(64, MAX_ROWS * widest * sizeof(float));
    fill_floats(s.x, MAX_ROWS * K, 1);
    printf("%u threads, rows of %u values\n", n_threads, K);
    for (size_t t = 0; t < N_WEIGHT_TYPES; t++) {
        if (only < 0 || only == weight_types[t]) {
            measure_type(&s, weight_types[t]);
        }
    }
    kvs_threads_destroy(s.threads);
    free(s.out);
    free(s.x);
    free(s.workspace);
    return 0;
}
