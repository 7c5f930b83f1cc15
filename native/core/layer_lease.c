/* layer_lease.c: all pages of a layer on the device, for as long as a draft is made of it. */
#include "core/layer_lease.h"

#include "core/pager_state.h"

static uint64_t missing_slots(const kvs_pager *pager, uint64_t reserved_tokens)
{
    const uint64_t n_pages = kvs_div_up(reserved_tokens, KVS_PAGE_TOKENS);
    const uint64_t n_own = pager->capacity[0] - pager->n_borrowed;
    return n_pages <= n_own ? 0 : n_pages - n_own;
}

/* ---- what can be asked for ---- */

static kvs_status check_layer(const kvs_pager *pager)
{
    if (pager->n_layers != 1) {
        return kvs_fail(pager->device, KVS_EUNSUPPORTED, "a layer lease of a cache of %u layers, need 1", pager->n_layers);
    }
    return pager->lease == NULL ? kvs_fail(pager->device, KVS_EBUSY, "the pager has no pool") : KVS_OK;
}

kvs_status kvs_layer_lease_slots(kvs_pager *pager, uint64_t reserved_tokens, uint64_t *n_slots)
{
    if (pager == NULL || n_slots == NULL) {
        return kvs_refuse(pager == NULL ? NULL : pager->device);
    }
    const kvs_status status = check_layer(pager);
    if (status == KVS_OK) {
        *n_slots = missing_slots(pager, reserved_tokens);
    }
    return status;
}

static kvs_status check_idle(const kvs_pager *pager)
{
    return pager->is_in_pass ? kvs_fail(pager->device, KVS_EBUSY, "a pass is open") : kvs_pager_check_unleased(pager);
}

static kvs_status check_generation(const kvs_layer_lease_desc *desc)
{
    const uint64_t generation = kvs_seq_generation(desc->seq);
    return generation == desc->generation
               ? KVS_OK
               : kvs_fail(desc->pager->device, KVS_ESTALE, "the sequence is at generation %llu, asked for is %llu",
                          (kvs_ull)generation, (kvs_ull)desc->generation);
}

static kvs_status check_tokens(const kvs_layer_lease_desc *desc)
{
    const kvs_pager *pager = desc->pager;
    kvs_seq_info seq = {.struct_size = sizeof seq};
    kvs_status status = kvs_seq_get_info(desc->seq, &seq);
    if (status != KVS_OK) {
        return status;
    }
    if (seq.appended_tokens != seq.committed_tokens) {
        return kvs_fail(pager->device, KVS_EBUSY, "%llu rows are not committed",
                        (kvs_ull)(seq.appended_tokens - seq.committed_tokens));
    }
    if (desc->reserved_tokens == 0 || desc->reserved_tokens < seq.committed_tokens ||
        desc->reserved_tokens - seq.committed_tokens > pager->max_rows) {
        return kvs_fail(pager->device, KVS_EINVAL, "a lease of %llu tokens, %llu are committed, a pass has at most %u",
                        (kvs_ull)desc->reserved_tokens, (kvs_ull)seq.committed_tokens, pager->max_rows);
    }
    if (desc->reserved_tokens > seq.ctx_tokens) {
        return kvs_fail(pager->device, KVS_ECONTEXT, "a lease of %llu tokens, the context has %llu",
                        (kvs_ull)desc->reserved_tokens, (kvs_ull)seq.ctx_tokens);
    }
    const uint64_t n_pages = kvs_div_up(desc->reserved_tokens, KVS_PAGE_TOKENS);
    const uint64_t n_tail = n_pages - seq.committed_tokens / KVS_PAGE_TOKENS;
    if (n_pages > pager->capacity[0] && n_tail > pager->capacity[0]) {
        return kvs_fail(pager->device, KVS_ENOSPACE, "the layer may keep %u pages, its tail alone needs %llu",
                        pager->capacity[0], (kvs_ull)n_tail);
    }
    return KVS_OK;
}

