/* pager_pass.c: one pass. Opening it decides everything and queues every copy in the order of reading: first what becomes
 * resident, layer by layer, then what streams, then what the next pass will stream. After that the pass only waits for
 * counters. The ring's demands continue over the end of a pass, so that the first layers of the next one are on their way
 * while its token is being chosen. */
#include "base/sync.h"
#include "core/pager_state.h"

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

/* A copy of the lookahead that failed is asked for anew: nothing has been read yet. */
static bool lookahead_fits(const kvs_pager *pager)
{
    kvs_ring_info ring = {.struct_size = sizeof ring};
    if (!pager->has_lookahead || pager->lookahead_tail != pager->tail_first ||
        kvs_ring_get_info(pager->ring, &ring) != KVS_OK || ring.is_poisoned != 0) {
        return false;
    }
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        if (pager->lookahead_prefix[layer] != pager->pass[layer].prefix) {
            return false;
        }
    }
    return true;
}

kvs_status kvs_pager_cancel_ring(kvs_pager *pager)
{
    pager->has_lookahead = false;
    return pager->ring == NULL ? KVS_OK : kvs_ring_cancel(pager->ring);
}

/* Bring `rows` published rows of a page column's layer into a slot. */
static kvs_status load_page(kvs_pager *pager, uint32_t layer, const kvs_page_view *source, uint32_t slot)
{
    struct kvs_device_view backend = kvs_device_backend(pager->device);
    uint64_t bytes = kvs_cache_record(pager->cache, layer)->record_bytes;
    kvs_copy copy = {.host_base = kvs_host_base(source->host),
                     .host_offset = kvs_page_host_offset(pager->cache, source, layer),
                     .device_address = kvs_pager_slot_address(pager, slot),
                     .n_bytes = bytes,
                     .n_pieces = 1,
                     .done = &pager->loads.done,
                     .done_value = pager->loads.submitted + 1,
                     .failed = &pager->loads.failed};
    kvs_status status = backend.backend->copy_submit(backend.self, &copy);
    if (status != KVS_OK) {
        return status;
    }
    pager->pass[layer].load_ticket = ++pager->loads.submitted;
    pager->loaded_pages++;
    pager->loaded_bytes += bytes;
    pager->copies++;
    return KVS_OK;
}

/* Make one page resident; committed rows come from history, or for a replaced page from the one it replaces. */
static kvs_status place_page(kvs_pager *pager, uint32_t layer, uint64_t page)
{
    kvs_page_view view;
    kvs_page_view source;
    uint64_t replaced;
    kvs_status status = kvs_seq_view_page(pager->current, page, &view);
    if (status != KVS_OK) {
        return status;
    }
    uint32_t slot = kvs_pager_take_slot(pager, layer, page, view.page_id);
    if (slot == KVS_NONE) {
        return kvs_fail(pager->device, KVS_ECORRUPT, "no slot for page %llu of layer %u", (kvs_ull)page, layer);
    }
    bool is_replaced = kvs_seq_copy_source(pager->current, &replaced, &source, NULL) && replaced == page;
    bool has_rows = page * KVS_PAGE_TOKENS < pager->pass_first;
    if (has_rows) {
        status = load_page(pager, layer, is_replaced ? &source : &view, slot);
    }
    if (status != KVS_OK) {
        kvs_pager_forget_pages(pager, layer, page, page + 1); /* nothing will arrive there */
    }
    return status;
}

