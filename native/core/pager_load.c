/* pager_load.c: bringing pages of the history to resident slots: the prefix of each layer and the tail that a pass writes.
 * All layers make room before any of them takes it. */
#include "core/pager_state.h"

#include <stdio.h>

/* Bring `rows` published rows of a page column's layer into a slot. */
static kvs_status load_page(kvs_pager *pager, uint32_t layer, const kvs_page_view *source, uint32_t slot)
{
    uint64_t bytes = kvs_cache_record(pager->cache, layer)->record_bytes;
    kvs_copy copy = {.host_base = kvs_host_base(source->host),
                     .host_offset = kvs_page_host_offset(pager->cache, source, layer),
                     .device_address = kvs_pager_slot_address(pager, slot),
                     .n_bytes = bytes,
                     .n_pieces = 1,
                     .done = &pager->loads.done,
                     .done_value = pager->loads.submitted + 1,
                     .failed = &pager->loads.failed};
    kvs_status status = kvs_device_submit(pager->device, &copy, 1);
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
/* What is brought must be there: rows that were committed past the pager have never been written. */
static kvs_status check_published(const kvs_pager *pager, uint64_t page, uint64_t have, uint64_t want)
{
    return have >= want ? KVS_OK
                        : kvs_fail(pager->device, KVS_EINVAL, "page %llu: %llu rows are committed, history has %llu",
                                   (kvs_ull)page, (kvs_ull)want, (kvs_ull)have);
}

static kvs_status place_page(kvs_pager *pager, uint32_t layer, uint64_t page)
{
    kvs_page_view view;
    kvs_page_view source;
    uint64_t replaced;
    uint64_t source_rows;
    kvs_status status = kvs_seq_view_page(pager->current, page, &view);
    if (status != KVS_OK) {
        return status;
    }
    uint32_t slot = kvs_pager_take_slot(pager, layer, page, view.page_id);
    if (slot == KVS_NONE) {
        return kvs_fail(pager->device, KVS_ECORRUPT, "no slot for page %llu of layer %u", (kvs_ull)page, layer);
    }
    bool is_replaced = kvs_seq_copy_source(pager->current, &replaced, &source, &source_rows) && replaced == page;
    bool has_rows = page * KVS_PAGE_TOKENS < pager->pass_first;
    if (has_rows) {
        uint64_t left = pager->pass_first - page * KVS_PAGE_TOKENS;
        uint64_t rows = left < KVS_PAGE_TOKENS ? left : KVS_PAGE_TOKENS;
        status = check_published(pager, page, (is_replaced ? &source : &view)->published_rows, is_replaced ? source_rows : rows);
    }
    if (has_rows && status == KVS_OK) {
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
kvs_status kvs_pager_settle_residents(kvs_pager *pager)
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
kvs_status kvs_pager_wait_loads(kvs_pager *pager, uint64_t ticket)
{
    struct kvs_device_view backend = kvs_device_backend(pager->device);
    if (atomic_load_explicit(&pager->loads.done, memory_order_acquire) >= ticket &&
        atomic_load(&pager->loads.failed) == 0) {
        if (backend.backend->counter_seen != NULL) {
            backend.backend->counter_seen(backend.self, &pager->loads.done, ticket);
        }
        return KVS_OK;
    }
    kvs_status status = kvs_device_wait_counter(pager->device, &pager->loads.done, ticket, NULL);
    int failed = atomic_load(&pager->loads.failed);
    if (status == KVS_OK && failed == 0) {
        return KVS_OK;
    }
    char what[80];
    (void)snprintf(what, sizeof what, "a page could not be brought from history (%s)",
                   kvs_status_name(failed != 0 ? failed : (int)status));
    return kvs_fail_copy(pager->device, KVS_EIO, what);
}
