/* copies.c: the copy engine: its making, submission and waiting. */
#include "backends/cuda/copies_state.h"

#include "backends/cuda/waits.h"

#include <stdlib.h>

/* A waiter looks this often before it sleeps: a few microseconds, less than a wake-up costs. */
#define SPIN_LOOKS 256

static void lock(kvs_cuda_copies *copies)
{
    kvs_cuda_copies_lock(copies);
}

static void unlock(kvs_cuda_copies *copies)
{
    kvs_cuda_copies_unlock(copies);
}

/* ---- create, destroy ---- */

/* Streams of a lost card go on being looked at: until they have finished nothing else may go either. */
static void destroy_server(kvs_cuda_server *server, bool may_go)
{
    const kvs_cuda_driver *driver = server->all->driver;
    for (uint32_t i = 0; may_go && i < KVS_CUDA_MAX_BATCHES && server->batches[i].event != NULL; i++) {
        (void)driver->api.event_destroy(server->batches[i].event);
    }
    for (int i = 0; may_go && i < KVS_CUDA_LANES && server->lanes.streams[i] != NULL; i++) {
        kvs_cuda_waits_unwatch(driver, server->lanes.streams[i]);
        (void)driver->api.stream_destroy(server->lanes.streams[i]);
    }
    free(server->queue.entries);
}

