/* attend_scene.h: a small world for attention: pages of random history, queries, and the plain answer in float64.
 *
 * Tokens that no row sees are NaN in every type, so that a result that touches one shows it. */
#ifndef KVS_TESTS_ATTEND_SCENE_H
#define KVS_TESTS_ATTEND_SCENE_H

#include "backends/cpu/attend.h"
#include "backends/cpu/backend.h"
#include "backends/cpu/encode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct scene {
    kvs_kv_layer layer;
    kvs_record_info record;
    uint32_t n_query_heads;
    uint32_t n_rows;
    uint64_t n_tokens; /* the last n_rows of them ask */
    uint64_t n_pages;
    uint64_t *table;
    uint8_t *pages;
    float *q; /* [n_rows][n_query_heads * head_dim_k] */
    float scale;
} scene;

static inline void *scene_alloc(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == NULL) {
        abort();
    }
    return memory;
}

static inline uint32_t scene_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

/* About normal: the sum of four uniform values. */
static inline float scene_normal(uint64_t *state)
{
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        sum += (float)(scene_random(state) >> 8) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

static inline size_t scene_q_row(const scene *s)
{
    return (size_t)s->n_query_heads * s->layer.head_dim_k;
}

static inline size_t scene_out_row(const scene *s)
{
    return (size_t)s->n_query_heads * s->layer.head_dim_v;
}

static inline scene scene_make(kvs_kv_layer layer, uint32_t group, uint32_t n_rows, uint64_t n_tokens)
{
    scene s = {.layer = layer,
               .record = {.struct_size = sizeof s.record},
               .n_query_heads = layer.n_kv_heads * group,
               .n_rows = n_rows,
               .n_tokens = n_tokens,
               .n_pages = (n_tokens + KVS_PAGE_TOKENS - 1) / KVS_PAGE_TOKENS,
               .scale = 1.0f / sqrtf((float)layer.head_dim_k)};
    uint64_t state = n_tokens * 1000003 + n_rows * 101 + group * 7 + (uint64_t)(layer.type_k * 31 + layer.type_v);
    if (kvs_record_layout(&layer, &s.record) != KVS_OK) {
        abort();
    }
    s.pages = scene_alloc(s.n_pages * s.record.record_bytes);
    memset(s.pages, 0xff, s.n_pages * s.record.record_bytes);
    s.table = scene_alloc(s.n_pages * sizeof *s.table);
    const size_t k_row = (size_t)layer.n_kv_heads * layer.head_dim_k;
    const size_t v_row = (size_t)layer.n_kv_heads * layer.head_dim_v;
    float *k = scene_alloc(k_row * sizeof *k), *v = scene_alloc(v_row * sizeof *v);
    for (uint64_t page = 0; page < s.n_pages; page++) {
        s.table[page] = (uint64_t)(uintptr_t)(s.pages + page * s.record.record_bytes);
    }
    for (uint64_t token = 0; token < n_tokens; token++) {
        const float size = token % 97 == 5 ? 6.0f : 1.0f; /* some tokens stand out */
        for (size_t i = 0; i < k_row; i++) {
            k[i] = size * scene_normal(&state);
        }
        for (size_t i = 0; i < v_row; i++) {
            v[i] = scene_normal(&state) + 0.25f;
        }
        kvs_encode_rows(KVS_ISA_REFERENCE, &layer, &s.record, s.pages + token / KVS_PAGE_TOKENS * s.record.record_bytes,
                        token % KVS_PAGE_TOKENS, 1, k, k_row, v, v_row);
    }
    free(k);
    free(v);
    s.q = scene_alloc(n_rows * scene_q_row(&s) * sizeof *s.q);
    for (size_t i = 0; i < n_rows * scene_q_row(&s); i++) {
        s.q[i] = 2.0f * scene_normal(&state);
    }
    return s;
}

static inline void scene_free(scene *s)
{
    free(s->table);
    free(s->pages);
    free(s->q);
}

/* The job of rows [first_row, first_row + n_rows) of the scene. The caller frees `state`. */
static inline kvs_attend_job scene_job(const scene *s, kvs_threads *threads, uint32_t first_row, uint32_t n_rows,
                                       float *out)
{
    const uint64_t bytes = kvs_attend_state_bytes(&s->layer, s->n_query_heads, n_rows, kvs_threads_count(threads));
    kvs_attend_job job = {.layer = &s->layer,
                          .record = &s->record,
                          .n_query_heads = s->n_query_heads,
                          .n_rows = n_rows,
                          .q = s->q + first_row * scene_q_row(s),
                          .q_stride = scene_q_row(s),
                          .out = out,
                          .out_stride = scene_out_row(s),
                          .scale = s->scale,
                          .first_position = s->n_tokens - s->n_rows + first_row,
                          .page_table = s->table,
                          .state = scene_alloc(bytes)};
    memset(job.state, 0xff, bytes);
    return job;
}

static inline void scene_run(const scene *s, kvs_threads *threads, uint32_t isa, uint32_t first_row, uint32_t n_rows,
                             float *out)
{
    kvs_attend_job job = scene_job(s, threads, first_row, n_rows, out);
    kvs_attend_begin(&job);
    kvs_attend_wave(threads, isa, &job, 0, s->n_pages);
    kvs_attend_finish(threads, isa, &job);
    free(job.state);
}

/* Softmax in float64 of one row and query head over the decoded history. shape: out [head_dim_v] */
static inline void scene_expect(const scene *s, uint32_t row, uint32_t head, double *out)
{
    const uint32_t nk = s->layer.head_dim_k, nv = s->layer.head_dim_v;
    const uint32_t kv_head = head / (s->n_query_heads / s->layer.n_kv_heads);
    const uint64_t n_tokens = s->n_tokens - s->n_rows + row + 1;
    const kvs_record_info *r = &s->record;
    kvs_decode_fn decode_k = kvs_decode_select_reference(s->layer.type_k);
    kvs_decode_fn decode_v = kvs_decode_select_reference(s->layer.type_v);
    float values[1024];
    double *weights = scene_alloc(n_tokens * sizeof *weights);
    double best = -INFINITY, sum = 0.0;
    for (uint64_t t = 0; t < n_tokens; t++) {
        const uint8_t *base = s->pages + t / KVS_PAGE_TOKENS * r->record_bytes + kv_head * r->head_bytes;
        const uint64_t at = t % KVS_PAGE_TOKENS;
        decode_k(base + r->plane_offset_bytes[0] + at * r->plane_row_bytes[0],
                 base + r->plane_offset_bytes[1] + at * r->plane_row_bytes[1],
                 base + r->plane_offset_bytes[2] + at * r->plane_row_bytes[2], nk, values);
        double dot = 0.0;
        for (uint32_t d = 0; d < nk; d++) {
            dot += (double)s->q[row * scene_q_row(s) + (size_t)head * nk + d] * (double)values[d];
        }
        weights[t] = dot * (double)s->scale;
        best = weights[t] > best ? weights[t] : best;
    }
    for (uint32_t d = 0; d < nv; d++) {
        out[d] = 0.0;
    }
    for (uint64_t t = 0; t < n_tokens; t++) {
        const uint8_t *base = s->pages + t / KVS_PAGE_TOKENS * r->record_bytes + kv_head * r->head_bytes;
        const uint64_t at = t % KVS_PAGE_TOKENS;
        decode_v(base + r->plane_offset_bytes[3] + at * r->plane_row_bytes[3],
                 base + r->plane_offset_bytes[4] + at * r->plane_row_bytes[4],
                 base + r->plane_offset_bytes[5] + at * r->plane_row_bytes[5], nv, values);
        const double weight = exp(weights[t] - best);
        sum += weight;
        for (uint32_t d = 0; d < nv; d++) {
            out[d] += weight * (double)values[d];
        }
    }
    for (uint32_t d = 0; d < nv; d++) {
        out[d] /= sum;
    }
    free(weights);
}

#endif
