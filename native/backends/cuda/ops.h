/* ops.h: operations by their codes. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_OPS_H
#define KVS_NATIVE_BACKENDS_CUDA_OPS_H

#include "backends/cuda/launcher.h"

/* Everything but KVS_OP_ATTEND. */
kvs_status kvs_cuda_run_op(kvs_cuda_launcher *launcher, const kvs_bound_op *op, const struct kvs_step *step);

/* Scratch of an operation in passes of up to max_rows rows, and every kernel noted that it can need: asked when a tape is sealed,
 * so this is where kernels become known. Refuses what no kernel can do, by name. */
kvs_status kvs_cuda_plan_op(kvs_cuda_launcher *launcher, const kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);

#endif
