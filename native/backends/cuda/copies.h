/* copies.h: the copy engine of a CUDA device: two queues, the thread that serves them, and what is under way.
 *
 * The thread takes copies whose gate is open, those without a gate first, and gives them to the driver in batches, several of
 * which are under way at once. A batch ends with an event; when it has come, `done` counters are stored. A gate is raised when
 * the operations that read a ring slot have been put in the compute order, not when they are through: each batch waits, on the
 * device, for what `readers` has recorded last, so a slot is overwritten only when its readers have finished.
 */
#ifndef KVS_NATIVE_BACKENDS_CUDA_COPIES_H
#define KVS_NATIVE_BACKENDS_CUDA_COPIES_H

#include "backends/cuda/driver.h"
#include "core/backend.h"

typedef struct kvs_cuda_copies kvs_cuda_copies;

/* `readers` is recorded in the compute order behind each operation that reads pages; borrowed, as is the driver.
 * errors: ENOMEM; EIO no thread, or the driver's */
kvs_status kvs_cuda_copies_create(kvs_device *device, const kvs_cuda_driver *driver, cu_event readers,
                                  kvs_cuda_copies **copies);

/* Queued copies are dropped, those under way finish; host memory that is left goes. NULL is ignored. */
void kvs_cuda_copies_destroy(kvs_cuda_copies *copies);

/* As the entries of backend.h. */
kvs_status kvs_cuda_copies_host_alloc(kvs_cuda_copies *copies, uint64_t n_bytes, uint64_t *host_base);
void kvs_cuda_copies_host_free(kvs_cuda_copies *copies, uint64_t host_base);
/* Where kernels find a range of host memory; 0 where they do not, see kvs_cuda_host_mapped. */
uint64_t kvs_cuda_copies_mapped(kvs_cuda_copies *copies, uint64_t host_base, uint64_t offset, uint64_t n_bytes);
kvs_status kvs_cuda_copies_submit(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more);
kvs_status kvs_cuda_copies_wait(kvs_cuda_copies *copies, const _Atomic uint64_t *counter, uint64_t value,
                                const _Atomic int *failed);
void kvs_cuda_copies_gate_advanced(kvs_cuda_copies *copies);
kvs_status kvs_cuda_copies_drain(kvs_cuda_copies *copies);
void kvs_cuda_copies_cancel(kvs_cuda_copies *copies, const _Atomic uint64_t *done);

#endif
