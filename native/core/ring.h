/* ring.h: what the stream needs of a ring beside its public calls. */
#ifndef KVS_NATIVE_CORE_RING_H
#define KVS_NATIVE_CORE_RING_H

#include "base/internal.h"
#include "core/step.h"
#include "kvstream/ring.h"

/* The largest `end` that kvs_ring_acquire_wait can grant before more is consumed. It lies behind the next unconsumed
 * demand whenever there is one: a run is never longer than the ring. Waves end here. thread: owner */
uint64_t kvs_ring_acquirable_end(const kvs_ring *ring);

/* Demand numbers that operations compare. thread: any */
uint64_t kvs_ring_submitted(const kvs_ring *ring);
uint64_t kvs_ring_ready(const kvs_ring *ring);
uint64_t kvs_ring_consumed(const kvs_ring *ring);

/* Readers of all demands below `end` are about to enter the compute order. They wait for their pages by themselves, and what
 * overwrites one waits for them: copies may go that far. Nothing is consumed by it. thread: owner. errors: EINVAL; EPOISONED */
kvs_status kvs_ring_open(kvs_ring *ring, uint64_t end);

/* The ring as backends know it. thread: owner */
void kvs_ring_view(const kvs_ring *ring, kvs_stream_view *view);

/* Slots that demands pass through: all but those held. thread: owner */
uint32_t kvs_ring_open_slots(const kvs_ring *ring);

/* Give all held slots back while copies go on: what is not consumed keeps its slot, as long as no demand since the slots were
 * held has come round to a slot again. Otherwise the demands are cancelled. thread: owner */
void kvs_ring_widen(kvs_ring *ring);

#endif
