/* pager_state.h: what the files of the pager share.
 *
 *     pager.c          attach, divide, forecast, integrity
 *     pager_slots.c    which page lies in which resident slot
 *     pager_pass.c     open a pass and close it
 *     pager_load.c     bring pages to resident slots
 *     pager_stream.c   send pages through the ring, wave by wave
 *     pager_publish.c  write committed rows to host history
 *     pager_lend.c     slots that a layer lease borrows, and the ring that lends them
 */
#ifndef KVS_NATIVE_CORE_PAGER_STATE_H
#define KVS_NATIVE_CORE_PAGER_STATE_H

#include "core/cache.h"
#include "core/device.h"
#include "core/layer_lease.h"
#include "core/pager.h"
#include "core/ring.h"

/* In a free slot. Ids count up from 0 and never get here. */
#define KVS_NO_PAGE UINT64_MAX

/* Of a ring's slots, the longest run per copy and the shortest wave. One run is read, one arrives, one is ready: with two, a
 * run that the end of a layer cuts short leaves the bus idle. */
static inline uint32_t kvs_pager_run_slots(uint32_t ring_slots)
{
    return ring_slots < 3 ? 1 : ring_slots / 3;
}

/* A resident slot. A page has the same index in every sequence that shares it, so a slot is found again by index and id. */
typedef struct kvs_slot {
    uint64_t page_id; /* KVS_NO_PAGE: free */
    uint64_t page;    /* index in the sequence */
    uint32_t layer;
    uint32_t reserved;
} kvs_slot;

/* One layer's part of the open pass. */
typedef struct kvs_pass_layer {
    uint64_t prefix;       /* pages [0, prefix) are resident */
    uint64_t first_demand; /* ring number of page `prefix` */
    uint64_t load_ticket;  /* loads that must be done before its resident pages are read */
    kvs_span_plan *plan;
    uint64_t *page_table;
} kvs_pass_layer;

/* A counter that copies raise, and the number of copies submitted to it. */
typedef struct kvs_ticket {
    _Atomic uint64_t done;
    uint64_t submitted;
    _Atomic int failed;
} kvs_ticket;

struct kvs_pager {
    kvs_device *device;
    kvs_cache *cache;
    kvs_lease *lease; /* NULL while detached */
    kvs_ring *ring;   /* NULL where nothing can stream */
    uint32_t n_layers;
    uint64_t slot_bytes;

    /* Placement. */
    uint32_t *capacity; /* resident pages per layer, tail included */
    uint32_t n_slots;
    uint32_t ring_slots;
    uint32_t max_rows;
    uint64_t tail_pages;

    /* Residency. Slots below ring_slots belong to the ring. */
    uint64_t base_address; /* kept over detach: content at an unchanged address stays true */
    kvs_slot *slots;       /* [n_slots] */
    uint32_t *free_slots;  /* stack */
    uint32_t n_free;
    uint32_t slots_capacity; /* of both arrays */
    uint32_t evict_cursor;
    uint32_t **where;      /* [layer][page] slot of the current sequence's page, or KVS_NONE */
    uint64_t where_pages;  /* columns of `where` and of the page tables */

    /* Current sequence and pass. */
    kvs_seq *current;
    uint64_t generation;   /* of the current sequence when the pager last touched it */
    bool is_in_pass;
    uint32_t pass_rows;
    uint64_t pass_first;   /* committed tokens before the pass */
    uint64_t tail_first;   /* first tail page */
    uint64_t active_pages;
    uint64_t pass_end_demand; /* ring number behind the pass */
    kvs_pass_layer *pass;  /* [n_layers] */
    kvs_stream_layer *stream; /* [n_layers]: of the pass, for backends */
    const uint64_t **tables; /* [n_layers] into pass[].page_table */

    /* Demands of the next pass that are already submitted. */
    bool has_lookahead;
    uint64_t lookahead_tail;
    uint64_t lookahead_pages; /* submitted: the first of the pass's demands */
    uint64_t *lookahead_prefix; /* [n_layers] */

    /* A layer lease: the last n_borrowed slots lie in the ring of the lender. */
    kvs_layer_lease *leased_by;
    uint32_t n_borrowed;
    kvs_lease *borrowed_region; /* the lease's claim */
    uint64_t borrowed_address;
    uint64_t borrowed_stride_bytes;
    kvs_layer_lease *lent_to; /* slots of this pager's ring are held for it */
    bool had_lookahead;       /* when they were taken */

    kvs_ticket loads;
    kvs_ticket publishes;
    bool has_pending; /* rows of the current sequence are on their way to history */
    uint64_t pending_first_page;
    uint64_t pending_end_page;

    uint64_t placement_generation;
    uint64_t streamed_pages, streamed_bytes, loaded_pages, loaded_bytes, published_bytes, copies;
    uint64_t past_stalls, past_stall_ns; /* of rings that are gone */
    uint64_t waves;
    uint64_t released_ns; /* when the newest wave of streamed pages was given back; 0 before the first of a pass */
    uint64_t gap_ns, peak_pages;
};

