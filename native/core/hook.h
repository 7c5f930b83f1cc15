/* hook.h: the fault hook of a device. */
#ifndef KVS_NATIVE_CORE_HOOK_H
#define KVS_NATIVE_CORE_HOOK_H

#include "base/sync.h"
#include "kvstream/device.h"

#include <stdatomic.h>

enum { KVS_HOOK_POINTS = KVS_HOOK_FILE + 1 };

typedef struct kvs_hooks {
    _Atomic uint64_t calls[KVS_HOOK_POINTS];
    _Atomic int is_set; /* a hint that spares the mutex; the pair below decides */
    kvs_mutex mutex;
    kvs_cond idle;
    uint32_t n_running;
    kvs_hook hook;
    void *user;
} kvs_hooks;

bool kvs_hooks_init(kvs_hooks *hooks);
void kvs_hooks_destroy(kvs_hooks *hooks);

/* Replace the hook. Waits for calls of the old one to return, so that its `user` may go away
 * afterwards. */
void kvs_hooks_set(kvs_hooks *hooks, kvs_hook hook, void *user);

/* Count a call at this point and return the hook's answer. */
int kvs_hooks_call(kvs_hooks *hooks, int point);

/* The answer, 0 without a hook: then this branch is all it costs. */
static inline int kvs_hooks_ask(kvs_hooks *hooks, int point)
{
    const bool is_set = atomic_load_explicit(&hooks->is_set, memory_order_relaxed) != 0;
    return __builtin_expect(is_set, 0) ? kvs_hooks_call(hooks, point) : 0;
}

#endif
