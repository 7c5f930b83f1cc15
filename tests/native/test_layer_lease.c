/* Layer leases without Python: what lies where, what is copied, and what goes on beside them. */
#include "lease_scene.h"

#include <math.h>

/* Pages of the layer fit: nothing is borrowed, nothing is brought, and the trunk may go on. */
static void test_a_layer_that_fits_costs_nothing(uint32_t flags)
{
    duo d;
    open_duo(&d, flags);
    head_history(&d, 2 * P + 100);
    uint64_t n_slots = 9;
    CHECK_OK(kvs_layer_lease_slots(d.pager, 3 * P, &n_slots));
    CHECK_U64(n_slots, 0);
    const uint64_t copies = head_info(&d).copies;
    acquire(&d, 4);
    const kvs_layer_lease_info info = lease_info(&d);
    CHECK_U64(info.n_held_slots + info.populated_pages + info.later_bytes, 0);
    CHECK_U64(info.reused_pages, 3);
    for (uint32_t i = 0; i < 4; i++) {
        head_pass(&d, 1);
    }
    take_pass(&d.trunk, d.trunk.seq, 5, 5);
    CHECK_U64(head_info(&d).copies, copies);
    give_back(&d);
    check_head_history(&d);
    close_duo(&d);
}

/* 1,017 rows and 8 more are 5 pages, the pager keeps 3: pages 0 and 3, and one that is still to come, stay there, 1 and 2 are
 * borrowed. The spans are where they should be. */
static void test_a_suffix_lies_in_the_last_slots_of_the_ring(uint32_t flags)
{
    duo d;
    open_duo(&d, flags);
    head_history(&d, 1017);
    const kvs_pager_info before = head_info(&d);
    acquire(&d, 8);
    kvs_layer_lease_info info = lease_info(&d);
    CHECK_U64(info.n_held_slots, 2);
    CHECK_U64(info.first_held_slot, 4);
    CHECK_U64(info.reserved_tokens, 1025);
    CHECK_U64(info.populated_pages, 2);
    CHECK_U64(info.populated_bytes, 2 * d.trunk.records[0].record_bytes);
    CHECK_U64(head_info(&d).copies - before.copies, 2);
    kvs_span_plan *plan = NULL;
    CHECK_OK(kvs_layer_lease_plan(d.lease, info.generation, 1, &plan));
    uint64_t pages[4];
    CHECK_OK(kvs_span_plan_page_table(plan, pages, 4));
    const uint64_t held = kvs_lease_address(d.trunk.lease) + 4 * d.trunk.slot_bytes;
    CHECK_U64(pages[1], held);
    CHECK_U64(pages[2], held + d.trunk.slot_bytes);
    const uint64_t own = kvs_lease_address(d.pool);
    CHECK(pages[0] >= own && pages[0] < own + HEAD_SLOTS * d.trunk.slot_bytes);
    CHECK(pages[3] >= own && pages[3] < own + HEAD_SLOTS * d.trunk.slot_bytes);
    for (uint64_t token = 0; token < 1017; token++) {
        touch_row(&d.trunk, pages[token / P], 0, token, false);
    }
    kvs_span_plan_release(plan);
    for (uint32_t i = 0; i < 8; i++) {
        head_pass(&d, 1); /* the eighth begins a page */
    }
    info = lease_info(&d);
    CHECK_U64(info.later_pages, 0);
    CHECK_U64(info.later_bytes, 0);
    CHECK_U64(info.resident_pages, 3);
    CHECK_U64(head_info(&d).copies - before.copies, 2);
    CHECK_STATUS(kvs_pager_begin(d.pager, d.seq, 1), KVS_ENOSPACE);
    give_back(&d);
    check_head_history(&d);
    /* What the pager keeps was not disturbed: the next lease brings the suffix alone. */
    CHECK_OK(kvs_pager_truncate(d.pager, d.seq, 1017));
    acquire(&d, 8);
    info = lease_info(&d);
    CHECK_U64(info.reused_pages, 2);
    CHECK_U64(info.populated_pages, 2);
    give_back(&d);
    head_pass(&d, 3);
    close_duo(&d);
}

