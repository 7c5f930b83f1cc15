/* test_arena.c: layout transactions, leases, fences, states, release in any order; then random
 * scripts against a plain model.
 */
#include "check.h"
#include "core/arena.h"

#include <string.h>

enum { CAPACITY = 4096, ALIGNMENT = 64 };

static kvs_device *make_device(void)
{
    const kvs_device_desc desc = {.struct_size = sizeof desc, .n_threads = 1};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    return device;
}

static kvs_device_info device_info(kvs_device *device)
{
    kvs_device_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_device_get_info(device, &info));
    return info;
}

static kvs_arena *make_arena(kvs_device *device)
{
    kvs_arena *arena = NULL;
    CHECK_OK(kvs_arena_create(device, CAPACITY, ALIGNMENT, &arena));
    return arena;
}

static kvs_arena_info info_of(kvs_arena *arena)
{
    kvs_arena_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_arena_get_info(arena, &info));
    CHECK_OK(kvs_arena_check_integrity(arena));
    return info;
}

static kvs_region region(uint64_t id, uint64_t size_bytes, uint32_t flags)
{
    return (kvs_region){
        .struct_size = sizeof(kvs_region), .id = id, .size_bytes = size_bytes, .flags = flags};
}

static kvs_region region_at(uint64_t id, uint64_t offset_bytes, uint64_t size_bytes, uint32_t flags)
{
    kvs_region made = region(id, size_bytes, flags);
    made.offset_bytes = offset_bytes;
    return made;
}

/* A layout of a persistent region 1 of 1,024 bytes and a plain region 2 of 512 bytes. */
static void commit_two(kvs_arena *arena)
{
    kvs_region one = region(1, 1024, KVS_REGION_PERSISTENT);
    kvs_region two = region(2, 512, 0);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &one));
    CHECK_OK(kvs_arena_reserve(arena, &two));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK(one.offset_bytes == 0 && two.offset_bytes == 1024);
}

static void arena_refuses_bad_shapes(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = NULL;
    CHECK_STATUS(kvs_arena_create(device, 0, 64, &arena), KVS_EINVAL);
    CHECK_STATUS(kvs_arena_create(device, 4096, 32, &arena), KVS_EINVAL);
    CHECK_STATUS(kvs_arena_create(device, 4096, 96, &arena), KVS_EINVAL);
    CHECK_STATUS(kvs_arena_create(NULL, 4096, 64, &arena), KVS_EINVAL);
    kvs_buffer *buffer = NULL;
    kvs_buffer *view = NULL;
    CHECK_OK(kvs_buffer_create(device, 4096, 4096, &buffer));
    CHECK_OK(kvs_buffer_view(buffer, 64, 1024, &view));
    CHECK_STATUS(kvs_arena_create_over(view, 128, &arena), KVS_EINVAL);
    CHECK(arena == NULL);
    CHECK_OK(kvs_arena_create_over(view, 64, &arena));
    kvs_buffer_release(view);
    kvs_buffer_release(buffer);
    CHECK_U64(info_of(arena).capacity_bytes, 1024);
    CHECK_U64(device_info(device).device_bytes, 4096);
    kvs_arena_release(arena);
    CHECK_U64(device_info(device).device_bytes, 0);
    CHECK_U64(device_info(device).live_objects, 0);
    kvs_device_release(device);
}

