/* test_phase.c: the coordinator: order of steps, a fault at every place, cancellation, poison, rebuild, admission. */
#include "phase_world.h"

#include <string.h>

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
    cancel_stops_before_the_next_callback_and_undoes();
    admitted_work_blocks_moves_and_tickets_are_exact();
    registration_refuses_what_cannot_work();
    positive_answer_is_a_failure();
    return check_finish();
}
