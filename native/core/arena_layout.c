/* arena_layout.c: layout transactions: regions are staged, then committed all at once or not at all. */
#include "core/arena.h"

void kvs_arena_close_transaction(kvs_arena *arena)
{
    arena->is_building = false;
    kvs_layout_clear(&arena->staged);
}

static kvs_status refuse_not_building(kvs_arena *arena)
{
    return kvs_fail(arena->bounds.device, KVS_EINVAL, "no layout transaction is open");
}

/* Under the mutex. */
static kvs_status begin(kvs_arena *arena, uint32_t flags)
{
    if (arena->mode == KVS_ARENA_RELEASED) {
        return kvs_arena_refuse_released(arena);
    }
    if (arena->is_building) {
        return kvs_fail(arena->bounds.device, KVS_EBUSY, "a layout transaction is open");
    }
    for (uint32_t i = 0; flags != 0 && i < arena->committed.n_places; i++) {
        kvs_region region = arena->committed.places[i].region;
        if ((region.flags & KVS_REGION_PERSISTENT) == 0) {
            continue;
        }
        const kvs_status status = kvs_layout_place_at(&arena->staged, &arena->bounds, &region);
        if (status != KVS_OK) {
            kvs_layout_clear(&arena->staged);
            return status;
        }
    }
    arena->is_building = true;
    return KVS_OK;
}

kvs_status kvs_arena_begin(kvs_arena *arena, uint32_t flags)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    if ((flags & ~(uint32_t)KVS_BEGIN_KEEP_PERSISTENT) != 0) {
        return kvs_fail(arena->bounds.device, KVS_EINVAL, "unknown flags 0x%x", flags);
    }
    kvs_mutex_lock(&arena->mutex);
    const kvs_status status = begin(arena, flags);
    kvs_mutex_unlock(&arena->mutex);
    return status;
}

static kvs_status stage(kvs_arena *arena, kvs_region *region, bool at_offset)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    if (!KVS_STRUCT_OK(region)) {
        return kvs_fail(arena->bounds.device, KVS_EINVAL,
                        "no region, or its struct_size is too small");
    }
    kvs_status status;
    kvs_mutex_lock(&arena->mutex);
    if (!arena->is_building) {
        status = refuse_not_building(arena);
    } else if (at_offset) {
        status = kvs_layout_place_at(&arena->staged, &arena->bounds, region);
    } else {
        status = kvs_layout_place(&arena->staged, &arena->bounds, region);
    }
    kvs_mutex_unlock(&arena->mutex);
    return status;
}

kvs_status kvs_arena_reserve(kvs_arena *arena, kvs_region *region)
{
    return stage(arena, region, false);
}

kvs_status kvs_arena_reserve_at(kvs_arena *arena, kvs_region *region)
{
    return stage(arena, region, true);
}

/* A leased region survives a commit only where nothing about its storage changes, in name or in
 * place. */
static kvs_status check_leased(kvs_arena *arena)
{
    for (uint32_t i = 0; i < arena->committed.n_places; i++) {
        const kvs_placed *old = &arena->committed.places[i];
        if (old->n_leases + old->n_draining == 0) {
            continue;
        }
        const kvs_placed *new = kvs_layout_find(&arena->staged, old->region.id);
        const char *fault = NULL;
        if (new == NULL) {
            fault = "missing";
        } else if (!kvs_region_same_place(&old->region, &new->region)) {
            fault = "moved or resized";
        } else if ((old->region.flags & new->region.flags & KVS_REGION_PERSISTENT) == 0) {
            fault = "not persistent";
        }
        if (fault != NULL) {
            return kvs_fail(
                arena->bounds.device, KVS_EBUSY,
                "region %llu is %s in the new layout, but has %u live and %u draining leases",
                (kvs_ull)old->region.id, fault, old->n_leases, old->n_draining);
        }
    }
    return KVS_OK;
}

