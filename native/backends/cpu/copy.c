/* copy.c: the engine: its host memory, the copy thread, deferred mode, submission and waiting. */
#include "backends/cpu/copy.h"

#include "backends/cpu/copy_queue.h"
#include "base/sync.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

/* A waiter looks this often before it sleeps: a few microseconds, less than a wake-up costs, and short enough that the
 * copy thread keeps its core. */
#define SPIN_LOOKS 64

/* Longer than a layer computes between two waits, and nothing beside a pass. */
#define LINGER_NS UINT64_C(2000000)

enum { QUEUE_FREE = 0, QUEUE_GATED = 1, N_QUEUES = 2 };

struct kvs_copy_engine {
    kvs_device *device;
    bool is_deferred;
    bool is_strict;
    bool has_core; /* the copy thread takes no core from a compute thread: it starts copies as soon as they may go */
    kvs_mutex lock;
    kvs_cond work;     /* the copy thread sleeps here */
    kvs_cond progress; /* waiters sleep here */
    pthread_t thread;
    kvs_copy_share share; /* the copy under way, for whoever has time */

    /* Below: under the lock. */
    kvs_copy_queue queues[N_QUEUES];
    kvs_hostmap **maps;
    uint32_t n_maps;
    uint32_t maps_capacity;
    const _Atomic uint64_t *running_done; /* counter of the copy under way */
    uint32_t n_waiters;
    uint64_t n_started;
    bool is_running;
    bool is_asleep;
    bool must_stop;
    bool has_failed; /* a copy without `failed` */
};

static void lock(kvs_copy_engine *engine)
{
    kvs_mutex_lock(&engine->lock);
}

static void unlock(kvs_copy_engine *engine)
{
    kvs_mutex_unlock(&engine->lock);
}

static bool is_empty(const kvs_copy_engine *engine)
{
    return engine->queues[QUEUE_FREE].count == 0 && engine->queues[QUEUE_GATED].count == 0;
}

/* ---- the copy thread, and waiters that do its work ---- */

static bool may_start(const kvs_copy_engine *engine)
{
    return !engine->is_running && (kvs_copy_queue_may_go(&engine->queues[QUEUE_FREE]) ||
                                   kvs_copy_queue_may_go(&engine->queues[QUEUE_GATED]));
}

/* Something may go, or has gone, that had not before. */
static void wake_others(kvs_copy_engine *engine)
{
    if (engine->is_asleep) {
        kvs_cond_wake_all(&engine->work);
    }
    if (engine->n_waiters != 0) {
        kvs_cond_wake_all(&engine->progress);
    }
}

/* Called with the lock held, which is given up while bytes move; may_start holds. */
static void serve(kvs_copy_engine *engine)
{
    kvs_copy_queue *free_queue = &engine->queues[QUEUE_FREE];
    const kvs_copy_entry item =
        kvs_copy_queue_pop(kvs_copy_queue_may_go(free_queue) ? free_queue : &engine->queues[QUEUE_GATED]);
    engine->n_started++;
    engine->is_running = true;
    engine->running_done = item.copy.done;
    unlock(engine);
    const bool is_unheard = kvs_copy_carry_out(engine->device, &item, &engine->share);
    lock(engine);
    engine->is_running = false;
    engine->running_done = NULL;
    engine->has_failed |= is_unheard;
    wake_others(engine);
}

static void sleep_for_work(kvs_copy_engine *engine)
{
    engine->is_asleep = true;
    kvs_cond_wait(&engine->work, &engine->lock);
    engine->is_asleep = false;
}

/* Without a core of its own the copy thread leaves a copy with a gate, or one to history, to whoever waits for it, rather
 * than stop a compute thread in the middle of a matmul. It looks from time to time whether somebody does, for pollers wait
 * without a word. */
