/* backend.h: a CUDA card as a device. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_BACKEND_H
#define KVS_NATIVE_BACKENDS_CUDA_BACKEND_H

#include "backends/cuda/kernels.h"
#include "core/backend.h"

/* With desc->arch no card: planner.h. Nothing is left behind on failure; why is kept for `device`.
 * errors: EUNSUPPORTED no driver, too old a card, or a flag it does not have; ENOTFOUND no such card; ENOMEM; EIO */
kvs_status kvs_cuda_backend_create(kvs_device *device, const kvs_device_desc *desc, const kvs_backend **table, void **self);

/* NULL of a device of another kind. */
kvs_cuda_kernels *kvs_cuda_backend_kernels(struct kvs_device_view view);

#endif