static kvs_status place_range(kvs_pager *pager, uint32_t layer, uint64_t begin, uint64_t end)
{
    for (uint64_t page = begin; page < end; page++) {
        if (pager->where[layer][page] != KVS_NONE) {
            continue;
        }
        kvs_status status = place_page(pager, layer, page);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

/* Room first, in all layers, then pages: a layer may only take slots that another no longer needs. */
static kvs_status settle_residents(kvs_pager *pager)
{
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_pager_forget_pages(pager, layer, pager->pass[layer].prefix, pager->tail_first);
        kvs_pager_forget_pages(pager, layer, pager->active_pages, pager->where_pages);
    }
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_status status = place_range(pager, layer, 0, pager->pass[layer].prefix);
        if (status == KVS_OK) {
            status = place_range(pager, layer, pager->tail_first, pager->active_pages);
        }
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

/* Wait for loads up to a ticket. A page whose load failed must not be found again: every resident page is forgotten. */
static kvs_status wait_loads(kvs_pager *pager, uint64_t ticket)
{
    struct kvs_device_view backend = kvs_device_backend(pager->device);
    if (atomic_load_explicit(&pager->loads.done, memory_order_acquire) >= ticket &&
        atomic_load(&pager->loads.failed) == 0) {
        return KVS_OK;
    }
    kvs_status status = backend.backend->wait_counter(backend.self, &pager->loads.done, ticket, NULL);
    int failed = atomic_load(&pager->loads.failed);
    if (status == KVS_OK && failed == 0) {
        return KVS_OK;
    }
    return kvs_fail(pager->device, KVS_EIO, "a page could not be brought from history (%s)",
                    kvs_status_name(failed != 0 ? failed : (int)status));
}

/* A ring whose copy failed is cancelled with the pass that needed it: for the caller a copy failed, nothing is poisoned. */
static kvs_status of_ring(const kvs_pager *pager, kvs_status status)
{
    return status == KVS_EPOISONED ? kvs_fail(pager->device, KVS_EIO, "a page could not be brought from history") : status;
}

/* Queue the streamed pages of a layer; a run ends where host records stop being adjacent. */
static kvs_status submit_layer(kvs_pager *pager, uint32_t layer, uint64_t begin, uint64_t end)
{
    kvs_demand demand = {.n_pages = 0};
    kvs_page_view last = {.page_id = 0};
    for (uint64_t page = begin; page < end; page++) {
        kvs_page_view view;
        kvs_status status = kvs_seq_view_page(pager->current, page, &view);
        if (status != KVS_OK) {
            return status;
        }
        bool extends = demand.n_pages != 0 && view.extent_id == last.extent_id && view.slot == last.slot + 1;
        if (!extends && demand.n_pages != 0) {
            uint64_t first;
            status = of_ring(pager, kvs_ring_submit(pager->ring, &demand, 1, &first));
            if (status != KVS_OK) {
                return status;
            }
            demand.n_pages = 0;
        }
        if (demand.n_pages == 0) {
            demand = (kvs_demand){.host = view.host,
                                  .host_offset_bytes = kvs_page_host_offset(pager->cache, &view, layer),
                                  .record_bytes = kvs_cache_record(pager->cache, layer)->record_bytes,
                                  .layer = layer};
        }
        demand.n_pages++;
        last = view;
    }
    uint64_t first;
    return demand.n_pages == 0 ? KVS_OK : of_ring(pager, kvs_ring_submit(pager->ring, &demand, 1, &first));
}

static kvs_status submit_pass(kvs_pager *pager)
{
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_status status = submit_layer(pager, layer, pager->pass[layer].prefix, pager->tail_first);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

static uint64_t streamed_pages(const kvs_pager *pager)
{
    uint64_t n_pages = 0;
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        n_pages += pager->tail_first - pager->pass[layer].prefix;
    }
    return n_pages;
}

/* Number the pass's demands, from what earlier lookahead has submitted or anew, and look ahead to the next pass where every
 * outcome of this one leaves the same pages streaming. */
static kvs_status demand_pages(kvs_pager *pager)
{
    bool is_ahead = lookahead_fits(pager);
    pager->pass_end_demand = 0;
    if (!is_ahead) {
        kvs_status status = kvs_pager_cancel_ring(pager);
        if (status != KVS_OK) {
            return status;
        }
    }
    uint64_t n_pages = streamed_pages(pager);
    if (n_pages == 0) {
        return KVS_OK;
    }
    if (pager->ring == NULL) {
        return kvs_fail(pager->device, KVS_ENOSPACE, "%llu pages must stream and the placement has no ring",
                        (kvs_ull)n_pages);
    }
    uint64_t demand = kvs_ring_consumed(pager->ring);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        pager->pass[layer].first_demand = demand;
        demand += pager->tail_first - pager->pass[layer].prefix;
    }
    pager->pass_end_demand = demand;
    if (!is_ahead) {
        kvs_status status = submit_pass(pager);
        if (status != KVS_OK) {
            return status;
        }
    }
    pager->has_lookahead = false;
    if ((pager->pass_first + pager->pass_rows) / KVS_PAGE_TOKENS != pager->tail_first) {
        return KVS_OK;
    }
    kvs_status status = submit_pass(pager);
    pager->has_lookahead = status == KVS_OK;
    pager->lookahead_tail = pager->tail_first;
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        pager->lookahead_prefix[layer] = pager->pass[layer].prefix;
    }
    return status;
}

static kvs_status page_address(const kvs_pager *pager, uint32_t layer, uint64_t page, uint64_t *address)
{
    const kvs_pass_layer *pass = &pager->pass[layer];
    if (page >= pass->prefix && page < pager->tail_first) {
        return kvs_ring_page_address(pager->ring, pass->first_demand + page - pass->prefix, address);
    }
    *address = kvs_pager_slot_address(pager, pager->where[layer][page]);
    return KVS_OK;
}

