/* copies.c: the copy engine: its two threads, submission and waiting. */
#include "backends/cuda/copies.h"

#include "backends/cuda/batch.h"
#include "backends/cuda/queue.h"
#include "base/sync.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

/* Batches under way: enough that the bus never waits for the thread. */
#define MAX_BATCHES 8u
#define MAX_BATCH_BYTES ((uint64_t)8 << 20)

/* A waiter looks this often before it sleeps: a few microseconds, less than a wake-up costs. */
#define SPIN_LOOKS 256

/* Copies with a gate wait for readers on the device, so the others have streams and a thread of their own: a pass may need one
 * of them before it reads anything. */
enum { QUEUE_FREE = 0, QUEUE_GATED = 1, N_QUEUES = 2 };

struct server {
    struct kvs_cuda_copies *all;
    kvs_cuda_lanes lanes;
    pthread_t thread;
    bool has_thread;

    /* Below: under the lock. Contents of a batch under way are the thread's, but for its copies' counters. */
    kvs_cuda_queue queue;
    kvs_cuda_batch batches[MAX_BATCHES];
    uint32_t oldest;
    uint32_t n_under_way;
    bool is_issuing; /* the newest of these is being given to the driver */
};

struct kvs_cuda_copies {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    kvs_cuda_rings *rings; /* NULL: events alone */
    kvs_mutex lock;
    kvs_mutex pinning; /* of host history */
    kvs_cond work;     /* the threads sleep here */
    kvs_cond progress; /* waiters sleep here */
    struct server servers[N_QUEUES];

    /* Below: under the lock. */
    kvs_cuda_host **hosts;
    uint32_t n_hosts;
    uint32_t hosts_capacity;
    bool must_stop;
    bool has_failed; /* a copy without `failed` */
};

static void lock(kvs_cuda_copies *copies)
{
    kvs_mutex_lock(&copies->lock);
}

static void unlock(kvs_cuda_copies *copies)
{
    kvs_mutex_unlock(&copies->lock);
}

/* ---- the threads ---- */

static bool has_open(const struct server *server)
{
    return kvs_cuda_queue_first(&server->queue) != NULL;
}

/* Take copies of one direction, in order, up to what a batch holds. */
static void fill(struct server *server, kvs_cuda_batch *batch)
{
    batch->n_copies = 0;
    batch->n_bytes = 0;
    while (batch->n_copies < KVS_CUDA_BATCH_COPIES && batch->n_bytes < MAX_BATCH_BYTES && has_open(server)) {
        const kvs_copy *first = &kvs_cuda_queue_first(&server->queue)->copy;
        if (batch->n_copies != 0 && first->is_out != batch->entries[0].copy.is_out) {
            return;
        }
        batch->n_bytes += first->n_bytes * first->n_pieces;
        batch->status[batch->n_copies] = KVS_OK;
        batch->entries[batch->n_copies++] = kvs_cuda_queue_pop(&server->queue);
    }
}

/* With the lock held, which is given up while the driver works. */
static void start_batch(struct server *server)
{
    kvs_cuda_batch *batch = &server->batches[(server->oldest + server->n_under_way) % MAX_BATCHES];
    fill(server, batch);
    server->n_under_way++;
    server->is_issuing = true;
    unlock(server->all);
    kvs_cuda_batch_issue(&server->lanes, batch);
    lock(server->all);
    server->is_issuing = false;
    kvs_cond_wake_all(&server->all->progress);
}

static void end_batch(struct server *server)
{
    kvs_cuda_batch *batch = &server->batches[server->oldest];
    unlock(server->all);
    const bool is_unheard = kvs_cuda_batch_finish(&server->lanes, batch);
    lock(server->all);
    server->all->has_failed |= is_unheard;
    batch->n_copies = 0;
    server->oldest = (server->oldest + 1) % MAX_BATCHES;
    server->n_under_way--;
    kvs_cond_wake_all(&server->all->progress);
}

static void *thread_main(void *argument)
{
    struct server *server = argument;
    kvs_cuda_copies *copies = server->all;
    kvs_cuda_enter(copies->driver);
    lock(copies);
    while (!copies->must_stop || server->n_under_way != 0) {
        const bool may_start = !copies->must_stop && has_open(server);
        if (may_start && server->n_under_way < MAX_BATCHES) {
            start_batch(server);
        } else if (server->n_under_way != 0) {
            end_batch(server);
        } else {
            kvs_cond_wait(&copies->work, &copies->lock);
        }
    }
    unlock(copies);
    kvs_cuda_leave(copies->driver);
    return NULL;
}

/* Signals belong to the caller's threads. */
static bool start_thread(struct server *server)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    server->has_thread = pthread_create(&server->thread, NULL, thread_main, server) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return server->has_thread;
}

