/* pager.c: attaching to a pool, dividing it, and what can be said about it. */
#include "core/pager_state.h"

#include <string.h>

static uint64_t tail_pages_of(uint32_t max_rows)
{
    return kvs_div_up(max_rows, KVS_PAGE_TOKENS) + 1;
}

static void free_tables(kvs_pager *pager)
{
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        if (pager->where != NULL) {
            kvs_array_free(pager->where[layer]);
        }
        if (pager->pass != NULL) {
            kvs_array_free(pager->pass[layer].page_table);
        }
    }
    kvs_array_free(pager->where);
    kvs_array_free(pager->pass);
    kvs_array_free(pager->tables);
    kvs_array_free(pager->capacity);
    kvs_array_free(pager->stream);
    kvs_array_free(pager->lookahead_prefix);
    kvs_array_free(pager->slots);
    kvs_array_free(pager->free_slots);
}

kvs_status kvs_pager_create(kvs_cache *cache, kvs_pager **pager)
{
    if (cache == NULL || pager == NULL) {
        return kvs_refuse(cache == NULL ? NULL : kvs_cache_device(cache));
    }
    kvs_device *device = kvs_cache_device(cache);
    kvs_cache_info info = {.struct_size = sizeof info};
    kvs_status status = kvs_cache_get_info(cache, &info);
    if (status != KVS_OK) {
        return status;
    }
    kvs_pager *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a pager");
    }
    made->device = device;
    made->cache = cache;
    made->n_layers = info.n_layers;
    made->slot_bytes = info.max_record_bytes;
    made->where = kvs_array_alloc(device, info.n_layers, sizeof *made->where);
    made->pass = kvs_array_alloc(device, info.n_layers, sizeof *made->pass);
    made->tables = kvs_array_alloc(device, info.n_layers, sizeof *made->tables);
    made->capacity = kvs_array_alloc(device, info.n_layers, sizeof *made->capacity);
    made->lookahead_prefix = kvs_array_alloc(device, info.n_layers, sizeof *made->lookahead_prefix);
    made->stream = kvs_array_alloc(device, info.n_layers, sizeof *made->stream);
    if (made->where == NULL || made->pass == NULL || made->stream == NULL || made->tables == NULL || made->capacity == NULL ||
        made->lookahead_prefix == NULL) {
        free_tables(made);
        kvs_object_free(device, made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for the tables of %u layers", info.n_layers);
    }
    kvs_cache_retain(cache);
    *pager = made;
    return KVS_OK;
}

kvs_status kvs_placement_slots(const kvs_placement *placement, uint64_t ctx_tokens, uint64_t *n_slots)
{
    if (!KVS_STRUCT_OK(placement) || placement->resident_pages == NULL || placement->n_layers == 0 ||
        placement->max_rows == 0 || n_slots == NULL) {
        return KVS_EINVAL;
    }
    uint64_t ctx_pages = kvs_div_up(ctx_tokens, KVS_PAGE_TOKENS);
    uint64_t tail = tail_pages_of(placement->max_rows);
    uint64_t least = tail < ctx_pages ? tail : ctx_pages;
    uint64_t sum = placement->ring_slots;
    for (uint32_t layer = 0; layer < placement->n_layers; layer++) {
        uint64_t pages = placement->resident_pages[layer];
        if (pages < least || (pages < ctx_pages && placement->ring_slots == 0)) {
            return KVS_EINVAL;
        }
        sum += pages;
    }
    if (sum > UINT32_MAX - 1) {
        return KVS_EOVERFLOW;
    }
    *n_slots = sum;
    return KVS_OK;
}