void kvs_cuda_copies_destroy(kvs_cuda_copies *copies)
{
    if (copies == NULL) {
        return;
    }
    const kvs_cuda_driver *driver = copies->driver;
    const bool is_alone = kvs_cuda_servers_stop(copies);
    if (!is_alone) {
        kvs_cuda_waits_leave_thread(driver);
    }
    for (uint32_t i = 0; i < copies->n_hosts; i++) {
        kvs_cuda_host_destroy(copies->hosts[i], driver);
    }
    if (!is_alone) {
        return; /* the thread goes on with what is here when the driver comes back: all of it stays */
    }
    const bool may_go = kvs_cuda_waits_may_free(driver, 0);
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        destroy_server(&copies->servers[q], may_go);
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
    static const char *const what[KVS_CUDA_N_QUEUES][KVS_CUDA_LANES] = {{"copies from history", "copies to history"},
                                                                         {"copies through rings", NULL}};
    kvs_cuda_server *server = &copies->servers[queue];
    const int n_streams = queue == KVS_CUDA_QUEUE_FREE ? KVS_CUDA_LANES : 1;
    kvs_status status = KVS_OK;
    for (int i = 0; status == KVS_OK && i < n_streams; i++) {
        status = KVS_CUDA_CALL(copies->device, copies->driver, stream_create, &server->lanes.streams[i], CU_STREAM_NON_BLOCKING);
    }
    for (int i = 0; status == KVS_OK && i < n_streams; i++) {
        kvs_cuda_waits_watch(copies->driver, server->lanes.streams[i], what[queue][i]);
    }
    for (uint32_t i = 0; status == KVS_OK && i < KVS_CUDA_MAX_BATCHES; i++) {
        status =
            KVS_CUDA_CALL(copies->device, copies->driver, event_create, &server->batches[i].event, CU_EVENT_DISABLE_TIMING);
    }
    if (status == KVS_OK && !kvs_cuda_server_start(server)) {
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
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        made->servers[q].all = made;
        made->servers[q].lanes = (kvs_cuda_lanes){
            .device = device, .driver = driver, .readers = readers, .rings = rings, .pinning = &made->pinning};
    }
    kvs_status status = KVS_OK;
    for (int q = 0; status == KVS_OK && q < KVS_CUDA_N_QUEUES; q++) {
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

static kvs_cuda_server *server_of(kvs_cuda_copies *copies, const kvs_copy *copy)
{
    return &copies->servers[copy->gate == NULL ? KVS_CUDA_QUEUE_FREE : KVS_CUDA_QUEUE_GATED];
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
    return kvs_cuda_queue_reserve(&copies->servers[KVS_CUDA_QUEUE_GATED].queue, n_gated) &&
                   kvs_cuda_queue_reserve(&copies->servers[KVS_CUDA_QUEUE_FREE].queue, n_more - n_gated)
               ? KVS_OK
               : KVS_ENOMEM;
}

kvs_status kvs_cuda_copies_submit(kvs_cuda_copies *copies, const kvs_copy *more, uint32_t n_more)
{
    kvs_status admitted = kvs_cuda_waits_admit(copies->driver);
    for (uint32_t i = 0; copies->rings != NULL && admitted == KVS_OK && i < n_more; i++) {
        admitted = kvs_cuda_rings_mend(copies->rings, &more[i]);
    }
    if (admitted != KVS_OK) {
        return admitted;
    }
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
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        count += copies->servers[q].queue.end - copies->servers[q].queue.begin;
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
    kvs_cuda_patience patience = {0};
    lock(copies);
    while ((status = look(counter, value, failed)) == KVS_PENDING &&
           (kvs_cuda_servers_untold(copies) != 0 || n_queued(copies) != 0)) {
        if (!kvs_cuda_servers_sleep(copies, &patience)) {
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

static bool may_begin(const kvs_cuda_copies *copies)
{
    return kvs_cuda_server_has_open(&copies->servers[KVS_CUDA_QUEUE_FREE]) ||
           kvs_cuda_server_has_open(&copies->servers[KVS_CUDA_QUEUE_GATED]);
}

kvs_status kvs_cuda_copies_drain(kvs_cuda_copies *copies)
{
    kvs_cuda_patience patience = {0};
    lock(copies);
    while (kvs_cuda_servers_untold(copies) != 0 || may_begin(copies)) {
        if (!kvs_cuda_servers_sleep(copies, &patience)) {
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

static bool is_under_way(const kvs_cuda_server *server, const _Atomic uint64_t *done)
{
    for (uint32_t i = 0; i < server->n_under_way; i++) {
        const kvs_cuda_batch *batch = &server->batches[(server->oldest + i) % KVS_CUDA_MAX_BATCHES];
        for (uint32_t j = 0; batch->telling != KVS_CUDA_TOLD && j < batch->n_copies; j++) {
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
    kvs_cuda_patience patience = {0};
    lock(copies);
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        kvs_cuda_queue_drop(&copies->servers[q].queue, done);
    }
    /* A waiter may have nothing left to wait for. */
    kvs_cond_wake_all(&copies->progress);
    if (copies->rings != NULL) {
        kvs_cuda_rings_let_go(copies->rings, done);
    }
    while ((is_under_way(&copies->servers[KVS_CUDA_QUEUE_FREE], done) ||
            is_under_way(&copies->servers[KVS_CUDA_QUEUE_GATED], done)) &&
           kvs_cuda_servers_sleep(copies, &patience)) {
    }
    if (copies->rings != NULL) {
        kvs_cuda_rings_begin_anew(copies->rings, done);
    }
    unlock(copies);
}

/* ---- passes that wait on the device ---- */

void kvs_cuda_copies_hold(kvs_cuda_copies *copies, const _Atomic uint64_t *gate)
{
    kvs_cuda_queue *gated = &copies->servers[KVS_CUDA_QUEUE_GATED].queue;
    lock(copies);
    gated->held_gate = gate;
    gated->held_value = gate == NULL ? 0 : atomic_load_explicit(gate, memory_order_acquire);
    if (gate == NULL) {
        kvs_cond_wake_all(&copies->work);
    }
    unlock(copies);
}

/* Copies of a ring reach memory that was registered when its pages were written out, or are registered here. */
kvs_status kvs_cuda_copies_be_quiet(kvs_cuda_copies *copies)
{
    kvs_cuda_server *free_copies = &copies->servers[KVS_CUDA_QUEUE_FREE];
    kvs_cuda_server *gated = &copies->servers[KVS_CUDA_QUEUE_GATED];
    kvs_cuda_patience patience = {0};
    kvs_status status = KVS_OK;
    lock(copies);
    while ((kvs_cuda_server_has_open(free_copies) || free_copies->is_issuing || gated->is_issuing) &&
           kvs_cuda_servers_sleep(copies, &patience)) {
    }
    kvs_mutex_lock(&copies->pinning);
    for (uint32_t i = gated->queue.begin; status == KVS_OK && i < gated->queue.end; i++) {
        const kvs_copy *copy = &gated->queue.entries[i].copy;
        const uint64_t extent = (copy->n_pieces - 1) * copy->host_stride_bytes + copy->n_bytes;
        status = kvs_cuda_host_pin(gated->queue.entries[i].host, copies->device, copies->driver, copy->host_offset, extent);
    }
    kvs_mutex_unlock(&copies->pinning);
    unlock(copies);
    return status == KVS_OK ? kvs_cuda_waits_admit(copies->driver) : status;
}
