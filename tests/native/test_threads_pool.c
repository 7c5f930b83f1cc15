/* test_threads_pool.c: the laws of threads.h: each task runs once, all of them before the run returns, in every state that
 * the workers can be in. */
#include "check.h"

#include "backends/cpu/threads.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_TASKS 1000u

typedef struct counts {
    uint32_t runs[MAX_TASKS]; /* plain: a task has its own, and the run's end publishes it */
    uint32_t n_threads;
    _Atomic uint32_t bad_worker;
} counts;

static void count_task(void *argument, uint32_t index, uint32_t worker)
{
    counts *c = argument;
    c->runs[index]++;
    if (worker >= c->n_threads) {
        atomic_fetch_add(&c->bad_worker, 1);
    }
}

static bool all_ran(const counts *c, uint32_t n_tasks, uint32_t times)
{
    for (uint32_t i = 0; i < MAX_TASKS; i++) {
        if (c->runs[i] != (i < n_tasks ? times : 0)) {
            return false;
        }
    }
    return true;
}

static void test_each_task_runs_once_for_every_count(void)
{
    static const uint32_t task_counts[] = {0, 1, 2, 3, 7, 64, MAX_TASKS};
    for (uint32_t n_threads = 1; n_threads <= 5; n_threads++) {
        kvs_threads *threads = kvs_threads_create(n_threads);
        CHECK(threads != NULL);
        CHECK_U64(kvs_threads_count(threads), n_threads);
        for (size_t i = 0; i < sizeof task_counts / sizeof task_counts[0]; i++) {
            counts c = {.n_threads = n_threads};
            kvs_threads_run(threads, task_counts[i], count_task, &c);
            CHECK(all_ran(&c, task_counts[i], 1));
            kvs_threads_run_stretches(threads, task_counts[i], count_task, &c);
            CHECK(all_ran(&c, task_counts[i], 2));
            CHECK_U64(atomic_load(&c.bad_worker), 0);
        }
        kvs_threads_destroy(threads);
    }
}

/* Runs follow each other at once, so that workers meet every boundary between two runs. */
static void test_runs_in_a_row_do_not_mix(void)
{
    enum { RUNS = 3000 };
    kvs_threads *threads = kvs_threads_create(3);
    counts first = {.n_threads = 3}, second = {.n_threads = 3};
    for (int is_open = 0; is_open < 2; is_open++) {
        if (is_open) {
            kvs_threads_begin(threads);
        }
        for (uint32_t i = 0; i < RUNS; i++) {
            kvs_threads_run(threads, 2 + i % 5, count_task, i % 2 ? &first : &second);
        }
        if (is_open) {
            kvs_threads_end(threads);
        }
    }
    uint32_t total = 0;
    for (uint32_t i = 0; i < MAX_TASKS; i++) {
        total += first.runs[i] + second.runs[i];
    }
    CHECK_U64(total, 2 * (RUNS / 5) * (2 + 3 + 4 + 5 + 6));
    CHECK_U64(atomic_load(&first.bad_worker) + atomic_load(&second.bad_worker), 0);
    kvs_threads_destroy(threads);
}

static void test_passes_open_and_close_around_runs(void)
{
    kvs_threads *threads = kvs_threads_create(3);
    counts c = {.n_threads = 3};
    for (uint32_t i = 0; i < 200; i++) {
        kvs_threads_begin(threads);
        kvs_threads_run(threads, 10, count_task, &c);
        if (i % 3 == 0) {
            sched_yield();
        }
        kvs_threads_run(threads, 10, count_task, &c);
        kvs_threads_end(threads);
    }
    CHECK(all_ran(&c, 10, 400));
    kvs_threads_destroy(threads);
}

/* Pools destroyed at once, with an open pass, or after work. */
static void test_destroy_in_any_state(void)
{
    for (uint32_t i = 0; i < 60; i++) {
        kvs_threads *threads = kvs_threads_create(1 + i % 4);
        counts c = {.n_threads = 1 + i % 4};
        if (i % 3 == 1) {
            kvs_threads_begin(threads);
        }
        if (i % 2 == 1) {
            kvs_threads_run(threads, 5, count_task, &c);
            CHECK(all_ran(&c, 5, 1));
        }
        kvs_threads_destroy(threads);
    }
    kvs_threads_destroy(NULL);
    CHECK(kvs_threads_create(0) == NULL);
}

typedef struct order {
    _Atomic uint32_t started;
    _Atomic uint32_t out_of_order;
} order;

static void note_order(void *argument, uint32_t index, uint32_t worker)
{
    (void)worker;
    order *o = argument;
    if (atomic_fetch_add(&o->started, 1) + 8 < index) {
        atomic_fetch_add(&o->out_of_order, 1);
    }
}

/* With one thread the claim order is the run order; with more, a task starts at most one claim per thread early. */
static void test_tasks_are_claimed_in_rising_order(void)
{
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) {
        kvs_threads *threads = kvs_threads_create(n_threads);
        order o = {0};
        kvs_threads_run(threads, 5000, note_order, &o);
        CHECK_U64(atomic_load(&o.out_of_order), 0);
        CHECK_U64(atomic_load(&o.started), 5000);
        kvs_threads_destroy(threads);
    }
}

#if defined(__x86_64__)
static void keep_subnormal(void *argument, uint32_t index, uint32_t worker)
{
    (void)index;
    (void)worker;
    _Atomic uint32_t *lost = argument;
    volatile float small = 1e-30f;
    if (small * 1e-10f == 0.0f) {
        atomic_fetch_add(lost, 1);
    }
}

/* A host program that flushes subnormals on its thread must not get other bits, and keeps its own setting. */
static void test_float_control_of_the_host_does_not_reach_tasks(void)
{
    for (uint32_t n_threads = 1; n_threads <= 2; n_threads++) {
        _Atomic uint32_t lost = 0;
        const unsigned before = _mm_getcsr();
        const unsigned flushing = before | 0x8040u;
        _mm_setcsr(flushing);
        kvs_threads *threads = kvs_threads_create(n_threads);
        kvs_threads_run(threads, 50, keep_subnormal, &lost);
        const unsigned after = _mm_getcsr();
        kvs_threads_destroy(threads);
        _mm_setcsr(before);
        CHECK((after & 0xffc0u) == (flushing & 0xffc0u));
        CHECK_U64(atomic_load(&lost), 0);
    }
}
#endif

int main(void)
{
    test_each_task_runs_once_for_every_count();
    test_runs_in_a_row_do_not_mix();
    test_passes_open_and_close_around_runs();
    test_destroy_in_any_state();
    test_tasks_are_claimed_in_rising_order();
#if defined(__x86_64__)
    test_float_control_of_the_host_does_not_reach_tasks();
#endif
    return check_finish();
}
