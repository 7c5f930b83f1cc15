#include "core/ring.h"

#include "base/sync.h"
#include "core/device.h"

#define FIRST_RUNS 64U

/* One queued copy: the demands below `end` and from the previous run's end on. */
typedef struct run {
    uint64_t end;
    uint64_t gate; /* `consumed` at which it may start */
    kvs_host *host; /* retained until consumed */
} run;

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
    _Atomic int failed;

    /* Unconsumed runs in order: a ring buffer, capacity a power of two. */
    run *runs;
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

/* ---- counters ---- */

uint64_t kvs_ring_submitted(const kvs_ring *ring)
{
    return atomic_load_explicit(&ring->submitted, memory_order_acquire);
}

uint64_t kvs_ring_ready(const kvs_ring *ring)
{
    return atomic_load_explicit(&ring->ready, memory_order_acquire);
}

uint64_t kvs_ring_consumed(const kvs_ring *ring)
{
    return atomic_load_explicit(&ring->consumed, memory_order_acquire);
}

static int failure(const kvs_ring *ring)
{
    return atomic_load_explicit(&ring->failed, memory_order_acquire);
}

static void add(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_fetch_add_explicit(counter, value, memory_order_relaxed);
}

/* ---- slots ---- */

uint32_t kvs_ring_open_slots(const kvs_ring *ring)
{
    return ring->n_slots - ring->n_held;
}

static uint32_t slot_of(const kvs_ring *ring, uint64_t demand)
{
    return (uint32_t)((demand - ring->base_demand) % kvs_ring_open_slots(ring));
}

static uint64_t slot_address(const kvs_ring *ring, uint32_t slot)
{
    return ring->address + slot * ring->slot_bytes;
}

static void fill_nan(kvs_ring *ring, uint32_t first_slot, uint64_t n_slots)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    view.backend->device_fill_nan(view.self, slot_address(ring, first_slot), n_slots * ring->slot_bytes);
}

/* A late reader of a released slot must not find plausible numbers there. */
static void fill_demands(kvs_ring *ring, uint64_t begin, uint64_t end)
{
    if (!ring->fills_nan || begin == end) {
        return;
    }
    const uint32_t open_slots = kvs_ring_open_slots(ring);
    if (end - begin >= open_slots) {
        fill_nan(ring, 0, open_slots);
        return;
    }
    const uint32_t first = slot_of(ring, begin);
    const uint64_t count = end - begin;
    const uint64_t before_wrap = count < open_slots - first ? count : open_slots - first;
    fill_nan(ring, first, before_wrap);
    if (count > before_wrap) {
        fill_nan(ring, 0, count - before_wrap);
    }
}

/* ---- create, release ---- */

static kvs_status check_desc(kvs_device *device, const kvs_ring_desc *desc)
{
    if (!KVS_STRUCT_OK(desc)) {
        return kvs_fail(device, KVS_EINVAL, "ring: no description, or one of another version");
    }
    if (desc->lease == NULL || kvs_lease_device(desc->lease) != device) {
        return kvs_fail(device, KVS_EINVAL, "ring: no lease, or one of another device");
    }
    if (desc->n_slots == 0 || desc->slot_bytes == 0 || desc->slot_bytes % 64 != 0 || desc->offset_bytes % 64 != 0) {
        return kvs_fail(device, KVS_EINVAL, "ring: %u slots of %llu bytes at offset %llu; bytes go by 64",
                        desc->n_slots, (kvs_ull)desc->slot_bytes, (kvs_ull)desc->offset_bytes);
    }
    uint64_t bytes;
    uint64_t end;
    const uint64_t have = kvs_lease_bytes(desc->lease);
    if (!kvs_mul_u64(desc->n_slots, desc->slot_bytes, &bytes) || !kvs_add_u64(bytes, desc->offset_bytes, &end) ||
        end > have) {
        return kvs_fail(device, KVS_ENOSPACE, "ring: %u slots of %llu bytes at offset %llu, the region has %llu",
                        desc->n_slots, (kvs_ull)desc->slot_bytes, (kvs_ull)desc->offset_bytes, (kvs_ull)have);
    }
    return KVS_OK;
}

