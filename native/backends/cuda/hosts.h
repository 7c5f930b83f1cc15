/* hosts.h: host history: reserved as address space for the whole context, registered with the driver in chunks as copies reach
 * them. A chunk that cannot be registered is an error with the limit found, never a slower copy. */
#ifndef KVS_NATIVE_BACKENDS_CUDA_HOSTS_H
#define KVS_NATIVE_BACKENDS_CUDA_HOSTS_H

#include "backends/cuda/driver.h"

typedef struct kvs_cuda_host kvs_cuda_host;

/* errors: ENOMEM */
kvs_status kvs_cuda_host_create(kvs_device *device, uint64_t n_bytes, kvs_cuda_host **host);

/* Try whether the driver would pin so many bytes, where a limit of this process stands against them. The context is entered.
 * errors: ENOMEM with the limits that were found */
kvs_status kvs_cuda_hosts_admit(kvs_device *device, const kvs_cuda_driver *driver, uint64_t n_bytes);

/* No copy is queued any more; what a lost card may still use is left to it. The context is entered. */
void kvs_cuda_host_destroy(kvs_cuda_host *host, const kvs_cuda_driver *driver);

uint64_t kvs_cuda_host_base(const kvs_cuda_host *host);
uint64_t kvs_cuda_host_bytes(const kvs_cuda_host *host);

/* Where the chunk of `offset` ends: one copy goes no further. */
uint64_t kvs_cuda_host_chunk_end(const kvs_cuda_host *host, uint64_t offset);

/* Register what is not yet registered of [offset, offset + n_bytes), which lies inside. The context is entered; one thread
 * at a time. errors: ENOMEM with the lock limit; EIO */
kvs_status kvs_cuda_host_pin(kvs_cuda_host *host, kvs_device *device, const kvs_cuda_driver *driver, uint64_t offset,
                             uint64_t n_bytes);

/* Where kernels find [offset, offset + n_bytes); 0 where they do not: not all of it is registered yet, or the card cannot. One look.
 * thread: any */
uint64_t kvs_cuda_host_mapped(const kvs_cuda_host *host, uint64_t offset, uint64_t n_bytes);

#endif
