#include "core/cache.h"

#include "core/device.h"

#include <string.h>

uint64_t kvs_cache_identity(const kvs_cache *cache)
{
    return cache->identity;
}

kvs_device *kvs_cache_device(const kvs_cache *cache)
{
    return cache->device;
}

const kvs_kv_layer *kvs_cache_layer(const kvs_cache *cache, uint32_t layer)
{
    return &cache->layers[layer];
}

const kvs_record_info *kvs_cache_record(const kvs_cache *cache, uint32_t layer)
{
    return &cache->records[layer];
}

uint64_t kvs_page_host_offset(const kvs_cache *cache, const kvs_page_view *view, uint32_t layer)
{
    return cache->layer_offsets[layer] * view->host_slots + view->slot * cache->records[layer].record_bytes;
}

/* ---- extents ---- */

kvs_status kvs_extent_create(kvs_cache *cache, uint64_t first_page, uint64_t n_slots, kvs_extent **extent)
{
    uint64_t host_bytes;
    uint64_t slot_bytes;
    if (!kvs_mul_u64(n_slots, cache->column_bytes, &host_bytes) ||
        !kvs_mul_u64(n_slots, sizeof(kvs_page *), &slot_bytes) || slot_bytes > SIZE_MAX / 2) {
        return kvs_fail(cache->device, KVS_EOVERFLOW, "history of %llu pages of %llu bytes does not fit 64 bits",
                        (kvs_ull)n_slots, (kvs_ull)cache->column_bytes);
    }
    kvs_extent *made = kvs_object_alloc(cache->device, sizeof *made + (size_t)slot_bytes);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    const kvs_status status = kvs_host_create(cache->device, host_bytes, &made->host);
    if (status < 0) {
        kvs_object_free(cache->device, made);
        return status;
    }
    made->id = cache->next_extent_id++;
    made->first_page = first_page;
    made->n_slots = n_slots;
    made->is_owned = true;
    made->next = cache->extents;
    if (made->next != NULL) {
        made->next->previous = made;
    }
    cache->extents = made;
    *extent = made;
    return KVS_OK;
}

static void collect_extent(kvs_cache *cache, kvs_extent *extent)
{
    if (extent->is_owned || extent->n_columns != 0) {
        return;
    }
    if (extent->next != NULL) {
        extent->next->previous = extent->previous;
    }
    if (extent->previous != NULL) {
        extent->previous->next = extent->next;
    } else {
        cache->extents = extent->next;
    }
    kvs_host_release(extent->host);
    kvs_object_free(cache->device, extent);
}

void kvs_extent_disown(kvs_cache *cache, kvs_extent *extent)
{
    if (extent != NULL) {
        extent->is_owned = false;
        collect_extent(cache, extent);
    }
}

/* ---- page columns ---- */

kvs_page *kvs_page_create(kvs_cache *cache, kvs_extent *extent, uint64_t slot)
{
    kvs_page *made = kvs_object_alloc(cache->device, sizeof *made + cache->n_layers);
    if (made == NULL) {
        return NULL;
    }
    made->id = cache->next_page_id++;
    made->extent = extent;
    made->slot = slot;
    made->n_holders = 1;
    made->next = cache->columns;
    if (made->next != NULL) {
        made->next->previous = made;
    }
    cache->columns = made;
    cache->n_columns++;
    extent->slots[slot] = made;
    extent->n_columns++;
    return made;
}

void kvs_page_collect(kvs_cache *cache, kvs_page *page)
{
    if (page->n_holders != 0 || page->n_waiting != 0) {
        return;
    }
    if (page->next != NULL) {
        page->next->previous = page->previous;
    }
    if (page->previous != NULL) {
        page->previous->next = page->next;
    } else {
        cache->columns = page->next;
    }
    kvs_extent *extent = page->extent;
    extent->slots[page->slot] = NULL;
    extent->n_columns--;
    cache->n_columns--;
    kvs_object_free(cache->device, page);
    collect_extent(cache, extent);
}

/* ---- the cache ---- */