static void reserve_is_first_fit_and_refuses_by_name(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    kvs_region any = region(9, 64, 0);
    CHECK_STATUS(kvs_arena_reserve(arena, &any), KVS_EINVAL);
    CHECK_STATUS(kvs_arena_begin(arena, 2), KVS_EINVAL);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_STATUS(kvs_arena_begin(arena, 0), KVS_EBUSY);

    kvs_region low = region_at(1, 0, 100, 0);
    kvs_region high = region_at(2, 1024, 1024, 0);
    CHECK_OK(kvs_arena_reserve_at(arena, &low));
    CHECK_OK(kvs_arena_reserve_at(arena, &high));
    kvs_region bad = region_at(3, 1000, 8, 0);
    CHECK_STATUS(kvs_arena_reserve_at(arena, &bad), KVS_EINVAL); /* misaligned */
    bad = region_at(3, 64, 64, 0);
    CHECK_STATUS(kvs_arena_reserve_at(arena, &bad), KVS_EBUSY); /* overlaps low */
    bad = region_at(3, 960, 65, 0);
    CHECK_STATUS(kvs_arena_reserve_at(arena, &bad), KVS_EBUSY); /* overlaps high */
    bad = region_at(3, 4096, 1, 0);
    CHECK_STATUS(kvs_arena_reserve_at(arena, &bad), KVS_ENOSPACE);
    bad = region_at(3, UINT64_MAX - 63, 128, 0);
    CHECK_STATUS(kvs_arena_reserve_at(arena, &bad), KVS_ENOSPACE);
    bad = region(3, 0, 0);
    CHECK_STATUS(kvs_arena_reserve(arena, &bad), KVS_EINVAL);
    bad = region(3, 64, 4);
    CHECK_STATUS(kvs_arena_reserve(arena, &bad), KVS_EINVAL);
    bad = region(1, 64, 0);
    CHECK_STATUS(kvs_arena_reserve(arena, &bad), KVS_EINVAL); /* duplicate */
    bad = region(3, 64, 0);
    bad.alignment_bytes = 96;
    CHECK_STATUS(kvs_arena_reserve(arena, &bad), KVS_EINVAL);
    bad.alignment_bytes = (uint64_t)1 << 63;
    CHECK_STATUS(kvs_arena_reserve(arena, &bad), KVS_ENOSPACE);
    bad = region(3, UINT64_MAX, 0);
    CHECK_STATUS(kvs_arena_reserve(arena, &bad), KVS_ENOSPACE);
    char text[200];
    CHECK_OK(kvs_device_last_error(device, text, sizeof text));
    CHECK(strstr(text, "18446744073709551615") != NULL && strstr(text, "2048") != NULL);

    kvs_region hole = region(3, 896, 0);
    CHECK_OK(kvs_arena_reserve(arena, &hole));
    CHECK_U64(hole.offset_bytes, 128); /* between low and high, behind the padding */
    kvs_region wide = region(4, 64, 0);
    wide.alignment_bytes = 512;
    CHECK_OK(kvs_arena_reserve(arena, &wide));
    CHECK(wide.offset_bytes == 2048 && wide.alignment_bytes == 512);
    kvs_region last = region(5, 64, 0);
    CHECK_OK(kvs_arena_reserve(arena, &last));
    CHECK(last.offset_bytes == 2112 && last.alignment_bytes == 64);
    CHECK_U64(info_of(arena).n_regions, 0); /* nothing shows before the commit */
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_STATUS(kvs_arena_commit(arena), KVS_EINVAL);
    CHECK_STATUS(kvs_arena_abort(arena), KVS_EINVAL);

    const kvs_arena_info info = info_of(arena);
    CHECK(info.n_regions == 5 && info.epoch == 1);
    CHECK_U64(info.used_bytes, 100 + 1024 + 896 + 64 + 64);
    CHECK_U64(info.high_water_bytes, 2176);
    kvs_region found = {.struct_size = sizeof found};
    static const uint64_t order[] = {1, 3, 2, 4, 5};
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_OK(kvs_arena_region_at(arena, i, &found));
        CHECK_U64(found.id, order[i]);
    }
    CHECK_STATUS(kvs_arena_region_at(arena, 5, &found), KVS_ENOTFOUND);
    CHECK_STATUS(kvs_arena_find_region(arena, 77, &found), KVS_ENOTFOUND);
    CHECK_OK(kvs_arena_find_region(arena, 4, &found));
    CHECK(found.offset_bytes == 2048 && found.alignment_bytes == 512);
    found.struct_size = 4;
    CHECK_STATUS(kvs_arena_find_region(arena, 4, &found), KVS_EINVAL);
    kvs_arena_release(arena);
    kvs_device_release(device);
}

static void epoch_rises_only_when_a_place_changes(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_U64(info_of(arena).epoch, 0);
    commit_two(arena);
    CHECK_U64(info_of(arena).epoch, 1);
    commit_two(arena);
    CHECK_U64(info_of(arena).epoch, 1);
    CHECK_OK(kvs_arena_begin(arena, KVS_BEGIN_KEEP_PERSISTENT));
    CHECK_OK(kvs_arena_abort(arena));
    CHECK_U64(info_of(arena).epoch, 1);
    CHECK_U64(info_of(arena).n_regions, 2);
    CHECK_OK(kvs_arena_begin(arena, KVS_BEGIN_KEEP_PERSISTENT));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_U64(info_of(arena).epoch, 2); /* region 2 was dropped */
    CHECK_U64(info_of(arena).n_regions, 1);
    arena->epoch = UINT64_MAX;
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_STATUS(kvs_arena_commit(arena), KVS_EOVERFLOW);
    CHECK_U64(info_of(arena).n_regions, 1);
    CHECK(info_of(arena).is_building == 0);
    kvs_arena_release(arena);
    kvs_device_release(device);
}

