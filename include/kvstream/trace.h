/* trace.h: a device that computes nothing, and finds the race before a real one does.
 *
 * A device of KVS_BACKEND_TRACE hands out addresses without memory behind them. Operations and copies declare which bytes
 * they read and write, take virtual time, and are compared with whoever touched those bytes last. Order counts only where
 * the code makes it: program order of the compute stream, first in first out of a copy stream (of each ring, where copies
 * have gates), a copy behind its gate, a reader behind the counter that it waited for or looked at. That two accesses happen
 * to follow one another in virtual time is no order, so a lost fence is found under any costs. Four streams: compute (the caller's thread), and the copies
 * without gate, the copies with gate, and the copies out, of which the first two share one engine.
 *
 * With KVS_DEVICE_DEFERRED copies are chosen instead of timed, at the same places as on a deferred CPU device: one schedule
 * runs on both.
 *
 * A hazard is one English sentence: who, where, when, how many bytes, and which fence is missing.
 */
#ifndef KVSTREAM_TRACE_H
#define KVSTREAM_TRACE_H

#include "kvstream/device.h"

KVS_API_BEGIN

/* cffi:begin */

typedef enum kvs_trace_stream {
    KVS_TRACE_COMPUTE = 0,
    KVS_TRACE_LOAD = 1, /* history to device, without a gate */
    KVS_TRACE_RING = 2, /* history to device, behind a gate */
    KVS_TRACE_OUT = 3   /* device to history */
} kvs_trace_stream;

#define KVS_TRACE_STREAMS 4

typedef enum kvs_trace_flag {
    /* Copies in with and without a gate stand in one queue, as on a backend with one stream for them. */
    KVS_TRACE_ONE_IN_QUEUE = 1
} kvs_trace_flag;

/* What things take. A rate of 0 is without limit, a time of 0 is none. */
typedef struct kvs_trace_costs {
    uint32_t struct_size;
    uint32_t flags;                /* kvs_trace_flag */
    uint64_t device_bytes_per_s;   /* weights, pages and tensors that operations read and write */
    uint64_t copy_in_bytes_per_s;
    uint64_t copy_out_bytes_per_s;
    uint64_t op_ns;                /* each operation, on top of its bytes */
    uint64_t wave_ns;              /* each wave of attention */
    uint64_t copy_ns;              /* each copy */
    uint64_t pass_ns;              /* between two passes: choosing the token, launching */
    uint64_t jitter_ns;            /* each of them takes up to this much longer, drawn from `seed` */
    uint64_t seed;
} kvs_trace_costs;

/* Sums over passes, or one pass: from the end of the one before to its own. */
typedef struct kvs_trace_report {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t n_hazards;    /* since the last reset, also those that are read already */
    uint64_t n_passes;
    uint64_t begin_ns;     /* virtual time */
    uint64_t end_ns;
    uint64_t n_ops;        /* operations of tapes: nodes of a graph */
    uint64_t n_waves;
    uint64_t copies_in;
    uint64_t copies_out;
    uint64_t bytes_in;
    uint64_t bytes_out;
    uint64_t in_busy_ns;   /* of the copy engine towards the device */
    uint64_t out_busy_ns;
    uint64_t overlap_ns;   /* of in_busy_ns, while operations ran */
    /* The compute stream's time by cause; the sum is end_ns - begin_ns. */
    uint64_t latency_ns;   /* op_ns and wave_ns */
    uint64_t weight_ns;
    uint64_t page_ns;      /* KV pages */
    uint64_t work_ns;      /* tensors and scratch */
    uint64_t load_wait_ns; /* waiting for a copy of each stream */
    uint64_t ring_wait_ns;
    uint64_t out_wait_ns;
    uint64_t host_ns;      /* pass_ns */
} kvs_trace_report;

typedef struct kvs_trace_event {
    uint32_t struct_size;
    uint32_t stream;     /* kvs_trace_stream */
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t n_bytes;
    uint32_t layer;      /* 0xffffffff: none */
    uint32_t n_slots;    /* of the ring, 0 where none are concerned */
    uint64_t page_begin; /* pages it is about; none where page_end is 0 */
    uint64_t page_end;
    uint32_t first_slot;
    uint32_t reserved;
    const char *name;    /* static text */
} kvs_trace_event;

/* One fence taken out of a schedule that is right, to see that its loss is found. */
typedef enum kvs_trace_fault {
    KVS_TRACE_FAULT_NONE = 0,
    KVS_TRACE_DROP_GATE = 1,     /* a copy does not wait for its gate */
    KVS_TRACE_EARLY_GATE = 2,    /* it is let in one count too early */
    KVS_TRACE_DROP_WAIT = 3,     /* a wait returns at once, as if the counter stood there */
    KVS_TRACE_DROP_LOOK = 4,     /* a counter that stands there is not looked at */
    KVS_TRACE_DROP_ADVANCE = 5,  /* nobody is told that a gate counter has risen */
    KVS_TRACE_EARLY_DONE = 6,    /* a copy says done when it begins */
    KVS_TRACE_MISPLACE_COPY = 7, /* a copy in lands one stride behind its place */
    KVS_TRACE_LATE_READ = 8,     /* a wave of attention reads after its pages were given back */
    KVS_TRACE_EARLY_COPY = 9     /* a copy runs as if nothing before it in program order had been waited for */
} kvs_trace_fault;

/* Replace the costs; what runs keeps its own. thread: owner of the device's work.
 * errors: EINVAL; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_set_costs(kvs_device *device, const kvs_trace_costs *costs);

/* Plant a fault at the index-th candidate from now on (0: the next), or take it back (FAULT_NONE).
 * thread: owner of the device's work. errors: EINVAL; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_plant(kvs_device *device, uint32_t fault, uint64_t index);

/* Sums since the last reset. thread: owner of the device's work. errors: EINVAL; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_get_report(kvs_device *device, kvs_trace_report *report);

/* One finished pass since the last reset. thread: owner of the device's work.
 * errors: EINVAL; ENOTFOUND; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_get_pass(kvs_device *device, uint64_t index, kvs_trace_report *report);

/* Take the oldest hazard: its sentence, NUL-terminated and cut to capacity. At most 256 are kept.
 * thread: owner of the device's work. errors: EINVAL; ENOTFOUND none is left; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_next_hazard(kvs_device *device, char *text, size_t capacity);

/* One operation, wave or copy since the last reset, in the order in which they began to be looked at.
 * thread: owner of the device's work. errors: EINVAL; ENOTFOUND; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_get_event(kvs_device *device, uint64_t index, kvs_trace_event *event);

/* Forget hazards, measures and events; memory, queues and the clock stay. thread: owner of the device's work.
 * errors: EINVAL; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_reset(kvs_device *device);

/* Call a range of host history written, as if the caller had put bytes there. thread: owner of the device's work.
 * errors: EINVAL; ENOSPACE range outside; EUNSUPPORTED another kind of device */
kvs_status kvs_trace_mark_history(kvs_host *host, uint64_t offset, uint64_t n_bytes);

/* cffi:end */

KVS_API_END
#endif