static const char *type_name(int type)
{
    const char *name = kvs_type_name(type);
    return name == NULL ? "unknown type" : name;
}

static kvs_status lay_out(kvs_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_layers; i++) {
        const kvs_kv_layer *layer = &cache->layers[i];
        cache->records[i].struct_size = sizeof cache->records[i];
        const kvs_status status = kvs_record_layout(layer, &cache->records[i]);
        if (status < 0) {
            return kvs_fail(cache->device, status,
                            "layer %u: %u heads of %u %s (K) and %u %s (V), flags %u, are refused with %s", i,
                            layer->n_kv_heads, layer->head_dim_k, type_name(layer->type_k), layer->head_dim_v,
                            type_name(layer->type_v), layer->flags, kvs_status_name(status));
        }
        const uint64_t record_bytes = cache->records[i].record_bytes;
        cache->layer_offsets[i] = cache->column_bytes;
        if (!kvs_add_u64(cache->column_bytes, record_bytes, &cache->column_bytes)) {
            return kvs_fail(cache->device, KVS_EOVERFLOW, "layer %u: a page of all layers does not fit 64 bits", i);
        }
        cache->max_record_bytes = record_bytes > cache->max_record_bytes ? record_bytes : cache->max_record_bytes;
    }
    return KVS_OK;
}

static void free_cache(kvs_cache *cache)
{
    kvs_array_free(cache->layers);
    kvs_array_free(cache->records);
    kvs_array_free(cache->layer_offsets);
    kvs_object_free(cache->device, cache);
}

kvs_status kvs_cache_create(kvs_device *device, const kvs_kv_layer *layers, uint32_t n_layers, kvs_cache **cache)
{
    if (device == NULL || layers == NULL || n_layers == 0 || cache == NULL) {
        return kvs_fail(device, KVS_EINVAL, "cache: no device, no layers or no place for the handle");
    }
    kvs_cache *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return KVS_ENOMEM;
    }
    made->device = device;
    made->identity = kvs_device_next_id(device);
    made->n_layers = n_layers;
    atomic_init(&made->n_claims, 1);
    made->layers = kvs_array_alloc(device, n_layers, sizeof *made->layers);
    made->records = kvs_array_alloc(device, n_layers, sizeof *made->records);
    made->layer_offsets = kvs_array_alloc(device, n_layers, sizeof *made->layer_offsets);
    kvs_status status;
    if (made->layers == NULL || made->records == NULL || made->layer_offsets == NULL) {
        status = kvs_fail(device, KVS_ENOMEM, "cache: no memory for %u layers", n_layers);
    } else {
        memcpy(made->layers, layers, n_layers * sizeof *layers);
        status = lay_out(made);
    }
    if (status < 0) {
        free_cache(made);
        return status;
    }
    *cache = made;
    return KVS_OK;
}

void kvs_cache_retain(kvs_cache *cache)
{
    atomic_fetch_add_explicit(&cache->n_claims, 1, memory_order_relaxed);
}

void kvs_cache_release(kvs_cache *cache)
{
    if (cache != NULL && atomic_fetch_sub_explicit(&cache->n_claims, 1, memory_order_acq_rel) == 1) {
        free_cache(cache);
    }
}

kvs_status kvs_cache_get_info(kvs_cache *cache, kvs_cache_info *info)
{
    if (cache == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_fail(cache == NULL ? NULL : cache->device, KVS_EINVAL, "cache: no place for its state");
    }
    info->n_layers = cache->n_layers;
    info->max_record_bytes = cache->max_record_bytes;
    info->column_bytes = cache->column_bytes;
    info->n_pages = cache->n_columns;
    info->n_sequences = cache->n_sequences;
    return KVS_OK;
}

/* ---- integrity ---- */

static kvs_status corrupt(const kvs_cache *cache, const char *what, uint64_t have, uint64_t want)
{
    return kvs_fail(cache->device, KVS_ECORRUPT, "cache: %s is %llu, counted %llu", what, (kvs_ull)have,
                    (kvs_ull)want);
}