static void commit_refuses_to_touch_leased_regions(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *one = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 1, &one));
    const kvs_region tries[] = {
        region_at(1, 2048, 1024, KVS_REGION_PERSISTENT), /* moved */
        region_at(1, 0, 512, KVS_REGION_PERSISTENT), /* resized */
        region_at(1, 0, 1024, 0), /* not persistent */
        region_at(7, 0, 1024, KVS_REGION_PERSISTENT), /* missing */
    };
    for (size_t i = 0; i < sizeof tries / sizeof tries[0]; i++) {
        kvs_region staged = tries[i];
        CHECK_OK(kvs_arena_begin(arena, 0));
        CHECK_OK(kvs_arena_reserve_at(arena, &staged));
        CHECK_STATUS(kvs_arena_commit(arena), KVS_EBUSY);
        CHECK(info_of(arena).is_building == 0 && info_of(arena).epoch == 1);
        CHECK_U64(info_of(arena).n_regions, 2);
    }
    CHECK_OK(kvs_arena_begin(arena, KVS_BEGIN_KEEP_PERSISTENT));
    CHECK_OK(kvs_arena_commit(arena));
    kvs_lease_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_lease_get_info(one, &info));
    CHECK(info.epoch == 1 &&
          info_of(arena).epoch == 2); /* kept over a commit that dropped another */
    CHECK_U64(info_of(arena).n_leases, 1);
    kvs_lease_release(one);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_U64(info_of(arena).n_regions, 0);

    commit_two(arena);
    kvs_lease *plain = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 2, &plain));
    kvs_region first = region(1, 1024, KVS_REGION_PERSISTENT);
    kvs_region same = region(2, 512, KVS_REGION_PERSISTENT);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &first));
    CHECK_OK(kvs_arena_reserve(arena, &same));
    CHECK_STATUS(kvs_arena_commit(arena), KVS_EBUSY); /* it was not persistent when it was leased */
    kvs_lease_release(plain);
    kvs_arena_release(arena);
    CHECK_U64(device_info(device).live_objects, 0);
    kvs_device_release(device);
}

static int fail(void *user, int point, uint64_t index)
{
    (void)user;
    (void)index;
    return point == KVS_HOOK_ALLOC ? KVS_ENOMEM : 0;
}

static void failed_allocation_leaves_the_old_layout(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *lease = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 1, &lease));
    CHECK_OK(kvs_arena_begin(arena, KVS_BEGIN_KEEP_PERSISTENT));
    for (uint64_t id = 10; id < 17; id++) {
        kvs_region more = region(id, 64, 0);
        CHECK_OK(kvs_arena_reserve(arena, &more));
    }
    /* The array of staged regions is full: the next one needs memory. */
    CHECK_OK(kvs_device_set_hook(device, fail, NULL));
    kvs_region more = region(17, 64, 0);
    CHECK_STATUS(kvs_arena_reserve(arena, &more), KVS_ENOMEM);
    kvs_lease *none = NULL;
    CHECK_STATUS(kvs_arena_acquire(arena, 1, &none), KVS_ENOMEM);
    CHECK(none == NULL);
    CHECK_U64(info_of(arena).n_regions, 2);
    CHECK_OK(kvs_device_set_hook(device, NULL, NULL));
    CHECK_OK(kvs_arena_reserve(arena, &more));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_U64(info_of(arena).n_regions, 9);
    CHECK_U64(info_of(arena).n_leases, 1);
    kvs_lease_release(lease);
    kvs_arena_release(arena);
    kvs_device_release(device);
}

static void quiesced_arena_refuses_leases_and_reports_its_state(void)
{
    kvs_device *device = make_device();
    kvs_arena *arena = make_arena(device);
    commit_two(arena);
    kvs_lease *lease = NULL;
    kvs_lease *refused = NULL;
    CHECK_STATUS(kvs_arena_acquire(arena, 3, &lease), KVS_ENOTFOUND);
    CHECK_OK(kvs_arena_acquire(arena, 2, &lease));
    CHECK_U64(info_of(arena).state, KVS_ARENA_OPEN);
    CHECK_OK(kvs_arena_quiesce(arena));
    CHECK_U64(info_of(arena).state, KVS_ARENA_DRAINING);
    CHECK_STATUS(kvs_arena_acquire(arena, 2, &refused), KVS_EBUSY);
    CHECK(refused == NULL);
    kvs_lease_release(lease);
    CHECK_U64(info_of(arena).state, KVS_ARENA_QUIESCENT);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_STATUS(kvs_arena_resume(arena), KVS_EBUSY);
    CHECK_OK(kvs_arena_abort(arena));
    CHECK_OK(kvs_arena_resume(arena));
    CHECK_U64(info_of(arena).state, KVS_ARENA_OPEN);
    kvs_arena_release(arena);
    kvs_device_release(device);
}

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

