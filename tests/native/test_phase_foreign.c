/* test_phase_foreign.c: what others do to the arena and the coordinator while a move goes on. */
#include "phase_world.h"

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

int main(void)
{
    foreign_lease_blocks_the_commit_and_all_is_undone();
    foreign_lease_on_the_new_layout_poisons_the_restore();
    foreign_commit_is_not_overwritten();
    released_or_quiesced_arena_refuses_moves();
    nobody_comes_between_a_check_of_leases_and_the_commit();
    release_inside_a_callback_is_survived();
    return check_finish();
}
