/* threads.c: fork-join where a run ends when its tasks have ended, not when every worker has been seen.
 *
 * One 64-bit word holds the run's number, its task count and the next task to claim; a claim is one fetch-and-add on it.
 * A worker that wakes late finds nothing to claim and does no harm, so a run never waits for a descheduled worker that
 * has not begun: on a machine without a spare core the copy thread may take a worker's place at any time.
 */
#include "backends/cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* How long a thread polls before it yields, and yields before it sleeps. Operations of a pass follow each other within
 * microseconds; what takes longer than the second bound is not worth a busy core. */
#define SPIN_NS 50000u
#define YIELD_NS 500000u
#define POLLS_PER_LOOK 32u /* polls between two looks at the clock */

/* The word: run number in 16 bits, tasks in 24, next task in 24. Workers overshoot `next` by at most one each. */
#define FIELD_BITS 24u
#define FIELD_MASK ((1u << FIELD_BITS) - 1u)
#define MAX_TASKS (FIELD_MASK / 2u)

typedef struct worker {
    kvs_threads *threads;
    pthread_t thread;
    uint32_t index;
} worker;

/* Tasks of one thread. The first two are written before a run of stretches, in which `next` may overshoot `end` by one
 * for each thread. */
typedef struct stretch {
    _Alignas(64) _Atomic uint32_t next;
    uint32_t end;
} stretch;

struct kvs_threads {
    _Alignas(64) _Atomic uint64_t word;
    _Atomic(kvs_task) task;
    _Atomic(void *) argument;
    _Atomic uint32_t first_index; /* added to claimed indices: runs of more than MAX_TASKS go in slices */
    _Alignas(64) _Atomic uint32_t n_done;
    _Alignas(64) _Atomic uint32_t n_sleeping;
    _Atomic uint32_t n_open;  /* passes under way */
    _Atomic uint32_t n_begun; /* passes ever begun */
    _Atomic bool is_stopping;
    _Atomic bool is_caller_sleeping;
    pthread_mutex_t mutex;
    pthread_cond_t work;     /* workers sleep here */
    pthread_cond_t finished; /* the caller sleeps here */
    _Atomic(kvs_idle) idle; /* NULL: nothing else to do */
    _Atomic(void *) idle_argument;
    uint64_t run_number;
    uint32_t spin_ns; /* zero where threads outnumber processors */
    uint32_t n_threads;
    worker *workers;     /* n_threads - 1 */
    stretch *stretches;  /* n_threads */
};

