/* loader.c: workers that take pieces of a load in turn. The calling thread is the first of them, so that a load is possible
 * where the system gives no thread. */
#define _GNU_SOURCE /* sched_getaffinity */

#include "backends/cuda/loader.h"

#include "backends/cuda/waits.h"
#include "base/sync.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Copies of this size run at nine tenths of the bus and more; two for each worker: one is filled while the other is copied. */
#define STAGE_BYTES ((uint64_t)2 << 20)
#define MAX_WORKERS 32u
#define COPY_PIECE_BYTES ((uint64_t)256 << 10)

enum { N_STAGES = 2, PATIENCE_PARTS = 16 };

struct stage {
    uint8_t *memory;
    uint64_t n_bytes;
    cu_event event; /* behind the last copy from it; NULL: there was none */
};

struct worker {
    kvs_cuda_loader *loader;
    struct stage stages[N_STAGES];
    uint32_t turn;
    pthread_t thread;
    bool has_thread;
};

/* What went wrong first, in whichever thread. */
struct outcome {
    kvs_status status;
    char text[256];
};

struct kvs_cuda_loader {
    kvs_device *device;
    const kvs_cuda_driver *driver;
    cu_stream stream;
    kvs_mutex turn; /* one load at a time */
    kvs_mutex lock; /* of what follows */
    kvs_cond changed;
    const kvs_cuda_load *load;
    uint64_t generation; /* rises with each load */
    uint32_t n_busy;     /* threads that are at the load */
    bool is_ending;
    bool is_given_up; /* they do not come back from the driver */
    struct outcome outcome;
    _Atomic uint64_t next; /* piece that nobody has taken */
    uint64_t at_once;      /* pieces taken together */
    uint32_t n_workers;    /* 0: resting */
    struct worker workers[MAX_WORKERS];
};

/* Keep the calling thread's newest failure. */
static void note(kvs_cuda_loader *loader, kvs_status status)
{
    kvs_mutex_lock(&loader->lock);
    if (loader->outcome.status == KVS_OK) {
        loader->outcome.status = status;
        (void)kvs_device_last_error(loader->device, loader->outcome.text, sizeof loader->outcome.text);
    }
    kvs_mutex_unlock(&loader->lock);
    /* Nobody takes another piece. */
    atomic_store_explicit(&loader->next, UINT64_MAX / 2, memory_order_relaxed);
}

static bool is_ok(kvs_cuda_loader *loader, kvs_status status)
{
    if (status != KVS_OK) {
        note(loader, status);
    }
    return status == KVS_OK;
}

static bool is_good(kvs_cuda_loader *loader, const char *call, cu_result result)
{
    return is_ok(loader, kvs_cuda_check(loader->device, loader->driver, call, result));
}

static bool has_arrived(kvs_cuda_loader *loader, const struct stage *stage)
{
    return stage->event == NULL ||
           is_ok(loader, kvs_cuda_wait_event(loader->driver, stage->event,
                                             "a pinned buffer of %llu bytes, whose load is under way",
                                             (kvs_ull)stage->n_bytes));
}

/* ---- a worker ---- */

static void free_stage(const kvs_cuda_driver *driver, struct stage *stage)
{
    const bool may_go = kvs_cuda_waits_may_free(driver, stage->n_bytes);
    if (may_go && stage->event != NULL) {
        (void)driver->api.event_destroy(stage->event);
    }
    if (may_go && stage->memory != NULL) {
        (void)driver->api.host_free(stage->memory);
    }
    *stage = (struct stage){0};
}

/* A stage of so many bytes that no copy reads any more. */
static bool ready_stage(kvs_cuda_loader *loader, struct stage *stage, uint64_t n_bytes)
{
    const kvs_cuda_api *api = &loader->driver->api;
    if (!has_arrived(loader, stage)) {
        return false;
    }
    if (stage->n_bytes < n_bytes) {
        free_stage(loader->driver, stage);
        void *memory = NULL;
        if (!is_good(loader, "host_alloc", api->host_alloc(&memory, (size_t)n_bytes, CU_MEM_HOST_PORTABLE))) {
            return false;
        }
        stage->memory = memory;
        stage->n_bytes = n_bytes;
    }
    return stage->event != NULL || is_good(loader, "event_create", api->event_create(&stage->event, CU_EVENT_DISABLE_TIMING));
}

