/* copy.h: the copy engine of a CPU device: host history, two queues, and the thread that serves them.
 *
 * The first queue takes what needs no gate: copies out and ungated copies in (a truncated page brought back, a page read
 * for saving). The second takes copies in that name a gate. Each is first in first out and the first has precedence, so
 * that neither publication nor a single read ever waits behind a ring that nobody consumes. Copies that share a `done`
 * counter therefore belong in one queue: all with a gate, or none.
 *
 * Whoever waits for a copy makes it where nobody has begun: a copy thread that has no core of its own would stop a compute
 * thread in the middle of its work, so it sleeps while only copies with a gate are queued.
 *
 * Deferred mode has no thread: queued copies run inside wait_counter, drain and run, in the order that the device chooses
 * among the heads that may go. Where somebody states that order they may also run behind a submission, behind a rise of a
 * gate, and before an operation that touches pages: between two such places no copy and no operation meet.
 *
 * A failing copy stores its status to `failed` and ends like any other. One without `failed` is reported by the next drain.
 */
#ifndef KVS_NATIVE_CPU_COPY_H
#define KVS_NATIVE_CPU_COPY_H

#include "core/backend.h"

typedef struct kvs_copy_engine kvs_copy_engine;

/* flags: kvs_device_flag. has_core: the copy thread takes no core from a compute thread. The device outlives the engine.
 * errors: ENOMEM; EIO no thread */
kvs_status kvs_copy_engine_create(kvs_device *device, uint32_t flags, bool has_core, kvs_copy_engine **engine);

/* Queued copies are dropped, the one under way finishes; host memory that is left goes. NULL is ignored. */
void kvs_copy_engine_destroy(kvs_copy_engine *engine);

/* Address space. No copy of the range may be queued when it is freed. */
kvs_status kvs_copy_engine_host_alloc(kvs_copy_engine *engine, uint64_t n_bytes, uint64_t *host_base);
void kvs_copy_engine_host_free(kvs_copy_engine *engine, uint64_t host_base, uint64_t n_bytes);

/* All or none. errors: EINVAL no such host memory or nothing to copy; ENOSPACE outside of it; ENOMEM */
kvs_status kvs_copy_engine_submit_many(kvs_copy_engine *engine, const kvs_copy *copies, uint32_t n_copies);

/* Wait until *counter >= value; what the copies up to there wrote is visible then.
 * errors: the status in *failed (may be NULL); EIO nothing is queued that could raise it; EBUSY deferred mode: what is
 * queued waits for gates */
kvs_status kvs_copy_engine_wait_counter(kvs_copy_engine *engine, const _Atomic uint64_t *counter, uint64_t value,
                                        const _Atomic int *failed);

/* Move a chunk of the copy under way, for a thread that would otherwise wait; false when there is none. thread: any */
bool kvs_copy_engine_help(kvs_copy_engine *engine);

/* Deferred mode: an operation is about to touch pages. */
void kvs_copy_engine_before_pages(kvs_copy_engine *engine);

/* A gate counter was raised. */
void kvs_copy_engine_gate_advanced(kvs_copy_engine *engine);

/* errors: EIO a copy without `failed` has failed since the last drain; EBUSY the rest waits for a gate */
kvs_status kvs_copy_engine_drain(kvs_copy_engine *engine);

/* Deferred mode: returns how many ran. 0 otherwise. */
uint32_t kvs_copy_engine_run(kvs_copy_engine *engine, uint32_t limit);

/* Drop queued copies with this counter; returns when none is under way. */
void kvs_copy_engine_cancel(kvs_copy_engine *engine, const _Atomic uint64_t *done);

#endif
