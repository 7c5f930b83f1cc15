/* test_lease.c: claims on leases, fences that end them, release in any order. */
#include "arena_scene.h"

#include <string.h>

static void claims_on_a_lease_count_once(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *lease = NULL;
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 1, &lease));
    CHECK_OK(kvs_fence_create(device, &fence));
    kvs_lease_retain(lease);
    CHECK_U64(info_of(arena).n_leases, 1);
    CHECK_STATUS(kvs_lease_retire(lease, fence), KVS_EBUSY); /* nothing consumed */
    CHECK_STATUS(kvs_lease_retire(lease, NULL), KVS_EINVAL);
    kvs_lease_release(lease);
    CHECK_U64(info_of(arena).n_leases, 1);
    CHECK_OK(kvs_lease_retire(lease, fence));
    CHECK(info_of(arena).n_leases == 0 && info_of(arena).n_draining == 1);
    CHECK_OK(kvs_fence_signal(fence, KVS_OK));
    CHECK(info_of(arena).n_leases == 0 && info_of(arena).n_draining == 0);
    kvs_fence_release(fence);
    kvs_lease_release(NULL);
    kvs_arena_release(arena);
    CHECK_U64(device_info(device).live_objects, 0);
    kvs_device_release(device);
}

static void draining_region_blocks_the_commit_until_the_fence(int completion)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *lease = NULL;
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 2, &lease));
    CHECK_OK(kvs_fence_create(device, &fence));
    CHECK_OK(kvs_lease_retire(lease, fence));
    CHECK_OK(kvs_arena_quiesce(arena));
    CHECK_U64(info_of(arena).state, KVS_ARENA_DRAINING);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_STATUS(kvs_arena_commit(arena), KVS_EBUSY);
    CHECK_OK(kvs_fence_signal(fence, completion));
    kvs_fence_release(fence);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_U64(info_of(arena).state, KVS_ARENA_QUIESCENT);
    kvs_arena_release(arena);
    CHECK_U64(device_info(device).live_objects, 0);
    kvs_device_release(device);
}

static void retire_behind_a_completed_or_abandoned_fence_ends_at_once(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *done = NULL;
    kvs_lease *orphan = NULL;
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 2, &done));
    CHECK_OK(kvs_arena_acquire(arena, 1, &orphan));
    CHECK_OK(kvs_fence_create(device, &fence));
    CHECK_OK(kvs_fence_signal(fence, KVS_OK));
    CHECK_OK(kvs_lease_retire(done, fence));
    kvs_fence_release(fence);
    CHECK(info_of(arena).n_leases == 1 && info_of(arena).n_draining == 0);
    CHECK_OK(kvs_fence_create(device, &fence));
    CHECK_OK(kvs_lease_retire(orphan, fence));
    CHECK_U64(info_of(arena).n_draining, 1);
    kvs_fence_release(fence); /* nobody is left to signal it */
    CHECK_U64(info_of(arena).n_draining, 0);
    kvs_arena_release(arena);
    CHECK_U64(device_info(device).live_objects, 0);
    kvs_device_release(device);
}

typedef struct peeker {
    kvs_fence_waiter waiter; /* first: the address is that of the peeker */
    kvs_arena *arena;
    uint32_t n_draining;
} peeker;

static void peek(kvs_fence_waiter *waiter)
{
    peeker *peeker = (struct peeker *)(void *)waiter;
    peeker->n_draining = info_of(peeker->arena).n_draining;
}

/* The fence is complete, its lease has not been told yet: whoever asks now must see the region
 * free. */
static void lease_collected_before_its_fence_tells_it_ends_once(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *lease = NULL;
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 2, &lease));
    CHECK_OK(kvs_fence_create(device, &fence));
    CHECK_OK(kvs_lease_retire(lease, fence));
    peeker peeker = {.waiter.completed = peek, .arena = arena, .n_draining = 77};
    CHECK(kvs_fence_add_waiter(fence, &peeker.waiter)); /* the newest waiter is told first */
    CHECK_OK(kvs_fence_signal(fence, KVS_OK));
    CHECK_U64(peeker.n_draining, 0);
    CHECK_U64(info_of(arena).n_draining, 0);
    kvs_fence_release(fence);
    kvs_arena_release(arena);
    CHECK_U64(device_info(device).live_objects, 0);
    kvs_device_release(device);
}

static void released_arena_lives_until_its_last_lease(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *first = NULL;
    kvs_lease *second = NULL;
    kvs_lease *refused = NULL;
    kvs_fence *fence = NULL;
    CHECK_OK(kvs_fence_create(device, &fence));
    CHECK_OK(kvs_arena_acquire(arena, 1, &first));
    CHECK_OK(kvs_arena_acquire(arena, 2, &second));
    CHECK_OK(kvs_arena_begin(arena, 0));
    kvs_arena_release(arena);
    CHECK_U64(info_of(arena).state, KVS_ARENA_ZOMBIE);
    CHECK_STATUS(kvs_arena_acquire(arena, 1, &refused), KVS_ECLOSED);
    CHECK_STATUS(kvs_arena_begin(arena, 0), KVS_ECLOSED);
    CHECK_STATUS(kvs_arena_commit(arena),
                 KVS_EINVAL); /* the open transaction went with the owner */
    CHECK_STATUS(kvs_arena_quiesce(arena), KVS_ECLOSED);
    CHECK_STATUS(kvs_arena_resume(arena), KVS_ECLOSED);
    kvs_lease_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_lease_get_info(first, &info));
    memset((void *)(uintptr_t)info.address, 1, (size_t)info.size_bytes);
    kvs_lease_release(first);
    CHECK_U64(device_info(device).device_bytes, CAPACITY);
    CHECK_OK(kvs_lease_retire(second, fence));
    CHECK_U64(device_info(device).device_bytes, CAPACITY); /* the fence still protects it */
    kvs_device_release(device);
    CHECK_OK(kvs_fence_signal(fence, KVS_OK));
    CHECK_U64(device_info(device).device_bytes, 0);
    CHECK_U64(device_info(device).live_objects, 1);
    kvs_fence_release(fence);
}

int main(void)
{
    claims_on_a_lease_count_once();
    draining_region_blocks_the_commit_until_the_fence(KVS_OK);
    draining_region_blocks_the_commit_until_the_fence(KVS_EIO);
    retire_behind_a_completed_or_abandoned_fence_ends_at_once();
    lease_collected_before_its_fence_tells_it_ends_once();
    released_arena_lives_until_its_last_lease();
    return check_finish();
}
