/* copy_move.h: one copy, from its first byte to its last counter. */
#ifndef KVS_NATIVE_CPU_COPY_MOVE_H
#define KVS_NATIVE_CPU_COPY_MOVE_H

#include "backends/cpu/copy_share.h"
#include "backends/cpu/hostmap.h"
#include "core/backend.h"

/* A copy, and the host memory that it touches. */
typedef struct kvs_copy_entry {
    kvs_copy copy;
    kvs_hostmap *map;
} kvs_copy_entry;

/* Bytes from the first to behind the last one in host memory; false on overflow. */
bool kvs_copy_host_extent(const kvs_copy *copy, uint64_t *n_bytes);

/* Move the bytes, count them, raise the copy's counter. Large runs are shared through `share`, unless it is NULL. Returns
 * whether it failed and has no `failed` to say so. thread: any, one at a time for a share */
bool kvs_copy_carry_out(kvs_device *device, const kvs_copy_entry *item, kvs_copy_share *share);

#endif
