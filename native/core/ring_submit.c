/* ring_submit.c: demands become runs of neighbouring slots, and runs become copies behind a gate. */
#include "core/ring_state.h"

static bool reserve_copies(kvs_ring *ring, uint64_t need)
{
    if (need <= ring->copies_capacity) {
        return true;
    }
    const uint64_t capacity = need * 2;
    kvs_copy *copies = capacity > UINT32_MAX ? NULL : kvs_array_alloc(ring->device, (size_t)capacity, sizeof *copies);
    if (copies == NULL) {
        return false;
    }
    kvs_array_free(ring->copies);
    ring->copies = copies;
    ring->copies_capacity = (uint32_t)capacity;
    return true;
}

static kvs_status check_demand(const kvs_ring *ring, const kvs_demand *demand, uint32_t index)
{
    if (demand->host == NULL || kvs_host_device(demand->host) != ring->device || demand->n_pages == 0) {
        return kvs_fail(ring->device, KVS_EINVAL, "ring: demand %u has no pages or no host memory of this device",
                        index);
    }
    if (demand->record_bytes == 0 || demand->record_bytes > ring->slot_bytes) {
        return kvs_fail(ring->device, KVS_EINVAL, "ring: demand %u has records of %llu bytes, slots have %llu", index,
                        (kvs_ull)demand->record_bytes, (kvs_ull)ring->slot_bytes);
    }
    uint64_t bytes;
    uint64_t end;
    if (!kvs_mul_u64(demand->n_pages, demand->record_bytes, &bytes) ||
        !kvs_add_u64(bytes, demand->host_offset_bytes, &end)) {
        return kvs_fail(ring->device, KVS_EOVERFLOW, "ring: demand %u ends beyond 64 bits", index);
    }
    const uint64_t have = kvs_host_bytes(demand->host);
    if (end > have) {
        return kvs_fail(ring->device, KVS_EINVAL, "ring: demand %u ends at %llu, its host memory at %llu", index,
                        (kvs_ull)end, (kvs_ull)have);
    }
    return KVS_OK;
}

static uint32_t run_length(const kvs_ring *ring, uint64_t demand, uint32_t left)
{
    const uint32_t to_end = kvs_ring_open_slots(ring) - kvs_ring_slot_of(ring, demand);
    uint32_t length = left < to_end ? left : to_end;
    return length < ring->run_limit ? length : ring->run_limit;
}

static kvs_status count_runs(const kvs_ring *ring, const kvs_demand *demands, uint32_t n_demands, uint64_t *n_runs,
                             uint64_t *end)
{
    uint64_t number = kvs_ring_submitted(ring);
    uint64_t total = 0;
    for (uint32_t i = 0; i < n_demands; i++) {
        const kvs_status status = check_demand(ring, &demands[i], i);
        if (status < 0) {
            return status;
        }
        for (uint32_t done = 0; done < demands[i].n_pages; total++) {
            const uint32_t length = run_length(ring, number, demands[i].n_pages - done);
            done += length;
            if (!kvs_add_u64(number, length, &number)) {
                return kvs_fail(ring->device, KVS_EOVERFLOW, "ring: demand numbers are used up");
            }
        }
    }
    *n_runs = total;
    *end = number;
    return KVS_OK;
}

/* The copy of `length` pages of a demand, from its page `done` on, as demands number.. */
static void describe_copy(kvs_ring *ring, const kvs_demand *demand, uint32_t done, uint32_t length, uint64_t number,
                          kvs_copy *copy)
{
    const uint64_t end = number + length;
    const uint32_t open_slots = kvs_ring_open_slots(ring);
    /* Equal strides make one piece of the run. */
    const bool is_dense = demand->record_bytes == ring->slot_bytes;
    *copy = (kvs_copy){
        .host_base = kvs_host_base(demand->host),
        .host_offset = demand->host_offset_bytes + done * demand->record_bytes,
        .device_address = kvs_ring_slot_address(ring, kvs_ring_slot_of(ring, number)),
        .n_bytes = is_dense ? length * demand->record_bytes : demand->record_bytes,
        .n_pieces = is_dense ? 1 : length,
        .is_out = 0,
        .host_stride_bytes = demand->record_bytes,
        .device_stride_bytes = ring->slot_bytes,
        /* Always with a gate, so that all runs stay in one queue and `ready` rises in order. The last slot of the run
         * is the last to be left. */
        .gate = &ring->open,
        .gate_value = end > open_slots ? end - open_slots : 0,
        .done = &ring->ready,
        .done_value = end,
        .failed = &ring->failed,
    };
}

static uint32_t describe_all(kvs_ring *ring, const kvs_demand *demands, uint32_t n_demands)
{
    uint64_t number = kvs_ring_submitted(ring);
    uint32_t n_copies = 0;
    for (uint32_t i = 0; i < n_demands; i++) {
        for (uint32_t done = 0; done < demands[i].n_pages; n_copies++) {
            const uint32_t length = run_length(ring, number, demands[i].n_pages - done);
            describe_copy(ring, &demands[i], done, length, number, &ring->copies[n_copies]);
            *kvs_ring_run_at(ring, ring->n_runs + n_copies) = (kvs_ring_run){
                .end = number + length, .gate = ring->copies[n_copies].gate_value, .host = demands[i].host};
            done += length;
            number += length;
        }
    }
    return n_copies;
}

kvs_status kvs_ring_submit(kvs_ring *ring, const kvs_demand *demands, uint32_t n_demands, uint64_t *first)
{
    if (ring == NULL || demands == NULL || n_demands == 0 || first == NULL) {
        return kvs_fail(ring == NULL ? NULL : ring->device, KVS_EINVAL, "ring: nothing to submit");
    }
    if (kvs_ring_failure(ring) < 0) {
        return kvs_fail(ring->device, KVS_EPOISONED, "ring: a copy failed with %s; cancel first",
                        kvs_status_name(kvs_ring_failure(ring)));
    }
    uint64_t n_runs = 0;
    uint64_t end = 0;
    kvs_status status = count_runs(ring, demands, n_demands, &n_runs, &end);
    if (status < 0) {
        return status;
    }
    if (!kvs_ring_reserve_runs(ring, n_runs) || !reserve_copies(ring, n_runs)) {
        return kvs_fail(ring->device, KVS_ENOMEM, "ring: no memory for %llu copy runs", (kvs_ull)n_runs);
    }
    const uint32_t n_copies = describe_all(ring, demands, n_demands);
    const uint64_t begin = kvs_ring_submitted(ring);
    /* Before the engine can finish one of them: ready never exceeds submitted. */
    atomic_store_explicit(&ring->submitted, end, memory_order_release);
    status = kvs_device_submit(ring->device, ring->copies, n_copies);
    if (status < 0) {
        atomic_store_explicit(&ring->submitted, begin, memory_order_release);
        return status;
    }
    for (uint32_t i = 0; i < n_copies; i++) {
        kvs_host_retain(kvs_ring_run_at(ring, ring->n_runs + i)->host);
        kvs_ring_count(&ring->copied_bytes, ring->copies[i].n_bytes * ring->copies[i].n_pieces);
    }
    ring->n_runs += n_copies;
    kvs_ring_count(&ring->n_copies, n_copies);
    *first = begin;
    return KVS_OK;
}
