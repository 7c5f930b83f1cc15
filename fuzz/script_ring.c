/* script_ring.c: the ring against a model of its slots, every byte of them, and span plans over the same memory.
 *
 * create (slots - 1, run limit, schedule seed, bit 0: deferred). prefetch (n demands, then first page, pages - 1, size of each).
 * acquire (how far beyond consumed). read: all that can be had, wave by wave. consume (how far beyond consumed - 1). cancel.
 * hold (slots). advance (copies - 1): run the queue of a deferred device. run (a demand): look at it. fail (0, 4: allocation,
 * submission; 1, 2, 3: the copy behind `first` others fails, lacks memory, moves nothing): only on a deferred device, whose copies the
 * model can follow one by one. plan: see span_script.h. release (which plan). close: ring before plans and lease, or after.
 */
#include "ring_model.h"
#include "script.h"
#include "span_script.h"

#include "kvstream/ring.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { POOL_BYTES = 6 * 16384, MOST_WAITING = 30 };

typedef struct world {
    kvs_device *device;
    kvs_host *hosts[2]; /* records of 64 and of SLOT_BYTES bytes */
    kvs_lease *lease;
    uint8_t *memory; /* of slot 0 */
    kvs_ring *ring;
    bool is_deferred;
    plans plans;
    fault fault; /* of allocations and submissions */
    pthread_mutex_t mutex; /* the model: the copy thread tells it what it does */
    ring_model *model;
    int copy_fault; /* 0: none */
    uint32_t copies_before;
    bool closes_ring_last;
} world;

static int on_hook(void *user, int point, uint64_t index)
{
    world *w = user;
    if (point != KVS_HOOK_COPY) {
        return w->fault.is_armed ? fault_strike(&w->fault, point, index) : 0;
    }
    int answer = 0;
    pthread_mutex_lock(&w->mutex);
    if (w->copy_fault != 0 && w->copies_before-- == 0) {
        answer = w->copy_fault;
        w->copy_fault = 0;
    }
    ring_model_copy(w->model, answer);
    pthread_mutex_unlock(&w->mutex);
    return answer;
}

static ring_model seen(world *w)
{
    pthread_mutex_lock(&w->mutex);
    const ring_model model = *w->model;
    pthread_mutex_unlock(&w->mutex);
    return model;
}

static void check_page(const world *w, const model_page *page)
{
    uint8_t expected[SLOT_BYTES];
    ring_model_fill(expected, page->page, page->record_bytes);
    EXPECT(!page->came || memcmp(w->memory + page->slot * SLOT_BYTES, expected, SLOT_BYTES) == 0);
}

/* Pages that are ready and not consumed. */
static void check_pages(world *w, uint64_t ready)
{
    pthread_mutex_lock(&w->mutex);
    for (uint64_t at = w->model->consumed; at < ready; at++) {
        check_page(w, &w->model->pages[at]);
    }
    pthread_mutex_unlock(&w->mutex);
}

static kvs_ring_info ring_info(world *w)
{
    kvs_ring_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_ring_get_info(w->ring, &info));
    return info;
}

/* ---- actions ---- */

static uint32_t read_demands(const world *w, const step *step, kvs_demand *demands)
{
    const uint32_t n_demands = step->operand[0] % 4;
    for (uint32_t i = 0; i < n_demands; i++) {
        const uint8_t *operand = &step->operand[1 + 3 * i];
        const uint32_t size = operand[2] % 2;
        const uint64_t record_bytes = size == 0 ? 64 : SLOT_BYTES;
        demands[i] = (kvs_demand){.host = w->hosts[size],
                                  .host_offset_bytes = operand[0] % 21 * record_bytes,
                                  .record_bytes = record_bytes,
                                  .n_pages = 1 + operand[1] % 9u};
    }
    return n_demands;
}

