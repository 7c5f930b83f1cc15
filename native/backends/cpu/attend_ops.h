/* attend_ops.h: the arithmetic of attention, one table per instruction set, all with the same bits.
 *
 * A part is what a softmax over some tokens has come to: floats m, s, then from KVS_ATTEND_PART_HEAD on acc[head_dim_v].
 * s is 0 exactly where a part is empty: the largest score itself contributes exp(0) = 1.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_OPS_H
#define KVS_NATIVE_CPU_ATTEND_OPS_H

#include "kvstream/kv.h"

#include <stdbool.h>

#define KVS_ATTEND_PART_HEAD 16u
/* Tokens that are decoded at a time. */
#define KVS_ATTEND_STRIP 64u

/* One page of one KV head against n_queries queries: query i is row i / group. */
typedef struct kvs_attend_leaf {
    const kvs_kv_layer *layer;
    const kvs_record_info *record;
    const uint8_t *head;   /* the head's first byte in the record */
    const uint8_t *next;   /* the head that this thread is likely to read next, or NULL: K of it is prefetched */
    const float *q;        /* [n_queries][head_dim_k] */
    uint32_t n_queries;
    uint32_t group;        /* query heads per KV head */
    int64_t first_visible; /* tokens of this page that row 0 sees; row r sees r more; below 0 and above a page too */
    float scale;
    uint32_t reserved;
    float *scores; /* [n_queries][KVS_PAGE_TOKENS] */
    float *strip;  /* KVS_ATTEND_STRIP decoded rows of K or V */
    float *parts;  /* [n_queries] parts, written */
} kvs_attend_leaf;

typedef struct kvs_attend_ops {
    void (*leaf)(const kvs_attend_leaf *leaf);
    /* into = fold(into, part), neither empty */
    void (*fold)(float *into, const float *part, uint32_t head_dim_v);
    /* out = acc / s */
    void (*finish)(const float *part, float *out, uint32_t head_dim_v);
} kvs_attend_ops;

const kvs_attend_ops *kvs_attend_ops_reference(void);
const kvs_attend_ops *kvs_attend_ops_avx2(void);
const kvs_attend_ops *kvs_attend_ops_avx512(void);

/* Tokens of the page that query i sees. */
static inline uint32_t kvs_attend_visible(const kvs_attend_leaf *leaf, uint32_t i)
{
    int64_t n = leaf->first_visible + (int64_t)(i / leaf->group);
    return n <= 0 ? 0 : n >= KVS_PAGE_TOKENS ? KVS_PAGE_TOKENS : (uint32_t)n;
}

static inline uint32_t kvs_attend_part_floats(const kvs_kv_layer *layer)
{
    return KVS_ATTEND_PART_HEAD + layer->head_dim_v;
}

/* Slice `slice` of n_slices of K of the next leaf, or of V of this one, on its way into the cache: pages come from
 * memory once a pass, and a page is read twice as fast as it is computed. */
static inline void kvs_attend_prefetch(const kvs_attend_leaf *leaf, bool is_v, uint32_t slice, uint32_t n_slices)
{
    const uint64_t k_bytes = leaf->record->plane_offset_bytes[KVS_PLANE_V_CODES];
    const uint64_t n_bytes = is_v ? leaf->record->head_bytes - k_bytes : k_bytes;
    const uint8_t *begin = is_v ? leaf->head + k_bytes : leaf->next;
    if (begin == NULL) {
        return;
    }
    for (uint64_t at = n_bytes * slice / n_slices; at < n_bytes * (slice + 1) / n_slices; at += 64) {
        __builtin_prefetch(begin + at, 0, 2);
    }
}

/* Planes of one side of the leaf's head. */
typedef struct kvs_attend_planes {
    const uint8_t *codes;
    const uint8_t *high;
    const uint8_t *scales;
    uint32_t codes_bytes; /* per row */
    uint32_t high_bytes;
    uint32_t scales_bytes;
} kvs_attend_planes;

static inline kvs_attend_planes kvs_attend_planes_of(const kvs_attend_leaf *leaf, uint32_t plane)
{
    const uint64_t *offset = &leaf->record->plane_offset_bytes[plane];
    const uint32_t *bytes = &leaf->record->plane_row_bytes[plane];
    return (kvs_attend_planes){leaf->head + offset[0], leaf->head + offset[1], leaf->head + offset[2], bytes[0],
                               bytes[1], bytes[2]};
}

#endif