static void pause_processor(void)
{
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t word_tasks(uint64_t word)
{
    return (uint32_t)(word >> FIELD_BITS) & FIELD_MASK;
}

static uint32_t word_next(uint64_t word)
{
    return (uint32_t)word & FIELD_MASK;
}

static bool has_work(kvs_threads *threads)
{
    uint64_t word = atomic_load(&threads->word);
    return word_next(word) < word_tasks(word);
}

/* Rounding and denormals are part of the promise of equal bits; a host program may have changed them on its thread. */
#if defined(__x86_64__)
#define DEFAULT_CONTROL 0x1f80u /* round to nearest, denormals kept, exceptions masked */
#define CONTROL_MASK 0xffc0u

static unsigned set_float_control(void)
{
    unsigned control = _mm_getcsr();
    if ((control & CONTROL_MASK) != DEFAULT_CONTROL) {
        _mm_setcsr(DEFAULT_CONTROL);
    }
    return control;
}

static void restore_float_control(unsigned control)
{
    if ((control & CONTROL_MASK) != DEFAULT_CONTROL) {
        _mm_setcsr(control);
    }
}
#else
static unsigned set_float_control(void)
{
    return 0;
}

static void restore_float_control(unsigned control)
{
    (void)control;
}
#endif

/* Claim and do tasks until none is left; returns after telling how many were done. */
static void do_tasks(kvs_threads *threads, uint32_t worker_index)
{
    uint32_t done = 0;
    for (;;) {
        if (!has_work(threads)) {
            break;
        }
        uint64_t word = atomic_fetch_add_explicit(&threads->word, 1, memory_order_acq_rel);
        if (word_next(word) >= word_tasks(word)) {
            break;
        }
        /* The run cannot end before this task is counted, so these are the run's own. */
        kvs_task task = atomic_load_explicit(&threads->task, memory_order_relaxed);
        void *argument = atomic_load_explicit(&threads->argument, memory_order_relaxed);
        uint32_t first = atomic_load_explicit(&threads->first_index, memory_order_relaxed);
        task(argument, first + word_next(word), worker_index);
        done++;
    }
    if (done == 0) {
        return;
    }
    atomic_fetch_add(&threads->n_done, done);
    if (worker_index != 0 && atomic_load(&threads->is_caller_sleeping)) {
        pthread_mutex_lock(&threads->mutex);
        pthread_cond_signal(&threads->finished);
        pthread_mutex_unlock(&threads->mutex);
    }
}

typedef bool (*condition)(kvs_threads *threads, uint32_t value);

static bool do_something_else(kvs_threads *threads)
{
    kvs_idle idle = atomic_load_explicit(&threads->idle, memory_order_acquire);
    return idle != NULL && idle(atomic_load_explicit(&threads->idle_argument, memory_order_relaxed));
}

/* Poll, then yield; false when both bounds have passed. */
static bool poll_until(kvs_threads *threads, condition is_met, uint32_t value)
{
    uint64_t start = 0;
    for (uint32_t polls = 0;; polls++) {
        if (is_met(threads, value)) {
            return true;
        }
        if (polls % POLLS_PER_LOOK != POLLS_PER_LOOK - 1) {
            pause_processor();
            continue;
        }
        if (do_something_else(threads)) {
            start = 0;
            continue;
        }
        uint64_t now = clock_ns();
        start = start != 0 ? start : now;
        if (now - start >= YIELD_NS) {
            return false;
        }
        if (now - start >= threads->spin_ns) {
            sched_yield();
        }
    }
}

static bool is_done(kvs_threads *threads, uint32_t n_tasks)
{
    return atomic_load(&threads->n_done) == n_tasks;
}

/* True also when there is no more reason to poll. */
static bool is_called(kvs_threads *threads, uint32_t unused)
{
    (void)unused;
    return has_work(threads) || atomic_load_explicit(&threads->n_open, memory_order_relaxed) == 0;
}

/* Sleep until there is work, another pass has begun or the threads stop. The caller looks at n_sleeping after it has
 * published what it wakes for, the worker looks for that after it has counted itself: one of the two sees the other. */
static void sleep_for_work(kvs_threads *threads, uint32_t n_begun)
{
    pthread_mutex_lock(&threads->mutex);
    atomic_fetch_add(&threads->n_sleeping, 1);
    while (!has_work(threads) && !atomic_load(&threads->is_stopping) &&
           atomic_load(&threads->n_begun) == n_begun) {
        pthread_cond_wait(&threads->work, &threads->mutex);
    }
    atomic_fetch_sub(&threads->n_sleeping, 1);
    pthread_mutex_unlock(&threads->mutex);
}

static void *worker_main(void *argument)
{
    worker *self = argument;
    kvs_threads *threads = self->threads;
    set_float_control();
    while (!atomic_load(&threads->is_stopping)) {
        uint32_t n_begun = atomic_load(&threads->n_begun);
        do_tasks(threads, self->index);
        if (atomic_load(&threads->n_open) == 0 || !poll_until(threads, is_called, 0)) {
            sleep_for_work(threads, n_begun);
        }
    }
    return NULL;
}

static void wake_workers(kvs_threads *threads)
{
    if (atomic_load(&threads->n_sleeping) == 0) {
        return;
    }
    pthread_mutex_lock(&threads->mutex);
    pthread_cond_broadcast(&threads->work);
    pthread_mutex_unlock(&threads->mutex);
}

static void stop_workers(kvs_threads *threads, uint32_t n_started)
{
    atomic_store(&threads->is_stopping, true);
    pthread_mutex_lock(&threads->mutex);
    pthread_cond_broadcast(&threads->work);
    pthread_mutex_unlock(&threads->mutex);
    for (uint32_t i = 0; i < n_started; i++) {
        pthread_join(threads->workers[i].thread, NULL);
    }
}

static void free_threads(kvs_threads *threads)
{
    pthread_cond_destroy(&threads->finished);
    pthread_cond_destroy(&threads->work);
    pthread_mutex_destroy(&threads->mutex);
    free(threads->stretches);
    free(threads->workers);
    free(threads);
}

kvs_threads *kvs_threads_create(uint32_t n_threads)
{
    if (n_threads == 0) {
        return NULL;
    }
    kvs_threads *threads = aligned_alloc(64, (sizeof *threads + 63) / 64 * 64);
    if (threads == NULL) {
        return NULL;
    }
    *threads = (kvs_threads){.n_threads = n_threads};
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    threads->spin_ns = processors > 0 && n_threads > (unsigned long)processors ? 0 : SPIN_NS;
    threads->workers = calloc(n_threads, sizeof *threads->workers);
    threads->stretches = aligned_alloc(64, n_threads * sizeof *threads->stretches);
    pthread_mutex_init(&threads->mutex, NULL);
    pthread_cond_init(&threads->work, NULL);
    pthread_cond_init(&threads->finished, NULL);
    if (threads->workers == NULL || threads->stretches == NULL) {
        free_threads(threads);
        return NULL;
    }
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        threads->workers[i] = (worker){.threads = threads, .index = i + 1};
        if (pthread_create(&threads->workers[i].thread, NULL, worker_main, &threads->workers[i]) != 0) {
            stop_workers(threads, i);
            free_threads(threads);
            return NULL;
        }
    }
    return threads;
}

