/* The ring: static slots, runs, gates, poison, hold, cancel, failures. Deferred devices make every order happen. */
#include "rig.h"

#include "core/ring.h"
#include "kvstream/ring.h"

enum { RECORD = 128, N_HISTORY = 64 };

typedef struct bench {
    kvs_device *device;
    kvs_lease *lease;
    kvs_host *host;
    kvs_ring *ring;
    uint32_t n_slots;
} bench;

static void open_bench(bench *b, uint32_t flags, uint64_t seed, uint32_t n_slots, uint32_t run_limit)
{
    b->device = rig_device(flags, seed);
    b->n_slots = n_slots;
    b->lease = rig_lease(b->device, 64 + (uint64_t)n_slots * RECORD);
    CHECK_OK(kvs_host_create(b->device, N_HISTORY * RECORD, &b->host));
    for (uint8_t page = 0; page < N_HISTORY; page++) {
        rig_fill_host(b->host, (uint64_t)page * RECORD, RECORD, (uint8_t)(page + 1));
    }
    const kvs_ring_desc desc = {.struct_size = sizeof desc,
                                .n_slots = n_slots,
                                .lease = b->lease,
                                .offset_bytes = 64,
                                .slot_bytes = RECORD,
                                .run_limit_slots = run_limit};
    b->ring = NULL;
    CHECK_OK(kvs_ring_create(b->device, &desc, &b->ring));
}

static void close_bench(bench *b)
{
    kvs_ring_release(b->ring);
    kvs_host_release(b->host);
    kvs_lease_release(b->lease);
    rig_close(b->device);
}

static kvs_demand demand_of(const bench *b, uint64_t first_page, uint32_t n_pages)
{
    return (kvs_demand){.host = b->host,
                        .host_offset_bytes = first_page * RECORD,
                        .record_bytes = RECORD,
                        .n_pages = n_pages};
}

static uint64_t submit(bench *b, uint64_t first_page, uint32_t n_pages)
{
    uint64_t first = UINT64_MAX;
    const kvs_demand demand = demand_of(b, first_page, n_pages);
    CHECK_OK(kvs_ring_submit(b->ring, &demand, 1, &first));
    CHECK_OK(kvs_ring_check_integrity(b->ring));
    return first;
}

static kvs_ring_info info_of(bench *b)
{
    kvs_ring_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_ring_get_info(b->ring, &info));
    return info;
}

static uint8_t *slot_bytes(const bench *b, uint64_t slot)
{
    return rig_bytes(kvs_lease_address(b->lease) + 64 + slot * RECORD);
}

static bool slot_is(const bench *b, uint64_t slot, uint8_t value)
{
    return rig_all_equal(slot_bytes(b, slot), RECORD, value);
}

static bool demand_is(bench *b, uint64_t demand, uint8_t value)
{
    uint64_t address = 0;
    return kvs_ring_page_address(b->ring, demand, &address) == KVS_OK &&
           rig_all_equal(rig_bytes(address), RECORD, value);
}

/* Six slots, runs of four: 5 pages, then 4: [0-3] [4] | [5] end of ring [0-2]. */
static void test_runs_end_at_demand_limit_and_ring_end(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED, 0, 6, 4);
    uint64_t first = 0;
    const kvs_demand demands[] = {demand_of(&b, 0, 5), demand_of(&b, 10, 4)};
    CHECK_OK(kvs_ring_submit(b.ring, demands, 2, &first));
    CHECK_U64(first, 0);
    const kvs_ring_info info = info_of(&b);
    CHECK_U64(info.copies, 4);
    CHECK_U64(info.copied_bytes, 9 * RECORD);
    CHECK_U64(info.submitted_pages, 9);
    CHECK_U64(kvs_ring_acquirable_end(b.ring), 6);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 6));
    CHECK(demand_is(&b, 4, 5) && demand_is(&b, 5, 11));
    CHECK_OK(kvs_ring_consume(b.ring, 3));
    CHECK_U64(kvs_ring_acquirable_end(b.ring), 9);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 9));
    for (uint64_t d = 6; d < 9; d++) {
        uint64_t address = 0;
        CHECK_OK(kvs_ring_page_address(b.ring, d, &address));
        CHECK(rig_bytes(address) == slot_bytes(&b, d - 6));
        CHECK(demand_is(&b, d, (uint8_t)(d + 6)));
    }
    CHECK_U64(rig_info(b.device).copies, N_HISTORY + 4);
    close_bench(&b);
}

