/* waits.c: looking at the card again and again, until a limit; what is lost and what is left. */
#include "backends/cuda/waits.h"

#include "base/sync.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* How a wait looks. The driver's own waits spin, so that the end of a short one is seen within a microsecond; a
 * step must not lose that. Between two looks passes a 64th of what has been waited: in the first microseconds one
 * look follows the other, and no wait is ever longer by more than that share and a wake-up. Looks are calls that
 * share locks with launches, so a thread that looks without pause would slow down the one that launches; this way a
 * wait of 10 ms takes some 600 of them. Up to YIELD_NS the processor is kept, or lent to whoever wants it: a sleep
 * of that length would end too late by its wake-up. */
#define LOOK_SHARE 64u
#define SPIN_NS UINT64_C(200000)
#define YIELD_NS UINT64_C(16000000)
#define MAX_SLEEP_NS UINT64_C(1000000)

/* A queue holds about a thousand operations. With an event for each wave of attention beside its launches two thirds of
 * it are in use at most; and whoever waits leaves the card MARK_LAUNCHES * N_MARKS launches, more than a sleep takes. */
#define MARK_LAUNCHES 64u
#define N_MARKS 4u

#define MAX_STREAMS 8u
#define NS_PER_S 1000000000u
#define MAX_LIMIT_NS (UINT64_MAX / 4) /* a lifetime; sums with it do not overflow */

struct kvs_cuda_waits {
    kvs_device *device;
    uint64_t limit_ns;
    struct {
        cu_stream stream;
        const char *what;
    } watched[MAX_STREAMS];
    uint32_t n_watched;
    cu_event marks[N_MARKS];
    uint64_t n_launches;

    _Atomic bool is_lost;
    _Atomic uint32_t n_stuck;
    _Atomic uint64_t n_left;
    _Atomic uint64_t left_bytes;
    kvs_mutex lock; /* of what follows, and of going from well to lost and back */
    uint64_t lost_ns;
    char why[320];
};

/* ---- life ---- */

kvs_status kvs_cuda_waits_create(kvs_device *device, kvs_cuda_driver *driver, uint64_t limit_ns)
{
    kvs_cuda_waits *made = calloc(1, sizeof *made);
    if (made == NULL || !kvs_mutex_init(&made->lock)) {
        free(made);
        return kvs_fail(device, KVS_ENOMEM, "no memory for the waits of a card");
    }
    made->device = device;
    made->limit_ns = limit_ns == 0 ? KVS_CUDA_WAIT_LIMIT_NS : limit_ns < MAX_LIMIT_NS ? limit_ns : MAX_LIMIT_NS;
    driver->waits = made;
    kvs_status status = KVS_OK;
    for (uint32_t i = 0; status == KVS_OK && i < N_MARKS; i++) {
        status = KVS_CUDA_CALL(device, driver, event_create, &made->marks[i], CU_EVENT_DISABLE_TIMING);
    }
    return status;
}

void kvs_cuda_waits_destroy(kvs_cuda_driver *driver)
{
    kvs_cuda_waits *waits = driver->waits;
    if (waits == NULL) {
        return;
    }
    const bool is_lost = kvs_cuda_waits_is_lost(driver);
    for (uint32_t i = 0; !is_lost && i < N_MARKS && waits->marks[i] != NULL; i++) {
        (void)driver->api.event_destroy(waits->marks[i]);
    }
    kvs_mutex_destroy(&waits->lock);
    free(waits);
    driver->waits = NULL;
}

void kvs_cuda_waits_watch(const kvs_cuda_driver *driver, cu_stream stream, const char *what)
{
    kvs_cuda_waits *waits = driver->waits;
    waits->watched[waits->n_watched].stream = stream;
    waits->watched[waits->n_watched].what = what;
    waits->n_watched++;
}

void kvs_cuda_waits_unwatch(const kvs_cuda_driver *driver, cu_stream stream)
{
    kvs_cuda_waits *waits = driver->waits;
    for (uint32_t i = 0; i < waits->n_watched; i++) {
        if (waits->watched[i].stream == stream) {
            waits->watched[i] = waits->watched[--waits->n_watched];
            return;
        }
    }
}

/* ---- looking ---- */

/* One of the two, or with neither all streams. */
struct target {
    cu_stream stream;
    cu_event event;
    const char *call;
};

static cu_result look_at_all(const kvs_cuda_driver *driver)
{
    const kvs_cuda_waits *waits = driver->waits;
    cu_result result = CU_SUCCESS;
    for (uint32_t i = 0; i < waits->n_watched && result != CU_ERROR_NOT_READY; i++) {
        result = driver->api.stream_query(waits->watched[i].stream);
    }
    /* A stream that has failed does nothing any more; whoever uses it next is told. */
    return result == CU_ERROR_NOT_READY ? result : CU_SUCCESS;
}

static cu_result look(const kvs_cuda_driver *driver, const struct target *target)
{
    if (target->event != NULL) {
        return driver->api.event_query(target->event);
    }
    return target->stream != NULL ? driver->api.stream_query(target->stream) : look_at_all(driver);
}