static void keep_leases(kvs_arena *arena)
{
    for (uint32_t i = 0; i < arena->committed.n_places; i++) {
        const kvs_placed *old = &arena->committed.places[i];
        if (old->n_leases + old->n_draining != 0) {
            kvs_placed *new = kvs_layout_find(&arena->staged, old->region.id);
            new->n_leases = old->n_leases;
            new->n_draining = old->n_draining;
        }
    }
}

/* Under the mutex. Nothing below allocates: a commit that passes its checks cannot fail. */
static kvs_status commit(kvs_arena *arena)
{
    if (!arena->is_building) {
        return refuse_not_building(arena);
    }
    kvs_arena_collect(arena);
    const bool changes = kvs_layout_differs(&arena->committed, &arena->staged);
    kvs_status status = check_leased(arena);
    if (status == KVS_OK && changes && arena->epoch == UINT64_MAX) {
        status = kvs_fail(arena->bounds.device, KVS_EOVERFLOW, "the arena's epochs are used up");
    }
    if (status == KVS_OK) {
        keep_leases(arena);
        const kvs_layout old = arena->committed;
        arena->committed = arena->staged;
        arena->staged = old;
        arena->epoch += changes ? 1 : 0;
    }
    kvs_arena_close_transaction(arena);
    return status;
}

kvs_status kvs_arena_commit(kvs_arena *arena)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    kvs_mutex_lock(&arena->mutex);
    const kvs_status status = commit(arena);
    kvs_mutex_unlock(&arena->mutex);
    return status;
}

kvs_status kvs_arena_abort(kvs_arena *arena)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    kvs_mutex_lock(&arena->mutex);
    kvs_status status = KVS_OK;
    if (arena->is_building) {
        kvs_arena_close_transaction(arena);
    } else {
        status = refuse_not_building(arena);
    }
    kvs_mutex_unlock(&arena->mutex);
    return status;
}

kvs_status kvs_arena_copy_layout(kvs_arena *arena, kvs_layout *layout, uint64_t *epoch)
{
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&arena->mutex);
    for (uint32_t i = 0; status == KVS_OK && i < arena->committed.n_places; i++) {
        kvs_region region = arena->committed.places[i].region;
        status = kvs_layout_place_at(layout, &arena->bounds, &region);
    }
    *epoch = arena->epoch;
    kvs_mutex_unlock(&arena->mutex);
    if (status != KVS_OK) {
        kvs_layout_free(layout);
    }
    return status;
}

bool kvs_arena_has_layout(kvs_arena *arena, const kvs_layout *layout)
{
    kvs_mutex_lock(&arena->mutex);
    const bool differs = kvs_layout_differs(&arena->committed, layout);
    kvs_mutex_unlock(&arena->mutex);
    return !differs;
}

/* Under the mutex. */
static kvs_status install(kvs_arena *arena, const kvs_layout *layout, uint64_t expected_epoch)
{
    if (arena->epoch != expected_epoch) {
        return kvs_fail(arena->bounds.device, KVS_ESTALE,
                        "somebody else committed a layout: epoch %llu, expected %llu",
                        (kvs_ull)arena->epoch, (kvs_ull)expected_epoch);
    }
    kvs_status status = begin(arena, 0);
    if (status != KVS_OK) {
        return status;
    }
    for (uint32_t i = 0; status == KVS_OK && i < layout->n_places; i++) {
        kvs_region region = layout->places[i].region;
        status = kvs_layout_place_at(&arena->staged, &arena->bounds, &region);
    }
    if (status != KVS_OK) {
        kvs_arena_close_transaction(arena);
        return status;
    }
    return commit(arena);
}

kvs_status kvs_arena_install(kvs_arena *arena, const kvs_layout *layout, uint64_t expected_epoch,
                             uint64_t *epoch)
{
    kvs_mutex_lock(&arena->mutex);
    const kvs_status status = install(arena, layout, expected_epoch);
    *epoch = arena->epoch;
    kvs_mutex_unlock(&arena->mutex);
    return status;
}
