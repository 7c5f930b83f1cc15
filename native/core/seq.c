#include "core/cache.h"

#include "core/device.h"

#include <string.h>

/* ---- for the stream ---- */

kvs_cache *kvs_seq_cache(const kvs_seq *seq)
{
    return seq->cache;
}

uint64_t kvs_seq_committed(const kvs_seq *seq)
{
    return seq->committed;
}

uint64_t kvs_seq_generation(const kvs_seq *seq)
{
    return seq->generation;
}

uint64_t kvs_seq_identity(const kvs_seq *seq)
{
    return seq->identity;
}

uint64_t kvs_seq_rewrites(const kvs_seq *seq)
{
    return seq->n_rewrites;
}

kvs_device *kvs_seq_device(const kvs_seq *seq)
{
    return seq->cache->device;
}

uint64_t kvs_seq_pages(const kvs_seq *seq)
{
    return seq->n_pages;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* A shared column may hold more rows than this sequence has. */
static void view_column(const kvs_page *page, uint64_t n_rows, kvs_page_view *view)
{
    *view = (kvs_page_view){
        .page_id = page->id,
        .extent_id = page->extent->id,
        .slot = page->slot,
        .published_rows = least(page->published_rows, n_rows),
        .host = page->extent->host,
        .host_slots = page->extent->n_slots,
        .n_holders = page->n_holders,
    };
}

static kvs_status find_page(const kvs_seq *seq, uint64_t page)
{
    if (page >= seq->n_pages) {
        return kvs_fail(seq->cache->device, KVS_ENOTFOUND, "page %llu: the sequence has %llu", (kvs_ull)page,
                        (kvs_ull)seq->n_pages);
    }
    return KVS_OK;
}

kvs_status kvs_seq_view_page(const kvs_seq *seq, uint64_t page, kvs_page_view *view)
{
    const kvs_status status = find_page(seq, page);
    if (status == KVS_OK) {
        view_column(seq->pages[page], kvs_rows_below(page, seq->appended), view);
    }
    return status;
}

bool kvs_seq_copy_source(const kvs_seq *seq, uint64_t *page, kvs_page_view *source, uint64_t *rows)
{
    if (seq->source == NULL) {
        return false;
    }
    if (page != NULL) {
        *page = seq->source_page;
    }
    if (source != NULL) {
        view_column(seq->source, seq->source_rows, source);
    }
    if (rows != NULL) {
        *rows = seq->source_rows;
    }
    return true;
}

static void drop_source(kvs_seq *seq)
{
    kvs_page *source = seq->source;
    if (source != NULL) {
        seq->source = NULL;
        source->n_waiting--;
        kvs_page_collect(seq->cache, source);
    }
}

void kvs_seq_copy_done(kvs_seq *seq)
{
    drop_source(seq);
}

kvs_status kvs_page_set_published(kvs_seq *seq, uint64_t page, uint64_t rows)
{
    const kvs_status status = find_page(seq, page);
    if (status < 0) {
        return status;
    }
    if (rows > kvs_rows_below(page, seq->appended)) {
        return kvs_fail(seq->cache->device, KVS_EINVAL, "page %llu: %llu rows published, %llu appended", (kvs_ull)page,
                        (kvs_ull)rows, (kvs_ull)kvs_rows_below(page, seq->appended));
    }
    kvs_page *column = seq->pages[page];
    if (kvs_page_is_shared(column) && rows < column->published_rows) {
        return kvs_fail(seq->cache->device, KVS_EBUSY, "page %llu: %llu rows, others rely on %llu", (kvs_ull)page,
                        (kvs_ull)rows, (kvs_ull)column->published_rows);
    }
    column->published_rows = rows;
    return KVS_OK;
}

/* ---- create, fork, release ---- */

static kvs_status make_seq(kvs_cache *cache, uint64_t ctx_tokens, kvs_seq **seq)
{
    const uint64_t ctx_pages = kvs_div_up(ctx_tokens, KVS_PAGE_TOKENS);
    kvs_seq *made = kvs_object_alloc(cache->device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    made->pages = ctx_pages > SIZE_MAX / sizeof *made->pages
                      ? NULL
                      : kvs_array_alloc(cache->device, (size_t)ctx_pages, sizeof *made->pages);
    if (made->pages == NULL) {
        kvs_object_free(cache->device, made);
        return kvs_fail(cache->device, KVS_ENOMEM, "no memory for the page list of %llu tokens", (kvs_ull)ctx_tokens);
    }
    made->cache = cache;
    made->claims = 1;
    made->identity = kvs_device_next_id(cache->device);
    made->ctx_tokens = ctx_tokens;
    kvs_cache_retain(cache);
    made->next = cache->sequences;
    if (made->next != NULL) {
        made->next->previous = made;
    }
    cache->sequences = made;
    cache->n_sequences++;
    *seq = made;
    return KVS_OK;
}

kvs_status kvs_seq_create(kvs_cache *cache, uint64_t ctx_tokens, kvs_seq **seq)
{
    if (cache == NULL || seq == NULL || ctx_tokens == 0) {
        return kvs_fail(cache == NULL ? NULL : cache->device, KVS_EINVAL,
                        "sequence: no cache, no place for the handle, or a context of 0 tokens");
    }
    kvs_extent *extent = NULL;
    kvs_status status = kvs_extent_create(cache, 0, kvs_div_up(ctx_tokens, KVS_PAGE_TOKENS), &extent);
    if (status < 0) {
        return status;
    }
    kvs_seq *made = NULL;
    status = make_seq(cache, ctx_tokens, &made);
    if (status < 0) {
        kvs_extent_disown(cache, extent);
        return status;
    }
    made->extent = extent;
    *seq = made;
    return KVS_OK;
}

static void drop_pages(kvs_seq *seq, uint64_t n_kept)
{
    while (seq->n_pages > n_kept) {
        kvs_page *page = seq->pages[--seq->n_pages];
        seq->pages[seq->n_pages] = NULL;
        page->n_holders--;
        kvs_page_collect(seq->cache, page);
    }
}

void kvs_seq_retain(kvs_seq *seq)
{
    seq->claims++;
}

void kvs_seq_release(kvs_seq *seq)
{
    if (seq == NULL || --seq->claims != 0) {
        return;
    }
    kvs_cache *cache = seq->cache;
    drop_source(seq);
    drop_pages(seq, 0);
    kvs_extent_disown(cache, seq->extent);
    if (seq->next != NULL) {
        seq->next->previous = seq->previous;
    }
    if (seq->previous != NULL) {
        seq->previous->next = seq->next;
    } else {
        cache->sequences = seq->next;
    }
    cache->n_sequences--;
    kvs_array_free(seq->pages);
    kvs_object_free(cache->device, seq);
    kvs_cache_release(cache);
}

kvs_status kvs_seq_fork(kvs_seq *seq, kvs_seq **child)
{
    if (seq == NULL || child == NULL) {
        return kvs_fail(seq == NULL ? NULL : seq->cache->device, KVS_EINVAL, "fork: no place for the handle");
    }
    if (seq->appended != seq->committed) {
        return kvs_fail(seq->cache->device, KVS_EBUSY, "fork: %llu rows are not committed",
                        (kvs_ull)(seq->appended - seq->committed));
    }
    if (seq->source != NULL) {
        return kvs_fail(seq->cache->device, KVS_EBUSY, "fork: %llu rows of page %llu are not brought over yet",
                        (kvs_ull)seq->source_rows, (kvs_ull)seq->source_page);
    }
    kvs_seq *made = NULL;
    const kvs_status status = make_seq(seq->cache, seq->ctx_tokens, &made);
    if (status < 0) {
        return status;
    }
    for (uint64_t i = 0; i < seq->n_pages; i++) {
        made->pages[i] = seq->pages[i];
        made->pages[i]->n_holders++;
    }
    made->n_pages = seq->n_pages;
    made->committed = seq->committed;
    made->appended = seq->appended;
    *child = made;
    return KVS_OK;
}

/* ---- append ---- */

static bool has_free_slots(const kvs_extent *extent, uint64_t begin, uint64_t end)
{
    if (extent == NULL || begin < extent->first_page) {
        return false;
    }
    for (uint64_t page = begin; page < end; page++) {
        if (extent->slots[page - extent->first_page] != NULL) {
            return false;
        }
    }
    return true;
}

/* Columns for pages begin..end, one behind another, into `made`; all or none. */
static kvs_status make_columns(kvs_seq *seq, kvs_extent *extent, uint64_t begin, uint64_t end, kvs_page **made)
{
    for (uint64_t page = begin; page < end; page++) {
        kvs_page *column = kvs_page_create(seq->cache, extent, page - extent->first_page);
        if (column == NULL) {
            while (page-- > begin) {
                made[page - begin]->n_holders = 0;
                kvs_page_collect(seq->cache, made[page - begin]);
            }
            return KVS_ENOMEM;
        }
        made[page - begin] = column;
    }
    return KVS_OK;
}

static kvs_status check_append(const kvs_seq *seq, uint64_t n_tokens)
{
    kvs_device *device = seq->cache->device;
    if (n_tokens == 0) {
        return kvs_fail(device, KVS_EINVAL, "append: 0 rows");
    }
    if (seq->appended != seq->committed) {
        return kvs_fail(device, KVS_EBUSY, "append: %llu rows are not committed",
                        (kvs_ull)(seq->appended - seq->committed));
    }
    if (n_tokens > seq->ctx_tokens - seq->committed) {
        return kvs_fail(device, KVS_ECONTEXT, "append: need %llu rows, have %llu of a context of %llu",
                        (kvs_ull)n_tokens, (kvs_ull)(seq->ctx_tokens - seq->committed), (kvs_ull)seq->ctx_tokens);
    }
    return KVS_OK;
}

/* The last page goes on in a column of this sequence alone; the old one stays until its rows are brought over. */
static void replace_last_page(kvs_seq *seq, kvs_page *column)
{
    kvs_page *old = seq->pages[seq->n_pages - 1];
    seq->pages[seq->n_pages - 1] = column;
    old->n_holders--;
    old->n_waiting++;
    seq->source = old;
    seq->source_page = seq->n_pages - 1;
    seq->source_rows = kvs_rows_below(seq->n_pages - 1, seq->committed);
}

/* What an earlier, longer history published of a private last page is no longer of this one. */
static void forget_rows(kvs_seq *seq)
{
    if (seq->n_pages != 0) {
        kvs_page *last = seq->pages[seq->n_pages - 1];
        if (!kvs_page_is_shared(last)) {
            last->published_rows = least(last->published_rows, kvs_rows_below(seq->n_pages - 1, seq->committed));
        }
    }
}

kvs_status kvs_seq_append(kvs_seq *seq, uint64_t n_tokens)
{
    if (seq == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "append: no sequence");
    }
    kvs_status status = check_append(seq, n_tokens);
    if (status < 0) {
        return status;
    }
    const bool is_partly_filled = seq->committed % KVS_PAGE_TOKENS != 0;
    const bool replaces = is_partly_filled && kvs_page_is_shared(seq->pages[seq->n_pages - 1]);
    const uint64_t begin = replaces ? seq->n_pages - 1 : seq->n_pages;
    const uint64_t end = kvs_div_up(seq->committed + n_tokens, KVS_PAGE_TOKENS);
    kvs_page **made = kvs_array_alloc(seq->cache->device, (size_t)(end - begin), sizeof *made);
    kvs_extent *extent = seq->extent;
    if (made == NULL) {
        return kvs_fail(seq->cache->device, KVS_ENOMEM, "append: no memory for %llu pages", (kvs_ull)(end - begin));
    }
    if (begin < end && !has_free_slots(extent, begin, end)) {
        const uint64_t ctx_pages = kvs_div_up(seq->ctx_tokens, KVS_PAGE_TOKENS);
        status = kvs_extent_create(seq->cache, begin, ctx_pages - begin, &extent);
    }
    if (status == KVS_OK) {
        status = make_columns(seq, extent, begin, end, made);
        if (status < 0 && extent != seq->extent) {
            kvs_extent_disown(seq->cache, extent);
        }
    }
    if (status == KVS_OK) {
        forget_rows(seq);
        if (extent != seq->extent) {
            kvs_extent_disown(seq->cache, seq->extent);
            seq->extent = extent;
        }
        if (replaces) {
            replace_last_page(seq, made[0]);
        }
        for (uint64_t page = seq->n_pages; page < end; page++) {
            seq->pages[page] = made[page - begin];
        }
        seq->n_pages = end;
        seq->appended = seq->committed + n_tokens;
        seq->generation++;
    }
    kvs_array_free(made);
    return status;
}

/* ---- commit, truncate ---- */

/* Rows are waited for no longer when their page is gone; and when nothing but them is left, the old column serves. */
static void settle_source(kvs_seq *seq)
{
    if (seq->source == NULL) {
        return;
    }
    if (seq->source_page >= seq->n_pages) {
        drop_source(seq);
        return;
    }
    if (kvs_rows_below(seq->source_page, seq->committed) <= seq->source_rows) {
        kvs_page *replacement = seq->pages[seq->source_page];
        seq->pages[seq->source_page] = seq->source;
        seq->source->n_holders++;
        drop_source(seq);
        replacement->n_holders--;
        kvs_page_collect(seq->cache, replacement);
    }
}

static void end_at(kvs_seq *seq, uint64_t n_tokens)
{
    seq->committed = n_tokens;
    seq->appended = n_tokens;
    drop_pages(seq, kvs_div_up(n_tokens, KVS_PAGE_TOKENS));
    settle_source(seq);
    forget_rows(seq);
    seq->generation++;
}

kvs_status kvs_seq_commit(kvs_seq *seq, uint64_t n_tokens)
{
    if (seq == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "commit: no sequence");
    }
    if (n_tokens > seq->appended - seq->committed) {
        return kvs_fail(seq->cache->device, KVS_EINVAL, "commit: %llu rows, %llu are open", (kvs_ull)n_tokens,
                        (kvs_ull)(seq->appended - seq->committed));
    }
    end_at(seq, seq->committed + n_tokens);
    return KVS_OK;
}