static bool leaves_to_waiters(kvs_copy_engine *engine)
{
    if (engine->has_core || kvs_copy_queue_brings(&engine->queues[QUEUE_FREE])) {
        return false;
    }
    const uint64_t n_started = engine->n_started;
    (void)kvs_cond_wait_until(&engine->work, &engine->lock, kvs_clock_ns() + LINGER_NS);
    return engine->n_started != n_started;
}

/* All that may go, up to where somebody waits or serves: each time that the copy thread comes it stops a compute thread. */
static void serve_on(kvs_copy_engine *engine)
{
    uint64_t n_started = engine->n_started;
    while (may_start(engine) && engine->n_started == n_started) {
        serve(engine);
        n_started++;
        if (engine->n_waiters != 0 || engine->must_stop) {
            break;
        }
    }
}

static void *thread_main(void *argument)
{
    kvs_copy_engine *engine = argument;
    lock(engine);
    while (!engine->must_stop) {
        if (!may_start(engine)) {
            sleep_for_work(engine);
        } else if (!leaves_to_waiters(engine)) {
            serve_on(engine);
        }
    }
    unlock(engine);
    return NULL;
}

/* Signals belong to the caller's threads: an interrupt must not land on the copy thread. */
static bool start_thread(kvs_copy_engine *engine)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    const bool is_started = pthread_create(&engine->thread, NULL, thread_main, engine) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return is_started;
}

/* ---- deferred mode ---- */

/* Whose first copy may go, as kvs_device_choose wants it. */
static uint32_t copies_offered(const kvs_copy_engine *engine)
{
    return (kvs_copy_queue_may_go(&engine->queues[QUEUE_FREE]) ? 1u << KVS_STREAM_FREE : 0) |
           (kvs_copy_queue_may_go(&engine->queues[QUEUE_GATED]) ? 1u << KVS_STREAM_GATED : 0);
}

static void run_first(kvs_copy_engine *engine, uint32_t stream)
{
    kvs_copy_queue *queue = &engine->queues[stream == KVS_STREAM_FREE ? QUEUE_FREE : QUEUE_GATED];
    const kvs_copy_entry item = kvs_copy_queue_pop(queue);
    engine->has_failed |= kvs_copy_carry_out(engine->device, &item, NULL);
}

/* Run one queued copy with the lock held; false when none may go. */
static bool run_one(kvs_copy_engine *engine)
{
    const uint32_t offered = copies_offered(engine);
    if (offered != 0) {
        run_first(engine, kvs_device_choose(engine->device, offered));
    }
    return offered != 0;
}

/* What a fast engine would have done meanwhile. */
static void run_ahead(kvs_copy_engine *engine)
{
    uint32_t offered;
    while ((offered = copies_offered(engine)) != 0) {
        const uint32_t stream = kvs_device_choose(engine->device, offered | 1u << KVS_STREAM_COMPUTE);
        if (stream == KVS_STREAM_COMPUTE) {
            return;
        }
        run_first(engine, stream);
    }
}

/* Nobody waits here, so a seed leaves the copies for later. */
static void offer_copies(kvs_copy_engine *engine)
{
    if (engine->is_deferred && kvs_device_has_chooser(engine->device)) {
        run_ahead(engine);
    }
}

void kvs_copy_engine_before_pages(kvs_copy_engine *engine)
{
    if (engine->is_deferred) {
        lock(engine);
        offer_copies(engine);
        unlock(engine);
    }
}

/* ---- create, destroy ---- */

static void free_parts(kvs_copy_engine *engine)
{
    for (uint32_t i = 0; i < engine->n_maps; i++) {
        kvs_hostmap_destroy(engine->maps[i]);
    }
    free(engine->maps);
    kvs_copy_queue_free(&engine->queues[QUEUE_FREE]);
    kvs_copy_queue_free(&engine->queues[QUEUE_GATED]);
    kvs_cond_destroy(&engine->progress);
    kvs_cond_destroy(&engine->work);
    kvs_mutex_destroy(&engine->lock);
    free(engine);
}

