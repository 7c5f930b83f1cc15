/* pager_pass.c: one pass. Opening it decides everything and queues every copy in the order of reading: first what becomes
 * resident, layer by layer, then what streams, then what the next pass will stream. After that the pass only waits for
 * counters. */
#include "core/pager_state.h"
#include "core/timeline.h"

uint64_t kvs_pager_prefix(const kvs_pager *pager, uint32_t layer, uint64_t tail_first, uint64_t active_pages)
{
    uint64_t capacity = pager->capacity[layer];
    if (active_pages <= capacity) {
        return tail_first;
    }
    uint64_t room = capacity - (active_pages - tail_first);
    return tail_first < room ? tail_first : room;
}

/* Where each layer's pages go is known before anything moves. */
static void shape_pass(kvs_pager *pager, uint32_t n_rows)
{
    pager->pass_rows = n_rows;
    pager->pass_first = kvs_seq_committed(pager->current);
    pager->tail_first = pager->pass_first / KVS_PAGE_TOKENS;
    pager->active_pages = kvs_div_up(pager->pass_first + n_rows, KVS_PAGE_TOKENS);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        pager->pass[layer].prefix = kvs_pager_prefix(pager, layer, pager->tail_first, pager->active_pages);
    }
}

/* Where a page lies: an address, the region that it is in, and how far from there the next slot is. */
struct place {
    uint64_t address;
    uint64_t stride_bytes;
    kvs_lease *region;
};

static kvs_status find_page(const kvs_pager *pager, uint32_t layer, uint64_t page, struct place *place)
{
    const kvs_pass_layer *pass = &pager->pass[layer];
    *place = (struct place){.stride_bytes = pager->slot_bytes, .region = pager->lease};
    if (page >= pass->prefix && page < pager->tail_first) {
        return kvs_ring_page_address(pager->ring, pass->first_demand + page - pass->prefix, &place->address);
    }
    const uint32_t slot = pager->where[layer][page];
    if (slot == KVS_NONE) {
        return kvs_fail(pager->device, KVS_ESTALE, "page %llu of layer %u is not on the device", (kvs_ull)page, layer);
    }
    place->address = kvs_pager_slot_address(pager, slot);
    if (slot >= kvs_pager_own_slots(pager)) {
        place->stride_bytes = pager->borrowed_stride_bytes;
        place->region = pager->borrowed_region;
    }
    return KVS_OK;
}

/* Freeze a layer's spans: neighbouring addresses become one span, and the plan checks all of them. */
kvs_status kvs_pager_plan_layer(const kvs_pager *pager, uint32_t layer, uint64_t active_tokens, uint32_t n_rows,
                                kvs_span *spans, kvs_span_plan **plan)
{
    uint32_t n_spans = 0;
    struct place last = {.region = NULL};
    for (uint64_t page = 0; page < pager->active_pages; page++) {
        struct place place;
        kvs_status status = find_page(pager, layer, page, &place);
        if (status != KVS_OK) {
            return status;
        }
        uint64_t left = active_tokens - page * KVS_PAGE_TOKENS;
        uint64_t tokens = left < KVS_PAGE_TOKENS ? left : KVS_PAGE_TOKENS;
        if (place.region == last.region && place.address == last.address + last.stride_bytes) {
            spans[n_spans - 1].n_tokens += tokens;
        } else {
            spans[n_spans++] = (kvs_span){.token_begin = page * KVS_PAGE_TOKENS,
                                          .n_tokens = tokens,
                                          .lease = place.region,
                                          .offset_bytes = place.address - kvs_lease_address(place.region),
                                          .stride_bytes = place.stride_bytes,
                                          .executor = KVS_EXECUTOR_DEVICE};
        }
        last = place;
    }
    kvs_span_desc desc = {.struct_size = sizeof desc,
                          .n_spans = n_spans,
                          .layer = kvs_cache_layer(pager->cache, layer),
                          .spans = spans,
                          .active_tokens = active_tokens,
                          .n_query_rows = n_rows};
    return kvs_span_plan_make(pager->device, &desc, plan);
}

static kvs_status plan_layer(kvs_pager *pager, uint32_t layer, kvs_span *spans)
{
    kvs_pass_layer *pass = &pager->pass[layer];
    kvs_status status = kvs_pager_plan_layer(pager, layer, pager->pass_first + pager->pass_rows, pager->pass_rows, spans,
                                             &pass->plan);
    return status == KVS_OK ? kvs_span_plan_page_table(pass->plan, pass->page_table, pager->where_pages) : status;
}

