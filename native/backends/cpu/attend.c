/* attend.c: which thread computes which leaf when. No arithmetic: that is in the table of the instruction set.
 *
 * Queries are numbered [KV head][row][query head of the KV head], so that a KV head's queries of a run of rows lie
 * together. Workspace: running group and result of every query | leaves of few rows | scratch of each thread.
 */
#include "backends/cpu/attend.h"
#include "backends/cpu/attend_ops.h"
#include "base/internal.h"

#include <string.h>

/* Up to this many rows, tasks are pages: a tile of so few rows would leave threads without work. */
#define FEW_ROWS 16u
/* Queries that share a decoded page in a task of many rows: enough to make decoding cheap, few enough that their scores
 * stay in the second-level cache. */
#define TILE_QUERIES 96u
#define TILE_ROWS 32u
#define LEAF_BYTES (4u << 20)
#define LEAF_PAGES_LOW 4u
#define LEAF_PAGES_HIGH 32u

/* Sizes in floats that follow from geometry and number of rows. Each grows with the rows, so that a workspace for a
 * larger pass serves a smaller one. */
typedef struct attend_shape {
    uint64_t part;       /* one part */
    uint64_t n_queries;  /* of all heads */
    uint32_t group;      /* query heads per KV head */
    uint32_t tile_rows;
    uint64_t leaf_pages; /* that the leaves of few rows cover at a time */
    uint64_t leaves;     /* region */
    uint64_t scratch;    /* of one thread */
    uint64_t scratch_q, scratch_scores, scratch_strip; /* its parts; then leaves */
} attend_shape;

static uint32_t tile_rows_of(uint32_t group, uint32_t most)
{
    const uint32_t rows = TILE_QUERIES / group;
    return rows == 0 ? 1 : rows < most ? rows : most;
}

static uint64_t round_floats(uint64_t n)
{
    return (n + 15) & ~UINT64_C(15);
}

static attend_shape shape_of(const kvs_kv_layer *layer, uint32_t n_query_heads, uint32_t n_rows)
{
    attend_shape shape = {.part = kvs_attend_part_floats(layer),
                          .n_queries = (uint64_t)n_query_heads * n_rows,
                          .group = n_query_heads / layer->n_kv_heads,
                          .leaf_pages = 1};
    /* A shorter pass takes lower tiles, so that there are enough of them for all threads. */
    shape.tile_rows = tile_rows_of(shape.group, n_rows < 8 * TILE_ROWS ? TILE_ROWS / 2 : TILE_ROWS);
    const uint64_t few_rows = n_rows < FEW_ROWS ? n_rows : FEW_ROWS;
    const uint64_t page = few_rows * n_query_heads * shape.part;
    const uint64_t most = LEAF_PAGES_HIGH * page, budget = LEAF_BYTES / sizeof(float);
    shape.leaves = most < budget ? most : budget;
    shape.leaves = round_floats(shape.leaves > LEAF_PAGES_LOW * page ? shape.leaves : LEAF_PAGES_LOW * page);
    shape.leaf_pages = shape.leaves / page;
    const uint64_t high_tile = tile_rows_of(shape.group, TILE_ROWS < n_rows ? TILE_ROWS : n_rows);
    const uint64_t m = (few_rows > high_tile ? few_rows : high_tile) * shape.group;
    const uint32_t strip_values = layer->head_dim_k > layer->head_dim_v ? layer->head_dim_k : layer->head_dim_v;
    shape.scratch_q = round_floats(m * layer->head_dim_k);
    shape.scratch_scores = m * KVS_PAGE_TOKENS;
    shape.scratch_strip = (uint64_t)KVS_ATTEND_STRIP * round_floats(strip_values);
    shape.scratch = shape.scratch_q + shape.scratch_scores + shape.scratch_strip + round_floats(m * shape.part);
    return shape;
}

uint64_t kvs_attend_state_bytes(const kvs_kv_layer *layer, uint32_t n_query_heads, uint32_t n_rows,
                                uint32_t n_threads)
{
    /* Bounds under which nothing below can overflow. */
    if (n_rows > 1u << 20 || n_query_heads > 1u << 12 || layer->head_dim_k > 1u << 16 ||
        layer->head_dim_v > 1u << 16 || n_threads > 1u << 12) {
        return 0;
    }
    const attend_shape shape = shape_of(layer, n_query_heads, n_rows == 0 ? 1 : n_rows);
    const uint64_t floats = 2 * shape.n_queries * shape.part + shape.leaves + n_threads * shape.scratch;
    return floats * sizeof(float);
}

static const kvs_attend_ops *ops_of(uint32_t isa)
{
#if defined(__x86_64__)
    if (isa >= KVS_ISA_AVX512) {
        return kvs_attend_ops_avx512();
    }
    if (isa == KVS_ISA_AVX2) {
        return kvs_attend_ops_avx2();
    }
#endif
    (void)isa;
    return kvs_attend_ops_reference();
}