kvs_status kvs_seq_truncate(kvs_seq *seq, uint64_t n_tokens)
{
    if (seq == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "truncate: no sequence");
    }
    if (n_tokens > seq->committed) {
        return kvs_fail(seq->cache->device, KVS_EINVAL, "truncate: to %llu tokens, %llu are committed",
                        (kvs_ull)n_tokens, (kvs_ull)seq->committed);
    }
    seq->n_rewrites += n_tokens < seq->committed;
    end_at(seq, n_tokens);
    return KVS_OK;
}

/* ---- reports ---- */

kvs_status kvs_seq_get_info(kvs_seq *seq, kvs_seq_info *info)
{
    if (seq == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(seq == NULL ? NULL : seq->cache->device, KVS_EINVAL, "sequence: no place for its state");
    }
    info->ctx_tokens = seq->ctx_tokens;
    info->committed_tokens = seq->committed;
    info->appended_tokens = seq->appended;
    info->generation = seq->generation;
    info->seq_id = seq->identity;
    info->n_rewrites = seq->n_rewrites;
    info->n_pages = seq->n_pages;
    info->n_shared_pages = 0;
    for (uint64_t i = 0; i < seq->n_pages; i++) {
        info->n_shared_pages += seq->pages[i]->n_holders > 1;
    }
    info->reserved_host_bytes = seq->extent == NULL ? 0 : seq->extent->n_slots * seq->cache->column_bytes;
    return KVS_OK;
}

static kvs_status find_record(const kvs_seq *seq, uint32_t layer, uint64_t page)
{
    if (layer >= seq->cache->n_layers) {
        return kvs_fail(seq->cache->device, KVS_EINVAL, "layer %u: the cache has %u", layer, seq->cache->n_layers);
    }
    return find_page(seq, page);
}

kvs_status kvs_seq_get_page(kvs_seq *seq, uint32_t layer, uint64_t page, kvs_page_info *info)
{
    if (seq == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(seq == NULL ? NULL : seq->cache->device, KVS_EINVAL, "page: no place for its state");
    }
    const kvs_status status = find_record(seq, layer, page);
    if (status < 0) {
        return status;
    }
    kvs_page_view view;
    view_column(seq->pages[page], kvs_rows_below(page, seq->appended), &view);
    info->n_holders = view.n_holders;
    info->page_id = view.page_id;
    info->published_rows = view.published_rows;
    info->host_offset_bytes = kvs_page_host_offset(seq->cache, &view, layer);
    info->extent_id = view.extent_id;
    return KVS_OK;
}
