/* timeline.h: what a device did and when: passes, waits and copies, one event each.
 *
 * Off, it costs one load of a flag where an event would begin. On, each event takes a lock and 48 bytes of a buffer of
 * stated size; what comes while the buffer is full is counted and not kept. Whoever draws a picture takes the events out
 * from time to time. Times are of the system's monotonic clock, also on a device that takes virtual time.
 */
#ifndef KVSTREAM_TIMELINE_H
#define KVSTREAM_TIMELINE_H

#include "kvstream/device.h"

KVS_API_BEGIN

/* cffi:begin */

typedef enum kvs_event_kind {
    KVS_EVENT_OPEN = 0,   /* a pager opened a pass: room was made, copies were queued */
    KVS_EVENT_REPLAY = 1, /* a tape was replayed */
    KVS_EVENT_CLOSE = 2,  /* a pager closed a pass: rows were committed and queued for history */
    KVS_EVENT_WAIT = 3,   /* a caller waited for copies */
    KVS_EVENT_LOAD = 4,   /* a copy from history to the device */
    KVS_EVENT_STORE = 5   /* a copy from the device to history */
} kvs_event_kind;

/* Open, replay, close and wait belong to the thread that called; those of one thread lie inside one another or apart.
 * Copies belong to whichever engine carried them out: `begin_ns` is their end less the time that it says it spent. */
typedef struct kvs_event {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t n_bytes; /* of a copy, else 0 */
    uint64_t first;   /* of open and replay: committed tokens before the pass, else 0 */
    uint32_t n_rows;  /* of open, replay and close, else 0 */
    uint32_t kind;    /* kvs_event_kind */
    uint64_t thread;  /* the system's number of the calling thread; of a copy 0 */
} kvs_event;

/* Keep up to `capacity` events from now on; events that were kept and not taken are dropped. 0: keep none, and give the
 * buffer back. own: the device keeps the buffer. thread: any. errors: EINVAL; EOVERFLOW; ENOMEM, and nothing has changed */
kvs_status kvs_timeline_keep(kvs_device *device, uint64_t capacity);

/* Take the oldest events out, in the order in which they ended: up to `capacity` of them. `n_events` receives how many,
 * `n_lost` how many found no room since kvs_timeline_keep. own: caller. shape: events[capacity]. thread: any.
 * errors: EINVAL */
kvs_status kvs_timeline_take(kvs_device *device, kvs_event *events, uint64_t capacity, uint64_t *n_events,
                             uint64_t *n_lost);

/* cffi:end */

KVS_API_END
#endif
