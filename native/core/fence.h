/* fence.h: how a draining lease learns that its fence has completed. */
#ifndef KVS_NATIVE_CORE_FENCE_H
#define KVS_NATIVE_CORE_FENCE_H

#include "core/device.h"

/* Embedded in the object that waits. `completed` runs once, on the signalling thread, outside every
 * lock of the fence. */
typedef struct kvs_fence_waiter {
    struct kvs_fence_waiter *next;
    void (*completed)(struct kvs_fence_waiter *waiter);
} kvs_fence_waiter;

/* A hold keeps the object, but cannot signal: a fence with holds alone completes as abandoned. */
void kvs_fence_hold(kvs_fence *fence);
void kvs_fence_drop(kvs_fence *fence);

/* Register; false, and nothing registered, when the fence has completed already. */
bool kvs_fence_add_waiter(kvs_fence *fence, kvs_fence_waiter *waiter);

#endif
