/* ring.c: a ring of slots that demands pass through: its making, its counters, and who waits for them. */
#include "base/sync.h"
#include "core/ring_state.h"

#include <stdio.h>

#define FIRST_RUNS 64U

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

/* ---- slots ---- */

uint32_t kvs_ring_open_slots(const kvs_ring *ring)
{
    return ring->n_slots - ring->n_held;
}

static void fill_nan(kvs_ring *ring, uint32_t first_slot, uint64_t n_slots)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    view.backend->device_fill_nan(view.self, kvs_ring_slot_address(ring, first_slot), n_slots * ring->slot_bytes);
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
    const uint32_t first = kvs_ring_slot_of(ring, begin);
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

static kvs_status join_backend(const kvs_ring *ring)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    return view.backend->ring_join == NULL
               ? KVS_OK
               : view.backend->ring_join(view.self, &ring->open, &ring->ready, ring->n_slots);
}

static void leave_backend(const kvs_ring *ring)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    if (view.backend->ring_leave != NULL) {
        view.backend->ring_leave(view.self, &ring->open);
    }
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
    kvs_ring_run *runs = kvs_array_alloc(device, FIRST_RUNS, sizeof *runs);
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
    status = join_backend(made);
    if (status < 0) {
        kvs_array_free(runs);
        kvs_lease_release(made->lease);
        kvs_object_free(device, made);
        return status;
    }
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
    leave_backend(ring);
    kvs_device *device = ring->device;
    kvs_lease *lease = ring->lease;
    kvs_array_free(ring->runs);
    kvs_array_free(ring->copies);
    kvs_lease_release(lease);
    kvs_object_free(device, ring);
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
    *address = kvs_ring_slot_address(ring, kvs_ring_slot_of(ring, demand));
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
    char what[64];
    (void)snprintf(what, sizeof what, "ring: a copy failed with %s", kvs_status_name(kvs_ring_failure(ring)));
    return kvs_fail_copy(ring->device, KVS_EIO, what);
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
    if (kvs_ring_failure(ring) < 0) {
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
    const uint64_t open = kvs_ring_opened(ring);
    uint64_t end = kvs_ring_consumed(ring);
    for (uint32_t i = 0; i < ring->n_runs && kvs_ring_run_at(ring, i)->gate <= open; i++) {
        end = kvs_ring_run_at(ring, i)->end;
    }
    return end;
}

static kvs_status wait_ready(kvs_ring *ring, uint64_t end)
{
    const uint64_t begin_ns = kvs_clock_ns();
    const kvs_status status = kvs_device_wait_counter(ring->device, &ring->ready, end, &ring->failed);
    kvs_ring_count(&ring->stalls, 1);
    kvs_ring_count(&ring->stall_ns, kvs_clock_ns() - begin_ns);
    return kvs_ring_failure(ring) < 0 ? fail_copy(ring) : status;
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
    if (kvs_ring_failure(ring) < 0) {
        return fail_copy(ring);
    }
    if (end <= consumed || is_ready) {
        rely_on_ready(ring, end);
        return KVS_OK;
    }
    /* Only the owner opens gates, and the owner is here: one that is shut stays so for good. */
    const kvs_ring_run *last = kvs_ring_run_reaching(ring, end);
    if (last->gate > kvs_ring_opened(ring)) {
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
    if (end > kvs_ring_opened(ring)) {
        atomic_store_explicit(&ring->open, end, memory_order_release);
    }
    kvs_ring_forget_runs(ring, end);
}

static void tell_backend(const kvs_ring *ring, uint64_t end)
{
    const struct kvs_device_view view = kvs_device_backend(ring->device);
    view.backend->gate_advanced(view.self, &ring->open, end);
}

kvs_status kvs_ring_consume(kvs_ring *ring, uint64_t end)
{
    if (ring == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "ring: none");
    }
    if (kvs_ring_failure(ring) < 0) {
        return kvs_fail(ring->device, KVS_EPOISONED, "ring: a copy failed with %s; cancel first",
                        kvs_status_name(kvs_ring_failure(ring)));
    }
    const uint64_t consumed = kvs_ring_consumed(ring);
    if (end < consumed || end > kvs_ring_ready(ring)) {
        return kvs_fail(ring->device, KVS_EINVAL, "ring: %llu cannot be consumed, %llu are and %llu are ready",
                        (kvs_ull)end, (kvs_ull)consumed, (kvs_ull)kvs_ring_ready(ring));
    }
    if (end > consumed) {
        const bool was_open = end <= kvs_ring_opened(ring);
        set_consumed(ring, end);
        if (!was_open) {
            tell_backend(ring, end);
        }
    }
    return KVS_OK;
}

kvs_status kvs_ring_open(kvs_ring *ring, uint64_t end)
{
    if (kvs_ring_failure(ring) < 0) {
        return kvs_fail(ring->device, KVS_EPOISONED, "ring: a copy failed with %s; cancel first",
                        kvs_status_name(kvs_ring_failure(ring)));
    }
    if (ring->fills_nan || end > kvs_ring_submitted(ring)) {
        return kvs_fail(ring->device, KVS_EINVAL, "ring: %llu cannot be opened, %llu are submitted%s", (kvs_ull)end,
                        (kvs_ull)kvs_ring_submitted(ring), ring->fills_nan ? "; released slots are to be filled" : "");
    }
    if (end > kvs_ring_opened(ring)) {
        atomic_store_explicit(&ring->open, end, memory_order_release);
    }
    return KVS_OK;
}

void kvs_ring_view(const kvs_ring *ring, kvs_stream_view *view)
{
    view->gate = &ring->open;
    view->base_demand = ring->base_demand;
    view->n_slots = kvs_ring_open_slots(ring);
    view->run_slots = ring->run_limit < view->n_slots ? ring->run_limit : view->n_slots;
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

void kvs_ring_widen(kvs_ring *ring)
{
    if (kvs_ring_submitted(ring) - ring->base_demand > kvs_ring_open_slots(ring)) {
        (void)kvs_ring_cancel(ring);
    }
    if (ring->fills_nan && ring->n_held != 0) {
        fill_nan(ring, ring->n_slots - ring->n_held, ring->n_held);
    }
    if (kvs_ring_consumed(ring) == kvs_ring_submitted(ring)) {
        ring->base_demand = kvs_ring_consumed(ring);
    }
    ring->n_held = 0;
    atomic_store_explicit(&ring->held_seen, 0, memory_order_relaxed);
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
    info->is_poisoned = kvs_ring_failure(ring) < 0;
    info->copies = atomic_load_explicit(&ring->n_copies, memory_order_relaxed);
    info->copied_bytes = atomic_load_explicit(&ring->copied_bytes, memory_order_relaxed);
    info->stalls = atomic_load_explicit(&ring->stalls, memory_order_relaxed);
    info->stall_ns = atomic_load_explicit(&ring->stall_ns, memory_order_relaxed);
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
    const uint64_t open = kvs_ring_opened(ring);
    if (open < consumed || (ready > open && ready - open > kvs_ring_open_slots(ring))) {
        return kvs_fail(ring->device, KVS_ECORRUPT, "ring: %llu ready demands in %u slots", (kvs_ull)(ready - consumed),
                        kvs_ring_open_slots(ring));
    }
    if (ring->n_held >= ring->n_slots) {
        return kvs_fail(ring->device, KVS_ECORRUPT, "ring: %u of %u slots held", ring->n_held, ring->n_slots);
    }
    return kvs_ring_check_runs(ring);
}
