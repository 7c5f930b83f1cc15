/* delta_head.h: one value head on its way through a pass: what delta.c prepares and delta_chunk.c takes.
 *
 * Rows of a pass are numbered from the first pending one; the convolution tail lies before, at negative numbers.
 */
#ifndef KVS_NATIVE_CPU_DELTA_HEAD_H
#define KVS_NATIVE_CPU_DELTA_HEAD_H

#include "backends/cpu/delta.h"
#include "backends/cpu/delta_ops.h"

/* Rows whose q, k and v are held at a time. */
#define KVS_DELTA_BLOCK KVS_CHUNK_TOKENS

typedef struct kvs_delta_head {
    const kvs_delta_job *job;
    const kvs_delta_ops *ops;
    uint32_t index; /* of the value head */
    uint32_t dim;
    float *weights; /* [q, k, v][taps][dim] */
    float *q;       /* [block][dim] */
    float *k;
    float *v;
    float *beta;    /* [block] */
    float *decay;   /* [block] logarithms of the decay; its values for the recurrence */
    float *matrix;  /* [dim][dim] */
    float *scores;  /* chunks alone: [block][block] */
    float *mixing;  /* [block][block] */
    float *keys;    /* [dim][block], k transposed */
    float *updates; /* [block][dim] */
} kvs_delta_head;

/* q, k, v, beta and the logarithm of the decay of rows begin to end - 1; q of rows with an output alone. */
void kvs_delta_prepare(const kvs_delta_head *head, uint32_t begin, uint32_t end);

/* The new rows in chunks, into matrix_out, which holds the state before them. */
void kvs_delta_run_chunks(const kvs_delta_head *head);

#endif
