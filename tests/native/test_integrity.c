/* Every integrity check finds the corruption that it is there for: one field after another is spoilt, refused with
 * KVS_ECORRUPT, and put right again. */
#include "rig.h"

#include "core/arena.h"
#include "core/cache.h"
#include "core/coordinator.h"
#include "core/pager_state.h"
#include "core/ring_state.h"

enum { P = KVS_PAGE_TOKENS, SLOT = 4096, N_SLOTS = 4, N_PAGES = 8 };

/* `check` is an expression that gives a status, `field` an lvalue. */
#define FINDS(check, field, wrong)                                                                                     \
    do {                                                                                                               \
        const __typeof__(field) right = (field);                                                                       \
        (field) = (wrong);                                                                                             \
        CHECK_STATUS(check, KVS_ECORRUPT);                                                                             \
        (field) = right;                                                                                               \
        CHECK_OK(check);                                                                                               \
    } while (0)

/* ---- arena ---- */

static kvs_arena *arena_of_two(kvs_device *device)
{
    kvs_arena *arena = NULL;
    kvs_region regions[] = {{.struct_size = sizeof regions[0], .id = 1, .size_bytes = 1024},
                            {.struct_size = sizeof regions[0], .id = 2, .size_bytes = 512}};
    CHECK_OK(kvs_arena_create(device, 4096, 64, &arena));
    CHECK_OK(kvs_arena_begin(arena, 0));
    CHECK_OK(kvs_arena_reserve(arena, &regions[0]));
    CHECK_OK(kvs_arena_reserve(arena, &regions[1]));
    CHECK_OK(kvs_arena_commit(arena));
    return arena;
}

static void test_arena(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_arena *arena = arena_of_two(device);
    kvs_lease *lease = NULL;
    CHECK_OK(kvs_arena_acquire(arena, 2, &lease));
    kvs_placed *places = arena->committed.places;
    FINDS(kvs_arena_check_integrity(arena), places[1].region.size_bytes, 0);
    FINDS(kvs_arena_check_integrity(arena), places[1].region.offset_bytes, 512);
    FINDS(kvs_arena_check_integrity(arena), places[1].region.alignment_bytes, 32);
    FINDS(kvs_arena_check_integrity(arena), places[1].region.alignment_bytes, 96);
    FINDS(kvs_arena_check_integrity(arena), places[1].region.size_bytes, 4096);
    FINDS(kvs_arena_check_integrity(arena), places[1].region.id, 1);
    FINDS(kvs_arena_check_integrity(arena), places[1].n_leases, 2);
    FINDS(kvs_arena_check_integrity(arena), places[0].n_draining, 1);
    FINDS(kvs_arena_check_integrity(arena), lease->offset_bytes, 0);
    FINDS(kvs_arena_check_integrity(arena), lease->epoch, 99);
    FINDS(kvs_arena_check_integrity(arena), lease->region_id, 7);
    FINDS(kvs_arena_check_integrity(arena), arena->n_leases, 2);
    FINDS(kvs_arena_check_integrity(arena), arena->n_draining, 1);
    FINDS(kvs_arena_check_integrity(arena), arena->staged.n_places, 1);
    kvs_lease_release(lease);
    kvs_arena_release(arena);
    rig_close(device);
}

/* ---- coordinator ---- */

static void test_coordinator(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_arena *arena = NULL;
    kvs_coordinator *coordinator = NULL;
    uint32_t phase = 0;
    const kvs_phase_region region = {.id = 1, .size_bytes = 1024};
    CHECK_OK(kvs_arena_create(device, 4096, 64, &arena));
    CHECK_OK(kvs_coordinator_create(arena, &coordinator));
    CHECK_OK(kvs_coordinator_add_phase(coordinator, &region, 1, &phase));
    CHECK_OK(kvs_coordinator_transition(coordinator, phase));
    FINDS(kvs_coordinator_check_integrity(coordinator), coordinator->ticket, 3);
    FINDS(kvs_coordinator_check_integrity(coordinator), coordinator->phase, 5);
    FINDS(kvs_coordinator_check_integrity(coordinator), coordinator->phases[0].places[0].region.size_bytes, 64);
    kvs_coordinator_release(coordinator);
    kvs_arena_release(arena);
    rig_close(device);
}

/* ---- cache ---- */

static const kvs_kv_layer layers[] = {
    {.n_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .type_k = KVS_TYPE_F32, .type_v = KVS_TYPE_F32}};

static void extend(kvs_seq *seq, uint64_t n_tokens)
{
    CHECK_OK(kvs_seq_append(seq, n_tokens));
    CHECK_OK(kvs_seq_commit(seq, n_tokens));
}

