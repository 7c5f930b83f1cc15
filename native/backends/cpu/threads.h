/* threads.h: the compute threads of a CPU device: fork-join over dynamically claimed tasks.
 *
 * `n_threads` counts the caller. Workers spin briefly between runs while a pass is open (threads_begin/end) and sleep
 * otherwise; they never spin so long that the copy thread starves on a machine without a spare core.
 */
#ifndef KVS_NATIVE_CPU_THREADS_H
#define KVS_NATIVE_CPU_THREADS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvs_threads kvs_threads;
typedef void (*kvs_task)(void *argument, uint32_t index, uint32_t worker);

/* NULL when memory or threads cannot be had. n_threads at least 1. */
kvs_threads *kvs_threads_create(uint32_t n_threads);
void kvs_threads_destroy(kvs_threads *threads);
uint32_t kvs_threads_count(const kvs_threads *threads);

/* Run task(argument, 0..n_tasks-1, worker) on all threads; returns when all have finished. Tasks are claimed in rising
 * order. One caller at a time. */
void kvs_threads_run(kvs_threads *threads, uint32_t n_tasks, kvs_task task, void *argument);

/* The same, but every thread begins with a stretch of the tasks that is its own and takes from the others' when that is
 * done. So what a task reads ahead is read by the thread that needs it next. Tasks of a stretch are claimed in rising
 * order. `n_tasks` at most 2^31. */
void kvs_threads_run_stretches(kvs_threads *threads, uint32_t n_tasks, kvs_task task, void *argument);

/* What a thread does while it waits inside a pass: idle(argument) does a few microseconds of other work, or returns false. Set
 * before the first run. */
typedef bool (*kvs_idle)(void *argument);
void kvs_threads_set_idle(kvs_threads *threads, kvs_idle idle, void *argument);

/* A pass is about to start or has ended: workers stay awake in between. */
void kvs_threads_begin(kvs_threads *threads);
void kvs_threads_end(kvs_threads *threads);

#endif
