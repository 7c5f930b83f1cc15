/* test_phase.c: the coordinator: order of steps, a fault at every place, cancellation, poison,
 * rebuild. */
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

static void note(world *world, int what)
{
    if (CHECK(world->n_trace < MAX_TRACE)) {
        world->trace[world->n_trace++] = what;
    }
}

static void try_reentry(world *world)
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

static int drop_work(member *member)
{
    kvs_lease_release(member->lease);
    member->lease = NULL;
    return KVS_OK;
}

static int take_work(member *member)
{
    CHECK(member->lease == NULL);
    return kvs_arena_acquire(member->world->arena, WORK, &member->lease);
}

static int run(void *user, int step, uint32_t phase)
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

static int undo(void *user, int step, uint32_t phase)
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

static void set_up(world *world)
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

static void tear_down(world *world)
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

static kvs_coordinator_info info_of(world *world)
{
    kvs_coordinator_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_coordinator_get_info(world->coordinator, &info));
    CHECK_OK(kvs_coordinator_check_integrity(world->coordinator));
    CHECK_OK(kvs_arena_check_integrity(world->arena));
    return info;
}

static kvs_arena_info arena_info(world *world)
{
    kvs_arena_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_arena_get_info(world->arena, &info));
    return info;
}

static uint64_t work_bytes(world *world)
{
    kvs_region region = {.struct_size = sizeof region};
    return kvs_arena_find_region(world->arena, WORK, &region) == KVS_OK ? region.size_bytes : 0;
}

static void hold_shared(world *world)
{
    for (int i = 0; i < N_CONSUMERS; i++) {
        CHECK_OK(kvs_arena_acquire(world->arena, SHARED, &world->members[i].shared));
    }
}

static void steps_run_step_by_step_for_all_in_order(void)
{
    world world;
    set_up(&world);
    world.reenters = true;
    CHECK_U64(info_of(&world).phase, UINT32_MAX);
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
    int expected = 0;
    for (int step = KVS_STEP_PREPARE; step <= KVS_STEP_ACTIVATE; step++) {
        for (int i = 0; step != KVS_STEP_COMMIT && i < N_CONSUMERS; i++) {
            CHECK_U64(world.trace[expected++], step * 10 + i);
        }
    }
    CHECK_U64(world.n_trace, expected);
    CHECK(info_of(&world).phase == 0 && info_of(&world).transitions == 1);
    CHECK_U64(info_of(&world).failed_step, (uint64_t)-1);
    CHECK_U64(work_bytes(&world), 4096);

    world.n_trace = 0;
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0)); /* there already: calls nobody */
    CHECK_U64(world.n_trace, 0);
    hold_shared(&world); /* a persistent region keeps its leases over the move */
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 1));
    CHECK_U64(work_bytes(&world), 1024);
    kvs_lease_info lease = {.struct_size = sizeof lease};
    CHECK_OK(kvs_lease_get_info(world.members[0].shared, &lease));
    CHECK_U64(lease.epoch, 1);
    CHECK_U64(arena_info(&world).epoch, 2);
    CHECK_U64(info_of(&world).transitions, 2);
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 2), KVS_ENOTFOUND);
    tear_down(&world);
}

/* Fail at (step, consumer) on the way from phase 0 to 1, and compare the whole trace. */
static void check_undone_trace(const world *world, int step, int consumer)
{
    int at = 0;
    for (int s = 0; s <= step; s++) {
        const int end = s == step ? consumer + 1 : N_CONSUMERS;
        for (int c = 0; s != KVS_STEP_COMMIT && c < end; c++) {
            CHECK_U64(world->trace[at++], s * 10 + c);
        }
    }
    for (int s = step; s >= 0; s--) {
        const int start = s == step ? consumer : N_CONSUMERS;
        for (int c = start - 1; s != KVS_STEP_COMMIT && c >= 0; c--) {
            CHECK_U64(world->trace[at++], 1000 + s * 10 + c);
        }
    }
    CHECK_U64(world->n_trace, at);
}

