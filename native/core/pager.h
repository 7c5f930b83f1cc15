/* pager.h: an open pass as the executor sees it. */
#ifndef KVS_NATIVE_CORE_PAGER_H
#define KVS_NATIVE_CORE_PAGER_H

#include "base/internal.h"
#include "core/step.h"
#include "kvstream/ring.h"

typedef struct kvs_pass_view {
    uint32_t n_rows;
    uint32_t n_layers;
    uint64_t first_token;               /* committed tokens before the pass */
    uint64_t seq_id;                    /* as kvs_seq_info says */
    uint64_t cache_id;
    uint64_t n_rewrites;
    uint64_t active_pages;              /* per layer */
    bool is_resident;                   /* no page comes through the ring */
    const kvs_history_view *history;    /* [n_layers] where rows go; NULL: they touch more than KVS_HISTORY_PAGES pages */
    const uint64_t *const *page_tables; /* [layer][active_pages]; entries are valid between acquire and release */
} kvs_pass_view;

/* errors: EBUSY no pass is open */
kvs_status kvs_pager_view_pass(kvs_pager *pager, kvs_pass_view *view);

/* The operations of the open pass have written its rows to host history, of every layer: what is committed of them needs no copies. */
void kvs_pager_note_written(kvs_pager *pager);

kvs_device *kvs_pager_device(const kvs_pager *pager);

/* Geometry that a tape must match. errors: EINVAL with the layer's number */
kvs_status kvs_pager_check_layers(kvs_pager *pager, const kvs_kv_layer *layer, uint32_t index, uint32_t n_layers);

/* The next wave of a layer, from page_begin on: waits until its pages are on the device and says where it ends. Waves follow
 * one another from page 0 to active_pages, layers in rising order. errors: EIO; EINVAL out of order */
kvs_status kvs_pager_acquire_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t *page_end);

/* Every reader of the wave has finished. errors: EIO; EINVAL */
kvs_status kvs_pager_release_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t page_end);

/* A pass is under way on the device: rows of the last one that are not on their way to history are sent. */
void kvs_pager_publish_due(kvs_pager *pager);

#endif