static bool init_locks(kvs_copy_engine *engine)
{
    if (!kvs_mutex_init(&engine->lock)) {
        return false;
    }
    if (!kvs_cond_init(&engine->work)) {
        kvs_mutex_destroy(&engine->lock);
        return false;
    }
    if (!kvs_cond_init(&engine->progress)) {
        kvs_cond_destroy(&engine->work);
        kvs_mutex_destroy(&engine->lock);
        return false;
    }
    return true;
}

kvs_status kvs_copy_engine_create(kvs_device *device, uint32_t flags, bool has_core, kvs_copy_engine **engine)
{
    kvs_copy_engine *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return kvs_fail(device, KVS_ENOMEM, "need %llu bytes (copy engine)", (kvs_ull)sizeof *made);
    }
    if (!init_locks(made)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no locks to be had (copy engine)");
    }
    made->device = device;
    made->has_core = has_core;
    made->is_deferred = (flags & KVS_DEVICE_DEFERRED) != 0;
    made->is_strict = (flags & KVS_DEVICE_STRICT_HISTORY) != 0;
    if (!kvs_copy_queue_reserve(&made->queues[QUEUE_FREE], KVS_COPY_QUEUE_FIRST) ||
        !kvs_copy_queue_reserve(&made->queues[QUEUE_GATED], KVS_COPY_QUEUE_FIRST)) {
        free_parts(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for %u queued copies (copy engine)", KVS_COPY_QUEUE_FIRST);
    }
    if (!made->is_deferred && !start_thread(made)) {
        free_parts(made);
        return kvs_fail(device, KVS_EIO, "the copy thread cannot be started");
    }
    *engine = made;
    return KVS_OK;
}

void kvs_copy_engine_destroy(kvs_copy_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    if (!engine->is_deferred) {
        lock(engine);
        engine->must_stop = true;
        kvs_cond_wake_all(&engine->work);
        unlock(engine);
        (void)pthread_join(engine->thread, NULL);
    }
    free_parts(engine);
}

/* ---- host history ---- */

static bool reserve_map_slot(kvs_copy_engine *engine)
{
    if (engine->n_maps < engine->maps_capacity) {
        return true;
    }
    const uint32_t capacity = engine->maps_capacity == 0 ? 8 : engine->maps_capacity * 2;
    kvs_hostmap **maps = realloc(engine->maps, capacity * sizeof *maps);
    if (maps == NULL) {
        return false;
    }
    engine->maps = maps;
    engine->maps_capacity = capacity;
    return true;
}

kvs_status kvs_copy_engine_host_alloc(kvs_copy_engine *engine, uint64_t n_bytes, uint64_t *host_base)
{
    kvs_hostmap *map = kvs_hostmap_create(n_bytes, engine->is_strict);
    if (map == NULL) {
        return kvs_fail(engine->device, KVS_ENOMEM, "need %llu bytes of address space (host history)",
                        (kvs_ull)n_bytes);
    }
    lock(engine);
    const bool has_slot = reserve_map_slot(engine);
    if (has_slot) {
        engine->maps[engine->n_maps++] = map;
    }
    unlock(engine);
    if (!has_slot) {
        kvs_hostmap_destroy(map);
        return kvs_fail(engine->device, KVS_ENOMEM, "no memory to note a reservation (host history)");
    }
    *host_base = kvs_hostmap_base(map);
    return KVS_OK;
}

static kvs_hostmap *find_map(const kvs_copy_engine *engine, uint64_t host_base, uint32_t *index)
{
    for (uint32_t i = 0; i < engine->n_maps; i++) {
        if (kvs_hostmap_base(engine->maps[i]) == host_base) {
            *index = i;
            return engine->maps[i];
        }
    }
    return NULL;
}

void kvs_copy_engine_host_free(kvs_copy_engine *engine, uint64_t host_base, uint64_t n_bytes)
{
    (void)n_bytes; /* the reservation knows its size */
    uint32_t index = 0;
    lock(engine);
    kvs_hostmap *map = find_map(engine, host_base, &index);
    if (map != NULL) {
        engine->maps[index] = engine->maps[--engine->n_maps];
    }
    unlock(engine);
    kvs_hostmap_destroy(map);
}

