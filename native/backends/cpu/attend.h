/* attend.h: causal attention over page records in one fixed order of summation.
 *
 * Order. The result of a row depends on its query and on the stored codes of the tokens it sees, on nothing else:
 * - score(t) = scale * (fmaf chain over k = 0, 1, ... of q[k] * K[t][k], from +0)
 * - leaf, one 256-token page computed afresh over the tokens that the row sees: m = largest score; p(t) =
 *   kvs_expf(score(t) - m); s = sixteen lanes, lane l adds p(t) for t = l, l + 16, ..., then lane l adds lane l + 8, + 4,
 *   + 2, + 1; acc[d] = fmaf chain over t = 0, 1, ... of p(t) * V[t][d], from +0
 * - fold of a later part b into an earlier one a: m = b.m > a.m ? b.m : a.m; fa = kvs_expf(a.m - m); fb =
 *   kvs_expf(b.m - m); x = fmaf(b.x, fb, a.x * fa) for s and each acc[d]. Folding into nothing copies.
 * - leaves fold in order into groups of KVS_ATTEND_GROUP_PAGES by absolute page index, groups in order into the result;
 *   out[d] = acc[d] * (1 / s), a NaN as the one canonical NaN.
 * Waves, tiles, threads and instruction sets only choose which of these are computed when. A row that sees no token of a
 * page has no leaf there; codes of tokens that a row does not see never reach its sums.
 *
 * Shapes: tasks of few rows are (KV head, page), with leaves kept in the workspace and folded in order afterwards; tasks
 * of many rows are (KV head, tile of rows), which walk the pages of the wave with a running state. K and V codes of a
 * page are decoded once per task and shared by its rows and the query heads of the KV head.
 */
#ifndef KVS_NATIVE_CPU_ATTEND_H
#define KVS_NATIVE_CPU_ATTEND_H

#include "backends/cpu/threads.h"
#include "kvstream/span.h"

#define KVS_ATTEND_GROUP_PAGES 16

typedef struct kvs_attend_job {
    const kvs_kv_layer *layer;
    const kvs_record_info *record;
    uint32_t n_query_heads; /* multiple of n_kv_heads */
    uint32_t n_rows;        /* at least 1 */
    const float *q;         /* row r, head h: q + r * q_stride + h * head_dim_k; rotated where the layer says so */
    uint64_t q_stride;      /* floats */
    float *out;             /* row r, head h: out + r * out_stride + h * head_dim_v; not rotated back */
    uint64_t out_stride;
    float scale;                /* of the scores */
    uint32_t reserved;
    uint64_t first_position;    /* row r sees tokens 0 .. first_position + r */
    const uint64_t *page_table; /* device addresses by absolute page index; only those of the wave are read */
    void *state;                /* kvs_attend_state_bytes, 64-byte aligned */
} kvs_attend_job;

/* Workspace of a job: running state of each row and head, leaves of few rows (at most 4 MiB or four pages of them,
 * whichever is more), decoded pages per thread. 0 on overflow. */
uint64_t kvs_attend_state_bytes(const kvs_kv_layer *layer, uint32_t n_query_heads, uint32_t n_rows,
                                uint32_t n_threads);

/* begin, then waves over consecutive page ranges from page 0 on, then finish. Every wave may be cut anywhere, down to one
 * page; pages beyond the last one that a row sees are ignored. `isa`: kvs_isa, never KVS_ISA_BEST. */
void kvs_attend_begin(const kvs_attend_job *job);
void kvs_attend_wave(kvs_threads *threads, uint32_t isa, const kvs_attend_job *job,
                     uint64_t page_begin, uint64_t page_end);
void kvs_attend_finish(kvs_threads *threads, uint32_t isa, const kvs_attend_job *job);

/* Attention of a frozen span plan in one wave. pages: the plan's page table. Allocates its workspace.
 * errors: EINVAL; EUNSUPPORTED the record's; EOVERFLOW; ENOMEM */
kvs_status kvs_cpu_attend_plan(kvs_device *device, kvs_threads *threads, uint32_t isa, const kvs_attend_desc *desc,
                               const kvs_kv_layer *layer, const uint64_t *pages,
                               uint64_t active_tokens, uint32_t n_query_rows);

#endif
