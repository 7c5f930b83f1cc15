/* phase.c: the coordinator's registers: phases, consumers, the admitted unit of work. */
#include "core/coordinator.h"

#include <string.h>

enum { FIRST_ROOM = 4 };

kvs_status kvs_coordinator_create(kvs_arena *arena, kvs_coordinator **coordinator)
{
    if (arena == NULL || coordinator == NULL) {
        return kvs_refuse(arena == NULL ? NULL : arena->bounds.device);
    }
    kvs_device *device = kvs_arena_device(arena);
    kvs_arena_info info = {.struct_size = sizeof info};
    (void)kvs_arena_get_info(arena, &info);
    if (info.state == KVS_ARENA_ZOMBIE) {
        return kvs_fail(device, KVS_ECLOSED, "the arena was released");
    }
    kvs_coordinator *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    if (!kvs_mutex_init(&made->mutex)) {
        kvs_object_free(device, made);
        return kvs_fail(device, KVS_ENOMEM, "no mutex for a coordinator");
    }
    atomic_init(&made->claims, 1);
    made->device = device;
    made->arena = arena;
    made->state = KVS_COORDINATOR_IDLE;
    made->phase = UINT32_MAX;
    made->failure = (kvs_failure){.step = -1, .consumer = -1};
    kvs_arena_hold(arena);
    *coordinator = made;
    return KVS_OK;
}

void kvs_coordinator_drop(kvs_coordinator *coordinator)
{
    if (atomic_fetch_sub_explicit(&coordinator->claims, 1, memory_order_acq_rel) != 1) {
        return;
    }
    kvs_arena *arena = coordinator->arena;
    for (uint32_t i = 0; i < coordinator->n_phases; i++) {
        kvs_layout_free(&coordinator->phases[i]);
    }
    kvs_array_free(coordinator->phases);
    kvs_array_free(coordinator->consumers);
    kvs_mutex_destroy(&coordinator->mutex);
    kvs_object_free(coordinator->device, coordinator);
    kvs_arena_drop(arena);
}

void kvs_coordinator_release(kvs_coordinator *coordinator)
{
    if (coordinator != NULL) {
        kvs_coordinator_drop(coordinator);
    }
}

static kvs_coordinator_state state_of(kvs_coordinator *coordinator)
{
    kvs_mutex_lock(&coordinator->mutex);
    const kvs_coordinator_state state = coordinator->state;
    kvs_mutex_unlock(&coordinator->mutex);
    return state;
}

static const char *state_name(kvs_coordinator_state state)
{
    static const char *const names[] = {"idle", "executing", "moving", "poisoned"};
    return names[state];
}

static kvs_status require_idle(kvs_coordinator *coordinator)
{
    const kvs_coordinator_state state = state_of(coordinator);
    if (state != KVS_COORDINATOR_IDLE) {
        return kvs_fail(coordinator->device, KVS_EBUSY, "the coordinator is %s, not idle",
                        state_name(state));
    }
    return KVS_OK;
}

/* Make `*items` hold one more; the items move. */
static kvs_status make_room(kvs_device *device, void **items, uint32_t n_items, uint32_t *room,
                            size_t item_bytes)
{
    if (n_items < *room) {
        return KVS_OK;
    }
    const uint32_t new_room = *room == 0 ? FIRST_ROOM : *room * 2;
    void *grown = kvs_array_alloc(device, new_room, item_bytes);
    if (grown == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "need room for %u items of a coordinator", new_room);
    }
    if (n_items != 0) {
        memcpy(grown, *items, n_items * item_bytes);
    }
    kvs_array_free(*items);
    *items = grown;
    *room = new_room;
    return KVS_OK;
}

