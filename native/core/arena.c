/* arena.c: the arena: its making, its states, what it reports, its end. */
#include "core/arena.h"

/* Memory of its own starts at a memory page at least, so that regions may ask for that much
 * alignment. */
enum { MIN_ALIGNMENT = 64, OWN_ALIGNMENT = 4096 };

static kvs_status check_alignment(kvs_device *device, uint64_t alignment_bytes)
{
    if (alignment_bytes < MIN_ALIGNMENT || !kvs_is_power_of_two(alignment_bytes)) {
        return kvs_fail(device, KVS_EINVAL,
                        "arena alignment %llu is not a power of two of at least %d",
                        (kvs_ull)alignment_bytes, MIN_ALIGNMENT);
    }
    return KVS_OK;
}

/* Takes over one claim on the buffer, on success only. */
static kvs_status create_over(kvs_buffer *buffer, uint64_t alignment_bytes, kvs_arena **arena)
{
    kvs_device *device = kvs_buffer_device(buffer);
    kvs_arena *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    if (!kvs_mutex_init(&made->mutex)) {
        kvs_object_free(device, made);
        return kvs_fail(device, KVS_ENOMEM, "no mutex for an arena");
    }
    atomic_init(&made->claims, 1);
    made->buffer = buffer;
    made->address = kvs_buffer_address(buffer);
    made->bounds = (kvs_bounds){
        .device = device,
        .capacity_bytes = kvs_buffer_bytes(buffer),
        .alignment_bytes = alignment_bytes,
    };
    *arena = made;
    return KVS_OK;
}

kvs_status kvs_arena_create(kvs_device *device, uint64_t capacity_bytes, uint64_t alignment_bytes,
                            kvs_arena **arena)
{
    if (device == NULL || arena == NULL) {
        return kvs_refuse(device);
    }
    kvs_status status = check_alignment(device, alignment_bytes);
    if (status != KVS_OK) {
        return status;
    }
    if (capacity_bytes == 0) {
        return kvs_fail(device, KVS_EINVAL, "an arena of 0 bytes");
    }
    const uint64_t own = alignment_bytes < OWN_ALIGNMENT ? OWN_ALIGNMENT : alignment_bytes;
    kvs_buffer *buffer;
    status = kvs_buffer_create(device, capacity_bytes, own, &buffer);
    if (status != KVS_OK) {
        return status;
    }
    status = create_over(buffer, alignment_bytes, arena);
    if (status != KVS_OK) {
        kvs_buffer_release(buffer);
    }
    return status;
}

kvs_status kvs_arena_create_over(kvs_buffer *buffer, uint64_t alignment_bytes, kvs_arena **arena)
{
    if (buffer == NULL || arena == NULL) {
        return kvs_refuse(buffer == NULL ? NULL : kvs_buffer_device(buffer));
    }
    kvs_device *device = kvs_buffer_device(buffer);
    kvs_status status = check_alignment(device, alignment_bytes);
    if (status != KVS_OK) {
        return status;
    }
    if (kvs_buffer_address(buffer) % alignment_bytes != 0) {
        return kvs_fail(device, KVS_EINVAL, "the buffer does not start at a multiple of %llu bytes",
                        (kvs_ull)alignment_bytes);
    }
    status = create_over(buffer, alignment_bytes, arena);
    if (status == KVS_OK) {
        kvs_buffer_retain(buffer);
    }
    return status;
}

void kvs_arena_hold(kvs_arena *arena)
{
    (void)atomic_fetch_add_explicit(&arena->claims, 1, memory_order_relaxed);
}