kvs_status kvs_ring_create(kvs_device *device, const kvs_ring_desc *desc, kvs_ring **ring)
{
    if (device == NULL || ring == NULL) {
        return kvs_fail(device, KVS_EINVAL, "ring: no device or no place for the handle");
    }
    kvs_status status = check_desc(device, desc);
    if (status < 0) {
        return status;
    }
    status = kvs_hook_ask(device, KVS_HOOK_FENCE);
    if (status < 0) {
        return kvs_fail(device, status, "ring: its fences could not be made");
    }
    kvs_ring *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    run *runs = kvs_array_alloc(FIRST_RUNS, sizeof *runs);
    if (runs == NULL) {
        kvs_object_free(device, made);
        return kvs_fail(device, KVS_ENOMEM, "ring: no memory for %u runs", FIRST_RUNS);
    }
    kvs_lease_retain(desc->lease);
    made->device = device;
    made->lease = desc->lease;
    made->address = kvs_lease_address(desc->lease) + desc->offset_bytes;
    made->slot_bytes = desc->slot_bytes;
    made->n_slots = desc->n_slots;
    made->run_limit = desc->run_limit_slots == 0 ? desc->n_slots : desc->run_limit_slots;
    made->fills_nan = kvs_device_has(device, KVS_DEVICE_POISON_RELEASED);
    made->runs = runs;
    made->runs_capacity = FIRST_RUNS;
    if (made->fills_nan) {
        fill_nan(made, 0, made->n_slots);
    }
    *ring = made;
    return KVS_OK;
}

void kvs_ring_release(kvs_ring *ring)
{
    if (ring == NULL) {
        return;
    }
    (void)kvs_ring_cancel(ring);
    kvs_device *device = ring->device;
    kvs_lease *lease = ring->lease;
    kvs_array_free(ring->runs);
    kvs_array_free(ring->copies);
    kvs_lease_release(lease);
    kvs_object_free(device, ring);
}

/* ---- runs ---- */

static run *run_at(const kvs_ring *ring, uint32_t index)
{
    return &ring->runs[(ring->runs_head + index) & (ring->runs_capacity - 1)];
}

static bool reserve_runs(kvs_ring *ring, uint64_t more)
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
        run *runs = kvs_array_alloc((size_t)capacity, sizeof *runs);
        if (runs == NULL) {
            return false;
        }
        for (uint32_t i = 0; i < ring->n_runs; i++) {
            runs[i] = *run_at(ring, i);
        }
        kvs_array_free(ring->runs);
        ring->runs = runs;
        ring->runs_capacity = (uint32_t)capacity;
        ring->runs_head = 0;
    }
    return true;
}

static bool reserve_copies(kvs_ring *ring, uint64_t need)
{
    if (need <= ring->copies_capacity) {
        return true;
    }
    const uint64_t capacity = need * 2;
    kvs_copy *copies = capacity > UINT32_MAX ? NULL : kvs_array_alloc((size_t)capacity, sizeof *copies);
    if (copies == NULL) {
        return false;
    }
    kvs_array_free(ring->copies);
    ring->copies = copies;
    ring->copies_capacity = (uint32_t)capacity;
    return true;
}

/* Hosts of runs that every reader has left. */
static void forget_runs(kvs_ring *ring, uint64_t consumed)
{
    while (ring->n_runs != 0 && run_at(ring, 0)->end <= consumed) {
        kvs_host_release(run_at(ring, 0)->host);
        ring->runs_head = (ring->runs_head + 1) & (ring->runs_capacity - 1);
        ring->n_runs--;
    }
}

/* First unconsumed run that reaches `end`; there is one when end <= submitted. */
static const run *run_reaching(const kvs_ring *ring, uint64_t end)
{
    uint32_t low = 0;
    uint32_t high = ring->n_runs - 1;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (run_at(ring, middle)->end < end) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return run_at(ring, low);
}

