/* array.c: arrays that belong to an object. */
#include "base/internal.h"

#include <stdlib.h>

void *kvs_array_alloc(kvs_device *device, size_t count, size_t item_bytes)
{
    if (device != NULL && kvs_hook_ask(device, KVS_HOOK_ALLOC) != KVS_OK) {
        return NULL;
    }
    /* An empty array is an address too: only a lack of memory gives NULL. */
    return calloc(count == 0 ? 1 : count, item_bytes);
}

void kvs_array_free(void *array)
{
    free(array);
}
