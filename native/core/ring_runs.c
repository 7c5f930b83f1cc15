/* ring_runs.c: the runs that are not consumed, in order. */
#include "core/ring_state.h"

bool kvs_ring_reserve_runs(kvs_ring *ring, uint64_t more)
{
    const uint64_t need = ring->n_runs + more;
    uint64_t capacity = ring->runs_capacity;
    while (capacity < need) {
        capacity *= 2;
    }
    if (capacity > UINT32_MAX / 2) {
        return false;
    }
    if (capacity != ring->runs_capacity) {
        kvs_ring_run *runs = kvs_array_alloc(ring->device, (size_t)capacity, sizeof *runs);
        if (runs == NULL) {
            return false;
        }
        for (uint32_t i = 0; i < ring->n_runs; i++) {
            runs[i] = *kvs_ring_run_at(ring, i);
        }
        kvs_array_free(ring->runs);
        ring->runs = runs;
        ring->runs_capacity = (uint32_t)capacity;
        ring->runs_head = 0;
    }
    return true;
}

void kvs_ring_forget_runs(kvs_ring *ring, uint64_t consumed)
{
    while (ring->n_runs != 0 && kvs_ring_run_at(ring, 0)->end <= consumed) {
        kvs_host_release(kvs_ring_run_at(ring, 0)->host);
        ring->runs_head = (ring->runs_head + 1) & (ring->runs_capacity - 1);
        ring->n_runs--;
    }
}

const kvs_ring_run *kvs_ring_run_reaching(const kvs_ring *ring, uint64_t end)
{
    uint32_t low = 0;
    uint32_t high = ring->n_runs - 1;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (kvs_ring_run_at(ring, middle)->end < end) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return kvs_ring_run_at(ring, low);
}

kvs_status kvs_ring_check_runs(const kvs_ring *ring)
{
    const uint32_t open_slots = kvs_ring_open_slots(ring);
    const uint64_t ready = kvs_ring_ready(ring);
    uint64_t begin = kvs_ring_consumed(ring);
    for (uint32_t i = 0; i < ring->n_runs; i++) {
        const kvs_ring_run *r = kvs_ring_run_at(ring, i);
        if (r->end <= begin || r->host == NULL) {
            return kvs_fail(ring->device, KVS_ECORRUPT, "ring: run %u ends at %llu, begins at %llu", i, (kvs_ull)r->end,
                            (kvs_ull)begin);
        }
        const uint64_t length = r->end - begin;
        if (length > open_slots || (i != 0 && length > ring->run_limit) ||
            (i != 0 && kvs_ring_slot_of(ring, begin) + length > open_slots)) {
            return kvs_fail(ring->device, KVS_ECORRUPT, "ring: run %u of %llu pages crosses the end or its limit", i,
                            (kvs_ull)length);
        }
        if (r->end <= ready && r->gate > kvs_ring_opened(ring)) {
            return kvs_fail(ring->device, KVS_ECORRUPT, "ring: run %u was copied before its slots were consumed", i);
        }
        begin = r->end;
    }
    if (begin != kvs_ring_submitted(ring)) {
        return kvs_fail(ring->device, KVS_ECORRUPT, "ring: runs end at %llu, %llu are submitted", (kvs_ull)begin,
                        (kvs_ull)kvs_ring_submitted(ring));
    }
    return KVS_OK;
}