/* Zero keys weigh all rows alike, and row t has value t: the last row sees the mean of 0 to 1,016. */
static void test_attention_over_a_lease_is_the_mean_of_what_lies_there(void)
{
    static uint8_t record[P * 256];
    static float k[P * 16];
    static float v[P * 16];
    duo d;
    open_duo(&d, 0);
    CHECK_OK(kvs_seq_append(d.seq, 1017));
    CHECK_OK(kvs_seq_commit(d.seq, 1017));
    for (uint64_t page = 0; page < 4; page++) {
        const uint32_t rows = page < 3 ? P : 1017 - 3 * P;
        for (uint32_t i = 0; i < rows * 16; i++) {
            v[i] = (float)(page * P + i / 16);
        }
        CHECK_OK(kvs_record_encode_rows(d.trunk.device, &layers[0], record, 0, rows, k, v));
        CHECK_OK(kvs_seq_write_page_wait(d.seq, 0, page, record, rows));
    }
    acquire(&d, 8);
    CHECK_U64(lease_info(&d).n_held_slots, 2);
    kvs_span_plan *plan = NULL;
    CHECK_OK(kvs_layer_lease_plan(d.lease, lease_info(&d).generation, 1, &plan));
    kvs_span_plan_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_span_plan_get_info(plan, &info));
    CHECK_U64(info.n_spans, 3);
    CHECK_U64(info.active_tokens, 1017);
    const float q[16] = {1.0F};
    float out[16];
    const kvs_attend_desc attend = {
        .struct_size = sizeof attend, .n_query_heads = 1, .plan = plan, .q = q, .out = out, .scale = 0.25F};
    CHECK_OK(kvs_attend_run(d.trunk.device, &attend));
    for (uint32_t i = 0; i < 16; i++) {
        CHECK(fabsf(out[i] - 508.0F) < 1e-3F); /* a sum of 1,017 weights in single precision */
    }
    kvs_span_plan_release(plan);
    close_duo(&d);
}

/* The trunk has looked ahead; the lease takes its slots, what is left of them is filled again, and is there when the ring is
 * whole. */
static void test_the_lookahead_goes_on_beside_the_lease(uint32_t flags)
{
    duo d;
    open_duo(&d, flags);
    for (uint32_t i = 0; i < 5; i++) {
        take_pass(&d.trunk, d.trunk.seq, P, P);
    }
    take_pass(&d.trunk, d.trunk.seq, 1, 1);
    take_pass(&d.trunk, d.trunk.seq, 1, 1);
    head_history(&d, 4 * P + 10);
    acquire(&d, 4);
    const kvs_ring_info held = ring_of(d.trunk.pager);
    CHECK_U64(held.n_held_slots, 2);
    CHECK_U64(held.submitted_pages - held.consumed_pages, 4);
    kvs_pass_forecast forecast = {.struct_size = sizeof forecast};
    CHECK_STATUS(kvs_pager_begin(d.trunk.pager, d.trunk.seq, 1), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_forecast(d.trunk.pager, d.trunk.seq, 1, &forecast), KVS_EBUSY);
    const uint32_t pages[] = {2, 2};
    const kvs_placement other = placement_of(pages, 5, P);
    CHECK_STATUS(kvs_pager_place(d.trunk.pager, &other), KVS_EBUSY);
    CHECK_STATUS(kvs_pager_detach(d.trunk.pager), KVS_EBUSY);
    head_pass(&d, 2);
    head_pass(&d, 2);
    give_back(&d);
    const kvs_ring_info whole = ring_of(d.trunk.pager);
    CHECK_U64(whole.n_held_slots, 0);
    CHECK_U64(whole.submitted_pages - whole.consumed_pages, 4);
    CHECK_U64(whole.copied_bytes, held.copied_bytes);
    take_pass(&d.trunk, d.trunk.seq, 1, 1);
    /* The pass found 4 pages there: it and the lookahead behind it asked for the others alone. */
    CHECK_OK(kvs_pager_forecast(d.trunk.pager, d.trunk.seq, 1, &forecast));
    const kvs_ring_info after = ring_of(d.trunk.pager);
    CHECK_U64(after.submitted_pages - whole.submitted_pages, 2 * forecast.streamed_pages - 4);
    take_pass(&d.trunk, d.trunk.seq, 3, 2);
    check_history(&d.trunk, d.trunk.seq);
    close_duo(&d);
}

