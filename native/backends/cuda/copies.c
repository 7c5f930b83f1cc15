/* copies.c: the copy engine: its thread, submission and waiting. */
#include "backends/cuda/copies.h"

#include "backends/cuda/batch.h"
#include "backends/cuda/queue.h"
#include "backends/cuda/waits.h"
#include "base/sync.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

/* Batches under way: enough that the bus never waits for the thread. */
#define MAX_BATCHES 8u
#define MAX_BATCH_BYTES ((uint64_t)8 << 20)

/* A waiter looks this often before it sleeps: a few microseconds, less than a wake-up costs. */
#define SPIN_LOOKS 256

/* A waiter waits in so many parts for the thread to come on. */
#define PATIENCE_PARTS 16u

enum { QUEUE_FREE = 0, QUEUE_GATED = 1, N_QUEUES = 2 };

struct kvs_cuda_copies {
    kvs_device *device;
    kvs_cuda_lanes lanes;
    kvs_mutex lock;
    kvs_cond work;     /* the thread sleeps here */
    kvs_cond progress; /* waiters sleep here */
    pthread_t thread;
    bool has_thread;

    /* Below: under the lock. Contents of a batch under way are the thread's, but for its copies' counters. */
    kvs_cuda_queue queues[N_QUEUES];
    kvs_cuda_batch batches[MAX_BATCHES];
    uint32_t oldest;
    uint32_t n_under_way;
    kvs_cuda_host **hosts;
    uint32_t n_hosts;
    uint32_t hosts_capacity;
    uint64_t n_ended;    /* batches */
    bool must_stop;
    bool is_at_work;     /* the thread is with the driver, or tells of what it has done */
    bool has_stopped;    /* it has nothing here any more */
    bool is_given_up;    /* the thread is somewhere in the driver, and whoever waited for its copies has been told */
    bool has_failed;     /* a copy without `failed` */
};

static void lock(kvs_cuda_copies *copies)
{
    kvs_mutex_lock(&copies->lock);
}

static void unlock(kvs_cuda_copies *copies)
{
    kvs_mutex_unlock(&copies->lock);
}

/* ---- the thread ---- */

static kvs_cuda_queue *next_queue(kvs_cuda_copies *copies)
{
    for (int q = 0; q < N_QUEUES; q++) {
        if (kvs_cuda_queue_first(&copies->queues[q]) != NULL) {
            return &copies->queues[q];
        }
    }
    return NULL;
}

/* Take copies of one direction, in order, up to what a batch holds. */
static void fill(kvs_cuda_copies *copies, kvs_cuda_batch *batch)
{
    batch->n_copies = 0;
    batch->n_bytes = 0;
    batch->telling = KVS_CUDA_UNTOLD;
    kvs_cuda_queue *queue;
    while (batch->n_copies < KVS_CUDA_BATCH_COPIES && batch->n_bytes < MAX_BATCH_BYTES &&
           (queue = next_queue(copies)) != NULL) {
        const kvs_copy *first = &kvs_cuda_queue_first(queue)->copy;
        if (batch->n_copies != 0 && first->is_out != batch->entries[0].copy.is_out) {
            return;
        }
        batch->n_bytes += first->n_bytes * first->n_pieces;
        batch->status[batch->n_copies] = KVS_OK;
        batch->entries[batch->n_copies++] = kvs_cuda_queue_pop(queue);
    }
}

/* With the lock held, which is given up while the driver works. */
static void start_batch(kvs_cuda_copies *copies)
{
    kvs_cuda_batch *batch = &copies->batches[(copies->oldest + copies->n_under_way) % MAX_BATCHES];
    fill(copies, batch);
    copies->n_under_way++;
    unlock(copies);
    kvs_cuda_batch_issue(&copies->lanes, batch);
    lock(copies);
}

static void end_batch(kvs_cuda_copies *copies)
{
    kvs_cuda_batch *batch = &copies->batches[copies->oldest];
    unlock(copies);
    const kvs_status status = kvs_cuda_batch_wait(&copies->lanes, batch);
    lock(copies);
    if (batch->telling == KVS_CUDA_UNTOLD) {
        batch->telling = KVS_CUDA_TELLING;
        unlock(copies);
        const bool is_unheard = kvs_cuda_batch_tell(&copies->lanes, batch, status);
        lock(copies);
        batch->telling = KVS_CUDA_TOLD;
        copies->has_failed |= is_unheard;
    }
    batch->n_copies = 0;
    copies->oldest = (copies->oldest + 1) % MAX_BATCHES;
    copies->n_under_way--;
    copies->n_ended++;
    kvs_cond_wake_all(&copies->progress);
}