/* P-PF1 over all small rings and limits: order, slots, totals; and the ring ends empty. */
static void test_every_small_ring_passes_its_demands_in_order(uint32_t flags)
{
    for (uint32_t n_slots = 1; n_slots <= 8; n_slots++) {
        for (uint32_t limit = 1; limit <= 5; limit++) {
            bench b;
            open_bench(&b, flags, n_slots * 10 + limit, n_slots, limit);
            uint64_t consumed = 0;
            for (uint32_t round = 0; round < 12; round++) {
                const uint32_t n_pages = 1 + (round * 5 + limit) % 11;
                const uint64_t end = submit(&b, round, n_pages) + n_pages;
                for (uint64_t begin = consumed; consumed < end;) {
                    const uint64_t wave = kvs_ring_acquirable_end(b.ring);
                    CHECK(wave > consumed && wave <= consumed + n_slots);
                    CHECK_OK(kvs_ring_acquire_wait(b.ring, wave));
                    for (uint64_t d = consumed; d < wave; d++) {
                        CHECK(demand_is(&b, d, (uint8_t)(round + d - begin + 1)));
                    }
                    CHECK_OK(kvs_ring_consume(b.ring, wave));
                    CHECK_OK(kvs_ring_check_integrity(b.ring));
                    consumed = wave;
                }
            }
            const kvs_ring_info info = info_of(&b);
            CHECK_U64(info.consumed_pages, info.submitted_pages);
            CHECK_U64(info.ready_pages, info.submitted_pages);
            CHECK_U64(info.copied_bytes, info.submitted_pages * RECORD);
            close_bench(&b);
        }
    }
}

/* A slow consumer: whatever the engine is asked to run, an unconsumed slot keeps its bytes. */
static void test_nothing_is_written_before_consumed(void)
{
    for (uint64_t seed = 0; seed < 8; seed++) {
        bench b;
        uint32_t ran = 0;
        open_bench(&b, KVS_DEVICE_DEFERRED, seed, 3, 1);
        (void)submit(&b, 0, 8);
        CHECK_OK(kvs_device_run_copies(b.device, 100, &ran));
        CHECK_U64(ran, 3);
        CHECK_STATUS(kvs_device_drain(b.device), KVS_EBUSY);
        CHECK(slot_is(&b, 0, 1) && slot_is(&b, 1, 2) && slot_is(&b, 2, 3));
        CHECK_STATUS(kvs_ring_acquire_wait(b.ring, 4), KVS_EBUSY);
        CHECK_OK(kvs_ring_consume(b.ring, 1));
        CHECK_OK(kvs_device_run_copies(b.device, 100, &ran));
        CHECK_U64(ran, 1);
        CHECK(slot_is(&b, 0, 4) && slot_is(&b, 1, 2));
        close_bench(&b);
    }
}

/* A slow copy: a reader that does not wait finds NaN, and query tells it so. */
static void test_nothing_is_ready_before_copied(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED | KVS_DEVICE_POISON_RELEASED, 0, 4, 2);
    (void)submit(&b, 0, 4);
    CHECK(demand_is(&b, 0, 0xff));
    CHECK_STATUS(kvs_ring_query(b.ring, 0), KVS_PENDING);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 1));
    CHECK_OK(kvs_ring_query(b.ring, 1));
    CHECK(demand_is(&b, 1, 2));
    CHECK_U64(info_of(&b).stalls, 1);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 2));
    CHECK_U64(info_of(&b).stalls, 1);
    CHECK_OK(kvs_ring_consume(b.ring, 1));
    CHECK(slot_is(&b, 0, 0xff) && slot_is(&b, 1, 2));
    CHECK_STATUS(kvs_ring_query(b.ring, 0), KVS_ENOTFOUND);
    uint64_t address = 17;
    CHECK_STATUS(kvs_ring_page_address(b.ring, 0, &address), KVS_ENOTFOUND);
    CHECK_STATUS(kvs_ring_page_address(b.ring, 4, &address), KVS_ENOTFOUND);
    CHECK_U64(address, 17);
    close_bench(&b);
}

static void test_consume_refuses_what_is_not_ready(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED, 0, 4, 1);
    (void)submit(&b, 0, 4);
    CHECK_STATUS(kvs_ring_consume(b.ring, 1), KVS_EINVAL);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 2));
    CHECK_OK(kvs_ring_consume(b.ring, 2));
    CHECK_OK(kvs_ring_consume(b.ring, 2));
    CHECK_STATUS(kvs_ring_consume(b.ring, 1), KVS_EINVAL);
    CHECK_STATUS(kvs_ring_acquire_wait(b.ring, 5), KVS_ENOTFOUND);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 1));
    close_bench(&b);
}

