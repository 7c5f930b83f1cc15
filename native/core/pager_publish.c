/* pager_publish.c: committed rows go to host history by copies out of their device pages. A page column counts as published
 * only when its copies are known to have ended well; until then its rows stay on the device, so a failed copy can be
 * repeated and nothing is lost. */
#include "core/history.h"
#include "core/pager_state.h"

#include <stdio.h>

#define COPIES_PER_BATCH 96u

/* Copies collected for one wake-up of the engine. */
struct batch {
    kvs_pager *pager;
    kvs_copy copies[COPIES_PER_BATCH];
    uint32_t n_copies;
};

static kvs_status flush(struct batch *batch)
{
    if (batch->n_copies == 0) {
        return KVS_OK;
    }
    kvs_status status = kvs_device_submit(batch->pager->device, batch->copies, batch->n_copies);
    if (status == KVS_OK) {
        batch->pager->publishes.submitted += batch->n_copies;
    }
    batch->n_copies = 0;
    return status;
}

static kvs_status add_copy(struct batch *batch, kvs_copy copy)
{
    kvs_pager *pager = batch->pager;
    copy.is_out = 1;
    copy.done = &pager->publishes.done;
    copy.done_value = pager->publishes.submitted + batch->n_copies + 1;
    copy.failed = &pager->publishes.failed;
    pager->published_bytes += copy.n_bytes * copy.n_pieces;
    batch->copies[batch->n_copies++] = copy;
    return batch->n_copies == COPIES_PER_BATCH ? flush(batch) : KVS_OK;
}

