/* pack.h: a file of images, as include/kvstream/kernel.h describes it. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_PACK_H
#define KVS_NATIVE_BACKENDS_CUDA_PACK_H

#include "backends/cuda/kernels.h"
#include "base/digest.h"

/* Load what `kernels` need from a pack. `digest`: that of this library's kernels. errors: as kvs_kernel_give_pack */
kvs_status kvs_cuda_pack_give(kvs_device *device, kvs_cuda_kernels *kernels, const uint8_t digest[KVS_DIGEST_BYTES],
                              const void *pack, uint64_t n_bytes, uint32_t *n_given);

#endif