static void test_held_slots_are_never_used(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED | KVS_DEVICE_POISON_RELEASED, 3, 5, 0);
    (void)submit(&b, 0, 1);
    CHECK_STATUS(kvs_ring_hold(b.ring, 2), KVS_EBUSY);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 1));
    CHECK_OK(kvs_ring_consume(b.ring, 1));
    CHECK_STATUS(kvs_ring_hold(b.ring, 5), KVS_EINVAL);
    CHECK_OK(kvs_ring_hold(b.ring, 2));
    memset(slot_bytes(&b, 3), 0x33, 2 * RECORD);
    CHECK_U64(info_of(&b).n_held_slots, 2);
    for (uint64_t consumed = 1; consumed < 30;) {
        (void)submit(&b, 7, 10);
        for (const uint64_t end = info_of(&b).submitted_pages; consumed < end;) {
            const uint64_t wave = kvs_ring_acquirable_end(b.ring);
            CHECK(wave <= consumed + 3);
            CHECK_OK(kvs_ring_acquire_wait(b.ring, wave));
            CHECK_OK(kvs_ring_consume(b.ring, wave));
            consumed = wave;
        }
    }
    CHECK(slot_is(&b, 3, 0x33) && slot_is(&b, 4, 0x33));
    CHECK_OK(kvs_ring_hold(b.ring, 0));
    CHECK(slot_is(&b, 3, 0xff) && slot_is(&b, 4, 0xff));
    const uint64_t first = submit(&b, 0, 5);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, first + 5));
    CHECK(slot_is(&b, 4, 5));
    close_bench(&b);
}

static void test_cancel_frees_every_slot_and_goes_on_counting(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 1, 3, 2);
    for (uint32_t round = 0; round < 100; round++) {
        const uint64_t first = submit(&b, round % 8, 7);
        CHECK_U64(first, info_of(&b).consumed_pages);
        CHECK_OK(kvs_ring_acquire_wait(b.ring, first + 1));
        CHECK(demand_is(&b, first, (uint8_t)(round % 8 + 1)));
        if (round % 2 == 1) {
            CHECK_OK(kvs_ring_consume(b.ring, first + 1));
        }
        CHECK_OK(kvs_ring_cancel(b.ring));
        CHECK_OK(kvs_ring_check_integrity(b.ring));
        CHECK_U64(info_of(&b).consumed_pages, first + 7);
        CHECK_OK(kvs_device_drain(b.device));
    }
    close_bench(&b);
}

static int fail_tenth_in(void *user, int point, uint64_t index)
{
    (void)user;
    return point == KVS_HOOK_COPY && index == 2 ? KVS_ENOMEM : 0;
}

static void test_failed_copy_poisons_until_cancelled(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 0, 8, 1);
    CHECK_OK(kvs_device_set_hook(b.device, fail_tenth_in, NULL));
    uint64_t first = submit(&b, 0, 6);
    CHECK_STATUS(kvs_ring_acquire_wait(b.ring, first + 6), KVS_EIO);
    CHECK_STATUS(kvs_ring_query(b.ring, first), KVS_EIO);
    CHECK_STATUS(kvs_ring_consume(b.ring, first), KVS_EPOISONED);
    const kvs_demand demand = demand_of(&b, 0, 1);
    uint64_t number = 99;
    CHECK_STATUS(kvs_ring_submit(b.ring, &demand, 1, &number), KVS_EPOISONED);
    CHECK_U64(number, 99);
    CHECK_U64(info_of(&b).is_poisoned, 1);
    CHECK_OK(kvs_ring_cancel(b.ring));
    CHECK_U64(info_of(&b).is_poisoned, 0);
    first = submit(&b, 20, 6);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, first + 6));
    CHECK(demand_is(&b, first + 5, 26));
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

static int skip_copies(void *user, int point, uint64_t index)
{
    (void)user;
    (void)index;
    return point == KVS_HOOK_COPY ? KVS_PENDING : 0;
}

static void test_copies_that_do_nothing_are_noticed(uint32_t flags)
{
    bench b;
    open_bench(&b, flags | KVS_DEVICE_POISON_RELEASED, 0, 4, 0);
    CHECK_OK(kvs_device_set_hook(b.device, skip_copies, NULL));
    const uint64_t first = submit(&b, 0, 4);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, first + 4));
    CHECK(demand_is(&b, first, 0xff));
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    close_bench(&b);
}

