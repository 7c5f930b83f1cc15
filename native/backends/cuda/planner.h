/* planner.h: a CUDA device without a card: it seals tapes for an architecture and knows which kernels they need. It has no memory,
 * copies nothing and runs nothing; whoever asks it to is told so. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_PLANNER_H
#define KVS_NATIVE_BACKENDS_CUDA_PLANNER_H

#include "backends/cuda/kernels.h"
#include "core/backend.h"

/* desc->arch names the architecture. errors: EUNSUPPORTED one that no kernel is written for, or flags; ENOMEM */
kvs_status kvs_cuda_planner_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self);

/* NULL of a device of another kind. */
kvs_cuda_kernels *kvs_cuda_planner_kernels(struct kvs_device_view view);

#endif