static kvs_status plan_pass(kvs_pager *pager)
{
    kvs_span *spans = kvs_array_alloc(pager->device, (size_t)pager->active_pages, sizeof *spans);
    if (spans == NULL) {
        return kvs_fail(pager->device, KVS_ENOMEM, "no memory for %llu spans", (kvs_ull)pager->active_pages);
    }
    kvs_status status = KVS_OK;
    for (uint32_t layer = 0; layer < pager->n_layers && status == KVS_OK; layer++) {
        status = plan_layer(pager, layer, spans);
    }
    kvs_array_free(spans);
    return status;
}

static void release_plans(kvs_pager *pager)
{
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_span_plan_release(pager->pass[layer].plan);
        pager->pass[layer].plan = NULL;
    }
}

static kvs_status open_pass(kvs_pager *pager)
{
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        pager->pass[layer].load_ticket = 0;
    }
    kvs_status status = kvs_pager_settle_residents(pager);
    if (status == KVS_OK) {
        status = kvs_pager_demand_pages(pager);
    }
    if (status == KVS_OK) {
        status = plan_pass(pager);
    }
    /* Rows are written beside those that are being brought: a tail must be whole first. */
    if (status == KVS_OK && kvs_seq_copy_source(pager->current, NULL, NULL, NULL)) {
        status = kvs_pager_wait_loads(pager, pager->loads.submitted);
    } else if (status == KVS_OK && pager->pass_first % KVS_PAGE_TOKENS != 0) {
        status = kvs_pager_wait_loads(pager, pager->loads.submitted);
    }
    return status;
}

/* After a failure no load or demand may still be under way, and a page that did not arrive must not be found. */
void kvs_pager_forget_failed(kvs_pager *pager)
{
    (void)kvs_device_wait_counter(pager->device, &pager->loads.done, pager->loads.submitted, NULL);
    if (atomic_exchange(&pager->loads.failed, 0) != 0) {
        /* A page whose rows are on their way to history was here before, whole. */
        uint64_t end = pager->has_pending ? pager->pending_first_page : pager->where_pages;
        for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
            kvs_pager_forget_pages(pager, layer, 0, end);
        }
    }
}

static void undo_open(kvs_pager *pager)
{
    release_plans(pager);
    (void)kvs_pager_cancel_ring(pager);
    kvs_pager_forget_failed(pager);
    bool is_restored = kvs_seq_copy_source(pager->current, NULL, NULL, NULL);
    (void)kvs_seq_commit(pager->current, 0);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_pager_forget_pages(pager, layer, kvs_seq_pages(pager->current), pager->where_pages);
    }
    pager->generation = kvs_seq_generation(pager->current);
    if (is_restored) {
        kvs_pager_set_current(pager, NULL); /* its last page has its old id again, and perhaps its old slot */
    }
    pager->is_in_pass = false;
}

kvs_status kvs_pager_check_rows(const kvs_pager *pager, const kvs_seq *seq, uint32_t n_rows)
{
    if (pager->lease == NULL) {
        return kvs_fail(pager->device, KVS_EBUSY, "the pager has no pool");
    }
    if (kvs_seq_cache(seq) != pager->cache) {
        return kvs_fail(pager->device, KVS_EINVAL, "the sequence belongs to another cache");
    }
    if (n_rows == 0 || n_rows > pager->max_rows) {
        return kvs_fail(pager->device, KVS_EINVAL, "a pass of %u rows, the placement allows 1 to %u", n_rows,
                        pager->max_rows);
    }
    kvs_status status = kvs_pager_check_lease(pager, seq, n_rows);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t active = kvs_div_up(kvs_seq_committed(seq) + n_rows, KVS_PAGE_TOKENS);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        if (active > pager->capacity[layer] && pager->capacity[layer] < pager->tail_pages) {
            return kvs_fail(pager->device, KVS_ENOSPACE, "layer %u may keep %u pages, its tail alone needs %llu", layer,
                            pager->capacity[layer], (kvs_ull)pager->tail_pages);
        }
    }
    return KVS_OK;
}