/* A model of one region, and a script of random calls. */
enum { N_IDS = 6, MAX_LEASES = 24, STEPS = 4000 };

typedef struct model_region {
    bool is_there;
    kvs_region region;
    uint32_t n_leases;
} model_region;

typedef struct script {
    uint64_t random;
    kvs_arena *arena;
    kvs_fence *fence;
    model_region committed[N_IDS];
    model_region staged[N_IDS];
    bool is_building;
    bool is_quiesced;
    uint64_t epoch;
    kvs_lease *leases[MAX_LEASES];
    uint64_t lease_ids[MAX_LEASES];
    uint64_t draining[N_IDS];
} script;

static uint64_t draw(script *script, uint64_t below)
{
    script->random ^= script->random << 13;
    script->random ^= script->random >> 7;
    script->random ^= script->random << 17;
    return script->random % below;
}

static bool model_overlaps(const model_region *regions, uint64_t offset, uint64_t size)
{
    for (size_t i = 0; i < N_IDS; i++) {
        const kvs_region *other = &regions[i].region;
        if (regions[i].is_there && offset < other->offset_bytes + other->size_bytes &&
            other->offset_bytes < offset + size) {
            return true;
        }
    }
    return false;
}

static void script_reserve(script *script)
{
    const uint64_t id = draw(script, N_IDS);
    kvs_region made = region(id, 1 + draw(script, 1500), (uint32_t)draw(script, 2));
    made.alignment_bytes = (uint64_t)64 << draw(script, 3);
    uint64_t offset = 0;
    while (offset + made.size_bytes <= CAPACITY &&
           model_overlaps(script->staged, offset, made.size_bytes)) {
        offset += made.alignment_bytes;
    }
    const bool fits = offset + made.size_bytes <= CAPACITY;
    const kvs_status expected = !script->is_building || script->staged[id].is_there ? KVS_EINVAL
                                : fits                                              ? KVS_OK
                                                                                    : KVS_ENOSPACE;
    CHECK_STATUS(kvs_arena_reserve(script->arena, &made), expected);
    if (expected == KVS_OK) {
        CHECK_U64(made.offset_bytes, offset);
        script->staged[id] = (model_region){.is_there = true, .region = made};
    }
}

static void script_begin(script *script)
{
    const uint32_t flags = (uint32_t)draw(script, 2);
    CHECK_STATUS(kvs_arena_begin(script->arena, flags), script->is_building ? KVS_EBUSY : KVS_OK);
    if (script->is_building) {
        return;
    }
    script->is_building = true;
    memset(script->staged, 0, sizeof script->staged);
    for (size_t i = 0; flags != 0 && i < N_IDS; i++) {
        if (script->committed[i].is_there && script->committed[i].region.flags != 0) {
            script->staged[i] = script->committed[i];
            script->staged[i].n_leases = 0;
        }
    }
}

static void script_commit(script *script)
{
    bool changes = false;
    bool refused = false;
    for (size_t i = 0; i < N_IDS; i++) {
        const model_region *old = &script->committed[i];
        const model_region *new = &script->staged[i];
        const bool same =
            old->is_there == new->is_there &&
            (!old->is_there || (old->region.offset_bytes == new->region.offset_bytes &&
                                old->region.size_bytes == new->region.size_bytes));
        changes = changes || !same;
        const bool is_kept = same && old->region.flags != 0 && new->region.flags != 0;
        refused = refused || (old->n_leases + script->draining[i] != 0 && !is_kept);
    }
    const kvs_status expected = !script->is_building ? KVS_EINVAL : refused ? KVS_EBUSY : KVS_OK;
    CHECK_STATUS(kvs_arena_commit(script->arena), expected);
    if (expected == KVS_OK) {
        for (size_t i = 0; i < N_IDS; i++) {
            const uint32_t n_leases = script->committed[i].n_leases;
            script->committed[i] = script->staged[i];
            script->committed[i].n_leases = n_leases;
        }
        script->epoch += changes ? 1 : 0;
    }
    script->is_building = false;
}