/* ---- submit ---- */

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
    const uint32_t to_end = kvs_ring_open_slots(ring) - slot_of(ring, demand);
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
        .device_address = slot_address(ring, slot_of(ring, number)),
        .n_bytes = is_dense ? length * demand->record_bytes : demand->record_bytes,
        .n_pieces = is_dense ? 1 : length,
        .is_out = 0,
        .host_stride_bytes = demand->record_bytes,
        .device_stride_bytes = ring->slot_bytes,
        /* Always with a gate, so that all runs stay in one queue and `ready` rises in order. The last slot of the run
         * is the last to be left. */
        .gate = &ring->consumed,
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
            *run_at(ring, ring->n_runs + n_copies) = (run){
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
    if (failure(ring) < 0) {
        return kvs_fail(ring->device, KVS_EPOISONED, "ring: a copy failed with %s; cancel first",
                        kvs_status_name(failure(ring)));
    }
    uint64_t n_runs = 0;
    uint64_t end = 0;
    kvs_status status = count_runs(ring, demands, n_demands, &n_runs, &end);
    if (status < 0) {
        return status;
    }
    if (!reserve_runs(ring, n_runs) || !reserve_copies(ring, n_runs)) {
        return kvs_fail(ring->device, KVS_ENOMEM, "ring: no memory for %llu copy runs", (kvs_ull)n_runs);
    }
    const uint32_t n_copies = describe_all(ring, demands, n_demands);
    const uint64_t begin = kvs_ring_submitted(ring);
    /* Before the engine can finish one of them: ready never exceeds submitted. */
    atomic_store_explicit(&ring->submitted, end, memory_order_release);
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    status = view.backend->copy_submit_many(view.self, ring->copies, n_copies);
    if (status < 0) {
        atomic_store_explicit(&ring->submitted, begin, memory_order_release);
        return status;
    }
    for (uint32_t i = 0; i < n_copies; i++) {
        kvs_host_retain(run_at(ring, ring->n_runs + i)->host);
        add(&ring->copied_bytes, ring->copies[i].n_bytes * ring->copies[i].n_pieces);
    }
    ring->n_runs += n_copies;
    add(&ring->n_copies, n_copies);
    *first = begin;
    return KVS_OK;
}

/* ---- read side ---- */

kvs_status kvs_ring_page_address(kvs_ring *ring, uint64_t demand, uint64_t *address)
{
    if (ring == NULL || address == NULL) {
        return kvs_fail(ring == NULL ? NULL : ring->device, KVS_EINVAL, "ring: no place for the address");
    }
    if (demand < kvs_ring_consumed(ring) || demand >= kvs_ring_submitted(ring)) {
        return kvs_fail(ring->device, KVS_ENOTFOUND, "ring: demand %llu is not among %llu to %llu", (kvs_ull)demand,
                        (kvs_ull)kvs_ring_consumed(ring), (kvs_ull)kvs_ring_submitted(ring));
    }
    *address = slot_address(ring, slot_of(ring, demand));
    return KVS_OK;
}

/* Tell a backend that keeps account of it: whoever comes here goes on to read what was copied. */
static void rely_on_ready(kvs_ring *ring, uint64_t end)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    if (view.backend->counter_seen != NULL) {
        view.backend->counter_seen(view.self, &ring->ready, end);
    }
}

static kvs_status fail_copy(kvs_ring *ring)
{
    return kvs_fail(ring->device, KVS_EIO, "ring: a copy failed with %s", kvs_status_name(failure(ring)));
}

kvs_status kvs_ring_query(kvs_ring *ring, uint64_t demand)
{
    if (ring == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "ring: none");
    }
    if (demand < kvs_ring_consumed(ring) || demand >= kvs_ring_submitted(ring)) {
        return kvs_fail(ring->device, KVS_ENOTFOUND, "ring: demand %llu is not among %llu to %llu", (kvs_ull)demand,
                        (kvs_ull)kvs_ring_consumed(ring), (kvs_ull)kvs_ring_submitted(ring));
    }
    const bool is_ready = demand < kvs_ring_ready(ring);
    if (failure(ring) < 0) {
        return fail_copy(ring);
    }
    if (!is_ready) {
        return KVS_PENDING;
    }
    rely_on_ready(ring, demand + 1);
    return KVS_OK;
}