/* ---- submission ---- */

static kvs_status check_copy(const kvs_copy_engine *engine, const kvs_copy *copy, kvs_hostmap **map)
{
    uint32_t index = 0;
    *map = find_map(engine, copy->host_base, &index);
    if (*map == NULL || copy->n_bytes == 0 || copy->n_pieces == 0 || copy->device_address == 0) {
        return KVS_EINVAL;
    }
    uint64_t n_bytes = 0;
    uint64_t end = 0;
    if (!kvs_copy_host_extent(copy, &n_bytes) || !kvs_add_u64(copy->host_offset, n_bytes, &end)) {
        return KVS_EOVERFLOW;
    }
    return end <= kvs_hostmap_bytes(*map) ? KVS_OK : KVS_ENOSPACE;
}

static int queue_of(const kvs_copy *copy)
{
    return copy->gate == NULL ? QUEUE_FREE : QUEUE_GATED;
}

static kvs_status check_all(kvs_copy_engine *engine, const kvs_copy *copies, uint32_t n_copies)
{
    uint32_t more[N_QUEUES] = {0, 0};
    for (uint32_t i = 0; i < n_copies; i++) {
        kvs_hostmap *map = NULL;
        const kvs_status status = check_copy(engine, &copies[i], &map);
        if (status < 0) {
            return status;
        }
        more[queue_of(&copies[i])]++;
    }
    for (int q = 0; q < N_QUEUES; q++) {
        if (!kvs_copy_queue_reserve(&engine->queues[q], more[q])) {
            return KVS_ENOMEM;
        }
    }
    return KVS_OK;
}

kvs_status kvs_copy_engine_submit_many(kvs_copy_engine *engine, const kvs_copy *copies, uint32_t n_copies)
{
    lock(engine);
    const kvs_status status = check_all(engine, copies, n_copies);
    for (uint32_t i = 0; status == KVS_OK && i < n_copies; i++) {
        kvs_copy_entry item = {.copy = copies[i], .map = NULL};
        (void)check_copy(engine, &copies[i], &item.map);
        kvs_copy_queue_push(&engine->queues[queue_of(&copies[i])], &item);
    }
    wake_others(engine);
    offer_copies(engine);
    unlock(engine);
    if (status < 0) {
        return kvs_fail(engine->device, status, "a copy was refused: outside its host memory, or no memory to queue %u",
                        n_copies);
    }
    return KVS_OK;
}

bool kvs_copy_engine_help(kvs_copy_engine *engine)
{
    return kvs_copy_share_help(&engine->share);
}

/* ---- waiting ---- */

/* KVS_PENDING: not yet. The counter is read first: what raised it stored `failed` before. */
static kvs_status look(const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    const bool is_reached = atomic_load_explicit(counter, memory_order_acquire) >= value;
    if (failed != NULL) {
        const int status = atomic_load_explicit(failed, memory_order_acquire);
        if (status < 0) {
            return (kvs_status)status;
        }
    }
    return is_reached ? KVS_OK : KVS_PENDING;
}

/* KVS_PENDING from here: nothing that is queued can run. */
static kvs_status wait_deferred(kvs_copy_engine *engine, const _Atomic uint64_t *counter,
                                uint64_t value, const _Atomic int *failed)
{
    kvs_status status = look(counter, value, failed);
    while (status == KVS_PENDING && run_one(engine)) {
        status = look(counter, value, failed);
    }
    run_ahead(engine);
    return status;
}

/* False in a fork: the copy under way belongs to a thread that is not there. */
static bool sleep_for_progress(kvs_copy_engine *engine)
{
    if (kvs_device_is_forked(engine->device)) {
        return false;
    }
    engine->n_waiters++;
    kvs_cond_wait(&engine->progress, &engine->lock);
    engine->n_waiters--;
    return true;
}

