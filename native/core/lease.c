/* lease.c: claims on regions, and how they end: at once, or behind a fence.
 *
 * A retired lease belongs to its fence: the fence's waiter frees it. An arena that looks earlier
 * only stops counting it.
 */
#include "core/arena.h"

#include <stddef.h>

/* Under the arena's mutex. */
static void link_lease(kvs_lease *lease, kvs_placed *place)
{
    kvs_arena *arena = lease->arena;
    lease->next = arena->leases;
    lease->link = &arena->leases;
    if (lease->next != NULL) {
        lease->next->link = &lease->next;
    }
    arena->leases = lease;
    place->n_leases++;
    arena->n_leases++;
}

/* Under the arena's mutex. A leased region survives every commit, so it is found. */
static void unlink_lease(kvs_lease *lease)
{
    kvs_arena *arena = lease->arena;
    kvs_placed *place = kvs_layout_find(&arena->committed, lease->region_id);
    if (lease->is_draining) {
        place->n_draining--;
        arena->n_draining--;
    } else {
        place->n_leases--;
        arena->n_leases--;
    }
    *lease->link = lease->next;
    if (lease->next != NULL) {
        lease->next->link = lease->link;
    }
    lease->link = NULL;
    lease->is_draining = false;
}

static void free_lease(kvs_lease *lease)
{
    kvs_arena *arena = lease->arena;
    kvs_object_free(arena->bounds.device, lease);
    kvs_arena_drop(arena);
}

/* Under the mutex. */
static kvs_status acquire(kvs_arena *arena, uint64_t region_id, kvs_lease *made)
{
    kvs_device *device = arena->bounds.device;
    if (arena->mode == KVS_ARENA_RELEASED) {
        return kvs_fail(device, KVS_ECLOSED, "the arena was released");
    }
    if (arena->mode == KVS_ARENA_QUIESCED) {
        return kvs_fail(device, KVS_EBUSY, "the arena accepts no leases now (region %llu)",
                        (kvs_ull)region_id);
    }
    kvs_arena_collect(arena);
    kvs_placed *place = kvs_layout_find(&arena->committed, region_id);
    if (place == NULL) {
        return kvs_fail(device, KVS_ENOTFOUND, "no region has id %llu", (kvs_ull)region_id);
    }
    made->arena = arena;
    made->region_id = region_id;
    made->epoch = arena->epoch;
    made->offset_bytes = place->region.offset_bytes;
    made->size_bytes = place->region.size_bytes;
    link_lease(made, place);
    kvs_arena_hold(arena);
    return KVS_OK;
}

kvs_status kvs_arena_acquire(kvs_arena *arena, uint64_t region_id, kvs_lease **lease)
{
    if (arena == NULL || lease == NULL) {
        return kvs_refuse(arena == NULL ? NULL : arena->bounds.device);
    }
    kvs_device *device = arena->bounds.device;
    kvs_lease *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    atomic_init(&made->claims, 1);
    kvs_mutex_lock(&arena->mutex);
    const kvs_status status = acquire(arena, region_id, made);
    kvs_mutex_unlock(&arena->mutex);
    if (status != KVS_OK) {
        kvs_object_free(device, made);
        return status;
    }
    *lease = made;
    return KVS_OK;
}

void kvs_lease_retain(kvs_lease *lease)
{
    if (lease != NULL) {
        (void)atomic_fetch_add_explicit(&lease->claims, 1, memory_order_relaxed);
    }
}

void kvs_lease_release(kvs_lease *lease)
{
    if (lease == NULL || atomic_fetch_sub_explicit(&lease->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    kvs_mutex_lock(&lease->arena->mutex);
    unlink_lease(lease);
    kvs_mutex_unlock(&lease->arena->mutex);
    free_lease(lease);
}

static void fence_completed(kvs_fence_waiter *waiter)
{
    kvs_lease *lease = (kvs_lease *)(void *)((char *)waiter - offsetof(kvs_lease, waiter));
    kvs_fence *fence = lease->fence;
    kvs_mutex_lock(&lease->arena->mutex);
    if (lease->link != NULL) {
        unlink_lease(lease);
    }
    kvs_mutex_unlock(&lease->arena->mutex);
    free_lease(lease);
    kvs_fence_drop(fence);
}

kvs_status kvs_lease_retire(kvs_lease *lease, kvs_fence *fence)
{
    if (lease == NULL) {
        return KVS_EINVAL;
    }
    kvs_arena *arena = lease->arena;
    kvs_device *device = arena->bounds.device;
    if (fence == NULL || kvs_fence_device(fence) != device) {
        return kvs_fail(device, KVS_EINVAL, "a lease retires behind a fence of its own device");
    }
    uint64_t claims = 1;
    if (!atomic_compare_exchange_strong_explicit(&lease->claims, &claims, 0, memory_order_acq_rel,
                                                 memory_order_acquire)) {
        return kvs_fail(device, KVS_EBUSY,
                        "the lease of region %llu has %llu claims, only the last can retire it",
                        (kvs_ull)lease->region_id, (kvs_ull)claims);
    }
    kvs_fence_hold(fence);
    kvs_mutex_lock(&arena->mutex);
    kvs_placed *place = kvs_layout_find(&arena->committed, lease->region_id);
    place->n_leases--;
    arena->n_leases--;
    place->n_draining++;
    arena->n_draining++;
    lease->is_draining = true;
    lease->fence = fence;
    lease->waiter.completed = fence_completed;
    kvs_mutex_unlock(&arena->mutex);
    if (!kvs_fence_add_waiter(fence, &lease->waiter)) {
        fence_completed(&lease->waiter);
    }
    return KVS_OK;
}

void kvs_arena_collect(kvs_arena *arena)
{
    kvs_lease *next;
    for (kvs_lease *lease = arena->leases; lease != NULL; lease = next) {
        next = lease->next;
        if (lease->is_draining && kvs_fence_query(lease->fence) != KVS_PENDING) {
            unlink_lease(lease);
        }
    }
}

kvs_status kvs_lease_get_info(kvs_lease *lease, kvs_lease_info *info)
{
    if (lease == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(lease == NULL ? NULL : lease->arena->bounds.device);
    }
    kvs_arena *arena = lease->arena;
    kvs_mutex_lock(&arena->mutex);
    info->is_draining = lease->is_draining ? 1 : 0;
    kvs_mutex_unlock(&arena->mutex);
    info->region_id = lease->region_id;
    info->epoch = lease->epoch;
    info->offset_bytes = lease->offset_bytes;
    info->size_bytes = lease->size_bytes;
    info->address = arena->address + lease->offset_bytes;
    return KVS_OK;
}

kvs_device *kvs_lease_device(const kvs_lease *lease)
{
    return lease->arena->bounds.device;
}

kvs_arena *kvs_lease_arena(const kvs_lease *lease)
{
    return lease->arena;
}

uint64_t kvs_lease_address(const kvs_lease *lease)
{
    return lease->arena->address + lease->offset_bytes;
}

uint64_t kvs_lease_bytes(const kvs_lease *lease)
{
    return lease->size_bytes;
}
