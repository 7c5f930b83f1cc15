/* test_threads_arena.c: leases, fences, failures and the hook used by many threads at once. For
 * TSan. */
#include "check.h"
#include "kvstream/phase.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { N_THREADS = 4, ROUNDS = 400, N_REGIONS = 3 };

typedef struct shared {
    kvs_device *device;
    kvs_arena *arena;
    kvs_fence *fence;
    kvs_coordinator *coordinator;
    _Atomic int stop;
    _Atomic uint64_t n_first;
    kvs_lease *leases[N_THREADS];
} shared;

typedef struct worker {
    pthread_t thread;
    shared *shared;
    uint64_t index;
} worker;

static uint64_t live_objects(kvs_device *device)
{
    kvs_device_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_device_get_info(device, &info));
    return info.live_objects;
}

static void commit_regions(kvs_arena *arena, uint32_t n_regions)
{
    CHECK_OK(kvs_arena_begin(arena, 0));
    for (uint32_t i = 0; i < n_regions; i++) {
        kvs_region region = {.struct_size = sizeof region,
                             .id = i,
                             .size_bytes = 256,
                             .flags = KVS_REGION_PERSISTENT};
        CHECK_OK(kvs_arena_reserve(arena, &region));
    }
    CHECK_OK(kvs_arena_commit(arena));
}

static void set_up(shared *shared)
{
    const kvs_device_desc desc = {.struct_size = sizeof desc, .n_threads = 1};
    memset(shared, 0, sizeof *shared);
    CHECK_OK(kvs_device_create(&desc, &shared->device));
    CHECK_OK(kvs_arena_create(shared->device, 4096, 64, &shared->arena));
    commit_regions(shared->arena, N_REGIONS);
}

static void run_workers(shared *shared, void *(*body)(void *), void (*beside)(struct shared *))
{
    worker workers[N_THREADS];
    for (uint64_t i = 0; i < N_THREADS; i++) {
        workers[i] = (worker){.shared = shared, .index = i};
        CHECK(pthread_create(&workers[i].thread, NULL, body, &workers[i]) == 0);
    }
    if (beside != NULL) {
        beside(shared);
    }
    for (uint64_t i = 0; i < N_THREADS; i++) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
}

/* Acquire, use as one's own by index, retire behind a fence of one's own, signal it elsewhere. */
static void *lease_and_retire(void *argument)
{
    worker *worker = argument;
    shared *shared = worker->shared;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        kvs_lease *lease = NULL;
        kvs_fence *fence = NULL;
        const kvs_status status =
            kvs_arena_acquire(shared->arena, (round + worker->index) % N_REGIONS, &lease);
        if (status != KVS_OK) {
            CHECK_STATUS(status, KVS_EBUSY); /* quiesced by the owner of the layout */
            continue;
        }
        kvs_lease_retain(lease);
        kvs_lease_info info = {.struct_size = sizeof info};
        CHECK_OK(kvs_lease_get_info(lease, &info));
        kvs_lease_release(lease);
        if (round % 3 == 0) {
            kvs_lease_release(lease);
            continue;
        }
        CHECK_OK(kvs_fence_create(shared->device, &fence));
        if (round % 3 == 1) {
            CHECK_OK(kvs_fence_signal(fence, KVS_OK));
        }
        CHECK_OK(kvs_lease_retire(lease, fence));
        if (round % 6 == 2) {
            CHECK_OK(kvs_fence_signal(fence, KVS_EIO));
        }
        kvs_fence_release(fence);
    }
    return NULL;
}

static void lay_out_again_and_again(shared *shared)
{
    for (int round = 0; round < ROUNDS; round++) {
        kvs_arena_info info = {.struct_size = sizeof info};
        CHECK_OK(kvs_arena_get_info(shared->arena, &info));
        CHECK_OK(kvs_arena_begin(shared->arena, KVS_BEGIN_KEEP_PERSISTENT));
        if (round % 2 == 0) {
            kvs_region region = {.struct_size = sizeof region, .id = 50, .size_bytes = 64};
            CHECK_OK(kvs_arena_reserve(shared->arena, &region));
        }
        CHECK_OK(kvs_arena_commit(shared->arena));
        CHECK_OK(kvs_arena_check_integrity(shared->arena));
        if (round % 16 == 0) {
            CHECK_OK(kvs_arena_quiesce(shared->arena));
            CHECK_OK(kvs_arena_resume(shared->arena));
        }
    }
}

