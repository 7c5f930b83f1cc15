/* Layer leases that are refused, go stale, fail, or lose a pager: everything is given back. */
#include "lease_scene.h"

static void test_what_cannot_be_leased_is_refused(void)
{
    duo d;
    open_duo(&d, 0);
    head_history(&d, 4 * P + 10);
    const kvs_pager_info before = head_info(&d);
    const kvs_layer_lease_desc good = lease_desc(&d, 4);
    kvs_layer_lease *lease = NULL;
    uint64_t n_slots = 7;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(NULL, &lease), KVS_EINVAL);
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&good, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_layer_lease_slots(NULL, 1, &n_slots), KVS_EINVAL);
    CHECK_STATUS(kvs_layer_lease_slots(d.trunk.pager, 1, &n_slots), KVS_EUNSUPPORTED);
    CHECK_U64(n_slots, 7);
    kvs_layer_lease_desc bad = good;
    bad.struct_size = 8;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EINVAL);
    bad = good;
    bad.seq = d.trunk.seq;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EINVAL);
    bad = good;
    bad.pager = d.trunk.pager;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EUNSUPPORTED);
    bad = good;
    bad.generation--;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_ESTALE);
    bad = good;
    bad.reserved_tokens = tokens_of(d.seq) - 1;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EINVAL);
    bad.reserved_tokens = tokens_of(d.seq) + P + 1;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EINVAL);
    bad = good;
    bad.lender = NULL;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_ENOSPACE);
    bad.lender = d.pager; /* its one slot stays */
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_ENOSPACE);
    kvs_device *device = rig_device(0, 0);
    kvs_cache *cache = NULL;
    CHECK_OK(kvs_cache_create(device, layers, 1, &cache));
    CHECK_OK(kvs_pager_create(cache, &bad.lender));
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EINVAL);
    kvs_pager_release(bad.lender);
    kvs_cache_release(cache);
    rig_close(device);
    /* A ring of smaller slots. */
    CHECK_OK(kvs_cache_create(d.trunk.device, &layers[1], 1, &cache));
    CHECK_OK(kvs_pager_create(cache, &bad.lender));
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EINVAL);
    kvs_pager_release(bad.lender);
    kvs_cache_release(cache);
    CHECK_OK(kvs_pager_begin(d.trunk.pager, d.trunk.seq, 1));
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&good, &lease), KVS_EBUSY);
    CHECK_OK(kvs_pager_end(d.trunk.pager, 0));
    CHECK_OK(kvs_pager_begin(d.pager, d.seq, 1));
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&good, &lease), KVS_EBUSY);
    CHECK_OK(kvs_pager_end(d.pager, 0));
    CHECK_OK(kvs_seq_append(d.seq, 1));
    bad = lease_desc(&d, 4);
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EBUSY);
    CHECK_OK(kvs_seq_commit(d.seq, 0));
    CHECK_OK(kvs_pager_detach(d.pager));
    bad = lease_desc(&d, 4);
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EBUSY);
    const kvs_placement head = head_placement(three, 1);
    CHECK_OK(kvs_pager_attach(d.pager, d.pool, &head));
    CHECK(lease == NULL);
    CHECK_U64(head_info(&d).loaded_pages, before.loaded_pages);
    CHECK_U64(ring_of(d.trunk.pager).n_held_slots, 0);
    acquire(&d, 4);
    bad = lease_desc(&d, 4);
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_EBUSY); /* all widths share the one */
    CHECK_STATUS(kvs_pager_place(d.pager, &head), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_detach(d.pager), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_forget(d.pager), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_drop(d.pager, d.seq), KVS_EBUSY);
    kvs_seq *other = NULL;
    CHECK_OK(kvs_seq_create(d.cache, P, &other));
    CHECK_STATUS(kvs_pager_begin(d.pager, other, 1), KVS_EBUSY);
    kvs_seq_release(other);
    CHECK_STATUS(kvs_layer_lease_return_wait(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_layer_lease_check_integrity(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_layer_lease_get_info(d.lease, NULL), KVS_EINVAL);
    kvs_layer_lease_release(NULL);
    give_back(&d);
    kvs_seq_release(d.seq);
    CHECK_OK(kvs_seq_create(d.cache, 3 * P + 10, &d.seq));
    head_history(&d, 3 * P + 7);
    bad = lease_desc(&d, 4);
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&bad, &lease), KVS_ECONTEXT);
    close_duo(&d);
}

