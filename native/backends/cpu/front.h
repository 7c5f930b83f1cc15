/* front.h: of rows of logits what a sampler looks at: the best columns, and the sum of exponentials.
 *
 * Order: columns are summed in chunks of KVS_FRONT_CHUNK. Lane j of a chunk adds the exponentials (float32, of the distance to
 * the chunk's largest) of columns j, j + 256, ... in float64; lanes fold 128, 64, ... 1; chunks add up in order, each times the
 * exponential of its largest less that of the row. Best columns are ordered by (value falling, number rising); -0 equals +0.
 * Same bits whatever the number of threads and the instruction set. kvs_sum_exps has the same order, so that a log probability
 * is the same whether its row was looked at by a pass or by whoever got the whole row.
 */
#ifndef KVS_NATIVE_CPU_FRONT_H
#define KVS_NATIVE_CPU_FRONT_H

#include "backends/cpu/threads.h"
#include "kvstream/tape.h"

typedef struct kvs_front_desc {
    const float *rows;
    uint64_t stride;      /* in values */
    uint32_t n_rows;
    uint32_t n_cols;      /* at most KVS_FRONT_CHUNK * KVS_FRONT_MAX_CHUNKS */
    uint32_t n_tokens;    /* of the columns; those behind are looked at for what is no number alone */
    uint32_t n_best;      /* 1 to KVS_FRONT_MAX_BEST */
    uint32_t *out;        /* [n_rows][2 * n_best + KVS_FRONT_TAIL], as KVS_OP_FRONT has it */
} kvs_front_desc;

void kvs_front_run(kvs_threads *threads, uint32_t isa, const kvs_front_desc *desc);

/* What the instruction sets have of their own. */
typedef struct kvs_front_ops {
    /* The number of the first value that is NaN or infinite upwards, n where there is none; then *largest is the largest. */
    uint64_t (*scan)(const float *x, uint64_t n, float *largest);
    /* lanes[i % KVS_FRONT_LANES] += exp(x[i] - largest) for i < n <= KVS_FRONT_CHUNK, in order. */
    void (*add_exps)(const float *x, uint64_t n, float largest, double lanes[KVS_FRONT_LANES]);
    /* The number of the first value above the bound from `from` on, n where there is none. */
    uint64_t (*next_above)(const float *x, uint64_t n, uint64_t from, float bound);
} kvs_front_ops;

extern const kvs_front_ops kvs_front_ops_avx2;

#endif