static void leases_come_and_go_while_the_layout_changes(void)
{
    shared shared;
    set_up(&shared);
    run_workers(&shared, lease_and_retire, lay_out_again_and_again);
    kvs_arena_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_arena_get_info(shared.arena, &info));
    CHECK(info.n_leases == 0 && info.n_draining == 0);
    kvs_arena_release(shared.arena);
    CHECK_U64(live_objects(shared.device), 0);
    kvs_device_release(shared.device);
}

static void *wait_for_fence(void *argument)
{
    worker *worker = argument;
    CHECK_STATUS(kvs_fence_wait(worker->shared->fence, UINT64_MAX), KVS_ENUMERIC);
    CHECK_STATUS(kvs_fence_query(worker->shared->fence), KVS_ENUMERIC);
    return NULL;
}

static void signal_fence(shared *shared)
{
    CHECK_OK(kvs_fence_signal(shared->fence, KVS_ENUMERIC));
}

static void one_signal_wakes_every_waiter(void)
{
    shared shared;
    set_up(&shared);
    for (int round = 0; round < 20; round++) {
        CHECK_OK(kvs_fence_create(shared.device, &shared.fence));
        run_workers(&shared, wait_for_fence, signal_fence);
        kvs_fence_release(shared.fence);
    }
    kvs_arena_release(shared.arena);
    kvs_device_release(shared.device);
}

static void *signal_if_first(void *argument)
{
    worker *worker = argument;
    const kvs_status status = kvs_fence_signal(worker->shared->fence, KVS_OK);
    CHECK(status == KVS_OK || status == KVS_EINVAL);
    if (status == KVS_OK) {
        atomic_fetch_add(&worker->shared->n_first, 1);
    }
    return NULL;
}

static void of_many_signals_one_counts(void)
{
    shared shared;
    set_up(&shared);
    for (int round = 0; round < 20; round++) {
        kvs_lease *lease = NULL;
        CHECK_OK(kvs_arena_acquire(shared.arena, 1, &lease));
        CHECK_OK(kvs_fence_create(shared.device, &shared.fence));
        CHECK_OK(kvs_lease_retire(lease, shared.fence));
        atomic_store(&shared.n_first, 0);
        run_workers(&shared, signal_if_first, NULL);
        CHECK_U64(atomic_load(&shared.n_first), 1);
        kvs_fence_release(shared.fence);
    }
    kvs_arena_release(shared.arena);
    CHECK_U64(live_objects(shared.device), 0);
    kvs_device_release(shared.device);
}

static void *fail_and_read_back(void *argument)
{
    worker *worker = argument;
    char text[400];
    char number[32];
    CHECK_OK(kvs_device_last_error(worker->shared->device, text, sizeof text));
    CHECK(text[0] == '\0');
    for (uint64_t round = 0; round < ROUNDS; round++) {
        const uint64_t id = 1000 + worker->index * ROUNDS + round;
        kvs_lease *lease = NULL;
        CHECK_STATUS(kvs_arena_acquire(worker->shared->arena, id, &lease), KVS_ENOTFOUND);
        CHECK_OK(kvs_device_last_error(worker->shared->device, text, sizeof text));
        (void)snprintf(number, sizeof number, "%" PRIu64, id);
        CHECK(strstr(text, number) != NULL);
    }
    return NULL;
}

static void each_thread_reads_its_own_failure(void)
{
    shared shared;
    set_up(&shared);
    for (int round = 0; round < 12; round++) { /* more threads than the table has rows */
        run_workers(&shared, fail_and_read_back, NULL);
    }
    kvs_arena_release(shared.arena);
    kvs_device_release(shared.device);
}

static int count_calls(void *user, int point, uint64_t index)
{
    _Atomic uint64_t *calls = user;
    (void)point;
    (void)index;
    atomic_fetch_add(calls, 1);
    return 0;
}

static void change_hooks(shared *shared)
{
    for (int round = 0; round < ROUNDS; round++) {
        /* A hook's user may go away as soon as it is replaced. */
        _Atomic uint64_t *calls = calloc(1, sizeof *calls);
        CHECK(calls != NULL);
        CHECK_OK(kvs_device_set_hook(shared->device, count_calls, calls));
        CHECK_OK(kvs_device_set_hook(shared->device, NULL, NULL));
        free(calls);
    }
}

static void hook_is_replaced_while_threads_call_it(void)
{
    shared shared;
    set_up(&shared);
    run_workers(&shared, lease_and_retire, change_hooks);
    kvs_arena_release(shared.arena);
    CHECK_U64(live_objects(shared.device), 0);
    kvs_device_release(shared.device);
}

