/* arena_scene.h: a small arena, and a layout of two regions, for the tests of arenas and leases. */
#ifndef KVS_TESTS_ARENA_SCENE_H
#define KVS_TESTS_ARENA_SCENE_H

#include "check.h"
#include "core/arena.h"

enum { CAPACITY = 4096, ALIGNMENT = 64 };

static inline kvs_device *make_device(void)
{
    const kvs_device_desc desc = {.struct_size = sizeof desc, .n_threads = 1};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    return device;
}

static inline kvs_device_info device_info(kvs_device *device)
{
    kvs_device_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_device_get_info(device, &info));
    return info;
}

static inline kvs_arena *make_arena(kvs_device *device)
{
    kvs_arena *arena = NULL;
    CHECK_OK(kvs_arena_create(device, CAPACITY, ALIGNMENT, &arena));
    return arena;
}

static inline kvs_arena_info info_of(kvs_arena *arena)
{
    kvs_arena_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_arena_get_info(arena, &info));
    CHECK_OK(kvs_arena_check_integrity(arena));
    return info;
}

static inline kvs_region region(uint64_t id, uint64_t size_bytes, uint32_t flags)
{
    return (kvs_region){
        .struct_size = sizeof(kvs_region), .id = id, .size_bytes = size_bytes, .flags = flags};
}

static inline kvs_region region_at(uint64_t id, uint64_t offset_bytes, uint64_t size_bytes, uint32_t flags)
{
    kvs_region made = region(id, size_bytes, flags);
    made.offset_bytes = offset_bytes;
    return made;
}

/* A layout of a persistent region 1 of 1,024 bytes and a plain region 2 of 512 bytes. */
static inline void commit_two(kvs_arena *arena)
{
    kvs_region one = region(1, 1024, KVS_REGION_PERSISTENT);
    kvs_region two = region(2, 512, 0);
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &one));
    CHECK_OK(kvs_arena_reserve(arena, &two));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK(one.offset_bytes == 0 && two.offset_bytes == 1024);
}

#endif