static kvs_status begin_pass(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows)
{
    kvs_status status = pager->is_in_pass ? kvs_fail(pager->device, KVS_EBUSY, "a pass is open")
                                          : kvs_pager_check_rows(pager, seq, n_rows);
    if (status == KVS_OK && !kvs_pager_can_settle_later(pager, seq, n_rows)) {
        status = kvs_pager_settle(pager);
    }
    if (status == KVS_OK) {
        status = kvs_seq_append(seq, n_rows);
    }
    if (status != KVS_OK) {
        return status;
    }
    /* A page that the append replaced has another id: the slot of the old one now belongs to a fork. */
    bool is_known = pager->current == seq && pager->generation + 1 == kvs_seq_generation(seq) &&
                    !kvs_seq_copy_source(seq, NULL, NULL, NULL);
    if (!is_known) {
        (void)kvs_pager_cancel_ring(pager);
        status = kvs_pager_select(pager, seq);
    } else {
        status = kvs_pager_reserve_pages(pager, kvs_seq_pages(seq) + 1);
    }
    if (status != KVS_OK) {
        (void)kvs_seq_commit(seq, 0);
        kvs_pager_set_current(pager, NULL);
        return status;
    }
    pager->is_in_pass = true;
    pager->released_ns = 0;
    pager->gap_ns = 0;
    pager->peak_pages = 0;
    shape_pass(pager, n_rows);
    status = open_pass(pager);
    if (status != KVS_OK) {
        undo_open(pager);
    }
    return status;
}

kvs_status kvs_pager_begin(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows)
{
    if (pager == NULL || seq == NULL) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    const uint64_t begin_ns = kvs_timeline_begin(pager->device);
    const uint64_t first = kvs_seq_committed(seq);
    const kvs_status status = begin_pass(pager, seq, n_rows);
    kvs_timeline_end(pager->device, begin_ns, (kvs_event){.kind = KVS_EVENT_OPEN, .first = first, .n_rows = n_rows});
    return status;
}

kvs_status kvs_pager_view_pass(kvs_pager *pager, kvs_pass_view *view)
{
    if (!pager->is_in_pass) {
        return kvs_fail(pager->device, KVS_EBUSY, "no pass is open");
    }
    kvs_stream_view stream = {.gate = NULL};
    if (pager->pass_end_demand != 0) {
        kvs_ring_view(pager->ring, &stream);
    }
    stream.layers = pager->stream;
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        const kvs_pass_layer *of = &pager->pass[layer];
        pager->stream[layer] = (kvs_stream_layer){.first_demand = of->first_demand,
                                                  .first_page = (uint32_t)of->prefix,
                                                  .end_page = (uint32_t)pager->tail_first};
    }
    *view = (kvs_pass_view){.stream = stream,
                            .n_rows = pager->pass_rows,
                            .n_layers = pager->n_layers,
                            .first_token = pager->pass_first,
                            .seq_id = kvs_seq_identity(pager->current),
                            .cache_id = kvs_cache_identity(pager->cache),
                            .n_rewrites = kvs_seq_rewrites(pager->current),
                            .active_pages = pager->active_pages,
                            .is_resident = pager->pass_end_demand == 0,
                            .page_tables = pager->tables};
    return KVS_OK;
}

static kvs_status end_pass(kvs_pager *pager, uint32_t n_rows)
{
    if (!pager->is_in_pass) {
        return kvs_fail(pager->device, KVS_EBUSY, "no pass is open");
    }
    if (n_rows > pager->pass_rows) {
        return kvs_fail(pager->device, KVS_EINVAL, "%u rows to commit, the pass has %u", n_rows, pager->pass_rows);
    }
    /* Layers that nobody attended to may still be under way; their slots must not change hands before. */
    kvs_status status = n_rows == 0 ? KVS_OK : kvs_pager_wait_loads(pager, pager->loads.submitted);
    if (n_rows == 0 || status != KVS_OK) {
        undo_open(pager);
        return status;
    }
    release_plans(pager);
    kvs_pager_leave_ring(pager);
    kvs_seq_copy_done(pager->current);
    kvs_pager_settle_tail(pager);
    status = kvs_seq_commit(pager->current, n_rows);
    pager->generation = kvs_seq_generation(pager->current);
    pager->is_in_pass = false;
    if (status != KVS_OK) {
        /* Somebody has changed the sequence under the pass: nothing that was known of its pages holds. */
        pager->has_pending = false;
        (void)kvs_pager_cancel_ring(pager);
        kvs_pager_set_current(pager, NULL);
        return status;
    }
    uint64_t n_pages = kvs_seq_pages(pager->current);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_pager_forget_pages(pager, layer, n_pages, pager->active_pages);
    }
    return kvs_pager_publish(pager, pager->tail_first, n_pages);
}

kvs_status kvs_pager_end(kvs_pager *pager, uint32_t n_rows)
{
    if (pager == NULL) {
        return KVS_EINVAL;
    }
    const uint64_t begin_ns = kvs_timeline_begin(pager->device);
    const kvs_status status = end_pass(pager, n_rows);
    kvs_timeline_end(pager->device, begin_ns, (kvs_event){.kind = KVS_EVENT_CLOSE, .n_rows = n_rows});
    return status;
}