static void test_cache(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_cache *cache = NULL;
    kvs_seq *seq = NULL;
    kvs_seq *child = NULL;
    CHECK_OK(kvs_cache_create(device, layers, 1, &cache));
    CHECK_OK(kvs_seq_create(cache, 4 * P, &seq));
    extend(seq, P + 9);
    CHECK_OK(kvs_page_set_published(seq, 0, P));
    CHECK_OK(kvs_page_set_published(seq, 1, 9));
    CHECK_OK(kvs_seq_fork(seq, &child));
    CHECK_OK(kvs_seq_append(child, 1)); /* its last page is a column of its own that waits for nine rows */
    kvs_page *page = seq->pages[0];
    kvs_extent *extent = page->extent;
    FINDS(kvs_cache_check_integrity(cache), page->slot, 1);
    FINDS(kvs_cache_check_integrity(cache), extent->n_columns, 7);
    FINDS(kvs_cache_check_integrity(cache), extent->first_page, 1);
    FINDS(kvs_cache_check_integrity(cache), cache->n_columns, 9);
    FINDS(kvs_cache_check_integrity(cache), cache->n_sequences, 3);
    FINDS(kvs_cache_check_integrity(cache), seq->committed, P + 10);
    FINDS(kvs_cache_check_integrity(cache), seq->ctx_tokens, 1);
    FINDS(kvs_cache_check_integrity(cache), seq->n_pages, 1);
    FINDS(kvs_cache_check_integrity(cache), child->pages[1]->n_holders, 2);
    FINDS(kvs_cache_check_integrity(cache), child->source_rows, 0);
    FINDS(kvs_cache_check_integrity(cache), page->n_holders, 1);
    FINDS(kvs_cache_check_integrity(cache), seq->pages[1]->n_waiting, 0);
    FINDS(kvs_cache_check_integrity(cache), page->published_rows, P + 1);
    FINDS(kvs_cache_check_integrity(cache), page->id, cache->next_page_id);
    kvs_seq_release(child);
    kvs_seq_release(seq);
    kvs_cache_release(cache);
    rig_close(device);
}

static void test_extent_that_nobody_needs(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_cache *cache = NULL;
    kvs_seq *seq = NULL;
    CHECK_OK(kvs_cache_create(device, layers, 1, &cache));
    CHECK_OK(kvs_seq_create(cache, 4 * P, &seq));
    extend(seq, 5);
    CHECK_OK(kvs_seq_truncate(seq, 0));
    if (CHECK(cache->extents != NULL)) {
        FINDS(kvs_cache_check_integrity(cache), cache->extents->is_owned, false);
    }
    kvs_seq_release(seq);
    kvs_cache_release(cache);
    rig_close(device);
}

/* ---- ring ---- */

static void test_ring(void)
{
    kvs_device *device = rig_device(KVS_DEVICE_DEFERRED, 0);
    kvs_lease *lease = rig_lease(device, N_SLOTS * SLOT);
    kvs_host *host = NULL;
    kvs_ring *ring = NULL;
    uint64_t first = 0;
    const kvs_ring_desc desc = {
        .struct_size = sizeof desc, .n_slots = N_SLOTS, .lease = lease, .slot_bytes = SLOT, .run_limit_slots = 2};
    CHECK_OK(kvs_host_create(device, N_PAGES * SLOT, &host));
    CHECK_OK(kvs_ring_create(device, &desc, &ring));
    const kvs_demand demand = {.host = host, .record_bytes = SLOT, .n_pages = 6};
    CHECK_OK(kvs_ring_submit(ring, &demand, 1, &first));
    CHECK_OK(kvs_ring_acquire_wait(ring, 2));
    CHECK_OK(kvs_ring_check_integrity(ring));
    FINDS(kvs_ring_check_integrity(ring), ring->consumed, 3);
    FINDS(kvs_ring_check_integrity(ring), ring->ready, 9);
    FINDS(kvs_ring_check_integrity(ring), ring->base_demand, 1);
    FINDS(kvs_ring_check_integrity(ring), ring->ready, 6);
    FINDS(kvs_ring_check_integrity(ring), ring->n_held, N_SLOTS);
    FINDS(kvs_ring_check_integrity(ring), ring->submitted, 7);
    FINDS(kvs_ring_check_integrity(ring), kvs_ring_run_at(ring, 1)->end, 2);
    FINDS(kvs_ring_check_integrity(ring), kvs_ring_run_at(ring, 1)->host, NULL);
    FINDS(kvs_ring_check_integrity(ring), kvs_ring_run_at(ring, 1)->end, 5);
    FINDS(kvs_ring_check_integrity(ring), kvs_ring_run_at(ring, 0)->gate, 1);
    FINDS(kvs_ring_check_integrity(ring), ring->run_limit, 1);
    kvs_ring_release(ring);
    kvs_host_release(host);
    kvs_lease_release(lease);
    rig_close(device);
}

/* ---- pager ---- */

static void take_pass(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows)
{
    CHECK_OK(kvs_pager_begin(pager, seq, n_rows));
    CHECK_OK(kvs_pager_end(pager, n_rows));
    CHECK_OK(kvs_pager_publish_wait(pager));
}