static kvs_status check_lender(const kvs_layer_lease_desc *desc)
{
    const kvs_pager *pager = desc->pager;
    const kvs_pager *lender = desc->lender;
    const uint64_t n_slots = missing_slots(pager, desc->reserved_tokens);
    if (lender != NULL && lender->device != pager->device) {
        return kvs_fail(pager->device, KVS_EINVAL, "the lender is on another device");
    }
    if (n_slots == 0) {
        return KVS_OK;
    }
    if (lender != NULL && lender->slot_bytes < pager->slot_bytes) {
        return kvs_fail(pager->device, KVS_EINVAL, "the lender's slots have %llu bytes, pages of the layer %llu",
                        (kvs_ull)lender->slot_bytes, (kvs_ull)pager->slot_bytes);
    }
    const kvs_status status = lender == NULL ? KVS_OK : check_idle(lender);
    if (status != KVS_OK) {
        return status;
    }
    /* One slot stays: a ring without any would stop its pager's lookahead for good. */
    const uint32_t n_lent = lender == NULL || lender->lease == NULL || lender->ring == NULL ? 0 : lender->ring_slots - 1;
    return n_slots <= n_lent ? KVS_OK
                             : kvs_fail(pager->device, KVS_ENOSPACE,
                                        "a lease of %llu tokens needs %llu ring slots, the lender can give %u",
                                        (kvs_ull)desc->reserved_tokens, (kvs_ull)n_slots, n_lent);
}

static kvs_status check_desc(const kvs_layer_lease_desc *desc)
{
    kvs_status status = check_layer(desc->pager);
    if (status == KVS_OK && kvs_seq_cache(desc->seq) != desc->pager->cache) {
        status = kvs_fail(desc->pager->device, KVS_EINVAL, "the sequence belongs to another cache");
    }
    if (status == KVS_OK) {
        status = check_idle(desc->pager);
    }
    if (status == KVS_OK) {
        status = check_generation(desc);
    }
    if (status == KVS_OK) {
        status = check_tokens(desc);
    }
    return status == KVS_OK ? check_lender(desc) : status;
}

/* ---- taking it ---- */

static uint64_t moved_pages(const kvs_pager *pager)
{
    return pager->loaded_pages + pager->streamed_pages;
}

static uint64_t moved_bytes(const kvs_pager *pager)
{
    return pager->loaded_bytes + pager->streamed_bytes;
}

static kvs_status select_seq(kvs_pager *pager, kvs_seq *seq)
{
    kvs_status status = kvs_pager_settle(pager);
    (void)kvs_pager_cancel_ring(pager); /* what it has looked ahead to lies in slots now */
    if (status == KVS_OK && (pager->current != seq || pager->generation != kvs_seq_generation(seq))) {
        status = kvs_pager_select(pager, seq);
    }
    if (status == KVS_OK) {
        pager->generation = kvs_seq_generation(seq);
    }
    return status;
}

static uint64_t count_resident(const kvs_pager *pager, uint64_t begin, uint64_t end)
{
    uint64_t n_pages = 0;
    for (uint64_t page = begin; page < end; page++) {
        n_pages += pager->where[0][page] != KVS_NONE;
    }
    return n_pages;
}

/* First what a pass keeps without a lease, in slots of the pager's own, so that it is there after the lease too; then the
 * pages in between, in the borrowed ones. Copies of the lender's lookahead come behind all of them. */
static kvs_status populate(kvs_layer_lease *lease, uint64_t address)
{
    kvs_pager *pager = lease->pager;
    const uint64_t n_tokens = kvs_seq_committed(lease->seq);
    const uint64_t n_loaded = pager->loaded_pages;
    const uint64_t n_bytes = pager->loaded_bytes;
    pager->pass_first = n_tokens;
    pager->tail_first = n_tokens / KVS_PAGE_TOKENS;
    pager->active_pages = kvs_div_up(n_tokens, KVS_PAGE_TOKENS);
    pager->pass[0].prefix =
        kvs_pager_prefix(pager, 0, pager->tail_first, kvs_div_up(lease->reserved_tokens, KVS_PAGE_TOKENS));
    lease->reused_pages = count_resident(pager, 0, pager->pass[0].prefix) +
                          count_resident(pager, pager->tail_first, pager->active_pages);
    kvs_status status = kvs_pager_settle_residents(pager);
    if (status == KVS_OK && lease->n_slots != 0) {
        kvs_pager_borrow(pager, lease->region, address, lease->lender->slot_bytes, lease->n_slots);
        pager->pass[0].prefix = pager->tail_first;
        status = kvs_pager_settle_residents(pager);
    }
    if (status == KVS_OK && lease->lender != NULL && lease->lender->had_lookahead && lease->lender != pager) {
        kvs_pager_resume_lookahead(lease->lender);
    }
    if (status == KVS_OK) {
        status = kvs_pager_wait_loads(pager, pager->loads.submitted);
    }
    lease->populated_pages = pager->loaded_pages - n_loaded;
    lease->populated_bytes = pager->loaded_bytes - n_bytes;
    lease->pages_before = moved_pages(pager);
    lease->bytes_before = moved_bytes(pager);
    return status;
}

