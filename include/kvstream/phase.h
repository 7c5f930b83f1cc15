/* phase.h: the coordinator that moves one arena from the layout of one phase to that of another.
 *
 * Prefill wants a large workspace, decode a large page pool. Both are layouts of one arena. A transition runs, for all
 * consumers step by step: prepare, stop, drain, invalidate, release; then one layout commit; then bind, activate. A
 * failure at any point runs the undo of every step done so far in reverse order and restores the old layout; when an
 * undo fails too the coordinator is poisoned and says so, and the first failure is kept.
 *
 * The arena refuses leases from stop until the layout is committed, and again while bind and activate are undone: nobody
 * else's claim can come between. It must be open when a transition starts.
 */
#ifndef KVSTREAM_PHASE_H
#define KVSTREAM_PHASE_H

#include "kvstream/arena.h"

KVS_API_BEGIN

/* cffi:begin */

typedef struct kvs_coordinator kvs_coordinator;

typedef enum kvs_phase_step {
    KVS_STEP_PREPARE = 0,    /* check that the target layout can be served; change nothing visible */
    KVS_STEP_STOP = 1,       /* admit no new work */
    KVS_STEP_DRAIN = 2,      /* wait for submitted work and copies */
    KVS_STEP_INVALIDATE = 3, /* retire bound tapes and captured graphs */
    KVS_STEP_RELEASE = 4,    /* give up leases on regions that change */
    KVS_STEP_COMMIT = 5,     /* the coordinator's own: the layout transaction */
    KVS_STEP_BIND = 6,       /* take leases on the new regions */
    KVS_STEP_ACTIVATE = 7    /* publish what was bound; nothing may fail after this */
} kvs_phase_step;

typedef enum kvs_coordinator_state {
    KVS_COORDINATOR_IDLE = 0,
    KVS_COORDINATOR_EXECUTING = 1, /* a unit of work is admitted */
    KVS_COORDINATOR_MOVING = 2,    /* inside kvs_coordinator_transition */
    KVS_COORDINATOR_POISONED = 3   /* an undo failed; nothing is admitted until kvs_coordinator_rebuild */
} kvs_coordinator_state;

/* A consumer of regions. `run` performs one step towards `phase`, `undo` takes the same step back after a failure; both
 * return a kvs_status and must not call the coordinator (EBUSY). */
typedef struct kvs_consumer {
    uint32_t struct_size;
    uint32_t flags;
    void *user;
    int (*run)(void *user, int step, uint32_t phase);
    int (*undo)(void *user, int step, uint32_t phase);
} kvs_consumer;

/* One region of a phase's layout, in address order of placement (first fit). */
typedef struct kvs_phase_region {
    uint64_t id;
    uint64_t size_bytes;
    uint64_t alignment_bytes;
    uint32_t flags; /* kvs_region_flag */
    uint32_t reserved;
} kvs_phase_region;

typedef struct kvs_coordinator_info {
    uint32_t struct_size;
    uint32_t state; /* kvs_coordinator_state */
    uint32_t phase; /* active one; UINT32_MAX before the first transition and while poisoned */
    uint32_t n_phases;
    uint32_t n_consumers;
    int32_t failed_step;     /* kvs_phase_step of the newest failed transition, -1 none */
    int32_t failed_consumer; /* its consumer index, -1 the coordinator itself */
    int32_t failed_status;   /* kvs_status */
    uint64_t transitions;    /* completed ones that changed the layout */
} kvs_coordinator_info;

/* own: caller; retains the arena. thread: any. errors: EINVAL; ENOMEM; ECLOSED */
kvs_status kvs_coordinator_create(kvs_arena *arena, kvs_coordinator **coordinator);

/* Undoes nothing: the layout stays. NULL is ignored. thread: owner */
void kvs_coordinator_release(kvs_coordinator *coordinator);

/* Register a phase and check, now, that its layout fits the arena. `phase` receives its number, counted from 0.
 * thread: owner, while idle. errors: EINVAL empty, duplicate ids, bad alignment; ENOSPACE with bytes needed and available;
 * EBUSY not idle; ENOMEM */
kvs_status kvs_coordinator_add_phase(kvs_coordinator *coordinator, const kvs_phase_region *regions, uint32_t n_regions,
                                     uint32_t *phase);

/* Register a consumer; steps visit consumers in this order, undo in reverse. own: `consumer->user` is borrowed until the
 * coordinator is released. thread: owner, while idle. errors: EINVAL; EBUSY; ENOMEM */
kvs_status kvs_coordinator_add_consumer(kvs_coordinator *coordinator, const kvs_consumer *consumer);

/* Move to a phase. Moving to the active phase is a success that calls nobody.
 * thread: owner. errors: EBUSY executing, re-entered or arena quiesced; ENOTFOUND phase; ECLOSED; EPOISONED also when an
 * undo fails; ECANCELLED; ESTALE somebody else committed a layout meanwhile; else the status of the step that failed, the
 * old layout being restored */
kvs_status kvs_coordinator_transition(kvs_coordinator *coordinator, uint32_t phase);

/* Ask a running transition to stop before its next callback and undo. No effect outside one. thread: any. errors: EINVAL */
kvs_status kvs_coordinator_cancel(kvs_coordinator *coordinator);

/* Admit one unit of work; `ticket` is nonzero. thread: owner. errors: EBUSY; EPOISONED; EINVAL no phase active */
kvs_status kvs_coordinator_admit(kvs_coordinator *coordinator, uint64_t *ticket);

/* End it. thread: owner. errors: ESTALE not the admitted ticket */
kvs_status kvs_coordinator_finish(kvs_coordinator *coordinator, uint64_t ticket);

/* After poison: run bind and activate of `phase` on all consumers against a freshly committed layout of that phase. Leases
 * that survived make it fail. thread: owner. errors: EINVAL not poisoned; EBUSY leases live; the consumers' */
kvs_status kvs_coordinator_rebuild(kvs_coordinator *coordinator, uint32_t phase);

/* thread: any. errors: EINVAL */
kvs_status kvs_coordinator_get_info(kvs_coordinator *coordinator, kvs_coordinator_info *info);

/* thread: owner. errors: ECORRUPT */
kvs_status kvs_coordinator_check_integrity(kvs_coordinator *coordinator);

/* cffi:end */

KVS_API_END
#endif
