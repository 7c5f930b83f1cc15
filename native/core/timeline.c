/* timeline.c: a bounded queue of events under a mutex. Events are few, a handful for each layer of a pass, so that a lock
 * for each costs nothing beside what it tells of; and a taker never sees half of one. */
#include "core/timeline.h"

#include "core/device.h"

#include <stdlib.h>
#include <string.h>

bool kvs_timeline_init(kvs_timeline *timeline)
{
    memset(timeline, 0, sizeof *timeline);
    return kvs_mutex_init(&timeline->mutex);
}

void kvs_timeline_destroy(kvs_timeline *timeline)
{
    free(timeline->events);
    kvs_mutex_destroy(&timeline->mutex);
}

static void keep(kvs_timeline *timeline, const kvs_event *event)
{
    kvs_mutex_lock(&timeline->mutex);
    if (timeline->n_events < timeline->capacity) {
        timeline->events[(timeline->first + timeline->n_events) % timeline->capacity] = *event;
        timeline->n_events++;
    } else if (timeline->capacity != 0) {
        timeline->n_lost++;
    }
    kvs_mutex_unlock(&timeline->mutex);
}

void kvs_timeline_end(kvs_device *device, uint64_t begin_ns, kvs_event event)
{
    if (begin_ns == 0) {
        return;
    }
    event.begin_ns = begin_ns;
    event.end_ns = kvs_clock_ns();
    event.thread = kvs_thread_system_number();
    keep(kvs_device_timeline(device), &event);
}

void kvs_timeline_copy(kvs_device *device, const kvs_copy *copy, uint64_t spent_ns)
{
    const uint64_t end_ns = kvs_timeline_begin(device);
    if (end_ns == 0) {
        return;
    }
    const kvs_event event = {.begin_ns = spent_ns < end_ns ? end_ns - spent_ns : 0,
                             .end_ns = end_ns,
                             .n_bytes = copy->n_bytes * copy->n_pieces,
                             .kind = copy->is_out != 0 ? KVS_EVENT_STORE : KVS_EVENT_LOAD};
    keep(kvs_device_timeline(device), &event);
}

/* calloc and not kvs_object_alloc: a buffer that the device owns must not keep the device alive. */
kvs_status kvs_timeline_keep(kvs_device *device, uint64_t capacity)
{
    if (device == NULL) {
        return KVS_EINVAL;
    }
    if (capacity > SIZE_MAX / sizeof(kvs_event)) {
        return kvs_fail(device, KVS_EOVERFLOW, "a timeline of %llu events is too large", (kvs_ull)capacity);
    }
    kvs_event *events = NULL;
    if (capacity != 0) {
        const kvs_status status = kvs_hook_ask(device, KVS_HOOK_ALLOC);
        events = status == KVS_OK ? calloc((size_t)capacity, sizeof *events) : NULL;
        if (events == NULL) {
            return kvs_fail(device, KVS_ENOMEM, "need %llu bytes for a timeline of %llu events",
                            (kvs_ull)(capacity * sizeof *events), (kvs_ull)capacity);
        }
    }
    kvs_timeline *timeline = kvs_device_timeline(device);
    kvs_mutex_lock(&timeline->mutex);
    kvs_event *before = timeline->events;
    timeline->events = events;
    timeline->capacity = capacity;
    timeline->first = timeline->n_events = timeline->n_lost = 0;
    atomic_store_explicit(&timeline->is_on, capacity != 0, memory_order_relaxed);
    kvs_mutex_unlock(&timeline->mutex);
    free(before);
    return KVS_OK;
}

kvs_status kvs_timeline_take(kvs_device *device, kvs_event *events, uint64_t capacity, uint64_t *n_events,
                             uint64_t *n_lost)
{
    if (device == NULL || n_events == NULL || n_lost == NULL || (events == NULL && capacity != 0)) {
        return kvs_refuse(device);
    }
    kvs_timeline *timeline = kvs_device_timeline(device);
    kvs_mutex_lock(&timeline->mutex);
    const uint64_t n = capacity < timeline->n_events ? capacity : timeline->n_events;
    for (uint64_t i = 0; i < n; i++) {
        events[i] = timeline->events[(timeline->first + i) % timeline->capacity];
    }
    timeline->first = timeline->capacity == 0 ? 0 : (timeline->first + n) % timeline->capacity;
    timeline->n_events -= n;
    *n_events = n;
    *n_lost = timeline->n_lost;
    kvs_mutex_unlock(&timeline->mutex);
    return KVS_OK;
}
