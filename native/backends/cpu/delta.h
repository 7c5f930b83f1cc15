/* delta.h: one gated delta net layer on the CPU, for the rows of a pass or for folding alone. */
#ifndef KVS_NATIVE_CPU_DELTA_H
#define KVS_NATIVE_CPU_DELTA_H

#include "backends/cpu/threads.h"
#include "core/step.h"

typedef struct kvs_delta_job {
    const kvs_delta_view *view;
    const float *inputs; /* [n_rows][C] convolution inputs */
    const float *beta;   /* [n_rows][H] */
    const float *alpha;
    float *out;          /* [n_rows][H * D] */
    uint32_t n_rows;     /* 0: fold pending rows and nothing else */
    uint32_t mode;       /* kvs_delta_mode */
    uint64_t first_token;
    void *scratch;       /* kvs_delta_scratch_bytes */
} kvs_delta_job;

uint64_t kvs_delta_scratch_bytes(const kvs_delta_layer *layer, uint32_t mode, uint32_t n_threads);

/* Value heads are the tasks. Bits depend on nothing but the rows: not on how they were cut into passes (chunked: on the grid),
 * when they were folded, the threads, or the instruction set. */
void kvs_delta_run(kvs_threads *threads, uint32_t isa, const kvs_delta_job *job);

#endif
