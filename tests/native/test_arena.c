/* test_arena.c: layout transactions and states. */
#include "arena_scene.h"

#include <string.h>

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

int main(void)
{
    arena_refuses_bad_shapes();
    reserve_is_first_fit_and_refuses_by_name();
    epoch_rises_only_when_a_place_changes();
    commit_refuses_to_touch_leased_regions();
    failed_allocation_leaves_the_old_layout();
    quiesced_arena_refuses_leases_and_reports_its_state();
    return check_finish();
}