void kvs_arena_drop(kvs_arena *arena)
{
    if (atomic_fetch_sub_explicit(&arena->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    kvs_buffer *buffer = arena->buffer;
    kvs_layout_free(&arena->committed);
    kvs_layout_free(&arena->staged);
    kvs_mutex_destroy(&arena->mutex);
    kvs_object_free(arena->bounds.device, arena);
    kvs_buffer_release(buffer);
}

void kvs_arena_release(kvs_arena *arena)
{
    if (arena == NULL) {
        return;
    }
    kvs_mutex_lock(&arena->mutex);
    arena->mode = KVS_ARENA_RELEASED;
    kvs_arena_close_transaction(arena);
    kvs_mutex_unlock(&arena->mutex);
    kvs_arena_drop(arena);
}

kvs_status kvs_arena_refuse_released(kvs_arena *arena)
{
    return kvs_fail(arena->bounds.device, KVS_ECLOSED,
                    "the arena was released; %u leases keep its memory",
                    arena->n_leases + arena->n_draining);
}

static void report(const kvs_placed *place, kvs_region *region)
{
    const uint32_t struct_size = region->struct_size;
    *region = place->region;
    region->struct_size = struct_size;
}

kvs_status kvs_arena_find_region(kvs_arena *arena, uint64_t id, kvs_region *region)
{
    if (arena == NULL || !KVS_STRUCT_OK(region)) {
        return kvs_refuse(arena == NULL ? NULL : arena->bounds.device);
    }
    kvs_mutex_lock(&arena->mutex);
    const kvs_placed *place = kvs_layout_find(&arena->committed, id);
    if (place != NULL) {
        report(place, region);
    }
    kvs_mutex_unlock(&arena->mutex);
    return place != NULL ? KVS_OK
                         : kvs_fail(arena->bounds.device, KVS_ENOTFOUND, "no region has id %llu",
                                    (kvs_ull)id);
}

kvs_status kvs_arena_region_at(kvs_arena *arena, uint32_t index, kvs_region *region)
{
    if (arena == NULL || !KVS_STRUCT_OK(region)) {
        return kvs_refuse(arena == NULL ? NULL : arena->bounds.device);
    }
    kvs_mutex_lock(&arena->mutex);
    const uint32_t n_places = arena->committed.n_places;
    if (index < n_places) {
        report(&arena->committed.places[index], region);
    }
    kvs_mutex_unlock(&arena->mutex);
    return index < n_places ? KVS_OK
                            : kvs_fail(arena->bounds.device, KVS_ENOTFOUND, "region index %u of %u",
                                       index, n_places);
}

static kvs_arena_state state_of(const kvs_arena *arena)
{
    switch (arena->mode) {
    case KVS_ARENA_ACCEPTING:
        return KVS_ARENA_OPEN;
    case KVS_ARENA_QUIESCED:
        return arena->n_leases + arena->n_draining != 0 ? KVS_ARENA_DRAINING : KVS_ARENA_QUIESCENT;
    case KVS_ARENA_RELEASED:
    default:
        return KVS_ARENA_ZOMBIE;
    }
}

kvs_status kvs_arena_get_info(kvs_arena *arena, kvs_arena_info *info)
{
    if (arena == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(arena == NULL ? NULL : arena->bounds.device);
    }
    kvs_mutex_lock(&arena->mutex);
    kvs_arena_collect(arena);
    info->state = (uint32_t)state_of(arena);
    info->capacity_bytes = arena->bounds.capacity_bytes;
    info->alignment_bytes = arena->bounds.alignment_bytes;
    info->used_bytes = kvs_layout_used_bytes(&arena->committed);
    info->high_water_bytes = kvs_layout_end_bytes(&arena->committed);
    info->epoch = arena->epoch;
    info->n_regions = arena->committed.n_places;
    info->n_leases = arena->n_leases;
    info->n_draining = arena->n_draining;
    info->is_building = arena->is_building ? 1 : 0;
    kvs_mutex_unlock(&arena->mutex);
    return KVS_OK;
}

kvs_status kvs_arena_quiesce(kvs_arena *arena)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&arena->mutex);
    if (arena->mode == KVS_ARENA_RELEASED) {
        status = kvs_arena_refuse_released(arena);
    } else {
        arena->mode = KVS_ARENA_QUIESCED;
    }
    kvs_mutex_unlock(&arena->mutex);
    return status;
}

