/* sync.h: mutex, condition and clock: the one place that knows the thread interface of the system.
 *
 * Waits are measured on the monotonic clock, so that setting the wall clock neither shortens nor
 * stretches a timeout.
 */
#ifndef KVS_NATIVE_BASE_SYNC_H
#define KVS_NATIVE_BASE_SYNC_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct kvs_mutex {
    pthread_mutex_t native;
} kvs_mutex;

typedef struct kvs_cond {
    pthread_cond_t native;
} kvs_cond;

bool kvs_mutex_init(kvs_mutex *mutex);
void kvs_mutex_destroy(kvs_mutex *mutex);
bool kvs_cond_init(kvs_cond *cond);
void kvs_cond_destroy(kvs_cond *cond);

static inline void kvs_mutex_lock(kvs_mutex *mutex)
{
    (void)pthread_mutex_lock(&mutex->native);
}

static inline void kvs_mutex_unlock(kvs_mutex *mutex)
{
    (void)pthread_mutex_unlock(&mutex->native);
}

static inline void kvs_cond_wait(kvs_cond *cond, kvs_mutex *mutex)
{
    (void)pthread_cond_wait(&cond->native, &mutex->native);
}

static inline void kvs_cond_wake_all(kvs_cond *cond)
{
    (void)pthread_cond_broadcast(&cond->native);
}

/* Between two looks of a thread that spins. */
static inline void kvs_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Nanoseconds of the monotonic clock. */
uint64_t kvs_clock_ns(void);

/* Wait until woken or until the clock reaches `deadline_ns`; false when it has. UINT64_MAX never
 * comes. */
bool kvs_cond_wait_until(kvs_cond *cond, kvs_mutex *mutex, uint64_t deadline_ns);

/* A number for the calling thread that no other thread of this process ever gets, before or after
 * its end. */
uint64_t kvs_thread_number(void);

/* The system's own number of the calling thread, as other tools show it; a later thread may get it again. */
uint64_t kvs_thread_system_number(void);

#endif