static void prefetch(world *w, const step *step)
{
    kvs_demand demands[3];
    const uint32_t n_demands = read_demands(w, step, demands);
    const ring_model before = seen(w);
    if (before.submitted - before.consumed > MOST_WAITING || before.submitted + 27 > MAX_PAGES) {
        return;
    }
    uint64_t first = UINT64_MAX;
    const kvs_status refused = n_demands == 0 ? KVS_EINVAL : before.is_poisoned ? KVS_EPOISONED : KVS_OK;
    if (refused != KVS_OK) {
        EXPECT_STATUS(kvs_ring_submit(w->ring, demands, n_demands, &first), refused);
        return;
    }
    /* The copy thread may be ahead of this one, so the model hears of it first. */
    pthread_mutex_lock(&w->mutex);
    for (uint32_t i = 0; i < n_demands; i++) {
        const uint64_t page = demands[i].host_offset_bytes / demands[i].record_bytes;
        ring_model_submit(w->model, (uint32_t)page, demands[i].n_pages, (uint32_t)demands[i].record_bytes);
    }
    pthread_mutex_unlock(&w->mutex);
    if (OUTCOME(&w->fault, kvs_ring_submit(w->ring, demands, n_demands, &first), KVS_OK)) {
        EXPECT_U64(first, before.submitted);
    } else {
        *w->model = before; /* only a deferred device is made to fail, so nothing ran meanwhile */
    }
}

static void acquire(world *w, const step *step)
{
    const ring_model model = seen(w);
    const uint64_t end = model.consumed + step->operand[0] % (model.submitted - model.consumed + 2);
    const kvs_status got = kvs_ring_acquire_wait(w->ring, end);
    if (end > model.submitted) {
        EXPECT_STATUS(got, KVS_ENOTFOUND);
    } else if (model.is_poisoned) {
        EXPECT_STATUS(got, KVS_EIO);
    } else if (end > model.ready && ring_model_gate(&model, end - 1) > model.consumed) {
        EXPECT_STATUS(got, KVS_EBUSY);
    } else if (got != KVS_OK) {
        EXPECT_STATUS(got, KVS_EIO);
        EXPECT(seen(w).is_poisoned && end > model.ready);
    } else {
        EXPECT(ring_info(w).ready_pages >= end);
    }
}

static void consume_to(world *w, uint64_t end)
{
    check_pages(w, end);
    pthread_mutex_lock(&w->mutex);
    ring_model_consume(w->model, end);
    pthread_mutex_unlock(&w->mutex);
    EXPECT_OK(kvs_ring_consume(w->ring, end));
}

static void read_all(world *w)
{
    for (ring_model model = seen(w); !model.is_poisoned && model.consumed < model.submitted; model = seen(w)) {
        const uint64_t end = ring_model_acquirable(&model);
        EXPECT(model.consumed < end && end <= model.consumed + ring_model_open_slots(&model));
        if (kvs_ring_acquire_wait(w->ring, end) != KVS_OK) {
            EXPECT(seen(w).is_poisoned);
            return;
        }
        consume_to(w, end);
    }
}

static void consume(world *w, const step *step)
{
    ring_model model = seen(w);
    const uint64_t begin = model.consumed == 0 ? 0 : model.consumed - 1;
    const uint64_t limit = w->is_deferred ? model.ready + 1 : ring_model_acquirable(&model);
    const uint64_t end = begin + step->operand[0] % (limit < begin ? 1 : limit - begin + 1);
    if (!w->is_deferred) {
        EXPECT_OK(kvs_ring_acquire_wait(w->ring, end)); /* the copy thread decides when; the model must not */
    }
    if (model.is_poisoned) {
        EXPECT_STATUS(kvs_ring_consume(w->ring, end), KVS_EPOISONED);
    } else if (end < model.consumed || end > ring_info(w).ready_pages) {
        EXPECT_STATUS(kvs_ring_consume(w->ring, end), KVS_EINVAL);
    } else {
        consume_to(w, end);
    }
}

static void hold(world *w, const step *step)
{
    const ring_model model = seen(w);
    const uint32_t n_slots = step->operand[0] % (model.n_slots + 1);
    const kvs_status got = kvs_ring_hold(w->ring, n_slots);
    if (n_slots == model.n_slots || model.consumed != model.submitted) {
        EXPECT(got == KVS_EINVAL || got == KVS_EBUSY);
        return;
    }
    EXPECT_OK(got);
    ring_model_hold(w->model, n_slots);
    memset(w->memory + ring_model_open_slots(w->model) * SLOT_BYTES, HELD, n_slots * SLOT_BYTES);
}

