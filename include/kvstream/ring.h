/* ring.h: the streaming ring: slots in device memory through which history pages pass in the order of demand.
 *
 * Demands are numbered 0, 1, 2, ... page by page in the order in which attention will read them, across layers and across
 * passes. Three counters say everything, each only ever rises:
 *     consumed <= ready <= submitted,   submitted - consumed may exceed the slots: copies wait at their gate
 * Demand d lies in the slot that `kvs_ring_page_address` names; its copy starts when the demand that held the slot before
 * is consumed. `ready` and `consumed` are 64-bit counters that copies and readers wait on, so no lookahead limit exists but
 * free slots. A ring whose copies wait for their slots does not stop those of another ring of the device.
 */
#ifndef KVSTREAM_RING_H
#define KVSTREAM_RING_H

#include "kvstream/arena.h"
#include "kvstream/kv.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_ring kvs_ring;

typedef struct kvs_ring_desc {
    uint32_t struct_size;
    uint32_t n_slots;
    kvs_lease *lease;        /* retained */
    uint64_t offset_bytes;   /* of slot 0 in the lease's region; multiple of 64 */
    uint64_t slot_bytes;     /* multiple of 64 */
    uint32_t run_limit_slots; /* longest run per copy; 0 = n_slots */
    uint32_t reserved;
} kvs_ring_desc;

/* A run of pages of one layer at consecutive host addresses. */
typedef struct kvs_demand {
    kvs_host *host;
    uint64_t host_offset_bytes; /* first record */
    uint64_t record_bytes;      /* also the host stride; at most slot_bytes */
    uint32_t n_pages;
    uint32_t layer;
} kvs_demand;

typedef struct kvs_ring_info {
    uint32_t struct_size;
    uint32_t n_slots;
    uint32_t n_held_slots;    /* taken out of the ring by kvs_ring_hold */
    uint32_t is_poisoned;
    uint64_t submitted_pages; /* demand counters */
    uint64_t ready_pages;
    uint64_t consumed_pages;
    uint64_t copies;          /* submitted copy runs since creation */
    uint64_t copied_bytes;
    uint64_t stalls;          /* waits that found their page not ready */
    uint64_t stall_ns;
} kvs_ring_info;

/* own: caller. thread: any. errors: EINVAL; ENOSPACE outside the lease; ENOMEM; the fence hook's */
kvs_status kvs_ring_create(kvs_device *device, const kvs_ring_desc *desc, kvs_ring **ring);

/* Cancels queued copies, waits for the one under way. NULL is ignored. thread: owner */
void kvs_ring_release(kvs_ring *ring);

/* Append demands in reading order and queue their copies, in runs that cross neither a demand, nor the ring's end, nor a
 * held slot, nor the run limit. `first` receives the number of the first page. thread: owner.
 * errors: EINVAL; EOVERFLOW; ENOMEM; EPOISONED (nothing submitted by any of these) */
kvs_status kvs_ring_submit(kvs_ring *ring, const kvs_demand *demands, uint32_t n_demands, uint64_t *first);

/* Device address of a submitted, unconsumed demand. thread: any while the owner does not submit or cancel.
 * errors: ENOTFOUND */
kvs_status kvs_ring_page_address(kvs_ring *ring, uint64_t demand, uint64_t *address);

/* Has demand been copied? KVS_OK or KVS_PENDING; never waits. thread: any while the owner does not submit or cancel.
 * errors: ENOTFOUND not submitted, or consumed; EIO a copy failed, the ring is poisoned */
kvs_status kvs_ring_query(kvs_ring *ring, uint64_t demand);

/* Wait until every demand below `end` is ready. The caller must have consumed enough for their copies to start.
 * thread: owner. errors: ENOTFOUND not submitted; EBUSY can never become ready (slots not consumed); EIO a copy failed,
 * the ring is poisoned */
kvs_status kvs_ring_acquire_wait(kvs_ring *ring, uint64_t end);

/* Every reader of every demand below `end` has finished: slots may be overwritten. Poisons their bytes first where the
 * device asks for it. thread: owner. errors: EINVAL end beyond ready, or moving back; EPOISONED */
kvs_status kvs_ring_consume(kvs_ring *ring, uint64_t end);

/* Drop every demand that is not consumed: queued copies are removed, the one under way finishes, all slots become free and
 * the poison is lifted. thread: owner. errors: EIO the engine could not be drained */
kvs_status kvs_ring_cancel(kvs_ring *ring);

/* Take the last n slots out of the ring, or give all back (0). Only with no unconsumed demand. thread: owner.
 * errors: EBUSY; EINVAL n >= n_slots */
kvs_status kvs_ring_hold(kvs_ring *ring, uint32_t n_slots);

/* thread: any. errors: EINVAL */
kvs_status kvs_ring_get_info(kvs_ring *ring, kvs_ring_info *info);

/* thread: owner. errors: ECORRUPT */
kvs_status kvs_ring_check_integrity(kvs_ring *ring);

/* cffi:end */

KVS_API_END
#endif