static void take_pieces(struct worker *worker, const kvs_cuda_load *load)
{
    kvs_cuda_loader *const loader = worker->loader;
    const kvs_cuda_api *api = &loader->driver->api;
    const uint64_t room = loader->at_once * load->piece_bytes;
    for (;;) {
        const uint64_t first = atomic_fetch_add_explicit(&loader->next, loader->at_once, memory_order_relaxed);
        if (first >= load->n_pieces) {
            return;
        }
        const uint64_t left = load->n_pieces - first;
        const uint64_t n_pieces = left < loader->at_once ? left : loader->at_once;
        struct stage *const stage = &worker->stages[worker->turn];
        worker->turn = (worker->turn + 1) % N_STAGES;
        /* Of a lost card the load may be over already, and what it was formed from gone. */
        if (!ready_stage(loader, stage, room < STAGE_BYTES ? STAGE_BYTES : room) ||
            !is_ok(loader, kvs_cuda_waits_admit(loader->driver))) {
            return;
        }
        load->form(load->what, first, n_pieces, stage->memory);
        const cu_result result =
            api->copy(load->address + first * load->piece_bytes, (uint64_t)(uintptr_t)stage->memory,
                      (size_t)(n_pieces * load->piece_bytes), loader->stream);
        if (!is_good(loader, "copy", result) ||
            !is_good(loader, "event_record", api->event_record(stage->event, loader->stream))) {
            return;
        }
    }
}

static void *run_worker(void *argument)
{
    struct worker *const worker = argument;
    kvs_cuda_loader *const loader = worker->loader;
    uint64_t seen = 0;
    kvs_cuda_enter(loader->driver);
    kvs_mutex_lock(&loader->lock);
    for (;;) {
        while (!loader->is_ending && (loader->load == NULL || loader->generation == seen)) {
            kvs_cond_wait(&loader->changed, &loader->lock);
        }
        if (loader->is_ending) {
            break;
        }
        const kvs_cuda_load load = *loader->load;
        seen = loader->generation;
        loader->n_busy++;
        kvs_mutex_unlock(&loader->lock);
        take_pieces(worker, &load);
        kvs_mutex_lock(&loader->lock);
        loader->n_busy--;
        if (loader->n_busy == 0 && loader->is_given_up) {
            loader->is_given_up = false;
            loader->outcome = (struct outcome){0}; /* whoever loaded has been told */
            kvs_cuda_waits_came_back(loader->driver);
        }
        kvs_cond_wake_all(&loader->changed);
    }
    kvs_mutex_unlock(&loader->lock);
    kvs_cuda_leave(loader->driver);
    return NULL;
}

/* ---- life ---- */

kvs_status kvs_cuda_loader_create(kvs_device *device, const kvs_cuda_driver *driver, cu_stream stream, kvs_cuda_loader **loader)
{
    kvs_cuda_loader *made = calloc(1, sizeof *made);
    if (made == NULL || !kvs_mutex_init(&made->turn)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for what loads weights");
    }
    if (!kvs_mutex_init(&made->lock)) {
        kvs_mutex_destroy(&made->turn);
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no lock for what loads weights");
    }
    if (!kvs_cond_init(&made->changed)) {
        kvs_mutex_destroy(&made->lock);
        kvs_mutex_destroy(&made->turn);
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no condition for what loads weights");
    }
    made->device = device;
    made->driver = driver;
    made->stream = stream;
    *loader = made;
    return KVS_OK;
}

/* Processors that this process may use. */
static uint32_t count_processors(void)
{
    cpu_set_t set;
    const int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n < 1 ? 1 : (uint32_t)n < MAX_WORKERS ? (uint32_t)n : MAX_WORKERS;
}

static void start(kvs_cuda_loader *loader)
{
    const uint32_t wanted = count_processors();
    loader->is_ending = false;
    loader->n_workers = wanted;
    for (uint32_t i = 0; i < wanted; i++) {
        loader->workers[i].loader = loader;
        loader->workers[i].has_thread =
            i > 0 && pthread_create(&loader->workers[i].thread, NULL, run_worker, &loader->workers[i]) == 0;
    }
}

/* Wait until no thread is at the load: none takes another piece, so each ends with the one that it has. False where one
 * does not come back from the driver: all that it uses stays. With the lock held. */
static bool all_rest(kvs_cuda_loader *loader)
{
    const uint64_t part_ns = kvs_cuda_waits_patience_ns(loader->driver) / PATIENCE_PARTS;
    for (uint32_t part = 0; loader->n_busy != 0 && part < PATIENCE_PARTS && !loader->is_given_up;) {
        part += !kvs_cond_wait_until(&loader->changed, &loader->lock, kvs_clock_ns() + part_ns);
    }
    if (loader->n_busy != 0 && !loader->is_given_up) {
        loader->is_given_up = true;
        loader->outcome.status = kvs_cuda_waits_give_up(
            loader->driver, "%u threads that load, which are in calls of the driver", loader->n_busy);
        (void)kvs_device_last_error(loader->device, loader->outcome.text, sizeof loader->outcome.text);
    }
    return loader->n_busy == 0;
}