/* ---- create, destroy ---- */

static void destroy_server(struct server *server)
{
    const kvs_cuda_driver *driver = server->all->driver;
    for (uint32_t i = 0; i < MAX_BATCHES && server->batches[i].event != NULL; i++) {
        (void)driver->api.event_destroy(server->batches[i].event);
    }
    for (int i = 0; i < KVS_CUDA_LANES && server->lanes.streams[i] != NULL; i++) {
        (void)driver->api.stream_destroy(server->lanes.streams[i]);
    }
    free(server->queue.entries);
}

static void stop_threads(kvs_cuda_copies *copies)
{
    lock(copies);
    copies->must_stop = true;
    kvs_cond_wake_all(&copies->work);
    unlock(copies);
    for (int q = 0; q < N_QUEUES; q++) {
        if (copies->servers[q].has_thread) {
            (void)pthread_join(copies->servers[q].thread, NULL);
        }
    }
}

void kvs_cuda_copies_destroy(kvs_cuda_copies *copies)
{
    if (copies == NULL) {
        return;
    }
    stop_threads(copies);
    for (uint32_t i = 0; i < copies->n_hosts; i++) {
        kvs_cuda_host_destroy(copies->hosts[i], copies->driver);
    }
    for (int q = 0; q < N_QUEUES; q++) {
        destroy_server(&copies->servers[q]);
    }
    free(copies->hosts);
    kvs_cond_destroy(&copies->progress);
    kvs_cond_destroy(&copies->work);
    kvs_mutex_destroy(&copies->pinning);
    kvs_mutex_destroy(&copies->lock);
    free(copies);
}

static bool init_locks(kvs_cuda_copies *copies)
{
    if (!kvs_mutex_init(&copies->lock)) {
        return false;
    }
    if (!kvs_mutex_init(&copies->pinning)) {
        kvs_mutex_destroy(&copies->lock);
        return false;
    }
    if (!kvs_cond_init(&copies->work)) {
        kvs_mutex_destroy(&copies->pinning);
        kvs_mutex_destroy(&copies->lock);
        return false;
    }
    if (!kvs_cond_init(&copies->progress)) {
        kvs_cond_destroy(&copies->work);
        kvs_mutex_destroy(&copies->pinning);
        kvs_mutex_destroy(&copies->lock);
        return false;
    }
    return true;
}

/* Nothing is copied out through a ring. */
static kvs_status create_server(kvs_cuda_copies *copies, int queue)
{
    struct server *server = &copies->servers[queue];
    const int n_streams = queue == QUEUE_FREE ? KVS_CUDA_LANES : 1;
    kvs_status status = KVS_OK;
    for (int i = 0; status == KVS_OK && i < n_streams; i++) {
        status = KVS_CUDA_CALL(copies->device, copies->driver, stream_create, &server->lanes.streams[i], CU_STREAM_NON_BLOCKING);
    }
    for (uint32_t i = 0; status == KVS_OK && i < MAX_BATCHES; i++) {
        status =
            KVS_CUDA_CALL(copies->device, copies->driver, event_create, &server->batches[i].event, CU_EVENT_DISABLE_TIMING);
    }
    if (status == KVS_OK && !start_thread(server)) {
        status = kvs_fail(copies->device, KVS_EIO, "a copy thread cannot be started");
    }
    return status;
}

