/* hook.c: calls of the fault hook run outside the mutex, because a hook may hold one thread back
 * while others go on. */
#include "core/hook.h"

#include <string.h>

bool kvs_hooks_init(kvs_hooks *hooks)
{
    memset(hooks, 0, sizeof *hooks);
    if (!kvs_mutex_init(&hooks->mutex)) {
        return false;
    }
    if (!kvs_cond_init(&hooks->idle)) {
        kvs_mutex_destroy(&hooks->mutex);
        return false;
    }
    return true;
}

void kvs_hooks_destroy(kvs_hooks *hooks)
{
    kvs_cond_destroy(&hooks->idle);
    kvs_mutex_destroy(&hooks->mutex);
}

void kvs_hooks_set(kvs_hooks *hooks, kvs_hook hook, void *user)
{
    kvs_mutex_lock(&hooks->mutex);
    hooks->hook = hook;
    hooks->user = user;
    atomic_store_explicit(&hooks->is_set, hook != NULL, memory_order_relaxed);
    while (hooks->n_running != 0) {
        kvs_cond_wait(&hooks->idle, &hooks->mutex);
    }
    kvs_mutex_unlock(&hooks->mutex);
}

int kvs_hooks_call(kvs_hooks *hooks, int point)
{
    const uint64_t index = atomic_fetch_add_explicit(&hooks->calls[point], 1, memory_order_relaxed);
    kvs_mutex_lock(&hooks->mutex);
    const kvs_hook hook = hooks->hook;
    void *user = hooks->user;
    hooks->n_running++;
    kvs_mutex_unlock(&hooks->mutex);

    const int answer = hook == NULL ? 0 : hook(user, point, index);

    kvs_mutex_lock(&hooks->mutex);
    hooks->n_running--;
    kvs_cond_wake_all(&hooks->idle);
    kvs_mutex_unlock(&hooks->mutex);
    return answer;
}