uint64_t kvs_ring_acquirable_end(const kvs_ring *ring)
{
    const uint64_t consumed = kvs_ring_consumed(ring);
    uint64_t end = consumed;
    for (uint32_t i = 0; i < ring->n_runs && run_at(ring, i)->gate <= consumed; i++) {
        end = run_at(ring, i)->end;
    }
    return end;
}

static kvs_status wait_ready(kvs_ring *ring, uint64_t end)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    const uint64_t begin_ns = kvs_clock_ns();
    const kvs_status status = view.backend->wait_counter(view.self, &ring->ready, end, &ring->failed);
    add(&ring->stalls, 1);
    add(&ring->stall_ns, kvs_clock_ns() - begin_ns);
    return failure(ring) < 0 ? fail_copy(ring) : status;
}

kvs_status kvs_ring_acquire_wait(kvs_ring *ring, uint64_t end)
{
    if (ring == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "ring: none");
    }
    if (end > kvs_ring_submitted(ring)) {
        return kvs_fail(ring->device, KVS_ENOTFOUND, "ring: demands below %llu wanted, %llu submitted", (kvs_ull)end,
                        (kvs_ull)kvs_ring_submitted(ring));
    }
    const uint64_t consumed = kvs_ring_consumed(ring);
    const bool is_ready = end <= kvs_ring_ready(ring);
    if (failure(ring) < 0) {
        return fail_copy(ring);
    }
    if (end <= consumed || is_ready) {
        rely_on_ready(ring, end);
        return KVS_OK;
    }
    /* Only the owner raises `consumed`, and the owner is here: a gate beyond it stays shut for good. */
    const run *last = run_reaching(ring, end);
    if (last->gate > consumed) {
        return kvs_fail(ring->device, KVS_EBUSY,
                        "ring: demand %llu needs %llu consumed, %llu are (%u slots)", (kvs_ull)(end - 1),
                        (kvs_ull)last->gate, (kvs_ull)consumed, kvs_ring_open_slots(ring));
    }
    return wait_ready(ring, end);
}

static void set_consumed(kvs_ring *ring, uint64_t end)
{
    fill_demands(ring, kvs_ring_consumed(ring), end);
    /* Release: what readers and the fill did to the slots comes before the copy that waits for this. */
    atomic_store_explicit(&ring->consumed, end, memory_order_release);
    forget_runs(ring, end);
}

kvs_status kvs_ring_consume(kvs_ring *ring, uint64_t end)
{
    if (ring == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "ring: none");
    }
    if (failure(ring) < 0) {
        return kvs_fail(ring->device, KVS_EPOISONED, "ring: a copy failed with %s; cancel first",
                        kvs_status_name(failure(ring)));
    }
    const uint64_t consumed = kvs_ring_consumed(ring);
    if (end < consumed || end > kvs_ring_ready(ring)) {
        return kvs_fail(ring->device, KVS_EINVAL, "ring: %llu cannot be consumed, %llu are and %llu are ready",
                        (kvs_ull)end, (kvs_ull)consumed, (kvs_ull)kvs_ring_ready(ring));
    }
    if (end > consumed) {
        set_consumed(ring, end);
        const struct kvs_device_view view = kvs_device_backend(ring->device);
        view.backend->gate_advanced(view.self);
    }
    return KVS_OK;
}

/* ---- cancel, hold ---- */

kvs_status kvs_ring_cancel(kvs_ring *ring)
{
    if (ring == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "ring: none");
    }
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    view.backend->copy_cancel(view.self, &ring->ready);
    /* No copy knows this ring any more: its counters are the owner's alone. */
    const uint64_t end = kvs_ring_submitted(ring);
    atomic_store_explicit(&ring->ready, end, memory_order_release);
    set_consumed(ring, end);
    atomic_store_explicit(&ring->failed, 0, memory_order_release);
    return KVS_OK;
}