/* Freeze a layer's spans: neighbouring addresses become one span, and the plan checks all of them. */
static kvs_status plan_layer(kvs_pager *pager, uint32_t layer, kvs_span *spans)
{
    uint64_t active_tokens = pager->pass_first + pager->pass_rows;
    uint32_t n_spans = 0;
    uint64_t next_address = 0;
    for (uint64_t page = 0; page < pager->active_pages; page++) {
        uint64_t address;
        kvs_status status = page_address(pager, layer, page, &address);
        if (status != KVS_OK) {
            return status;
        }
        uint64_t left = active_tokens - page * KVS_PAGE_TOKENS;
        uint64_t tokens = left < KVS_PAGE_TOKENS ? left : KVS_PAGE_TOKENS;
        if (n_spans != 0 && address == next_address) {
            spans[n_spans - 1].n_tokens += tokens;
        } else {
            spans[n_spans++] = (kvs_span){.token_begin = page * KVS_PAGE_TOKENS,
                                          .n_tokens = tokens,
                                          .lease = pager->lease,
                                          .offset_bytes = address - kvs_lease_address(pager->lease),
                                          .stride_bytes = pager->slot_bytes,
                                          .executor = KVS_EXECUTOR_DEVICE};
        }
        next_address = address + pager->slot_bytes;
    }
    kvs_span_desc desc = {.struct_size = sizeof desc,
                          .n_spans = n_spans,
                          .layer = kvs_cache_layer(pager->cache, layer),
                          .spans = spans,
                          .active_tokens = active_tokens,
                          .n_query_rows = pager->pass_rows};
    kvs_status status = kvs_span_plan_make(pager->device, &desc, &pager->pass[layer].plan);
    if (status != KVS_OK) {
        return status;
    }
    return kvs_span_plan_page_table(pager->pass[layer].plan, pager->pass[layer].page_table, pager->where_pages);
}

static kvs_status plan_pass(kvs_pager *pager)
{
    kvs_span *spans = kvs_array_alloc((size_t)pager->active_pages, sizeof *spans);
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
    kvs_status status = settle_residents(pager);
    if (status == KVS_OK) {
        status = demand_pages(pager);
    }
    if (status == KVS_OK) {
        status = plan_pass(pager);
    }
    /* Rows are written beside those that are being brought: a tail must be whole first. */
    if (status == KVS_OK && kvs_seq_copy_source(pager->current, NULL, NULL, NULL)) {
        status = wait_loads(pager, pager->loads.submitted);
    } else if (status == KVS_OK && pager->pass_first % KVS_PAGE_TOKENS != 0) {
        status = wait_loads(pager, pager->loads.submitted);
    }
    return status;
}

/* After a failure no load or demand may still be under way, and a page that did not arrive must not be found. */
static void undo_open(kvs_pager *pager)
{
    struct kvs_device_view backend = kvs_device_backend(pager->device);
    release_plans(pager);
    (void)kvs_pager_cancel_ring(pager);
    (void)backend.backend->wait_counter(backend.self, &pager->loads.done, pager->loads.submitted, NULL);
    if (atomic_exchange(&pager->loads.failed, 0) != 0) {
        for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
            kvs_pager_forget_pages(pager, layer, 0, pager->where_pages);
        }
    }
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
    uint64_t active = kvs_div_up(kvs_seq_committed(seq) + n_rows, KVS_PAGE_TOKENS);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        if (active > pager->capacity[layer] && pager->capacity[layer] < pager->tail_pages) {
            return kvs_fail(pager->device, KVS_ENOSPACE, "layer %u may keep %u pages, its tail alone needs %llu", layer,
                            pager->capacity[layer], (kvs_ull)pager->tail_pages);
        }
    }
    return KVS_OK;
}