/* Placed without a bound first, so that a layout which does not fit can say how much it needs. */
static kvs_status place_all(kvs_coordinator *coordinator, const kvs_phase_region *regions,
                            uint32_t n_regions, kvs_layout *layout)
{
    kvs_bounds bounds = coordinator->arena->bounds;
    const uint64_t capacity_bytes = bounds.capacity_bytes;
    bounds.capacity_bytes = UINT64_MAX;
    for (uint32_t i = 0; i < n_regions; i++) {
        if (regions[i].reserved != 0) {
            return kvs_fail(coordinator->device, KVS_EINVAL, "region %llu: reserved is not 0",
                            (kvs_ull)regions[i].id);
        }
        kvs_region region = {
            .struct_size = sizeof region,
            .flags = regions[i].flags,
            .id = regions[i].id,
            .size_bytes = regions[i].size_bytes,
            .alignment_bytes = regions[i].alignment_bytes,
        };
        const kvs_status status = kvs_layout_place(layout, &bounds, &region);
        if (status != KVS_OK) {
            return status;
        }
    }
    const uint64_t need_bytes = kvs_layout_end_bytes(layout);
    if (need_bytes > capacity_bytes) {
        return kvs_fail(coordinator->device, KVS_ENOSPACE,
                        "need %llu bytes, have %llu (arena, phase %u)", (kvs_ull)need_bytes,
                        (kvs_ull)capacity_bytes, coordinator->n_phases);
    }
    return KVS_OK;
}

kvs_status kvs_coordinator_add_phase(kvs_coordinator *coordinator, const kvs_phase_region *regions,
                                     uint32_t n_regions, uint32_t *phase)
{
    if (coordinator == NULL || phase == NULL) {
        return kvs_refuse(coordinator == NULL ? NULL : coordinator->device);
    }
    if (regions == NULL || n_regions == 0) {
        return kvs_fail(coordinator->device, KVS_EINVAL, "a phase without regions");
    }
    kvs_status status = require_idle(coordinator);
    if (status == KVS_OK) {
        void *phases = coordinator->phases;
        status = make_room(coordinator->device, &phases, coordinator->n_phases,
                           &coordinator->phase_room, sizeof *coordinator->phases);
        coordinator->phases = phases;
    }
    if (status != KVS_OK) {
        return status;
    }
    kvs_layout layout = {0};
    status = place_all(coordinator, regions, n_regions, &layout);
    if (status != KVS_OK) {
        kvs_layout_free(&layout);
        return status;
    }
    kvs_mutex_lock(&coordinator->mutex);
    *phase = coordinator->n_phases;
    coordinator->phases[coordinator->n_phases++] = layout;
    kvs_mutex_unlock(&coordinator->mutex);
    return KVS_OK;
}

kvs_status kvs_coordinator_add_consumer(kvs_coordinator *coordinator, const kvs_consumer *consumer)
{
    if (coordinator == NULL) {
        return KVS_EINVAL;
    }
    if (!KVS_STRUCT_OK(consumer) || consumer->flags != 0 || consumer->run == NULL ||
        consumer->undo == NULL) {
        return kvs_fail(coordinator->device, KVS_EINVAL,
                        "a consumer needs its struct_size, no flags, run and undo");
    }
    kvs_status status = require_idle(coordinator);
    if (status == KVS_OK) {
        void *consumers = coordinator->consumers;
        status = make_room(coordinator->device, &consumers, coordinator->n_consumers,
                           &coordinator->consumer_room, sizeof *coordinator->consumers);
        coordinator->consumers = consumers;
    }
    if (status != KVS_OK) {
        return status;
    }
    kvs_mutex_lock(&coordinator->mutex);
    coordinator->consumers[coordinator->n_consumers++] = *consumer;
    kvs_mutex_unlock(&coordinator->mutex);
    return KVS_OK;
}

/* Under the mutex. */
static kvs_status admit(kvs_coordinator *coordinator)
{
    switch (coordinator->state) {
    case KVS_COORDINATOR_IDLE:
        break;
    case KVS_COORDINATOR_POISONED:
        return kvs_fail(coordinator->device, KVS_EPOISONED,
                        "nothing is admitted until the coordinator is rebuilt");
    case KVS_COORDINATOR_EXECUTING:
    case KVS_COORDINATOR_MOVING:
    default:
        return kvs_fail(coordinator->device, KVS_EBUSY, "the coordinator is %s",
                        state_name(coordinator->state));
    }
    if (coordinator->phase == UINT32_MAX) {
        return kvs_fail(coordinator->device, KVS_EINVAL, "no phase is active");
    }
    coordinator->ticket = ++coordinator->newest_ticket;
    coordinator->state = KVS_COORDINATOR_EXECUTING;
    return KVS_OK;
}