kvs_status kvs_cuda_copies_create(kvs_device *device, const kvs_cuda_driver *driver, cu_event readers, kvs_cuda_rings *rings,
                                  kvs_cuda_copies **copies)
{
    kvs_cuda_copies *made = calloc(1, sizeof *made);
    if (made == NULL || !init_locks(made)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for a copy engine");
    }
    made->device = device;
    made->driver = driver;
    made->rings = rings;
    for (int q = 0; q < N_QUEUES; q++) {
        made->servers[q].all = made;
        made->servers[q].lanes = (kvs_cuda_lanes){
            .device = device, .driver = driver, .readers = readers, .rings = rings, .pinning = &made->pinning};
    }
    kvs_status status = KVS_OK;
    for (int q = 0; status == KVS_OK && q < N_QUEUES; q++) {
        status = create_server(made, q);
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
        kvs_cuda_host_destroy(host, copies->driver);
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
        kvs_cuda_host_destroy(host, copies->driver);
    }
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

static struct server *server_of(kvs_cuda_copies *copies, const kvs_copy *copy)
{
    return &copies->servers[copy->gate == NULL ? QUEUE_FREE : QUEUE_GATED];
}

static kvs_status check_all(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more)
{
    uint32_t n_gated = 0;
    for (uint32_t i = 0; i < n_more; i++) {
        kvs_cuda_host *host = NULL;
        const kvs_status status = more[i].gate != NULL && more[i].is_out ? KVS_EINVAL : check_copy(copies, &more[i], &host);
        if (status < 0) {
            return status;
        }
        n_gated += more[i].gate != NULL;
    }
    return kvs_cuda_queue_reserve(&copies->servers[QUEUE_GATED].queue, n_gated) &&
                   kvs_cuda_queue_reserve(&copies->servers[QUEUE_FREE].queue, n_more - n_gated)
               ? KVS_OK
               : KVS_ENOMEM;
}

kvs_status kvs_cuda_copies_submit(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more)
{
    lock(copies);
    const kvs_status status = check_all(copies, more, n_more);
    for (uint32_t i = 0; status == KVS_OK && i < n_more; i++) {
        kvs_cuda_entry entry = {.copy = more[i]};
        (void)check_copy(copies, &more[i], &entry.host);
        if (copies->rings != NULL) {
            kvs_cuda_rings_queued(copies->rings, &more[i]);
        }
        kvs_cuda_queue_push(&server_of(copies, &more[i])->queue, &entry);
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
    if (status < 0) {
        return (kvs_status)status;
    }
    return is_reached ? KVS_OK : KVS_PENDING;
}

static uint32_t n_queued(const kvs_cuda_copies *copies)
{
    uint32_t count = 0;
    for (int q = 0; q < N_QUEUES; q++) {
        count += copies->servers[q].queue.end - copies->servers[q].queue.begin;
    }
    return count;
}

static bool are_under_way(const kvs_cuda_copies *copies)
{
    return copies->servers[QUEUE_FREE].n_under_way != 0 || copies->servers[QUEUE_GATED].n_under_way != 0;
}

/* False in a fork: the thread is not there. */
static bool sleep_for_progress(kvs_cuda_copies *copies)
{
    if (kvs_device_is_forked(copies->device)) {
        return false;
    }
    kvs_cond_wait(&copies->progress, &copies->lock);
    return true;
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
    lock(copies);
    while ((status = look(counter, value, failed)) == KVS_PENDING && (are_under_way(copies) || n_queued(copies) != 0)) {
        if (!sleep_for_progress(copies)) {
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
    lock(copies);
    while (are_under_way(copies) || has_open(&copies->servers[QUEUE_FREE]) || has_open(&copies->servers[QUEUE_GATED])) {
        if (!sleep_for_progress(copies)) {
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

static bool is_under_way(const struct server *server, const _Atomic uint64_t *done)
{
    for (uint32_t i = 0; i < server->n_under_way; i++) {
        const kvs_cuda_batch *batch = &server->batches[(server->oldest + i) % MAX_BATCHES];
        for (uint32_t j = 0; j < batch->n_copies; j++) {
            if (batch->entries[j].copy.done == done) {
                return true;
            }
        }
    }
    return false;
}

/* The context is entered: streams may have to be let go. */
void kvs_cuda_copies_cancel(kvs_cuda_copies *copies, const _Atomic uint64_t *done)
{
    lock(copies);
    for (int q = 0; q < N_QUEUES; q++) {
        kvs_cuda_queue_drop(&copies->servers[q].queue, done);
    }
    /* A waiter may have nothing left to wait for. */
    kvs_cond_wake_all(&copies->progress);
    if (copies->rings != NULL) {
        kvs_cuda_rings_let_go(copies->rings, done);
    }
    while ((is_under_way(&copies->servers[QUEUE_FREE], done) || is_under_way(&copies->servers[QUEUE_GATED], done)) &&
           sleep_for_progress(copies)) {
    }
    if (copies->rings != NULL) {
        kvs_cuda_rings_begin_anew(copies->rings, done);
    }
    unlock(copies);
}

/* Copies of a ring reach memory that was registered when its pages were written out, or are registered here. */
kvs_status kvs_cuda_copies_be_quiet(kvs_cuda_copies *copies)
{
    struct server *free_copies = &copies->servers[QUEUE_FREE];
    const kvs_cuda_queue *gated = &copies->servers[QUEUE_GATED].queue;
    kvs_status status = KVS_OK;
    lock(copies);
    while ((has_open(free_copies) || free_copies->is_issuing || copies->servers[QUEUE_GATED].is_issuing) &&
           sleep_for_progress(copies)) {
    }
    kvs_mutex_lock(&copies->pinning);
    for (uint32_t i = gated->begin; status == KVS_OK && i < gated->end; i++) {
        const kvs_copy *copy = &gated->entries[i].copy;
        const uint64_t extent = (copy->n_pieces - 1) * copy->host_stride_bytes + copy->n_bytes;
        status = kvs_cuda_host_pin(gated->entries[i].host, copies->device, copies->driver, copy->host_offset, extent);
    }
    kvs_mutex_unlock(&copies->pinning);
    unlock(copies);
    return status;
}
