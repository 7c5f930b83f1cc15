/* pager_slots.c: residency. A slot names its page by id, so that nothing here has to be told when a sequence drops a page:
 * an id is never used again, and a slot whose id no index of the current sequence carries is free for the taking. */
#include "core/pager_state.h"

#include <string.h>

uint64_t kvs_pager_slot_address(const kvs_pager *pager, uint32_t slot)
{
    const uint32_t n_own = kvs_pager_own_slots(pager);
    return slot < n_own ? pager->base_address + (uint64_t)slot * pager->slot_bytes
                        : pager->borrowed_address + (slot - n_own) * pager->borrowed_stride_bytes;
}

static kvs_status widen(kvs_pager *pager, uint32_t layer, uint64_t n_pages)
{
    uint32_t *where = kvs_array_alloc(pager->device, (size_t)n_pages, sizeof *where);
    uint64_t *table = kvs_array_alloc(pager->device, (size_t)n_pages, sizeof *table);
    if (where == NULL || table == NULL) {
        kvs_array_free(where);
        kvs_array_free(table);
        return kvs_fail(pager->device, KVS_ENOMEM, "no memory for page tables of %llu pages", (kvs_ull)n_pages);
    }
    memset(where, 0xff, (size_t)n_pages * sizeof *where);
    if (pager->where_pages != 0) {
        memcpy(where, pager->where[layer], (size_t)pager->where_pages * sizeof *where);
    }
    kvs_array_free(pager->where[layer]);
    kvs_array_free(pager->pass[layer].page_table);
    pager->where[layer] = where;
    pager->pass[layer].page_table = table;
    pager->tables[layer] = table;
    return KVS_OK;
}

/* A layer that was widened before another failed keeps its longer table: where_pages still bounds what is read. */
kvs_status kvs_pager_reserve_pages(kvs_pager *pager, uint64_t n_pages)
{
    if (n_pages <= pager->where_pages) {
        return KVS_OK;
    }
    uint64_t wanted = n_pages > 2 * pager->where_pages ? n_pages : 2 * pager->where_pages;
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        kvs_status status = widen(pager, layer, wanted);
        if (status != KVS_OK) {
            return status;
        }
    }
    pager->where_pages = wanted;
    return KVS_OK;
}

void kvs_pager_free_slot(kvs_pager *pager, uint32_t slot)
{
    pager->slots[slot].page_id = KVS_NO_PAGE;
    pager->free_slots[pager->n_free++] = slot;
    pager->placement_generation++;
    if (kvs_device_has(pager->device, KVS_DEVICE_POISON_RELEASED)) {
        struct kvs_device_view backend = kvs_device_backend(pager->device);
        backend.backend->device_fill_nan(backend.self, kvs_pager_slot_address(pager, slot), pager->slot_bytes);
    }
}

void kvs_pager_rebuild_free(kvs_pager *pager)
{
    pager->n_free = 0;
    pager->evict_cursor = pager->ring_slots;
    for (uint32_t slot = pager->n_slots; slot-- > pager->ring_slots;) {
        if (pager->slots[slot].page_id == KVS_NO_PAGE) {
            pager->free_slots[pager->n_free++] = slot;
        }
    }
}

void kvs_pager_set_current(kvs_pager *pager, kvs_seq *seq)
{
    if (seq != NULL) {
        kvs_seq_retain(seq);
    }
    kvs_seq_release(pager->current);
    pager->current = seq;
}

kvs_status kvs_pager_select(kvs_pager *pager, kvs_seq *seq)
{
    uint64_t n_pages = kvs_seq_pages(seq);
    kvs_status status = kvs_pager_reserve_pages(pager, n_pages + 1);
    if (status != KVS_OK) {
        return status;
    }
    for (uint32_t layer = 0; layer < pager->n_layers; layer++) {
        memset(pager->where[layer], 0xff, (size_t)pager->where_pages * sizeof *pager->where[layer]);
    }
    for (uint32_t slot = pager->ring_slots; slot < pager->n_slots; slot++) {
        const kvs_slot *held = &pager->slots[slot];
        kvs_page_view view;
        if (held->page_id != KVS_NO_PAGE && held->page < n_pages && kvs_seq_view_page(seq, held->page, &view) == KVS_OK &&
            view.page_id == held->page_id) {
            pager->where[held->layer][held->page] = slot;
        }
    }
    kvs_pager_set_current(pager, seq);
    return KVS_OK;
}

static bool is_wanted(const kvs_pager *pager, uint32_t slot)
{
    const kvs_slot *held = &pager->slots[slot];
    return held->page < pager->where_pages && pager->where[held->layer][held->page] == slot;
}

/* Round robin over slots that the current sequence does not name. */
static bool evict_one(kvs_pager *pager)
{
    uint32_t n_resident = pager->n_slots - pager->ring_slots;
    for (uint32_t tried = 0; tried < n_resident; tried++) {
        uint32_t slot = pager->evict_cursor;
        pager->evict_cursor = slot + 1 == pager->n_slots ? pager->ring_slots : slot + 1;
        if (pager->slots[slot].page_id != KVS_NO_PAGE && !is_wanted(pager, slot)) {
            kvs_pager_free_slot(pager, slot);
            return true;
        }
    }
    return false;
}

uint32_t kvs_pager_take_slot(kvs_pager *pager, uint32_t layer, uint64_t page, uint64_t page_id)
{
    if (pager->n_free == 0 && !evict_one(pager)) {
        return KVS_NONE;
    }
    uint32_t slot = pager->free_slots[--pager->n_free];
    pager->slots[slot] = (kvs_slot){.page_id = page_id, .page = page, .layer = layer};
    pager->where[layer][page] = slot;
    pager->placement_generation++;
    return slot;
}

void kvs_pager_forget_pages(kvs_pager *pager, uint32_t layer, uint64_t begin, uint64_t end)
{
    for (uint64_t page = begin; page < end && page < pager->where_pages; page++) {
        uint32_t slot = pager->where[layer][page];
        if (slot != KVS_NONE) {
            pager->where[layer][page] = KVS_NONE;
            kvs_pager_free_slot(pager, slot);
        }
    }
}
