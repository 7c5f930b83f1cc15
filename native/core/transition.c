/* transition.c: one move from phase to phase, and its way back.
 *
 * The arena accepts no leases from the stop step until the layout is committed, and while the bind
 * and activate steps are taken back, so that nobody comes between a check of the leases and the
 * commit that relies on it.
 */
#include "core/coordinator.h"

enum { N_STEPS = KVS_STEP_ACTIVATE + 1, TEXT_BYTES = 256 };

typedef struct move {
    kvs_coordinator *coordinator;
    uint32_t phase;
    kvs_layout old_layout;
    uint64_t old_epoch;
    uint64_t new_epoch;
    char text[TEXT_BYTES]; /* of the first failure */
} move;

static const char *step_name(int32_t step)
{
    static const char *const names[N_STEPS] = {"prepare", "stop",   "drain", "invalidate",
                                               "release", "commit", "bind",  "activate"};
    return names[step];
}

static bool is_cancelled(kvs_coordinator *coordinator)
{
    kvs_mutex_lock(&coordinator->mutex);
    const bool cancelled = coordinator->is_cancelled;
    kvs_mutex_unlock(&coordinator->mutex);
    return cancelled;
}

/* A callback has no way to say "later": every positive answer is a mistake. */
static kvs_status answer_of(int answer)
{
    return answer > 0 ? KVS_EINVAL : (kvs_status)answer;
}

static kvs_status run_one(const move *move, int step, uint32_t index)
{
    const kvs_consumer *consumer = &move->coordinator->consumers[index];
    return answer_of(consumer->run(consumer->user, step, move->phase));
}

static kvs_status undo_one(const move *move, int step, uint32_t index)
{
    const kvs_consumer *consumer = &move->coordinator->consumers[index];
    return answer_of(consumer->undo(consumer->user, step, move->phase));
}

/* The coordinator's own part of a step, before the consumers'. */
static kvs_status run_own(move *move, int step)
{
    kvs_arena *arena = move->coordinator->arena;
    if (step == KVS_STEP_STOP) {
        return kvs_arena_quiesce(arena);
    }
    if (step == KVS_STEP_COMMIT) {
        const kvs_layout *layout = &move->coordinator->phases[move->phase];
        return kvs_arena_install(arena, layout, move->old_epoch, &move->new_epoch);
    }
    if (step == KVS_STEP_BIND) {
        kvs_arena_reopen(arena);
    }
    return KVS_OK;
}

/* One step for everybody. On failure `failure` names the one at which it stopped; those before it
 * have done the step. */
static kvs_status run_step(move *move, int step, kvs_failure *failure)
{
    kvs_coordinator *coordinator = move->coordinator;
    const uint32_t n_callbacks = step == KVS_STEP_COMMIT ? 0 : coordinator->n_consumers;
    *failure = (kvs_failure){.step = step, .consumer = -1};
    const bool stops = step == KVS_STEP_COMMIT && is_cancelled(coordinator);
    kvs_status status = stops ? KVS_ECANCELLED : run_own(move, step);
    if (status != KVS_OK && !stops) {
        (void)kvs_device_last_error(coordinator->device, move->text, sizeof move->text);
    }
    for (uint32_t i = 0; status == KVS_OK && i < n_callbacks; i++) {
        failure->consumer = (int32_t)i;
        status = is_cancelled(coordinator) ? KVS_ECANCELLED : run_one(move, step, i);
    }
    failure->status = status;
    return status;
}

/* How many consumers have done `step` when a move has stopped at `failure`. */
static uint32_t n_done(const kvs_coordinator *coordinator, const kvs_failure *failure, int step)
{
    if (step == KVS_STEP_COMMIT) {
        return 0;
    }
    if (step < failure->step) {
        return coordinator->n_consumers;
    }
    return failure->consumer < 0 ? 0 : (uint32_t)failure->consumer;
}

/* Take back what `failure` left behind; on failure, it receives where that stopped. */
static kvs_status undo_all(move *move, const kvs_failure *failure, kvs_failure *stopped)
{
    kvs_coordinator *coordinator = move->coordinator;
    kvs_arena *arena = coordinator->arena;
    kvs_status status = KVS_OK;
    for (int step = failure->step; step >= 0; step--) {
        if (step > KVS_STEP_COMMIT) {
            status = kvs_arena_quiesce(arena);
        } else if (step == KVS_STEP_COMMIT && failure->step > step) {
            status = kvs_arena_install(arena, &move->old_layout, move->new_epoch, &move->old_epoch);
        } else if (step < KVS_STEP_COMMIT) {
            kvs_arena_reopen(arena);
        }
        *stopped = (kvs_failure){.step = step, .consumer = -1, .status = status};
        for (uint32_t i = n_done(coordinator, failure, step); status == KVS_OK && i > 0; i--) {
            status = undo_one(move, step, i - 1);
            *stopped = (kvs_failure){.step = step, .consumer = (int32_t)i - 1, .status = status};
        }
        if (status != KVS_OK) {
            return status;
        }
    }
    return KVS_OK;
}

