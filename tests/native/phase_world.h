/* phase_world.h: an arena with two phases and three consumers that note every callback, and may fail, cancel or reenter
 * at a chosen one.
 */
#ifndef KVS_TESTS_PHASE_WORLD_H
#define KVS_TESTS_PHASE_WORLD_H

#include "check.h"
#include "kvstream/phase.h"

#include <string.h>

enum {
    CAPACITY = 8192,
    N_CONSUMERS = 3,
    MAX_TRACE = 256,
    NEVER = -1,
    POOL = 1,
    WORK = 2,
    SHARED = 3
};

typedef struct world world;

/* Holds one lease on the work region and one on the shared region. */
typedef struct member {
    world *world;
    int index;
    kvs_lease *lease;
    kvs_lease *shared;
} member;

struct world {
    kvs_device *device;
    kvs_arena *arena;
    kvs_coordinator *coordinator;
    member members[N_CONSUMERS];
    int trace[MAX_TRACE]; /* step * 10 + consumer, + 1000 for an undo */
    int n_trace;
    int fail_step, fail_consumer, fail_status;
    int undo_fail_step, undo_fail_consumer;
    int cancel_step, cancel_consumer;
    bool reenters;
};

static inline void note(world *world, int what)
{
    if (CHECK(world->n_trace < MAX_TRACE)) {
        world->trace[world->n_trace++] = what;
    }
}

static inline void try_reentry(world *world)
{
    uint64_t ticket = 0;
    uint32_t phase = 0;
    const kvs_phase_region region = {.id = 9, .size_bytes = 64};
    CHECK_STATUS(kvs_coordinator_transition(world->coordinator, 0), KVS_EBUSY);
    CHECK_STATUS(kvs_coordinator_transition(world->coordinator, 1), KVS_EBUSY);
    CHECK_STATUS(kvs_coordinator_admit(world->coordinator, &ticket), KVS_EBUSY);
    CHECK_STATUS(kvs_coordinator_finish(world->coordinator, 1), KVS_EBUSY);
    CHECK_STATUS(kvs_coordinator_rebuild(world->coordinator, 0), KVS_EBUSY);
    CHECK_STATUS(kvs_coordinator_add_phase(world->coordinator, &region, 1, &phase), KVS_EBUSY);
    CHECK_OK(kvs_coordinator_check_integrity(world->coordinator));
    kvs_coordinator_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_coordinator_get_info(world->coordinator, &info));
    CHECK_U64(info.state, KVS_COORDINATOR_MOVING);
}

static inline int drop_work(member *member)
{
    kvs_lease_release(member->lease);
    member->lease = NULL;
    return KVS_OK;
}

static inline int take_work(member *member)
{
    CHECK(member->lease == NULL);
    return kvs_arena_acquire(member->world->arena, WORK, &member->lease);
}

static inline int run(void *user, int step, uint32_t phase)
{
    member *member = user;
    world *world = member->world;
    (void)phase;
    note(world, step * 10 + member->index);
    if (world->reenters) {
        try_reentry(world);
    }
    if (step == world->cancel_step && member->index == world->cancel_consumer) {
        CHECK_OK(kvs_coordinator_cancel(world->coordinator));
    }
    if (step == world->fail_step && member->index == world->fail_consumer) {
        return world->fail_status;
    }
    if (step == KVS_STEP_RELEASE) {
        return drop_work(member);
    }
    if (step == KVS_STEP_BIND) {
        return take_work(member);
    }
    return KVS_OK;
}

static inline int undo(void *user, int step, uint32_t phase)
{
    member *member = user;
    world *world = member->world;
    (void)phase;
    note(world, 1000 + step * 10 + member->index);
    if (step == world->undo_fail_step && member->index == world->undo_fail_consumer) {
        return KVS_EIO;
    }
    if (step == KVS_STEP_RELEASE) {
        kvs_coordinator_info info = {.struct_size = sizeof info};
        CHECK_OK(kvs_coordinator_get_info(world->coordinator, &info));
        return info.phase == UINT32_MAX ? KVS_OK : take_work(member);
    }
    if (step == KVS_STEP_BIND) {
        return drop_work(member);
    }
    return KVS_OK;
}

static const kvs_phase_region prefill[] = {
    {.id = SHARED, .size_bytes = 512, .flags = KVS_REGION_PERSISTENT},
    {.id = WORK, .size_bytes = 4096},
    {.id = POOL, .size_bytes = 1024, .alignment_bytes = 256},
};
static const kvs_phase_region decode[] = {
    {.id = SHARED, .size_bytes = 512, .flags = KVS_REGION_PERSISTENT},
    {.id = WORK, .size_bytes = 1024},
    {.id = POOL, .size_bytes = 6144, .alignment_bytes = 256},
};

static inline void set_up(world *world)
{
    const kvs_device_desc desc = {.struct_size = sizeof desc, .n_threads = 1};
    memset(world, 0, sizeof *world);
    world->fail_step = world->undo_fail_step = world->cancel_step = NEVER;
    CHECK_OK(kvs_device_create(&desc, &world->device));
    CHECK_OK(kvs_arena_create(world->device, CAPACITY, 64, &world->arena));
    CHECK_OK(kvs_coordinator_create(world->arena, &world->coordinator));
    for (int i = 0; i < N_CONSUMERS; i++) {
        world->members[i] = (member){.world = world, .index = i};
        const kvs_consumer consumer = {
            .struct_size = sizeof consumer, .user = &world->members[i], .run = run, .undo = undo};
        CHECK_OK(kvs_coordinator_add_consumer(world->coordinator, &consumer));
    }
    uint32_t phase = 77;
    CHECK_OK(kvs_coordinator_add_phase(world->coordinator, prefill, 3, &phase));
    CHECK_U64(phase, 0);
    CHECK_OK(kvs_coordinator_add_phase(world->coordinator, decode, 3, &phase));
    CHECK_U64(phase, 1);
}

static inline void tear_down(world *world)
{
    for (int i = 0; i < N_CONSUMERS; i++) {
        kvs_lease_release(world->members[i].lease);
        kvs_lease_release(world->members[i].shared);
    }
    kvs_coordinator_release(world->coordinator);
    kvs_arena_release(world->arena);
    kvs_device_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_device_get_info(world->device, &info));
    CHECK_U64(info.live_objects, 0);
    kvs_device_release(world->device);
}

static inline kvs_coordinator_info info_of(world *world)
{
    kvs_coordinator_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_coordinator_get_info(world->coordinator, &info));
    CHECK_OK(kvs_coordinator_check_integrity(world->coordinator));
    CHECK_OK(kvs_arena_check_integrity(world->arena));
    return info;
}

static inline kvs_arena_info arena_info(world *world)
{
    kvs_arena_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_arena_get_info(world->arena, &info));
    return info;
}

static inline uint64_t work_bytes(world *world)
{
    kvs_region region = {.struct_size = sizeof region};
    return kvs_arena_find_region(world->arena, WORK, &region) == KVS_OK ? region.size_bytes : 0;
}

static inline void hold_shared(world *world)
{
    for (int i = 0; i < N_CONSUMERS; i++) {
        CHECK_OK(kvs_arena_acquire(world->arena, SHARED, &world->members[i].shared));
    }
}

static inline int do_nothing(void *user, int step, uint32_t phase)
{
    (void)user;
    (void)step;
    (void)phase;
    return KVS_OK;
}

#endif