static kvs_status check_placement(const kvs_pager *pager, uint64_t pool_bytes, const kvs_placement *placement,
                                  uint64_t *n_slots)
{
    if (!KVS_STRUCT_OK(placement) || placement->n_layers != pager->n_layers) {
        return kvs_fail(pager->device, KVS_EINVAL, "the placement is for another number of layers than %u",
                        pager->n_layers);
    }
    kvs_status status = kvs_placement_slots(placement, 1, n_slots);
    if (status != KVS_OK) {
        return kvs_fail(pager->device, status, "placement: every layer needs a resident page, and rows above 0");
    }
    if (*n_slots > pool_bytes / pager->slot_bytes) {
        return kvs_fail(pager->device, KVS_ENOSPACE, "pool: need %llu slots of %llu bytes, have %llu", (kvs_ull)*n_slots,
                        (kvs_ull)pager->slot_bytes, (kvs_ull)(pool_bytes / pager->slot_bytes));
    }
    for (uint32_t layer = 0; layer < placement->n_layers; layer++) {
        const uint64_t most = (uint64_t)placement->resident_pages[layer] * KVS_PAGE_TOKENS;
        if (placement->max_rows > most) {
            return kvs_fail(pager->device, KVS_EINVAL, "placement: a pass of %u rows, layer %u has room for %llu",
                            placement->max_rows, layer, (kvs_ull)most);
        }
    }
    return KVS_OK;
}

static kvs_status make_ring(kvs_pager *pager, kvs_lease *pool, uint32_t n_slots, kvs_ring **ring)
{
    *ring = NULL;
    if (n_slots == 0) {
        return KVS_OK;
    }
    kvs_ring_desc desc = {.struct_size = sizeof desc,
                          .n_slots = n_slots,
                          .lease = pool,
                          .slot_bytes = pager->slot_bytes,
                          .run_limit_slots = kvs_pager_run_slots(n_slots)};
    return kvs_ring_create(pager->device, &desc, ring);
}

/* Slots that keep their address and stay resident keep their page. */
static void adopt_slots(kvs_pager *pager, kvs_slot *slots, uint32_t n_slots, uint32_t ring_slots, uint64_t base)
{
    for (uint32_t slot = 0; slot < n_slots; slot++) {
        slots[slot].page_id = KVS_NO_PAGE;
    }
    bool is_same_place = pager->slots != NULL && base == pager->base_address;
    for (uint32_t slot = ring_slots; is_same_place && slot < n_slots && slot < pager->n_slots; slot++) {
        if (slot >= pager->ring_slots) {
            slots[slot] = pager->slots[slot];
        }
    }
}

static void drop_ring(kvs_pager *pager)
{
    kvs_ring_info info = {.struct_size = sizeof info};
    if (pager->ring != NULL && kvs_ring_get_info(pager->ring, &info) == KVS_OK) {
        pager->past_stalls += info.stalls;
        pager->past_stall_ns += info.stall_ns;
        pager->copies += info.copies;
    }
    kvs_ring_release(pager->ring);
    pager->ring = NULL;
    pager->has_lookahead = false;
}

static void give_back_pool(kvs_pager *pager)
{
    drop_ring(pager);
    kvs_lease_release(pager->lease);
    pager->lease = NULL;
}

/* Everything that can fail is made first; the switch itself cannot. */
static kvs_status divide(kvs_pager *pager, kvs_lease *pool, const kvs_placement *placement)
{
    uint64_t n_slots;
    kvs_status status = check_placement(pager, kvs_lease_bytes(pool), placement, &n_slots);
    if (status != KVS_OK) {
        return status;
    }
    kvs_slot *slots = kvs_array_alloc(pager->device, (size_t)n_slots, sizeof *slots);
    uint32_t *free_slots = kvs_array_alloc(pager->device, (size_t)n_slots, sizeof *free_slots);
    kvs_ring *ring = NULL;
    /* A new ring poisons its slots: no copy of the old one's lookahead may still be on its way there. */
    (void)kvs_pager_cancel_ring(pager);
    status = slots == NULL || free_slots == NULL
                 ? kvs_fail(pager->device, KVS_ENOMEM, "no memory for %llu slots", (kvs_ull)n_slots)
                 : make_ring(pager, pool, placement->ring_slots, &ring);
    if (status != KVS_OK) {
        kvs_array_free(slots);
        kvs_array_free(free_slots);
        return status;
    }
    drop_ring(pager);
    adopt_slots(pager, slots, (uint32_t)n_slots, placement->ring_slots, kvs_lease_address(pool));
    kvs_array_free(pager->slots);
    kvs_array_free(pager->free_slots);
    pager->slots = slots;
    pager->free_slots = free_slots;
    pager->ring = ring;
    pager->n_slots = pager->slots_capacity = (uint32_t)n_slots;
    pager->ring_slots = placement->ring_slots;
    pager->max_rows = placement->max_rows;
    pager->tail_pages = tail_pages_of(placement->max_rows);
    pager->base_address = kvs_lease_address(pool);
    memcpy(pager->capacity, placement->resident_pages, pager->n_layers * sizeof *pager->capacity);
    kvs_pager_rebuild_free(pager);
    pager->placement_generation++;
    kvs_pager_set_current(pager, NULL); /* found again among the slots by the next pass */
    return KVS_OK;
}

