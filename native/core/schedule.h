/* schedule.h: which stream of a deferred device goes on, stated by a chooser or drawn from a seed. */
#ifndef KVS_NATIVE_CORE_SCHEDULE_H
#define KVS_NATIVE_CORE_SCHEDULE_H

#include "kvstream/device.h"

typedef struct kvs_schedule {
    kvs_chooser choose; /* NULL: drawn */
    void *user;
    uint64_t drawn;
} kvs_schedule;

/* The stream that goes on, one of `offered`, of which there is at least one. thread: one at a time */
uint32_t kvs_schedule_next(kvs_schedule *schedule, uint32_t offered);

#endif
