/* memory.h: memory of the card, and moving bytes between it and the caller through pinned buffers. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_MEMORY_H
#define KVS_NATIVE_BACKENDS_CUDA_MEMORY_H

#include "backends/cuda/driver.h"

typedef struct kvs_cuda_memory kvs_cuda_memory;

/* `stream` is the compute order; it and the driver are borrowed. The context is entered, here and below.
 * errors: ENOMEM; EIO */
kvs_status kvs_cuda_memory_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream,
                                  kvs_cuda_memory **memory);

/* NULL is ignored. */
void kvs_cuda_memory_destroy(kvs_cuda_memory *memory);

/* errors: EOVERFLOW; ENOMEM with what the card has free; EIO, also the card is lost */
kvs_status kvs_cuda_memory_alloc(kvs_cuda_memory *memory, uint64_t bytes, uint64_t alignment, uint64_t *address);
/* Behind all that is under way; what a lost card may still use is left to it. */
void kvs_cuda_memory_free(kvs_cuda_memory *memory, uint64_t address, uint64_t bytes);

/* In the compute order. `from` may be reused on return, though bytes may still be on their way. thread: any. errors: EIO */
kvs_status kvs_cuda_memory_upload(kvs_cuda_memory *memory, uint64_t address, const void *from, uint64_t bytes);

/* Behind all operations, and done on return. thread: any. errors: EIO */
kvs_status kvs_cuda_memory_download(kvs_cuda_memory *memory, void *to, uint64_t address, uint64_t bytes);

#endif
