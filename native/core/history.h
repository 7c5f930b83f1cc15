/* history.h: the host history ranges of a device, and which of their pages copies have written. */
#ifndef KVS_NATIVE_CORE_HISTORY_H
#define KVS_NATIVE_CORE_HISTORY_H

#include "base/sync.h"
#include "core/backend.h"

typedef struct kvs_histories {
    kvs_mutex mutex;
    kvs_host *first;
    uint64_t reserved_bytes;
    uint64_t touched_bytes;
} kvs_histories;

bool kvs_histories_init(kvs_histories *histories);
void kvs_histories_destroy(kvs_histories *histories);

/* A copy out has written what it describes. */
void kvs_histories_touch(kvs_histories *histories, const kvs_copy *copy);

void kvs_histories_sum(kvs_histories *histories, uint64_t *reserved_bytes, uint64_t *touched_bytes);

/* Borrowed, valid while the device lives. */
kvs_histories *kvs_device_histories(kvs_device *device);

#endif
