/* copies_state.h: what the files of the copy engine share.
 *
 *     copies.c         create, host history, submission, waiting
 *     copy_server.c    the threads, and who waits for them with an end
 */
#ifndef KVS_NATIVE_BACKENDS_CUDA_COPIES_STATE_H
#define KVS_NATIVE_BACKENDS_CUDA_COPIES_STATE_H

#include "backends/cuda/batch.h"
#include "backends/cuda/copies.h"
#include "backends/cuda/queue.h"
#include "base/sync.h"

#include <pthread.h>

/* Batches under way: enough that the bus never waits for the thread. */
#define KVS_CUDA_MAX_BATCHES 8u

/* Copies with a gate wait for readers on the device, so the others have streams and a thread of their own: a pass may need one
 * of them before it reads anything. */
enum { KVS_CUDA_QUEUE_FREE = 0, KVS_CUDA_QUEUE_GATED = 1, KVS_CUDA_N_QUEUES = 2 };

/* A queue, its thread, and what that has under way. */
typedef struct kvs_cuda_server {
    struct kvs_cuda_copies *all;
    kvs_cuda_lanes lanes;
    pthread_t thread;
    bool has_thread;

    /* Below: under the lock. Contents of a batch under way are the thread's, but for its copies' counters. */
    kvs_cuda_queue queue;
    kvs_cuda_batch batches[KVS_CUDA_MAX_BATCHES];
    uint32_t oldest;
    uint32_t n_under_way;
    bool is_issuing;  /* the newest of these is being given to the driver */
    bool is_at_work;  /* the thread is with the driver, or tells of what it has done */
    bool has_stopped; /* it has nothing here any more */
    bool is_given_up; /* it is somewhere in the driver, and whoever waited for its copies has been told */
} kvs_cuda_server;

struct kvs_cuda_copies {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    kvs_cuda_rings *rings; /* NULL: events alone */
    kvs_mutex lock;
    kvs_mutex pinning; /* of host history */
    kvs_cond work;     /* the threads sleep here */
    kvs_cond progress; /* waiters sleep here */
    kvs_cuda_server servers[KVS_CUDA_N_QUEUES];

    /* Below: under the lock. */
    kvs_cuda_host **hosts;
    uint32_t n_hosts;
    uint32_t hosts_capacity;
    uint64_t n_ended; /* batches */
    bool must_stop;
    bool has_failed; /* a copy without `failed` */
};

/* How far a waiter has seen the threads come, and how often it has waited since in vain: in parts, so that a process that
 * was stopped for a while has lost one of them only. Zeroed: has not looked. */
typedef struct kvs_cuda_patience {
    uint64_t n_ended;
    uint32_t n_parts;
} kvs_cuda_patience;

static inline void kvs_cuda_copies_lock(kvs_cuda_copies *copies)
{
    kvs_mutex_lock(&copies->lock);
}

static inline void kvs_cuda_copies_unlock(kvs_cuda_copies *copies)
{
    kvs_mutex_unlock(&copies->lock);
}

/* Whether the first of a server's copies may be begun. With the lock held, as below. */
bool kvs_cuda_server_has_open(const kvs_cuda_server *server);

/* Batches of all servers whose copies somebody may still wait for. */
uint32_t kvs_cuda_servers_untold(const kvs_cuda_copies *copies);

/* False where nothing will come: in a fork, which has no threads, and where threads that have nothing to do were waited for all that
 * time. */
bool kvs_cuda_servers_sleep(kvs_cuda_copies *copies, kvs_cuda_patience *patience);

/* Without the lock. False: no thread. */
bool kvs_cuda_server_start(kvs_cuda_server *server);
/* Whether all threads have ended. A lost card ends their waits, so only one that is stuck in the driver does not. */
bool kvs_cuda_servers_stop(kvs_cuda_copies *copies);

#endif