static kvs_status check_idle(const kvs_pager *pager)
{
    return pager->is_in_pass ? kvs_fail(pager->device, KVS_EBUSY, "a pass is open") : KVS_OK;
}

/* What a lease counts on may not move. */
static kvs_status check_movable(const kvs_pager *pager)
{
    const kvs_status status = check_idle(pager);
    return status == KVS_OK ? kvs_pager_check_unleased(pager) : status;
}

kvs_status kvs_pager_attach(kvs_pager *pager, kvs_lease *pool, const kvs_placement *placement)
{
    if (pager == NULL || pool == NULL) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    if (pager->lease != NULL) {
        return kvs_fail(pager->device, KVS_EBUSY, "the pager has a pool");
    }
    if (kvs_lease_device(pool) != pager->device) {
        return kvs_fail(pager->device, KVS_EINVAL, "the pool lies on another device");
    }
    kvs_status status = divide(pager, pool, placement);
    if (status == KVS_OK) {
        kvs_lease_retain(pool);
        pager->lease = pool;
    }
    return status;
}

kvs_status kvs_pager_place(kvs_pager *pager, const kvs_placement *placement)
{
    if (pager == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = check_movable(pager);
    if (status == KVS_OK && pager->lease == NULL) {
        status = kvs_fail(pager->device, KVS_EBUSY, "the pager has no pool");
    }
    if (status == KVS_OK) {
        status = kvs_pager_settle(pager);
    }
    return status == KVS_OK ? divide(pager, pager->lease, placement) : status;
}

kvs_status kvs_pager_detach(kvs_pager *pager)
{
    if (pager == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = check_movable(pager);
    if (status != KVS_OK || pager->lease == NULL) {
        return status;
    }
    status = kvs_pager_settle(pager);
    if (status == KVS_OK) {
        give_back_pool(pager);
    }
    return status;
}

/* Rows that cannot be written to history any more are lost with their last device page; nothing else may be. */
void kvs_pager_release(kvs_pager *pager)
{
    if (pager == NULL) {
        return;
    }
    kvs_layer_lease_end(pager->leased_by);
    kvs_layer_lease_end(pager->lent_to);
    if (pager->is_in_pass) {
        (void)kvs_pager_end(pager, 0);
    }
    (void)kvs_pager_settle(pager);
    kvs_pager_set_current(pager, NULL);
    give_back_pool(pager);
    kvs_device *device = pager->device;
    kvs_cache_release(pager->cache);
    free_tables(pager);
    kvs_object_free(device, pager);
}

kvs_status kvs_pager_forget(kvs_pager *pager)
{
    if (pager == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = check_movable(pager);
    if (status == KVS_OK) {
        status = kvs_pager_settle(pager);
    }
    if (status != KVS_OK) {
        return status;
    }
    for (uint32_t slot = pager->ring_slots; slot < pager->n_slots; slot++) {
        pager->slots[slot].page_id = KVS_NO_PAGE;
    }
    kvs_pager_rebuild_free(pager);
    pager->placement_generation++;
    kvs_pager_set_current(pager, NULL);
    return KVS_OK;
}

/* Pages of a column that goes away would be found by no one: their slots are given back. The page that is cut keeps its slot,
 * its first rows are still true. Of a sequence that was changed past the pager nothing is known, before as behind: the next
 * pass finds its pages by their ids, and a lease of it stays stale. */
kvs_status kvs_pager_truncate(kvs_pager *pager, kvs_seq *seq, uint64_t n_tokens)
{
    if (pager == NULL || seq == NULL) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    const bool is_known = pager->generation == kvs_seq_generation(seq);
    kvs_status status = check_idle(pager);
    if (status == KVS_OK) {
        status = kvs_pager_settle(pager);
    }
    if (status == KVS_OK) {
        status = kvs_seq_truncate(seq, n_tokens);
    }
    if (status == KVS_OK && is_known && kvs_pager_leases(pager, seq)) {
        pager->generation = kvs_seq_generation(seq);
    }
    if (status != KVS_OK || pager->current != seq) {
        return status;
    }
    if (!is_known) {
        kvs_pager_set_current(pager, NULL);
        return kvs_pager_cancel_ring(pager);
    }
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_pager_forget_pages(pager, layer, kvs_div_up(n_tokens, KVS_PAGE_TOKENS), pager->where_pages);
    }
    if (pager->has_lookahead && n_tokens / KVS_PAGE_TOKENS < pager->lookahead_tail) {
        status = kvs_pager_cancel_ring(pager);
    }
    pager->generation = kvs_seq_generation(seq);
    return status;
}

kvs_status kvs_pager_drop(kvs_pager *pager, kvs_seq *seq)
{
    if (pager == NULL || seq == NULL) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    if (kvs_pager_leases(pager, seq)) {
        return kvs_fail(pager->device, KVS_EBUSY, "a layer lease holds the sequence");
    }
    if (pager->current != seq) {
        return KVS_OK;
    }
    kvs_status status = check_idle(pager);
    if (status != KVS_OK) {
        return status;
    }
    /* What history does not have yet goes with the sequence, unless a fork shares it: then it must arrive. */
    status = kvs_pager_settle(pager);
    pager->has_pending = false;
    (void)kvs_pager_cancel_ring(pager);
    kvs_pager_set_current(pager, NULL);
    return status;
}

kvs_status kvs_pager_forecast(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows, kvs_pass_forecast *forecast)
{
    if (pager == NULL || seq == NULL || !KVS_STRUCT_OK(forecast)) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    kvs_status status = kvs_pager_check_rows(pager, seq, n_rows);
    if (status != KVS_OK) {
        return status;
    }
    uint64_t committed = kvs_seq_committed(seq);
    uint64_t tail_first = committed / KVS_PAGE_TOKENS;
    uint64_t active = kvs_div_up(committed + n_rows, KVS_PAGE_TOKENS);
    kvs_pass_forecast made = {
        .struct_size = forecast->struct_size, .n_layers = pager->n_layers, .active_pages = active};
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        uint64_t prefix = kvs_pager_prefix(pager, layer, tail_first, active);
        made.resident_pages += prefix + active - tail_first;
        made.streamed_pages += tail_first - prefix;
        made.streamed_bytes += (tail_first - prefix) * kvs_cache_record(pager->cache, layer)->record_bytes;
    }
    *forecast = made;
    return KVS_OK;
}

kvs_device *kvs_pager_device(const kvs_pager *pager)
{
    return pager->device;
}

kvs_status kvs_pager_check_layers(kvs_pager *pager, const kvs_kv_layer *layer, uint32_t index, uint32_t n_layers)
{
    if (n_layers != pager->n_layers || memcmp(layer, kvs_cache_layer(pager->cache, index), sizeof *layer) != 0) {
        return kvs_fail(pager->device, KVS_EINVAL, "layer %u of %u does not match the pager's cache of %u layers", index,
                        n_layers, pager->n_layers);
    }
    return KVS_OK;
}

kvs_status kvs_pager_get_info(kvs_pager *pager, kvs_pager_info *info)
{
    if (pager == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    kvs_ring_info ring = {.struct_size = sizeof ring};
    if (pager->ring != NULL) {
        (void)kvs_ring_get_info(pager->ring, &ring);
    }
    *info = (kvs_pager_info){.struct_size = info->struct_size,
                             .is_attached = pager->lease != NULL,
                             .n_slots = kvs_pager_own_slots(pager),
                             .ring_slots = pager->ring_slots,
                             .max_rows = pager->max_rows,
                             .is_in_pass = pager->is_in_pass,
                             .placement_generation = pager->placement_generation,
                             .resident_pages = pager->n_slots - pager->ring_slots - pager->n_free,
                             .streamed_pages = pager->streamed_pages,
                             .streamed_bytes = pager->streamed_bytes,
                             .loaded_pages = pager->loaded_pages,
                             .loaded_bytes = pager->loaded_bytes,
                             .published_bytes = pager->published_bytes,
                             .copies = pager->copies + ring.copies,
                             .waves = pager->waves,
                             .stalls = pager->past_stalls + ring.stalls,
                             .stall_ns = pager->past_stall_ns + ring.stall_ns,
                             .gap_ns = pager->gap_ns,
                             .peak_pages = pager->peak_pages};
    return KVS_OK;
}

static kvs_status corrupt(const kvs_pager *pager, const char *what, uint64_t have, uint64_t want)
{
    return kvs_fail(pager->device, KVS_ECORRUPT, "pager: %s is %llu, must be %llu", what, (kvs_ull)have, (kvs_ull)want);
}

static kvs_status check_slots(const kvs_pager *pager)
{
    uint32_t n_free = 0;
    for (uint32_t slot = pager->ring_slots; slot < pager->n_slots; slot++) {
        const kvs_slot *held = &pager->slots[slot];
        n_free += held->page_id == KVS_NO_PAGE;
        for (uint32_t other = slot + 1; held->page_id != KVS_NO_PAGE && other < pager->n_slots; other++) {
            if (pager->slots[other].page_id == held->page_id && pager->slots[other].layer == held->layer) {
                return corrupt(pager, "slot of a page that another slot holds too", other, slot);
            }
        }
    }
    if (n_free != pager->n_free) {
        return corrupt(pager, "number of free slots", pager->n_free, n_free);
    }
    for (uint32_t i = 0; i < pager->n_free; i++) {
        uint32_t slot = pager->free_slots[i];
        if (slot < pager->ring_slots || slot >= pager->n_slots || pager->slots[slot].page_id != KVS_NO_PAGE) {
            return corrupt(pager, "free slot that is not free", slot, pager->n_slots);
        }
    }
    return KVS_OK;
}

/* Every page of the current sequence that is said to be resident is, and no layer has more than its share. */
static kvs_status check_current(const kvs_pager *pager)
{
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        uint64_t n_resident = 0;
        for (uint64_t page = 0; page < pager->where_pages; page++) {
            uint32_t slot = pager->where[layer][page];
            if (slot == KVS_NONE) {
                continue;
            }
            kvs_page_view view;
            const kvs_slot *held = slot < pager->n_slots ? &pager->slots[slot] : NULL;
            n_resident++;
            if (held == NULL || held->page != page || held->layer != layer ||
                kvs_seq_view_page(pager->current, page, &view) != KVS_OK || view.page_id != held->page_id) {
                return corrupt(pager, "resident page at a slot that holds another", slot, page);
            }
        }
        if (n_resident > pager->capacity[layer]) {
            return corrupt(pager, "resident pages of a layer", n_resident, pager->capacity[layer]);
        }
    }
    return KVS_OK;
}

kvs_status kvs_pager_check_integrity(kvs_pager *pager)
{
    if (pager == NULL) {
        return KVS_EINVAL;
    }
    kvs_status status = KVS_OK;
    if (pager->lease != NULL) {
        status = check_slots(pager);
    }
    if (status == KVS_OK && pager->lease != NULL && pager->current != NULL &&
        pager->generation == kvs_seq_generation(pager->current)) {
        status = check_current(pager);
    }
    if (status == KVS_OK && pager->ring != NULL) {
        status = kvs_ring_check_integrity(pager->ring);
    }
    return status;
}