/* A closed gate is no reason to give up: another thread may open it. */
static kvs_status wait_threaded(kvs_copy_engine *engine, const _Atomic uint64_t *counter,
                                uint64_t value, const _Atomic int *failed)
{
    kvs_status status = look(counter, value, failed);
    while (status == KVS_PENDING && (engine->is_running || !is_empty(engine))) {
        if (may_start(engine)) {
            serve(engine);
        } else if (!sleep_for_progress(engine)) {
            break;
        }
        status = look(counter, value, failed);
    }
    return status;
}

kvs_status kvs_copy_engine_wait_counter(kvs_copy_engine *engine, const _Atomic uint64_t *counter,
                                        uint64_t value, const _Atomic int *failed)
{
    const int n_looks = engine->is_deferred ? 0 : engine->has_core ? SPIN_LOOKS : 1;
    for (int i = 0; i < n_looks; i++) {
        const kvs_status status = look(counter, value, failed);
        if (status != KVS_PENDING) {
            return status;
        }
        if (kvs_copy_share_help(&engine->share)) {
            i = 0;
        } else {
            kvs_relax();
        }
    }
    lock(engine);
    const kvs_status status = engine->is_deferred ? wait_deferred(engine, counter, value, failed)
                                                  : wait_threaded(engine, counter, value, failed);
    const kvs_status stuck = is_empty(engine) ? KVS_EIO : KVS_EBUSY;
    unlock(engine);
    if (status == KVS_PENDING) {
        const kvs_ull have = atomic_load_explicit(counter, memory_order_relaxed);
        return kvs_fail(engine->device, stuck,
                        "a wait for %llu stands at %llu: no copy that can run gets there",
                        (kvs_ull)value, have);
    }
    return status;
}

void kvs_copy_engine_gate_advanced(kvs_copy_engine *engine)
{
    lock(engine);
    wake_others(engine);
    offer_copies(engine);
    unlock(engine);
}

static bool is_idle(const kvs_copy_engine *engine)
{
    return !engine->is_running && !kvs_copy_queue_may_go(&engine->queues[QUEUE_FREE]) &&
           !kvs_copy_queue_may_go(&engine->queues[QUEUE_GATED]);
}

kvs_status kvs_copy_engine_drain(kvs_copy_engine *engine)
{
    lock(engine);
    while (!is_idle(engine)) {
        if (engine->is_deferred) {
            (void)run_one(engine);
        } else if (may_start(engine)) {
            serve(engine);
        } else if (!sleep_for_progress(engine)) {
            engine->has_failed = true;
            break;
        }
    }
    const bool has_failed = engine->has_failed;
    const uint32_t n_left = engine->queues[QUEUE_GATED].count;
    engine->has_failed = false;
    unlock(engine);
    if (has_failed) {
        return kvs_fail(engine->device, KVS_EIO, "a copy has failed");
    }
    if (n_left != 0) {
        return kvs_fail(engine->device, KVS_EBUSY, "%u queued copies wait for ring slots that are not consumed", n_left);
    }
    return KVS_OK;
}

uint32_t kvs_copy_engine_run(kvs_copy_engine *engine, uint32_t limit)
{
    uint32_t n_run = 0;
    if (engine->is_deferred) {
        lock(engine);
        while (n_run < limit && run_one(engine)) {
            n_run++;
        }
        unlock(engine);
    }
    return n_run;
}

void kvs_copy_engine_cancel(kvs_copy_engine *engine, const _Atomic uint64_t *done)
{
    lock(engine);
    kvs_copy_queue_drop(&engine->queues[QUEUE_FREE], done);
    kvs_copy_queue_drop(&engine->queues[QUEUE_GATED], done);
    /* The head may have changed for the copy thread, and a waiter may have nothing left to wait for. */
    wake_others(engine);
    kvs_cond_wake_all(&engine->progress);
    while (engine->is_running && engine->running_done == done && sleep_for_progress(engine)) {
    }
    unlock(engine);
}