/* A layer whose tail alone does not fit has no place to write. */
static void test_a_tail_beyond_the_share_is_refused(void)
{
    duo d;
    open_duo(&d, 0);
    head_history(&d, P - 2);
    const uint32_t one[] = {1};
    const kvs_placement small = head_placement(one, 1);
    CHECK_OK(kvs_pager_place(d.pager, &small));
    const kvs_layer_lease_desc desc = lease_desc(&d, 8);
    kvs_layer_lease *lease = NULL;
    CHECK_STATUS(kvs_layer_lease_acquire_populated(&desc, &lease), KVS_ENOSPACE);
    close_duo(&d);
}

static void test_stale_generations_give_no_plan(void)
{
    duo d;
    open_duo(&d, 0);
    head_history(&d, 4 * P + 10);
    acquire(&d, 8);
    const uint64_t first = lease_info(&d).generation;
    kvs_span_plan *plan = NULL;
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, first, 1, NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, first + 1, 1, &plan), KVS_ESTALE);
    CHECK_OK(kvs_pager_begin(d.pager, d.seq, 2));
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, first, 1, &plan), KVS_EBUSY);
    CHECK_STATUS(kvs_layer_lease_return_wait(d.lease), KVS_EBUSY);
    CHECK_OK(play_head(&d));
    CHECK_OK(kvs_pager_end(d.pager, 2));
    const uint64_t second = lease_info(&d).generation;
    CHECK(second > first);
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, first, 1, &plan), KVS_ESTALE);
    CHECK_OK(kvs_layer_lease_plan(d.lease, second, 2, &plan));
    kvs_span_plan_release(plan);
    /* Somebody changes the sequence past the pager. */
    CHECK_OK(kvs_pager_publish_wait(d.pager));
    CHECK_OK(kvs_seq_truncate(d.seq, 4 * P));
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, second, 1, &plan), KVS_ESTALE);
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, generation_of(d.seq), 1, &plan), KVS_ESTALE);
    CHECK_STATUS(kvs_pager_begin(d.pager, d.seq, 1), KVS_ESTALE);
    give_back(&d);
    head_pass(&d, 1);
    acquire(&d, 8);
    CHECK_OK(kvs_layer_lease_return_wait(d.lease));
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, generation_of(d.seq), 1, &plan), KVS_ECLOSED);
    CHECK_U64(lease_info(&d).is_held, 0);
    close_duo(&d);
}

/* The first copies fail: nothing is leased, and the next try brings everything. */
static void test_a_failed_population_gives_everything_back(uint32_t flags)
{
    duo d;
    open_duo(&d, flags);
    for (uint32_t i = 0; i < 5; i++) {
        take_pass(&d.trunk, d.trunk.seq, P, P);
    }
    head_history(&d, 5 * P + 10);
    for (uint64_t k = 0; k < 3; k++) {
        fault f = {.first = k, .count = 1};
        kvs_layer_lease *lease = NULL;
        const kvs_layer_lease_desc desc = lease_desc(&d, 8);
        CHECK_OK(kvs_device_set_hook(d.trunk.device, fail_copies, &f));
        CHECK_STATUS(kvs_layer_lease_acquire_populated(&desc, &lease), KVS_EIO);
        CHECK_OK(kvs_device_set_hook(d.trunk.device, NULL, NULL));
        CHECK(lease == NULL);
        CHECK_U64(ring_of(d.trunk.pager).n_held_slots, 0);
        CHECK_U64(head_info(&d).n_slots, HEAD_SLOTS);
    }
    acquire(&d, 8);
    CHECK_U64(lease_info(&d).reused_pages + lease_info(&d).populated_pages, 6);
    head_pass(&d, 8);
    give_back(&d);
    take_pass(&d.trunk, d.trunk.seq, 1, 1);
    check_head_history(&d);
    close_duo(&d);
}

/* Rows in a borrowed slot that cannot be written are cut off; the ring is whole all the same. */
static void test_rows_that_do_not_reach_history_are_cut(void)
{
    duo d;
    open_duo(&d, 0);
    head_history(&d, 4 * P + 10);
    acquire(&d, 8);
    CHECK_OK(kvs_pager_truncate(d.pager, d.seq, 3 * P - 3));
    fault f = {.first = 0, .count = 1000};
    CHECK_OK(kvs_device_set_hook(d.trunk.device, fail_copies, &f));
    CHECK_OK(kvs_pager_begin(d.pager, d.seq, 2));
    CHECK_OK(play_head(&d));
    (void)kvs_pager_end(d.pager, 2);
    CHECK_STATUS(kvs_layer_lease_return_wait(d.lease), KVS_EIO);
    CHECK_OK(kvs_device_set_hook(d.trunk.device, NULL, NULL));
    CHECK_U64(tokens_of(d.seq), 3 * P - 3);
    CHECK_U64(ring_of(d.trunk.pager).n_held_slots, 0);
    (void)head_info(&d);
    head_pass(&d, 5);
    check_head_history(&d);
    take_pass(&d.trunk, d.trunk.seq, 1, 1);
    close_duo(&d);
}