static kvs_status take(kvs_layer_lease *lease)
{
    kvs_pager *pager = lease->pager;
    kvs_status status = kvs_pager_reserve_slots(pager, lease->n_slots);
    if (status == KVS_OK) {
        status = select_seq(pager, lease->seq);
    }
    if (status == KVS_OK && lease->n_slots != 0) {
        status = kvs_pager_lend(lease->lender, lease->n_slots);
    }
    if (status != KVS_OK) {
        return status;
    }
    pager->leased_by = lease;
    uint64_t address = 0;
    if (lease->n_slots != 0) {
        lease->lender->lent_to = lease;
        lease->region = lease->lender->lease;
        kvs_lease_retain(lease->region);
        address = lease->lender->base_address + lease->first_slot * lease->lender->slot_bytes;
    }
    return populate(lease, address);
}

static void drop(kvs_layer_lease *lease)
{
    kvs_device *device = lease->device;
    kvs_lease_release(lease->region);
    kvs_seq_release(lease->seq);
    kvs_object_free(device, lease);
}

kvs_status kvs_layer_lease_acquire_populated(const kvs_layer_lease_desc *desc, kvs_layer_lease **lease)
{
    if (!KVS_STRUCT_OK(desc) || desc->pager == NULL || desc->seq == NULL || lease == NULL) {
        return kvs_refuse(desc == NULL || desc->pager == NULL ? NULL : desc->pager->device);
    }
    kvs_device *device = desc->pager->device;
    kvs_status status = check_desc(desc);
    if (status != KVS_OK) {
        return status;
    }
    kvs_layer_lease *made = kvs_object_alloc(device, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "no memory for a layer lease");
    }
    const uint32_t n_slots = (uint32_t)missing_slots(desc->pager, desc->reserved_tokens);
    made->device = device;
    made->pager = desc->pager;
    made->lender = n_slots == 0 ? NULL : desc->lender;
    made->seq = desc->seq;
    made->reserved_tokens = desc->reserved_tokens;
    made->n_slots = n_slots;
    made->first_slot = n_slots == 0 ? 0 : desc->lender->ring_slots - n_slots;
    kvs_seq_retain(made->seq);
    status = take(made);
    if (status == KVS_OK) {
        status = check_generation(desc);
    }
    if (status != KVS_OK) {
        (void)kvs_layer_lease_end(made);
        drop(made);
        return status;
    }
    *lease = made;
    return KVS_OK;
}

/* ---- giving it back ---- */

kvs_status kvs_layer_lease_end(kvs_layer_lease *lease)
{
    if (lease == NULL || lease->pager == NULL) {
        return KVS_OK;
    }
    kvs_pager *pager = lease->pager;
    kvs_pager *lender = lease->lender;
    kvs_status status = KVS_OK;
    lease->pager = NULL;
    lease->lender = NULL;
    if (pager->leased_by == lease) {
        if (pager->is_in_pass) {
            (void)kvs_pager_end(pager, 0);
        }
        kvs_pager_forget_failed(pager);
        status = kvs_pager_give_up(pager);
        pager->leased_by = NULL;
    }
    if (lender != NULL && lender->lent_to == lease) {
        lender->lent_to = NULL;
        kvs_pager_take_back(lender);
    }
    return status;
}

kvs_status kvs_layer_lease_return_wait(kvs_layer_lease *lease)
{
    if (lease == NULL) {
        return kvs_refuse(NULL);
    }
    if (lease->pager != NULL && lease->pager->is_in_pass) {
        return kvs_fail(lease->device, KVS_EBUSY, "a pass is open");
    }
    return kvs_layer_lease_end(lease);
}

void kvs_layer_lease_release(kvs_layer_lease *lease)
{
    if (lease != NULL) {
        (void)kvs_layer_lease_end(lease);
        drop(lease);
    }
}

/* ---- what can be said about it ---- */

static kvs_status check_current(const kvs_layer_lease *lease, uint64_t generation)
{
    if (lease->pager == NULL) {
        return kvs_fail(lease->device, KVS_ECLOSED, "the layer lease was returned");
    }
    if (lease->pager->is_in_pass) {
        return kvs_fail(lease->device, KVS_EBUSY, "a pass is open");
    }
    const uint64_t now = kvs_seq_generation(lease->seq);
    if (generation != now || lease->pager->generation != now || lease->pager->current != lease->seq) {
        return kvs_fail(lease->device, KVS_ESTALE, "the sequence is at generation %llu, the lease at %llu, asked for is %llu",
                        (kvs_ull)now, (kvs_ull)lease->pager->generation, (kvs_ull)generation);
    }
    return KVS_OK;
}