/* Whether nobody is at it any more. */
static bool stop(kvs_cuda_loader *loader)
{
    kvs_mutex_lock(&loader->lock);
    loader->is_ending = true;
    kvs_cond_wake_all(&loader->changed);
    const bool is_over = all_rest(loader);
    kvs_mutex_unlock(&loader->lock);
    if (!is_over) {
        return false;
    }
    for (uint32_t i = 0; i < loader->n_workers; i++) {
        struct worker *const worker = &loader->workers[i];
        if (worker->has_thread) {
            (void)pthread_join(worker->thread, NULL);
        }
        for (int turn = 0; turn < N_STAGES; turn++) {
            struct stage *const stage = &worker->stages[turn];
            (void)has_arrived(loader, stage);
            free_stage(loader->driver, stage);
        }
        *worker = (struct worker){0};
    }
    loader->n_workers = 0;
    return true;
}

/* What has gone wrong since somebody asked last. */
static kvs_status report(kvs_cuda_loader *loader)
{
    const struct outcome outcome = loader->outcome;
    loader->outcome = (struct outcome){0};
    return outcome.status == KVS_OK ? KVS_OK : kvs_fail(loader->device, outcome.status, "%s", outcome.text);
}

void kvs_cuda_loader_destroy(kvs_cuda_loader *loader)
{
    if (loader == NULL) {
        return;
    }
    if (!stop(loader)) {
        kvs_cuda_waits_leave_thread(loader->driver);
        return; /* a thread comes back here when the driver lets it */
    }
    kvs_cond_destroy(&loader->changed);
    kvs_mutex_destroy(&loader->lock);
    kvs_mutex_destroy(&loader->turn);
    free(loader);
}

/* ---- loads ---- */

/* Enough to fill a stage, but a share for each worker. */
static uint64_t pieces_at_once(const kvs_cuda_load *load, uint32_t n_workers)
{
    const uint64_t fitting = STAGE_BYTES / load->piece_bytes;
    const uint64_t share = kvs_div_up(load->n_pieces, n_workers);
    const uint64_t n = fitting < share ? fitting : share;
    return n == 0 ? 1 : n;
}

kvs_status kvs_cuda_loader_run(kvs_cuda_loader *loader, const kvs_cuda_load *load)
{
    kvs_mutex_lock(&loader->turn);
    if (loader->n_workers == 0) {
        start(loader);
    }
    kvs_mutex_lock(&loader->lock);
    loader->at_once = pieces_at_once(load, loader->n_workers);
    atomic_store_explicit(&loader->next, 0, memory_order_relaxed);
    loader->load = load;
    loader->generation++;
    kvs_cond_wake_all(&loader->changed);
    kvs_mutex_unlock(&loader->lock);
    take_pieces(&loader->workers[0], load);
    kvs_mutex_lock(&loader->lock);
    /* Whoever has not begun finds no load any more. */
    loader->load = NULL;
    (void)all_rest(loader);
    const kvs_status status = report(loader);
    kvs_mutex_unlock(&loader->lock);
    kvs_mutex_unlock(&loader->turn);
    return status;
}

struct plain {
    const uint8_t *bytes;
    uint64_t piece_bytes;
};

static void form_plain(const void *what, uint64_t first, uint64_t n_pieces, uint8_t *to)
{
    const struct plain *plain = what;
    memcpy(to, plain->bytes + first * plain->piece_bytes, (size_t)(n_pieces * plain->piece_bytes));
}

static kvs_status copy_pieces(kvs_cuda_loader *loader, uint64_t address, const uint8_t *from, uint64_t n_pieces,
                              uint64_t piece_bytes)
{
    const struct plain plain = {from, piece_bytes};
    const kvs_cuda_load load = {form_plain, &plain, n_pieces, piece_bytes, address};
    return n_pieces == 0 || piece_bytes == 0 ? KVS_OK : kvs_cuda_loader_run(loader, &load);
}

/* What is left over of whole pieces is a piece of its own: behind it lies what nobody may read. */
kvs_status kvs_cuda_loader_copy(kvs_cuda_loader *loader, uint64_t address, const void *from, uint64_t n_bytes)
{
    const uint64_t n_pieces = n_bytes / COPY_PIECE_BYTES, whole = n_pieces * COPY_PIECE_BYTES;
    const kvs_status status = copy_pieces(loader, address, from, n_pieces, COPY_PIECE_BYTES);
    return status == KVS_OK ? copy_pieces(loader, address + whole, (const uint8_t *)from + whole, 1, n_bytes - whole) : status;
}

kvs_status kvs_cuda_loader_rest(kvs_cuda_loader *loader)
{
    kvs_status status = KVS_OK;
    kvs_mutex_lock(&loader->turn);
    if (loader->n_workers != 0) {
        (void)stop(loader);
        kvs_mutex_lock(&loader->lock);
        status = report(loader);
        kvs_mutex_unlock(&loader->lock);
    }
    kvs_mutex_unlock(&loader->turn);
    return status;
}