static kvs_status enter(kvs_coordinator *coordinator, kvs_coordinator_state from, bool cancelable)
{
    kvs_mutex_lock(&coordinator->mutex);
    const bool may = coordinator->state == from;
    if (may) {
        coordinator->state = KVS_COORDINATOR_MOVING;
        coordinator->is_cancelled = false;
        coordinator->is_cancelable = cancelable;
    }
    kvs_mutex_unlock(&coordinator->mutex);
    return may ? KVS_OK : KVS_EBUSY;
}

static void leave(kvs_coordinator *coordinator, kvs_coordinator_state state, uint32_t phase)
{
    kvs_mutex_lock(&coordinator->mutex);
    coordinator->state = state;
    coordinator->phase = phase;
    coordinator->is_cancelable = false;
    kvs_mutex_unlock(&coordinator->mutex);
}

static void keep_failure(kvs_coordinator *coordinator, const kvs_failure *failure)
{
    kvs_mutex_lock(&coordinator->mutex);
    coordinator->failure = *failure;
    kvs_mutex_unlock(&coordinator->mutex);
}

static kvs_status fail_back(move *move, const kvs_failure *failure)
{
    kvs_coordinator *coordinator = move->coordinator;
    keep_failure(coordinator, failure);
    kvs_failure stopped;
    const kvs_status undone = undo_all(move, failure, &stopped);
    const char *colon = move->text[0] == '\0' ? "" : ": ";
    if (undone == KVS_OK) {
        leave(coordinator, KVS_COORDINATOR_IDLE, coordinator->phase);
        return kvs_fail(coordinator->device, (kvs_status)failure->status,
                        "step %s (consumer %d) towards phase %u failed with %s and was undone%s%s",
                        step_name(failure->step), failure->consumer, move->phase,
                        kvs_status_name(failure->status), colon, move->text);
    }
    (void)kvs_arena_quiesce(coordinator->arena);
    leave(coordinator, KVS_COORDINATOR_POISONED, UINT32_MAX);
    return kvs_fail(coordinator->device, KVS_EPOISONED,
                    "undo of step %s (consumer %d) failed with %s, after step %s (consumer %d) "
                    "towards phase %u failed with %s%s%s",
                    step_name(stopped.step), stopped.consumer, kvs_status_name(stopped.status),
                    step_name(failure->step), failure->consumer, move->phase,
                    kvs_status_name(failure->status), colon, move->text);
}

static kvs_status move_to(move *move)
{
    kvs_coordinator *coordinator = move->coordinator;
    kvs_failure failure = {.step = KVS_STEP_PREPARE, .consumer = -1};
    failure.status = kvs_arena_copy_layout(coordinator->arena, &move->old_layout, &move->old_epoch);
    if (failure.status != KVS_OK) {
        return fail_back(move, &failure);
    }
    for (int step = KVS_STEP_PREPARE; step < N_STEPS; step++) {
        if (run_step(move, step, &failure) != KVS_OK) {
            return fail_back(move, &failure);
        }
    }
    kvs_mutex_lock(&coordinator->mutex);
    coordinator->transitions += move->new_epoch != move->old_epoch ? 1 : 0;
    kvs_mutex_unlock(&coordinator->mutex);
    leave(coordinator, KVS_COORDINATOR_IDLE, move->phase);
    return KVS_OK;
}

/* Refusals that call nobody and leave no failure behind. */
static kvs_status check_arena(kvs_coordinator *coordinator)
{
    kvs_arena_info info = {.struct_size = sizeof info};
    (void)kvs_arena_get_info(coordinator->arena, &info);
    if (info.state == KVS_ARENA_ZOMBIE) {
        return kvs_fail(coordinator->device, KVS_ECLOSED, "the arena was released");
    }
    if (info.state != KVS_ARENA_OPEN) {
        return kvs_fail(coordinator->device, KVS_EBUSY, "somebody else has quiesced the arena");
    }
    return KVS_OK;
}

static kvs_status check_phase(kvs_coordinator *coordinator, uint32_t phase)
{
    if (phase >= coordinator->n_phases) {
        return kvs_fail(coordinator->device, KVS_ENOTFOUND, "phase %u of %u", phase,
                        coordinator->n_phases);
    }
    return KVS_OK;
}

/* Between entering and leaving: the coordinator must outlive a release by one of its consumers. */
static kvs_status transition(kvs_coordinator *coordinator, uint32_t phase)
{
    move move = {.coordinator = coordinator, .phase = phase};
    (void)atomic_fetch_add_explicit(&coordinator->claims, 1, memory_order_relaxed);
    const kvs_status status = move_to(&move);
    kvs_layout_free(&move.old_layout);
    kvs_coordinator_drop(coordinator);
    return status;
}