/* Rows [begin, end) of one layer's page: one copy per plane, a piece per head; a whole page is one run. */
static kvs_status add_rows(struct batch *batch, uint32_t layer, uint64_t page, const kvs_page_view *view, uint64_t begin,
                           uint64_t end)
{
    const kvs_pager *pager = batch->pager;
    const kvs_record_info *record = kvs_cache_record(pager->cache, layer);
    kvs_copy copy = {.host_base = kvs_host_base(view->host),
                     .host_offset = kvs_page_host_offset(pager->cache, view, layer),
                     .device_address = kvs_pager_slot_address(pager, pager->where[layer][page]),
                     .n_bytes = record->record_bytes,
                     .n_pieces = 1};
    if (begin == 0 && end == KVS_PAGE_TOKENS) {
        return add_copy(batch, copy);
    }
    uint32_t n_heads = kvs_cache_layer(pager->cache, layer)->n_kv_heads;
    for (uint32_t plane = 0; plane < KVS_N_PLANES; plane++) {
        uint64_t row_bytes = record->plane_row_bytes[plane];
        if (row_bytes == 0) {
            continue;
        }
        kvs_copy part = copy;
        uint64_t offset = record->plane_offset_bytes[plane] + begin * row_bytes;
        part.host_offset += offset;
        part.device_address += offset;
        part.n_bytes = (end - begin) * row_bytes;
        part.n_pieces = n_heads;
        part.host_stride_bytes = record->head_bytes;
        part.device_stride_bytes = record->head_bytes;
        kvs_status status = add_copy(batch, part);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

static uint64_t rows_in_page(const kvs_pager *pager, uint64_t page)
{
    uint64_t committed = kvs_seq_committed(pager->current);
    uint64_t first = page * KVS_PAGE_TOKENS;
    if (committed <= first) {
        return 0;
    }
    return committed - first < KVS_PAGE_TOKENS ? committed - first : KVS_PAGE_TOKENS;
}

static kvs_status queue_rows(kvs_pager *pager, uint64_t first_page, uint64_t end_page)
{
    struct batch batch = {.pager = pager};
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        for (uint64_t page = first_page; page < end_page; page++) {
            const uint64_t rows = rows_in_page(pager, page);
            if (rows == 0) {
                continue;
            }
            kvs_page_view view;
            kvs_status status = kvs_seq_view_page(pager->current, page, &view);
            if (status == KVS_OK && view.published_rows < rows) {
                status = add_rows(&batch, layer, page, &view, view.published_rows, rows);
            }
            if (status != KVS_OK) {
                return status;
            }
        }
    }
    return flush(&batch);
}

/* What could not even be queued has failed like a copy that did: the next settling repeats all of it. Nothing else is under
 * way, so an older failure is one of rows that are queued here again. */
kvs_status kvs_pager_publish(kvs_pager *pager, uint64_t first_page, uint64_t end_page)
{
    atomic_store(&pager->publishes.failed, 0);
    pager->has_pending = true;
    pager->is_due = false;
    pager->pending_first_page = first_page;
    pager->pending_end_page = end_page;
    kvs_status status = queue_rows(pager, first_page, end_page);
    if (status != KVS_OK) {
        kvs_device_note_copy_failure(pager->device);
        atomic_store(&pager->publishes.failed, (int)status);
    }
    return status;
}

kvs_status kvs_pager_publish_later(kvs_pager *pager, uint64_t first_page, uint64_t end_page)
{
    if (kvs_device_backend(pager->device).backend->pass_submit == NULL) {
        return kvs_pager_publish(pager, first_page, end_page);
    }
    atomic_store(&pager->publishes.failed, 0);
    pager->has_pending = true;
    pager->is_due = true;
    pager->pending_first_page = first_page;
    pager->pending_end_page = end_page;
    return KVS_OK;
}

/* What could not be queued is repeated by whoever waits. */
void kvs_pager_publish_due(kvs_pager *pager)
{
    if (pager->has_pending && pager->is_due) {
        (void)kvs_pager_publish(pager, pager->pending_first_page, pager->pending_end_page);
    }
}

static kvs_status wait_published(kvs_pager *pager)
{
    kvs_ticket *ticket = &pager->publishes;
    kvs_pager_publish_due(pager);
    kvs_status status = kvs_device_wait_counter(pager->device, &ticket->done, ticket->submitted, NULL);
    int failed = atomic_exchange(&ticket->failed, 0);
    return status != KVS_OK ? status : (kvs_status)failed;
}

static kvs_status mark_published(kvs_pager *pager)
{
    for (uint64_t page = pager->pending_first_page; page < pager->pending_end_page; page++) {
        uint64_t rows = rows_in_page(pager, page);
        kvs_status status = rows == 0 ? KVS_OK : kvs_page_set_published(pager->current, page, rows);
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

/* Whether history has all rows of the pages, those of the newest pass by its own writing. */
static bool has_all_rows(const kvs_pager *pager, uint64_t first_page, uint64_t end_page)
{
    for (uint64_t page = first_page; page < end_page; page++) {
        const uint64_t first = page * KVS_PAGE_TOKENS;
        const uint64_t before = pager->pass_first > first ? pager->pass_first - first : 0;
        kvs_page_view view;
        if (kvs_seq_view_page(pager->current, page, &view) != KVS_OK || view.published_rows < before) {
            return false;
        }
    }
    return true;
}

/* Of rows that the pass has written: what their copies would have been counted as. */
static void count_rows(kvs_pager *pager, uint64_t page)
{
    kvs_page_view view;
    if (kvs_seq_view_page(pager->current, page, &view) != KVS_OK || rows_in_page(pager, page) <= view.published_rows) {
        return;
    }
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        const kvs_record_info *record = kvs_cache_record(pager->cache, layer);
        const kvs_copy place = {.host_base = kvs_host_base(view.host),
                                .host_offset = kvs_page_host_offset(pager->cache, &view, layer),
                                .n_bytes = record->record_bytes,
                                .n_pieces = 1};
        uint64_t row_bytes = 0;
        for (uint32_t plane = 0; plane < KVS_N_PLANES; plane++) {
            row_bytes += record->plane_row_bytes[plane];
        }
        kvs_histories_touch(kvs_device_histories(pager->device), &place);
        pager->published_bytes += (rows_in_page(pager, page) - view.published_rows) * row_bytes *
                                  kvs_cache_layer(pager->cache, layer)->n_kv_heads;
    }
}

kvs_status kvs_pager_publish_pass(kvs_pager *pager, uint64_t first_page, uint64_t end_page)
{
    if (!pager->is_written || !has_all_rows(pager, first_page, end_page)) {
        return kvs_pager_publish_later(pager, first_page, end_page);
    }
    for (uint64_t page = first_page; page < end_page; page++) {
        count_rows(pager, page);
    }
    pager->pending_first_page = first_page;
    pager->pending_end_page = end_page;
    const kvs_status status = mark_published(pager);
    pager->has_pending = status != KVS_OK;
    return status;
}

/* A pass that only adds rows to the page whose rows are under way, and that nobody shares, needs none of them in history:
 * the page stays on the device as its tail. What is known to have failed is written again first. */
bool kvs_pager_can_settle_later(const kvs_pager *pager, const kvs_seq *seq, uint32_t n_rows)
{
    uint64_t committed = kvs_seq_committed(seq);
    uint64_t page = committed / KVS_PAGE_TOKENS;
    kvs_page_view view;
    return pager->has_pending && atomic_load(&pager->publishes.failed) == 0 && pager->current == seq &&
           pager->generation == kvs_seq_generation(seq) && pager->pending_first_page == page &&
           committed % KVS_PAGE_TOKENS != 0 && (committed + n_rows - 1) / KVS_PAGE_TOKENS == page &&
           kvs_seq_view_page(seq, page, &view) == KVS_OK && view.n_holders == 1;
}

/* What has failed stays pending, and is queued again with the rows of the pass. */
void kvs_pager_settle_tail(kvs_pager *pager)
{
    if (!pager->has_pending) {
        return;
    }
    kvs_status status = wait_published(pager);
    if (status == KVS_OK) {
        status = mark_published(pager);
    }
    atomic_store(&pager->publishes.failed, (int)status);
    pager->has_pending = status != KVS_OK;
}

kvs_status kvs_pager_settle(kvs_pager *pager)
{
    if (!pager->has_pending) {
        return KVS_OK;
    }
    kvs_status status = wait_published(pager);
    if (status != KVS_OK) {
        status = kvs_pager_publish(pager, pager->pending_first_page, pager->pending_end_page);
        status = status == KVS_OK ? wait_published(pager) : status;
    }
    if (status != KVS_OK) {
        atomic_store(&pager->publishes.failed, (int)status); /* nothing is under way: the next settling writes all of it again */
        char what[160];
        (void)snprintf(what, sizeof what, "pages %llu to %llu could not be written to history (%s); they stay on the device",
                       (kvs_ull)pager->pending_first_page, (kvs_ull)pager->pending_end_page, kvs_status_name(status));
        return kvs_fail_copy(pager->device, KVS_EIO, what);
    }
    status = mark_published(pager);
    pager->has_pending = status != KVS_OK;
    return status;
}

kvs_status kvs_pager_publish_wait(kvs_pager *pager)
{
    return pager == NULL ? KVS_EINVAL : kvs_pager_settle(pager);
}
