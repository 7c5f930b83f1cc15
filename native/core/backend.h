/* backend.h: THE table of what a backend does for the core. Backends include this header and native/base, never each
 * other; the core calls a backend through this table alone. Device memory is the backend's: the core reads and writes it through
 * this table too.
 *
 * Streams: a backend has one compute order (the calls of `run_op`, in order, each complete for all later ones) and two
 * copy queues, each first in first out: one for copies with a gate, which do not start before `*gate >= gate_value`, and
 * one, served first, for all others, so that nothing waits behind a ring that nobody consumes. Copies that share a `done`
 * counter have all a gate or none. A copy ends by storing `done_value` to `*done` (release order). Nothing else synchronises: the ring and the stream build their fences from these counters.
 */
#ifndef KVS_NATIVE_CORE_BACKEND_H
#define KVS_NATIVE_CORE_BACKEND_H

#include "base/internal.h"
#include "kvstream/span.h"

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

struct kvs_step;     /* native/core/step.h: what changes from pass to pass */
struct kvs_bound_op; /* native/core/step.h: an operation with addresses */
struct kvs_delta_view; /* native/core/step.h: a recurrent layer's state in a pass */

typedef struct kvs_backend {
    const char *name; /* at most 63 letters */
    bool has_no_bytes; /* addresses have no memory behind them */
    /* Operations cannot read the caller's memory: borrowed rows of weights, and their scales, are copied to the device. */
    bool copies_rows;
    /* Device memory, aligned to 64 bytes at least. */
    kvs_status (*device_alloc)(void *self, uint64_t bytes, uint64_t alignment, uint64_t *address);
    void (*device_free)(void *self, uint64_t address, uint64_t bytes);
    /* Fill with the byte pattern of a NaN in every float type (0xff). */
    void (*device_fill_nan)(void *self, uint64_t address, uint64_t bytes);
    /* Device memory between passes: zeros, a copy that does not overlap, bytes to and from the caller. Behind all operations,
     * and done on return. */
    kvs_status (*device_zero)(void *self, uint64_t address, uint64_t bytes);
    kvs_status (*device_move)(void *self, uint64_t from, uint64_t to, uint64_t bytes);
    kvs_status (*device_read)(void *self, uint64_t address, uint64_t bytes, void *to);
    kvs_status (*device_write)(void *self, uint64_t address, uint64_t bytes, const void *from);
    /* Host history: address space that only the copy engine can reach. */
    kvs_status (*host_alloc)(void *self, uint64_t bytes, uint64_t *host_base);
    void (*host_free)(void *self, uint64_t host_base, uint64_t bytes);
    /* Queue copies in order, all or none, waking the engine once. Never blocks. */
    kvs_status (*copy_submit_many)(void *self, const kvs_copy *copies, uint32_t n_copies);
    /* Wait until *counter >= value, or *failed is negative (failed may be NULL). In deferred mode this is what makes queued copies
     * run. KVS_EIO when the queue is empty and the value can never be reached, and of a card that is lost. */
    kvs_status (*wait_counter)(void *self, const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed);
    /* Somebody has found *counter >= value without waiting and relies on it. NULL where looking at it is all it takes. */
    void (*counter_seen)(void *self, const _Atomic uint64_t *counter, uint64_t value);
    /* After a gate counter was advanced to `value`, behind all operations that read what it guards: let a waiting engine look
     * again. */
    void (*gate_advanced)(void *self, const _Atomic uint64_t *gate, uint64_t value);
    /* A ring of so many slots, whose copies have this gate and raise `done`, comes to be and goes; between passes. NULL: nobody
     * keeps account of rings. errors: ENOMEM; ENOSPACE too many; EIO */
    kvs_status (*ring_join)(void *self, const _Atomic uint64_t *gate, const _Atomic uint64_t *done, uint32_t n_slots);
    void (*ring_leave)(void *self, const _Atomic uint64_t *gate);
    /* Wait until both queues are empty. */
    kvs_status (*copy_drain)(void *self);
    /* Deferred mode: run up to `limit` copies in schedule order. */
    uint32_t (*copy_run)(void *self, uint32_t limit);
    /* Drop queued copies that have not started and whose `done` is this counter; those under way finish. */
    void (*copy_cancel)(void *self, const _Atomic uint64_t *done);
    /* Weights: bytes of the device form of n rows of k values, and the packing of file rows into it. */
    kvs_status (*weight_bytes)(void *self, int type, uint64_t k, uint64_t n, uint64_t *bytes);
    kvs_status (*weight_pack)(void *self, int type, uint64_t k, uint64_t n, const void *rows, uint64_t address);
    /* Scratch that an operation needs for passes of up to max_rows rows; refuses what it cannot run, by name. */
    kvs_status (*op_scratch_bytes)(void *self, const struct kvs_bound_op *op, uint32_t max_rows, uint64_t *bytes);
    /* Run one operation, complete for whatever follows it. Everything but KVS_OP_ATTEND. */
    kvs_status (*run_op)(void *self, const struct kvs_bound_op *op, const struct kvs_step *step);
    /* Fold the pending rows of views[layer], as a logged pass of no rows does: nothing goes to the log. Scratch as for that. */
    kvs_status (*delta_fold)(void *self, const struct kvs_delta_view *views, uint32_t layer, void *scratch);
    /* Attention in waves of consecutive pages whose table entries are valid; any cut gives the same bits. */
    kvs_status (*attend_begin)(void *self, const struct kvs_bound_op *op, const struct kvs_step *step);
    kvs_status (*attend_wave)(void *self, const struct kvs_bound_op *op, const struct kvs_step *step, uint64_t page_begin,
                              uint64_t page_end);
    kvs_status (*attend_finish)(void *self, const struct kvs_bound_op *op, const struct kvs_step *step);
    /* Attention over a frozen plan, and the record codec (NULL: unsupported), for callers outside a tape. */
    kvs_status (*attend_plan)(void *self, const kvs_attend_desc *desc, const kvs_kv_layer *layer, const uint64_t *pages,
                              uint64_t active_tokens, uint32_t n_query_rows);
    void (*record_encode)(void *self, const kvs_kv_layer *layer, const kvs_record_info *record, void *bytes,
                          uint32_t first_row, uint32_t n_rows, const float *k, const float *v);
    void (*record_decode)(void *self, const kvs_kv_layer *layer, const kvs_record_info *record, const void *bytes,
                          uint32_t first_row, uint32_t n_rows, float *k, float *v);
    /* Begin and end a pass: workers may spin between operations in between. Where operations cannot reach host memory, the
     * beginning brings what the step names to the device and lets the step name it there. Operations may be under way until the
     * end, which waits for them, or begin there.
     * The beginning may set `takes_whole_layers`: then attention is one wave from page 0 to the last, which waits on the device for
     * the pages that its ring brings and says there which of them it has left; of a whole pass the caller has the outputs then. A pass that has not begun does not end. */
    kvs_status (*pass_begin)(void *self, struct kvs_step *step);
    kvs_status (*pass_end)(void *self, bool is_whole);
    /* What was kept to run passes of a binding again goes. NULL: nothing is kept. thread: any, outside a pass */
    void (*binding_forget)(void *self, uint64_t binding);
    /* Bytes of an output of the whole pass of a number, KVS_ESTALE where that is not the newest. NULL: operations write to the
     * caller's memory, who must have some for each output. */
    kvs_status (*read_output)(void *self, uint64_t number, uint32_t output, uint64_t offset, uint64_t bytes, void *to);
    /* Name, architecture and memory of a card; NULL where there is nothing to say. */
    void (*describe)(void *self, kvs_device_info *info);
    /* Whether this memory of another's is the device's, refused by name; NULL: any is. */
    kvs_status (*device_adopt)(void *self, uint64_t address, uint64_t bytes);
    /* Before memory of another's goes back to whoever lent it: whether nothing under way reaches it any more, waiting for that with
     * an end. Else it is never given back. NULL: nothing does. */
    bool (*device_may_drop)(void *self, uint64_t bytes);
    /* Whether so much history could be had; NULL: nothing limits it but memory. */
    kvs_status (*host_admit)(void *self, uint64_t bytes);
    /* The compute order as a stream, and another stream put behind it; NULL: there are no streams. The place is a card's number. */
    uint64_t (*stream)(void *self);
    kvs_status (*lead_stream)(void *self, uint64_t stream);
    int32_t (*place)(void *self);
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

/* Deferred mode: the kvs_stream that goes on, one of `offered` (1 << kvs_stream, or-ed, not 0). The backend asks with its
 * lock held, which guards the schedule too. */
uint32_t kvs_device_choose(kvs_device *device, uint32_t offered);
/* Does somebody state the order choice by choice? Only then are copies offered where nobody waits. */
bool kvs_device_has_chooser(const kvs_device *device);

/* What backends tell the device of their copies. thread: any */
/* A copy has finished and moved its bytes. */
void kvs_device_count_copy(kvs_device *device, const kvs_copy *copy, uint64_t spent_ns);
/* A copy has failed: kvs_device_run_copies reports it. */
void kvs_device_count_failed_copy(kvs_device *device);
/* The text of this thread's newest failure says why: whoever waits for the copy says it too. */
void kvs_device_note_copy_failure(kvs_device *device);

/* A thread of the backend's has not come back while it was destroyed: the device's own memory stays, as the backend's. */
void kvs_device_keep(kvs_device *device);

/* Whether this is a fork of the process that made the device: none of its threads runs here. */
bool kvs_device_is_forked(const kvs_device *device);

/* Host history as backends name it: `kvs_host_base` is what kvs_copy.host_base wants. */
kvs_device *kvs_host_device(const kvs_host *host);
uint64_t kvs_host_base(const kvs_host *host);
uint64_t kvs_host_bytes(const kvs_host *host);

#endif