kvs_status kvs_layer_lease_plan(kvs_layer_lease *lease, uint64_t generation, uint32_t n_query_rows, kvs_span_plan **plan)
{
    if (lease == NULL || plan == NULL) {
        return kvs_refuse(lease == NULL ? NULL : lease->device);
    }
    kvs_status status = check_current(lease, generation);
    if (status != KVS_OK) {
        return status;
    }
    kvs_pager *pager = lease->pager;
    const uint64_t n_tokens = kvs_seq_committed(lease->seq);
    pager->active_pages = kvs_div_up(n_tokens, KVS_PAGE_TOKENS);
    pager->tail_first = pager->pass[0].prefix = n_tokens / KVS_PAGE_TOKENS;
    kvs_span *spans = kvs_array_alloc(pager->device, (size_t)pager->active_pages + 1, sizeof *spans);
    if (spans == NULL) {
        return kvs_fail(pager->device, KVS_ENOMEM, "no memory for %llu spans", (kvs_ull)pager->active_pages);
    }
    status = kvs_pager_plan_layer(pager, 0, n_tokens, n_query_rows, spans, plan);
    kvs_array_free(spans);
    return status;
}

kvs_status kvs_layer_lease_get_info(kvs_layer_lease *lease, kvs_layer_lease_info *info)
{
    if (lease == NULL || !KVS_STRUCT_OK(info)) {
        return kvs_refuse(lease == NULL ? NULL : lease->device);
    }
    const kvs_pager *pager = lease->pager;
    kvs_layer_lease_info made = {.struct_size = info->struct_size,
                                 .is_held = pager != NULL,
                                 .reserved_tokens = lease->reserved_tokens,
                                 .reused_pages = lease->reused_pages,
                                 .populated_pages = lease->populated_pages,
                                 .populated_bytes = lease->populated_bytes};
    if (pager != NULL) {
        made.generation = pager->generation;
        made.n_held_slots = lease->n_slots;
        made.first_held_slot = lease->first_slot;
        made.later_pages = moved_pages(pager) - lease->pages_before;
        made.later_bytes = moved_bytes(pager) - lease->bytes_before;
        for (uint64_t page = 0; pager->current == lease->seq && page < pager->where_pages; page++) {
            const uint32_t slot = pager->where[0][page];
            made.resident_pages += slot != KVS_NONE && slot < kvs_pager_own_slots(pager);
        }
    }
    *info = made;
    return KVS_OK;
}

static kvs_status corrupt(const kvs_layer_lease *lease, const char *what, uint64_t have, uint64_t want)
{
    return kvs_fail(lease->device, KVS_ECORRUPT, "layer lease: %s is %llu, must be %llu", what, (kvs_ull)have, (kvs_ull)want);
}

static kvs_status check_held(const kvs_layer_lease *lease)
{
    const kvs_pager *lender = lease->lender;
    kvs_ring_info ring = {.struct_size = sizeof ring};
    if (lease->pager->n_borrowed != lease->n_slots) {
        return corrupt(lease, "number of borrowed slots", lease->pager->n_borrowed, lease->n_slots);
    }
    if (lender == NULL) {
        return KVS_OK;
    }
    (void)kvs_ring_get_info(lender->ring, &ring);
    if (lender->lent_to != lease || ring.n_held_slots != lease->n_slots) {
        return corrupt(lease, "number of slots that the ring holds", ring.n_held_slots, lease->n_slots);
    }
    const uint64_t address = lender->base_address + (lender->ring_slots - lease->n_slots) * lender->slot_bytes;
    return lease->pager->borrowed_address == address
               ? KVS_OK
               : corrupt(lease, "address of the borrowed slots", lease->pager->borrowed_address, address);
}

kvs_status kvs_layer_lease_check_integrity(kvs_layer_lease *lease)
{
    if (lease == NULL) {
        return kvs_refuse(NULL);
    }
    const kvs_pager *pager = lease->pager;
    if (pager == NULL) {
        return KVS_OK;
    }
    if (pager->leased_by != lease) {
        return corrupt(lease, "whether its pager knows it", 0, 1);
    }
    const kvs_status status = check_held(lease);
    if (status != KVS_OK || check_current(lease, kvs_seq_generation(lease->seq)) != KVS_OK) {
        return status;
    }
    /* A load that failed leaves a page out until the next pass, which then needs a free slot for it. */
    const uint64_t n_pages = kvs_div_up(kvs_seq_committed(lease->seq), KVS_PAGE_TOKENS);
    const uint64_t n_there = count_resident(pager, 0, n_pages);
    return n_pages - n_there <= pager->n_free ? KVS_OK : corrupt(lease, "pages on the device", n_there, n_pages);
}