kvs_status kvs_arena_resume(kvs_arena *arena)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&arena->mutex);
    if (arena->mode == KVS_ARENA_RELEASED) {
        status = kvs_arena_refuse_released(arena);
    } else if (arena->is_building) {
        status = kvs_fail(arena->bounds.device, KVS_EBUSY, "a layout transaction is open");
    } else {
        arena->mode = KVS_ARENA_ACCEPTING;
    }
    kvs_mutex_unlock(&arena->mutex);
    return status;
}

void kvs_arena_reopen(kvs_arena *arena)
{
    kvs_mutex_lock(&arena->mutex);
    if (arena->mode == KVS_ARENA_QUIESCED) {
        arena->mode = KVS_ARENA_ACCEPTING;
    }
    kvs_mutex_unlock(&arena->mutex);
}

kvs_device *kvs_arena_device(const kvs_arena *arena)
{
    return arena->bounds.device;
}

uint64_t kvs_arena_epoch(kvs_arena *arena)
{
    kvs_mutex_lock(&arena->mutex);
    const uint64_t epoch = arena->epoch;
    kvs_mutex_unlock(&arena->mutex);
    return epoch;
}

/* Count the leases of one region from the list, and see that each still describes the region. */
static kvs_status check_place(const kvs_arena *arena, const kvs_placed *place)
{
    uint32_t n_leases = 0;
    uint32_t n_draining = 0;
    for (const kvs_lease *lease = arena->leases; lease != NULL; lease = lease->next) {
        if (lease->region_id != place->region.id) {
            continue;
        }
        n_leases += lease->is_draining ? 0 : 1;
        n_draining += lease->is_draining ? 1 : 0;
        if (lease->offset_bytes != place->region.offset_bytes ||
            lease->size_bytes != place->region.size_bytes || lease->epoch > arena->epoch) {
            return kvs_fail(arena->bounds.device, KVS_ECORRUPT,
                            "a lease of region %llu lost its region", (kvs_ull)place->region.id);
        }
    }
    if (n_leases != place->n_leases || n_draining != place->n_draining) {
        return kvs_fail(arena->bounds.device, KVS_ECORRUPT,
                        "region %llu counts %u live and %u draining leases, has %u and %u",
                        (kvs_ull)place->region.id, place->n_leases, place->n_draining, n_leases,
                        n_draining);
    }
    return KVS_OK;
}

static kvs_status check_counts(const kvs_arena *arena)
{
    uint32_t n_leases = 0;
    uint32_t n_draining = 0;
    uint32_t n_listed = 0;
    for (uint32_t i = 0; i < arena->committed.n_places; i++) {
        const kvs_status status = check_place(arena, &arena->committed.places[i]);
        if (status != KVS_OK) {
            return status;
        }
        n_leases += arena->committed.places[i].n_leases;
        n_draining += arena->committed.places[i].n_draining;
    }
    for (const kvs_lease *lease = arena->leases; lease != NULL; lease = lease->next) {
        n_listed++;
    }
    if (n_leases != arena->n_leases || n_draining != arena->n_draining ||
        n_listed != n_leases + n_draining) {
        return kvs_fail(
            arena->bounds.device, KVS_ECORRUPT,
            "the arena counts %u live and %u draining leases, its regions %u and %u, its list %u",
            arena->n_leases, arena->n_draining, n_leases, n_draining, n_listed);
    }
    return KVS_OK;
}

/* Under the mutex. */
static kvs_status check(const kvs_arena *arena)
{
    if (!arena->is_building && arena->staged.n_places != 0) {
        return kvs_fail(arena->bounds.device, KVS_ECORRUPT,
                        "regions are staged outside a transaction");
    }
    kvs_status status = kvs_layout_check(&arena->committed, &arena->bounds, "committed");
    if (status == KVS_OK) {
        status = kvs_layout_check(&arena->staged, &arena->bounds, "staged");
    }
    return status == KVS_OK ? check_counts(arena) : status;
}

kvs_status kvs_arena_check_integrity(kvs_arena *arena)
{
    if (arena == NULL) {
        return KVS_EINVAL;
    }
    kvs_mutex_lock(&arena->mutex);
    const kvs_status status = check(arena);
    kvs_mutex_unlock(&arena->mutex);
    return status;
}
