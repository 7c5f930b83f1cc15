/* coordinator.h: the insides of the phase coordinator, shared by phase.c (what is registered, what
 * is admitted) and transition.c (how it moves).
 *
 * Locks: the mutex guards what any thread may ask or set; everything else belongs to the owner. No
 * callback runs under it.
 */
#ifndef KVS_NATIVE_CORE_COORDINATOR_H
#define KVS_NATIVE_CORE_COORDINATOR_H

#include "core/arena.h"
#include "kvstream/phase.h"

typedef struct kvs_failure {
    int32_t step; /* kvs_phase_step, -1 none */
    int32_t consumer;
    int32_t status;
} kvs_failure;

struct kvs_coordinator {
    _Atomic uint64_t claims; /* the owner's, and that of a move under way */
    kvs_device *device;
    kvs_arena *arena; /* held: storage alone */
    kvs_mutex mutex;
    kvs_coordinator_state state;
    bool is_cancelled; /* asked for since the move began */
    bool is_cancelable; /* a transition moves, not a rebuild */
    uint32_t phase; /* UINT32_MAX none */
    kvs_failure failure;
    uint64_t transitions;
    uint64_t ticket; /* admitted one, 0 none */
    uint64_t newest_ticket;
    kvs_layout *phases;
    uint32_t n_phases;
    uint32_t phase_room;
    kvs_consumer *consumers;
    uint32_t n_consumers;
    uint32_t consumer_room;
};

void kvs_coordinator_drop(kvs_coordinator *coordinator);

#endif
