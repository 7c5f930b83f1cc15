/* pager.h: which pages of a sequence lie in the device pool, which stream through the ring, and when history is written.
 *
 * The pool is one leased region, divided into equal slots (the cache's largest record). The first `ring_slots` are the
 * ring, the others hold resident pages: for each layer a prefix of the history and the tail. The tail is every page that a
 * pass writes; it always lies on the device, and is written to host history when its rows are committed. What is neither
 * prefix nor tail streams, page by page, once per pass.
 *
 * For a pass over n rows of a sequence with c committed tokens and a layer that may keep r pages:
 *     active = ceil((c + n) / 256), first tail page t = floor(c / 256), prefix = active <= r ? t : min(t, r - (active - t))
 * so that a layer streams active - r pages. Since a pass writes at most tail_pages = ceil(max_rows / 256) + 1 pages, r is at
 * least that, or the whole context. Nothing here changes a bit of any result.
 */
#ifndef KVSTREAM_PAGER_H
#define KVSTREAM_PAGER_H

#include "kvstream/arena.h"
#include "kvstream/kv.h"
#include "kvstream/ring.h"
#include "kvstream/span.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_pager kvs_pager;

typedef struct kvs_placement {
    uint32_t struct_size;
    uint32_t n_layers;
    const uint32_t *resident_pages; /* [n_layers], tail included; each at least tail_pages, or the context */
    uint32_t ring_slots;            /* 0 only where nothing can stream: a pass that would is refused with ENOSPACE */
    uint32_t max_rows;              /* widest pass under this placement */
} kvs_placement;

typedef struct kvs_pager_info {
    uint32_t struct_size;
    uint32_t is_attached;
    uint32_t n_slots;              /* of the attached pool */
    uint32_t ring_slots;
    uint32_t max_rows;
    uint32_t is_in_pass;
    uint64_t placement_generation; /* rises when a page table entry of a resident page changes */
    uint64_t resident_pages;       /* slots that hold a page now, of any sequence */
    uint64_t streamed_pages;       /* that passed the ring since creation */
    uint64_t streamed_bytes;
    uint64_t loaded_pages;         /* history pages brought to resident slots (after a phase change, fork, truncation) */
    uint64_t loaded_bytes;
    uint64_t published_bytes;      /* written to host history */
    uint64_t copies;               /* history to device, runs */
    uint64_t waves;                /* of streamed pages */
    uint64_t stalls;               /* of these, waves that found a page not there yet */
    uint64_t stall_ns;
    uint64_t gap_ns;               /* of the newest pass: the longest time between two waves of streamed pages */
    uint64_t peak_pages;           /* of the newest pass: most pages that lay ready in the ring */
} kvs_pager_info;

/* What a pass over a sequence will find: all metadata, nothing moves. */
typedef struct kvs_pass_forecast {
    uint32_t struct_size;
    uint32_t n_layers;
    uint64_t active_pages;       /* per layer */
    uint64_t resident_pages;     /* sum over layers, tail included */
    uint64_t streamed_pages;     /* sum over layers */
    uint64_t streamed_bytes;
} kvs_pass_forecast;

/* own: caller; retains the cache. thread: any. errors: EINVAL; ENOMEM */
kvs_status kvs_pager_create(kvs_cache *cache, kvs_pager **pager);

/* Detaches, then releases. NULL is ignored. thread: owner */
void kvs_pager_release(kvs_pager *pager);

/* Slots needed by a placement: ring_slots + sum(resident_pages). Metadata only. thread: any.
 * errors: EINVAL a layer below its tail pages, or no ring where something can stream within ctx_tokens; EOVERFLOW */
kvs_status kvs_placement_slots(const kvs_placement *placement, uint64_t ctx_tokens, uint64_t *n_slots);

/* Take the pool region and divide it. Pages of an earlier attachment whose slot has the same device address and still is a
 * resident slot stay; the others are forgotten (history has them).
 * own: one claim on the lease. thread: owner. errors: EINVAL no rows, or more than a layer has room for; EBUSY attached;
 * ENOSPACE the region holds fewer slots, with both numbers; ENOMEM */
kvs_status kvs_pager_attach(kvs_pager *pager, kvs_lease *pool, const kvs_placement *placement);

/* Divide the attached pool anew. thread: owner. errors: as kvs_pager_attach */
kvs_status kvs_pager_place(kvs_pager *pager, const kvs_placement *placement);

/* Wait for copies, give the lease back, remember what lay where. thread: owner. errors: EBUSY in a pass; EIO */
kvs_status kvs_pager_detach(kvs_pager *pager);

/* Forget every resident page (they are reloaded when needed). thread: owner. errors: EBUSY in a pass */
kvs_status kvs_pager_forget(kvs_pager *pager);

/* thread: owner. errors: EBUSY not attached; EINVAL rows beyond the placement, another cache; ENOSPACE a layer's share is below
 * the tail */
kvs_status kvs_pager_forecast(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows, kvs_pass_forecast *forecast);

/* Open a pass: appends n_rows to the sequence, makes room, queues every copy of the pass in the order in which it will be
 * read and, behind them, those of the next pass. Each history page that a failed pass had brought stays usable. Rows of the
 * last pass that are still on their way to history are waited for, unless this one only adds rows to the same page.
 * thread: owner. errors: EINVAL; EBUSY in a pass or not attached; ECONTEXT; ENOSPACE; ENOMEM; EIO. On any error the sequence
 * and its history are as before */
kvs_status kvs_pager_begin(kvs_pager *pager, kvs_seq *seq, uint32_t n_rows);

/* Close the pass: the first n_rows rows are committed and written to history, the others dropped. 0 aborts the pass.
 * thread: owner. errors: EINVAL more rows than the pass has; EBUSY no pass; EIO a page of a layer that was not attended to did not
 * arrive (the pass is aborted); ENOMEM the rows are committed, and their writing is tried again by the next call that waits */
kvs_status kvs_pager_end(kvs_pager *pager, uint32_t n_rows);

/* Truncate a sequence whose pages this pager may hold: kvs_seq_truncate, and forget what is no longer true.
 * thread: owner. errors: EBUSY in a pass; those of kvs_seq_truncate */
kvs_status kvs_pager_truncate(kvs_pager *pager, kvs_seq *seq, uint64_t n_tokens);

/* Wait until every committed row is in host history; a failed write is tried once more. thread: owner. errors: EIO */
kvs_status kvs_pager_publish_wait(kvs_pager *pager);

/* Forget a sequence that is about to be released. One that is released without this lives until the pager turns to another.
 * thread: owner. errors: EBUSY in a pass; EIO its last rows did not reach history */
kvs_status kvs_pager_drop(kvs_pager *pager, kvs_seq *seq);

/* thread: owner. errors: EINVAL */
kvs_status kvs_pager_get_info(kvs_pager *pager, kvs_pager_info *info);

/* thread: owner. errors: ECORRUPT */
kvs_status kvs_pager_check_integrity(kvs_pager *pager);

/* cffi:end */

KVS_API_END
#endif
