/* copies.h: the copy engine of a CUDA device: two queues, a thread and streams for each, and what is under way.
 *
 * A thread takes copies whose gate is open and gives them to the driver in batches, several of which are under way at once. A
 * batch ends with an event; when it has come, `done` counters are stored. A gate is raised when the operations that read a ring
 * slot have been put in the compute order, or are about to be, not when they are through. With counters each copy waits, on the
 * device, until they have consumed its slots (rings.h); with events each batch waits for what `readers` has recorded last. Either
 * way a slot is overwritten only when its readers have finished.
 */
#ifndef KVS_NATIVE_BACKENDS_CUDA_COPIES_H
#define KVS_NATIVE_BACKENDS_CUDA_COPIES_H

#include "backends/cuda/driver.h"
#include "backends/cuda/rings.h"
#include "core/backend.h"

typedef struct kvs_cuda_copies kvs_cuda_copies;

/* `readers` is recorded in the compute order behind each operation that reads pages; borrowed, as are the driver and `rings`,
 * which is NULL where events alone order copies.
 * errors: ENOMEM; EIO no thread, or the driver's */
kvs_status kvs_cuda_copies_create(kvs_device *device, const kvs_cuda_driver *driver, cu_event readers, kvs_cuda_rings *rings,
                                  kvs_cuda_copies **copies);

/* Queued copies are dropped, those under way finish; host memory that is left goes. NULL is ignored. */
void kvs_cuda_copies_destroy(kvs_cuda_copies *copies);

/* As the entries of backend.h. */
kvs_status kvs_cuda_copies_host_alloc(kvs_cuda_copies *copies, uint64_t n_bytes, uint64_t *host_base);
void kvs_cuda_copies_host_free(kvs_cuda_copies *copies, uint64_t host_base);
kvs_status kvs_cuda_copies_submit(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more);
kvs_status kvs_cuda_copies_wait(kvs_cuda_copies *copies, const _Atomic uint64_t *counter, uint64_t value,
                                const _Atomic int *failed);
void kvs_cuda_copies_gate_advanced(kvs_cuda_copies *copies);
kvs_status kvs_cuda_copies_drain(kvs_cuda_copies *copies);
void kvs_cuda_copies_cancel(kvs_cuda_copies *copies, const _Atomic uint64_t *done);

/* While a pass that waits for copies of a ring is being made, none begins that waits for the pass: the ring's gate counts as
 * open no further than it is now. NULL: it does as it stands. */
void kvs_cuda_copies_hold(kvs_cuda_copies *copies, const _Atomic uint64_t *gate);

/* Before operations that wait for copies of a ring: what may block behind them in the driver is over. Every queued copy without
 * a gate has been given to the driver, and all memory that queued copies reach is registered. errors: ENOMEM; EIO */
kvs_status kvs_cuda_copies_be_quiet(kvs_cuda_copies *copies);

#endif
