/* backend.h: THE table of what a backend does for the core. Backends include this header and native/base, never each
 * other; the core calls a backend through this table alone.
 *
 * Streams: a backend has one compute order (the calls of `run_op`, in order, each complete for all later ones) and two
 * copy queues, in (host history to device) and out (device to host history), each first in first out. A copy-in entry
 * may name a gate: it does not start before `*gate >= gate_value`. It ends by storing `done_value` to `*done`
 * (release order). Nothing else synchronises: the ring and the stream build their fences from these counters.
 */
#ifndef KVS_NATIVE_CORE_BACKEND_H
#define KVS_NATIVE_CORE_BACKEND_H

#include "base/internal.h"

typedef struct kvs_copy {
    uint64_t host_base;    /* backend's name for the host memory: from host_alloc */
    uint64_t host_offset;  /* bytes */
    uint64_t device_address;
    uint64_t n_bytes;      /* contiguous on both sides, per piece */
    uint32_t n_pieces;     /* pieces of n_bytes each; 1 for a run of whole pages */
    uint32_t is_out;       /* 0: host history to device; 1: device to host history */
    uint64_t host_stride_bytes;   /* between pieces */
    uint64_t device_stride_bytes;
    const _Atomic uint64_t *gate; /* NULL: no gate */
    uint64_t gate_value;
    _Atomic uint64_t *done;       /* NULL: nobody is told */
    uint64_t done_value;
    _Atomic int *failed;          /* receives the first negative status of a failing copy; the entry still ends */
} kvs_copy;

struct kvs_step;   /* native/core/step.h: what changes from pass to pass */
struct kvs_bound_op; /* native/core/tape_ops.h: an operation with addresses */

typedef struct kvs_backend {
    const char *name;
    /* Device memory, aligned to 64 bytes at least. */
    kvs_status (*device_alloc)(void *self, uint64_t bytes, uint64_t alignment, uint64_t *address);
    void (*device_free)(void *self, uint64_t address, uint64_t bytes);
    /* Fill with the byte pattern of a NaN in every float type (0xff). */
    void (*device_fill_nan)(void *self, uint64_t address, uint64_t bytes);
    /* Host history: address space that only the copy engine can reach. */
    kvs_status (*host_alloc)(void *self, uint64_t bytes, uint64_t *host_base);
    void (*host_free)(void *self, uint64_t host_base, uint64_t bytes);
    /* Queue a copy. Never blocks. */
    kvs_status (*copy_submit)(void *self, const kvs_copy *copy);
    /* Queue several in order, waking the engine once. */
    kvs_status (*copy_submit_many)(void *self, const kvs_copy *copies, uint32_t n_copies);
    /* Wait until *counter >= value, or *failed is negative (optional), or *cancel is nonzero (optional). In deferred mode this is what makes queued
     * copies run. KVS_EIO when the queue is empty and the value can never be reached. */
    kvs_status (*wait_counter)(void *self, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed);
    /* After a gate counter was advanced: let a waiting engine look again. */
    void (*gate_advanced)(void *self);
    /* Wait until both queues are empty. */
    kvs_status (*copy_drain)(void *self);
    /* Deferred mode: run up to `limit` copies in schedule order. */
    uint32_t (*copy_run)(void *self, uint32_t limit);
    /* Drop queued copies that have not started and whose `done` is this counter; those under way finish. */
    void (*copy_cancel)(void *self, const _Atomic uint64_t *done);
    /* Run one operation to its end on all compute threads. */
    kvs_status (*run_op)(void *self, const struct kvs_bound_op *op, const struct kvs_step *step);
    /* Begin and end a pass: workers may spin between operations in between. */
    void (*pass_begin)(void *self);
    void (*pass_end)(void *self);
    void (*destroy)(void *self);
} kvs_backend;

/* The device as the core sees it. */
struct kvs_device_view {
    const kvs_backend *backend;
    void *self;
};

/* Borrowed, valid while the device lives. */
struct kvs_device_view kvs_device_backend(kvs_device *device);

/* Accounting of device bytes (arena, weights), for kvs_device_get_info. */
void kvs_device_count_bytes(kvs_device *device, int64_t delta);

#endif