/* Whoever goes first takes the lease with it; a plan keeps the storage. */
static void test_any_order_of_release(void)
{
    for (uint32_t first = 0; first < 4; first++) {
        duo d;
        open_duo(&d, 0);
        head_history(&d, 4 * P + 10);
        acquire(&d, 8);
        kvs_span_plan *plan = NULL;
        uint64_t pages[5];
        CHECK_OK(kvs_layer_lease_plan(d.lease, lease_info(&d).generation, 1, &plan));
        CHECK_OK(kvs_span_plan_page_table(plan, pages, 5));
        if (first == 0) {
            kvs_pager_release(d.trunk.pager);
            d.trunk.pager = NULL;
        } else if (first == 1) {
            kvs_pager_release(d.pager);
            d.pager = NULL;
        } else if (first == 2) {
            CHECK_OK(kvs_pager_begin(d.pager, d.seq, 1));
            kvs_layer_lease_release(d.lease); /* aborts the pass */
            d.lease = NULL;
            CHECK_U64(tokens_of(d.seq), 4 * P + 10);
        } else {
            kvs_seq_release(d.seq);
            d.seq = NULL;
            CHECK_OK(kvs_layer_lease_check_integrity(d.lease));
        }
        if (first < 2) {
            CHECK_STATUS(kvs_layer_lease_plan(d.lease, 1, 1, &plan), KVS_ECLOSED);
            CHECK_U64(lease_info(&d).is_held, 0);
        }
        if (first == 0) {
            head_pass(&d, 3);
            check_head_history(&d);
        } else if (first == 1) {
            take_pass(&d.trunk, d.trunk.seq, 3, 3);
        }
        kvs_lease_release(d.trunk.lease);
        d.trunk.lease = NULL;
        for (uint32_t page = 0; page < 5; page++) {
            volatile const uint8_t *bytes = rig_bytes(pages[page]);
            (void)bytes[0]; /* sanitizers see whether it is still there */
        }
        kvs_span_plan_release(plan);
        close_duo(&d);
    }
}

static int refuse_allocation(void *user, int point, uint64_t index)
{
    (void)index;
    uint64_t *left = user;
    if (point != KVS_HOOK_ALLOC) {
        return 0;
    }
    return (*left)-- == 0 ? KVS_ENOMEM : 0;
}

/* Without memory nothing is leased, or the lookahead of the lender stays behind and the lease is there. */
static void test_every_allocation_may_fail(void)
{
    uint64_t n_refused = 0;
    for (uint64_t k = 0; k < 20; k++) {
        duo d;
        open_duo(&d, 0);
        for (uint32_t i = 0; i < 5; i++) {
            take_pass(&d.trunk, d.trunk.seq, P, P);
        }
        head_history(&d, 4 * P + 10);
        uint64_t left = k;
        const kvs_layer_lease_desc desc = lease_desc(&d, 8);
        CHECK_OK(kvs_device_set_hook(d.trunk.device, refuse_allocation, &left));
        const kvs_status status = kvs_layer_lease_acquire_populated(&desc, &d.lease);
        CHECK_OK(kvs_device_set_hook(d.trunk.device, NULL, NULL));
        CHECK(status == KVS_OK || (status == KVS_ENOMEM && d.lease == NULL));
        n_refused += status == KVS_ENOMEM;
        (void)head_info(&d);
        if (status == KVS_OK) {
            head_pass(&d, 8);
            give_back(&d);
        }
        take_pass(&d.trunk, d.trunk.seq, 1, 1);
        head_pass(&d, 1);
        check_head_history(&d);
        close_duo(&d);
    }
    CHECK(n_refused >= 3);
}

int main(void)
{
    test_what_cannot_be_leased_is_refused();
    test_a_tail_beyond_the_share_is_refused();
    test_stale_generations_give_no_plan();
    test_a_failed_population_gives_everything_back(0);
    test_a_failed_population_gives_everything_back(KVS_DEVICE_DEFERRED);
    test_rows_that_do_not_reach_history_are_cut();
    test_any_order_of_release();
    test_every_allocation_may_fail();
    return check_finish();
}