kvs_status kvs_ring_hold(kvs_ring *ring, uint32_t n_slots)
{
    if (ring == NULL || n_slots >= ring->n_slots) {
        return kvs_fail(ring == NULL ? NULL : ring->device, KVS_EINVAL, "ring: %u slots cannot be held of %u", n_slots,
                        ring == NULL ? 0 : ring->n_slots);
    }
    const uint64_t submitted = kvs_ring_submitted(ring);
    const uint64_t consumed = kvs_ring_consumed(ring);
    if (consumed != submitted) {
        return kvs_fail(ring->device, KVS_EBUSY, "ring: %llu demands are not consumed", (kvs_ull)(submitted - consumed));
    }
    if (ring->fills_nan && n_slots < ring->n_held) {
        fill_nan(ring, ring->n_slots - ring->n_held, ring->n_held - n_slots);
    }
    ring->n_held = n_slots;
    ring->base_demand = consumed;
    atomic_store_explicit(&ring->held_seen, n_slots, memory_order_relaxed);
    return KVS_OK;
}

/* ---- reports ---- */

kvs_status kvs_ring_get_info(kvs_ring *ring, kvs_ring_info *info)
{
    if (ring == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(ring == NULL ? NULL : ring->device, KVS_EINVAL, "ring: no place for its state");
    }
    /* Consumed first, submitted last: the order that keeps consumed <= ready <= submitted while copies go on. */
    info->consumed_pages = kvs_ring_consumed(ring);
    info->ready_pages = kvs_ring_ready(ring);
    info->submitted_pages = kvs_ring_submitted(ring);
    info->n_slots = ring->n_slots;
    info->n_held_slots = atomic_load_explicit(&ring->held_seen, memory_order_relaxed);
    info->is_poisoned = failure(ring) < 0;
    info->copies = atomic_load_explicit(&ring->n_copies, memory_order_relaxed);
    info->copied_bytes = atomic_load_explicit(&ring->copied_bytes, memory_order_relaxed);
    info->stalls = atomic_load_explicit(&ring->stalls, memory_order_relaxed);
    info->stall_ns = atomic_load_explicit(&ring->stall_ns, memory_order_relaxed);
    return KVS_OK;
}

static kvs_status check_runs(const kvs_ring *ring)
{
    const uint32_t open_slots = kvs_ring_open_slots(ring);
    const uint64_t ready = kvs_ring_ready(ring);
    uint64_t begin = kvs_ring_consumed(ring);
    for (uint32_t i = 0; i < ring->n_runs; i++) {
        const run *r = run_at(ring, i);
        if (r->end <= begin || r->host == NULL) {
            return kvs_fail(ring->device, KVS_ECORRUPT, "ring: run %u ends at %llu, begins at %llu", i, (kvs_ull)r->end,
                            (kvs_ull)begin);
        }
        const uint64_t length = r->end - begin;
        if (length > open_slots || (i != 0 && length > ring->run_limit) ||
            (i != 0 && slot_of(ring, begin) + length > open_slots)) {
            return kvs_fail(ring->device, KVS_ECORRUPT, "ring: run %u of %llu pages crosses the end or its limit", i,
                            (kvs_ull)length);
        }
        if (r->end <= ready && r->gate > kvs_ring_consumed(ring)) {
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

kvs_status kvs_ring_check_integrity(kvs_ring *ring)
{
    if (ring == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "ring: none");
    }
    const uint64_t consumed = kvs_ring_consumed(ring);
    const uint64_t ready = kvs_ring_ready(ring);
    const uint64_t submitted = kvs_ring_submitted(ring);
    if (consumed > ready || ready > submitted || ring->base_demand > consumed) {
        return kvs_fail(ring->device, KVS_ECORRUPT, "ring: consumed %llu, ready %llu, submitted %llu, base %llu",
                        (kvs_ull)consumed, (kvs_ull)ready, (kvs_ull)submitted, (kvs_ull)ring->base_demand);
    }
    if (ready - consumed > kvs_ring_open_slots(ring)) {
        return kvs_fail(ring->device, KVS_ECORRUPT, "ring: %llu ready demands in %u slots", (kvs_ull)(ready - consumed),
                        kvs_ring_open_slots(ring));
    }
    if (ring->n_held >= ring->n_slots) {
        return kvs_fail(ring->device, KVS_ECORRUPT, "ring: %u of %u slots held", ring->n_held, ring->n_slots);
    }
    return check_runs(ring);
}
