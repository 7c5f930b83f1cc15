/* pager_lend.c: slots that a pager borrows from a ring, and the ring that lends them. Borrowed slots are slots like others,
 * behind those of the pool: while they are there the layer may keep that many pages more, so that nothing streams. */
#include "core/pager_state.h"

#include <string.h>

kvs_status kvs_pager_check_unleased(const kvs_pager *pager)
{
    return pager->leased_by == NULL && pager->lent_to == NULL
               ? KVS_OK
               : kvs_fail(pager->device, KVS_EBUSY, "a layer lease holds %s of the pager",
                          pager->leased_by != NULL ? "the layer" : "ring slots");
}

kvs_status kvs_pager_check_lease(const kvs_pager *pager, const kvs_seq *seq, uint32_t n_rows)
{
    const kvs_layer_lease *lease = pager->leased_by;
    if (pager->lent_to != NULL && pager->lent_to != lease) {
        return kvs_fail(pager->device, KVS_EBUSY, "a layer lease holds %u of %u ring slots", pager->lent_to->n_slots,
                        pager->ring_slots);
    }
    if (lease == NULL) {
        return KVS_OK;
    }
    if (lease->seq != seq) {
        return kvs_fail(pager->device, KVS_EBUSY, "a lease holds the layer for another sequence");
    }
    if (pager->generation != kvs_seq_generation(seq)) {
        return kvs_fail(pager->device, KVS_ESTALE, "the leased sequence is at generation %llu, the lease at %llu",
                        (kvs_ull)kvs_seq_generation(seq), (kvs_ull)pager->generation);
    }
    const uint64_t end = kvs_seq_committed(seq) + n_rows;
    return end <= lease->reserved_tokens
               ? KVS_OK
               : kvs_fail(pager->device, KVS_ENOSPACE, "a pass that reaches %llu tokens, the lease reserves %llu", (kvs_ull)end,
                          (kvs_ull)lease->reserved_tokens);
}

/* ---- the side that borrows ---- */

kvs_status kvs_pager_reserve_slots(kvs_pager *pager, uint32_t n_more)
{
    if (n_more > UINT32_MAX - pager->n_slots) {
        return kvs_fail(pager->device, KVS_EOVERFLOW, "%u slots and %u more", pager->n_slots, n_more);
    }
    const uint32_t wanted = pager->n_slots + n_more;
    if (wanted <= pager->slots_capacity) {
        return KVS_OK;
    }
    kvs_slot *slots = kvs_array_alloc(pager->device, wanted, sizeof *slots);
    uint32_t *free_slots = kvs_array_alloc(pager->device, wanted, sizeof *free_slots);
    if (slots == NULL || free_slots == NULL) {
        kvs_array_free(slots);
        kvs_array_free(free_slots);
        return kvs_fail(pager->device, KVS_ENOMEM, "no memory for %u slots", wanted);
    }
    memcpy(slots, pager->slots, pager->n_slots * sizeof *slots);
    memcpy(free_slots, pager->free_slots, pager->n_free * sizeof *free_slots);
    kvs_array_free(pager->slots);
    kvs_array_free(pager->free_slots);
    pager->slots = slots;
    pager->free_slots = free_slots;
    pager->slots_capacity = wanted;
    return KVS_OK;
}

void kvs_pager_borrow(kvs_pager *pager, kvs_lease *region, uint64_t address, uint64_t stride_bytes, uint32_t n_slots)
{
    pager->borrowed_region = region;
    pager->borrowed_address = address;
    pager->borrowed_stride_bytes = stride_bytes;
    for (uint32_t i = n_slots; i-- > 0;) {
        const uint32_t slot = pager->n_slots + i;
        pager->slots[slot] = (kvs_slot){.page_id = KVS_NO_PAGE};
        pager->free_slots[pager->n_free++] = slot;
    }
    pager->n_borrowed = n_slots;
    pager->n_slots += n_slots;
    pager->capacity[0] += n_slots;
    pager->placement_generation++;
}

/* The first page of the current sequence in a borrowed slot whose rows are on their way to history; KVS_NO_PAGE: none. */
static uint64_t first_pending(const kvs_pager *pager)
{
    if (!pager->has_pending || pager->current == NULL) {
        return KVS_NO_PAGE;
    }
    for (uint64_t page = pager->pending_first_page; page < pager->pending_end_page && page < pager->where_pages; page++) {
        const uint32_t slot = pager->where[0][page];
        if (slot != KVS_NONE && slot >= kvs_pager_own_slots(pager)) {
            return page;
        }
    }
    return KVS_NO_PAGE;
}

/* Their only copy goes with the slot. */
static void cut_rows(kvs_pager *pager, uint64_t page)
{
    kvs_page_view view = {.published_rows = 0};
    (void)kvs_seq_view_page(pager->current, page, &view);
    (void)kvs_seq_truncate(pager->current, page * KVS_PAGE_TOKENS + view.published_rows);
    pager->pending_end_page = page;
    pager->has_pending = page > pager->pending_first_page;
    kvs_pager_forget_pages(pager, 0, kvs_seq_pages(pager->current), pager->where_pages);
    pager->generation = kvs_seq_generation(pager->current);
}

kvs_status kvs_pager_give_up(kvs_pager *pager)
{
    const uint64_t page = first_pending(pager);
    const kvs_status status = page == KVS_NO_PAGE ? KVS_OK : kvs_pager_settle(pager);
    if (status != KVS_OK) {
        cut_rows(pager, page);
    }
    const uint32_t n_own = kvs_pager_own_slots(pager);
    for (uint64_t at = 0; at < pager->where_pages; at++) {
        const uint32_t slot = pager->where[0][at];
        if (slot != KVS_NONE && slot >= n_own) {
            pager->where[0][at] = KVS_NONE;
        }
    }
    pager->capacity[0] -= pager->n_borrowed;
    pager->n_slots = n_own;
    pager->n_borrowed = 0;
    pager->borrowed_region = NULL;
    pager->placement_generation++;
    kvs_pager_rebuild_free(pager);
    return status;
}

/* ---- the side that lends ---- */

kvs_status kvs_pager_lend(kvs_pager *pager, uint32_t n_slots)
{
    pager->had_lookahead = pager->has_lookahead && pager->current != NULL &&
                           pager->generation == kvs_seq_generation(pager->current);
    kvs_status status = kvs_pager_cancel_ring(pager);
    return status == KVS_OK ? kvs_ring_hold(pager->ring, n_slots) : status;
}

void kvs_pager_take_back(kvs_pager *pager)
{
    kvs_ring_widen(pager->ring);
}
