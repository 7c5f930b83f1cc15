/* ring_state.h: what the files of the ring share.
 *
 *     ring.c           create, wait, consume, cancel, hold
 *     ring_submit.c    demands become runs, runs become copies
 *     ring_runs.c      the runs that are not consumed
 */
#ifndef KVS_NATIVE_CORE_RING_STATE_H
#define KVS_NATIVE_CORE_RING_STATE_H

#include "core/device.h"
#include "core/ring.h"

/* One queued copy: the demands below `end` and from the previous run's end on. */
typedef struct kvs_ring_run {
    uint64_t end;
    uint64_t gate; /* `open` at which it may start */
    kvs_host *host; /* retained until consumed */
} kvs_ring_run;

struct kvs_ring {
    kvs_device *device;
    kvs_lease *lease;
    uint64_t address; /* of slot 0 */
    uint64_t slot_bytes;
    uint32_t n_slots;
    uint32_t n_held;
    uint32_t run_limit;
    bool fills_nan;
    uint64_t base_demand; /* lies in slot 0; every earlier one is consumed */

    _Atomic uint64_t submitted;
    _Atomic uint64_t ready;
    _Atomic uint64_t consumed;
    _Atomic uint64_t open; /* gate of copies: consumed, or further where readers order themselves */
    _Atomic int failed;

    /* Unconsumed runs in order: a ring buffer, capacity a power of two. */
    kvs_ring_run *runs;
    uint32_t runs_capacity;
    uint32_t runs_head;
    uint32_t n_runs;
    kvs_copy *copies; /* scratch of one submission */
    uint32_t copies_capacity;

    _Atomic uint64_t n_copies;
    _Atomic uint64_t copied_bytes;
    _Atomic uint64_t stalls;
    _Atomic uint64_t stall_ns;
    _Atomic uint32_t held_seen; /* n_held for readers on any thread */
};

static inline uint64_t kvs_ring_opened(const kvs_ring *ring)
{
    return atomic_load_explicit(&ring->open, memory_order_acquire);
}

static inline int kvs_ring_failure(const kvs_ring *ring)
{
    return atomic_load_explicit(&ring->failed, memory_order_acquire);
}

/* For reports. */
static inline void kvs_ring_count(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

static inline uint32_t kvs_ring_slot_of(const kvs_ring *ring, uint64_t demand)
{
    return (uint32_t)((demand - ring->base_demand) % kvs_ring_open_slots(ring));
}

static inline uint64_t kvs_ring_slot_address(const kvs_ring *ring, uint32_t slot)
{
    return ring->address + slot * ring->slot_bytes;
}

/* Unconsumed run `index`, or the room behind the last one. */
static inline kvs_ring_run *kvs_ring_run_at(const kvs_ring *ring, uint32_t index)
{
    return &ring->runs[(ring->runs_head + index) & (ring->runs_capacity - 1)];
}

/* Make room for so many more runs; false, and nothing changed, without memory. */
bool kvs_ring_reserve_runs(kvs_ring *ring, uint64_t more);

/* Let go of the hosts of runs that every reader has left. */
void kvs_ring_forget_runs(kvs_ring *ring, uint64_t consumed);

/* First unconsumed run that reaches `end`; there is one when end <= submitted. */
const kvs_ring_run *kvs_ring_run_reaching(const kvs_ring *ring, uint64_t end);

/* Do the runs lie one after another, in slots that were free for them? errors: ECORRUPT */
kvs_status kvs_ring_check_runs(const kvs_ring *ring);

#endif
