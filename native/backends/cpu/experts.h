/* experts.h: a mixture of expert feed-forwards on the CPU. The bits of an output row depend on that row, its router logits and
 * the weights: experts are added in the order of falling logits, of equal ones the lower number first.
 *
 * Rows are taken in blocks. In a block the rows of each expert are put side by side, so that an expert's weights are read
 * once, and every expert's result keeps a place of its own until all are there.
 */
#ifndef KVS_NATIVE_CPU_EXPERTS_H
#define KVS_NATIVE_CPU_EXPERTS_H

#include "backends/cpu/matmul.h"

#define KVS_EXPERTS_MAX 1024u

/* One of the three matrices of every expert: panels of expert 0, 1... one after another. */
typedef struct kvs_expert_matrix {
    int type;            /* kvs_type */
    const void *panels;
    const float *scales; /* [n_experts], or NULL */
} kvs_expert_matrix;

typedef struct kvs_experts_desc {
    kvs_expert_matrix gate; /* [n_ff][n_embd] to an expert */
    kvs_expert_matrix up;
    kvs_expert_matrix down; /* [n_embd][n_ff] */
    uint32_t n_experts;
    uint32_t n_chosen;
    uint32_t n_rows;
    float factor;           /* of every weight of a chosen expert */
    uint64_t n_embd;
    uint64_t n_ff;
    const float *x;         /* [n_rows][n_embd] */
    const float *router;    /* [n_rows][n_experts] logits */
    float *out;             /* [n_rows][n_embd], overlaps neither */
    void *workspace;        /* kvs_experts_workspace_bytes, 64-byte aligned */
} kvs_experts_desc;

/* Of the description the sizes alone count. errors: EINVAL; EUNSUPPORTED rows of an expert that share a panel with the next
 * one's; EOVERFLOW */
kvs_status kvs_experts_workspace_bytes(const kvs_experts_desc *desc, uint64_t *bytes);

/* errors: as kvs_experts_workspace_bytes and kvs_matmul_run */
kvs_status kvs_experts_run(kvs_threads *threads, uint32_t isa, const kvs_experts_desc *desc);

#endif