/* Lingers in the hook: nobody may learn that it was removed before it has returned. */
static int linger(void *user, int point, uint64_t index)
{
    shared *shared = user;
    (void)point;
    (void)index;
    atomic_store(&shared->n_first, 1);
    for (int i = 0; i < 2000; i++) {
        (void)sched_yield();
        CHECK(atomic_load(&shared->stop) == 0);
    }
    return 0;
}

static void *remove_hook(void *argument)
{
    worker *worker = argument;
    if (worker->index == 0) {
        while (atomic_load(&worker->shared->n_first) == 0) {
            (void)sched_yield();
        }
        CHECK_OK(kvs_device_set_hook(worker->shared->device, NULL, NULL));
        atomic_store(&worker->shared->stop, 1);
    }
    return NULL;
}

static void call_hook(shared *shared)
{
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_fence_create(shared->device, &fence));
    kvs_fence_release(fence);
}

static void removed_hook_has_returned(void)
{
    shared shared;
    set_up(&shared);
    CHECK_OK(kvs_device_set_hook(shared.device, linger, &shared));
    run_workers(&shared, remove_hook, call_hook);
    CHECK_U64(atomic_load(&shared.stop), 1);
    kvs_arena_release(shared.arena);
    kvs_device_release(shared.device);
}

/* The owner lets go first; whoever is last, on whatever thread, takes everything down. */
static void *drop_last_lease(void *argument)
{
    worker *worker = argument;
    kvs_lease_release(worker->shared->leases[worker->index]);
    return NULL;
}

static void last_release_may_come_from_any_thread(void)
{
    for (int round = 0; round < 50; round++) {
        shared shared;
        set_up(&shared);
        for (int i = 0; i < N_THREADS; i++) {
            CHECK_OK(kvs_arena_acquire(shared.arena, 0, &shared.leases[i]));
        }
        kvs_arena_release(shared.arena);
        kvs_device_release(shared.device);
        run_workers(&shared, drop_last_lease, NULL);
    }
}

static int do_nothing(void *user, int step, uint32_t phase)
{
    (void)user;
    (void)step;
    (void)phase;
    return KVS_OK;
}

static void *cancel_and_look(void *argument)
{
    worker *worker = argument;
    while (!atomic_load(&worker->shared->stop)) {
        kvs_coordinator_info info = {.struct_size = sizeof info};
        CHECK_OK(kvs_coordinator_cancel(worker->shared->coordinator));
        CHECK_OK(kvs_coordinator_get_info(worker->shared->coordinator, &info));
        if (info.state == KVS_COORDINATOR_POISONED) {
            CHECK(false);
            break;
        }
    }
    return NULL;
}

static void move_to_and_fro(shared *shared)
{
    uint32_t phase = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const kvs_status status = kvs_coordinator_transition(shared->coordinator, phase);
        CHECK(status == KVS_OK || status == KVS_ECANCELLED);
        if (status == KVS_OK) {
            phase = 1 - phase;
        }
        CHECK_OK(kvs_coordinator_check_integrity(shared->coordinator));
    }
    atomic_store(&shared->stop, 1);
}

static void transitions_are_cancelled_from_other_threads(void)
{
    shared shared;
    set_up(&shared);
    CHECK_OK(kvs_coordinator_create(shared.arena, &shared.coordinator));
    const kvs_consumer consumer = {
        .struct_size = sizeof consumer, .run = do_nothing, .undo = do_nothing};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(kvs_coordinator_add_consumer(shared.coordinator, &consumer));
    }
    for (uint64_t size = 256; size <= 512; size += 256) {
        const kvs_phase_region region = {.id = 1, .size_bytes = size};
        uint32_t phase;
        CHECK_OK(kvs_coordinator_add_phase(shared.coordinator, &region, 1, &phase));
    }
    run_workers(&shared, cancel_and_look, move_to_and_fro);
    kvs_coordinator_release(shared.coordinator);
    kvs_arena_release(shared.arena);
    CHECK_U64(live_objects(shared.device), 0);
    kvs_device_release(shared.device);
}

int main(void)
{
    leases_come_and_go_while_the_layout_changes();
    one_signal_wakes_every_waiter();
    of_many_signals_one_counts();
    each_thread_reads_its_own_failure();
    hook_is_replaced_while_threads_call_it();
    removed_hook_has_returned();
    last_release_may_come_from_any_thread();
    transitions_are_cancelled_from_other_threads();
    return check_finish();
}