void kvs_threads_destroy(kvs_threads *threads)
{
    if (threads == NULL) {
        return;
    }
    stop_workers(threads, threads->n_threads - 1);
    free_threads(threads);
}

void kvs_threads_set_idle(kvs_threads *threads, kvs_idle idle, void *argument)
{
    atomic_store_explicit(&threads->idle_argument, argument, memory_order_relaxed);
    atomic_store_explicit(&threads->idle, idle, memory_order_release);
}

uint32_t kvs_threads_count(const kvs_threads *threads)
{
    return threads->n_threads;
}

static void wait_done(kvs_threads *threads, uint32_t n_tasks)
{
    if (poll_until(threads, is_done, n_tasks)) {
        return;
    }
    pthread_mutex_lock(&threads->mutex);
    atomic_store(&threads->is_caller_sleeping, true);
    while (!is_done(threads, n_tasks)) {
        pthread_cond_wait(&threads->finished, &threads->mutex);
    }
    atomic_store(&threads->is_caller_sleeping, false);
    pthread_mutex_unlock(&threads->mutex);
}

static void run_slice(kvs_threads *threads, uint32_t first, uint32_t n_tasks, kvs_task task, void *argument)
{
    atomic_store_explicit(&threads->task, task, memory_order_relaxed);
    atomic_store_explicit(&threads->argument, argument, memory_order_relaxed);
    atomic_store_explicit(&threads->first_index, first, memory_order_relaxed);
    atomic_store_explicit(&threads->n_done, 0, memory_order_relaxed);
    threads->run_number++;
    atomic_store(&threads->word, threads->run_number << 2 * FIELD_BITS | (uint64_t)n_tasks << FIELD_BITS);
    wake_workers(threads);
    do_tasks(threads, 0);
    wait_done(threads, n_tasks);
}

void kvs_threads_run(kvs_threads *threads, uint32_t n_tasks, kvs_task task, void *argument)
{
    unsigned control = set_float_control();
    if (threads->n_threads == 1 || n_tasks <= 1) {
        for (uint32_t i = 0; i < n_tasks; i++) {
            task(argument, i, 0);
        }
    } else {
        for (uint32_t first = 0; first < n_tasks; first += MAX_TASKS) {
            uint32_t left = n_tasks - first;
            run_slice(threads, first, left < MAX_TASKS ? left : MAX_TASKS, task, argument);
        }
    }
    restore_float_control(control);
}

typedef struct stretches_run {
    kvs_threads *threads;
    kvs_task task;
    void *argument;
} stretches_run;

/* Task: one thread's stretch, then what is left of the others', in turn. A stretch whose thread never comes is begun by
 * whoever claims this task. */
static void do_stretch(void *argument, uint32_t index, uint32_t worker_index)
{
    const stretches_run *run = argument;
    const uint32_t n = run->threads->n_threads;
    for (uint32_t i = 0; i < n; i++) {
        stretch *own = &run->threads->stretches[(index + i) % n];
        while (atomic_load_explicit(&own->next, memory_order_relaxed) < own->end) {
            uint32_t claimed = atomic_fetch_add_explicit(&own->next, 1, memory_order_relaxed);
            if (claimed >= own->end) {
                break;
            }
            run->task(run->argument, claimed, worker_index);
        }
    }
}

void kvs_threads_run_stretches(kvs_threads *threads, uint32_t n_tasks, kvs_task task, void *argument)
{
    const uint32_t n = threads->n_threads;
    for (uint32_t i = 0; i < n; i++) {
        threads->stretches[i].end = (uint32_t)((uint64_t)n_tasks * (i + 1) / n);
        atomic_store_explicit(&threads->stretches[i].next, (uint32_t)((uint64_t)n_tasks * i / n),
                              memory_order_relaxed);
    }
    stretches_run run = {threads, task, argument};
    kvs_threads_run(threads, n, do_stretch, &run);
}

void kvs_threads_begin(kvs_threads *threads)
{
    atomic_fetch_add(&threads->n_open, 1);
    atomic_fetch_add(&threads->n_begun, 1);
    wake_workers(threads);
}

void kvs_threads_end(kvs_threads *threads)
{
    atomic_fetch_sub(&threads->n_open, 1);
}