/* Pass the time until the next look, and not beyond the limit. */
static void pause_wait(uint64_t waited_ns, uint64_t left_ns)
{
    uint64_t pause_ns = waited_ns / LOOK_SHARE;
    pause_ns = pause_ns < left_ns ? pause_ns : left_ns;
    if (waited_ns >= YIELD_NS) {
        pause_ns = pause_ns < MAX_SLEEP_NS ? pause_ns : MAX_SLEEP_NS;
        const struct timespec pause = {.tv_nsec = (long)pause_ns};
        (void)nanosleep(&pause, NULL);
        return;
    }
    for (const uint64_t until_ns = kvs_clock_ns() + pause_ns; kvs_clock_ns() < until_ns;) {
        if (waited_ns < SPIN_NS) {
            kvs_relax();
        } else {
            (void)sched_yield();
        }
    }
}

/* ---- lost ---- */

static double seconds(uint64_t ns)
{
    return (double)ns / NS_PER_S;
}

bool kvs_cuda_waits_is_lost(const kvs_cuda_driver *driver)
{
    return atomic_load_explicit(&driver->waits->is_lost, memory_order_acquire);
}

/* What is at work, for the text of a loss. A thread that is stuck in the driver may hold what a look needs. */
static void name_unfinished(const kvs_cuda_driver *driver, char *text, size_t room)
{
    const kvs_cuda_waits *waits = driver->waits;
    const bool may_look = kvs_cuda_waits_stuck(driver) == 0;
    size_t at = 0;
    text[0] = '\0';
    for (uint32_t i = 0; may_look && i < waits->n_watched && at < room; i++) {
        if (driver->api.stream_query(waits->watched[i].stream) == CU_ERROR_NOT_READY) {
            const char *between = at == 0 ? "; unfinished: " : ", ";
            at += (size_t)snprintf(text + at, room - at, "%s%s", between, waits->watched[i].what);
        }
    }
}

/* The first wait that has no end says why; others may fail beside it. */
static kvs_status lose(const kvs_cuda_driver *driver, uint64_t waited_ns, const char *format, va_list arguments)
{
    kvs_cuda_waits *waits = driver->waits;
    char what[128];
    char unfinished[128];
    (void)vsnprintf(what, sizeof what, format, arguments);
    name_unfinished(driver, unfinished, sizeof unfinished);
    kvs_mutex_lock(&waits->lock);
    if (!waits->is_lost) {
        waits->lost_ns = kvs_clock_ns();
        (void)snprintf(waits->why, sizeof waits->why, "waited %.3f s, of %.3f s at most, for %s%s", seconds(waited_ns),
                       seconds(waits->limit_ns), what, unfinished);
        atomic_store_explicit(&waits->is_lost, true, memory_order_release);
    }
    kvs_mutex_unlock(&waits->lock);
    return kvs_fail(waits->device, KVS_EIO, "card %d is lost: waited %.3f s, of %.3f s at most, for %s%s",
                    driver->device, seconds(waited_ns), seconds(waits->limit_ns), what, unfinished);
}

static kvs_status refuse(const kvs_cuda_driver *driver)
{
    kvs_cuda_waits *waits = driver->waits;
    kvs_mutex_lock(&waits->lock);
    const kvs_status status =
        kvs_fail(waits->device, KVS_EIO,
                 "card %d is lost for %.3f s, and nothing is begun before it has finished: %s (%llu pieces of memory, "
                 "%llu bytes, left to it)",
                 driver->device, seconds(kvs_clock_ns() - waits->lost_ns), waits->why,
                 (kvs_ull)atomic_load_explicit(&waits->n_left, memory_order_relaxed),
                 (kvs_ull)atomic_load_explicit(&waits->left_bytes, memory_order_relaxed));
    kvs_mutex_unlock(&waits->lock);
    return status;
}

/* One look, no wait: what was late has come. */
static bool is_well_again(const kvs_cuda_driver *driver)
{
    kvs_cuda_waits *waits = driver->waits;
    if (kvs_cuda_waits_stuck(driver) != 0) {
        return false;
    }
    kvs_cuda_enter(driver);
    kvs_mutex_lock(&waits->lock);
    const bool is_well = look_at_all(driver) == CU_SUCCESS;
    if (is_well) {
        atomic_store_explicit(&waits->is_lost, false, memory_order_release);
    }
    kvs_mutex_unlock(&waits->lock);
    kvs_cuda_leave(driver);
    return is_well;
}

kvs_status kvs_cuda_waits_admit(const kvs_cuda_driver *driver)
{
    /* A device without a card has no waits. */
    if (driver->waits == NULL || !kvs_cuda_waits_is_lost(driver) || is_well_again(driver)) {
        return KVS_OK;
    }
    return refuse(driver);
}

/* ---- waiting ---- */