/* With the lock held. */
static void note_return(kvs_cuda_copies *copies)
{
    if (copies->is_given_up) {
        copies->is_given_up = false;
        kvs_cuda_waits_came_back(copies->lanes.driver);
    }
}

static void *thread_main(void *argument)
{
    kvs_cuda_copies *copies = argument;
    kvs_cuda_enter(copies->lanes.driver);
    lock(copies);
    while (!copies->must_stop || copies->n_under_way != 0) {
        const bool may_start = !copies->must_stop && next_queue(copies) != NULL;
        copies->is_at_work = true;
        if (may_start && copies->n_under_way < MAX_BATCHES) {
            start_batch(copies);
        } else if (copies->n_under_way != 0) {
            end_batch(copies);
        } else {
            copies->is_at_work = false;
            kvs_cond_wait(&copies->work, &copies->lock);
        }
        note_return(copies);
    }
    copies->is_at_work = false;
    kvs_cuda_leave(copies->lanes.driver);
    copies->has_stopped = true;
    kvs_cond_wake_all(&copies->progress);
    unlock(copies);
    return NULL;
}

/* Signals belong to the caller's threads. */
static bool start_thread(kvs_cuda_copies *copies)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    copies->has_thread = pthread_create(&copies->thread, NULL, thread_main, copies) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return copies->has_thread;
}

/* ---- waiting for the thread ---- */

/* Batches whose copies somebody may still wait for. */
static uint32_t n_untold(const kvs_cuda_copies *copies)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < copies->n_under_way; i++) {
        count += copies->batches[(copies->oldest + i) % MAX_BATCHES].telling != KVS_CUDA_TOLD;
    }
    return count;
}

/* The thread waits with an end, so it is in another call of the driver's, which does not come back. All its copies have
 * failed, those that wait too; the thread will find them told. With the lock held. */
static void give_up(kvs_cuda_copies *copies)
{
    kvs_cuda_lanes *lanes = &copies->lanes;
    const kvs_status status =
        kvs_cuda_waits_give_up(lanes->driver, "the copy thread, which is in a call of the driver, with %u batches under way",
                               copies->n_under_way);
    copies->is_given_up = true;
    for (uint32_t i = 0; i < copies->n_under_way; i++) {
        kvs_cuda_batch *batch = &copies->batches[(copies->oldest + i) % MAX_BATCHES];
        for (uint32_t j = 0; batch->telling == KVS_CUDA_UNTOLD && j < batch->n_copies; j++) {
            copies->has_failed |= kvs_cuda_batch_tell_copy(lanes, &batch->entries[j].copy, status);
        }
        batch->telling = batch->telling == KVS_CUDA_UNTOLD ? KVS_CUDA_TOLD : batch->telling;
    }
    for (int q = 0; q < N_QUEUES; q++) {
        for (uint32_t i = copies->queues[q].begin; i < copies->queues[q].end; i++) {
            copies->has_failed |= kvs_cuda_batch_tell_copy(lanes, &copies->queues[q].entries[i].copy, status);
        }
        copies->queues[q].end = copies->queues[q].begin;
    }
    kvs_cond_wake_all(&copies->progress);
}

/* How far a waiter has seen the thread come, and how often it has waited since in vain: in parts, so that a process that
 * was stopped for a while has lost one of them only. Zeroed: has not looked. */
struct patience {
    uint64_t n_ended;
    uint32_t n_parts;
};

/* False where nothing will come: in a fork, which has no thread, and where a thread that has nothing to do was waited for all that
 * time. With the lock held. */
static bool sleep_for_progress(kvs_cuda_copies *copies, struct patience *patience)
{
    if (kvs_device_is_forked(copies->device)) {
        return false;
    }
    if (patience->n_ended != copies->n_ended) {
        *patience = (struct patience){.n_ended = copies->n_ended};
    }
    const uint64_t part_ns = kvs_cuda_waits_patience_ns(copies->lanes.driver) / PATIENCE_PARTS;
    if (!kvs_cond_wait_until(&copies->progress, &copies->lock, kvs_clock_ns() + part_ns)) {
        patience->n_parts++;
    }
    if (patience->n_parts < PATIENCE_PARTS || patience->n_ended != copies->n_ended || copies->is_given_up) {
        return true;
    }
    if (copies->is_at_work) {
        give_up(copies);
    }
    return copies->is_at_work;
}