/* What the tasks of one wave share. */
typedef struct attend_run {
    const kvs_attend_job *job;
    const kvs_attend_ops *ops;
    attend_shape shape;
    uint64_t page_begin;
    uint64_t page_end;
    uint32_t n_threads;
} attend_run;

static float *group_part(const attend_run *run, uint64_t query)
{
    return (float *)run->job->state + 2 * query * run->shape.part;
}

static float *result_part(const attend_run *run, uint64_t query)
{
    return group_part(run, query) + run->shape.part;
}

static float *leaf_region(const attend_run *run)
{
    return (float *)run->job->state + 2 * run->shape.n_queries * run->shape.part;
}

static float *scratch_of(const attend_run *run, uint32_t worker)
{
    return leaf_region(run) + run->shape.leaves + worker * run->shape.scratch;
}

static attend_run run_of(uint32_t isa, const kvs_attend_job *job)
{
    return (attend_run){.job = job, .ops = ops_of(isa), .shape = shape_of(job->layer, job->n_query_heads, job->n_rows)};
}

static uint64_t query_number(const attend_run *run, uint32_t kv_head, uint32_t row)
{
    return ((uint64_t)kv_head * run->job->n_rows + row) * run->shape.group;
}

static void fold_part(const attend_run *run, float *into, const float *part)
{
    if (part[1] == 0.0f) {
        return;
    }
    if (into[1] == 0.0f) {
        memcpy(into, part, run->shape.part * sizeof *into);
        return;
    }
    run->ops->fold(into, part, run->job->layer->head_dim_v);
}

/* Fold the leaf of one page into a query's group, and a group that is complete into its result. */
static void fold_leaf(const attend_run *run, uint64_t query, uint64_t page, const float *leaf)
{
    float *group = group_part(run, query);
    fold_part(run, group, leaf);
    if (page % KVS_ATTEND_GROUP_PAGES == KVS_ATTEND_GROUP_PAGES - 1) {
        fold_part(run, result_part(run, query), group);
        group[1] = 0.0f;
    }
}

/* Gather the queries of a run of rows of one KV head. */
static void pack_queries(const attend_run *run, uint32_t kv_head, uint32_t row_begin, uint32_t n_rows, float *packed)
{
    const kvs_attend_job *job = run->job;
    const uint64_t n_values = (uint64_t)run->shape.group * job->layer->head_dim_k;
    for (uint32_t row = 0; row < n_rows; row++) {
        const float *q = job->q + (row_begin + row) * job->q_stride + kv_head * n_values;
        memcpy(packed + row * n_values, q, n_values * sizeof *q);
    }
}

/* A leaf task of rows [row_begin, row_begin + n_rows) of one KV head, its page still open. */
static kvs_attend_leaf leaf_of(const attend_run *run, uint32_t kv_head, uint32_t row_begin, uint32_t n_rows,
                               float *scratch)
{
    float *scores = scratch + run->shape.scratch_q;
    float *strip = scores + run->shape.scratch_scores;
    pack_queries(run, kv_head, row_begin, n_rows, scratch);
    return (kvs_attend_leaf){.layer = run->job->layer,
                             .record = run->job->record,
                             .q = scratch,
                             .n_queries = n_rows * run->shape.group,
                             .group = run->shape.group,
                             .scale = run->job->scale,
                             .scores = scores,
                             .strip = strip,
                             .parts = strip + run->shape.scratch_strip};
}

static const uint8_t *head_of(const attend_run *run, uint64_t page, uint32_t kv_head)
{
    return (const uint8_t *)(uintptr_t)run->job->page_table[page] + kv_head * run->job->record->head_bytes;
}

static void compute_leaf(const attend_run *run, kvs_attend_leaf *leaf, uint32_t kv_head, uint32_t row_begin,
                         uint64_t page)
{
    leaf->head = head_of(run, page, kv_head);
    leaf->first_visible =
        (int64_t)(run->job->first_position + row_begin + 1) - (int64_t)(page * KVS_PAGE_TOKENS);
    run->ops->leaf(leaf);
}

/* Few rows: task = (page of the chunk, KV head). */
static void page_task(void *argument, uint32_t index, uint32_t worker)
{
    const attend_run *run = argument;
    const uint32_t n_kv_heads = run->job->layer->n_kv_heads;
    const uint32_t kv_head = index % n_kv_heads, chunk_page = index / n_kv_heads;
    kvs_attend_leaf leaf = leaf_of(run, kv_head, 0, run->job->n_rows, scratch_of(run, worker));
    leaf.parts =
        leaf_region(run) + (chunk_page * run->shape.n_queries + query_number(run, kv_head, 0)) * run->shape.part;
    /* Tasks are claimed in order, so the others take those in between. */
    const uint32_t next = index + run->n_threads;
    if (run->page_begin + next / n_kv_heads < run->page_end) {
        leaf.next = head_of(run, run->page_begin + next / n_kv_heads, next % n_kv_heads);
    }
    compute_leaf(run, &leaf, kv_head, 0, run->page_begin + chunk_page);
}

