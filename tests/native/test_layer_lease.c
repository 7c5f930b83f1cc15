/* Layer leases without Python: a head of one layer borrows ring slots of a trunk of two. */
#include "pager_scene.h"

#include "kvstream/layer_lease.h"

#include <math.h>

enum { HEAD_SLOTS = 4, HEAD_CTX = 8 * P };

/* The trunk is the bench; a row of the head says which token it is of as one of layer 0 does. */
typedef struct duo {
    bench trunk;
    kvs_cache *cache;
    kvs_seq *seq;
    kvs_pager *pager;
    kvs_lease *pool;
    kvs_layer_lease *lease;
} duo;

static kvs_placement head_placement(const uint32_t *pages, uint32_t ring_slots)
{
    return (kvs_placement){
        .struct_size = sizeof(kvs_placement), .n_layers = 1, .resident_pages = pages, .ring_slots = ring_slots, .max_rows = P};
}

static const uint32_t three[] = {3};

static void open_duo(duo *d, uint32_t flags)
{
    *d = (duo){.lease = NULL};
    open_bench(&d->trunk, flags);
    const uint32_t pages[] = {2, 2};
    const kvs_placement trunk = placement_of(pages, 6, P);
    CHECK_OK(kvs_pager_place(d->trunk.pager, &trunk));
    CHECK_OK(kvs_cache_create(d->trunk.device, layers, 1, &d->cache));
    d->pool = rig_lease(d->trunk.device, HEAD_SLOTS * d->trunk.slot_bytes);
    CHECK_OK(kvs_seq_create(d->cache, HEAD_CTX, &d->seq));
    CHECK_OK(kvs_pager_create(d->cache, &d->pager));
    const kvs_placement head = head_placement(three, 1);
    CHECK_OK(kvs_pager_attach(d->pager, d->pool, &head));
}

static void close_duo(duo *d)
{
    kvs_layer_lease_release(d->lease);
    kvs_seq_release(d->seq);
    kvs_pager_release(d->pager);
    kvs_lease_release(d->pool);
    kvs_cache_release(d->cache);
    close_bench(&d->trunk);
}

static kvs_pager_info head_info(const duo *d)
{
    kvs_pager_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_pager_get_info(d->pager, &info));
    CHECK_OK(kvs_pager_check_integrity(d->pager));
    CHECK_OK(kvs_cache_check_integrity(d->cache));
    if (d->lease != NULL) {
        CHECK_OK(kvs_layer_lease_check_integrity(d->lease));
    }
    if (d->trunk.pager != NULL) {
        (void)info_of(&d->trunk);
    }
    return info;
}

static kvs_layer_lease_info lease_info(const duo *d)
{
    kvs_layer_lease_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_layer_lease_get_info(d->lease, &info));
    return info;
}

static uint64_t generation_of(kvs_seq *seq)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_info(seq, &info));
    return info.generation;
}

static kvs_status play_head(const duo *d)
{
    kvs_pass_view view;
    CHECK_OK(kvs_pager_view_pass(d->pager, &view));
    const uint64_t end = view.first_token + view.n_rows;
    for (uint64_t token = view.first_token; token < end; token++) {
        touch_row(&d->trunk, view.page_tables[0][token / P], 0, token, true);
    }
    for (uint64_t page = 0; page < view.active_pages;) {
        uint64_t page_end = page;
        kvs_status status = kvs_pager_acquire_wave(d->pager, 0, page, &page_end);
        if (status != KVS_OK) {
            return status;
        }
        for (uint64_t token = page * P; token < page_end * P && token < end; token++) {
            touch_row(&d->trunk, view.page_tables[0][token / P], 0, token, false);
        }
        CHECK_OK(kvs_pager_release_wave(d->pager, 0, page, page_end));
        page = page_end;
    }
    return KVS_OK;
}

static void head_pass(const duo *d, uint32_t n_rows)
{
    CHECK_OK(kvs_pager_begin(d->pager, d->seq, n_rows));
    CHECK_OK(play_head(d));
    CHECK_OK(kvs_pager_end(d->pager, n_rows));
    (void)head_info(d);
}

static void head_history(duo *d, uint64_t n_tokens)
{
    while (tokens_of(d->seq) < n_tokens) {
        const uint64_t left = n_tokens - tokens_of(d->seq);
        head_pass(d, left < P ? (uint32_t)left : P);
    }
    CHECK_OK(kvs_pager_publish_wait(d->pager));
}

static void check_head_history(const duo *d)
{
    static uint8_t record[P * 256];
    CHECK_OK(kvs_pager_publish_wait(d->pager));
    const uint64_t end = tokens_of(d->seq);
    for (uint64_t page = 0; page * P < end; page++) {
        CHECK_OK(kvs_seq_read_page_wait(d->seq, 0, page, record));
        for (uint64_t token = page * P; token < (page + 1) * P && token < end; token++) {
            touch_row(&d->trunk, (uint64_t)(uintptr_t)record, 0, token, false);
        }
    }
}

static kvs_layer_lease_desc lease_desc(const duo *d, uint64_t n_more)
{
    return (kvs_layer_lease_desc){.struct_size = sizeof(kvs_layer_lease_desc),
                                  .pager = d->pager,
                                  .lender = d->trunk.pager,
                                  .seq = d->seq,
                                  .generation = generation_of(d->seq),
                                  .reserved_tokens = tokens_of(d->seq) + n_more};
}

static void acquire(duo *d, uint64_t n_more)
{
    const kvs_layer_lease_desc desc = lease_desc(d, n_more);
    CHECK_OK(kvs_layer_lease_acquire_populated(&desc, &d->lease));
    (void)head_info(d);
}

static void give_back(duo *d)
{
    CHECK_OK(kvs_layer_lease_return_wait(d->lease));
    CHECK_OK(kvs_layer_lease_return_wait(d->lease));
    (void)head_info(d);
    kvs_layer_lease_release(d->lease);
    d->lease = NULL;
}

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

static kvs_ring_info ring_of(const kvs_pager *pager)
{
    kvs_ring_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_ring_get_info(kvs_pager_ring(pager), &info));
    return info;
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
    const uint64_t target = 3 * P - 3; /* in page 2, which is borrowed */
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
    const uint32_t flags[] = {0, KVS_DEVICE_DEFERRED};
    for (size_t i = 0; i < 2; i++) {
        test_a_layer_that_fits_costs_nothing(flags[i]);
        test_a_suffix_lies_in_the_last_slots_of_the_ring(flags[i]);
        test_the_lookahead_goes_on_beside_the_lease(flags[i]);
        test_truncation_keeps_the_lease(flags[i]);
        test_a_failed_population_gives_everything_back(flags[i]);
    }
    test_attention_over_a_lease_is_the_mean_of_what_lies_there();
    test_a_ring_lends_to_its_own_pager();
    test_what_cannot_be_leased_is_refused();
    test_a_tail_beyond_the_share_is_refused();
    test_stale_generations_give_no_plan();
    test_rows_that_do_not_reach_history_are_cut();
    test_any_order_of_release();
    test_every_allocation_may_fail();
    return check_finish();
}