static kvs_status refuse_state(kvs_coordinator *coordinator)
{
    kvs_coordinator_info info = {.struct_size = sizeof info};
    (void)kvs_coordinator_get_info(coordinator, &info);
    if (info.state == KVS_COORDINATOR_POISONED) {
        return kvs_fail(coordinator->device, KVS_EPOISONED,
                        "step %s (consumer %d) failed with %s and could not be undone: rebuild",
                        step_name(info.failed_step), info.failed_consumer,
                        kvs_status_name(info.failed_status));
    }
    return kvs_fail(coordinator->device, KVS_EBUSY,
                    info.state == KVS_COORDINATOR_MOVING ? "the coordinator is moving"
                                                         : "a unit of work is admitted");
}

kvs_status kvs_coordinator_transition(kvs_coordinator *coordinator, uint32_t phase)
{
    if (coordinator == NULL) {
        return KVS_EINVAL;
    }
    if (enter(coordinator, KVS_COORDINATOR_IDLE, true) != KVS_OK) {
        return refuse_state(coordinator);
    }
    kvs_status status = check_phase(coordinator, phase);
    const bool moves = status == KVS_OK && phase != coordinator->phase;
    if (moves) {
        status = check_arena(coordinator);
    }
    if (moves && status == KVS_OK) {
        return transition(coordinator, phase);
    }
    leave(coordinator, KVS_COORDINATOR_IDLE, coordinator->phase);
    return status;
}

/* Bind and activate alone; what was done is taken back on failure, so that a next try finds no
 * leases. */
static kvs_status rebuild_consumers(move *move)
{
    kvs_failure failure;
    for (int step = KVS_STEP_BIND; step < N_STEPS; step++) {
        if (run_step(move, step, &failure) == KVS_OK) {
            continue;
        }
        for (int back = step; back >= KVS_STEP_BIND; back--) {
            for (uint32_t i = n_done(move->coordinator, &failure, back); i > 0; i--) {
                /* Poisoned it is and stays: a second failure changes nothing. */
                (void)undo_one(move, back, i - 1);
            }
        }
        return kvs_fail(move->coordinator->device, (kvs_status)failure.status,
                        "step %s (consumer %d) of the rebuild for phase %u failed with %s",
                        step_name(failure.step), failure.consumer, move->phase,
                        kvs_status_name(failure.status));
    }
    return KVS_OK;
}

static kvs_status rebuild(kvs_coordinator *coordinator, uint32_t phase)
{
    kvs_status status = check_phase(coordinator, phase);
    if (status != KVS_OK) {
        return status;
    }
    status = kvs_arena_quiesce(coordinator->arena);
    if (status != KVS_OK) {
        return status;
    }
    kvs_arena_info info = {.struct_size = sizeof info};
    (void)kvs_arena_get_info(coordinator->arena, &info);
    if (info.n_leases + info.n_draining != 0) {
        return kvs_fail(coordinator->device, KVS_EBUSY,
                        "%u live and %u draining leases survive: a rebuild starts from none",
                        info.n_leases, info.n_draining);
    }
    move move = {.coordinator = coordinator, .phase = phase};
    status = kvs_arena_install(coordinator->arena, &coordinator->phases[phase], info.epoch,
                               &move.new_epoch);
    if (status == KVS_OK) {
        status = rebuild_consumers(&move);
    }
    if (status != KVS_OK) {
        (void)kvs_arena_quiesce(coordinator->arena);
    }
    return status;
}

kvs_status kvs_coordinator_rebuild(kvs_coordinator *coordinator, uint32_t phase)
{
    if (coordinator == NULL) {
        return KVS_EINVAL;
    }
    if (enter(coordinator, KVS_COORDINATOR_POISONED, false) != KVS_OK) {
        kvs_coordinator_info info = {.struct_size = sizeof info};
        (void)kvs_coordinator_get_info(coordinator, &info);
        const bool moves = info.state == KVS_COORDINATOR_MOVING;
        return kvs_fail(coordinator->device, moves ? KVS_EBUSY : KVS_EINVAL,
                        moves ? "the coordinator is moving" : "the coordinator is not poisoned");
    }
    (void)atomic_fetch_add_explicit(&coordinator->claims, 1, memory_order_relaxed);
    const kvs_status status = rebuild(coordinator, phase);
    const bool is_whole = status == KVS_OK;
    leave(coordinator, is_whole ? KVS_COORDINATOR_IDLE : KVS_COORDINATOR_POISONED,
          is_whole ? phase : UINT32_MAX);
    kvs_coordinator_drop(coordinator);
    return status;
}
