/* arena.h: the insides of an arena and its leases, shared by arena.c, arena_layout.c, lease.c and the
 * coordinator.
 *
 * Locks: the arena's mutex guards everything below it, the counts and links of its leases included.
 * A fence's mutex may be taken under it, never the other way: fences call waiters outside their
 * lock.
 */
#ifndef KVS_NATIVE_CORE_ARENA_H
#define KVS_NATIVE_CORE_ARENA_H

#include "base/sync.h"
#include "core/fence.h"
#include "core/layout.h"

typedef enum kvs_arena_mode {
    KVS_ARENA_ACCEPTING,
    KVS_ARENA_QUIESCED,
    KVS_ARENA_RELEASED
} kvs_arena_mode;

struct kvs_arena {
    _Atomic uint64_t claims; /* the owner's, one per lease, one per coordinator */
    kvs_buffer *buffer;
    uint64_t address;
    kvs_bounds bounds;
    kvs_mutex mutex;
    kvs_arena_mode mode;
    bool is_building;
    kvs_layout committed;
    kvs_layout staged;
    uint64_t epoch;
    uint32_t n_leases;
    uint32_t n_draining;
    kvs_lease *leases; /* live and draining */
};

struct kvs_lease {
    _Atomic uint64_t claims; /* 0 once retired: then the fence owns the object */
    kvs_arena *arena;
    uint64_t region_id;
    uint64_t epoch;
    uint64_t offset_bytes;
    uint64_t size_bytes;
    bool is_draining; /* and counted so; false again once collected */
    kvs_fence *fence; /* held while draining */
    kvs_fence_waiter waiter;
    kvs_lease *next;
    kvs_lease **link; /* what points here; NULL once collected */
};

/* A claim on the storage alone: it does not keep the arena from becoming a zombie. */
void kvs_arena_hold(kvs_arena *arena);
void kvs_arena_drop(kvs_arena *arena);

/* Accept leases again, even while somebody builds: how the coordinator ends its own quiescence. */
void kvs_arena_reopen(kvs_arena *arena);

/* Copy the committed regions into an empty layout. errors: ENOMEM, and the layout is empty again */
kvs_status kvs_arena_copy_layout(kvs_arena *arena, kvs_layout *layout, uint64_t *epoch);

/* Does the arena have exactly these regions, in these places? */
bool kvs_arena_has_layout(kvs_arena *arena, const kvs_layout *layout);

/* A whole transaction in one step: commit exactly these regions, where they stand, provided that
 * the layout still is that of `expected_epoch`. `epoch` receives the one that then holds. errors:
 * ECLOSED; ESTALE somebody committed; EBUSY a transaction is open, or a leased region would change;
 * EOVERFLOW; ENOMEM */
kvs_status kvs_arena_install(kvs_arena *arena, const kvs_layout *layout, uint64_t expected_epoch,
                             uint64_t *epoch);

/* Under the mutex: forget what is staged, if anything. */
void kvs_arena_close_transaction(kvs_arena *arena);

/* Under the mutex: ECLOSED, with the leases that are left. */
kvs_status kvs_arena_refuse_released(kvs_arena *arena);

/* Under the mutex: stop counting draining leases whose fence has completed. */
void kvs_arena_collect(kvs_arena *arena);

#endif
