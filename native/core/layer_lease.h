/* layer_lease.h: a layer lease as the two pagers see it that it connects. */
#ifndef KVS_NATIVE_CORE_LAYER_LEASE_H
#define KVS_NATIVE_CORE_LAYER_LEASE_H

#include "base/internal.h"
#include "kvstream/layer_lease.h"

struct kvs_layer_lease {
    kvs_device *device;
    kvs_pager *pager;  /* NULL: returned */
    kvs_pager *lender; /* NULL: nothing is borrowed */
    kvs_lease *region; /* a claim on the lender's pool */
    kvs_seq *seq;      /* a claim */
    uint64_t reserved_tokens;
    uint32_t first_slot;
    uint32_t n_slots;
    uint64_t reused_pages;
    uint64_t populated_pages;
    uint64_t populated_bytes;
    uint64_t pages_before; /* that the pager had loaded or streamed when the lease was there */
    uint64_t bytes_before;
};

/* Give everything back, whatever state a pager is in. NULL, or returned already: nothing. errors: as
 * kvs_layer_lease_return_wait, but EBUSY: an open pass is aborted */
kvs_status kvs_layer_lease_end(kvs_layer_lease *lease);

#endif
