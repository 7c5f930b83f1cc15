/* kernels.h: images of kernels: those that are needed, and those that have been given. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_KERNELS_H
#define KVS_NATIVE_BACKENDS_CUDA_KERNELS_H

#include "backends/cuda/driver.h"
#include "backends/cuda/launcher.h"
#include "kvstream/kernel.h"

typedef struct kvs_cuda_kernels kvs_cuda_kernels;

/* The driver is borrowed. errors: ENOMEM */
kvs_status kvs_cuda_kernels_create(kvs_device *device, const kvs_cuda_driver *driver, kvs_cuda_kernels **kernels);

/* The context is entered. NULL is ignored. */
void kvs_cuda_kernels_destroy(kvs_cuda_kernels *kernels);

/* Note that an image is needed. thread: any. errors: EINVAL a name that is too long; ENOMEM */
kvs_status kvs_cuda_kernels_need(kvs_cuda_kernels *kernels, const kvs_cuda_key *key);

/* The function of a key, ready for so much shared memory. The context is entered. errors: EUNSUPPORTED no image, by name; EIO */
kvs_status kvs_cuda_kernels_find(kvs_cuda_kernels *kernels, const kvs_cuda_key *key, uint32_t shared_bytes,
                                 cu_function *function);

uint32_t kvs_cuda_kernels_count(kvs_cuda_kernels *kernels);
kvs_status kvs_cuda_kernels_get(kvs_cuda_kernels *kernels, uint32_t index, kvs_kernel_key *key);
kvs_status kvs_cuda_kernels_give(kvs_cuda_kernels *kernels, uint32_t index, const void *image);

#endif
