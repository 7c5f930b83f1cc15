/* copy_server.c: the threads of the copy engine, and waiting for them with an end. */
#include "backends/cuda/copies_state.h"

#include "backends/cuda/waits.h"

#include <signal.h>

#define MAX_BATCH_BYTES ((uint64_t)8 << 20)
/* Of copies that wait on the device: with the words beside them a queue of the driver's has room for all that are under way, so
 * that giving it another one never waits for a pass that has not been launched. */
#define MAX_WAITING_COPIES 16u

/* A waiter waits in so many parts for a thread to come on. */
#define PATIENCE_PARTS 16u

/* ---- the threads ---- */

bool kvs_cuda_server_has_open(const kvs_cuda_server *server)
{
    return kvs_cuda_queue_first(&server->queue) != NULL;
}

/* Take copies of one direction, in order, up to what a batch holds. */
static void fill(kvs_cuda_server *server, kvs_cuda_batch *batch)
{
    const bool has_words = server->all->rings != NULL && server == &server->all->servers[KVS_CUDA_QUEUE_GATED];
    const uint32_t most = has_words ? MAX_WAITING_COPIES : KVS_CUDA_BATCH_COPIES;
    batch->n_copies = 0;
    batch->n_bytes = 0;
    batch->telling = KVS_CUDA_UNTOLD;
    while (batch->n_copies < most && batch->n_bytes < MAX_BATCH_BYTES && kvs_cuda_server_has_open(server)) {
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
static void start_batch(kvs_cuda_server *server)
{
    kvs_cuda_batch *batch = &server->batches[(server->oldest + server->n_under_way) % KVS_CUDA_MAX_BATCHES];
    fill(server, batch);
    server->n_under_way++;
    server->is_issuing = true;
    kvs_cuda_copies_unlock(server->all);
    kvs_cuda_batch_issue(&server->lanes, batch);
    kvs_cuda_copies_lock(server->all);
    server->is_issuing = false;
    kvs_cond_wake_all(&server->all->progress);
}

static void end_batch(kvs_cuda_server *server)
{
    kvs_cuda_copies *copies = server->all;
    kvs_cuda_batch *batch = &server->batches[server->oldest];
    kvs_cuda_copies_unlock(copies);
    const kvs_status status = kvs_cuda_batch_wait(&server->lanes, batch);
    kvs_cuda_copies_lock(copies);
    if (batch->telling == KVS_CUDA_UNTOLD) {
        batch->telling = KVS_CUDA_TELLING;
        kvs_cuda_copies_unlock(copies);
        const bool is_unheard = kvs_cuda_batch_tell(&server->lanes, batch, status);
        kvs_cuda_copies_lock(copies);
        batch->telling = KVS_CUDA_TOLD;
        copies->has_failed |= is_unheard;
    }
    batch->n_copies = 0;
    server->oldest = (server->oldest + 1) % KVS_CUDA_MAX_BATCHES;
    server->n_under_way--;
    copies->n_ended++;
    kvs_cond_wake_all(&copies->progress);
}

/* With the lock held. */
static void note_return(kvs_cuda_server *server)
{
    if (server->is_given_up) {
        server->is_given_up = false;
        kvs_cuda_waits_came_back(server->all->driver);
    }
}

static void *thread_main(void *argument)
{
    kvs_cuda_server *server = argument;
    kvs_cuda_copies *copies = server->all;
    kvs_cuda_enter(copies->driver);
    kvs_cuda_copies_lock(copies);
    while (!copies->must_stop || server->n_under_way != 0) {
        const bool may_start = !copies->must_stop && kvs_cuda_server_has_open(server);
        server->is_at_work = true;
        if (may_start && server->n_under_way < KVS_CUDA_MAX_BATCHES) {
            start_batch(server);
        } else if (server->n_under_way != 0) {
            end_batch(server);
        } else {
            server->is_at_work = false;
            kvs_cond_wait(&copies->work, &copies->lock);
        }
        note_return(server);
    }
    server->is_at_work = false;
    kvs_cuda_leave(copies->driver);
    server->has_stopped = true;
    kvs_cond_wake_all(&copies->progress);
    kvs_cuda_copies_unlock(copies);
    return NULL;
}

/* Signals belong to the caller's threads. */
bool kvs_cuda_server_start(kvs_cuda_server *server)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    server->has_thread = pthread_create(&server->thread, NULL, thread_main, server) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return server->has_thread;
}

/* ---- waiting for them ---- */

static uint32_t n_untold(const kvs_cuda_server *server)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < server->n_under_way; i++) {
        count += server->batches[(server->oldest + i) % KVS_CUDA_MAX_BATCHES].telling != KVS_CUDA_TOLD;
    }
    return count;
}