static void advance(world *w, const step *step)
{
    const uint32_t limit = 1 + step->operand[0] % 6u;
    const uint32_t runnable = w->is_deferred ? ring_model_runnable(w->model) : 0;
    uint32_t ran = 0;
    const kvs_status got = kvs_device_run_copies(w->device, limit, &ran);
    if (!w->is_deferred) {
        EXPECT_STATUS(got, KVS_EINVAL);
    } else if (got != KVS_OK) {
        EXPECT_STATUS(got, KVS_EIO);
        EXPECT(w->model->is_poisoned);
    } else {
        EXPECT_U64(ran, least(limit, runnable));
    }
}

static void look(world *w, const step *step)
{
    const ring_model model = seen(w);
    const uint64_t demand = step->operand[0] % (model.submitted + 2);
    uint64_t address = 0;
    const kvs_status ready = kvs_ring_query(w->ring, demand);
    if (demand < model.consumed || demand >= model.submitted) {
        EXPECT_STATUS(kvs_ring_page_address(w->ring, demand, &address), KVS_ENOTFOUND);
        EXPECT_STATUS(ready, KVS_ENOTFOUND);
        return;
    }
    EXPECT_OK(kvs_ring_page_address(w->ring, demand, &address));
    EXPECT_U64(address, (uintptr_t)w->memory + model.pages[demand].slot * SLOT_BYTES);
    if (w->is_deferred) {
        EXPECT_STATUS(ready, model.is_poisoned ? KVS_EIO : demand < model.ready ? KVS_OK : KVS_PENDING);
    }
}

static void arm(world *w, const step *step)
{
    static const int answers[] = {0, KVS_EIO, KVS_ENOMEM, KVS_PENDING, 0};
    if (!w->is_deferred) {
        return;
    }
    const uint32_t kind = step->operand[0] % 5;
    if (answers[kind] == 0) {
        fault_arm(&w->fault, step);
    } else {
        w->copy_fault = answers[kind];
        w->copies_before = step->operand[1] % 8;
    }
}

static void cancel(world *w)
{
    EXPECT_OK(kvs_ring_cancel(w->ring));
    ring_model_cancel(w->model);
}

static void act(world *w, const step *step)
{
    switch (step->action) {
    case ACTION_PREFETCH:
        prefetch(w, step);
        break;
    case ACTION_ACQUIRE:
        acquire(w, step);
        break;
    case ACTION_READ:
        read_all(w);
        break;
    case ACTION_CONSUME:
        consume(w, step);
        break;
    case ACTION_CANCEL:
        cancel(w);
        break;
    case ACTION_HOLD:
        hold(w, step);
        break;
    case ACTION_ADVANCE:
        advance(w, step);
        break;
    case ACTION_RUN:
        look(w, step);
        break;
    case ACTION_PLAN:
        plans_make(&w->plans, &w->fault, step);
        break;
    case ACTION_RELEASE:
        plans_release(&w->plans, step->operand[0]);
        break;
    default:
        break;
    }
    w->fault.is_armed = false;
}

/* ---- what always holds ---- */

static void compare(world *w)
{
    EXPECT_OK(kvs_ring_check_integrity(w->ring));
    const kvs_ring_info info = ring_info(w);
    const ring_model model = seen(w);
    EXPECT_U64(info.submitted_pages, model.submitted);
    EXPECT_U64(info.consumed_pages, model.consumed);
    EXPECT_U64(info.copies, model.n_runs);
    EXPECT_U64(info.copied_bytes, model.copied_bytes);
    EXPECT_U64(info.n_slots, model.n_slots);
    EXPECT_U64(info.n_held_slots, model.n_held);
    EXPECT(!model.was_early);
    check_pages(w, info.ready_pages);
    if (w->is_deferred) {
        EXPECT_U64(info.ready_pages, model.ready);
        EXPECT_U64(info.is_poisoned, model.is_poisoned ? 1 : 0);
        EXPECT(memcmp(w->memory, model.slots, model.n_slots * SLOT_BYTES) == 0);
    }
    plans_check(&w->plans);
}

