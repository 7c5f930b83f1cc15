/* layer_lease.h: all pages of a layer on the device at once, while a draft is made of it.
 *
 * A head that drafts reads its whole history once per drafted token. Where its pager has no room for all pages, a lease
 * borrows slots of a ring, of another pager or its own, and brings the missing pages there once:
 *     pages [0, p) and the tail lie where the pager keeps them without a lease, p = resident pages - tail pages
 *     pages [p, t) lie in the last slots of the lender's ring, one each, t = first tail page, t - p = pages - resident pages
 * with pages = ceil(reserved_tokens / 256) and tail = pages - t. Until the lease is returned nothing streams, no pass copies
 * a page, and the lender's lookahead goes on in the other slots of its ring. Rows that a pass writes lie in the tail, or in
 * a borrowed slot after a truncation that reaches it; the pager writes them to history as ever. Then the ring is whole
 * again, with what it has looked ahead to; what lay in the borrowed slots is forgotten, the rest stays where it is.
 *
 * While it is held the lender refuses passes and another division with EBUSY, and the borrower other sequences, another
 * division, and passes beyond what was reserved. A change of the sequence past the pager makes the lease stale. Whichever
 * pager is released first returns it.
 */
#ifndef KVSTREAM_LAYER_LEASE_H
#define KVSTREAM_LAYER_LEASE_H

#include "kvstream/pager.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_layer_lease kvs_layer_lease;

typedef struct kvs_layer_lease_desc {
    uint32_t struct_size;
    uint32_t reserved;
    kvs_pager *pager;         /* borrower: attached, over a cache of one layer */
    kvs_pager *lender;        /* whose ring lends what is missing; may be `pager`; NULL where nothing may be missing */
    kvs_seq *seq;             /* retained */
    uint64_t generation;      /* of the sequence, as the caller knows it */
    uint64_t reserved_tokens; /* that passes may reach; from the committed ones on at most the widest pass */
} kvs_layer_lease_desc;

typedef struct kvs_layer_lease_info {
    uint32_t struct_size;
    uint32_t is_held;          /* 0: returned */
    uint64_t reserved_tokens;
    uint64_t generation;       /* of the sequence, as the pager has left it */
    uint32_t n_held_slots;     /* of the lender's ring, its last ones */
    uint32_t first_held_slot;
    uint64_t resident_pages;   /* of the sequence, in slots of the pager's own */
    uint64_t reused_pages;     /* of these, there before the lease was acquired */
    uint64_t populated_pages;  /* brought when it was */
    uint64_t populated_bytes;
    uint64_t later_pages;      /* brought or streamed since; 0 but for the last page of a fork */
    uint64_t later_bytes;
} kvs_layer_lease_info;

/* Slots of a ring that a lease of the pager's layer would borrow. Metadata only. thread: owner of the pager.
 * errors: EINVAL; EBUSY not attached; EUNSUPPORTED more layers than one */
kvs_status kvs_layer_lease_slots(kvs_pager *pager, uint64_t reserved_tokens, uint64_t *n_slots);

/* Borrow what is missing, bring it, and wait for it. Pages that the pager has are used where they lie. The lender's lookahead
 * is dropped and begun anew behind it, in the slots that are left.
 * own: caller. thread: owner of both pagers and of the sequence. errors, everything as before after each: EINVAL another
 * cache, nothing to reserve, fewer tokens than are committed, or more behind them than the widest pass; EUNSUPPORTED more
 * layers than one; ECONTEXT; EBUSY not attached, in a pass, leased or lending already, or rows that are not committed;
 * ESTALE another generation, also after the copies; ENOSPACE the ring cannot lend as many slots, with both numbers, or the
 * tail alone needs more than the layer may keep; ENOMEM; EIO */
kvs_status kvs_layer_lease_acquire_populated(const kvs_layer_lease_desc *desc, kvs_layer_lease **lease);

/* Where all committed tokens lie, for their last n_query_rows. `generation` says which tokens are meant: after each pass and
 * truncation the plan is another, and none is made for the one before. own: caller. thread: owner.
 * errors: ECLOSED returned; EBUSY a pass is open; ESTALE; those of kvs_span_plan_make */
kvs_status kvs_layer_lease_plan(kvs_layer_lease *lease, uint64_t generation, uint32_t n_query_rows, kvs_span_plan **plan);

/* Give the ring back, whole. Returned already is no error. thread: owner.
 * errors: EBUSY a pass is open; EIO rows in a borrowed slot did not reach history: it is given back all the same, and the
 * sequence cut to the rows that did */
kvs_status kvs_layer_lease_return_wait(kvs_layer_lease *lease);

/* Returns it, if it is not; an open pass is aborted. NULL is ignored. thread: owner */
void kvs_layer_lease_release(kvs_layer_lease *lease);

/* thread: owner. errors: EINVAL */
kvs_status kvs_layer_lease_get_info(kvs_layer_lease *lease, kvs_layer_lease_info *info);

/* Every page of the sequence has its slot, the borrowed ones are held by the lender's ring, and none is named by anybody
 * else. thread: owner. errors: EINVAL; ECORRUPT */
kvs_status kvs_layer_lease_check_integrity(kvs_layer_lease *lease);

/* cffi:end */

KVS_API_END
#endif
