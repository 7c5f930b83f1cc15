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
    const uint64_t *const *page_tables; /* [layer][active_pages]; entries are valid between acquire and release */
    kvs_stream_view stream;             /* entries of streamed pages say where they will lie */
} kvs_pass_view;

/* errors: EBUSY no pass is open */
kvs_status kvs_pager_view_pass(kvs_pager *pager, kvs_pass_view *view);

kvs_device *kvs_pager_device(const kvs_pager *pager);

/* Geometry that a tape must match. errors: EINVAL with the layer's number */
kvs_status kvs_pager_check_layers(kvs_pager *pager, const kvs_kv_layer *layer, uint32_t index, uint32_t n_layers);

/* The next wave of a layer, from page_begin on: waits until its pages are on the device and says where it ends. Waves follow
 * one another from page 0 to active_pages, layers in rising order. errors: EIO; EINVAL out of order */
kvs_status kvs_pager_acquire_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t *page_end);

/* Instead of waves: all readers of the pass are about to enter the compute order, and order themselves with the copies. Waits
 * until all resident pages are there. errors: EIO; EINVAL */
kvs_status kvs_pager_open_layers(kvs_pager *pager);

/* Behind the last operation of such a pass: nothing of it will be read any more. notes: as in the step. errors: EIO */
kvs_status kvs_pager_close_layers(kvs_pager *pager, const kvs_stream_note *notes);

/* Every reader of the wave has finished. errors: EIO; EINVAL */
kvs_status kvs_pager_release_wave(kvs_pager *pager, uint32_t layer, uint64_t page_begin, uint64_t page_end);

#endif
