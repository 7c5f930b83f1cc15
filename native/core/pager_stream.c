/* pager_stream.c: what a pass sends through the ring. The ring's demands continue over the end of a pass, so that the first
 * layers of the next one are on their way while its token is being chosen. */
#include "base/sync.h"
#include "core/pager_state.h"

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

/* A ring whose copy failed is cancelled with the pass that needed it: for the caller a copy failed, nothing is poisoned. */
static kvs_status of_ring(const kvs_pager *pager, kvs_status status)
{
    return status == KVS_EPOISONED ? kvs_fail_copy(pager->device, KVS_EIO, "a page could not be brought from history") : status;
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
        if (view.published_rows < KVS_PAGE_TOKENS) {
            return kvs_fail(pager->device, KVS_EINVAL, "page %llu is full, history has %llu of its rows", (kvs_ull)page,
                            (kvs_ull)view.published_rows);
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

/* Of the pages that a pass streams, in the order of reading, all but the first `skip`, and `most` of these. */
static kvs_status submit_pass(kvs_pager *pager, uint64_t skip, uint64_t most)
{
    for (uint32_t layer = 0; layer < pager->n_layers && most != 0; layer++) {
        const uint64_t n_pages = pager->tail_first - pager->pass[layer].prefix;
        const uint64_t n_skipped = skip < n_pages ? skip : n_pages;
        const uint64_t n_taken = n_pages - n_skipped < most ? n_pages - n_skipped : most;
        const uint64_t begin = pager->pass[layer].prefix + n_skipped;
        kvs_status status = submit_layer(pager, layer, begin, begin + n_taken);
        if (status != KVS_OK) {
            return status;
        }
        skip -= n_skipped;
        most -= n_taken;
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
kvs_status kvs_pager_demand_pages(kvs_pager *pager)
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
    /* Lookahead beside a layer lease has ended where the ring was full. */
    kvs_status status = submit_pass(pager, is_ahead ? pager->lookahead_pages : 0, UINT64_MAX);
    if (status != KVS_OK) {
        return status;
    }
    pager->has_lookahead = false;
    if ((pager->pass_first + pager->pass_rows) / KVS_PAGE_TOKENS != pager->tail_first) {
        return KVS_OK;
    }
    status = submit_pass(pager, 0, UINT64_MAX);
    pager->has_lookahead = status == KVS_OK;
    pager->lookahead_tail = pager->tail_first;
    pager->lookahead_pages = n_pages;
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        pager->lookahead_prefix[layer] = pager->pass[layer].prefix;
    }
    return status;
}

/* Nothing but what has room: a demand that waits for its slot would have its slot changed when the ring grows again. */
void kvs_pager_resume_lookahead(kvs_pager *pager)
{
    const uint64_t n_pages = streamed_pages(pager);
    const uint64_t open_slots = kvs_ring_open_slots(pager->ring);
    pager->lookahead_pages = n_pages < open_slots ? n_pages : open_slots;
    pager->has_lookahead = submit_pass(pager, 0, pager->lookahead_pages) == KVS_OK;
    if (!pager->has_lookahead) {
        (void)kvs_pager_cancel_ring(pager);
    }
}

/* A pass that did not read all it had demanded leaves the ring in the middle of a layer. */
void kvs_pager_leave_ring(kvs_pager *pager)
{
    if (pager->ring != NULL && pager->pass_end_demand != 0 && kvs_ring_consumed(pager->ring) != pager->pass_end_demand) {
        (void)kvs_pager_cancel_ring(pager);
    }
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

static kvs_status check_turn(const kvs_pager *pager, const kvs_pass_layer *pass, uint64_t page)
{
    uint64_t demand = pass->first_demand + page - pass->prefix;
    return demand == kvs_ring_consumed(pager->ring)
               ? KVS_OK
               : kvs_fail(pager->device, KVS_EINVAL, "page %llu is demand %llu, but %llu is the next to be read", (kvs_ull)page,
                          (kvs_ull)demand, (kvs_ull)kvs_ring_consumed(pager->ring));
}

/* Claim the streamed pages from `page` on that are ready, and wait until there are `least` of them, as far as the layer and
 * the ring go. `page_end` receives where they end. */
static kvs_status acquire_streamed(kvs_pager *pager, const kvs_pass_layer *pass, uint64_t page, uint64_t least,
                                   uint64_t *page_end)
{
    kvs_status status = check_turn(pager, pass, page);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t first = pass->first_demand + page - pass->prefix;
    uint64_t layer_end = pass->first_demand + pager->tail_first - pass->prefix;
    uint64_t reachable = kvs_ring_acquirable_end(pager->ring);
    uint64_t ready = kvs_ring_ready(pager->ring);
    uint64_t end = ready > first + least ? ready : first + least;
    end = end < reachable ? end : reachable;
    end = end < layer_end ? end : layer_end;
    *page_end = page + end - first;
    if (end == first) {
        return KVS_OK;
    }
    observe_wave(pager);
    return of_ring(pager, kvs_ring_acquire_wait(pager->ring, end));
}

/* A wave is all that can be read without waiting: one, where the ring has brought the layer ahead of time. Otherwise the
 * resident prefix goes first, and then at least a run of the ring: long enough to keep all threads busy, short enough that
 * copies of the next wave run beside it. */
kvs_status kvs_pager_acquire_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t *page_end)
{
    if (!pager->is_in_pass || layer >= pager->n_layers || page_begin >= pager->active_pages) {
        return kvs_fail(pager->device, KVS_EINVAL, "wave of layer %u at page %llu is outside the pass", layer,
                        (kvs_ull)page_begin);
    }
    const kvs_pass_layer *pass = &pager->pass[layer];
    kvs_status status = kvs_pager_wait_loads(pager, pass->load_ticket);
    bool starts_resident = page_begin < pass->prefix;
    uint64_t end = starts_resident ? pass->prefix : page_begin;
    if (status == KVS_OK && end < pager->tail_first) {
        uint64_t least = starts_resident ? 0 : kvs_pager_run_slots(kvs_ring_open_slots(pager->ring));
        status = acquire_streamed(pager, pass, end, least, &end);
    }
    if (status == KVS_OK) {
        *page_end = end < pager->tail_first ? end : pager->active_pages;
    }
    return status;
}

kvs_status kvs_pager_open_layers(kvs_pager *pager)
{
    const kvs_status status = kvs_pager_wait_loads(pager, pager->loads.submitted);
    if (status != KVS_OK || pager->pass_end_demand == 0) {
        return status;
    }
    uint64_t first = pager->pass_end_demand - streamed_pages(pager);
    if (first != kvs_ring_consumed(pager->ring)) {
        return kvs_fail(pager->device, KVS_EINVAL, "the pass begins at demand %llu, but %llu is the next to be read",
                        (kvs_ull)first, (kvs_ull)kvs_ring_consumed(pager->ring));
    }
    return of_ring(pager, kvs_ring_open(pager->ring, pager->pass_end_demand));
}

/* What observe_wave sees, of layers that were read without being asked for. */
static void observe_layer(kvs_pager *pager, const kvs_stream_note *note, const kvs_stream_note *before)
{
    pager->waves++;
    pager->past_stalls += note->n_lying == 0;
    pager->peak_pages = note->n_lying > pager->peak_pages ? note->n_lying : pager->peak_pages;
    if (before != NULL && note->wanted_ns > before->left_ns) {
        const uint64_t gap = note->wanted_ns - before->left_ns;
        pager->gap_ns = gap > pager->gap_ns ? gap : pager->gap_ns;
    }
}

/* The copies have ended on the device; their news may still be on its way. */
kvs_status kvs_pager_close_layers(kvs_pager *pager, const kvs_stream_note *notes)
{
    const kvs_stream_note *before = NULL;
    if (pager->pass_end_demand == 0) {
        return KVS_OK;
    }
    kvs_status status = kvs_ring_acquire_wait(pager->ring, pager->pass_end_demand);
    if (status == KVS_OK) {
        status = kvs_ring_consume(pager->ring, pager->pass_end_demand);
    }
    for (uint32_t layer = 0; status == KVS_OK && layer < pager->n_layers; layer++) {
        const uint64_t n_pages = pager->tail_first - pager->pass[layer].prefix;
        pager->streamed_pages += n_pages;
        pager->streamed_bytes += n_pages * kvs_cache_record(pager->cache, layer)->record_bytes;
        if (n_pages != 0) {
            observe_layer(pager, &notes[layer], before);
            before = &notes[layer];
        }
    }
    return of_ring(pager, status);
}

kvs_status kvs_pager_release_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t page_end)
{
    const kvs_pass_layer *pass = &pager->pass[layer];
    uint64_t first = page_begin > pass->prefix ? page_begin : pass->prefix;
    uint64_t end = page_end < pager->tail_first ? page_end : pager->tail_first;
    if (first >= end) {
        return KVS_OK;
    }
    pager->streamed_pages += end - first;
    pager->streamed_bytes += (end - first) * kvs_cache_record(pager->cache, layer)->record_bytes;
    pager->released_ns = kvs_clock_ns();
    return of_ring(pager, kvs_ring_consume(pager->ring, pass->first_demand + end - pass->prefix));
}