/* Few rows: task = KV head, after all leaves of the chunk. */
static void fold_task(void *argument, uint32_t index, uint32_t worker)
{
    const attend_run *run = argument;
    const uint64_t first = query_number(run, index, 0), last = query_number(run, index, run->job->n_rows);
    (void)worker;
    for (uint64_t page = run->page_begin; page < run->page_end; page++) {
        const float *leaves = leaf_region(run) + (page - run->page_begin) * run->shape.n_queries * run->shape.part;
        for (uint64_t query = first; query < last; query++) {
            fold_leaf(run, query, page, leaves + query * run->shape.part);
        }
    }
}

/* Many rows: task = (tile of rows, KV head). Later tiles see more pages and come first, so that no thread ends late. */
static void tile_task(void *argument, uint32_t index, uint32_t worker)
{
    const attend_run *run = argument;
    const kvs_attend_job *job = run->job;
    const uint32_t n_kv_heads = job->layer->n_kv_heads, tile_rows = run->shape.tile_rows;
    const uint32_t n_tiles = (job->n_rows + tile_rows - 1) / tile_rows;
    const uint32_t kv_head = index % n_kv_heads;
    const uint32_t row_begin = (n_tiles - 1 - index / n_kv_heads) * tile_rows;
    const uint32_t n_rows = job->n_rows - row_begin < tile_rows ? job->n_rows - row_begin : tile_rows;
    const uint64_t last_page = (job->first_position + row_begin + n_rows - 1) / KVS_PAGE_TOKENS;
    const uint64_t first_query = query_number(run, kv_head, row_begin);
    kvs_attend_leaf leaf = leaf_of(run, kv_head, row_begin, n_rows, scratch_of(run, worker));
    for (uint64_t page = run->page_begin; page < run->page_end && page <= last_page; page++) {
        leaf.next = page + 1 < run->page_end && page < last_page ? head_of(run, page + 1, kv_head) : NULL;
        compute_leaf(run, &leaf, kv_head, row_begin, page);
        for (uint32_t i = 0; i < leaf.n_queries; i++) {
            fold_leaf(run, first_query + i, page, leaf.parts + i * run->shape.part);
        }
    }
}

void kvs_attend_begin(const kvs_attend_job *job)
{
    const attend_run run = run_of(KVS_ISA_REFERENCE, job);
    for (uint64_t query = 0; query < run.shape.n_queries; query++) {
        group_part(&run, query)[1] = 0.0f;
        result_part(&run, query)[1] = 0.0f;
    }
}

void kvs_attend_wave(kvs_threads *threads, uint32_t isa, const kvs_attend_job *job, uint64_t page_begin,
                     uint64_t page_end)
{
    attend_run run = run_of(isa, job);
    run.n_threads = kvs_threads_count(threads);
    const uint32_t n_kv_heads = job->layer->n_kv_heads;
    const uint64_t n_pages = (job->first_position + job->n_rows - 1) / KVS_PAGE_TOKENS + 1;
    page_end = page_end < n_pages ? page_end : n_pages;
    if (job->n_rows > FEW_ROWS) {
        const uint32_t n_tiles = (job->n_rows + run.shape.tile_rows - 1) / run.shape.tile_rows;
        run.page_begin = page_begin;
        run.page_end = page_end;
        kvs_threads_run(threads, page_begin < page_end ? n_tiles * n_kv_heads : 0, tile_task, &run);
        return;
    }
    while (page_begin < page_end) {
        const uint64_t left = page_end - page_begin;
        run.page_begin = page_begin;
        run.page_end = page_begin + (left < run.shape.leaf_pages ? left : run.shape.leaf_pages);
        kvs_threads_run(threads, (uint32_t)(run.page_end - run.page_begin) * n_kv_heads, page_task, &run);
        kvs_threads_run(threads, n_kv_heads, fold_task, &run);
        page_begin = run.page_end;
    }
}

/* Task = row. */
static void finish_task(void *argument, uint32_t index, uint32_t worker)
{
    const attend_run *run = argument;
    const kvs_attend_job *job = run->job;
    float *out = job->out + index * job->out_stride;
    (void)worker;
    for (uint32_t head = 0; head < job->n_query_heads; head++, out += job->layer->head_dim_v) {
        const uint64_t query = query_number(run, head / run->shape.group, index) + head % run->shape.group;
        float *result = result_part(run, query);
        fold_part(run, result, group_part(run, query));
        run->ops->finish(result, out, job->layer->head_dim_v);
    }
}

void kvs_attend_finish(kvs_threads *threads, uint32_t isa, const kvs_attend_job *job)
{
    attend_run run = run_of(isa, job);
    if (job->n_rows == 1) {
        finish_task(&run, 0, 0);
        return;
    }
    kvs_threads_run(threads, job->n_rows, finish_task, &run);
}