/* pager_slots.c */
/* Slots of the pool itself; behind them lie borrowed ones. */
static inline uint32_t kvs_pager_own_slots(const kvs_pager *pager)
{
    return pager->n_slots - pager->n_borrowed;
}
uint64_t kvs_pager_slot_address(const kvs_pager *pager, uint32_t slot);
kvs_status kvs_pager_reserve_pages(kvs_pager *pager, uint64_t n_pages);
/* The current sequence is kept alive: rows of it may still be on their way to history. NULL for none. */
void kvs_pager_set_current(kvs_pager *pager, kvs_seq *seq);
/* Make `seq` the current one: find its pages among the slots. */
kvs_status kvs_pager_select(kvs_pager *pager, kvs_seq *seq);
void kvs_pager_rebuild_free(kvs_pager *pager);
/* A slot for a page of the current sequence; evicts pages of other sequences. KVS_NONE when every slot is wanted. */
uint32_t kvs_pager_take_slot(kvs_pager *pager, uint32_t layer, uint64_t page, uint64_t page_id);
void kvs_pager_free_slot(kvs_pager *pager, uint32_t slot);
/* Forget resident pages [begin, end) of one layer of the current sequence. */
void kvs_pager_forget_pages(kvs_pager *pager, uint32_t layer, uint64_t begin, uint64_t end);

/* pager_pass.c */
uint64_t kvs_pager_prefix(const kvs_pager *pager, uint32_t layer, uint64_t tail_first, uint64_t active_pages);
/* Freeze where a layer's pages lie, by the shape of the open pass. shape: spans [active_pages], scratch */
kvs_status kvs_pager_plan_layer(const kvs_pager *pager, uint32_t layer, uint64_t active_tokens, uint32_t n_rows,
                                kvs_span *spans, kvs_span_plan **plan);
/* After a load that failed no page may be found that did not arrive. Waits for those under way. */
void kvs_pager_forget_failed(kvs_pager *pager);

/* pager_load.c */
/* Forget what the pass does not keep and bring what it keeps, in all layers. */
kvs_status kvs_pager_settle_residents(kvs_pager *pager);
/* Wait for loads up to a ticket. errors: EIO */
kvs_status kvs_pager_wait_loads(kvs_pager *pager, uint64_t ticket);

/* pager_stream.c */
kvs_status kvs_pager_cancel_ring(kvs_pager *pager);
/* Number and queue the pass's demands, and those of the next pass where they are known. */
kvs_status kvs_pager_demand_pages(kvs_pager *pager);
/* Look ahead again, to as many pages of the next pass as the ring holds now. Without memory it stays behind. */
void kvs_pager_resume_lookahead(kvs_pager *pager);
/* A pass that did not read all it had demanded leaves the ring in the middle of a layer: clean it. */
void kvs_pager_leave_ring(kvs_pager *pager);
/* Can a pass of n_rows over this sequence be placed? errors: EBUSY not attached; EINVAL; ENOSPACE */
kvs_status kvs_pager_check_rows(const kvs_pager *pager, const kvs_seq *seq, uint32_t n_rows);

/* pager_publish.c */
/* Queue rows of the pages [first, end) of the current sequence that history does not have. */
kvs_status kvs_pager_publish(kvs_pager *pager, uint64_t first_page, uint64_t end_page);
/* Wait until what was queued is in history, trying once more after a failure, and say so in the page columns. */
kvs_status kvs_pager_settle(kvs_pager *pager);
/* May a pass of n_rows over this sequence begin while rows are still on their way? */
bool kvs_pager_can_settle_later(const kvs_pager *pager, const kvs_seq *seq, uint32_t n_rows);
/* Before such a pass commits: wait for what was queued, and say so in the page column. */
void kvs_pager_settle_tail(kvs_pager *pager);

/* pager_lend.c */
static inline bool kvs_pager_leases(const kvs_pager *pager, const kvs_seq *seq)
{
    return pager->leased_by != NULL && pager->leased_by->seq == seq;
}
/* errors: EBUSY leased, or its ring lends slots */
kvs_status kvs_pager_check_unleased(const kvs_pager *pager);
/* May a pass of n_rows over this sequence begin beside a lease? errors: EBUSY; ESTALE; ENOSPACE */
kvs_status kvs_pager_check_lease(const kvs_pager *pager, const kvs_seq *seq, uint32_t n_rows);
/* Room for the slots that `kvs_pager_borrow` adds. errors: ENOMEM */
kvs_status kvs_pager_reserve_slots(kvs_pager *pager, uint32_t n_more);
/* Keep pages in slots of `region` too, which are taken before all others. Cannot fail. */
void kvs_pager_borrow(kvs_pager *pager, kvs_lease *region, uint64_t address, uint64_t stride_bytes, uint32_t n_slots);
/* Let go of the borrowed slots and forget what lies there. Rows there that did not reach history are cut off.
 * errors: EIO they were */
kvs_status kvs_pager_give_up(kvs_pager *pager);
/* Take the last slots out of the ring; its lookahead is dropped. errors: EIO; EBUSY; EINVAL */
kvs_status kvs_pager_lend(kvs_pager *pager, uint32_t n_slots);
/* The ring is whole again, and what it has looked ahead to since stays there. */
void kvs_pager_take_back(kvs_pager *pager);

#endif
