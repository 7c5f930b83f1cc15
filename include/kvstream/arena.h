/* arena.h: one bounded device allocation, divided into regions by transactions, kept by leases.
 *
 * A lease keeps storage. A fence proves that the device has finished with it. An epoch proves that an address still
 * means what it meant. The three are never merged.
 */
#ifndef KVSTREAM_ARENA_H
#define KVSTREAM_ARENA_H

#include "kvstream/device.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_arena kvs_arena;
typedef struct kvs_lease kvs_lease;

typedef enum kvs_region_flag { KVS_REGION_PERSISTENT = 1 } kvs_region_flag;
typedef enum kvs_begin_flag { KVS_BEGIN_KEEP_PERSISTENT = 1 } kvs_begin_flag;

typedef enum kvs_arena_state {
    KVS_ARENA_OPEN = 0,      /* accepts leases */
    KVS_ARENA_DRAINING = 1,  /* closed to leases, some live or draining */
    KVS_ARENA_QUIESCENT = 2, /* closed to leases, none left */
    KVS_ARENA_ZOMBIE = 3     /* released by its owner, dies with its last lease */
} kvs_arena_state;

typedef struct kvs_region {
    uint32_t struct_size;
    uint32_t flags;        /* kvs_region_flag */
    uint64_t id;           /* chosen by the caller, unique in a layout */
    uint64_t offset_bytes; /* from the arena's start */
    uint64_t size_bytes;
    uint64_t alignment_bytes; /* effective: the larger of the arena's and the requested */
} kvs_region;

typedef struct kvs_arena_info {
    uint32_t struct_size;
    uint32_t state; /* kvs_arena_state */
    uint64_t capacity_bytes;
    uint64_t alignment_bytes;
    uint64_t used_bytes;       /* sum of committed sizes */
    uint64_t high_water_bytes; /* end of the last committed region */
    uint64_t epoch;            /* rises by one with each commit that adds, drops, moves or resizes a region */
    uint32_t n_regions;
    uint32_t n_leases;   /* live */
    uint32_t n_draining; /* retired, their fence not complete */
    uint32_t is_building;
} kvs_arena_info;

typedef struct kvs_lease_info {
    uint32_t struct_size;
    uint32_t is_draining;
    uint64_t region_id;
    uint64_t epoch; /* at acquisition; a kept persistent region keeps it over later commits */
    uint64_t offset_bytes;
    uint64_t size_bytes;
    uint64_t address; /* device address of the region's first byte */
} kvs_lease_info;

/* An arena over memory of its own. own: caller. thread: any.
 * errors: EINVAL capacity 0 or alignment not a power of two of at least 64; ENOMEM */
kvs_status kvs_arena_create(kvs_device *device, uint64_t capacity_bytes, uint64_t alignment_bytes, kvs_arena **arena);

/* An arena over a buffer, which it retains. own: caller. thread: any. errors: as kvs_arena_create */
kvs_status kvs_arena_create_over(kvs_buffer *buffer, uint64_t alignment_bytes, kvs_arena **arena);

/* Give up the owner's claim. With leases left the arena becomes a zombie: they stay valid, new claims get ECLOSED,
 * memory goes with the last one. NULL is ignored. thread: any */
void kvs_arena_release(kvs_arena *arena);

/* Open a layout transaction: staged regions start empty, or as a copy of the committed persistent ones
 * (KVS_BEGIN_KEEP_PERSISTENT). thread: owner of the layout. errors: EBUSY one is open; EINVAL flags; ECLOSED;
 * ENOMEM */
kvs_status kvs_arena_begin(kvs_arena *arena, uint32_t flags);

/* Stage a region at the lowest address that fits (first fit). On success `region->offset_bytes` and `alignment_bytes`
 * hold what was chosen. thread: owner of the layout.
 * errors: EINVAL not building, size 0, bad flags or alignment, duplicate id; ENOSPACE no hole; ENOMEM (nothing staged) */
kvs_status kvs_arena_reserve(kvs_arena *arena, kvs_region *region);

/* Stage a region at region->offset_bytes. thread: owner of the layout. errors: as kvs_arena_reserve, and EINVAL misaligned, EBUSY overlap */
kvs_status kvs_arena_reserve_at(kvs_arena *arena, kvs_region *region);

/* Make the staged layout the committed one; metadata only, no byte moves, nothing waits. Refused as a whole, and the
 * transaction closed, when a region with a live or draining lease is missing, moved, resized or not persistent.
 * thread: owner of the layout. errors: EINVAL not building; EBUSY leased region changed; EOVERFLOW epoch; ENOMEM */
kvs_status kvs_arena_commit(kvs_arena *arena);

/* Forget the staged layout. thread: owner of the layout. errors: EINVAL not building */
kvs_status kvs_arena_abort(kvs_arena *arena);

/* thread: any. errors: EINVAL; ENOTFOUND */
kvs_status kvs_arena_find_region(kvs_arena *arena, uint64_t id, kvs_region *region);

/* Committed region by its place in address order. thread: any. errors: EINVAL; ENOTFOUND */
kvs_status kvs_arena_region_at(kvs_arena *arena, uint32_t index, kvs_region *region);

/* Collects draining leases whose fence has completed, then reports. thread: any. errors: EINVAL */
kvs_status kvs_arena_get_info(kvs_arena *arena, kvs_arena_info *info);

/* Refuse new leases. Waits for nothing. thread: any. errors: ECLOSED */
kvs_status kvs_arena_quiesce(kvs_arena *arena);

/* Accept leases again. thread: any. errors: EBUSY while building; ECLOSED */
kvs_status kvs_arena_resume(kvs_arena *arena);

/* Claim a committed region. own: caller, until release or retire. thread: any.
 * errors: ENOTFOUND; EBUSY arena quiesced; ECLOSED zombie; ENOMEM */
kvs_status kvs_arena_acquire(kvs_arena *arena, uint64_t region_id, kvs_lease **lease);

/* One more claim on the same lease; the region counts it once. NULL is ignored. thread: any */
void kvs_lease_retain(kvs_lease *lease);

/* Drop one claim; the last one frees the region for re-layout. NULL is ignored. thread: any */
void kvs_lease_release(kvs_lease *lease);

/* Release behind a fence: consumes the caller's claim; the region counts as draining until the fence has completed.
 * The lease retains the fence. thread: any. errors: EINVAL; EBUSY other claims exist (nothing consumed) */
kvs_status kvs_lease_retire(kvs_lease *lease, kvs_fence *fence);

/* thread: any. errors: EINVAL */
kvs_status kvs_lease_get_info(kvs_lease *lease, kvs_lease_info *info);

/* Recompute every invariant from scratch. thread: owner of the layout. errors: ECORRUPT with the broken one named */
kvs_status kvs_arena_check_integrity(kvs_arena *arena);

/* cffi:end */

KVS_API_END
#endif
