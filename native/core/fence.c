/* fence.c: completion that is signalled once and then stands.
 *
 * Claims are those of callers, who can signal; holds are those of draining leases, who only wait.
 * All claims together count as one hold.
 */
#include "core/fence.h"

#include "base/sync.h"

struct kvs_fence {
    _Atomic uint64_t claims;
    _Atomic uint64_t holds;
    kvs_device *device;
    _Atomic int status; /* KVS_PENDING until complete; written under the mutex */
    kvs_mutex mutex;
    kvs_cond completed;
    kvs_fence_waiter *waiters;
};

kvs_status kvs_fence_create(kvs_device *device, kvs_fence **fence)
{
    if (device == NULL || fence == NULL) {
        return kvs_refuse(device);
    }
    const kvs_status asked = kvs_hook_ask(device, KVS_HOOK_FENCE);
    if (asked != KVS_OK) {
        return asked;
    }
    kvs_fence *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->claims, 1);
    atomic_init(&made->holds, 1);
    atomic_init(&made->status, KVS_PENDING);
    made->device = device;
    if (!kvs_mutex_init(&made->mutex)) {
        kvs_object_free(device, made);
        return KVS_ENOMEM;
    }
    if (!kvs_cond_init(&made->completed)) {
        kvs_mutex_destroy(&made->mutex);
        kvs_object_free(device, made);
        return KVS_ENOMEM;
    }
    *fence = made;
    return KVS_OK;
}

void kvs_fence_hold(kvs_fence *fence)
{
    (void)atomic_fetch_add_explicit(&fence->holds, 1, memory_order_relaxed);
}

void kvs_fence_drop(kvs_fence *fence)
{
    if (atomic_fetch_sub_explicit(&fence->holds, 1, memory_order_acq_rel) != 1) {
        return;
    }
    kvs_cond_destroy(&fence->completed);
    kvs_mutex_destroy(&fence->mutex);
    kvs_object_free(fence->device, fence);
}

static void tell(kvs_fence_waiter *waiter)
{
    while (waiter != NULL) {
        kvs_fence_waiter *next = waiter->next; /* the waiter may free itself */
        waiter->completed(waiter);
        waiter = next;
    }
}

/* False when it had completed before. */
static bool complete(kvs_fence *fence, int status)
{
    kvs_mutex_lock(&fence->mutex);
    const bool was_pending =
        atomic_load_explicit(&fence->status, memory_order_relaxed) == KVS_PENDING;
    kvs_fence_waiter *waiters = NULL;
    if (was_pending) {
        atomic_store_explicit(&fence->status, status, memory_order_release);
        waiters = fence->waiters;
        fence->waiters = NULL;
        kvs_cond_wake_all(&fence->completed);
    }
    kvs_mutex_unlock(&fence->mutex);
    tell(waiters);
    return was_pending;
}

void kvs_fence_retain(kvs_fence *fence)
{
    if (fence != NULL) {
        (void)atomic_fetch_add_explicit(&fence->claims, 1, memory_order_relaxed);
    }
}

void kvs_fence_release(kvs_fence *fence)
{
    if (fence == NULL || atomic_fetch_sub_explicit(&fence->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    /* Nobody is left who could signal, so leases that wait would drain forever. */
    (void)complete(fence, KVS_ECANCELLED);
    kvs_fence_drop(fence);
}

kvs_status kvs_fence_signal(kvs_fence *fence, int status)
{
    if (fence == NULL) {
        return KVS_EINVAL;
    }
    if (status > 0) {
        return kvs_fail(fence->device, KVS_EINVAL,
                        "a fence completes with KVS_OK or a failure, not with %d", status);
    }
    if (!complete(fence, status)) {
        return kvs_fail(fence->device, KVS_EINVAL, "the fence completed before, with %s",
                        kvs_status_name(kvs_fence_query(fence)));
    }
    return KVS_OK;
}

kvs_status kvs_fence_query(kvs_fence *fence)
{
    if (fence == NULL) {
        return KVS_EINVAL;
    }
    const kvs_status status = (kvs_status)atomic_load_explicit(&fence->status, memory_order_acquire);
    return status < 0 ? kvs_fail(fence->device, status, "the fence completed with %s", kvs_status_name(status)) : status;
}

kvs_status kvs_fence_wait(kvs_fence *fence, uint64_t timeout_ns)
{
    kvs_status status = kvs_fence_query(fence);
    if (status != KVS_PENDING || timeout_ns == 0) {
        return status;
    }
    uint64_t deadline_ns;
    if (!kvs_add_u64(kvs_clock_ns(), timeout_ns, &deadline_ns)) {
        deadline_ns = UINT64_MAX;
    }
    kvs_mutex_lock(&fence->mutex);
    bool in_time = true;
    while ((status = kvs_fence_query(fence)) == KVS_PENDING && in_time) {
        in_time = kvs_cond_wait_until(&fence->completed, &fence->mutex, deadline_ns);
    }
    kvs_mutex_unlock(&fence->mutex);
    return status;
}

bool kvs_fence_add_waiter(kvs_fence *fence, kvs_fence_waiter *waiter)
{
    kvs_mutex_lock(&fence->mutex);
    const bool is_pending = kvs_fence_query(fence) == KVS_PENDING;
    if (is_pending) {
        waiter->next = fence->waiters;
        fence->waiters = waiter;
    }
    kvs_mutex_unlock(&fence->mutex);
    return is_pending;
}

kvs_device *kvs_fence_device(const kvs_fence *fence)
{
    return fence->device;
}