static kvs_status wait_for(const kvs_cuda_driver *driver, const struct target *target, const char *format,
                           va_list arguments)
{
    const kvs_cuda_waits *waits = driver->waits;
    if (kvs_cuda_waits_stuck(driver) != 0) {
        return refuse(driver);
    }
    cu_result result = look(driver, target);
    if (result == CU_ERROR_NOT_READY) {
        const uint64_t begin_ns = kvs_clock_ns();
        uint64_t waited_ns = 0;
        while (result == CU_ERROR_NOT_READY) {
            if (kvs_cuda_waits_is_lost(driver)) {
                return refuse(driver);
            }
            if (waited_ns >= waits->limit_ns) {
                return lose(driver, waited_ns, format, arguments);
            }
            pause_wait(waited_ns, waits->limit_ns - waited_ns);
            waited_ns = kvs_clock_ns() - begin_ns;
            result = look(driver, target);
        }
    }
    return kvs_cuda_check(waits->device, driver, target->call, result);
}

kvs_status kvs_cuda_wait_stream(const kvs_cuda_driver *driver, cu_stream stream, const char *format, ...)
{
    const struct target target = {.stream = stream, .call = "stream_query"};
    va_list arguments;
    va_start(arguments, format);
    const kvs_status status = wait_for(driver, &target, format, arguments);
    va_end(arguments);
    return status;
}

kvs_status kvs_cuda_wait_event(const kvs_cuda_driver *driver, cu_event event, const char *format, ...)
{
    const struct target target = {.event = event, .call = "event_query"};
    va_list arguments;
    va_start(arguments, format);
    const kvs_status status = wait_for(driver, &target, format, arguments);
    va_end(arguments);
    return status;
}

static kvs_status wait_all(const kvs_cuda_driver *driver, const char *format, ...) KVS_PRINTF(2, 3);
static kvs_status wait_all(const kvs_cuda_driver *driver, const char *format, ...)
{
    const struct target target = {.call = "stream_query"};
    va_list arguments;
    va_start(arguments, format);
    const kvs_status status = wait_for(driver, &target, format, arguments);
    va_end(arguments);
    return status;
}

/* The card may still write there, and the driver would wait for it: nobody gets this memory again before the
 * process ends. */
bool kvs_cuda_waits_may_free(const kvs_cuda_driver *driver, uint64_t n_bytes)
{
    kvs_cuda_waits *waits = driver->waits;
    if (waits == NULL) {
        return true;
    }
    /* Of a card that is known to be lost without a word: whoever undoes what has failed keeps the text of that. */
    const bool is_idle = kvs_cuda_waits_is_lost(driver)
                             ? kvs_cuda_waits_stuck(driver) == 0 && look_at_all(driver) == CU_SUCCESS
                             : wait_all(driver, "everything, to give %llu bytes back", (kvs_ull)n_bytes) == KVS_OK;
    if (is_idle) {
        return true;
    }
    (void)atomic_fetch_add_explicit(&waits->n_left, n_bytes == 0 ? 0 : 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&waits->left_bytes, n_bytes, memory_order_relaxed);
    return false;
}

kvs_status kvs_cuda_waits_pace(const kvs_cuda_driver *driver, cu_stream stream)
{
    kvs_cuda_waits *waits = driver->waits;
    const uint64_t n_launches = waits->n_launches++;
    if (n_launches % MARK_LAUNCHES != 0) {
        return KVS_OK;
    }
    const cu_event mark = waits->marks[n_launches / MARK_LAUNCHES % N_MARKS];
    const kvs_status status = kvs_cuda_wait_event(driver, mark, "launch %llu, before launch %llu",
                                                  (kvs_ull)(n_launches - MARK_LAUNCHES * N_MARKS), (kvs_ull)n_launches);
    return status != KVS_OK ? status : KVS_CUDA_CALL(waits->device, driver, event_record, mark, stream);
}

/* ---- threads in the driver ---- */

uint64_t kvs_cuda_waits_patience_ns(const kvs_cuda_driver *driver)
{
    return 2 * driver->waits->limit_ns;
}

kvs_status kvs_cuda_waits_give_up(const kvs_cuda_driver *driver, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)atomic_fetch_add_explicit(&driver->waits->n_stuck, 1, memory_order_relaxed);
    const kvs_status status = lose(driver, kvs_cuda_waits_patience_ns(driver), format, arguments);
    va_end(arguments);
    return status;
}

void kvs_cuda_waits_came_back(const kvs_cuda_driver *driver)
{
    (void)atomic_fetch_sub_explicit(&driver->waits->n_stuck, 1, memory_order_release);
}

void kvs_cuda_waits_leave_thread(const kvs_cuda_driver *driver)
{
    (void)atomic_fetch_add_explicit(&driver->waits->n_stuck, 1, memory_order_relaxed);
}

uint32_t kvs_cuda_waits_stuck(const kvs_cuda_driver *driver)
{
    return atomic_load_explicit(&driver->waits->n_stuck, memory_order_acquire);
}

void kvs_cuda_waits_describe(const kvs_cuda_driver *driver, kvs_device_info *info)
{
    const kvs_cuda_waits *waits = driver->waits;
    info->is_lost = kvs_cuda_waits_is_lost(driver) ? 1 : 0;
    info->n_left = atomic_load_explicit(&waits->n_left, memory_order_relaxed);
    info->left_bytes = atomic_load_explicit(&waits->left_bytes, memory_order_relaxed);
}