/* ---- life ---- */

static void write_history(world *w)
{
    uint8_t page[SLOT_BYTES];
    for (uint32_t size = 0; size < 2; size++) {
        const uint64_t record_bytes = size == 0 ? 64 : SLOT_BYTES;
        EXPECT_OK(kvs_host_create(w->device, N_HISTORY * record_bytes, &w->hosts[size]));
        for (uint32_t i = 0; i < N_HISTORY; i++) {
            memset(page, (int)i + 1, sizeof page);
            EXPECT_OK(kvs_host_write_wait(w->hosts[size], i * record_bytes, page, record_bytes));
        }
    }
}

static void take_lease(world *w)
{
    kvs_arena *arena = NULL;
    kvs_region region = {.struct_size = sizeof region, .id = 1, .size_bytes = POOL_BYTES};
    kvs_lease_info info = {.struct_size = sizeof info};
    EXPECT_OK(kvs_arena_create(w->device, POOL_BYTES, 64, &arena));
    EXPECT_OK(kvs_arena_begin(arena, 0));
    EXPECT_OK(kvs_arena_reserve(arena, &region));
    EXPECT_OK(kvs_arena_commit(arena));
    EXPECT_OK(kvs_arena_acquire(arena, 1, &w->lease));
    kvs_arena_release(arena);
    EXPECT_OK(kvs_lease_get_info(w->lease, &info));
    w->memory = (uint8_t *)(uintptr_t)info.address;
    w->plans = (plans){
        .device = w->device, .lease = w->lease, .lease_bytes = info.size_bytes, .lease_address = info.address};
}

static void open_world(world *w, const step *step)
{
    w->is_deferred = step->operand[3] % 2 != 0;
    const uint32_t flags = KVS_DEVICE_POISON_RELEASED | (w->is_deferred ? KVS_DEVICE_DEFERRED : 0u);
    w->device = script_device(flags, step->operand[2] % 4);
    write_history(w);
    take_lease(w);
    const kvs_ring_desc desc = {.struct_size = sizeof desc,
                                .n_slots = 1 + step->operand[0] % MAX_SLOTS,
                                .lease = w->lease,
                                .slot_bytes = SLOT_BYTES,
                                .run_limit_slots = step->operand[1] % 5};
    EXPECT_OK(kvs_ring_create(w->device, &desc, &w->ring));
    ring_model_open(w->model, desc.n_slots, desc.run_limit_slots);
    EXPECT_OK(kvs_device_set_hook(w->device, on_hook, w));
}

static void close_world(world *w)
{
    if (!w->closes_ring_last) {
        kvs_ring_release(w->ring);
    }
    kvs_lease_release(w->lease);
    while (w->plans.n != 0) {
        plans_release(&w->plans, 0);
    }
    if (w->closes_ring_last) {
        EXPECT_OK(kvs_ring_check_integrity(w->ring));
        kvs_ring_release(w->ring);
    }
    EXPECT_OK(kvs_device_set_hook(w->device, NULL, NULL));
    kvs_host_release(w->hosts[0]);
    kvs_host_release(w->hosts[1]);
    script_device_close(w->device);
}

void script_ring(script *script)
{
    ring_model *model = calloc(1, sizeof *model);
    EXPECT(model != NULL);
    world w = {.mutex = PTHREAD_MUTEX_INITIALIZER, .model = model};
    step step;
    script_open(script, &step);
    open_world(&w, &step);
    while (script_next(script, &step) && step.action != ACTION_CLOSE) {
        if (step.action == ACTION_FAIL) {
            arm(&w, &step);
            continue;
        }
        act(&w, &step);
        compare(&w);
    }
    w.closes_ring_last = step.action == ACTION_CLOSE && step.operand[0] % 2 != 0;
    close_world(&w);
    free(model);
}
