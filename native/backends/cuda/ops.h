/* ops.h: operations by their codes. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_OPS_H
#define KVS_NATIVE_BACKENDS_CUDA_OPS_H

#include "backends/cuda/launcher.h"

/* Everything but KVS_OP_ATTEND. */
kvs_status kvs_cuda_run_op(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);

/* Scratch of an operation; refuses what no kernel can do, by name. */
kvs_status kvs_cuda_scratch_bytes(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);

/* Let every kernel be noted that the operation can need in passes of up to max_rows rows. */
kvs_status kvs_cuda_note_kernels(const kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows);

#endif