/* Layers differ in record size: the smaller record lies at the start of its slot. */
static void test_short_records_keep_to_their_slots(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_POISON_RELEASED, 0, 4, 0);
    const kvs_demand demand = {.host = b.host, .host_offset_bytes = 64, .record_bytes = 64, .n_pages = 3};
    uint64_t first = 0;
    CHECK_OK(kvs_ring_submit(b.ring, &demand, 1, &first));
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 3));
    CHECK_U64(info_of(&b).copies, 1);
    CHECK_U64(info_of(&b).copied_bytes, 3 * 64);
    for (uint64_t slot = 0; slot < 3; slot++) {
        CHECK(rig_all_equal(slot_bytes(&b, slot), 64, (uint8_t)(slot == 0 ? 1 : 2)));
        CHECK(rig_all_equal(slot_bytes(&b, slot) + 64, RECORD - 64, 0xff));
    }
    close_bench(&b);
}

static void test_submitted_demands_keep_their_host_memory(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED, 0, 2, 0);
    kvs_host *other = NULL;
    CHECK_OK(kvs_host_create(b.device, 2 * RECORD, &other));
    rig_fill_host(other, 0, 2 * RECORD, 0x44);
    const kvs_demand demand = {.host = other, .record_bytes = RECORD, .n_pages = 2};
    uint64_t first = 0;
    CHECK_OK(kvs_ring_submit(b.ring, &demand, 1, &first));
    const uint64_t live = rig_info(b.device).live_objects;
    kvs_host_release(other);
    CHECK_U64(rig_info(b.device).live_objects, live);
    CHECK_OK(kvs_ring_acquire_wait(b.ring, 2));
    CHECK(demand_is(&b, 1, 0x44));
    CHECK_OK(kvs_ring_consume(b.ring, 2));
    CHECK_U64(rig_info(b.device).live_objects, live - 1);
    close_bench(&b);
}

static void test_submit_refuses_and_changes_nothing(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED, 0, 4, 0);
    const kvs_demand good = demand_of(&b, 0, 1);
    kvs_demand bad[5] = {good, good, good, good, good};
    bad[0].host = NULL;
    bad[1].n_pages = 0;
    bad[2].record_bytes = RECORD + 64;
    bad[3].host_offset_bytes = N_HISTORY * RECORD;
    bad[4].host_offset_bytes = UINT64_MAX;
    for (uint32_t i = 0; i < 5; i++) {
        const kvs_demand both[] = {good, bad[i]};
        uint64_t first = 99;
        CHECK_STATUS(kvs_ring_submit(b.ring, both, 2, &first), i == 4 ? KVS_EOVERFLOW : KVS_EINVAL);
        CHECK_U64(first, 99);
        CHECK_U64(info_of(&b).submitted_pages, 0);
    }
    uint64_t first = 0;
    CHECK_STATUS(kvs_ring_submit(b.ring, &good, 0, &first), KVS_EINVAL);
    CHECK_STATUS(kvs_ring_submit(b.ring, NULL, 1, &first), KVS_EINVAL);
    CHECK_OK(kvs_device_drain(b.device));
    close_bench(&b);
}

static int fail_fences(void *user, int point, uint64_t index)
{
    (void)user;
    (void)index;
    return point == KVS_HOOK_FENCE ? KVS_EIO : 0;
}

static int fail_objects(void *user, int point, uint64_t index)
{
    (void)user;
    (void)index;
    return point == KVS_HOOK_ALLOC ? KVS_ENOMEM : 0;
}

/* More runs than a ring begins with room for, while none is consumed: the room grows, or nothing is submitted. */
static void test_runs_without_room_grow_or_are_refused_whole(void)
{
    bench b;
    open_bench(&b, KVS_DEVICE_DEFERRED, 3, 2, 1);
    (void)submit(&b, 0, N_HISTORY);
    const kvs_demand demand = demand_of(&b, 0, N_HISTORY);
    const kvs_ring_info before = info_of(&b);
    uint64_t first = 7;
    CHECK_OK(kvs_device_set_hook(b.device, fail_objects, NULL));
    CHECK_STATUS(kvs_ring_submit(b.ring, &demand, 1, &first), KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(b.device, NULL, NULL));
    CHECK_U64(first, 7);
    CHECK_U64(info_of(&b).submitted_pages, before.submitted_pages);
    CHECK_OK(kvs_ring_check_integrity(b.ring));
    CHECK_U64(submit(&b, 0, N_HISTORY), N_HISTORY);
    for (uint32_t page = 0; page < 2 * N_HISTORY; page++) {
        CHECK_OK(kvs_ring_acquire_wait(b.ring, page + 1));
        CHECK(slot_is(&b, page % 2, (uint8_t)(page % N_HISTORY + 1)));
        CHECK_OK(kvs_ring_consume(b.ring, page + 1));
    }
    close_bench(&b);
}