/* Whether the thread has ended. A lost card ends its waits, so only one that is stuck in the driver does not. */
static bool stop_thread(kvs_cuda_copies *copies)
{
    struct patience patience = {0};
    lock(copies);
    copies->must_stop = true;
    kvs_cond_wake_all(&copies->work);
    while (!copies->has_stopped && !copies->is_given_up && sleep_for_progress(copies, &patience)) {
    }
    /* One that is not at work will stop, however late. */
    const bool has_stopped = copies->has_stopped || !copies->is_at_work;
    unlock(copies);
    (void)(has_stopped ? pthread_join(copies->thread, NULL) : pthread_detach(copies->thread));
    return has_stopped;
}

/* ---- create, destroy ---- */

void kvs_cuda_copies_destroy(kvs_cuda_copies *copies)
{
    if (copies == NULL) {
        return;
    }
    const bool is_alone = !copies->has_thread || stop_thread(copies);
    const kvs_cuda_driver *driver = copies->lanes.driver;
    if (!is_alone) {
        kvs_cuda_waits_leave_thread(driver);
    }
    for (uint32_t i = 0; i < copies->n_hosts; i++) {
        kvs_cuda_host_destroy(copies->hosts[i], driver);
    }
    if (!is_alone) {
        return; /* the thread goes on with what is here when the driver comes back: all of it stays */
    }
    /* Streams of a lost card go on being looked at: until they have finished nothing else may go either. */
    const bool may_go = kvs_cuda_waits_may_free(driver, 0);
    for (uint32_t i = 0; may_go && i < MAX_BATCHES && copies->batches[i].event != NULL; i++) {
        (void)driver->api.event_destroy(copies->batches[i].event);
    }
    for (int i = 0; may_go && i < KVS_CUDA_LANES && copies->lanes.streams[i] != NULL; i++) {
        kvs_cuda_waits_unwatch(driver, copies->lanes.streams[i]);
        (void)driver->api.stream_destroy(copies->lanes.streams[i]);
    }
    free(copies->hosts);
    free(copies->queues[QUEUE_FREE].entries);
    free(copies->queues[QUEUE_GATED].entries);
    kvs_cond_destroy(&copies->progress);
    kvs_cond_destroy(&copies->work);
    kvs_mutex_destroy(&copies->lock);
    free(copies);
}

static bool init_locks(kvs_cuda_copies *copies)
{
    if (!kvs_mutex_init(&copies->lock)) {
        return false;
    }
    if (!kvs_cond_init(&copies->work)) {
        kvs_mutex_destroy(&copies->lock);
        return false;
    }
    if (!kvs_cond_init(&copies->progress)) {
        kvs_cond_destroy(&copies->work);
        kvs_mutex_destroy(&copies->lock);
        return false;
    }
    return true;
}

static kvs_status create_streams(kvs_cuda_copies *copies)
{
    kvs_status status = KVS_OK;
    for (int i = 0; status == KVS_OK && i < KVS_CUDA_LANES; i++) {
        status = KVS_CUDA_CALL(copies->device, copies->lanes.driver, stream_create, &copies->lanes.streams[i], CU_STREAM_NON_BLOCKING);
    }
    for (int i = 0; status == KVS_OK && i < KVS_CUDA_LANES; i++) {
        kvs_cuda_waits_watch(copies->lanes.driver, copies->lanes.streams[i],
                             i == 0 ? "copies from history" : "copies to history");
    }
    for (uint32_t i = 0; status == KVS_OK && i < MAX_BATCHES; i++) {
        status =
            KVS_CUDA_CALL(copies->device, copies->lanes.driver, event_create, &copies->batches[i].event, CU_EVENT_DISABLE_TIMING);
    }
    return status;
}

kvs_status kvs_cuda_copies_create(kvs_device *device, const kvs_cuda_driver *driver, cu_event readers,
                                  kvs_cuda_copies **copies)
{
    kvs_cuda_copies *made = calloc(1, sizeof *made);
    if (made == NULL || !init_locks(made)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for a copy engine");
    }
    made->device = device;
    made->lanes = (kvs_cuda_lanes){.device = device, .driver = driver, .readers = readers};
    kvs_status status = create_streams(made);
    if (status == KVS_OK && !start_thread(made)) {
        status = kvs_fail(device, KVS_EIO, "the copy thread cannot be started");
    }
    if (status != KVS_OK) {
        kvs_cuda_copies_destroy(made);
        return status;
    }
    *copies = made;
    return KVS_OK;
}

