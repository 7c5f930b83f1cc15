/* weights.c: weights of matmuls on their way to the device: formed by all processors, some megabytes at a time, and sent. */
#define _GNU_SOURCE /* sched_getaffinity */

#include "backends/cuda/launcher.h"
#include "backends/cuda/weight_form.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#define STAGED_BYTES (64u << 20) /* formed before they are sent: at least one piece */
#define MAX_WORKERS 32u
#define WORKER_BYTES (1u << 20)  /* less is not worth a thread */

kvs_status kvs_cuda_weight_bytes(int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    kvs_cuda_weight_shape shape;
    kvs_status status = kvs_cuda_weight_shape_make(type, k, n, &shape);
    if (status == KVS_OK) {
        *bytes = shape.bytes;
    }
    return status;
}

kvs_status kvs_cuda_weight_size(const kvs_cuda_launcher *launcher, int type, uint64_t k, uint64_t n, uint64_t *bytes)
{
    const kvs_status status = kvs_cuda_weight_bytes(type, k, n, bytes);
    return status == KVS_OK ? KVS_OK
                            : kvs_fail(launcher->device, status, "no device form of a %s weight of %llu x %llu",
                                       kvs_type_name(type), (kvs_ull)n, (kvs_ull)k);
}

/* Pieces that one thread forms. */
typedef struct work {
    const kvs_cuda_weight_shape *shape;
    const void *rows;
    uint64_t first;
    uint64_t n_pieces;
    uint8_t *to;
    pthread_t thread;
    bool has_thread;
} work;

static void *run_work(void *argument)
{
    const work *mine = argument;
    kvs_cuda_weight_form(mine->shape, mine->rows, mine->first, mine->n_pieces, mine->to);
    return NULL;
}

/* Threads worth having for so many bytes, on the processors that this process may use. */
static uint32_t count_workers(uint64_t bytes)
{
    cpu_set_t set;
    const int n_processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    const uint64_t n_worth = bytes / WORKER_BYTES + 1;
    const uint64_t n = n_worth < (uint64_t)n_processors ? n_worth : (uint64_t)n_processors;
    return n < MAX_WORKERS ? (uint32_t)n : MAX_WORKERS;
}

/* The calling thread takes the first share, and the share of every thread that the system does not give. */
static void form_pieces(const kvs_cuda_weight_shape *shape, const void *rows, uint64_t first, uint64_t n_pieces, uint8_t *to)
{
    work works[MAX_WORKERS];
    const uint32_t n_workers = count_workers(n_pieces * shape->piece_bytes);
    const uint64_t share = kvs_div_up(n_pieces, n_workers);
    for (uint32_t i = n_workers; i-- > 0;) {
        const uint64_t begin = share * i < n_pieces ? share * i : n_pieces;
        const uint64_t left = n_pieces - begin;
        works[i] = (work){.shape = shape,
                          .rows = rows,
                          .first = first + begin,
                          .n_pieces = left < share ? left : share,
                          .to = to + begin * shape->piece_bytes};
        works[i].has_thread = i > 0 && pthread_create(&works[i].thread, NULL, run_work, &works[i]) == 0;
        if (!works[i].has_thread) {
            (void)run_work(&works[i]);
        }
    }
    for (uint32_t i = 1; i < n_workers; i++) {
        if (works[i].has_thread) {
            (void)pthread_join(works[i].thread, NULL);
        }
    }
}

kvs_status kvs_cuda_weight_pack(kvs_cuda_launcher *launcher, int type, uint64_t k, uint64_t n, const void *rows,
                                uint64_t address)
{
    kvs_cuda_weight_shape shape;
    kvs_status status = kvs_cuda_weight_shape_make(type, k, n, &shape);
    if (status != KVS_OK) {
        return kvs_fail(launcher->device, status, "a weight of %llu x %llu values of type %d", (kvs_ull)n, (kvs_ull)k, type);
    }
    const uint64_t fitting = STAGED_BYTES / shape.piece_bytes;
    const uint64_t at_once = fitting == 0 ? 1 : fitting < shape.n_pieces ? fitting : shape.n_pieces;
    uint8_t *staged = malloc(at_once * shape.piece_bytes);
    if (staged == NULL) {
        return kvs_fail(launcher->device, KVS_ENOMEM, "no memory to form a weight, %llu bytes",
                        (kvs_ull)(at_once * shape.piece_bytes));
    }
    for (uint64_t first = 0; status == KVS_OK && first < shape.n_pieces; first += at_once) {
        const uint64_t left = shape.n_pieces - first;
        const uint64_t n_pieces = left < at_once ? left : at_once;
        form_pieces(&shape, rows, first, n_pieces, staged);
        status = kvs_cuda_upload(launcher, address + first * shape.piece_bytes, staged, n_pieces * shape.piece_bytes);
    }
    free(staged);
    return status;
}