static void test_create_refuses_and_keeps_no_lease(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_lease *lease = rig_lease(device, 1024);
    const kvs_ring_desc good = {.struct_size = sizeof good, .n_slots = 4, .lease = lease, .slot_bytes = 256};
    kvs_ring_desc bad[6] = {good, good, good, good, good, good};
    bad[0].struct_size = 4;
    bad[1].n_slots = 0;
    bad[2].slot_bytes = 100;
    bad[3].offset_bytes = 32;
    bad[4].lease = NULL;
    bad[5].n_slots = 5;
    kvs_ring *ring = NULL;
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_STATUS(kvs_ring_create(device, &bad[i], &ring), i == 5 ? KVS_ENOSPACE : KVS_EINVAL);
    }
    CHECK_OK(kvs_device_set_hook(device, fail_fences, NULL));
    CHECK_STATUS(kvs_ring_create(device, &good, &ring), KVS_EIO);
    CHECK_OK(kvs_device_set_hook(device, fail_objects, NULL));
    CHECK_STATUS(kvs_ring_create(device, &good, &ring), KVS_ENOMEM);
    CHECK_OK(kvs_device_set_hook(device, NULL, NULL));
    CHECK(ring == NULL);
    CHECK_OK(kvs_ring_create(device, &good, &ring));
    /* The ring holds the lease: its owner may go first. */
    kvs_lease_release(lease);
    kvs_ring_release(ring);
    kvs_ring_release(NULL);
    rig_close(device);
}

/* Copies of one ring that must not go yet do not stop those of another. */
static void test_a_full_ring_leaves_another_one_alone(uint32_t flags)
{
    bench b;
    open_bench(&b, flags, 0, 2, 1);
    kvs_lease *lease = rig_lease(b.device, 2 * RECORD);
    const kvs_ring_desc desc = {.struct_size = sizeof desc, .n_slots = 2, .lease = lease, .slot_bytes = RECORD};
    kvs_ring *full = b.ring;
    kvs_ring *other = NULL;
    CHECK_OK(kvs_ring_create(b.device, &desc, &other));
    (void)submit(&b, 0, 5);
    CHECK_OK(kvs_ring_acquire_wait(full, 2));
    b.ring = other;
    (void)submit(&b, 8, 2);
    CHECK_OK(kvs_ring_acquire_wait(other, 2));
    uint64_t address;
    CHECK_OK(kvs_ring_page_address(other, 1, &address));
    CHECK(rig_all_equal(rig_bytes(address), RECORD, 10));
    CHECK_STATUS(kvs_ring_acquire_wait(full, 3), KVS_EBUSY);
    CHECK_OK(kvs_ring_consume(full, 2));
    CHECK_OK(kvs_ring_acquire_wait(full, 4));
    CHECK_OK(kvs_ring_page_address(full, 3, &address));
    CHECK(rig_all_equal(rig_bytes(address), RECORD, 4));
    kvs_ring_release(other);
    kvs_lease_release(lease);
    b.ring = full;
    close_bench(&b);
}

int main(void)
{
    test_runs_end_at_demand_limit_and_ring_end();
    test_nothing_is_written_before_consumed();
    test_nothing_is_ready_before_copied();
    test_consume_refuses_what_is_not_ready();
    test_held_slots_are_never_used();
    test_short_records_keep_to_their_slots();
    test_submitted_demands_keep_their_host_memory();
    test_submit_refuses_and_changes_nothing();
    test_runs_without_room_grow_or_are_refused_whole();
    test_create_refuses_and_keeps_no_lease();
    const uint32_t modes[] = {0, KVS_DEVICE_DEFERRED, KVS_DEVICE_DEFERRED | KVS_DEVICE_POISON_RELEASED};
    for (uint32_t i = 0; i < 3; i++) {
        test_every_small_ring_passes_its_demands_in_order(modes[i]);
        test_cancel_frees_every_slot_and_goes_on_counting(modes[i]);
        test_failed_copy_poisons_until_cancelled(modes[i]);
        test_copies_that_do_nothing_are_noticed(modes[i]);
        test_a_full_ring_leaves_another_one_alone(modes[i]);
    }
    return check_finish();
}