/* ---- host history ---- */

static bool note_host(kvs_cuda_copies *copies, kvs_cuda_host *host)
{
    if (copies->n_hosts == copies->hosts_capacity) {
        const uint32_t capacity = copies->hosts_capacity == 0 ? 8 : copies->hosts_capacity * 2;
        kvs_cuda_host **hosts = realloc(copies->hosts, capacity * sizeof *hosts);
        if (hosts == NULL) {
            return false;
        }
        copies->hosts = hosts;
        copies->hosts_capacity = capacity;
    }
    copies->hosts[copies->n_hosts++] = host;
    return true;
}

kvs_status kvs_cuda_copies_host_alloc(kvs_cuda_copies *copies, uint64_t n_bytes, uint64_t *host_base)
{
    kvs_cuda_host *host = NULL;
    const kvs_status status = kvs_cuda_host_create(copies->device, n_bytes, &host);
    if (status != KVS_OK) {
        return status;
    }
    lock(copies);
    const bool is_noted = note_host(copies, host);
    unlock(copies);
    if (!is_noted) {
        kvs_cuda_host_destroy(host, copies->lanes.driver);
        return kvs_fail(copies->device, KVS_ENOMEM, "no memory to note a reservation (host history)");
    }
    *host_base = kvs_cuda_host_base(host);
    return KVS_OK;
}

static kvs_cuda_host *find_host(const kvs_cuda_copies *copies, uint64_t host_base, uint32_t *index)
{
    for (uint32_t i = 0; i < copies->n_hosts; i++) {
        if (kvs_cuda_host_base(copies->hosts[i]) == host_base) {
            *index = i;
            return copies->hosts[i];
        }
    }
    return NULL;
}

void kvs_cuda_copies_host_free(kvs_cuda_copies *copies, uint64_t host_base)
{
    uint32_t index = 0;
    lock(copies);
    kvs_cuda_host *host = find_host(copies, host_base, &index);
    if (host != NULL) {
        copies->hosts[index] = copies->hosts[--copies->n_hosts];
    }
    unlock(copies);
    if (host != NULL) {
        kvs_cuda_host_destroy(host, copies->lanes.driver);
    }
}

uint64_t kvs_cuda_copies_mapped(kvs_cuda_copies *copies, uint64_t host_base, uint64_t offset, uint64_t n_bytes)
{
    uint32_t index = 0;
    lock(copies);
    const kvs_cuda_host *host = find_host(copies, host_base, &index);
    unlock(copies);
    return host == NULL ? 0 : kvs_cuda_host_mapped(host, offset, n_bytes);
}

/* ---- submission ---- */

static kvs_status check_copy(const kvs_cuda_copies *copies, const kvs_copy *copy, kvs_cuda_host **host)
{
    uint32_t index = 0;
    *host = find_host(copies, copy->host_base, &index);
    if (*host == NULL || copy->n_bytes == 0 || copy->n_pieces == 0 || copy->device_address == 0) {
        return KVS_EINVAL;
    }
    uint64_t end = 0;
    if (!kvs_mul_u64(copy->n_pieces - 1, copy->host_stride_bytes, &end) || !kvs_add_u64(end, copy->n_bytes, &end) ||
        !kvs_add_u64(end, copy->host_offset, &end)) {
        return KVS_EOVERFLOW;
    }
    return end <= kvs_cuda_host_bytes(*host) ? KVS_OK : KVS_ENOSPACE;
}

static int queue_of(const kvs_copy *copy)
{
    return copy->gate == NULL ? QUEUE_FREE : QUEUE_GATED;
}

static kvs_status check_all(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more)
{
    uint32_t needed[N_QUEUES] = {0, 0};
    for (uint32_t i = 0; i < n_more; i++) {
        kvs_cuda_host *host = NULL;
        const kvs_status status = check_copy(copies, &more[i], &host);
        if (status < 0) {
            return status;
        }
        needed[queue_of(&more[i])]++;
    }
    for (int q = 0; q < N_QUEUES; q++) {
        if (!kvs_cuda_queue_reserve(&copies->queues[q], needed[q])) {
            return KVS_ENOMEM;
        }
    }
    return KVS_OK;
}

