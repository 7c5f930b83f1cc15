/* span.h: where the pages of one layer lie for one pass, in logical order, and who attends to them. */
#ifndef KVSTREAM_SPAN_H
#define KVSTREAM_SPAN_H

#include "kvstream/arena.h"
#include "kvstream/kv.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_span_plan kvs_span_plan;

typedef enum kvs_executor {
    KVS_EXECUTOR_DEVICE = 0, /* the device reads the pages from its arena */
    KVS_EXECUTOR_HOST = 1    /* the host attends where they lie; refused by name until a backend offers it */
} kvs_executor;

/* A run of pages at consecutive addresses. */
typedef struct kvs_span {
    uint64_t token_begin;  /* multiple of KVS_PAGE_TOKENS */
    uint64_t n_tokens;     /* exact live tokens; only the last span may end inside a page */
    kvs_lease *lease;      /* region that holds them */
    uint64_t offset_bytes; /* of the first record, from the region's start; multiple of 64 */
    uint64_t stride_bytes; /* from record to record; at least the record size, multiple of 64 */
    uint32_t executor;     /* kvs_executor */
    uint32_t reserved;
} kvs_span;

typedef struct kvs_span_desc {
    uint32_t struct_size;
    uint32_t n_spans;
    const kvs_kv_layer *layer;
    const kvs_span *spans;
    uint64_t active_tokens;  /* sum of all spans */
    uint32_t n_query_rows;   /* the last n_query_rows active tokens ask; at most active_tokens */
    uint32_t reserved;
} kvs_span_desc;

typedef struct kvs_span_plan_info {
    uint32_t struct_size;
    uint32_t n_spans;
    uint64_t active_tokens;
    uint64_t n_pages;
    uint64_t live_bytes; /* records, whole pages */
    uint32_t n_query_rows;
    uint32_t n_claims; /* on this plan */
} kvs_span_plan_info;

/* Validate and freeze. The spans must be an exact ordered partition of [0, active_tokens) and lie inside their leases. The
 * plan retains one claim per span on its lease, and copies everything else.
 * own: caller. thread: any. errors, in this order of checks, `plan` untouched by each: EINVAL no spans, no tokens, too many
 * query rows; EUNSUPPORTED executor; EINVAL empty span, gap, overlap, order, begin or inner end not on a page, last end not
 * active_tokens; EINVAL lease or alignment; EOVERFLOW; ENOSPACE outside the lease; ENOMEM. Texts name the span */
kvs_status kvs_span_plan_make(kvs_device *device, const kvs_span_desc *desc, kvs_span_plan **plan);

/* One more claim on the same plan. NULL is ignored. thread: any */
void kvs_span_plan_retain(kvs_span_plan *plan);

/* The last claim gives the leases back. NULL is ignored. thread: any */
void kvs_span_plan_release(kvs_span_plan *plan);

/* thread: any. errors: EINVAL */
kvs_status kvs_span_plan_get_info(kvs_span_plan *plan, kvs_span_plan_info *info);

/* Device address of each page, in logical order. shape: addresses [capacity]. thread: any.
 * errors: ENOSPACE capacity below the plan's pages (nothing written) */
kvs_status kvs_span_plan_page_table(kvs_span_plan *plan, uint64_t *addresses, uint64_t capacity);

typedef struct kvs_attend_desc {
    uint32_t struct_size;
    uint32_t n_query_heads; /* multiple of n_kv_heads */
    kvs_span_plan *plan;
    const float *q;         /* [n_query_rows][n_query_heads][head_dim_k], already rotated where the layer says so */
    float *out;             /* [n_query_rows][n_query_heads][head_dim_v] */
    float scale;            /* of the scores, e.g. 1/sqrt(head_dim) */
    uint32_t reserved;
} kvs_attend_desc;

/* Causal attention of the plan's last rows over all its tokens, on the device's threads. Softmax sums are folded over the
 * absolute page index in a fixed tree, so that the result does not depend on where pages lie, on the number of rows or on
 * threads. Pages must be ready. thread: owner of the device's work. errors: EINVAL; EUNSUPPORTED */
kvs_status kvs_attend_run(kvs_device *device, const kvs_attend_desc *desc);

/* cffi:end */

KVS_API_END
#endif
