/* pass.h: a pass on a card: launched operation by operation, recorded, or launched again as a whole. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_PASS_H
#define KVS_NATIVE_BACKENDS_CUDA_PASS_H

#include "backends/cuda/cuda.h"

/* As the entries of backend.h. The context is entered. */
kvs_status kvs_cuda_pass_begin(struct kvs_cuda *cuda, struct kvs_step *step);
kvs_status kvs_cuda_pass_submit(struct kvs_cuda *cuda, bool is_whole);
kvs_status kvs_cuda_pass_end(struct kvs_cuda *cuda, bool is_whole);

/* Whether operations of the pass under way are launched: those of one that is launched again as a whole are not. */
static inline bool kvs_cuda_pass_launches(const struct kvs_cuda *cuda)
{
    return cuda->turn != KVS_CUDA_REPLAY;
}

/* Whether the next launch of the pass under way may begin early, where its kernel waits by itself. */
bool kvs_cuda_pass_launches_early(struct kvs_cuda *cuda);

#endif