kvs_status kvs_cuda_copies_submit(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more)
{
    const kvs_status admitted = kvs_cuda_waits_admit(copies->lanes.driver);
    if (admitted != KVS_OK) {
        return admitted;
    }
    lock(copies);
    const kvs_status status = check_all(copies, more, n_more);
    for (uint32_t i = 0; status == KVS_OK && i < n_more; i++) {
        kvs_cuda_entry entry = {.copy = more[i]};
        (void)check_copy(copies, &more[i], &entry.host);
        kvs_cuda_queue_push(&copies->queues[queue_of(&more[i])], &entry);
    }
    kvs_cond_wake_all(&copies->work);
    unlock(copies);
    return status == KVS_OK ? KVS_OK
                            : kvs_fail(copies->device, status,
                                       "a copy was refused: outside its host memory, or no memory to queue %u", n_more);
}

/* ---- waiting ---- */

/* KVS_PENDING: not yet. The counter is read first: what raised it stored `failed` before. */
static kvs_status look(const _Atomic uint64_t *counter, uint64_t value, const _Atomic int *failed)
{
    const bool is_reached = atomic_load_explicit(counter, memory_order_acquire) >= value;
    const int status = failed == NULL ? 0 : atomic_load_explicit(failed, memory_order_acquire);
    return status < 0 ? (kvs_status)status : is_reached ? KVS_OK : KVS_PENDING;
}

static uint32_t n_queued(const kvs_cuda_copies *copies)
{
    uint32_t count = 0;
    for (int q = 0; q < N_QUEUES; q++) {
        count += copies->queues[q].end - copies->queues[q].begin;
    }
    return count;
}

kvs_status kvs_cuda_copies_wait(kvs_cuda_copies *copies, const _Atomic uint64_t *counter, uint64_t value,
                                const _Atomic int *failed)
{
    kvs_status status = KVS_PENDING;
    for (int i = 0; i < SPIN_LOOKS && status == KVS_PENDING; i++) {
        status = look(counter, value, failed);
    }
    if (status != KVS_PENDING) {
        return status;
    }
    struct patience patience = {0};
    lock(copies);
    while ((status = look(counter, value, failed)) == KVS_PENDING && (n_untold(copies) != 0 || n_queued(copies) != 0)) {
        if (!sleep_for_progress(copies, &patience)) {
            break;
        }
    }
    unlock(copies);
    if (status == KVS_PENDING) {
        const kvs_ull have = atomic_load_explicit(counter, memory_order_relaxed);
        return kvs_fail(copies->device, KVS_EIO, "a wait for %llu stands at %llu: no copy that can run gets there",
                        (kvs_ull)value, have);
    }
    return status;
}

void kvs_cuda_copies_gate_advanced(kvs_cuda_copies *copies)
{
    lock(copies);
    kvs_cond_wake_all(&copies->work);
    unlock(copies);
}

kvs_status kvs_cuda_copies_drain(kvs_cuda_copies *copies)
{
    struct patience patience = {0};
    lock(copies);
    while (n_untold(copies) != 0 || next_queue(copies) != NULL) {
        if (!sleep_for_progress(copies, &patience)) {
            copies->has_failed = true;
            break;
        }
    }
    const bool has_failed = copies->has_failed;
    const uint32_t n_left = n_queued(copies);
    copies->has_failed = false;
    unlock(copies);
    if (has_failed) {
        return kvs_fail(copies->device, KVS_EIO, "a copy has failed");
    }
    if (n_left != 0) {
        return kvs_fail(copies->device, KVS_EBUSY, "%u queued copies wait for ring slots that are not consumed", n_left);
    }
    return KVS_OK;
}

static bool is_under_way(const kvs_cuda_copies *copies, const _Atomic uint64_t *done)
{
    for (uint32_t i = 0; i < copies->n_under_way; i++) {
        const kvs_cuda_batch *batch = &copies->batches[(copies->oldest + i) % MAX_BATCHES];
        for (uint32_t j = 0; batch->telling != KVS_CUDA_TOLD && j < batch->n_copies; j++) {
            if (batch->entries[j].copy.done == done) {
                return true;
            }
        }
    }
    return false;
}

void kvs_cuda_copies_cancel(kvs_cuda_copies *copies, const _Atomic uint64_t *done)
{
    lock(copies);
    kvs_cuda_queue_drop(&copies->queues[QUEUE_FREE], done);
    kvs_cuda_queue_drop(&copies->queues[QUEUE_GATED], done);
    /* A waiter may have nothing left to wait for. */
    kvs_cond_wake_all(&copies->progress);
    struct patience patience = {0};
    while (is_under_way(copies, done) && sleep_for_progress(copies, &patience)) {
    }
    unlock(copies);
}
