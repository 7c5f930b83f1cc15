/* sync.c: POSIX threads behind sync.h. */
#include "base/sync.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NS_PER_S = 1000000000 };

bool kvs_mutex_init(kvs_mutex *mutex)
{
    return pthread_mutex_init(&mutex->native, NULL) == 0;
}

void kvs_mutex_destroy(kvs_mutex *mutex)
{
    (void)pthread_mutex_destroy(&mutex->native);
}

bool kvs_cond_init(kvs_cond *cond)
{
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0) {
        return false;
    }
    const bool made = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                      pthread_cond_init(&cond->native, &attributes) == 0;
    (void)pthread_condattr_destroy(&attributes);
    return made;
}

void kvs_cond_destroy(kvs_cond *cond)
{
    (void)pthread_cond_destroy(&cond->native);
}

uint64_t kvs_clock_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

bool kvs_cond_wait_until(kvs_cond *cond, kvs_mutex *mutex, uint64_t deadline_ns)
{
    if (deadline_ns == UINT64_MAX) {
        kvs_cond_wait(cond, mutex);
        return true;
    }
    const struct timespec deadline = {
        .tv_sec = (time_t)(deadline_ns / NS_PER_S),
        .tv_nsec = (long)(deadline_ns % NS_PER_S),
    };
    return pthread_cond_timedwait(&cond->native, &mutex->native, &deadline) != ETIMEDOUT;
}

uint64_t kvs_thread_number(void)
{
    /* The system gives the identity of an ended thread to a new one, which would then read the
     * failures of its predecessor. Hence numbers of our own: the only state of this library that
     * belongs to no device. */
    static _Atomic uint64_t newest;
    static _Thread_local uint64_t own;
    if (own == 0) {
        own = atomic_fetch_add_explicit(&newest, 1, memory_order_relaxed) + 1;
    }
    return own;
}

uint64_t kvs_thread_system_number(void)
{
    return (uint64_t)syscall(SYS_gettid);
}