static void test_pager(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_cache *cache = NULL;
    kvs_seq *seq = NULL;
    kvs_pager *pager = NULL;
    CHECK_OK(kvs_cache_create(device, layers, 1, &cache));
    CHECK_OK(kvs_seq_create(cache, 4 * P, &seq));
    CHECK_OK(kvs_pager_create(cache, &pager));
    kvs_lease *lease = rig_lease(device, 6 * cache->max_record_bytes);
    const uint32_t pages = 4;
    const kvs_placement placement = {
        .struct_size = sizeof placement, .n_layers = 1, .resident_pages = &pages, .ring_slots = 1, .max_rows = P};
    CHECK_OK(kvs_pager_attach(pager, lease, &placement));
    take_pass(pager, seq, P);
    take_pass(pager, seq, 7);
    CHECK_OK(kvs_pager_check_integrity(pager));
    const uint32_t held = pager->where[0][0];
    const uint32_t other = pager->where[0][1];
    FINDS(kvs_pager_check_integrity(pager), pager->slots[held].page_id, pager->slots[other].page_id);
    FINDS(kvs_pager_check_integrity(pager), pager->n_free, pager->n_free - 1);
    FINDS(kvs_pager_check_integrity(pager), pager->free_slots[0], 0);
    FINDS(kvs_pager_check_integrity(pager), pager->free_slots[0], held);
    FINDS(kvs_pager_check_integrity(pager), pager->where[0][1], held);
    FINDS(kvs_pager_check_integrity(pager), pager->where[0][2], pager->n_slots);
    FINDS(kvs_pager_check_integrity(pager), pager->slots[held].page, 1);
    FINDS(kvs_pager_check_integrity(pager), pager->capacity[0], 1);
    FINDS(kvs_pager_check_integrity(pager), pager->ring->consumed, 5);
    CHECK_STATUS(kvs_pager_check_integrity(NULL), KVS_EINVAL);
    kvs_seq_release(seq);
    kvs_pager_release(pager);
    kvs_lease_release(lease);
    kvs_cache_release(cache);
    rig_close(device);
}

static void test_layer_lease(void)
{
    kvs_device *device = rig_device(0, 0);
    kvs_cache *cache = NULL;
    kvs_seq *seq = NULL;
    kvs_pager *pager = NULL;
    kvs_layer_lease *layer = NULL;
    CHECK_OK(kvs_cache_create(device, layers, 1, &cache));
    CHECK_OK(kvs_seq_create(cache, 8 * P, &seq));
    CHECK_OK(kvs_pager_create(cache, &pager));
    kvs_lease *lease = rig_lease(device, 6 * cache->max_record_bytes);
    const uint32_t pages = 2;
    const kvs_placement placement = {
        .struct_size = sizeof placement, .n_layers = 1, .resident_pages = &pages, .ring_slots = 4, .max_rows = P};
    CHECK_OK(kvs_pager_attach(pager, lease, &placement));
    take_pass(pager, seq, P);
    take_pass(pager, seq, P);
    take_pass(pager, seq, P);
    const kvs_layer_lease_desc desc = {.struct_size = sizeof desc,
                                       .pager = pager,
                                       .lender = pager,
                                       .seq = seq,
                                       .generation = kvs_seq_generation(seq),
                                       .reserved_tokens = 3 * P + 4};
    CHECK_OK(kvs_layer_lease_acquire_populated(&desc, &layer));
    FINDS(kvs_layer_lease_check_integrity(layer), pager->leased_by, NULL);
    FINDS(kvs_layer_lease_check_integrity(layer), pager->lent_to, NULL);
    FINDS(kvs_layer_lease_check_integrity(layer), pager->n_borrowed, 1);
    FINDS(kvs_layer_lease_check_integrity(layer), pager->ring->held_seen, 3);
    FINDS(kvs_layer_lease_check_integrity(layer), pager->borrowed_address, 0);
    pager->n_free--; /* a page that is out needs a slot to come back to */
    FINDS(kvs_layer_lease_check_integrity(layer), pager->where[0][0], KVS_NONE);
    pager->n_free++;
    kvs_layer_lease_release(layer);
    kvs_seq_release(seq);
    kvs_pager_release(pager);
    kvs_lease_release(lease);
    kvs_cache_release(cache);
    rig_close(device);
}

int main(void)
{
    test_arena();
    test_coordinator();
    test_cache();
    test_extent_that_nobody_needs();
    test_ring();
    test_pager();
    test_layer_lease();
    CHECK_STATUS(kvs_arena_check_integrity(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_coordinator_check_integrity(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_cache_check_integrity(NULL), KVS_EINVAL);
    CHECK_STATUS(kvs_ring_check_integrity(NULL), KVS_EINVAL);
    return check_finish();
}
