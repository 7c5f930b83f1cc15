/* timeline.h: the events of a device. A device that keeps none reads one flag where an event would begin. */
#ifndef KVS_NATIVE_CORE_TIMELINE_H
#define KVS_NATIVE_CORE_TIMELINE_H

#include "base/sync.h"
#include "core/backend.h"
#include "kvstream/timeline.h"

#include <stdatomic.h>

typedef struct kvs_timeline {
    _Atomic int is_on; /* a hint that spares clock and mutex; `events` decides */
    kvs_mutex mutex;
    kvs_event *events; /* [capacity], in use from `first`, around the end */
    uint64_t capacity;
    uint64_t first;
    uint64_t n_events;
    uint64_t n_lost;
} kvs_timeline;

bool kvs_timeline_init(kvs_timeline *timeline);
void kvs_timeline_destroy(kvs_timeline *timeline);

/* Borrowed, valid while the device lives. */
kvs_timeline *kvs_device_timeline(kvs_device *device);

/* When an event begins: 0 where none are kept. */
static inline uint64_t kvs_timeline_begin(kvs_device *device)
{
    const int is_on = atomic_load_explicit(&kvs_device_timeline(device)->is_on, memory_order_relaxed);
    return __builtin_expect(is_on, 0) ? kvs_clock_ns() : 0;
}

/* Keep `event`, which began at `begin_ns` and ends now, on the calling thread. Nothing happens for a beginning of 0. */
void kvs_timeline_end(kvs_device *device, uint64_t begin_ns, kvs_event event);

/* Keep a copy that ends now. */
void kvs_timeline_copy(kvs_device *device, const kvs_copy *copy, uint64_t spent_ns);

#endif