static void failure_at_every_place_restores_the_old_layout(void)
{
    for (int place = 0; place < 8 * N_CONSUMERS; place++) {
        const int step = place / N_CONSUMERS;
        const int consumer = place % N_CONSUMERS;
        if (step == KVS_STEP_COMMIT) {
            continue;
        }
        world world;
        set_up(&world);
        CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
        hold_shared(&world);
        world.n_trace = 0;
        world.fail_step = step;
        world.fail_consumer = consumer;
        world.fail_status = KVS_ENUMERIC;
        world.reenters = true;
        CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_ENUMERIC);
        check_undone_trace(&world, step, consumer);
        const kvs_coordinator_info info = info_of(&world);
        CHECK(info.state == KVS_COORDINATOR_IDLE && info.phase == 0 && info.transitions == 1);
        CHECK(info.failed_step == step && info.failed_consumer == consumer);
        CHECK_STATUS(info.failed_status, KVS_ENUMERIC);
        CHECK_U64(work_bytes(&world), 4096);
        CHECK_U64(arena_info(&world).state, KVS_ARENA_OPEN);
        CHECK_U64(arena_info(&world).n_leases, 2 * N_CONSUMERS);
        world.fail_step = NEVER;
        CHECK_OK(kvs_coordinator_transition(world.coordinator, 1));
        CHECK_U64(work_bytes(&world), 1024);
        tear_down(&world);
    }
}

static void failing_undo_at_every_place_poisons_and_rebuild_heals(void)
{
    for (int place = 0; place < 8 * N_CONSUMERS; place++) {
        const int step = place / N_CONSUMERS;
        const int consumer = place % N_CONSUMERS;
        if (step == KVS_STEP_COMMIT || place == 8 * N_CONSUMERS - 1) {
            continue; /* the last callback fails itself below, so it is never undone */
        }
        world world;
        set_up(&world);
        CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
        world.fail_step = KVS_STEP_ACTIVATE;
        world.fail_consumer = N_CONSUMERS - 1;
        world.fail_status = KVS_ECORRUPT;
        world.undo_fail_step = step;
        world.undo_fail_consumer = consumer;
        CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_EPOISONED);
        CHECK_U64(world.trace[world.n_trace - 1], 1000 + step * 10 + consumer);
        const kvs_coordinator_info info = info_of(&world);
        CHECK_U64(info.state, KVS_COORDINATOR_POISONED);
        CHECK(info.failed_step == KVS_STEP_ACTIVATE && info.failed_consumer == N_CONSUMERS - 1);
        CHECK_STATUS(info.failed_status, KVS_ECORRUPT); /* the first failure, not the undo's */
        uint64_t ticket = 0;
        CHECK_STATUS(kvs_coordinator_admit(world.coordinator, &ticket), KVS_EPOISONED);
        CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 0), KVS_EPOISONED);
        kvs_lease *refused = NULL;
        CHECK_STATUS(kvs_arena_acquire(world.arena, WORK, &refused), KVS_EBUSY);
        const bool holds = arena_info(&world).n_leases != 0;
        if (holds) {
            CHECK_STATUS(kvs_coordinator_rebuild(world.coordinator, 0), KVS_EBUSY);
        }
        for (int i = 0; i < N_CONSUMERS; i++) {
            drop_work(&world.members[i]);
        }
        world.undo_fail_step = NEVER;
        CHECK_STATUS(kvs_coordinator_rebuild(world.coordinator, 5), KVS_ENOTFOUND);
        CHECK_STATUS(kvs_coordinator_rebuild(world.coordinator, 0), KVS_ECORRUPT); /* still fails */
        CHECK_U64(info_of(&world).state, KVS_COORDINATOR_POISONED);
        CHECK_U64(arena_info(&world).n_leases, 0); /* so that it can be tried again */
        world.fail_step = NEVER;
        world.reenters = true;
        world.cancel_step = KVS_STEP_BIND; /* a rebuild cannot be cancelled */
        world.cancel_consumer = 0;
        CHECK_OK(kvs_coordinator_rebuild(world.coordinator, 0));
        CHECK(info_of(&world).state == KVS_COORDINATOR_IDLE && info_of(&world).phase == 0);
        CHECK_U64(work_bytes(&world), 4096);
        CHECK_OK(kvs_coordinator_admit(world.coordinator, &ticket));
        CHECK_OK(kvs_coordinator_finish(world.coordinator, ticket));
        CHECK_STATUS(kvs_coordinator_rebuild(world.coordinator, 0), KVS_EINVAL);
        tear_down(&world);
    }
}