static kvs_status check_extents(const kvs_cache *cache)
{
    uint64_t n_columns = 0;
    for (const kvs_extent *extent = cache->extents; extent != NULL; extent = extent->next) {
        uint64_t n_occupied = 0;
        for (uint64_t slot = 0; slot < extent->n_slots; slot++) {
            const kvs_page *page = extent->slots[slot];
            if (page != NULL && (page->extent != extent || page->slot != slot)) {
                return corrupt(cache, "slot of a column", page->slot, slot);
            }
            n_occupied += page != NULL;
        }
        if (n_occupied != extent->n_columns) {
            return corrupt(cache, "columns of an extent", extent->n_columns, n_occupied);
        }
        if (!extent->is_owned && n_occupied == 0) {
            return corrupt(cache, "extents without use", extent->id, 0);
        }
        n_columns += n_occupied;
    }
    return n_columns == cache->n_columns ? KVS_OK : corrupt(cache, "live columns", cache->n_columns, n_columns);
}

static kvs_status check_sequence(const kvs_cache *cache, const kvs_seq *seq)
{
    if (seq->committed > seq->appended || seq->appended > seq->ctx_tokens) {
        return corrupt(cache, "committed tokens of a sequence", seq->committed, seq->appended);
    }
    if (seq->n_pages != kvs_div_up(seq->appended, KVS_PAGE_TOKENS)) {
        return corrupt(cache, "pages of a sequence", seq->n_pages, kvs_div_up(seq->appended, KVS_PAGE_TOKENS));
    }
    for (uint64_t i = 0; i < seq->n_pages; i++) {
        kvs_page *page = seq->pages[i];
        if (page->extent->first_page + page->slot != i) {
            return corrupt(cache, "place of a page", page->extent->first_page + page->slot, i);
        }
        page->n_seen++;
    }
    if (seq->appended > seq->committed && seq->pages[seq->n_pages - 1]->n_holders != 1) {
        return corrupt(cache, "holders of an open page", seq->pages[seq->n_pages - 1]->n_holders, 1);
    }
    if (seq->source != NULL && (seq->source_page >= seq->n_pages || seq->source_rows == 0 ||
                                seq->source_rows >= KVS_PAGE_TOKENS)) {
        return corrupt(cache, "rows that wait to be brought over", seq->source_rows, seq->source_page);
    }
    return KVS_OK;
}

static kvs_status check_columns(const kvs_cache *cache)
{
    for (const kvs_page *page = cache->columns; page != NULL; page = page->next) {
        uint32_t n_waiting = 0;
        for (const kvs_seq *seq = cache->sequences; seq != NULL; seq = seq->next) {
            n_waiting += seq->source == page;
        }
        if (page->n_seen != page->n_holders) {
            return corrupt(cache, "holders of a column", page->n_holders, page->n_seen);
        }
        if (n_waiting != page->n_waiting || (n_waiting == 0 && page->n_holders == 0)) {
            return corrupt(cache, "waiters for a column", page->n_waiting, n_waiting);
        }
        if (page->published_rows > KVS_PAGE_TOKENS || page->id >= cache->next_page_id) {
            return corrupt(cache, "published rows of a column", page->published_rows, KVS_PAGE_TOKENS);
        }
    }
    return KVS_OK;
}

kvs_status kvs_cache_check_integrity(kvs_cache *cache)
{
    if (cache == NULL) {
        return kvs_fail(NULL, KVS_EINVAL, "cache: none");
    }
    for (kvs_page *page = cache->columns; page != NULL; page = page->next) {
        page->n_seen = 0;
    }
    uint32_t n_sequences = 0;
    for (const kvs_seq *seq = cache->sequences; seq != NULL; seq = seq->next) {
        const kvs_status status = check_sequence(cache, seq);
        if (status < 0) {
            return status;
        }
        n_sequences++;
    }
    if (n_sequences != cache->n_sequences) {
        return corrupt(cache, "sequences", cache->n_sequences, n_sequences);
    }
    const kvs_status status = check_columns(cache);
    return status < 0 ? status : check_extents(cache);
}
