/* rig.h: devices, regions and copies for the native tests that move bytes. */
#ifndef KVS_TESTS_RIG_H
#define KVS_TESTS_RIG_H

#include "check.h"
#include "core/device.h"
#include "kvstream/arena.h"

#include <string.h>

/* n_threads 0: one for each core, so that the copy thread has none of its own. */
static inline kvs_device *rig_device_threads(uint32_t flags, uint64_t seed, uint32_t n_threads)
{
    const kvs_device_desc desc = {
        .struct_size = sizeof desc, .flags = flags, .n_threads = n_threads, .schedule_seed = seed};
    kvs_device *device = NULL;
    CHECK_OK(kvs_device_create(&desc, &device));
    return device;
}

static inline kvs_device *rig_device(uint32_t flags, uint64_t seed)
{
    return rig_device_threads(flags, seed, 1);
}

static inline kvs_device_info rig_info(kvs_device *device)
{
    kvs_device_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_device_get_info(device, &info));
    return info;
}

/* The device goes, and nothing made on it is left. */
static inline void rig_close(kvs_device *device)
{
    CHECK_U64(rig_info(device).live_objects, 0);
    kvs_device_release(device);
}

/* A lease on the one region of an arena that dies with it. */
static inline kvs_lease *rig_lease(kvs_device *device, uint64_t n_bytes)
{
    kvs_arena *arena = NULL;
    kvs_lease *lease = NULL;
    kvs_region region = {.struct_size = sizeof region, .id = 1, .size_bytes = n_bytes};
    CHECK_OK(kvs_arena_create(device, n_bytes, 64, &arena));
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &region));
    CHECK_OK(kvs_arena_commit(arena));
    CHECK_OK(kvs_arena_acquire(arena, 1, &lease));
    kvs_arena_release(arena);
    return lease;
}

static inline uint8_t *rig_bytes(uint64_t address)
{
    return (uint8_t *)(uintptr_t)address;
}

static inline bool rig_all_equal(const uint8_t *bytes, uint64_t n_bytes, uint8_t value)
{
    for (uint64_t i = 0; i < n_bytes; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* Put a page of equal bytes into host history. */
static inline void rig_fill_host(kvs_host *host, uint64_t offset, uint64_t n_bytes, uint8_t value)
{
    uint8_t page[4096];
    memset(page, value, sizeof page);
    for (uint64_t at = 0; at < n_bytes; at += sizeof page) {
        const uint64_t left = n_bytes - at;
        CHECK_OK(kvs_host_write_wait(host, offset + at, page, left < sizeof page ? left : sizeof page));
    }
}

#endif