static void test_a_ring_lends_to_its_own_pager(void)
{
    duo d;
    open_duo(&d, 0);
    const uint32_t two[] = {2};
    const kvs_placement more = head_placement(two, 2);
    CHECK_OK(kvs_pager_place(d.pager, &more));
    head_history(&d, 2 * P + 10);
    kvs_layer_lease_desc desc = lease_desc(&d, 8);
    desc.lender = d.pager;
    CHECK_OK(kvs_layer_lease_acquire_populated(&desc, &d.lease));
    CHECK_U64(lease_info(&d).n_held_slots, 1);
    head_pass(&d, 8);
    take_pass(&d.trunk, d.trunk.seq, 5, 5);
    CHECK_U64(lease_info(&d).later_pages, 0);
    give_back(&d);
    const uint64_t streamed = head_info(&d).streamed_pages;
    head_pass(&d, 1);
    CHECK_U64(head_info(&d).streamed_pages - streamed, 1);
    check_head_history(&d);
    close_duo(&d);
}

/* A truncation copies nothing and keeps the slots; where it reaches the suffix, rows go into a borrowed slot, and from there to
 * history before it is given back. */
static void test_truncation_keeps_the_lease(uint32_t flags)
{
    duo d;
    open_duo(&d, flags);
    head_history(&d, 4 * P + 10);
    acquire(&d, 8);
    const uint64_t first = lease_info(&d).generation;
    CHECK_OK(kvs_pager_truncate(d.pager, d.seq, 4 * P + 7));
    head_pass(&d, 3);
    const uint64_t target = 3 * P - 8; /* in page 2, which is borrowed, as are all rows behind it */
    CHECK_OK(kvs_pager_truncate(d.pager, d.seq, target));
    kvs_layer_lease_info info = lease_info(&d);
    CHECK(info.generation > first);
    CHECK_U64(info.later_pages, 0);
    CHECK_U64(info.n_held_slots, 2);
    CHECK_U64(ring_of(d.trunk.pager).n_held_slots, 2);
    kvs_span_plan *plan = NULL;
    CHECK_STATUS(kvs_layer_lease_plan(d.lease, first, 1, &plan), KVS_ESTALE);
    for (uint32_t i = 0; i < 6; i++) {
        head_pass(&d, 1);
    }
    CHECK_U64(lease_info(&d).later_pages, 0);
    give_back(&d);
    CHECK_U64(tokens_of(d.seq), target + 6);
    check_head_history(&d);
    head_pass(&d, 1);
    take_pass(&d.trunk, d.trunk.seq, 1, 1);
    close_duo(&d);
}

int main(void)
{
    const uint32_t flags[] = {0, KVS_DEVICE_DEFERRED};
    for (size_t i = 0; i < 2; i++) {
        test_a_layer_that_fits_costs_nothing(flags[i]);
        test_a_suffix_lies_in_the_last_slots_of_the_ring(flags[i]);
        test_the_lookahead_goes_on_beside_the_lease(flags[i]);
        test_truncation_keeps_the_lease(flags[i]);
    }
    test_attention_over_a_lease_is_the_mean_of_what_lies_there();
    test_a_ring_lends_to_its_own_pager();
    return check_finish();
}
