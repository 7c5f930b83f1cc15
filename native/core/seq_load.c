/* seq_load.c: whole page records between a sequence's host history and the caller, for saving and loading. */
#include "core/cache.h"
#include "core/device.h"

#include <string.h>

static kvs_status view_record(const kvs_seq *seq, uint32_t layer, uint64_t page, kvs_page_view *view)
{
    if (layer >= seq->cache->n_layers) {
        return kvs_fail(seq->cache->device, KVS_EINVAL, "layer %u: the cache has %u", layer, seq->cache->n_layers);
    }
    return kvs_seq_view_page(seq, page, view);
}

kvs_status kvs_seq_read_page_wait(kvs_seq *seq, uint32_t layer, uint64_t page, void *record)
{
    if (seq == NULL || record == NULL) {
        return kvs_fail(seq == NULL ? NULL : seq->cache->device, KVS_EINVAL, "page: no place for its record");
    }
    kvs_page_view view;
    const kvs_status status = view_record(seq, layer, page, &view);
    if (status < 0) {
        return status;
    }
    if (view.published_rows == 0) {
        return kvs_fail(seq->cache->device, KVS_ENOTFOUND, "page %llu: no row is published", (kvs_ull)page);
    }
    return kvs_host_read_wait(view.host, kvs_page_host_offset(seq->cache, &view, layer), record,
                              seq->cache->records[layer].record_bytes);
}

/* A column is read layer by layer; until the last one it holds a mixture that nobody may use. Its bytes change: what a device
 * holds under the old id is no longer this page. */
static void begin_loading(kvs_cache *cache, kvs_page *column, uint32_t layer, uint64_t rows)
{
    column->published_rows = 0;
    if (column->n_loaded == 0) {
        column->id = cache->next_page_id++;
    } else if (column->loading_rows != rows) {
        column->n_loaded = 0;
        memset(column->is_loaded, 0, cache->n_layers);
    }
    column->loading_rows = rows;
    /* A copy that fails may leave half a record where a whole one was. */
    column->n_loaded -= column->is_loaded[layer];
    column->is_loaded[layer] = 0;
}

static void note_loaded(kvs_seq *seq, kvs_page *column, uint32_t layer, uint64_t page)
{
    column->is_loaded[layer] = 1;
    if (++column->n_loaded != seq->cache->n_layers) {
        return;
    }
    column->published_rows = column->loading_rows;
    column->n_loaded = 0;
    memset(column->is_loaded, 0, seq->cache->n_layers);
    if (seq->source != NULL && seq->source_page == page) {
        kvs_seq_copy_done(seq);
    }
}

kvs_status kvs_seq_write_page_wait(kvs_seq *seq, uint32_t layer, uint64_t page, const void *record, uint64_t rows)
{
    if (seq == NULL || record == NULL) {
        return kvs_fail(seq == NULL ? NULL : seq->cache->device, KVS_EINVAL, "page: no record");
    }
    kvs_page_view view;
    kvs_status status = view_record(seq, layer, page, &view);
    if (status < 0) {
        return status;
    }
    if (rows == 0 || rows > kvs_rows_below(page, seq->committed)) {
        return kvs_fail(seq->cache->device, KVS_EINVAL, "page %llu: %llu rows, %llu are committed", (kvs_ull)page,
                        (kvs_ull)rows, (kvs_ull)kvs_rows_below(page, seq->committed));
    }
    kvs_page *column = seq->pages[page];
    if (kvs_page_is_shared(column)) {
        return kvs_fail(seq->cache->device, KVS_EBUSY, "page %llu: %u sequences hold it and %u wait for its rows",
                        (kvs_ull)page, column->n_holders, column->n_waiting);
    }
    begin_loading(seq->cache, column, layer, rows);
    seq->generation++;
    seq->n_rewrites++;
    status = kvs_host_write_wait(view.host, kvs_page_host_offset(seq->cache, &view, layer), record,
                                 seq->cache->records[layer].record_bytes);
    if (status == KVS_OK) {
        note_loaded(seq, column, layer, page);
    }
    return status;
}
