/* lease_scene.h: a head of one layer that borrows ring slots of a trunk of two, for the tests of layer leases. */
#ifndef KVS_TESTS_LEASE_SCENE_H
#define KVS_TESTS_LEASE_SCENE_H

#include "pager_scene.h"

#include "core/pager_state.h"
#include "kvstream/layer_lease.h"

enum { HEAD_SLOTS = 4, HEAD_CTX = 8 * P };

/* The trunk is the bench; a row of the head says which token it is of as one of layer 0 does. */
typedef struct duo {
    bench trunk;
    kvs_cache *cache;
    kvs_seq *seq;
    kvs_pager *pager;
    kvs_lease *pool;
    kvs_layer_lease *lease;
} duo;

static inline kvs_placement head_placement(const uint32_t *pages, uint32_t ring_slots)
{
    return (kvs_placement){
        .struct_size = sizeof(kvs_placement), .n_layers = 1, .resident_pages = pages, .ring_slots = ring_slots, .max_rows = P};
}

static const uint32_t three[] = {3};

static inline void open_duo(duo *d, uint32_t flags)
{
    *d = (duo){.lease = NULL};
    open_bench(&d->trunk, flags);
    const uint32_t pages[] = {2, 2};
    const kvs_placement trunk = placement_of(pages, 6, P);
    CHECK_OK(kvs_pager_place(d->trunk.pager, &trunk));
    CHECK_OK(kvs_cache_create(d->trunk.device, layers, 1, &d->cache));
    d->pool = rig_lease(d->trunk.device, HEAD_SLOTS * d->trunk.slot_bytes);
    CHECK_OK(kvs_seq_create(d->cache, HEAD_CTX, &d->seq));
    CHECK_OK(kvs_pager_create(d->cache, &d->pager));
    const kvs_placement head = head_placement(three, 1);
    CHECK_OK(kvs_pager_attach(d->pager, d->pool, &head));
}

static inline void close_duo(duo *d)
{
    kvs_layer_lease_release(d->lease);
    kvs_seq_release(d->seq);
    kvs_pager_release(d->pager);
    kvs_lease_release(d->pool);
    kvs_cache_release(d->cache);
    close_bench(&d->trunk);
}

static inline kvs_pager_info head_info(const duo *d)
{
    kvs_pager_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_pager_get_info(d->pager, &info));
    CHECK_OK(kvs_pager_check_integrity(d->pager));
    CHECK_OK(kvs_cache_check_integrity(d->cache));
    if (d->lease != NULL) {
        CHECK_OK(kvs_layer_lease_check_integrity(d->lease));
    }
    if (d->trunk.pager != NULL) {
        (void)info_of(&d->trunk);
    }
    return info;
}

static inline kvs_layer_lease_info lease_info(const duo *d)
{
    kvs_layer_lease_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_layer_lease_get_info(d->lease, &info));
    return info;
}

static inline uint64_t generation_of(kvs_seq *seq)
{
    kvs_seq_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_seq_get_info(seq, &info));
    return info.generation;
}

static inline kvs_status play_head(const duo *d)
{
    kvs_pass_view view;
    CHECK_OK(kvs_pager_view_pass(d->pager, &view));
    const uint64_t end = view.first_token + view.n_rows;
    for (uint64_t token = view.first_token; token < end; token++) {
        touch_row(&d->trunk, view.page_tables[0][token / P], 0, token, true);
    }
    for (uint64_t page = 0; page < view.active_pages;) {
        uint64_t page_end = page;
        kvs_status status = kvs_pager_acquire_wave(d->pager, 0, page, &page_end);
        if (status != KVS_OK) {
            return status;
        }
        for (uint64_t token = page * P; token < page_end * P && token < end; token++) {
            touch_row(&d->trunk, view.page_tables[0][token / P], 0, token, false);
        }
        CHECK_OK(kvs_pager_release_wave(d->pager, 0, page, page_end));
        page = page_end;
    }
    return KVS_OK;
}

static inline void head_pass(const duo *d, uint32_t n_rows)
{
    CHECK_OK(kvs_pager_begin(d->pager, d->seq, n_rows));
    CHECK_OK(play_head(d));
    CHECK_OK(kvs_pager_end(d->pager, n_rows));
    (void)head_info(d);
}

static inline void head_history(duo *d, uint64_t n_tokens)
{
    while (tokens_of(d->seq) < n_tokens) {
        const uint64_t left = n_tokens - tokens_of(d->seq);
        head_pass(d, left < P ? (uint32_t)left : P);
    }
    CHECK_OK(kvs_pager_publish_wait(d->pager));
}

static inline void check_head_history(const duo *d)
{
    static uint8_t record[P * 256];
    CHECK_OK(kvs_pager_publish_wait(d->pager));
    const uint64_t end = tokens_of(d->seq);
    for (uint64_t page = 0; page * P < end; page++) {
        CHECK_OK(kvs_seq_read_page_wait(d->seq, 0, page, record));
        for (uint64_t token = page * P; token < (page + 1) * P && token < end; token++) {
            touch_row(&d->trunk, (uint64_t)(uintptr_t)record, 0, token, false);
        }
    }
}

static inline kvs_layer_lease_desc lease_desc(const duo *d, uint64_t n_more)
{
    return (kvs_layer_lease_desc){.struct_size = sizeof(kvs_layer_lease_desc),
                                  .pager = d->pager,
                                  .lender = d->trunk.pager,
                                  .seq = d->seq,
                                  .generation = generation_of(d->seq),
                                  .reserved_tokens = tokens_of(d->seq) + n_more};
}

static inline void acquire(duo *d, uint64_t n_more)
{
    const kvs_layer_lease_desc desc = lease_desc(d, n_more);
    CHECK_OK(kvs_layer_lease_acquire_populated(&desc, &d->lease));
    (void)head_info(d);
}

static inline void give_back(duo *d)
{
    CHECK_OK(kvs_layer_lease_return_wait(d->lease));
    CHECK_OK(kvs_layer_lease_return_wait(d->lease));
    (void)head_info(d);
    kvs_layer_lease_release(d->lease);
    d->lease = NULL;
}

static inline kvs_ring_info ring_of(const kvs_pager *pager)
{
    kvs_ring_info info = {.struct_size = sizeof info};
    CHECK_OK(kvs_ring_get_info(pager->ring, &info));
    return info;
}

#endif