static void foreign_lease_blocks_the_commit_and_all_is_undone(void)
{
    world world;
    set_up(&world);
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
    kvs_lease *foreign = NULL;
    CHECK_OK(kvs_arena_acquire(world.arena, POOL, &foreign));
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_EBUSY);
    CHECK(info_of(&world).failed_step == KVS_STEP_COMMIT && info_of(&world).failed_consumer == -1);
    CHECK(info_of(&world).phase == 0 && work_bytes(&world) == 4096);
    char text[400];
    CHECK_OK(kvs_device_last_error(world.device, text, sizeof text));
    CHECK(strstr(text, "region 1") != NULL && strstr(text, "commit") != NULL);
    kvs_lease_release(foreign);
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 1));
    tear_down(&world);
}

static kvs_lease *foreign_lease;

static int take_foreign(void *user, int step, uint32_t phase)
{
    world *world = user;
    (void)phase;
    if (step == KVS_STEP_ACTIVATE) {
        CHECK_OK(kvs_arena_acquire(world->arena, POOL, &foreign_lease));
        return KVS_EIO;
    }
    return KVS_OK;
}

static int do_nothing(void *user, int step, uint32_t phase)
{
    (void)user;
    (void)step;
    (void)phase;
    return KVS_OK;
}

static void foreign_lease_on_the_new_layout_poisons_the_restore(void)
{
    world world;
    set_up(&world);
    const kvs_consumer taker = {
        .struct_size = sizeof taker, .user = &world, .run = take_foreign, .undo = do_nothing};
    CHECK_OK(kvs_coordinator_add_consumer(world.coordinator, &taker));
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 0), KVS_EPOISONED);
    CHECK_U64(info_of(&world).state, KVS_COORDINATOR_POISONED);
    CHECK_STATUS(info_of(&world).failed_status, KVS_EIO);
    CHECK_U64(work_bytes(&world), 4096);
    kvs_lease_release(foreign_lease);
    tear_down(&world);
}

static int commit_foreign(void *user, int step, uint32_t phase)
{
    world *world = user;
    (void)phase;
    if (step == KVS_STEP_DRAIN) {
        kvs_region region = {.struct_size = sizeof region, .id = 40, .size_bytes = 64};
        CHECK_OK(kvs_arena_begin(world->arena, 0));
        CHECK_OK(kvs_arena_reserve(world->arena, &region));
        CHECK_OK(kvs_arena_commit(world->arena));
    }
    return KVS_OK;
}

static void foreign_commit_is_not_overwritten(void)
{
    world world;
    set_up(&world);
    const kvs_consumer committer = {
        .struct_size = sizeof committer, .user = &world, .run = commit_foreign, .undo = do_nothing};
    CHECK_OK(kvs_coordinator_add_consumer(world.coordinator, &committer));
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 0), KVS_ESTALE);
    kvs_region region = {.struct_size = sizeof region};
    CHECK_OK(kvs_arena_find_region(world.arena, 40, &region));
    CHECK_U64(info_of(&world).state, KVS_COORDINATOR_IDLE);
    tear_down(&world);
}

static void cancel_stops_before_the_next_callback_and_undoes(void)
{
    for (int place = 0; place < 8 * N_CONSUMERS - 1; place++) {
        const int step = place / N_CONSUMERS;
        const int consumer = place % N_CONSUMERS;
        if (step == KVS_STEP_COMMIT) {
            continue;
        }
        world world;
        set_up(&world);
        CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
        CHECK_OK(kvs_coordinator_cancel(world.coordinator)); /* outside a move: no effect */
        world.n_trace = 0;
        world.cancel_step = step;
        world.cancel_consumer = consumer;
        CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_ECANCELLED);
        CHECK_U64(world.trace[0], 0);
        CHECK_U64(world.trace[world.n_trace - 1], 1000);
        const kvs_coordinator_info info = info_of(&world);
        const bool is_last = consumer == N_CONSUMERS - 1;
        const int next_step = is_last ? step + 1 : step;
        CHECK_U64(info.failed_step, next_step);
        CHECK(info.failed_consumer == (next_step == KVS_STEP_COMMIT ? -1
                                       : is_last                    ? 0
                                                                    : consumer + 1));
        CHECK(info.phase == 0 && work_bytes(&world) == 4096);
        world.cancel_step = NEVER;
        CHECK_OK(kvs_coordinator_transition(world.coordinator, 1));
        tear_down(&world);
    }
}