static void script_acquire(script *script)
{
    const uint64_t id = draw(script, N_IDS);
    const uint64_t slot = draw(script, MAX_LEASES);
    if (script->leases[slot] != NULL) {
        return;
    }
    const kvs_status expected = script->is_quiesced               ? KVS_EBUSY
                                : !script->committed[id].is_there ? KVS_ENOTFOUND
                                                                  : KVS_OK;
    CHECK_STATUS(kvs_arena_acquire(script->arena, id, &script->leases[slot]), expected);
    if (expected == KVS_OK) {
        script->lease_ids[slot] = id;
        script->committed[id].n_leases++;
    }
}

static void script_end_lease(script *script, bool retires)
{
    const uint64_t slot = draw(script, MAX_LEASES);
    if (script->leases[slot] == NULL) {
        return;
    }
    const uint64_t id = script->lease_ids[slot];
    if (retires) {
        CHECK_OK(kvs_lease_retire(script->leases[slot], script->fence));
        script->draining[id]++;
    } else {
        kvs_lease_release(script->leases[slot]);
    }
    script->leases[slot] = NULL;
    script->committed[id].n_leases--;
}

static void script_signal(script *script, kvs_device *device)
{
    CHECK_OK(kvs_fence_signal(script->fence, KVS_OK));
    kvs_fence_release(script->fence);
    CHECK_OK(kvs_fence_create(device, &script->fence));
    memset(script->draining, 0, sizeof script->draining);
}

static void script_compare(script *script)
{
    const kvs_arena_info info = info_of(script->arena);
    uint64_t n_leases = 0;
    uint64_t n_draining = 0;
    uint64_t n_regions = 0;
    for (uint64_t i = 0; i < N_IDS; i++) {
        n_leases += script->committed[i].n_leases;
        n_draining += script->draining[i];
        n_regions += script->committed[i].is_there ? 1 : 0;
    }
    CHECK_U64(info.n_leases, n_leases);
    CHECK_U64(info.n_draining, n_draining);
    CHECK_U64(info.n_regions, n_regions);
    CHECK_U64(info.epoch, script->epoch);
    CHECK_U64(info.is_building, script->is_building ? 1 : 0);
}

static void random_scripts_follow_the_model(uint64_t seed)
{
    kvs_device *device = make_device();
    script script = {.random = seed, .arena = make_arena(device)};
    CHECK_OK(kvs_fence_create(device, &script.fence));
    for (int step = 0; step < STEPS; step++) {
        switch (draw(&script, 12)) {
        case 0:
            script_begin(&script);
            break;
        case 1:
        case 2:
        case 3:
            script_reserve(&script);
            break;
        case 4:
            script_commit(&script);
            break;
        case 5:
            if (draw(&script, 4) == 0) {
                CHECK_STATUS(kvs_arena_abort(script.arena),
                             script.is_building ? KVS_OK : KVS_EINVAL);
                script.is_building = false;
            }
            break;
        case 6:
        case 7:
            script_acquire(&script);
            break;
        case 8:
        case 9:
            script_end_lease(&script, false);
            break;
        case 10:
            script_end_lease(&script, true);
            break;
        default:
            if (draw(&script, 3) == 0) {
                script_signal(&script, device);
            } else if (script.is_quiesced) {
                const bool resumes = !script.is_building;
                CHECK_STATUS(kvs_arena_resume(script.arena), resumes ? KVS_OK : KVS_EBUSY);
                script.is_quiesced = !resumes;
            } else {
                CHECK_OK(kvs_arena_quiesce(script.arena));
                script.is_quiesced = true;
            }
        }
        script_compare(&script);
    }
    kvs_arena_release(script.arena);
    for (size_t i = 0; i < MAX_LEASES; i++) {
        kvs_lease_release(script.leases[i]);
    }
    kvs_fence_release(script.fence);
    CHECK_U64(device_info(device).live_objects, 0);
    CHECK_U64(device_info(device).device_bytes, 0);
    kvs_device_release(device);
}

int main(void)
{
    arena_refuses_bad_shapes();
    reserve_is_first_fit_and_refuses_by_name();
    epoch_rises_only_when_a_place_changes();
    commit_refuses_to_touch_leased_regions();
    failed_allocation_leaves_the_old_layout();
    quiesced_arena_refuses_leases_and_reports_its_state();
    claims_on_a_lease_count_once();
    draining_region_blocks_the_commit_until_the_fence(KVS_OK);
    draining_region_blocks_the_commit_until_the_fence(KVS_EIO);
    retire_behind_a_completed_or_abandoned_fence_ends_at_once();
    lease_collected_before_its_fence_tells_it_ends_once();
    released_arena_lives_until_its_last_lease();
    for (uint64_t seed = 1; seed <= 8; seed++) {
        random_scripts_follow_the_model(seed * 0x9e3779b97f4a7c15u);
    }
    return check_finish();
}