kvs_status kvs_pager_begin(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows)
{
    if (pager == NULL || seq == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = pager->is_in_pass ? kvs_fail(pager->device, KVS_EBUSY, "a pass is open")
                                          : kvs_pager_check_rows(pager, seq, n_rows);
    if (status == KVS_OK) {
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

kvs_status kvs_pager_view_pass(kvs_pager *pager, kvs_pass_view *view)
{
    if (!pager->is_in_pass) {
        return kvs_fail(pager->device, KVS_EBUSY, "no pass is open");
    }
    *view = (kvs_pass_view){.n_rows = pager->pass_rows,
                            .n_layers = pager->n_layers,
                            .first_token = pager->pass_first,
                            .active_pages = pager->active_pages,
                            .page_tables = pager->tables};
    return KVS_OK;
}

/* What the policy is told: how full the ring was, and how long nothing was consumed. */
static void observe_wave(kvs_pager *pager)
{
    uint64_t lying = kvs_ring_ready(pager->ring) - kvs_ring_consumed(pager->ring);
    pager->peak_pages = lying > pager->peak_pages ? lying : pager->peak_pages;
    pager->waves++;
    if (pager->released_ns != 0) {
        uint64_t gap = kvs_clock_ns() - pager->released_ns;
        pager->gap_ns = gap > pager->gap_ns ? gap : pager->gap_ns;
    }
}

/* A ring wave is everything that is ready, at least half of what the ring can hold: long enough to keep all threads busy,
 * short enough that copies of the next wave run beside it. */
static kvs_status acquire_streamed(kvs_pager *pager, const kvs_pass_layer *pass, uint64_t page_begin, uint64_t *page_end)
{
    observe_wave(pager);
    uint64_t first = pass->first_demand + page_begin - pass->prefix;
    uint64_t layer_end = pass->first_demand + pager->tail_first - pass->prefix;
    if (first != kvs_ring_consumed(pager->ring)) {
        return kvs_fail(pager->device, KVS_EINVAL, "page %llu is demand %llu, but %llu is the next to be read",
                        (kvs_ull)page_begin, (kvs_ull)first, (kvs_ull)kvs_ring_consumed(pager->ring));
    }
    uint64_t half = kvs_ring_open_slots(pager->ring) / 2;
    uint64_t end = first + (half == 0 ? 1 : half);
    uint64_t reachable = kvs_ring_acquirable_end(pager->ring);
    uint64_t ready = kvs_ring_ready(pager->ring);
    end = ready > end ? ready : end;
    end = end < reachable ? end : reachable;
    end = end < layer_end ? end : layer_end;
    kvs_status status = of_ring(pager, kvs_ring_acquire_wait(pager->ring, end));
    if (status == KVS_OK) {
        *page_end = pass->prefix + end - pass->first_demand;
    }
    return status;
}

kvs_status kvs_pager_acquire_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t *page_end)
{
    if (!pager->is_in_pass || layer >= pager->n_layers || page_begin >= pager->active_pages) {
        return kvs_fail(pager->device, KVS_EINVAL, "wave of layer %u at page %llu is outside the pass", layer,
                        (kvs_ull)page_begin);
    }
    const kvs_pass_layer *pass = &pager->pass[layer];
    if (page_begin >= pass->prefix && page_begin < pager->tail_first) {
        return acquire_streamed(pager, pass, page_begin, page_end);
    }
    kvs_status status = wait_loads(pager, pass->load_ticket);
    if (status == KVS_OK) {
        bool is_prefix = page_begin < pass->prefix && pass->prefix < pager->tail_first;
        *page_end = is_prefix ? pass->prefix : pager->active_pages;
    }
    return status;
}

kvs_status kvs_pager_release_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t page_end)
{
    const kvs_pass_layer *pass = &pager->pass[layer];
    if (page_begin < pass->prefix || page_begin >= pager->tail_first) {
        return KVS_OK;
    }
    uint64_t n_pages = page_end - page_begin;
    pager->streamed_pages += n_pages;
    pager->streamed_bytes += n_pages * kvs_cache_record(pager->cache, layer)->record_bytes;
    pager->released_ns = kvs_clock_ns();
    return of_ring(pager, kvs_ring_consume(pager->ring, pass->first_demand + page_end - pass->prefix));
}

/* A pass that did not read all it had demanded leaves the ring in the middle of a layer. */
static void leave_ring(kvs_pager *pager)
{
    if (pager->ring != NULL && pager->pass_end_demand != 0 && kvs_ring_consumed(pager->ring) != pager->pass_end_demand) {
        (void)kvs_pager_cancel_ring(pager);
    }
}

kvs_status kvs_pager_end(kvs_pager *pager, uint32_t n_rows)
{
    if (pager == NULL) {
        return KVS_EINVAL;
    }
    if (!pager->is_in_pass) {
        return kvs_fail(pager->device, KVS_EBUSY, "no pass is open");
    }
    if (n_rows > pager->pass_rows) {
        return kvs_fail(pager->device, KVS_EINVAL, "%u rows to commit, the pass has %u", n_rows, pager->pass_rows);
    }
    /* Layers that nobody attended to may still be under way; their slots must not change hands before. */
    kvs_status status = n_rows == 0 ? KVS_OK : wait_loads(pager, pager->loads.submitted);
    if (n_rows == 0 || status != KVS_OK) {
        undo_open(pager);
        return status;
    }
    release_plans(pager);
    leave_ring(pager);
    kvs_seq_copy_done(pager->current);
    status = kvs_seq_commit(pager->current, n_rows);
    pager->generation = kvs_seq_generation(pager->current);
    pager->is_in_pass = false;
    if (status != KVS_OK) {
        return status;
    }
    uint64_t n_pages = kvs_seq_pages(pager->current);
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_pager_forget_pages(pager, layer, n_pages, pager->active_pages);
    }
    return kvs_pager_publish(pager, pager->tail_first, n_pages);
}