static void admitted_work_blocks_moves_and_tickets_are_exact(void)
{
    world world;
    set_up(&world);
    uint64_t ticket = 0;
    uint64_t second = 0;
    CHECK_STATUS(kvs_coordinator_admit(world.coordinator, &ticket), KVS_EINVAL);
    CHECK_STATUS(kvs_coordinator_finish(world.coordinator, 0), KVS_ESTALE);
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
    CHECK_OK(kvs_coordinator_admit(world.coordinator, &ticket));
    CHECK(ticket != 0);
    CHECK_U64(info_of(&world).state, KVS_COORDINATOR_EXECUTING);
    CHECK_STATUS(kvs_coordinator_admit(world.coordinator, &second), KVS_EBUSY);
    world.n_trace = 0;
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_EBUSY);
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 0), KVS_EBUSY);
    CHECK_U64(world.n_trace, 0);
    CHECK_STATUS(kvs_coordinator_finish(world.coordinator, ticket + 1), KVS_ESTALE);
    CHECK_OK(kvs_coordinator_finish(world.coordinator, ticket));
    CHECK_STATUS(kvs_coordinator_finish(world.coordinator, ticket), KVS_ESTALE);
    CHECK_OK(kvs_coordinator_admit(world.coordinator, &second));
    CHECK(second != ticket);
    CHECK_STATUS(kvs_coordinator_finish(world.coordinator, ticket), KVS_ESTALE);
    CHECK_OK(kvs_coordinator_finish(world.coordinator, second));
    tear_down(&world);
}

static void registration_refuses_what_cannot_work(void)
{
    world world;
    set_up(&world);
    kvs_coordinator *coordinator = world.coordinator;
    uint32_t phase = 77;
    CHECK_STATUS(kvs_coordinator_add_phase(coordinator, NULL, 1, &phase), KVS_EINVAL);
    CHECK_STATUS(kvs_coordinator_add_phase(coordinator, prefill, 0, &phase), KVS_EINVAL);
    kvs_phase_region twice[2] = {{.id = 1, .size_bytes = 64}, {.id = 1, .size_bytes = 64}};
    CHECK_STATUS(kvs_coordinator_add_phase(coordinator, twice, 2, &phase), KVS_EINVAL);
    twice[1] = (kvs_phase_region){.id = 2, .size_bytes = 64, .alignment_bytes = 65};
    CHECK_STATUS(kvs_coordinator_add_phase(coordinator, twice, 2, &phase), KVS_EINVAL);
    twice[1] = (kvs_phase_region){.id = 2, .size_bytes = CAPACITY};
    CHECK_STATUS(kvs_coordinator_add_phase(coordinator, twice, 2, &phase), KVS_ENOSPACE);
    char text[200];
    CHECK_OK(kvs_device_last_error(world.device, text, sizeof text));
    CHECK(strstr(text, "8256") != NULL && strstr(text, "8192") != NULL);
    twice[1] = (kvs_phase_region){.id = 2, .size_bytes = UINT64_MAX};
    CHECK_STATUS(kvs_coordinator_add_phase(coordinator, twice, 2, &phase), KVS_ENOSPACE);
    CHECK(phase == 77 && info_of(&world).n_phases == 2);
    kvs_consumer consumer = {.struct_size = sizeof consumer, .run = run};
    CHECK_STATUS(kvs_coordinator_add_consumer(coordinator, &consumer), KVS_EINVAL);
    CHECK_STATUS(kvs_coordinator_add_consumer(coordinator, NULL), KVS_EINVAL);
    CHECK_U64(info_of(&world).n_consumers, N_CONSUMERS);
    tear_down(&world);
}

static void released_or_quiesced_arena_refuses_moves(void)
{
    world world;
    set_up(&world);
    CHECK_OK(kvs_arena_quiesce(world.arena));
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 0), KVS_EBUSY);
    CHECK_OK(kvs_arena_resume(world.arena));
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
    kvs_arena *arena = world.arena;
    kvs_arena_release(arena);
    world.n_trace = 0;
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_ECLOSED);
    CHECK_U64(world.n_trace, 0);
    kvs_coordinator *second = NULL;
    CHECK_STATUS(kvs_coordinator_create(arena, &second), KVS_ECLOSED);
    world.arena = NULL;
    tear_down(&world);
}