uint32_t kvs_cuda_servers_untold(const kvs_cuda_copies *copies)
{
    uint32_t count = 0;
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        count += n_untold(&copies->servers[q]);
    }
    return count;
}

static void fail_all(kvs_cuda_server *server, kvs_status status)
{
    kvs_cuda_copies *copies = server->all;
    for (uint32_t i = 0; server->is_given_up && i < server->n_under_way; i++) {
        kvs_cuda_batch *batch = &server->batches[(server->oldest + i) % KVS_CUDA_MAX_BATCHES];
        for (uint32_t j = 0; batch->telling == KVS_CUDA_UNTOLD && j < batch->n_copies; j++) {
            copies->has_failed |= kvs_cuda_batch_tell_copy(&server->lanes, &batch->entries[j].copy, status);
        }
        batch->telling = batch->telling == KVS_CUDA_UNTOLD ? KVS_CUDA_TOLD : batch->telling;
    }
    for (uint32_t i = server->queue.begin; i < server->queue.end; i++) {
        copies->has_failed |= kvs_cuda_batch_tell_copy(&server->lanes, &server->queue.entries[i].copy, status);
    }
    server->queue.end = server->queue.begin;
}

/* Threads wait with an end, so those that are at work are in another call of the driver's, which does not come back. All their
 * copies have failed, and all that wait, of any thread; the threads will find theirs told. With the lock held. */
static void give_up(kvs_cuda_copies *copies)
{
    kvs_status status = KVS_EIO;
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        kvs_cuda_server *server = &copies->servers[q];
        if (server->is_at_work && !server->is_given_up) {
            status = kvs_cuda_waits_give_up(copies->driver,
                                            "the copy thread, which is in a call of the driver, with %u batches under way",
                                            server->n_under_way);
            server->is_given_up = true;
        }
    }
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        fail_all(&copies->servers[q], status);
    }
    kvs_cond_wake_all(&copies->progress);
}

bool kvs_cuda_servers_sleep(kvs_cuda_copies *copies, kvs_cuda_patience *patience)
{
    if (kvs_device_is_forked(copies->device)) {
        return false;
    }
    if (patience->n_ended != copies->n_ended) {
        *patience = (kvs_cuda_patience){.n_ended = copies->n_ended};
    }
    const uint64_t part_ns = kvs_cuda_waits_patience_ns(copies->driver) / PATIENCE_PARTS;
    if (!kvs_cond_wait_until(&copies->progress, &copies->lock, kvs_clock_ns() + part_ns)) {
        patience->n_parts++;
    }
    if (patience->n_parts < PATIENCE_PARTS || patience->n_ended != copies->n_ended) {
        return true;
    }
    bool is_any_at_work = false;
    bool is_any_stuck = false;
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        is_any_at_work |= copies->servers[q].is_at_work;
        is_any_stuck |= copies->servers[q].is_at_work && !copies->servers[q].is_given_up;
    }
    if (is_any_stuck) {
        give_up(copies);
    }
    return is_any_at_work;
}

static bool stop(kvs_cuda_server *server)
{
    kvs_cuda_copies *copies = server->all;
    kvs_cuda_patience patience = {0};
    kvs_cuda_copies_lock(copies);
    while (!server->has_stopped && !server->is_given_up && kvs_cuda_servers_sleep(copies, &patience)) {
    }
    /* One that is not at work will stop, however late. */
    const bool has_stopped = server->has_stopped || !server->is_at_work;
    kvs_cuda_copies_unlock(copies);
    (void)(has_stopped ? pthread_join(server->thread, NULL) : pthread_detach(server->thread));
    return has_stopped;
}

bool kvs_cuda_servers_stop(kvs_cuda_copies *copies)
{
    bool have_stopped = true;
    kvs_cuda_copies_lock(copies);
    copies->must_stop = true;
    kvs_cond_wake_all(&copies->work);
    kvs_cuda_copies_unlock(copies);
    for (int q = 0; q < KVS_CUDA_N_QUEUES; q++) {
        if (copies->servers[q].has_thread && !stop(&copies->servers[q])) {
            have_stopped = false;
        }
    }
    return have_stopped;
}