kvs_status kvs_coordinator_admit(kvs_coordinator *coordinator, uint64_t *ticket)
{
    if (coordinator == NULL || ticket == NULL) {
        return kvs_refuse(coordinator == NULL ? NULL : coordinator->device);
    }
    kvs_mutex_lock(&coordinator->mutex);
    const kvs_status status = admit(coordinator);
    if (status == KVS_OK) {
        *ticket = coordinator->ticket;
    }
    kvs_mutex_unlock(&coordinator->mutex);
    return status;
}

kvs_status kvs_coordinator_finish(kvs_coordinator *coordinator, uint64_t ticket)
{
    if (coordinator == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&coordinator->mutex);
    if (coordinator->state == KVS_COORDINATOR_MOVING) {
        status = kvs_fail(coordinator->device, KVS_EBUSY, "the coordinator is moving");
    } else if (coordinator->state != KVS_COORDINATOR_EXECUTING || coordinator->ticket != ticket) {
        status =
            kvs_fail(coordinator->device, KVS_ESTALE, "ticket %llu is not the admitted one (%llu)",
                     (kvs_ull)ticket, (kvs_ull)coordinator->ticket);
    } else {
        coordinator->ticket = 0;
        coordinator->state = KVS_COORDINATOR_IDLE;
    }
    kvs_mutex_unlock(&coordinator->mutex);
    return status;
}

kvs_status kvs_coordinator_cancel(kvs_coordinator *coordinator)
{
    if (coordinator == NULL) {
        return KVS_EINVAL;
    }
    kvs_mutex_lock(&coordinator->mutex);
    coordinator->is_cancelled = coordinator->is_cancelled || coordinator->is_cancelable;
    kvs_mutex_unlock(&coordinator->mutex);
    return KVS_OK;
}

kvs_status kvs_coordinator_get_info(kvs_coordinator *coordinator, kvs_coordinator_info *info)
{
    if (coordinator == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(coordinator == NULL ? NULL : coordinator->device);
    }
    kvs_mutex_lock(&coordinator->mutex);
    info->state = (uint32_t)coordinator->state;
    info->phase = coordinator->phase;
    info->n_phases = coordinator->n_phases;
    info->n_consumers = coordinator->n_consumers;
    info->failed_step = coordinator->failure.step;
    info->failed_consumer = coordinator->failure.consumer;
    info->failed_status = coordinator->failure.status;
    info->transitions = coordinator->transitions;
    kvs_mutex_unlock(&coordinator->mutex);
    return KVS_OK;
}

kvs_status kvs_coordinator_check_integrity(kvs_coordinator *coordinator)
{
    if (coordinator == NULL) {
        return KVS_EINVAL;
    }
    kvs_device *device = coordinator->device;
    for (uint32_t i = 0; i < coordinator->n_phases; i++) {
        const kvs_status status =
            kvs_layout_check(&coordinator->phases[i], &coordinator->arena->bounds, "phase");
        if (status != KVS_OK) {
            return status;
        }
    }
    const kvs_coordinator_state state = state_of(coordinator);
    if ((coordinator->ticket != 0) != (state == KVS_COORDINATOR_EXECUTING)) {
        return kvs_fail(device, KVS_ECORRUPT, "ticket %llu while %s", (kvs_ull)coordinator->ticket,
                        state_name(state));
    }
    if (coordinator->phase != UINT32_MAX && coordinator->phase >= coordinator->n_phases) {
        return kvs_fail(device, KVS_ECORRUPT, "phase %u of %u is active", coordinator->phase,
                        coordinator->n_phases);
    }
    const bool is_settled = state == KVS_COORDINATOR_IDLE || state == KVS_COORDINATOR_EXECUTING;
    if (is_settled && coordinator->phase != UINT32_MAX &&
        !kvs_arena_has_layout(coordinator->arena, &coordinator->phases[coordinator->phase])) {
        return kvs_fail(device, KVS_ECORRUPT,
                        "phase %u is active, but the arena has another layout", coordinator->phase);
    }
    return KVS_OK;
}