/* Tries to take a lease at every callback, and notes at which it was refused. */
static int try_lease(world *world, int place)
{
    kvs_lease *lease = NULL;
    const kvs_status status = kvs_arena_acquire(world->arena, SHARED, &lease);
    CHECK(status == KVS_OK || status == KVS_EBUSY);
    kvs_lease_release(lease);
    if (status == KVS_EBUSY) {
        note(world, place);
    }
    return KVS_OK;
}

static int try_lease_forward(void *user, int step, uint32_t phase)
{
    (void)phase;
    (void)try_lease(user, 2000 + step);
    return step == KVS_STEP_ACTIVATE ? KVS_EIO : KVS_OK;
}

static int try_lease_back(void *user, int step, uint32_t phase)
{
    (void)phase;
    return try_lease(user, 3000 + step);
}

static void nobody_comes_between_a_check_of_leases_and_the_commit(void)
{
    world world;
    set_up(&world);
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
    const kvs_consumer other = {.struct_size = sizeof other,
                                .user = &world,
                                .run = try_lease_forward,
                                .undo = try_lease_back};
    CHECK_OK(kvs_coordinator_add_consumer(world.coordinator, &other));
    world.n_trace = 0;
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 1), KVS_EIO);
    static const int refused[] = {2000 + KVS_STEP_STOP, 2000 + KVS_STEP_DRAIN,
                                  2000 + KVS_STEP_INVALIDATE, 2000 + KVS_STEP_RELEASE,
                                  3000 + KVS_STEP_BIND};
    int at = 0;
    for (int i = 0; i < world.n_trace; i++) {
        if (world.trace[i] >= 2000) {
            CHECK(at < 5 && world.trace[i] == refused[at]);
            at++;
        }
    }
    CHECK_U64(at, 5);
    CHECK_U64(info_of(&world).phase, 0);
    tear_down(&world);
}

static int release_owner(void *user, int step, uint32_t phase)
{
    world *world = user;
    (void)phase;
    if (step == KVS_STEP_PREPARE) {
        kvs_coordinator_release(world->coordinator);
    }
    return KVS_OK;
}

static void release_inside_a_callback_is_survived(void)
{
    world world;
    set_up(&world);
    const kvs_consumer releaser = {
        .struct_size = sizeof releaser, .user = &world, .run = release_owner, .undo = do_nothing};
    CHECK_OK(kvs_coordinator_add_consumer(world.coordinator, &releaser));
    CHECK_OK(kvs_coordinator_transition(world.coordinator, 0));
    world.coordinator = NULL;
    tear_down(&world);
}

static int answer_pending(void *user, int step, uint32_t phase)
{
    (void)user;
    (void)step;
    (void)phase;
    return KVS_PENDING;
}

static void positive_answer_is_a_failure(void)
{
    world world;
    set_up(&world);
    const kvs_consumer late = {
        .struct_size = sizeof late, .run = answer_pending, .undo = do_nothing};
    CHECK_OK(kvs_coordinator_add_consumer(world.coordinator, &late));
    CHECK_STATUS(kvs_coordinator_transition(world.coordinator, 0), KVS_EINVAL);
    CHECK_U64(info_of(&world).failed_consumer, N_CONSUMERS);
    tear_down(&world);
}

int main(void)
{
    steps_run_step_by_step_for_all_in_order();
    failure_at_every_place_restores_the_old_layout();
    failing_undo_at_every_place_poisons_and_rebuild_heals();
    foreign_lease_blocks_the_commit_and_all_is_undone();
    foreign_lease_on_the_new_layout_poisons_the_restore();
    foreign_commit_is_not_overwritten();
    cancel_stops_before_the_next_callback_and_undoes();
    admitted_work_blocks_moves_and_tickets_are_exact();
    registration_refuses_what_cannot_work();
    released_or_quiesced_arena_refuses_moves();
    nobody_comes_between_a_check_of_leases_and_the_commit();
    release_inside_a_callback_is_survived();
    positive_answer_is_a_failure();
    return check_finish();
}
